"""What the agent needs of a container engine; `docker.py` is the real one, `simulated.py` lives in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooring.agent.devices import Share
from mooring.core.disk import DiskFacts
from mooring.core.instance import Reason, SecretReference
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import (
    Assignment,
    Endpoint,
    ExecRequest,
    LogsRequest,
    Orphan,
    OverlayNetwork,
    StreamFrame,
)

Progress = Callable[[Reason], None]
Cancelled = Callable[[], bool]


class RuntimeUnavailable(Exception):
    """The engine does not answer: what it holds is unknown, which is never the same as nothing."""


class StartDelayed(RuntimeUnavailable):
    """A start that is to be tried again: something else than the engine does not answer."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.message)
        self.reason = reason


class StartRefused(Exception):
    """A start that failed for good and left nothing behind; `reason` is what the user reads."""

    def __init__(self, reason: Reason, *, distrust_gpus: bool = False) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.distrust_gpus = distrust_gpus  # the container got other GPUs than assigned (R5)


def secret_values(assignment: Assignment) -> dict[str, str]:
    """The values of the variables that name a secret.

    Raises:
        StartRefused: `secret_unavailable`: the control plane did not send one of them.
    """
    wanted = {
        name: value.secret
        for name, value in assignment.spec.env.items()
        if isinstance(value, SecretReference)
    }
    if missing := sorted(secret for name, secret in wanted.items() if name not in assignment.secrets):
        message = f"the project has no secret {', '.join(missing)} any more; create it, then start again"
        raise StartRefused(Reason(code="secret_unavailable", message=message))
    return {name: assignment.secrets[name] for name in wanted}


@dataclass(frozen=True, slots=True)
class Container:
    """One container that carries this control plane's labels."""

    instance_id: str
    attempt: int
    container_id: str
    status: str  # Docker's word: created, running, restarting, removing, paused, exited, dead
    gpu_uuids: tuple[str, ...]  # of MIG devices: their own
    exit_code: int | None = None
    oom_killed: bool = False
    error: str | None = None
    started_at: str | None = None
    finished_at: str | None = None
    image_digest: str | None = None
    endpoints: tuple[Endpoint, ...] = ()
    cards: tuple[str, ...] = ()  # that its MIG devices are on, in their order
    share: Share | None = None


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    version: str | None
    cpus: int
    memory_mib: int
    problem: Reason | None  # why nothing may be started here: toolkit too old, engine away, …
    simulated: bool
    swarm: SwarmFacts | None = None
    mps: bool = False
    disk: DiskFacts | None = None


class Runtime(Protocol):
    """Every call may block on the engine and may raise RuntimeUnavailable."""

    def facts(self) -> RuntimeFacts: ...

    def containers(self) -> tuple[list[Container], list[Orphan]]:
        """All containers of this control plane, and labelled ones that belong to another."""

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        """Pull, create, start and verify, or adopt what an earlier call left; None when cancelled.

        Raises:
            StartRefused: it will not run, and nothing is left of it.
        """

    def restart(self, container: Container) -> None:
        """Start an exited container again, for `restart: on_failure | always`."""

    def stop(self, container: Container, timeout_s: int) -> None:
        """SIGTERM, then SIGKILL; returns when its process has ended. Ended or gone already is success."""

    def kill(self, container: Container) -> None:
        """SIGKILL, at once. Ended or gone already is success."""

    def remove(self, container: Container) -> None:
        """Remove a container that has ended. Gone already is success."""

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """See that the swarm has these networks, and no others of this control plane but those in use.

        Only for an engine that `facts` calls a manager.
        """

    def logs(self, container_id: str, request: LogsRequest) -> Iterator[StreamFrame]:
        """Lines with their time; closing the iterator ends a follow."""

    def exec(self, container_id: str, request: ExecRequest) -> Iterator[StreamFrame]: ...

    def changes(self) -> Iterator[None]:
        """Yields whenever something may have changed; a hint only. Ends or raises when the engine goes."""

    def close(self) -> None: ...
