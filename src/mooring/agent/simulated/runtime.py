"""A simulated container engine: for machines without Docker, for tests and for scale.

The command line decides what a container does: `sleep N` succeeds after N s, `true` and `false` end at once,
`sh -c "exit 3"` (also after a sleep) ends with 3; everything else runs until it is stopped. `gpu-memory N`
uses N MiB of each of its GPUs. An image with `missing` in its name cannot be pulled. No process exists: a
container whose time is over is ended by a timer, or by an earlier call that depends on its state.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from mooring.agent.decide.device_claims import devices_of
from mooring.agent.runtime import (
    Cancelled,
    Container,
    ContainerStream,
    Progress,
    PullNeeded,
    RuntimeFacts,
    RuntimeUnavailable,
    Start,
    StartRefused,
    secret_values,
)
from mooring.agent.simulated.disk import simulated_disk
from mooring.agent.simulated.gpus import GpuUser, gpu_user
from mooring.agent.simulated.streams import (
    SimulatedExec,
    SimulatedLogs,
    SimulatedMainProcess,
    SimulatedMainShell,
    SimulatedPort,
    SimulatedStream,
    running,
)
from mooring.agent.simulated.timers import Timers
from mooring.agent.simulated.volumes import SimulatedVolumes
from mooring.agent.timestamps import rfc3339
from mooring.schemas.agent import Assignment, Endpoint, OverlayNetwork, ReportedVolume
from mooring.schemas.agent_streams import AttachRequest, DialRequest, ExecRequest, LogsRequest
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import Reason

FIRST_PORT: Final = 32_768
CANCEL_POLL_S: Final = 0.01
SIGTERM_EXIT: Final = 143
SIGKILL_EXIT: Final = 137

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Program:
    """What a command does."""

    runs_s: float | None  # None: until it is stopped
    exit_code: int = 0
    gpu_memory_mib: int | None = None  # None: a varying part of what it may use


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A container and its program. `ends_at` is on the runtime's clock."""

    container: Container
    program: _Program
    spec: InstanceSpec
    volume_ids: frozenset[str] = frozenset()
    ends_at: float | None = None


class SimulatedRuntime:
    """A Runtime. While `unavailable` is set, the engine does not answer.

    Args:
        timers: for programs that end by themselves; the nodes of a process may share it.
    """

    def __init__(
        self,
        *,
        cpus: int = 192,
        memory_mib: int = 2_097_152,
        address: str = "127.0.0.1",
        start_s: float = 0.05,
        pull_s: float = 0,
        disk_mib: int = 4 * 2**20,
        mps: bool = False,
        timers: Timers | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.unavailable = False
        self._mps = mps
        self._cpus, self._memory_mib, self._address, self._start_s = cpus, memory_mib, address, start_s
        self._pull_s = pull_s
        self._disk = simulated_disk(disk_mib)
        self._clock = clock
        self._epoch = time.time() - clock()  # Unix time when the clock was 0
        self._containers: dict[str, _Simulated] = {}  # by container id
        self._container_ids_on: dict[str, list[str]] = {}  # by GPU or MIG device
        self._images: set[str] = set()
        self._volumes = SimulatedVolumes(self._volumes_in_use)
        self._ports = 0
        self._timers = timers or Timers()
        self._changed = threading.Condition()
        self._watchers: list[Callable[[], None]] = []

    def facts(self) -> RuntimeFacts:
        self._require_available()
        return RuntimeFacts(
            "simulated",
            self._cpus,
            self._memory_mib,
            problem=None,
            simulated=True,
            mps=self._mps,
            disk=self._disk,
        )

    def containers(self) -> tuple[list[Container], list[Orphan]]:
        self._require_available()
        with self._changed:
            self._end_due()
            return [simulated.container for simulated in self._containers.values()], []

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        """Not needed: simulated containers have no records."""

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        self._require_available()
        secret_values(assignment)  # raises StartRefused if a secret is missing
        if assignment.spec.image not in self._images:
            raise PullNeeded(assignment.spec.image)
        return self._start(assignment, cancelled)

    def pull(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Start | None:
        self._require_available()
        image = assignment.spec.image
        progress(Reason(code="pulling_image", message=f"Pulling {image}"))
        if "missing" in image:
            raise StartRefused(Reason(code="image_not_found", message=f"There is no image {image}"))
        if not self._wait(self._pull_s, cancelled):
            return None
        self._images.add(image)
        return lambda: self._start(assignment, cancelled)

    def _start(self, assignment: Assignment, cancelled: Cancelled) -> Container | None:
        container_id = _container_id(assignment)
        if not self._wait(self._start_s, cancelled):
            return None
        self._require_available()
        self._volumes.ensure(assignment.volumes)
        with self._changed:
            if container_id not in self._containers:
                self._containers[container_id] = self._created(assignment, container_id)
            return self._start_container(container_id)

    def restart(self, container: Container) -> None:
        self._require_available()
        with self._changed:
            self._end_due()
            if container.container_id not in self._containers:
                raise StartRefused(Reason(code="container_gone", message="Its container is gone"))
            self._start_container(container.container_id)

    def begin_stop(self, container: Container) -> bool:
        return self._signal(container, SIGTERM_EXIT)

    def kill(self, container: Container) -> None:
        self._signal(container, SIGKILL_EXIT)

    def remove(self, container: Container) -> None:
        self._require_available()
        with self._changed:
            simulated = self._containers.pop(container.container_id, None)
            if simulated is not None:
                self._leave_gpus(simulated.container)
                self._notify()

    def volumes(self) -> Sequence[ReportedVolume]:
        return self._volumes.known()

    def remove_volumes(self, volume_ids: Sequence[str]) -> None:
        self._require_available()
        self._volumes.remove(volume_ids)

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """A simulated node is in no swarm."""
        self._require_available()

    async def logs(self, container_id: str, request: LogsRequest) -> ContainerStream:
        return SimulatedLogs(lambda: self._container(container_id), self._now, request)

    async def exec(self, container_id: str, request: ExecRequest) -> ContainerStream:
        return SimulatedExec(lambda: self._container(container_id), request)

    async def dial(self, container_id: str, request: DialRequest) -> ContainerStream:
        return SimulatedPort(lambda: self._container(container_id), request)

    async def attach(self, container_id: str, request: AttachRequest) -> ContainerStream:
        self._require_available()
        with self._changed:
            self._end_due()
            simulated = self._containers.get(container_id)
        find = partial(self._container, container_id)
        if request.signal is not None:
            running(find())
            if request.signal in {"TERM", "INT", "HUP", "QUIT"}:
                self._end_by_itself(container_id, SIGTERM_EXIT)
            return SimulatedStream.ended(find)
        if simulated is None or simulated.program.runs_s is not None or not simulated.spec.stdin:
            return SimulatedMainProcess(find)
        command = [*(simulated.spec.entrypoint or ()), *(simulated.spec.command or ())] or ["sh"]
        shell = ExecRequest(
            command=command, tty=simulated.spec.tty, stdin=request.stdin, window=request.window
        )
        return SimulatedMainShell(find, shell, partial(self._end_by_itself, container_id))

    def _end_by_itself(self, container_id: str, exit_code: int) -> None:
        with self._changed:
            simulated = self._containers.get(container_id)
            if simulated is not None and simulated.container.status == "running":
                self._end(simulated, exit_code, self._clock())

    async def end_left_commands(self, container_id: str) -> None:
        """There are none: simulated commands end with their agent process."""

    def watch(self, on_change: Callable[[], None], ended: Callable[[], bool]) -> None:
        """Also calls `on_change` when a program ends by itself."""
        self._watchers.append(on_change)

    def close(self) -> None:
        with self._changed:
            self._watchers.clear()

    def gpu_users(self, gpu_uuid: str) -> list[GpuUser]:
        """The containers on this GPU or MIG device."""
        with self._changed:
            now = self._clock()
            container_ids = self._container_ids_on.get(gpu_uuid, ())
            containers = [self._containers[container_id] for container_id in container_ids]
            return [
                gpu_user(simulated.container, simulated.program.gpu_memory_mib)
                for simulated in containers
                if simulated.ends_at is None or simulated.ends_at > now
            ]

    def _require_available(self) -> None:
        if self.unavailable:
            raise RuntimeUnavailable("the simulated engine is unavailable")

    def _signal(self, container: Container, exit_code: int) -> bool:
        """End a container. Returns whether it was running."""
        self._require_available()
        with self._changed:
            self._end_due()
            simulated = self._containers.get(container.container_id)
            if simulated is None or simulated.container.status != "running":
                return False
            self._end(simulated, exit_code, self._clock())
            return True

    def _wait(self, duration_s: float, cancelled: Cancelled) -> bool:
        """Wait. Returns False if the start was cancelled meanwhile."""
        until = time.monotonic() + duration_s
        while not cancelled():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return True
            time.sleep(min(left_s, CANCEL_POLL_S))
        return False

    def _volumes_in_use(self) -> set[str]:
        with self._changed:
            return {each for simulated in self._containers.values() for each in simulated.volume_ids}

    def _created(self, assignment: Assignment, container_id: str) -> _Simulated:
        devices = devices_of(assignment)
        container = Container(
            instance_id=assignment.instance_id,
            attempt=assignment.attempt,
            container_id=container_id,
            status="created",
            gpu_uuids=devices.gpu_uuids,
            parent_gpus=devices.parent_gpus,
            share=devices.share,
            project_id=assignment.project_id,
            replaced_on_loss=assignment.spec.on_node_loss == "replace",
            image_digest=f"sha256:{hashlib.sha256(assignment.spec.image.encode()).hexdigest()}",
            endpoints=tuple(self._endpoints(assignment.spec)),
        )
        volume_ids = frozenset(volume.volume_id for volume in assignment.volumes)
        return _Simulated(container, program_of(assignment.spec), assignment.spec, volume_ids)

    def _endpoints(self, spec: InstanceSpec) -> Iterator[Endpoint]:
        for port in spec.ports:
            if port.expose != "node":
                continue
            host_port = FIRST_PORT + self._ports % (65_536 - FIRST_PORT)
            self._ports += 1
            yield Endpoint(
                container=port.container, protocol=port.protocol, host=self._address, port=host_port
            )

    def _start_container(self, container_id: str) -> Container:
        """Start a container, unless it is running."""
        simulated = self._containers[container_id]
        if simulated.container.status == "running":
            return simulated.container
        now = self._clock()
        started = replace(
            simulated.container,
            status="running",
            started_at=self._rfc3339(now),
            exit_code=None,
            finished_at=None,
        )
        ends_at = None
        if (runs_s := simulated.program.runs_s) is not None:
            ends_at = now + runs_s
            self._timers.after(runs_s, self._look)
        self._containers[container_id] = replace(simulated, container=started, ends_at=ends_at)
        for uuid in started.gpu_uuids:
            self._container_ids_on.setdefault(uuid, []).append(container_id)
        self._notify()
        return started

    def _look(self) -> None:
        with self._changed:
            self._end_due()

    def _end_due(self) -> None:
        now = self._clock()
        for simulated in list(self._containers.values()):
            if simulated.ends_at is not None and simulated.ends_at <= now:
                self._end(simulated, simulated.program.exit_code, simulated.ends_at)

    def _end(self, simulated: _Simulated, exit_code: int, at: float) -> None:
        finished_at = self._rfc3339(at)
        ended = replace(simulated.container, status="exited", exit_code=exit_code, finished_at=finished_at)
        self._containers[ended.container_id] = replace(simulated, container=ended, ends_at=None)
        self._leave_gpus(ended)
        self._notify()

    def _leave_gpus(self, container: Container) -> None:
        for uuid in container.gpu_uuids:
            others = [one for one in self._container_ids_on.get(uuid, ()) if one != container.container_id]
            self._container_ids_on[uuid] = others

    def _notify(self) -> None:
        self._changed.notify_all()
        for on_change in self._watchers:
            on_change()

    def _container(self, container_id: str) -> Container | None:
        self._require_available()
        with self._changed:
            self._end_due()
            simulated = self._containers.get(container_id)
            return simulated.container if simulated else None

    def _now(self) -> float:
        return self._epoch + self._clock()

    def _rfc3339(self, at: float) -> str:
        return rfc3339(self._epoch + at)


def program_of(spec: InstanceSpec) -> _Program:
    """The program that a command line stands for."""
    argv = [*(spec.entrypoint or ()), *(spec.command or ())]
    line = argv[2] if argv[:2] == ["sh", "-c"] and len(argv) == 3 else " ".join(argv)
    if line in {"true", "false"}:
        return _Program(0, int(line == "false"))
    if memory := re.fullmatch(r"gpu-memory (\d{1,7})", line.strip()):
        return _Program(None, gpu_memory_mib=int(memory[1]))
    parts = re.fullmatch(r"(?:sleep (\d+(?:\.\d+)?))?\s*(?:;|&&)?\s*(?:exit (\d{1,3}))?", line.strip())
    if parts is None or not line.strip():
        return _Program(None)
    return _Program(float(parts[1] or 0), int(parts[2] or 0))


def _container_id(assignment: Assignment) -> str:
    """64 hexadecimal digits like Docker's. A repeated start of an attempt adopts the container of this id."""
    return hashlib.sha256(f"{assignment.instance_id}/{assignment.attempt}".encode()).hexdigest()
