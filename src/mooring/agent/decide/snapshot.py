"""The facts that the agent decides on and reports, as of one point in time."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from mooring.agent.decide.device_claims import Share
from mooring.agent.runtime import Container
from mooring.schemas.agent import Assignment, Removal
from mooring_client.schemas.states import Reason

Key = tuple[str, int]  # instance id, attempt


class ActionKind(StrEnum):
    START = "start"
    RESTART = "restart"
    STOP = "stop"
    RELEASE = "release"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Work:
    """An action in progress, or one whose result no listing shows yet."""

    kind: ActionKind
    gpu_uuids: tuple[str, ...] = ()
    cancelled: bool = False
    parent_gpus: tuple[str, ...] = ()
    share: Share | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """An action failed and is not retried before `until`. Times are monotonic."""

    tries: int
    until: float
    reason: Reason
    since: float  # since then, all tries have failed with this reason code


@dataclass(frozen=True, slots=True)
class PlannedRestart:
    """A restart by the user's policy."""

    finished_at: str | None  # of the exit that it follows
    tries: int  # earlier restarts since the last steady run
    pause_s: int  # before the restart
    due: float


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """The desired state, the observed state, and the work in progress. `AgentState` makes it."""

    containers: Mapping[Key, Container]
    assignments: Mapping[Key, Assignment] = field(default_factory=dict)
    removals: Mapping[Key, Removal] = field(default_factory=dict)
    work: Mapping[Key, Work] = field(default_factory=dict)
    progress: Mapping[Key, Reason] = field(default_factory=dict)  # of starts in progress
    waiting: Mapping[Key, Reason] = field(default_factory=dict)  # why a wanted start does not happen now
    refusals: Mapping[Key, Reason] = field(default_factory=dict)  # starts that failed for good
    began: Set[Key] = frozenset()  # have run: they are not started again when their container is gone
    pauses: Mapping[Key, Pause] = field(default_factory=dict)
    restarts: Mapping[Key, PlannedRestart] = field(default_factory=dict)
    unreleased: Mapping[Key, Container] = field(default_factory=dict)  # ended, their GPUs not yet idle
    kill_reasons: Mapping[Key, Reason] = field(default_factory=dict)  # containers to kill, or killed
    killed_by_engine: Set[Key] = frozenset()  # ended when the engine restarted
    stop_sent_at: Mapping[Key, float] = field(default_factory=dict)
    # Replaceable instances to stop, or stopped, because the node had no contact. They are not started again.
    fenced: Set[Key] = frozenset()
    has_contact: bool = True  # without, no replaceable instance is started
    problem: Reason | None = None  # why nothing may be started on this node
