"""Containers of Docker clients and links to ports, changed by two gateways at the same time."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from mooring.control.instances import docker_containers, port_links
from mooring.core import ids
from mooring.core.access import SYSTEM
from mooring.db.tables import DockerContainer, PortLink
from mooring.db.types import new_id, now
from mooring_client.errors import MooringError
from tests.concurrency import run_concurrently
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases

AT_ONCE = 8


def _create(service: RunningService, name: str) -> str:
    with service.plane.database.write() as session:
        row = docker_containers.create(session, SYSTEM, None, name, {"name": name}, {}, auto_remove=False)
        return row.id


def _rename(service: RunningService, container_id: str, name: str) -> str:
    with service.plane.database.write() as session:
        docker_containers.rename(session, container_id, name, name)
    return container_id


def _outcome(act: Callable[[], object]) -> str:
    """`done`, or the code of the error."""
    try:
        act()
    except MooringError as error:
        return error.code
    return "done"


def test_one_of_several_creates_gets_the_name(service: RunningService) -> None:
    found = run_concurrently(AT_ONCE, lambda _n: _outcome(partial(_create, service, "one")))
    assert Counter(found) == {"done": 1, "name_taken": AT_ONCE - 1}


def test_one_of_renames_and_creates_gets_the_name(service: RunningService) -> None:
    others = [_create(service, f"other-{number}") for number in range(AT_ONCE // 2)]

    def act(number: int) -> str:
        if number < len(others):
            return _outcome(partial(_rename, service, others[number], "wanted"))
        return _outcome(partial(_create, service, "wanted"))

    assert Counter(run_concurrently(AT_ONCE, act)) == {"done": 1, "name_taken": AT_ONCE - 1}


def test_the_limit_of_containers_that_are_not_started_holds(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_containers, "MOST_NOT_STARTED", 3)
    found = run_concurrently(AT_ONCE, lambda number: _outcome(partial(_create, service, f"c-{number}")))
    assert Counter(found) == {"done": 3, "too_many": AT_ONCE - 3}


def test_a_container_is_either_started_or_removed(service: RunningService) -> None:
    def start(container_id: str, instance_id: str) -> bool:
        with service.plane.database.write() as session:
            return docker_containers.started(session, container_id, instance_id)

    def remove(container_id: str) -> bool:
        with service.plane.database.write() as session:
            return docker_containers.remove(session, container_id, None)

    for number in range(10):
        made = _create(service, f"box-{number}")
        acts = (partial(start, made, new_id(ids.INSTANCE)), partial(remove, made))
        started, removed = run_concurrently(2, lambda index, acts=acts: acts[index]())  # type: ignore[misc]
        assert started != removed
        with service.plane.database.read() as session:
            assert (session.get(DockerContainer, made) is None) == removed


def test_a_rename_of_a_removed_container_is_not_found(service: RunningService) -> None:
    def remove(container_id: str) -> str:
        with service.plane.database.write() as session:
            docker_containers.remove(session, container_id, None)
        return "done"

    for number in range(10):
        made = _create(service, f"box-{number}")
        acts = (
            partial(_outcome, partial(_rename, service, made, f"new-{number}")),
            partial(remove, made),
        )
        renamed, removed = run_concurrently(2, lambda index, acts=acts: acts[index]())  # type: ignore[misc]
        assert renamed in {"done", "not_found"}
        assert removed == "done"


def test_one_of_several_uses_of_a_link_succeeds(service: RunningService, client: Client) -> None:
    made = client.create(gpus={"count": 1})
    link_id = new_id(ids.PORT_LINK)
    with service.plane.database.write() as session:
        later = now() + timedelta(hours=1)
        session.add(PortLink(id=link_id, instance_id=made["id"], expires_at=later))

    def use(_number: int) -> bool:
        with service.plane.database.write() as session:
            return port_links.use(session, link_id)

    assert Counter(run_concurrently(AT_ONCE, use)) == {True: 1, False: AT_ONCE - 1}


def test_the_limit_of_unused_links_holds(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_links, "MAX_UNUSED", 3)
    made = client.create(gpus={"count": 1}, ports=[{"container": 80, "expose": "proxy"}])
    path = f"/v1/instances/{made['id']}/ports/80/links"
    found = run_concurrently(AT_ONCE, lambda _n: client.post(path, json={"ttl_s": 60}).status_code)
    assert Counter(found) == {201: 3, 409: AT_ONCE - 3}
