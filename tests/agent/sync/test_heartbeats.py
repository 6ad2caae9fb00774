"""When an agent sends heartbeats instead of reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync import confirmed_report
from mooring.agent.sync.confirmed_report import ConfirmedReport
from mooring.core.node import NodeFacts
from mooring.schemas.agent import Incident, SyncAnswer, SyncRequest
from tests.agent.agents import agent_with
from tests.agent.builders import assignment
from tests.agent.control_planes import TinyControlPlane
from tests.testbed.waiting import wait_until

REVISION = 7


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[TinyControlPlane]:
    """The control plane of an agent that sends heartbeats."""
    reader = SimulatedGpuReader("gpu-1", 2)
    with agent_with(SimulatedRuntime(start_s=0), reader, reader.container_of, tmp_path) as server:
        server.revision = REVISION
        wait_until(lambda: server.heartbeats)
        yield server


def _reports_during(plane: TinyControlPlane, heartbeats: int) -> int:
    """The number of reports until there are so many further heartbeats."""
    reports, wanted = len(plane.reports), len(plane.heartbeats) + heartbeats
    wait_until(lambda: len(plane.heartbeats) >= wanted)
    return len(plane.reports) - reports


def test_unchanged_reports_become_heartbeats_with_samples(plane: TinyControlPlane) -> None:
    _reports_during(plane, 2)  # the engine's facts may still be reported
    assert _reports_during(plane, 5) <= 1
    beat, report = plane.heartbeats[-1], plane.last()
    assert report is not None
    assert (beat.session, beat.seq, beat.generation) == (report.session, report.seq, report.generation)
    assert beat.revision == REVISION
    assert {each.uuid for each in beat.samples} == {each.uuid for each in report.gpus or ()}


def test_a_change_of_the_desired_state_is_applied_and_reported(plane: TinyControlPlane) -> None:
    instance = assignment()
    plane.wants(instance)
    wait_until(lambda: plane.phase(instance) == "running")
    _reports_during(plane, 2)
    assert plane.heartbeats[-1].generation == plane.generation


def test_a_report_is_sent_when_the_control_plane_wants_one(plane: TinyControlPlane) -> None:
    """Because it knows another revision of the node."""
    reports = len(plane.reports)
    with plane.changed:
        plane.revision = REVISION + 1
        plane.changed.notify_all()
    wait_until(lambda: len(plane.reports) > reports)
    wait_until(lambda: plane.heartbeats[-1].revision == REVISION + 1)


def test_a_replica_without_heartbeats_gets_reports(plane: TinyControlPlane) -> None:
    plane.heartbeat_status = 404
    reports = len(plane.reports)
    wait_until(lambda: len(plane.reports) >= reports + 3)


def test_a_heartbeat_that_fails_is_sent_again(plane: TinyControlPlane) -> None:
    """Not a report: after an outage, the reports of all nodes at once would be ten times the work."""
    _reports_during(plane, 2)  # the engine's facts may still be reported
    reports, plane.heartbeat_status = len(plane.reports), 503
    wait_until(lambda: plane.failed_heartbeats >= 3)
    plane.heartbeat_status = 200
    _reports_during(plane, 2)
    assert len(plane.reports) - reports <= 1


def test_a_heartbeat_answered_for_another_node_is_an_error(
    plane: TinyControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane.heartbeat_node_id = "nod_2"
    wait_until(lambda: "the answer is for the node nod_2" in caplog.text)
    plane.heartbeat_node_id = "nod_1"
    assert _reports_during(plane, 3) <= 1


def test_a_control_plane_of_an_earlier_release_gets_reports_only(tmp_path: Path) -> None:
    reader = SimulatedGpuReader("gpu-1", 2)
    with agent_with(SimulatedRuntime(start_s=0), reader, reader.container_of, tmp_path) as server:
        wait_until(lambda: len(server.reports) >= 4)
        assert not server.heartbeats


def test_stored_heartbeats_are_contacts_for_the_self_fence(plane: TinyControlPlane, tmp_path: Path) -> None:
    plane.self_fence_s = 1234.0
    wait_until(lambda: (tmp_path / "contact").exists() and "1234" in (tmp_path / "contact").read_text())


def _request(seq: int, **fields: object) -> SyncRequest:
    facts = NodeFacts(hostname="h", address="127.0.0.1", cpus=1, memory_mib=1024, agent_version="1")
    known = {"session": 1, "seq": seq, "generation": 3, "facts": facts, "gpus": [], "instances": []}
    return SyncRequest.model_validate({**known, **fields})


def _answer(revision: int | None = REVISION, *, brief: bool = False) -> SyncAnswer:
    return SyncAnswer(
        control_plane_id="cpl",
        node_id="nod",
        generation=3,
        report_interval_s=5,
        revision=revision,
        brief=brief,
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 4},
        {"session": 2},
        {"gpus": None},
        {"instances": None},
        {"specs": {"ins_1": "1.1"}},
        {"problem": {"code": "c", "message": "m"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_only_a_report_of_the_same_state_becomes_a_heartbeat(changed: dict[str, object]) -> None:
    last = ConfirmedReport()
    assert last.instead_of(_request(1)) is None
    last.confirmed(_request(1), _answer())
    same = last.instead_of(_request(2, wait_s=5, brief=True))
    assert same is not None
    assert (same.seq, same.wait_s) == (1, 5)
    assert last.instead_of(_request(2, **changed)) is None


def test_heartbeats_refer_to_the_newest_confirmed_report() -> None:
    last = ConfirmedReport()
    last.confirmed(_request(5), _answer())
    last.confirmed(_request(4), _answer())  # answered later
    beat = last.instead_of(_request(6))
    assert beat is not None
    assert beat.seq == 5
    last.confirmed(_request(7), _answer(None))
    assert last.instead_of(_request(8)) is None


def test_a_brief_answer_does_not_confirm_a_report() -> None:
    """It lacks the removals of containers that the report lists for the first time."""
    last = ConfirmedReport()
    last.confirmed(_request(1), _answer())
    last.confirmed(_request(2), _answer(brief=True))
    assert last.instead_of(_request(3)) is None
    last.confirmed(_request(3), _answer())
    assert last.instead_of(_request(4)) is not None


def test_incidents_are_always_reported() -> None:
    incident = Incident(id="1", uuid="GPU-1", code="c", message="m")
    last = ConfirmedReport()
    last.confirmed(_request(1, faults=[incident]), _answer())
    assert last.instead_of(_request(2, faults=[incident])) is None


def test_a_report_is_sent_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmed_report, "REPORT_EVERY_S", -1.0)
    last = ConfirmedReport()
    last.confirmed(_request(1), _answer())
    assert last.instead_of(_request(2)) is None
