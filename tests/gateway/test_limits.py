"""How connections and requests are counted."""

from contextlib import ExitStack

import pytest

from mooring.gateway.open_connections import (
    CONNECTIONS,
    CONNECTIONS_PER_PROJECT,
    UNAUTHENTICATED,
    UNAUTHENTICATED_PER_NETWORK,
    OpenConnections,
)
from mooring.gateway.ports.shared import REQUESTS_PER_NETWORK, REQUESTS_PER_PROJECT, OpenRequests
from mooring.gateway.ssh.windows import Windows
from mooring_client.errors import TooManyStreams


class Client:
    """A connection."""


def authenticated(opened: OpenConnections[Client], count: int, *projects: str) -> list[Client]:
    clients = [Client() for _ in range(count)]
    for number, client in enumerate(clients):
        assert opened.connected(client, f"network {number}")
        opened.authenticate(client, projects)
    return clients


def test_a_network_at_its_limit_leaves_room_for_others() -> None:
    opened: OpenConnections[Client] = OpenConnections("connections")
    first = [Client() for _ in range(UNAUTHENTICATED_PER_NETWORK)]
    assert all(opened.connected(client, "a") for client in first)
    assert not opened.connected(Client(), "a")
    assert opened.connected(Client(), "b")
    opened.lost(first[0])
    assert opened.connected(Client(), "a")


def test_connections_before_authentication_are_limited_in_total() -> None:
    opened: OpenConnections[Client] = OpenConnections("connections")
    for number in range(UNAUTHENTICATED):
        assert opened.connected(Client(), f"network {number}")
    assert not opened.connected(Client(), "another")


def test_a_project_at_its_limit_leaves_room_for_others() -> None:
    opened: OpenConnections[Client] = OpenConnections("connections")
    clients = authenticated(opened, CONNECTIONS_PER_PROJECT, "prj_a")
    late = Client()
    assert opened.connected(late, "network")
    with pytest.raises(TooManyStreams, match="close one first"):
        opened.authenticate(late, ["prj_a"])
    # A key that another project has registered too counts there.
    opened.authenticate(late, ["prj_a", "prj_b"])
    opened.lost(clients[0])
    authenticated(opened, 1, "prj_a")


def test_connections_are_limited_in_total() -> None:
    opened: OpenConnections[Client] = OpenConnections("connections")
    for number in range(CONNECTIONS // CONNECTIONS_PER_PROJECT):
        authenticated(opened, CONNECTIONS_PER_PROJECT, f"prj_{number}")
    with pytest.raises(TooManyStreams, match="this gateway"):
        authenticated(opened, 1, "prj_late")


def test_a_lost_connection_is_not_counted_any_more() -> None:
    opened: OpenConnections[Client] = OpenConnections("connections")
    clients = authenticated(opened, 2, "prj_a")
    waiting = Client()
    opened.connected(waiting, "network")
    assert set(opened) == {*clients, waiting}
    for client in [*clients, waiting, waiting]:
        opened.lost(client)
    assert len(opened) == 0


def test_requests_to_a_project_leave_room_for_others() -> None:
    requests = OpenRequests()
    with ExitStack() as open_requests:
        for number in range(REQUESTS_PER_PROJECT):
            open_requests.enter_context(requests.from_network(f"network {number}"))
            open_requests.enter_context(requests.to_project("prj_a"))
        with pytest.raises(TooManyStreams, match="the instance's project"), requests.to_project("prj_a"):
            pass
        with requests.to_project("prj_b"):
            assert len(requests) == REQUESTS_PER_PROJECT
    assert len(requests) == 0
    with requests.to_project("prj_a"):
        pass


def test_requests_of_a_network_leave_room_for_others() -> None:
    requests = OpenRequests()
    with ExitStack() as open_requests:
        for _ in range(REQUESTS_PER_NETWORK):
            open_requests.enter_context(requests.from_network("a"))
        with pytest.raises(TooManyStreams, match="your address"), requests.from_network("a"):
            pass
        with requests.from_network("b"):
            pass


def test_the_large_windows_of_a_project_and_of_all_are_limited() -> None:
    windows = Windows()
    assert [windows.take("prj_a") for _ in range(65)] == [True] * 64 + [False]
    assert windows.take("prj_b")
    for project in range(10):
        others = [windows.take(f"prj_{project}") for _ in range(64)]
    assert not any(others)
    windows.give_back("prj_a")
    assert [windows.take("prj_a") for _ in range(2)] == [True, False]
