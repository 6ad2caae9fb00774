"""The whole agent with a simulated engine and GPUs, against a control plane on real HTTP."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mooring.agent.gpus.reader import GpuReader, GpuReading
from mooring.agent.gpus.telemetry import Machine
from mooring.agent.nvml.types import GpuEvent
from mooring.agent.runtime import Cancelled, Container, Progress, StartRefused
from mooring.agent.simulated.gpus import GpuUser, SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.exchange import NO_CHANGE_PAUSE_S
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from mooring.agent.sync.reachability import Reachability
from mooring.agent.sync.stop_times import StopTimes
from mooring.agent.sync.worker_pools import WAITING_OF_PROJECT, WorkerPools
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment, Removal, SyncRequest
from mooring.schemas.agent_streams import LogsRequest, StreamRequest
from tests.agent.builders import assignment
from tests.agent.control_planes import TOKEN, TinyControlPlane, control_plane
from tests.agent.gpus.test_telemetry import FixedReader
from tests.testbed.waiting import wait_until

HUNG_S = 600.0


class CountingRuntime(SimulatedRuntime):
    """Counts what it is asked to do."""

    def __init__(self, start_s: float = 0) -> None:
        super().__init__(start_s=start_s)
        self.asked: list[tuple[str, str]] = []
        self.refusal: StartRefused | None = None
        self.ignores_stop_signals = False
        self.hangs: set[str] = set()  # the projects whose starts do
        self.may_remove = threading.Event()
        self.may_remove.set()

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        self.asked.append(("start", assignment.instance_id))
        if self.refusal is not None:
            raise self.refusal
        if assignment.project_id in self.hangs:
            self._wait(HUNG_S, lambda: cancelled() or assignment.project_id not in self.hangs)
        return super().start(assignment, progress, cancelled)

    def restart(self, container: Container) -> None:
        self.asked.append(("restart", container.instance_id))
        super().restart(container)

    def begin_stop(self, container: Container) -> bool:
        self.asked.append(("stop", container.instance_id))
        return True if self.ignores_stop_signals else super().begin_stop(container)

    def kill(self, container: Container) -> None:
        self.asked.append(("kill", container.instance_id))
        super().kill(container)

    def remove(self, container: Container) -> None:
        self.asked.append(("remove", container.instance_id))
        assert self.may_remove.wait(10)
        super().remove(container)


class Node:
    """A joined node, and the agents that run on it one after the other."""

    def __init__(self, server: TinyControlPlane, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.runtime = CountingRuntime()
        self.pools = WorkerPools.default()
        simulated = SimulatedGpuReader("gpu-1", 2, users=self._gpu_users)
        self.gpus: GpuReader = simulated
        self._container_of = simulated.container_of
        joining = ControlPlaneClient(server.url)
        self.identity = NodeIdentity.from_answer(joining.join(TOKEN, "gpu-1", "host-1"))
        joining.close()
        StateDirectory(directory).save_joined(self.identity)
        self.exit_codes: list[int] = []
        self.reachability = Reachability()
        self._agents: list[tuple[Agent, threading.Thread, ControlPlaneClient]] = []

    def begin(self) -> Agent:
        calls = ControlPlaneClient(self.server.url)
        calls.identify(self.identity)
        agent = Agent(
            identity=self.identity,
            state=StateDirectory(self.directory),
            runtime=self.runtime,
            gpus=self.gpus,
            control_plane=calls,
            machine=Machine("host-1", "10.0.0.7", {"zone": "a"}),
            container_of=self._container_of,
            pools=self.pools,
            reachability=self.reachability,
        )
        thread = threading.Thread(target=lambda: self.exit_codes.append(agent.run()))
        thread.start()
        self._agents.append((agent, thread, calls))
        return agent

    def end(self) -> None:
        self.server.hang_up()
        for agent, thread, calls in self._agents:
            agent.stop()
            thread.join(5)
            assert not thread.is_alive()
            calls.close()
        self.runtime.close()

    def idle(self) -> bool:
        """Whether no action is queued or running."""
        pools = self.pools
        return pools.starts.idle and pools.endings.idle

    def _gpu_users(self, uuid: str) -> list[GpuUser]:
        return self.runtime.gpu_users(uuid)  # of the runtime of now: some tests exchange it

    def uuid(self, index: int = 0) -> str:
        return (self.gpus.latest().inventory or ())[index]["uuid"]

    def running(self, asked: Assignment) -> None:
        """Wait until the control plane has a report that it runs."""
        wait_until(lambda: self.server.phase(asked) == "running")

    def report(self, shows: Callable[[SyncRequest], bool]) -> SyncRequest:
        """The newest report, once it shows this."""

        def newest() -> SyncRequest | None:
            report = self.server.last()
            return report if report and shows(report) else None

        return wait_until(newest)

    def heard_again(self, times: int = 3) -> None:
        """Wait for some more reports, so that earlier answers have taken effect."""
        count = len(self.server.reports) + times
        wait_until(lambda: len(self.server.reports) >= count)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with control_plane() as server:
        made = Node(server, tmp_path)
        yield made
        made.end()


def gone(asked: Assignment) -> Removal:
    return Removal(instance_id=asked.instance_id, attempt=asked.attempt, stop_timeout_s=1)


def test_an_instances_whole_life(node: Node) -> None:
    node.begin()
    asked = assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(asked)
    node.running(asked)
    node.server.wants(asked.model_copy(update={"want": "stopped", "may_start": False}))
    wait_until(lambda: node.server.phase(asked) == "exited")
    node.server.wants(removals=(gone(asked),))
    node.report(lambda report: report.generation == node.server.generation and report.instances == [])
    assert [what for what, _ in node.runtime.asked] == ["start", "stop", "remove"]


def test_the_first_report_is_complete(node: Node) -> None:
    node.begin()
    # Not always the first to come: the poll thread's call and the push thread's may cross.
    (first,) = wait_until(lambda: [report for _, report in node.server.reports if report.seq == 1])
    assert (first.session, first.generation, first.wait_s) == (1, 0, 0)
    assert (first.facts.hostname, first.facts.address, first.facts.labels) == (
        "host-1",
        "10.0.0.7",
        {"zone": "a"},
    )
    assert first.facts.simulated_containers and first.facts.simulated_gpus
    assert first.problem is None
    assert first.gpus is not None and len(first.gpus) == len(first.samples) == 2
    assert (first.instances, first.orphans) == ([], [])


def test_reports_rise_and_come_at_the_interval_asked_for(node: Node) -> None:
    node.begin()
    node.heard_again(6)
    at, reports = zip(*node.server.reports, strict=True)
    # Each number once; of two calls that cross, the server skips the older report.
    assert sorted(report.seq for report in reports) == list(range(1, len(reports) + 1))
    assert (at[-1] - at[2]) / (len(at) - 3) > 0.15


def test_processes_on_a_gpu_name_their_instance(node: Node) -> None:
    node.begin()
    asked = assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(asked)
    node.running(asked)
    report = node.report(lambda report: any(sample.processes for sample in report.samples))
    named = [one.instance_id for sample in report.samples for one in sample.processes or ()]
    assert named == [asked.instance_id]


def test_a_lower_generation_is_rejected_and_reported(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked, generation=9)
    node.running(asked)
    node.server.wants(removals=(gone(asked),), generation=8)
    report = node.report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "generation_regressed"
    node.heard_again()
    assert node.server.phase(asked) == "running"
    node.server.wants(removals=(gone(asked),), generation=10)
    node.report(lambda report: report.problem is None and report.instances == [])


def test_the_highest_generation_outlives_the_agent(node: Node) -> None:
    asked = assignment()
    node.begin()
    node.server.wants(asked, generation=9)
    node.running(asked)
    assert StateDirectory(node.directory).generation() == 9
    node.begin()
    node.server.wants(removals=(gone(asked),), generation=3)
    report = node.report(lambda report: report.session == 2 and report.problem is not None)
    assert (report.generation, report.problem and report.problem.code) == (0, "generation_regressed")
    node.heard_again()
    assert ("stop", asked.instance_id) not in node.runtime.asked


def test_another_control_planes_answers_are_rejected(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.control_plane_id = "cpl_stranger"
    node.server.wants(removals=(gone(asked),))
    report = node.report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "foreign_control_plane"
    node.heard_again()
    assert node.server.phase(asked) == "running"


def test_calls_after_a_rejected_answer_are_paced(node: Node) -> None:
    node.server.control_plane_id = "cpl_stranger"
    node.identity = node.identity.model_copy(update={"control_plane_id": "cpl_tests"})
    node.begin()
    began = time.monotonic()
    wait_until(lambda: node.server.calls >= 4)
    assert time.monotonic() - began > 0.2
    assert node.server.reports == []


def test_a_second_agent_of_this_node_ends_the_first(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.failure = (409, "stale_session")
    wait_until(lambda: node.exit_codes == [3])
    assert node.runtime.containers()[0][0].status == "running"
    assert node.runtime.asked == [("start", asked.instance_id)]


def test_what_ends_after_the_agent_was_taken_over_leads_to_nothing(node: Node) -> None:
    node.begin()
    first = assignment()
    second = first.model_copy(update={"attempt": 2})
    node.server.wants(first)
    node.running(first)
    node.runtime.may_remove.clear()
    node.server.wants(second, removals=(gone(first),))
    wait_until(lambda: ("remove", first.instance_id) in node.runtime.asked)
    node.server.failure = (409, "stale_session")
    wait_until(lambda: node.exit_codes == [3])
    before = list(node.runtime.asked)
    node.runtime.may_remove.set()  # it made room for the second attempt, which is another agent's to start
    wait_until(lambda: node.runtime.containers() == ([], []))
    wait_until(node.idle)
    assert node.runtime.asked == before


def test_a_rejected_credential_ends_the_agent(node: Node) -> None:
    node.begin()
    node.server.failure = (401, "unauthorized")
    wait_until(lambda: node.exit_codes == [4])


def test_without_an_engine_everything_is_unknown_and_nothing_is_done(node: Node) -> None:
    node.begin()
    asked, other = assignment(), assignment()
    node.server.wants(asked)
    node.running(asked)
    node.runtime.unavailable = True
    node.server.wants(other, removals=(gone(asked),))  # its failure is what makes the agent look
    report = node.report(lambda report: report.instances is None)
    assert report.problem is not None and report.problem.code == "docker_unavailable"
    node.heard_again()
    assert node.runtime.asked.count(("start", other.instance_id)) <= 1
    node.runtime.unavailable = False
    node.running(other)
    node.report(lambda report: report.problem is None and len(report.instances or ()) == 1)


def test_an_unreachable_control_plane_changes_nothing(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.failure = (503, "database_unavailable")
    calls = node.server.calls
    wait_until(lambda: node.server.calls > calls + 2)
    assert node.runtime.containers()[0][0].status == "running"
    node.server.failure = None
    node.heard_again(1)
    assert node.server.phase(asked) == "running"


def test_a_new_agent_adopts_what_runs(node: Node) -> None:
    first, asked = node.begin(), assignment()
    node.server.wants(asked)
    node.running(asked)
    first.stop()
    node.begin()
    report = node.report(lambda report: report.session == 2)
    assert [one.phase for one in report.instances or ()] == ["running"]
    node.report(lambda report: report.session == 2 and report.generation > 0)
    node.heard_again()
    assert node.runtime.asked == [("start", asked.instance_id)]
    assert report.orphans == []


def test_an_orphan_is_reported_and_left_running(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.wants()
    report = node.report(lambda report: bool(report.orphans))
    assert report.orphans[0].instance_id == asked.instance_id
    node.heard_again()
    assert node.runtime.asked == [("start", asked.instance_id)]


def test_a_pull_that_hangs_is_cancelled_and_delays_nothing(node: Node) -> None:
    node.runtime = CountingRuntime(start_s=HUNG_S)
    node.begin()
    asked = assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(asked)
    report = node.report(lambda report: bool(report.instances))
    wait_until(lambda: node.server.phase(asked) == "starting")
    seen = node.report(lambda report: bool(report.instances and report.instances[0].reason))
    assert seen.instances is not None and seen.instances[0].reason is not None
    node.heard_again()  # the heartbeat goes on
    assert node.report(lambda _: True).seq > report.seq
    node.server.wants(removals=(gone(asked),))
    node.report(lambda report: report.generation == node.server.generation and report.instances == [])


def test_progress_is_reported_while_it_is_being_made(node: Node) -> None:
    node.runtime = CountingRuntime(start_s=HUNG_S)
    node.begin()
    asked = assignment()
    node.server.wants(asked)

    def code() -> str | None:
        seen = node.server.instances().get((asked.instance_id, 1))
        return seen.reason.code if seen and seen.reason else None

    wait_until(lambda: code() == "pulling_image")


def test_hung_starts_do_not_keep_anything_from_being_stopped(node: Node) -> None:
    node.begin()
    kept = assignment()
    node.server.wants(kept)
    node.running(kept)
    node.runtime._start_s = HUNG_S
    hung = [assignment() for _ in range(40)]
    node.server.wants(kept, *hung)
    node.report(lambda report: len(report.instances or ()) == 41)
    node.server.wants(*hung, removals=(gone(kept),))
    wait_until(lambda: node.server.phase(kept) is None)


def test_hung_starts_delay_no_start_stop_or_removal_of_another_project(node: Node) -> None:
    node.runtime.hangs = {"prj_1"}
    node.begin()
    kept = assignment(project_id="prj_2")
    hung = [assignment() for _ in range(200)]
    node.server.wants(*hung)
    node.report(lambda report: len(report.instances or ()) == 200)
    node.server.wants(kept, *hung)
    node.running(kept)
    node.server.wants(*hung, removals=(gone(kept),))
    wait_until(lambda: node.server.phase(kept) is None)


def test_two_pulls_of_a_project_run_at_a_time_and_leave_its_starts_alone(node: Node) -> None:
    node.runtime._pull_s = HUNG_S
    node.runtime._images.add("there:1")
    node.begin()
    pulling = [assignment(image=f"slow-{number}:1") for number in range(8)]
    node.server.wants(*pulling)
    node.report(lambda report: len(report.instances or ()) == 8)
    there = assignment(image="there:1")
    node.server.wants(*pulling, there)
    node.running(there)
    messages = [one.reason.message for one in node.server.instances().values() if one.reason]
    assert sum("waiting for its turn" in message for message in messages) == 6
    # Deleted, one that waits for its turn is gone at once, and so is one that is being pulled.
    node.server.wants(there, removals=tuple(gone(one) for one in pulling))
    node.report(lambda report: len(report.instances or ()) == 1)


def test_starts_beyond_a_projects_queue_wait_and_are_started_in_the_end(node: Node) -> None:
    node.runtime.hangs = {"prj_1"}
    node.begin()
    asked = [assignment() for _ in range(WAITING_OF_PROJECT + 20)]
    node.server.wants(*asked)
    report = node.report(lambda report: len(report.instances or ()) == len(asked))
    codes = Counter(one.reason.code for one in report.instances or () if one.reason)
    assert codes["node_busy"] > 0
    assert {one.phase for one in report.instances or ()} == {"starting"}
    node.runtime.hangs = set()
    wait_until(lambda: {node.server.phase(one) for one in asked} == {"running"}, 30)


def test_a_stubborn_program_is_killed_when_its_time_is_over(node: Node) -> None:
    node.runtime.ignores_stop_signals = True
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    began = time.monotonic()
    node.server.wants(removals=(gone(asked),))
    wait_until(lambda: node.server.phase(asked) is None)
    assert time.monotonic() - began >= 1
    assert [what for what, _ in node.runtime.asked] == ["start", "stop", "kill", "remove"]


def test_a_restarted_agent_keeps_the_timeout_of_a_stop(node: Node) -> None:
    node.runtime.ignores_stop_signals = True
    first, asked = node.begin(), assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.wants(removals=(Removal(instance_id=asked.instance_id, attempt=1, stop_timeout_s=2),))
    stops = StopTimes(StateDirectory(node.directory))
    wait_until(stops.load)
    (since,) = stops.load().values()
    first.stop()
    node.begin()
    wait_until(lambda: ("kill", asked.instance_id) in node.runtime.asked)
    assert 2 <= time.monotonic() - since < 4
    assert [what for what, _ in node.runtime.asked[:3]] == ["start", "stop", "kill"]


def test_a_gpu_is_reused_only_when_its_container_is_gone(node: Node) -> None:
    node.begin()
    first, second = assignment(gpu_uuids=(node.uuid(),)), assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(first)
    node.running(first)
    node.server.wants(second, removals=(gone(first),))
    node.running(second)
    [stop, start] = [one for one in node.runtime.asked[1:] if one[0] != "remove"]
    assert (stop, start) == (("stop", first.instance_id), ("start", second.instance_id))


def test_restarts_with_a_pause(node: Node) -> None:
    node.begin()
    asked = assignment(command=["sh", "-c", "exit 3"], restart="on_failure")
    node.server.wants(asked)
    wait_until(lambda: ("restart", asked.instance_id) in node.runtime.asked)
    waiting = next(
        one
        for _, report in node.server.reports
        for one in report.instances or ()
        if one.reason and one.reason.code == "restarting"
    )
    assert waiting.phase == "starting"
    assert waiting.reason is not None and "exit code 3; restart 1 follows 1 s" in waiting.reason.message
    assert "exited" not in {one.phase for _, report in node.server.reports for one in report.instances or ()}


def test_a_refusal_is_reported_until_the_assignment_goes(node: Node) -> None:
    node.begin()
    asked = assignment(image="missing:1")
    node.server.wants(asked)
    wait_until(lambda: node.server.phase(asked) == "refused")
    node.heard_again()
    assert node.runtime.asked == [("start", asked.instance_id)]
    node.server.wants()
    node.report(lambda report: report.instances == [])


def test_a_lost_container_is_not_started_again(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    SimulatedRuntime.remove(node.runtime, node.runtime.containers()[0][0])
    node.report(lambda report: report.instances == [])
    node.heard_again()
    assert node.runtime.asked == [("start", asked.instance_id)]


def test_an_exit_is_reported_at_once(node: Node) -> None:
    node.server.report_interval_s = 30
    node.begin()
    asked = assignment(command=["sleep", "0.3"])
    node.server.wants(asked)
    began = time.monotonic()
    wait_until(lambda: node.server.phase(asked) == "exited")
    assert time.monotonic() - began < 3


def test_incidents_are_repeated_until_a_report_of_them_is_answered(node: Node) -> None:
    node.begin()
    asked = assignment(gpu_uuids=(node.uuid(),))
    wrong = Reason(code="wrong_gpus", message="It got other cards")
    node.runtime.refusal = StartRefused(wrong, wrong_gpus=True)
    node.heard_again(1)

    class Deaf(list[tuple[float, SyncRequest]]):
        """Receives the report and fails before it answers, three times."""

        def append(self, report: tuple[float, SyncRequest]) -> None:
            super().append(report)
            if report[1].incidents and sum(bool(one.incidents) for _, one in self) <= 3:
                raise OSError("no answer")

    node.server.reports = Deaf()
    node.server.wants(asked)
    wait_until(lambda: sum(bool(one.incidents) for _, one in node.server.reports) >= 4)
    node.report(lambda report: not report.incidents)
    incidents = {one.id: one for _, report in node.server.reports for one in report.incidents}
    [incident] = incidents.values()
    assert (incident.uuid, incident.code) == (node.uuid(), "wrong_gpus")


def _event(uuid: str | None, code: str) -> GpuEvent:
    return {
        "uuid": uuid, "code": code, "mig_uuids": [], "count": 1, "first_at": "then", "last_at": "then"
    }  # fmt: skip


def test_hardware_xids_are_incidents_and_application_xids_are_not(node: Node) -> None:
    reader = FixedReader(node.gpus.latest())
    node.gpus = reader
    node.begin()
    node.heard_again(1)
    reader.reading = replace(
        reader.reading,
        events=(
            _event(node.uuid(0), "xid_31"),
            _event(node.uuid(1), "xid_79"),
            _event(None, "xid_79"),
        ),
    )
    report = node.report(lambda report: bool(report.incidents))
    assert [(one.uuid, one.code) for one in report.incidents] == [(node.uuid(1), "xid_79")]
    assert [(one.uuid, one.code) for one in report.faults] == [(node.uuid(0), "xid_31")]
    node.report(lambda report: not report.incidents)
    count = len(node.server.reports)
    node.heard_again()
    assert not any(report.incidents for _, report in node.server.reports[count:])


def test_unreadable_gpus_are_a_problem_and_still_listed(node: Node) -> None:
    reader = FixedReader(node.gpus.latest())
    node.gpus = reader
    node.begin()
    node.heard_again(1)
    reader.reading = replace(
        reader.reading, samples=(), error={"code": "nvml_hung", "message": "No answer in 10 s"}
    )
    report = node.report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "nvml_hung"
    assert report.gpus is not None and len(report.gpus) == 2


def test_gpus_that_were_never_read_are_unknown(node: Node) -> None:
    node.gpus = FixedReader(GpuReading(0, error={"code": "driver_not_loaded", "message": "…"}))
    node.begin()
    report = node.report(lambda report: report.problem is not None)
    assert report.gpus is None


def test_a_disk_that_is_full_is_a_problem_and_stops_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateDirectory, "save_generation", full)
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    report = node.report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "state_not_saved"


def logs_of(asked: Assignment) -> StreamRequest:
    logs = LogsRequest(tail=None, since=None, follow=False)
    return StreamRequest(id="str_1", instance_id=asked.instance_id, attempt=1, url=None, logs=logs)


@pytest.mark.parametrize("earlier_release", [False, True])
def test_logs_are_streamed_when_they_are_asked_for(node: Node, earlier_release: bool) -> None:
    """A control plane of an earlier release asks for them with its answers to reports."""
    node.server.earlier_release = earlier_release
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.ask(logs_of(asked))
    wait_until(lambda: any(frame.end for frame in node.server.uploads.get("str_1", ())))


def test_a_stream_of_another_node_is_not_served(node: Node) -> None:
    """A proxy delivered the answer to the wrong node."""
    node.begin()
    asked = assignment()
    node.server.wants(asked)
    node.running(asked)
    node.server.streams_for = "nod_2"
    node.server.ask(logs_of(asked))
    wait_until(lambda: node.server.asked_for_streams >= 2)
    assert node.server.uploads == {}
    node.server.streams_for = "nod_1"
    wait_until(lambda: "str_1" in node.server.uploads)


def test_a_lower_generation_gets_full_reports_and_no_streams(node: Node) -> None:
    node.begin()
    asked = assignment()
    node.server.wants(asked, generation=9)
    node.running(asked)
    node.server.wants(asked, generation=8)
    node.report(lambda report: report.problem is not None)
    reported, calls = len(node.server.reports), node.server.asked_for_streams
    node.server.ask(logs_of(asked))
    (container,), _ = node.runtime.containers()
    node.runtime.kill(container)
    wait_until(lambda: node.server.phase(asked) == "exited" and node.server.asked_for_streams >= calls + 2)
    assert not any(report.brief for _, report in node.server.reports[reported:])
    assert node.server.uploads == {}
    node.server.wants(asked, generation=10)
    wait_until(lambda: "str_1" in node.server.uploads)


def test_stream_requests_to_a_server_that_shuts_down_are_paced(node: Node) -> None:
    node.begin()
    node.heard_again(1)
    node.server.hang_up()
    asked, began = node.server.asked_for_streams, time.monotonic()
    wait_until(lambda: node.server.asked_for_streams >= asked + 4)
    assert time.monotonic() - began > 2 * NO_CHANGE_PAUSE_S


def test_a_brief_answer_takes_nothing_from_the_node(node: Node) -> None:
    """That it ended is answered briefly, and the restart that follows 1 s later needs its assignment."""
    node.server.report_interval_s = 30  # no whole answer comes meanwhile
    node.begin()
    asked = assignment(command=["sh", "-c", "exit 3"], restart="on_failure")
    node.server.wants(asked)
    wait_until(lambda: ("restart", asked.instance_id) in node.runtime.asked)
    assert any(report.brief for _, report in node.server.reports)


def test_an_idle_agent_makes_one_call_per_interval(node: Node) -> None:
    node.server.report_interval_s = 0.5
    node.begin()
    node.heard_again(3)
    calls, began = node.server.calls, time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2)
    assert 3 <= node.server.calls - calls <= 6
