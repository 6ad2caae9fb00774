"""When a node without contact must stop its replaceable instances, also after a restart of its agent."""

import json
import math
from pathlib import Path

import pytest

from mooring.agent.sync.identity import StateDirectory
from mooring.agent.sync.self_fence import SelfFence


class Machine:
    """A data directory, and the machine's time since its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 5000.0

    def fence(self) -> SelfFence:
        return SelfFence(StateDirectory(self.folder), lambda: self.now)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_there_is_no_fence_before_the_control_plane_names_a_time(machine: Machine) -> None:
    fence = machine.fence()
    assert fence.due_in_s() == math.inf
    fence.heard(fence.now(), None)
    assert fence.due_in_s() == math.inf


def test_the_time_counts_from_when_the_answered_report_was_made(machine: Machine) -> None:
    fence = machine.fence()
    sent_at = fence.now()
    machine.now += 7
    fence.heard(sent_at, 240)
    assert fence.due_in_s() == 233
    fence.heard(sent_at - 50, 240)  # an answer that was overtaken
    assert fence.due_in_s() == 233
    machine.now += 300
    assert fence.due_in_s() == -67
    fence.heard(fence.now(), 240)
    assert fence.due_in_s() == 240


def test_a_restart_of_the_agent_does_not_extend_the_time(machine: Machine) -> None:
    first = machine.fence()
    for _ in range(100):
        machine.now += 1
        first.heard(first.now(), 240)
    machine.now += 200
    # The file may be ten seconds older than the last contact.
    assert 30 <= machine.fence().due_in_s() <= 40
    machine.now += 41
    assert machine.fence().due_in_s() <= 0


def test_a_control_plane_without_fences_ends_the_fence(machine: Machine) -> None:
    first = machine.fence()
    first.heard(first.now(), 240)
    first.heard(first.now(), None)
    assert machine.fence().due_in_s() == math.inf


def test_a_reboot_ends_all_containers_and_the_fence(machine: Machine) -> None:
    first = machine.fence()
    first.heard(first.now(), 240)
    content = json.loads((machine.folder / "contact").read_text())
    (machine.folder / "contact").write_text(json.dumps({**content, "boot_id": "another"}))
    assert machine.fence().due_in_s() == math.inf


@pytest.mark.parametrize("content", ["", "{", "[]", '{"boot_id": 3}', "null"])
def test_a_damaged_file_is_no_contact(machine: Machine, content: str) -> None:
    (machine.folder / "contact").write_text(content)
    assert machine.fence().due_in_s() == math.inf


def test_a_full_disk_does_not_stop_the_agent(machine: Machine) -> None:
    fence = machine.fence()
    (machine.folder / "contact.new").mkdir()
    fence.heard(fence.now(), 240)
    assert fence.due_in_s() == 240
