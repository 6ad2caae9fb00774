"""What the agent needs of a container engine; `docker.py` is the real one, `simulated.py` lives in memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooring.agent.decide.device_claims import Share
from mooring.core.disk import DiskFacts
from mooring.core.instance.spec import SecretReference
from mooring.core.instance.state import Reason
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment, Endpoint, Orphan, OverlayNetwork
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamFrame

Progress = Callable[[Reason], None]
Cancelled = Callable[[], bool]
Start = Callable[[], "Container | None"]


class RuntimeUnavailable(Exception):
    """The engine does not answer: what it holds is unknown, which is never the same as nothing."""


class StartDelayed(RuntimeUnavailable):
    """A start that is to be tried again: something else than the engine does not answer."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.message)
        self.reason = reason


class PullNeeded(Exception):
    """A start whose image is not on the node: `Runtime.pull` goes on from here.

    Attributes:
        image: what has to be pulled, the same for all who need it.
    """

    def __init__(self, image: str) -> None:
        super().__init__(image)
        self.image = image


class StartRefused(Exception):
    """A start that failed for good and left nothing behind; `reason` is what the user reads."""

    def __init__(self, reason: Reason, *, wrong_gpus: bool = False) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.wrong_gpus = wrong_gpus  # the container got other GPUs than assigned (R5)


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
    parent_gpus: tuple[str, ...] = ()  # that its MIG devices are on, in their order
    share: Share | None = None
    project_id: str = ""

    @property
    def owner(self) -> str:
        """Whose share of the node's workers is used for it."""
        return self.project_id or self.instance_id


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    version: str | None
    cpus: int
    memory_mib: int
    problem: Reason | None  # why nothing may be started here: toolkit too old, engine unreachable, …
    simulated: bool
    swarm: SwarmFacts | None = None
    mps: bool = False
    disk: DiskFacts | None = None


def facts_without_engine() -> RuntimeFacts:
    """What this machine says of itself while Docker does not answer."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return RuntimeFacts(
        version=None,
        cpus=os.cpu_count() or 1,
        memory_mib=pages * page_bytes // 2**20,
        problem=Reason(code="docker_unavailable", message="Docker does not answer on this node"),
        simulated=False,
    )


class Runtime(Protocol):
    """Every call may block on the engine and may raise RuntimeUnavailable."""

    def facts(self) -> RuntimeFacts: ...

    def containers(self) -> tuple[list[Container], list[Orphan]]:
        """All containers of this control plane, and labelled ones that belong to another."""

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        """What the node should have, at every answer: for containers that the agent has no record of."""

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        """Create, start and verify, or adopt what an earlier call left; None when cancelled.

        Raises:
            PullNeeded: its image is not on the node.
            StartRefused: it will not run, and nothing is left of it.
        """

    def pull(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Start | None:
        """Pull the image; returns what starts the container with it, as `start` does. None when cancelled.

        Raises:
            StartRefused: it cannot be had.
        """

    def restart(self, container: Container) -> None:
        """Start an exited container again, for `restart: on_failure | always`."""

    def begin_stop(self, container: Container) -> bool:
        """Send its stop signal and return at once; False: it has ended, or is gone."""

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
