"""The agent of one node: observes its engine, receives the desired state, decides, acts and reports.

    engine watcher        listings, every 15 s and at the engine's events ─┐
    poll, push task       answers of the control plane ────────────────────┼─> AgentState ─> plan ─> executor
    action executor       the result of each action ───────────────────────┤        └─> reported state
    stream requests       logs and exec that users ask for ──> streams     │
    watchdog              containers to kill that have only part of a GPU ─┘

The thread that receives an event also applies it and decides, under one lock. No holder of this lock waits
for the engine or the network, so a start begins as soon as the answer that asks for it has arrived.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from mooring.agent.decide.snapshot import Key
from mooring.agent.gpus.reader import GpuReader
from mooring.agent.gpus.release import RELEASE_WITHIN_S, ReleaseGate
from mooring.agent.gpus.telemetry import (
    ContainerOf,
    Machine,
    Telemetry,
    gpu_problem,
    node_facts,
    unknown_engine,
)
from mooring.agent.gpus.watchdog import CHECK_EVERY_S, Watchdog
from mooring.agent.runtime import Container, Runtime, RuntimeFacts
from mooring.agent.streams.loop import StreamLoop
from mooring.agent.streams.requests import StreamRequestsCall
from mooring.agent.streams.streams import Streams
from mooring.agent.sync.agent_state import AgentState, AnswerOutcome, ReportedState
from mooring.agent.sync.client import ControlPlaneClient, ControlPlaneError
from mooring.agent.sync.engine_watcher import LISTING_GAP_S, EngineWatcher
from mooring.agent.sync.exchange import Exchange, ReportRequest
from mooring.agent.sync.executor import ActionExecutor, StateChange
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from mooring.agent.sync.reachability import Reachability
from mooring.agent.sync.saved_generation import SavedGeneration
from mooring.agent.sync.self_fence import SelfFence
from mooring.agent.sync.specs import Specs
from mooring.agent.sync.start_secrets import StartSecretsCache
from mooring.agent.sync.stop_times import StopTimes
from mooring.agent.sync.tasks import Tasks, ThreadTasks, run_blocking
from mooring.agent.sync.worker_pools import WorkerPools
from mooring.schemas.agent import SessionAnswer, SyncAnswer, SyncRequest
from mooring.schemas.agent_streams import StreamRequest
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.states import Reason

FIRST_LISTING_S: Final = 2.0  # how long the first report waits for the engine
LAST_CALLS_S: Final = 0.5  # how long `serve` waits at the end for calls in progress

log = logging.getLogger(__name__)


class Agent:
    """`serve` lasts until `stop`, or until the agent may no longer act for its node; containers keep running.

    Args:
        tasks, pools, stream_loop, reachability: the nodes of a process may share them. By default each task
            has a thread.
        on_first_call: called after the first report, whether or not it was answered.
    """

    def __init__(
        self,
        *,
        identity: NodeIdentity,
        state: StateDirectory,
        runtime: Runtime,
        gpus: GpuReader,
        control_plane: ControlPlaneClient,
        machine: Machine,
        container_of: ContainerOf = lambda _: None,
        tasks: Tasks | None = None,
        pools: WorkerPools | None = None,
        stream_loop: StreamLoop | None = None,
        reachability: Reachability | None = None,
        on_first_call: Callable[[], None] = lambda: None,
        release_within_s: float = RELEASE_WITHIN_S,
    ) -> None:
        pools = pools or WorkerPools.default()
        self._tasks = tasks or ThreadTasks()
        self._identity, self._directory, self._runtime, self._machine = identity, state, runtime, machine
        self._renewal_lock = threading.Lock()  # of `_identity`
        stops = StopTimes(state)
        self._lock = threading.Lock()  # of everything from here to the blank line
        self._generation = SavedGeneration(state)
        self._state = AgentState(identity.control_plane_id, self._generation.newest, stops.load())
        self._reported = ReportedState()
        self._session = self._seq = 0
        self._has_contact = True  # used by `serve` only
        self._due: float | None = None  # when the plan changes without any event

        self._fence = SelfFence(state)
        self._telemetry = Telemetry(gpus, container_of)
        self._telemetry_lock = threading.Lock()
        self._ended, self._wake = self._tasks.signal(), self._tasks.signal()
        self._exit_code = 0
        self._gate = ReleaseGate(gpus, container_of, release_within_s)
        self._watchdog = Watchdog(gpus, container_of)
        self._watch_wanted = self._tasks.signal()  # set while there are containers to watch
        self._first_listing_done = self._tasks.signal()
        self._engine = self._new_engine_watcher()
        self._control_plane = control_plane
        self._executor = self._new_executor(pools, stops)
        self._specs = Specs()
        self._streams = Streams(runtime, control_plane, self._state.container, stream_loop or StreamLoop())
        self._exchange = self._new_exchange(reachability or Reachability(), on_first_call)
        self._stream_requests = StreamRequestsCall(
            control_plane, self._tasks, identity, lambda: self._session, self._serve_streams, self._ended
        )
        gpus.on_news(lambda: self._exchange.report_soon(immediate=False))

    def _new_executor(self, pools: WorkerPools, stops: StopTimes) -> ActionExecutor:
        secrets = StartSecretsCache(self._control_plane, lambda: self._session)
        report_incident = self._telemetry.faults.report_incident
        return ActionExecutor(
            self._runtime,
            pools,
            self._apply,
            report_incident,
            self._gate,
            stops,
            secrets,
            self._identity.node_id,
        )

    def _new_engine_watcher(self) -> EngineWatcher:
        return EngineWatcher(
            self._runtime,
            begin_listing=self._begin_listing,
            on_listing=self._on_listing,
            on_unavailable=self._on_engine_unavailable,
            on_facts=self._on_engine_facts,
            first_listing_done=self._first_listing_done,
            wake=self._wake.set,
        )

    def _new_exchange(self, reachability: Reachability, on_first_call: Callable[[], None]) -> Exchange:
        return Exchange(
            self._control_plane,
            self._tasks,
            node=self._identity.node_id,
            reachability=reachability,
            on_session=self._on_session,
            make_report=self._make_report,
            on_answer=self._on_answer,
            on_heartbeat=lambda made_at, answer: self._fence.heard(made_at, answer.self_fence_s),
            renew_credential=self._renew_credential,
            on_first_call=on_first_call,
            end=self._end,
            ended=self._ended,
        )

    def run(self) -> int:
        """As `serve`, with a thread for each task."""
        return run_blocking(self.serve())

    async def serve(self) -> int:
        """Returns the exit code: 0 after `stop`, 3 another agent has taken over, 4 credential rejected."""
        self._runtime.watch(self._engine.request_listing, self._ended.is_set)
        self._tasks.start(self._watch_shares, "watchdog")
        self._exchange.start()
        while not self._ended.is_set():
            if not self._engine.due_in_s():
                await self._tasks.call(self._engine.list_containers)
                await self._ended.wait(LISTING_GAP_S)
            elif self._due is not None and time.monotonic() >= self._due:
                await self._tasks.call(lambda: self._apply(lambda _: None))  # only decides again
            await self._check_contact()
            await self._wake.wait(self._idle_s())
            self._wake.clear()
        await self._exchange.wait_for_calls(LAST_CALLS_S)
        return self._exit_code

    async def _check_contact(self) -> None:
        has_contact = self._fence.due_in_s() > 0
        if has_contact != self._has_contact:
            self._has_contact = has_contact
            change = partial(AgentState.set_contact, has_contact=has_contact)
            await self._tasks.call(lambda: self._apply(change))

    def stop(self) -> None:
        self._end(0)
        self._streams.close()

    def _end(self, exit_code: int) -> None:
        """Decide nothing more. Work in progress ends with the process."""
        with self._lock:
            if not self._ended.is_set():
                self._exit_code = exit_code
                self._ended.set()
        self._wake.set()
        self._watch_wanted.set()
        self._first_listing_done.set()
        self._exchange.wake()

    def _idle_s(self) -> float:
        times = [self._engine.due_in_s()]
        if self._due is not None:
            times.append(self._due - time.monotonic())
        if self._has_contact:
            times.append(self._fence.due_in_s())
        return max(0, min(times))

    def _renew_credential(self) -> None:
        # Saved before its first use, which revokes the old one: a restarted agent needs a valid credential.
        with self._renewal_lock:
            self._identity = self._control_plane.renewed(self._identity)
            self._directory.save_renewed(self._identity)
            self._control_plane.identify(self._identity)

    # --- the engine

    def _begin_listing(self) -> int:
        with self._lock:
            return self._state.begin_listing()

    def _on_listing(self, number: int, containers: list[Container], foreign: list[Orphan]) -> bool:
        wants_another = False

        def change(state: AgentState) -> None:
            nonlocal wants_another
            wants_another = state.apply_listing(number, containers, foreign)

        self._apply(change)
        return wants_another

    def _on_engine_unavailable(self, problem: Reason) -> None:
        def change(state: AgentState) -> None:
            state.problem = problem
            state.engine_unavailable()

        self._apply(change)

    def _on_engine_facts(self, facts: RuntimeFacts) -> None:
        def change(state: AgentState) -> None:
            state.problem = facts.problem

        self._apply(change, always=True)

    # --- the watchdog

    async def _watch_shares(self) -> None:
        while await self._watch_wanted.wait() and not self._ended.is_set():
            await self._tasks.call(self._check_shares)
            await self._ended.wait(CHECK_EVERY_S)

    def _check_shares(self) -> None:
        with self._lock:
            watched = self._state.watched_containers()
        try:
            violations = self._watchdog.check(watched)
        except Exception:
            log.exception("the check of GPU shares and MIG devices failed")
            violations = []
        for key, reason in violations:
            self._apply(partial(_kill, key, reason))

    # --- decisions

    def _apply(
        self, change: StateChange, *, relist: bool = False, immediate: bool = True, always: bool = False
    ) -> None:
        """Apply a change, begin the actions that follow from it, and report if needed (or `always`)."""
        with self._lock:
            if self._ended.is_set():
                return
            change(self._state)
            report_needed = self._reconcile()
        if relist:
            self._engine.request_listing()
        if report_needed or always:
            self._exchange.report_soon(immediate=immediate)

    def _reconcile(self) -> bool:
        """Begin the actions of a new plan. Returns whether the reported instances or orphans have changed."""
        plan = self._state.plan(time.monotonic())
        for action in plan.actions if plan else ():
            self._executor.execute(action, self._state)
        self._set_due(plan.due if plan else None)
        if self._state.watched_containers():
            self._watch_wanted.set()
        else:
            self._watch_wanted.clear()
        before, self._reported = self._reported, self._state.reported_state()
        return (before.instances, before.orphans) != (self._reported.instances, self._reported.orphans)

    def _set_due(self, due: float | None) -> None:
        is_sooner = due is not None and (self._due is None or due < self._due)
        self._due = due
        if is_sooner:
            self._wake.set()

    # --- the control plane

    async def _on_session(self, answer: SessionAnswer) -> bool:
        await self._first_listing_done.wait(FIRST_LISTING_S)
        with self._lock:
            if answer.control_plane_id != self._identity.control_plane_id:
                log.error("the server is another control plane, %s: ignored", answer.control_plane_id)
                return False
            self._session = answer.session
            containers = list((self._state.containers or {}).values())
        self._streams.end_left_commands(containers)
        log.info("session %s with the control plane", answer.session)
        self._stream_requests.start()
        return True

    def _make_report(self, wait_s: float, brief: bool) -> ReportRequest:
        made_at = self._fence.now()
        with self._lock:  # a higher seq never carries an older state
            self._seq += 1
            session, seq, reported = self._session, self._seq, self._reported
            highest, rejection = self._state.highest_generation, self._state.rejection
            not_saved = self._generation.retry()
            containers = list((self._state.containers or {}).values())
            in_use, specs = self._state.gpus_in_use(), self._specs.known()
            engine = self._engine.facts or unknown_engine()
            volumes = self._runtime.volumes()
        # Read after the state: the end of an instance is never reported without its GPUs' incidents.
        with self._telemetry_lock:
            reading = self._telemetry.reading()
            gpus = self._telemetry.inventory(reading)
            samples = self._telemetry.samples(reading, containers)
        if in_use is not None:
            self._gate.learn(reading, in_use)
        facts = node_facts(self._machine, engine, reading)
        if facts.swarm is not None and facts.swarm.manager:
            self._executor.recheck_overlays()
        self._executor.recheck_volumes()
        problem = rejection or engine.problem or gpu_problem(reading.error)
        request = SyncRequest(
            session=session,
            seq=seq,
            generation=reported.generation,
            wait_s=wait_s,
            brief=brief and rejection is None,
            facts=facts,
            problem=problem or not_saved,
            gpus=gpus,
            samples=samples,
            instances=reported.instances,
            specs=specs,
            orphans=reported.orphans,
            incidents=self._telemetry.faults.incidents(),
            faults=self._telemetry.faults.faults(),
            volumes=volumes,
        )
        return ReportRequest(request, highest, made_at)

    def _on_answer(self, report: ReportRequest, answer: SyncAnswer) -> AnswerOutcome:
        with self._lock:
            if self._ended.is_set():
                return AnswerOutcome.REJECTED
            complete = self._specs.complete(answer)
            if complete is None:
                outcome = AnswerOutcome.OUTDATED
            else:
                outcome = self._state.apply_answer(complete, report.highest_generation)
                if outcome is AnswerOutcome.APPLIED and not answer.brief:
                    self._begin_desired(report, complete)
        if answer.control_plane_id == self._identity.control_plane_id:
            # Also if the answer is rejected: the control plane has heard of this node.
            self._fence.heard(report.made_at, answer.self_fence_s)
        if complete is None:
            self._exchange.report_soon()  # the report lists the specs that this node has
        if outcome is not AnswerOutcome.REJECTED:
            self._telemetry.faults.answered(report.request.incidents, report.request.faults)
            self._streams.serve(answer.streams)  # an earlier release sends them with this answer
        return outcome

    def _begin_desired(self, report: ReportRequest, answer: SyncAnswer) -> None:
        """Save the generation of a newly applied desired state, and begin its actions."""
        self._specs.keep(answer)
        self._generation.save(answer.generation)
        self._runtime.assigned(answer.assignments)
        self._reconcile()
        if (swarm := report.request.facts.swarm) is not None and swarm.manager:
            self._executor.keep_overlays(answer.overlays)  # always empty for a worker
        self._executor.remove_volumes(answer.volume_removals)

    def _serve_streams(self, requests: Iterable[StreamRequest]) -> None:
        with self._lock:
            if (rejection := self._state.rejection) is not None:
                raise ControlPlaneError(rejection.message)
        self._streams.serve(requests)


def _kill(key: Key, reason: Reason, state: AgentState) -> None:
    state.kill(key, reason)
