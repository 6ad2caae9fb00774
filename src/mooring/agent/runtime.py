"""The interface to a container engine: `docker/runtime.py`, and `simulated/runtime.py` in memory."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from mooring.agent.decide.device_claims import Share
from mooring.core.disk import DiskFacts
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment, Endpoint, OverlayNetwork, ReportedVolume
from mooring.schemas.agent_streams import (
    AttachRequest,
    DialRequest,
    ExecRequest,
    LogsRequest,
    StreamStatus,
    WindowSize,
)
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.spec import SecretReference
from mooring_client.schemas.states import Reason
from mooring_client.stream_messages import Channel

Progress = Callable[[Reason], None]
Cancelled = Callable[[], bool]
Start = Callable[[], "Container | None"]

DELAY_LIMIT_S: Final = 600.0


class RuntimeUnavailable(Exception):
    """The engine does not answer. Its containers are unknown; they must not count as gone."""


class StartDelayed(RuntimeUnavailable):
    """A start that must be retried, for another reason than an engine that does not answer.

    Attributes:
        refusal: why the start fails if it is delayed for this reason for DELAY_LIMIT_S; None: no limit here.
    """

    def __init__(self, reason: Reason, refusal: Reason | None = None) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.refusal = refusal


class PullNeeded(Exception):
    """The image of a start is not on the node: call `Runtime.pull`.

    Attributes:
        image: identifies the pull; starts of the same image share one pull.
    """

    def __init__(self, image: str) -> None:
        super().__init__(image)
        self.image = image


class StartRefused(Exception):
    """A start that failed and must not be retried. Nothing is left of it; users see `reason`."""

    def __init__(self, reason: Reason, *, wrong_gpus: bool = False) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.wrong_gpus = wrong_gpus  # the container got other GPUs than assigned (R5)


class StreamRefused(Exception):
    """A stream that cannot be opened. Its user sees `status`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.status = StreamStatus.of_error(code, message)


class ContainerStream(Protocol):
    """An open stream, for one task that reads and one that writes, in one event loop.

    Every call may raise RuntimeUnavailable. The caller must await `close`.
    """

    async def read(self) -> tuple[Channel, bytes] | None:
        """Wait for output, at most MAX_DATA_BYTES of it. None: the output has ended."""

    async def write(self, data: bytes) -> None:
        """Wait until the stream has taken the data. Data for a program that has ended is dropped."""

    async def end_input(self) -> None: ...

    async def resize(self, window: WindowSize) -> None: ...

    async def signal(self, name: str) -> None:
        """Send a signal, named without SIG, to the command. Unknown names are ignored."""

    async def status(self) -> StreamStatus:
        """Wait for the end of the stream, after the end of the output."""

    async def close(self) -> None:
        """End the stream. A command that still runs is killed."""


def secret_values(assignment: Assignment) -> dict[str, str]:
    """Return the values of the variables that refer to a secret.

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
    """One container of this control plane."""

    instance_id: str
    attempt: int
    container_id: str
    status: str  # Docker's: created, running, restarting, removing, paused, exited, dead
    gpu_uuids: tuple[str, ...]  # UUIDs of GPUs, or of MIG devices
    exit_code: int | None = None
    oom_killed: bool = False
    error: str | None = None
    started_at: str | None = None
    finished_at: str | None = None
    image_digest: str | None = None
    endpoints: tuple[Endpoint, ...] = ()
    parent_gpus: tuple[str, ...] = ()  # the GPUs of the MIG devices, in the same order
    share: Share | None = None
    project_id: str = ""
    replaced_on_loss: bool = False  # continues on another node if this one is lost

    @property
    def owner(self) -> str:
        """Return the owner in the fair queues of the worker pools."""
        return self.project_id or self.instance_id


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What the engine states about itself and its machine."""

    version: str | None
    cpus: int
    memory_mib: int
    problem: Reason | None  # why nothing may be started here: toolkit too old, engine unreachable, …
    simulated: bool
    swarm: SwarmFacts | None = None
    mps: bool = False
    disk: DiskFacts | None = None


def facts_without_engine() -> RuntimeFacts:
    """Return the facts of this machine while Docker does not answer."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return RuntimeFacts(
        version=None,
        cpus=os.cpu_count() or 1,
        memory_mib=pages * page_bytes // 2**20,
        problem=Reason(code="docker_unavailable", message="Docker does not answer on this node"),
        simulated=False,
    )


class Runtime(Protocol):
    """Every call may wait for the engine, and may raise RuntimeUnavailable."""

    def facts(self) -> RuntimeFacts: ...

    def containers(self) -> tuple[list[Container], list[Orphan]]:
        """Return all containers of this control plane, and the foreign ones with Mooring's labels."""

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        """Pass the node's assignments, from which incomplete records of its containers are completed."""

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        """Create, start and verify a container, or adopt that of an earlier call. None if cancelled.

        Raises:
            PullNeeded: the image is not on the node.
            StartRefused: the container cannot run; nothing is left of it.
        """

    def pull(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Start | None:
        """Pull the image. Return a function that then does the work of `start`; None if cancelled.

        Raises:
            StartRefused: the image cannot be pulled.
        """

    def restart(self, container: Container) -> None:
        """Start an exited container again, for `restart: on_failure | always`."""

    def begin_stop(self, container: Container) -> bool:
        """Send the stop signal without waiting. Return False if the container has ended or does not exist."""

    def kill(self, container: Container) -> None:
        """Send SIGKILL. Succeeds if the container has ended, or does not exist."""

    def remove(self, container: Container) -> None:
        """Remove a container that has ended. Succeeds if it does not exist."""

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """Create these networks of the swarm, and remove others of this control plane that are not in use.

        Only for managers of the swarm, according to `facts`.
        """

    def volumes(self) -> Sequence[ReportedVolume] | None:
        """Return the volumes of this control plane; None: not known yet. Does not wait for the engine."""

    def remove_volumes(self, volume_ids: Sequence[str]) -> None:
        """Remove those of these volumes that the node has, with their files.

        Raises:
            RuntimeUnavailable: also if a container still has one of them.
        """

    async def logs(self, container_id: str, request: LogsRequest) -> ContainerStream:
        """Open the log. Raises StreamRefused: it cannot be read."""

    async def exec(self, container_id: str, request: ExecRequest) -> ContainerStream:
        """Start a command. Raises StreamRefused: the container does not run, or rejects the request."""

    async def dial(self, container_id: str, request: DialRequest) -> ContainerStream:
        """Connect to a port. Raises StreamRefused: nothing accepts the connection."""

    async def attach(self, container_id: str, request: AttachRequest) -> ContainerStream:
        """Attach to the main process. Raises StreamRefused: it has ended, and its output is not kept."""

    async def end_left_commands(self, container_id: str) -> None:
        """Kill commands in the container that an earlier agent process has started and not ended."""

    def watch(self, on_change: Callable[[], None], ended: Callable[[], bool]) -> None:
        """Begin to call `on_change`, from any thread, whenever something may have changed, until the end."""

    def close(self) -> None: ...
