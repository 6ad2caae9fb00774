"""The agent of one node: looks at its engine, hears what should be, decides, acts and reports.

    eye (run)   listing, every 15 s and at the engine's hints ──┐
    ear, mouth  answers of the control plane ───────────────────┼─> Knowledge ─> plan ─> hands
    hands       what became of each action ─────────────────────┤        └─> picture ─> next report
    stream call logs and exec that users want ──> streams
    watchdog    who may not go on, while cards are shared ──────┘

Whoever brings news decides at once, in its own thread and under one lock: nothing under it waits for the
engine or the network, and a start begins within a millisecond of the answer that asked for it.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Final

from mooring.agent.decide.reconcile import Key
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
from mooring.agent.gpus.watchdog import LOOK_EVERY_S, Watchdog
from mooring.agent.runtime import Runtime, RuntimeFacts, RuntimeUnavailable
from mooring.agent.sync.agent_state import AgentState, AnswerOutcome, Picture
from mooring.agent.sync.client import ControlPlaneClient, ControlPlaneError
from mooring.agent.sync.exchange import Exchange, ReportRequest
from mooring.agent.sync.executor import ActionExecutor, Change
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from mooring.agent.sync.specs import Specs
from mooring.agent.sync.start_secrets import StartSecretsOf
from mooring.agent.sync.stop_times import StopTimes
from mooring.agent.sync.stream_requests import StreamRequestsCall
from mooring.agent.sync.streams import Streams
from mooring.agent.sync.worker_pools import WorkerPools
from mooring.core.instance import Reason
from mooring.schemas.agent import SessionAnswer, SyncAnswer, SyncRequest
from mooring.schemas.agent_streams import StreamRequest

RESYNC_S: Final = 15.0
LOOK_AGAIN_S: Final = 1.0  # after an engine that did not answer
LOOK_GAP_S: Final = 0.01  # a burst of hints is one listing
FIRST_LOOK_S: Final = 2.0  # for so long the first report waits for the engine
LAST_WORD_S: Final = 0.5  # for so long the end waits for a call under way
ENGINE_AWAY: Final = Reason(
    code="docker_unavailable", message="The container engine does not answer on this node"
)
NOT_SAVED: Final = Reason(
    code="state_not_saved", message="The agent cannot write to its data directory (full?); see its log"
)

log = logging.getLogger(__name__)


class Agent:
    """`run` blocks until `stop`, or until another agent has taken over. Neither touches a container."""

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
        crew: WorkerPools | None = None,
        release_within_s: float = RELEASE_WITHIN_S,
    ) -> None:
        crew = crew or WorkerPools.hired()
        self._identity, self._state, self._runtime, self._machine = identity, state, runtime, machine
        self._lock = threading.Lock()  # of everything in this block
        self._renewal = threading.Lock()
        stops = StopTimes(state)
        self._knowledge = AgentState(identity.control_plane_id, state.generation(), stops.load())
        self._picture = Picture()
        self._session = self._seq = 0
        self._due: float | None = None
        self._saved = True

        self._engine: RuntimeFacts | None = None
        self._engine_asked_at = 0.0
        self._telemetry = Telemetry(gpus, container_of)
        self._telemetry_lock = threading.Lock()
        self._ended, self._looked, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._look_wanted = True
        self._look_at = 0.0
        self._exit_code = 0
        self._gate = ReleaseGate(gpus, container_of, release_within_s)
        self._watchdog = Watchdog(gpus, container_of)
        self._watch_wanted = threading.Event()  # while there is somebody to watch
        secrets = StartSecretsOf(control_plane, lambda: self._session)
        distrust = self._telemetry.faults.distrust
        self._hands = ActionExecutor(
            runtime, crew, self._tell, distrust, self._gate, stops, secrets, identity.node_id
        )
        self._specs = Specs()
        self._streams = Streams(
            runtime, control_plane, self._knowledge.container, crew.streams, node=identity.node_id
        )
        self._control_plane = control_plane
        self._exchange = Exchange(
            control_plane,
            opened=self._opened,
            make=self._report,
            take=self._take,
            renew=self._renew_credential,
            end=self._end,
            ended=self._ended,
        )
        self._stream_requests = StreamRequestsCall(
            control_plane,
            identity,
            session=lambda: self._session,
            serve=self._serve_streams,
            ended=self._ended,
        )
        gpus.on_news(lambda: self._exchange.soon(hurry=False))

    def run(self) -> int:
        """The process's exit code: 0 after `stop`, 3 when taken over, 4 when the credential is refused."""
        threading.Thread(target=self._watch_engine, name="engine-hints", daemon=True).start()
        threading.Thread(target=self._watch_shares, name="watchdog", daemon=True).start()
        self._exchange.start()
        while not self._ended.is_set():
            if self._look_wanted or time.monotonic() >= self._look_at:
                self._look()
            elif self._due is not None and time.monotonic() >= self._due:
                self._tell(lambda _: None)
            self._wake.wait(self._idle_s())
            self._wake.clear()
        self._exchange.join(LAST_WORD_S)
        return self._exit_code

    def stop(self) -> None:
        self._end(0)

    def _end(self, exit_code: int) -> None:
        """Whatever is decided after this has no effect; what is under way ends with the process."""
        with self._lock:
            if not self._ended.is_set():
                self._exit_code = exit_code
                self._ended.set()
        self._wake.set()
        self._watch_wanted.set()
        self._looked.set()
        self._exchange.hush()

    def _renew_credential(self) -> None:
        # On disk before it is used: its first use ends the one before, also for an agent that starts anew.
        with self._renewal:
            credential = self._control_plane.renew_credential()
            self._identity = self._identity.model_copy(update={"credential": credential})
            self._state.renewed(self._identity)
            self._control_plane.identify(self._identity)

    # --- the eye

    def _idle_s(self) -> float:
        until = self._look_at if self._due is None else min(self._look_at, self._due)
        return 0 if self._look_wanted else max(0, until - time.monotonic())

    def _want_look(self) -> None:
        self._look_wanted = True
        self._wake.set()

    def _watch_engine(self) -> None:
        """The engine's events only say when to look: one that is missed is made up for by the resync."""
        while not self._ended.is_set():
            try:
                for _ in self._runtime.changes():
                    self._want_look()
            except RuntimeUnavailable as error:
                log.info("the engine's events broke off: %s", error)
            except Exception:
                log.exception("the engine's events broke off")
            self._ended.wait(LOOK_AGAIN_S)
            self._want_look()

    def _look(self) -> None:
        self._look_wanted = False
        was_away = self._knowledge.containers is None
        found = self._list()
        if found and (was_away or time.monotonic() - self._engine_asked_at >= RESYNC_S):
            self._ask_engine()
        self._looked.set()
        self._look_at = time.monotonic() + (RESYNC_S if found else LOOK_AGAIN_S)
        self._ended.wait(LOOK_GAP_S)

    def _list(self) -> bool:
        """Whether the engine said what it has; if not, nothing is known and nothing is done."""
        with self._lock:
            number = self._knowledge.begin_listing()
        try:
            containers, strangers = self._runtime.containers()
        except Exception as error:
            self._lost_sight(error)
            return False

        def listed(known: AgentState) -> None:
            # Not `|=`: that reads the flag first, and would undo a hint that comes meanwhile.
            if known.listed(number, containers, strangers):
                self._look_wanted = True

        self._tell(listed)
        return True

    def _lost_sight(self, error: Exception) -> None:
        if self._knowledge.containers is not None or self._engine is None:
            expected = isinstance(error, RuntimeUnavailable)
            log.error("the container engine does not answer: %s", error, exc_info=None if expected else error)
        self._set_engine(replace(self._engine or unknown_engine(), problem=ENGINE_AWAY))
        self._tell(AgentState.unlisted)

    def _ask_engine(self) -> None:
        try:
            facts = self._runtime.facts()
        except RuntimeUnavailable:
            facts = replace(self._engine or unknown_engine(), problem=ENGINE_AWAY)
        self._engine_asked_at = time.monotonic()
        if self._set_engine(facts):
            self._tell(lambda _: None, always=True)

    def _set_engine(self, facts: RuntimeFacts) -> bool:
        """Whether they are others than before."""
        with self._lock:
            before, self._engine = self._engine, facts
            self._knowledge.problem = facts.problem
        return facts != before

    # --- the watchdog

    def _watch_shares(self) -> None:
        while self._watch_wanted.wait() and not self._ended.is_set():
            with self._lock:
                watched = self._knowledge.watched()
            try:
                found = self._watchdog.look(watched)
            except Exception:
                log.exception("shares of GPUs could not be looked at")
                found = []
            for key, reason in found:
                self._tell(partial(_expel, key, reason))
            self._ended.wait(LOOK_EVERY_S)

    # --- decisions

    def _tell(self, change: Change, *, look: bool = False, hurry: bool = True, always: bool = False) -> None:
        """Take in a change, act on it, and report if that shows."""
        with self._lock:
            if self._ended.is_set():
                return
            change(self._knowledge)
            shows = self._decide()
        if look:
            self._want_look()
        if shows or always:
            self._exchange.soon(hurry=hurry)

    def _decide(self) -> bool:
        """Begin what is to be done; whether the picture of the node is another one now."""
        plan = self._knowledge.plan(time.monotonic())
        for action in plan.actions if plan else ():
            self._hands.do(action, self._knowledge)
        self._set_due(plan.due if plan else None)
        if not self._knowledge.watched():
            self._watch_wanted.clear()
        elif not self._watch_wanted.is_set():
            self._watch_wanted.set()
        before, self._picture = self._picture, self._knowledge.picture()
        return (before.instances, before.orphans) != (self._picture.instances, self._picture.orphans)

    def _set_due(self, due: float | None) -> None:
        sooner = due is not None and (self._due is None or due < self._due)
        self._due = due
        if sooner:
            self._wake.set()

    # --- the control plane

    def _opened(self, answer: SessionAnswer) -> bool:
        self._looked.wait(FIRST_LOOK_S)
        with self._lock:
            if answer.control_plane_id != self._identity.control_plane_id:
                log.error("the server is another control plane, %s: not obeyed", answer.control_plane_id)
                return False
            self._session = answer.session
        log.info("session %s with the control plane", answer.session)
        self._stream_requests.start()
        return True

    def _report(self, wait_s: float, brief: bool) -> ReportRequest:
        with self._lock:  # a higher seq never carries an older picture
            self._seq += 1
            session, seq, highest, picture = self._session, self._seq, self._knowledge.highest, self._picture
            containers = list((self._knowledge.containers or {}).values())
            in_use = self._knowledge.gpus_in_use()
            engine, specs = self._engine or unknown_engine(), self._specs.known()
            mistrust = self._knowledge.mistrust
            problem = mistrust or engine.problem
        # Read after the picture: the end of an instance is never told without what is wrong with its cards.
        with self._telemetry_lock:
            reading = self._telemetry.reading()
            gpus = self._telemetry.inventory(reading)
            samples = self._telemetry.samples(reading, containers)
        if in_use is not None:
            self._gate.learn(reading, in_use)
        request = SyncRequest(
            session=session,
            seq=seq,
            generation=picture.generation,
            wait_s=wait_s,
            brief=brief and mistrust is None,
            facts=node_facts(self._machine, engine, reading),
            problem=problem or gpu_problem(reading.error) or self._unsaved(),
            gpus=gpus,
            samples=samples,
            instances=picture.instances,
            specs=specs,
            orphans=picture.orphans,
            incidents=self._telemetry.faults.incidents(),
            faults=self._telemetry.faults.faults(),
        )
        return ReportRequest(request, highest)

    def _unsaved(self) -> Reason | None:
        return None if self._saved else NOT_SAVED

    def _take(self, report: ReportRequest, answer: SyncAnswer) -> AnswerOutcome:
        with self._lock:
            if self._ended.is_set():
                return AnswerOutcome.REFUSED
            complete = self._specs.complete(answer)
            verdict = (
                AnswerOutcome.LATE if complete is None else self._knowledge.hear(complete, report.highest)
            )
            if complete is not None and verdict is AnswerOutcome.TAKEN and not answer.brief:
                self._obey(report, complete)
        if complete is None:
            self._exchange.soon()  # says which specs are here by now
        if verdict is not AnswerOutcome.REFUSED:
            self._telemetry.faults.answered(report.request.incidents, report.request.faults)
            self._streams.serve(answer.streams)  # of a control plane of an earlier release
        return verdict

    def _obey(self, report: ReportRequest, answer: SyncAnswer) -> None:
        self._specs.keep(answer)
        self._save(answer.generation, report.highest)
        self._runtime.assigned(answer.assignments)
        self._decide()
        if (swarm := report.request.facts.swarm) is not None and swarm.manager:
            self._hands.keep_overlays(answer.overlays)  # only a manager is told of them

    def _serve_streams(self, requests: Iterable[StreamRequest]) -> None:
        with self._lock:
            if (mistrust := self._knowledge.mistrust) is not None:
                raise ControlPlaneError(mistrust.message)
        self._streams.serve(requests)

    def _save(self, generation: int, before: int) -> None:
        """On disk before anything is done under it; a full disk must not stop the node, but shows."""
        if generation == before and self._saved:
            return
        try:
            self._state.save_generation(generation)
        except OSError:
            log.exception("generation %s cannot be saved", generation)
            self._saved = False
        else:
            self._saved = True


def _expel(key: Key, reason: Reason, known: AgentState) -> None:
    known.expel(key, reason)
