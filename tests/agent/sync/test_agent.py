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
from mooring.agent.runtime import Cancelled, Container, Progress, StartDelayed, StartRefused
from mooring.agent.simulated.gpus import GpuUser, SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync import agent_state
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.exchange import NO_CHANGE_PAUSE_S
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from mooring.agent.sync.reachability import Reachability
from mooring.agent.sync.stop_times import StopTimes
from mooring.agent.sync.worker_pools import WAITING_OF_PROJECT, WorkerPools
from mooring.schemas.agent import Assignment, Removal, SyncRequest
from mooring.schemas.agent_streams import LogsRequest, StreamRequest, StreamStatus
from mooring_client.schemas.states import Reason
from tests.agent.builders import assignment
from tests.agent.control_planes import OWN, TOKEN, TinyControlPlane, control_plane
from tests.agent.gpus.test_telemetry import FixedReader
from tests.testbed.waiting import wait_until

HUNG_S = 600.0


class RecordingRuntime(SimulatedRuntime):
    """Records the calls that change containers."""

    def __init__(self) -> None:
        super().__init__(start_s=0)
        self.calls: list[tuple[str, str]] = []
        self.refusal: StartRefused | StartDelayed | None = None
        self.ignores_stop_signals = False
        self.hangs: set[str] = set()  # projects whose starts hang
        self.may_remove = threading.Event()
        self.may_remove.set()

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        self.calls.append(("start", assignment.instance_id))
        if self.refusal is not None:
            raise self.refusal
        if assignment.project_id in self.hangs:
            self._wait(HUNG_S, lambda: cancelled() or assignment.project_id not in self.hangs)
        return super().start(assignment, progress, cancelled)

    def restart(self, container: Container) -> None:
        self.calls.append(("restart", container.instance_id))
        super().restart(container)

    def begin_stop(self, container: Container) -> bool:
        self.calls.append(("stop", container.instance_id))
        return True if self.ignores_stop_signals else super().begin_stop(container)

    def kill(self, container: Container) -> None:
        self.calls.append(("kill", container.instance_id))
        super().kill(container)

    def remove(self, container: Container) -> None:
        self.calls.append(("remove", container.instance_id))
        assert self.may_remove.wait(10)
        super().remove(container)


class Node:
    """A joined node, and the agents that run on it one after the other."""

    def __init__(self, server: TinyControlPlane, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.runtime = RecordingRuntime()
        self.pools = WorkerPools.default()
        simulated = SimulatedGpuReader("gpu-1", 2, users=self._gpu_users)
        self.gpus: GpuReader = simulated
        self._container_of = simulated.container_of
        joining = ControlPlaneClient(server.url)
        self.identity = NodeIdentity.from_answer(joining.join(TOKEN, "gpu-1", "host-1", OWN), OWN)
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
        self.server.shut_down()
        for agent, thread, calls in self._agents:
            agent.stop()
            thread.join(5)
            assert not thread.is_alive()
            calls.close()
        self.runtime.close()

    def idle(self) -> bool:
        """Whether no start and no ending is queued or running."""
        return self.pools.starts.idle and self.pools.endings.idle

    def _gpu_users(self, uuid: str) -> list[GpuUser]:
        return self.runtime.gpu_users(uuid)  # of the present runtime: some tests replace it

    def uuid(self, index: int = 0) -> str:
        return (self.gpus.latest().inventory or ())[index]["uuid"]

    def await_running(self, instance: Assignment) -> None:
        """Wait until the newest report says that the instance runs."""
        wait_until(lambda: self.server.phase(instance) == "running")

    def await_report(self, shows: Callable[[SyncRequest], bool]) -> SyncRequest:
        """The first newest report that fulfils the condition."""

        def newest() -> SyncRequest | None:
            report = self.server.last()
            return report if report and shows(report) else None

        return wait_until(newest)

    def await_reports(self, times: int = 3) -> None:
        """Wait for further reports, so that earlier answers have taken effect."""
        count = len(self.server.reports) + times
        wait_until(lambda: len(self.server.reports) >= count)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with control_plane() as server:
        made = Node(server, tmp_path)
        yield made
        made.end()


def removal_of(instance: Assignment) -> Removal:
    return Removal(instance_id=instance.instance_id, attempt=instance.attempt, stop_timeout_s=1)


def test_an_instance_is_started_stopped_and_removed(node: Node) -> None:
    node.begin()
    instance = assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(instance)
    node.await_running(instance)
    node.server.wants(instance.model_copy(update={"want": "stopped", "may_start": False}))
    wait_until(lambda: node.server.phase(instance) == "exited")
    node.server.wants(removals=(removal_of(instance),))
    node.await_report(lambda report: report.generation == node.server.generation and report.instances == [])
    assert [what for what, _ in node.runtime.calls] == ["start", "stop", "remove"]


def test_the_first_report_is_complete(node: Node) -> None:
    node.begin()
    # It may arrive second: the calls of the poll thread and of the push thread may cross.
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


def test_reports_are_numbered_and_not_more_frequent_than_requested(node: Node) -> None:
    node.begin()
    node.await_reports(6)
    at, reports = zip(*node.server.reports, strict=True)
    # Each number once, in any order: two calls may cross.
    assert sorted(report.seq for report in reports) == list(range(1, len(reports) + 1))
    assert (at[-1] - at[2]) / (len(at) - 3) > 0.15


def test_processes_on_a_gpu_name_their_instance(node: Node) -> None:
    node.begin()
    instance = assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(instance)
    node.await_running(instance)
    report = node.await_report(lambda report: any(sample.processes for sample in report.samples))
    named = [one.instance_id for sample in report.samples for one in sample.processes or ()]
    assert named == [instance.instance_id]


def test_a_lower_generation_is_rejected_and_reported(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance, generation=9)
    node.await_running(instance)
    node.server.wants(removals=(removal_of(instance),), generation=8)
    report = node.await_report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "generation_regressed"
    node.await_reports()
    assert node.server.phase(instance) == "running"
    node.server.wants(removals=(removal_of(instance),), generation=10)
    node.await_report(lambda report: report.problem is None and report.instances == [])


def test_a_node_without_contact_stops_what_may_be_replaced(node: Node) -> None:
    node.server.self_fence_s = 1.0
    node.begin()
    replaced, kept = assignment(on_node_loss="replace", restart="always"), assignment()
    node.server.wants(replaced, kept)
    node.await_running(replaced)
    node.await_running(kept)
    node.await_reports(10)
    assert node.server.phase(replaced) == "running"
    node.server.failure = (503, "unavailable")
    wait_until(lambda: ("stop", replaced.instance_id) in node.runtime.calls)
    node.server.failure = None
    wait_until(lambda: node.server.phase(replaced) == "exited")
    assert node.server.reason_code(replaced) == "self_fenced"
    assert node.server.phase(kept) == "running"
    node.await_reports()
    assert node.runtime.calls.count(("start", replaced.instance_id)) == 1
    assert ("restart", replaced.instance_id) not in node.runtime.calls


def test_a_restarted_agent_without_contact_stops_what_may_be_replaced(node: Node) -> None:
    node.server.self_fence_s = 2.0
    first, replaced = node.begin(), assignment(on_node_loss="replace")
    node.server.wants(replaced)
    node.await_running(replaced)
    node.server.failure = (503, "unavailable")
    first.stop()
    node.begin()
    wait_until(lambda: ("stop", replaced.instance_id) in node.runtime.calls)
    node.server.failure = None
    wait_until(lambda: node.server.reason_code(replaced) == "self_fenced")


def test_a_control_plane_with_an_older_state_is_contact(node: Node) -> None:
    """It has heard of the node, so it replaces nothing, and the restored database must stop nothing."""
    node.server.self_fence_s = 60
    fence = node.begin()._fence
    replaced = assignment(on_node_loss="replace")
    node.server.wants(replaced, generation=9)
    node.await_running(replaced)
    node.server.wants(generation=8)
    node.await_report(lambda report: report.problem is not None)
    stops_at = fence.now() + fence.due_in_s()
    node.await_reports()
    assert fence.now() + fence.due_in_s() > stops_at + 0.1


def test_the_highest_generation_outlives_the_agent(node: Node) -> None:
    first, instance = node.begin(), assignment()
    node.server.wants(instance, generation=9)
    node.await_running(instance)
    assert StateDirectory(node.directory).generation() == 9
    first.stop()
    node.begin()
    node.server.wants(removals=(removal_of(instance),), generation=3)
    report = node.await_report(lambda report: report.session == 2 and report.problem is not None)
    assert (report.generation, report.problem and report.problem.code) == (0, "generation_regressed")
    node.await_reports()
    assert ("stop", instance.instance_id) not in node.runtime.calls


def test_another_control_planes_answers_are_rejected(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.control_plane_id = "cpl_other"
    node.server.wants(removals=(removal_of(instance),))
    report = node.await_report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "foreign_control_plane"
    node.await_reports()
    assert node.server.phase(instance) == "running"


def test_an_answer_for_another_node_changes_nothing(node: Node) -> None:
    """As from a faulty proxy. The other node's higher generation must not be saved."""
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    generation = node.server.generation
    node.server.node_id = "nod_2"
    node.server.wants(removals=(removal_of(instance),), generation=80)
    node.await_reports()
    assert StateDirectory(node.directory).generation() == generation
    assert node.server.phase(instance) == "running"
    node.server.node_id = "nod_1"
    node.server.wants(removals=(removal_of(instance),), generation=generation + 1)
    node.await_report(lambda report: report.generation == generation + 1 and report.instances == [])


def test_a_session_for_another_node_is_not_used(node: Node) -> None:
    node.server.node_id = "nod_2"
    node.begin()
    wait_until(lambda: node.server.sessions >= 2)
    assert node.server.reports == []
    node.server.node_id = "nod_1"
    node.await_reports()


def test_session_calls_to_another_control_plane_are_paced(node: Node) -> None:
    node.server.control_plane_id = "cpl_other"
    node.begin()
    began = time.monotonic()
    wait_until(lambda: node.server.calls >= 4)
    assert time.monotonic() - began > 0.2
    assert node.server.reports == []


def test_an_agent_that_was_taken_over_ends_and_leaves_its_containers(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.failure = (409, "stale_session")
    wait_until(lambda: node.exit_codes == [3])
    assert node.runtime.containers()[0][0].status == "running"
    assert node.runtime.calls == [("start", instance.instance_id)]


def test_work_that_ends_after_a_takeover_leads_to_no_action(node: Node) -> None:
    node.begin()
    first = assignment()
    second = first.model_copy(update={"attempt": 2})
    node.server.wants(first)
    node.await_running(first)
    node.runtime.may_remove.clear()
    node.server.wants(second, removals=(removal_of(first),))
    wait_until(lambda: ("remove", first.instance_id) in node.runtime.calls)
    node.server.failure = (409, "stale_session")
    wait_until(lambda: node.exit_codes == [3])
    before = list(node.runtime.calls)
    node.runtime.may_remove.set()  # now the second attempt may start, but only by the other agent
    wait_until(lambda: node.runtime.containers() == ([], []))
    wait_until(node.idle)
    assert node.runtime.calls == before


def test_a_rejected_credential_ends_the_agent(node: Node) -> None:
    node.begin()
    node.server.failure = (401, "unauthorized")
    wait_until(lambda: node.exit_codes == [4])


def test_while_the_engine_is_unavailable_instances_are_unknown_and_nothing_is_retried(node: Node) -> None:
    node.begin()
    instance, other = assignment(), assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.runtime.unavailable = True
    # The failed start makes the agent list the containers.
    node.server.wants(other, removals=(removal_of(instance),))
    report = node.await_report(lambda report: report.instances is None)
    assert report.problem is not None and report.problem.code == "docker_unavailable"
    node.await_reports()
    assert node.runtime.calls.count(("start", other.instance_id)) <= 1
    node.runtime.unavailable = False
    node.await_running(other)
    node.await_report(lambda report: report.problem is None and len(report.instances or ()) == 1)


def test_an_unavailable_control_plane_changes_nothing(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.failure = (503, "database_unavailable")
    calls = node.server.calls
    wait_until(lambda: node.server.calls > calls + 2)
    assert node.runtime.containers()[0][0].status == "running"
    node.server.failure = None
    node.await_reports(1)
    assert node.server.phase(instance) == "running"


def test_a_new_agent_adopts_running_containers(node: Node) -> None:
    first, instance = node.begin(), assignment()
    node.server.wants(instance)
    node.await_running(instance)
    first.stop()
    node.begin()
    report = node.await_report(lambda report: report.session == 2)
    assert [one.phase for one in report.instances or ()] == ["running"]
    node.await_report(lambda report: report.session == 2 and report.generation > 0)
    node.await_reports()
    assert node.runtime.calls == [("start", instance.instance_id)]
    assert report.orphans == []


def test_an_orphan_is_reported_and_left_running(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.wants()
    report = node.await_report(lambda report: bool(report.orphans))
    assert report.orphans[0].instance_id == instance.instance_id
    node.await_reports()
    assert node.runtime.calls == [("start", instance.instance_id)]


def test_a_hung_pull_is_cancelled_and_delays_no_report(node: Node) -> None:
    node.runtime._pull_s = HUNG_S
    node.begin()
    instance = assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(instance)
    wait_until(lambda: node.server.phase(instance) == "starting")
    node.await_reports()
    assert node.server.phase(instance) == "starting"
    node.server.wants(removals=(removal_of(instance),))
    node.await_report(lambda report: report.generation == node.server.generation and report.instances == [])


def test_the_progress_of_a_pull_is_reported_while_it_runs(node: Node) -> None:
    node.runtime._pull_s = HUNG_S
    node.begin()
    instance = assignment(image="slow:1")
    node.server.wants(instance)

    def reason() -> Reason | None:
        observed = node.server.instances().get((instance.instance_id, 1))
        return observed.reason if observed else None

    wait_until(lambda: reason() == Reason(code="pulling_image", message="Pulling slow:1"))


def test_hung_starts_do_not_delay_a_stop(node: Node) -> None:
    node.begin()
    kept = assignment()
    node.server.wants(kept)
    node.await_running(kept)
    node.runtime._start_s = HUNG_S
    hung = [assignment() for _ in range(40)]
    node.server.wants(kept, *hung)
    node.await_report(lambda report: len(report.instances or ()) == 41)
    node.server.wants(*hung, removals=(removal_of(kept),))
    wait_until(lambda: node.server.phase(kept) is None)


def test_hung_starts_delay_no_start_stop_or_removal_of_another_project(node: Node) -> None:
    node.runtime.hangs = {"prj_1"}
    node.begin()
    kept = assignment(project_id="prj_2")
    hung = [assignment() for _ in range(200)]
    node.server.wants(*hung)
    node.await_report(lambda report: len(report.instances or ()) == 200)
    node.server.wants(kept, *hung)
    node.await_running(kept)
    node.server.wants(*hung, removals=(removal_of(kept),))
    wait_until(lambda: node.server.phase(kept) is None)


def test_two_pulls_of_a_project_run_at_a_time_and_leave_its_starts_alone(node: Node) -> None:
    node.runtime._pull_s = HUNG_S
    node.runtime._images.add("there:1")
    node.begin()
    pulling = [assignment(image=f"slow-{number}:1") for number in range(8)]
    node.server.wants(*pulling)
    node.await_report(lambda report: len(report.instances or ()) == 8)

    def pulls() -> Counter[str]:
        reasons = [one.reason for one in node.server.instances().values() if one.reason]
        messages = [one.message for one in reasons if one.code == "pulling_image"]
        return Counter("waiting" if "waiting for its turn" in each else "running" for each in messages)

    wait_until(lambda: pulls() == {"waiting": 6, "running": 2})
    there = assignment(image="there:1")
    node.server.wants(*pulling, there)
    node.await_running(there)
    node.await_reports()
    assert pulls() == {"waiting": 6, "running": 2}
    # A deletion ends the pulls that wait for their turn, and those that run.
    node.server.wants(there, removals=tuple(removal_of(one) for one in pulling))
    node.await_report(lambda report: len(report.instances or ()) == 1)


def test_starts_beyond_a_projects_queue_wait_and_are_started_in_the_end(node: Node) -> None:
    node.runtime.hangs = {"prj_1"}
    node.begin()
    instances = [assignment() for _ in range(WAITING_OF_PROJECT + 20)]
    node.server.wants(*instances)
    report = node.await_report(lambda report: len(report.instances or ()) == len(instances))
    codes = Counter(one.reason.code for one in report.instances or () if one.reason)
    assert codes["node_busy"] > 0
    assert {one.phase for one in report.instances or ()} == {"starting"}
    node.runtime.hangs = set()
    wait_until(lambda: {node.server.phase(one) for one in instances} == {"running"}, 30)


def test_a_program_that_ignores_the_stop_signal_is_killed_after_the_timeout(node: Node) -> None:
    node.runtime.ignores_stop_signals = True
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    began = time.monotonic()
    node.server.wants(removals=(removal_of(instance),))
    wait_until(lambda: node.server.phase(instance) is None)
    assert time.monotonic() - began >= 1
    assert [what for what, _ in node.runtime.calls] == ["start", "stop", "kill", "remove"]


def test_a_restarted_agent_keeps_the_timeout_of_a_stop(node: Node) -> None:
    node.runtime.ignores_stop_signals = True
    first, instance = node.begin(), assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.wants(removals=(Removal(instance_id=instance.instance_id, attempt=1, stop_timeout_s=2),))
    stops = StopTimes(StateDirectory(node.directory))
    wait_until(stops.load)
    (since,) = stops.load().values()
    first.stop()
    node.begin()
    wait_until(lambda: ("kill", instance.instance_id) in node.runtime.calls)
    assert 2 <= time.monotonic() - since < 4
    assert [what for what, _ in node.runtime.calls[:3]] == ["start", "stop", "kill"]


def test_a_gpu_is_reused_only_after_its_container_was_stopped(node: Node) -> None:
    node.begin()
    first, second = assignment(gpu_uuids=(node.uuid(),)), assignment(gpu_uuids=(node.uuid(),))
    node.server.wants(first)
    node.await_running(first)
    node.server.wants(second, removals=(removal_of(first),))
    node.await_running(second)
    [stop, start] = [one for one in node.runtime.calls[1:] if one[0] != "remove"]
    assert (stop, start) == (("stop", first.instance_id), ("start", second.instance_id))


def test_an_exited_container_is_restarted_after_a_pause(node: Node) -> None:
    node.begin()
    instance = assignment(command=["sh", "-c", "exit 3"], restart="on_failure")
    node.server.wants(instance)
    wait_until(lambda: ("restart", instance.instance_id) in node.runtime.calls)
    waiting = next(
        one
        for _, report in node.server.reports
        for one in report.instances or ()
        if one.reason and one.reason.code == "restarting"
    )
    assert waiting.phase == "starting"
    assert waiting.reason is not None and "exit code 3; restart 1 follows 1 s" in waiting.reason.message
    assert "exited" not in {one.phase for _, report in node.server.reports for one in report.instances or ()}


def test_a_refusal_is_reported_until_its_assignment_is_gone(node: Node) -> None:
    node.begin()
    instance = assignment(image="missing:1")
    node.server.wants(instance)
    wait_until(lambda: node.server.phase(instance) == "refused")
    node.await_reports()
    assert node.runtime.calls == [("start", instance.instance_id)]
    node.server.wants()
    node.await_report(lambda report: report.instances == [])


def test_a_lost_container_is_not_started_again(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    SimulatedRuntime.remove(node.runtime, node.runtime.containers()[0][0])
    node.await_report(lambda report: report.instances == [])
    node.await_reports()
    assert node.runtime.calls == [("start", instance.instance_id)]


def test_an_exit_is_reported_at_once(node: Node) -> None:
    node.server.report_interval_s = 30
    node.begin()
    instance = assignment(command=["sleep", "0.3"])
    node.server.wants(instance)
    began = time.monotonic()
    wait_until(lambda: node.server.phase(instance) == "exited")
    assert time.monotonic() - began < 15  # half of the interval between reports


def test_a_start_that_is_delayed_for_too_long_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_state, "DELAY_LIMIT_S", 0.5)  # the first retry comes after 1 s
    unavailable = Reason(code="registry_unavailable", message="…")
    node.runtime.refusal = StartDelayed(unavailable, Reason(code="image_pull_failed", message="…"))
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    wait_until(lambda: node.server.reason_code(instance) == "registry_unavailable")
    assert node.server.phase(instance) == "starting"
    wait_until(lambda: node.server.phase(instance) == "refused")
    assert node.server.reason_code(instance) == "image_pull_failed"


def test_incidents_are_repeated_until_a_report_of_them_is_answered(node: Node) -> None:
    node.begin()
    instance = assignment(gpu_uuids=(node.uuid(),))
    wrong = Reason(code="wrong_gpus", message="Other GPUs than assigned")
    node.runtime.refusal = StartRefused(wrong, wrong_gpus=True)
    node.await_reports(1)

    class FailingReports(list[tuple[float, SyncRequest]]):
        """Fails to answer the first three reports with an incident."""

        def append(self, report: tuple[float, SyncRequest]) -> None:
            super().append(report)
            if report[1].incidents and sum(bool(one.incidents) for _, one in self) <= 3:
                raise OSError("no answer")

    node.server.reports = FailingReports()
    node.server.wants(instance)
    wait_until(lambda: sum(bool(one.incidents) for _, one in node.server.reports) >= 4)
    node.await_report(lambda report: not report.incidents)
    incidents = {one.id: one for _, report in node.server.reports for one in report.incidents}
    [incident] = incidents.values()
    assert (incident.uuid, incident.code) == (node.uuid(), "wrong_gpus")


def _event(uuid: str | None, code: str) -> GpuEvent:
    return {
        "uuid": uuid, "code": code, "mig_uuids": [], "count": 1, "first_at": "then", "last_at": "then"
    }  # fmt: skip


def test_hardware_xids_are_incidents_and_application_xids_are_faults(node: Node) -> None:
    reader = FixedReader(node.gpus.latest())
    node.gpus = reader
    node.begin()
    node.await_reports(1)
    reader.reading = replace(
        reader.reading,
        events=(
            _event(node.uuid(0), "xid_31"),
            _event(node.uuid(1), "xid_79"),
            _event(None, "xid_79"),
        ),
    )
    report = node.await_report(lambda report: bool(report.incidents))
    assert [(one.uuid, one.code) for one in report.incidents] == [(node.uuid(1), "xid_79")]
    assert [(one.uuid, one.code) for one in report.faults] == [(node.uuid(0), "xid_31")]
    node.await_report(lambda report: not report.incidents)
    count = len(node.server.reports)
    node.await_reports()
    assert not any(report.incidents for _, report in node.server.reports[count:])


def test_unreadable_gpus_are_a_problem_and_still_listed(node: Node) -> None:
    reader = FixedReader(node.gpus.latest())
    node.gpus = reader
    node.begin()
    node.await_reports(1)
    reader.reading = replace(
        reader.reading, samples=(), error={"code": "nvml_hung", "message": "No answer in 10 s"}
    )
    report = node.await_report(lambda report: report.problem is not None)
    assert report.problem is not None and report.problem.code == "nvml_hung"
    assert report.gpus is not None and len(report.gpus) == 2


def test_gpus_that_were_never_read_are_unknown(node: Node) -> None:
    node.gpus = FixedReader(GpuReading(0, error={"code": "driver_not_loaded", "message": "…"}))
    node.begin()
    report = node.await_report(lambda report: report.problem is not None)
    assert report.gpus is None


def test_a_disk_that_is_full_is_a_problem_until_it_has_space_and_stops_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    node.server.revision = 1
    with monkeypatch.context() as disk:
        disk.setattr(StateDirectory, "save_generation", full)
        node.begin()
        instance = assignment()
        node.server.wants(instance)
        node.await_running(instance)
        report = node.await_report(lambda report: report.problem is not None)
        assert report.problem is not None and report.problem.code == "state_not_saved"
        wait_until(lambda: len(node.server.heartbeats) > 2)  # nothing changes, so they replace the reports
        assert len([line for line in caplog.messages if "cannot save generation" in line]) == 1
    # Without a new desired state: a node with a problem gets no instances.
    node.await_report(lambda report: report.problem is None)
    saved = StateDirectory(node.directory).generation()
    assert saved == node.server.generation


def logs_of(instance: Assignment) -> StreamRequest:
    logs = LogsRequest(tail=None, since=None, follow=False)
    return StreamRequest(id="str_1", instance_id=instance.instance_id, attempt=1, url=None, logs=logs)


@pytest.mark.parametrize("earlier_release", [False, True])
def test_requested_logs_are_streamed(node: Node, earlier_release: bool) -> None:
    """A control plane of an earlier release requests them in its answers to reports."""
    node.server.earlier_release = earlier_release
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.request_streams(logs_of(instance))
    assert node.server.receiver.stream("str_1").ended() == StreamStatus()


def test_a_stream_of_another_node_is_not_served(node: Node) -> None:
    """As if a proxy delivered the answer to the wrong node."""
    node.begin()
    instance = assignment()
    node.server.wants(instance)
    node.await_running(instance)
    node.server.streams_node_id = "nod_2"
    node.server.request_streams(logs_of(instance))
    wait_until(lambda: node.server.stream_calls >= 2)
    assert node.server.receiver.received == {}
    node.server.streams_node_id = "nod_1"
    wait_until(lambda: "str_1" in node.server.receiver)


def test_a_lower_generation_gets_full_reports_and_no_streams(node: Node) -> None:
    node.begin()
    instance = assignment()
    node.server.wants(instance, generation=9)
    node.await_running(instance)
    node.server.wants(instance, generation=8)
    node.await_report(lambda report: report.problem is not None)
    reported, calls = len(node.server.reports), node.server.stream_calls
    node.server.request_streams(logs_of(instance))
    (container,), _ = node.runtime.containers()
    node.runtime.kill(container)
    wait_until(lambda: node.server.phase(instance) == "exited" and node.server.stream_calls >= calls + 2)
    assert not any(report.brief for _, report in node.server.reports[reported:])
    assert node.server.receiver.received == {}
    node.server.wants(instance, generation=10)
    wait_until(lambda: "str_1" in node.server.receiver)


def test_stream_requests_to_a_server_that_shuts_down_are_paced(node: Node) -> None:
    node.begin()
    node.await_reports(1)
    node.server.shut_down()
    calls, began = node.server.stream_calls, time.monotonic()
    wait_until(lambda: node.server.stream_calls >= calls + 4)
    assert time.monotonic() - began > 2 * NO_CHANGE_PAUSE_S


def test_a_brief_answer_takes_nothing_from_the_node(node: Node) -> None:
    """The report of the exit gets a brief answer, and the restart 1 s later still needs the assignment."""
    node.server.report_interval_s = 30  # no complete answer comes meanwhile
    node.begin()
    instance = assignment(command=["sh", "-c", "exit 3"], restart="on_failure")
    node.server.wants(instance)
    wait_until(lambda: ("restart", instance.instance_id) in node.runtime.calls)
    assert any(report.brief for _, report in node.server.reports)


def test_an_idle_agent_makes_at_most_one_call_per_interval(node: Node) -> None:
    node.server.report_interval_s = 0.5
    node.begin()
    node.await_reports(3)
    calls, began = node.server.calls, time.monotonic()
    node.await_reports(5)
    made = node.server.calls - calls
    assert made <= (time.monotonic() - began) / node.server.report_interval_s + 1
