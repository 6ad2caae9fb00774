"""Signals go to processes of the container only: pids are reused, and mean other processes elsewhere."""

import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from mooring.agent.docker.streams import processes
from tests.testbed.waiting import wait_until

OTHER_CONTAINER = "0123456789ab" * 5 + "cdef"


@pytest.fixture
def foreign() -> Iterator[psutil.Process]:
    """A process that is in no container, in a process group of its own."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as started:
        process = psutil.Process(started.pid)
        wait_until(lambda: process.status() == psutil.STATUS_SLEEPING)
        yield process
        started.kill()


def test_a_process_outside_of_the_container_is_not_killed(foreign: psutil.Process) -> None:
    assert not processes.kill_tree(foreign.pid, OTHER_CONTAINER)
    assert foreign.status() == psutil.STATUS_SLEEPING  # it was not stopped either


def test_a_process_outside_of_the_container_gets_no_signal(foreign: psutil.Process) -> None:
    assert not processes.signal_group(foreign.pid, signal.SIGTERM, OTHER_CONTAINER)
    assert foreign.status() == psutil.STATUS_SLEEPING


def test_a_process_that_has_ended_needs_no_signal() -> None:
    none = max(psutil.pids()) + 1_000_000
    assert processes.kill_tree(none, OTHER_CONTAINER)
    assert not processes.signal_group(none, signal.SIGTERM, OTHER_CONTAINER)
    assert processes.environment_of(none) == {}
