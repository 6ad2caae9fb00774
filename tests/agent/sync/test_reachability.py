"""How often the log says that the control plane is unreachable."""

import logging
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from mooring.agent.sync.client import Unreachable
from mooring.agent.sync.reachability import Reachability
from tests.agent.control_planes import CREDENTIAL, control_plane
from tests.agent.sync.test_agent import Node
from tests.testbed.waiting import wait_until

DOWN = "cannot reach the control plane"
UP = "the control plane is reachable again"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """DOWN or UP for each line of the log about reachability."""
    messages = [record.getMessage() for record in caplog.records]
    return [known for message in messages for known in (DOWN, UP) if message.startswith(known)]


def test_the_first_failure_and_the_last_recovery_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reachability, error, failed_before = Reachability(), Unreachable("503"), time.monotonic()
    for node in ("a", "b", "a"):
        reachability.failed(node, error)
    assert lines(caplog) == [DOWN]
    reachability.succeeded("b", failed_before)  # a long poll that was sent before the failure
    for node in ("c", "a", "a"):
        reachability.succeeded(node, time.monotonic())
    assert lines(caplog) == [DOWN]
    reachability.succeeded("b", time.monotonic())
    reachability.succeeded("b", time.monotonic())
    assert lines(caplog) == [DOWN, UP]


def test_a_fleet_logs_one_line_at_an_outage_of_the_server_and_one_when_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shared = Reachability()
    with control_plane() as server, ExitStack() as stack:
        for number in range(3):
            node = Node(server, tmp_path / str(number))
            own = {"node_id": f"nod_{number}", "credential": SecretStr(f"{CREDENTIAL}nod_{number}")}
            node.identity = node.identity.model_copy(update=own)
            node.reachability = shared
            stack.callback(node.end)
            node.begin()
        wait_until(lambda: server.sessions == 3)
        server.failure = (503, "database_unavailable")
        calls = server.calls
        # Each node tries several times. More tries would take longer than the test waits: pauses double.
        wait_until(lambda: server.calls > calls + 9)
        assert lines(caplog) == [DOWN]
        server.failure = None
        wait_until(lambda: UP in lines(caplog))
        reports = len(server.reports)
        wait_until(lambda: len(server.reports) > reports + 10)
        assert lines(caplog) == [DOWN, UP]
