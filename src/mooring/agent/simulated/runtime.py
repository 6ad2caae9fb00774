"""A container engine that exists only in memory: for machines without Docker, for tests and for scale.

Its programs are read off their command line: `sleep N` ends well after N s, `true` and `false` at once,
`sh -c "exit 3"` (also after a sleep) with 3; everything else runs until it is stopped. `gpu-memory N` takes
N MiB of each of its GPUs. An image with `missing` in its name cannot be pulled. Nothing runs: a container
ends when somebody looks after its time.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mooring.agent.decide.device_claims import devices_of
from mooring.agent.disk.storage import DiskPolicy
from mooring.agent.runtime import (
    Cancelled,
    Container,
    Progress,
    PullNeeded,
    RuntimeFacts,
    RuntimeUnavailable,
    Start,
    StartRefused,
    secret_values,
)
from mooring.agent.simulated.gpus import Tenant, tenant_of
from mooring.agent.simulated.output import exec_frames, line_frames
from mooring.agent.timestamps import rfc3339
from mooring.core.disk import DiskFacts
from mooring.core.instance.spec import InstanceSpec
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment, Endpoint, Orphan, OverlayNetwork
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamFrame

FIRST_PORT: Final = 32_768
CANCEL_POLL_S: Final = 0.01
SIGTERM_EXIT: Final = 143
SIGKILL_EXIT: Final = 137

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Program:
    """How long a command line runs (None: until it is stopped), and how it ends."""

    runs_s: float | None
    exit_code: int = 0
    gpu_memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class _Life:
    """A container from its newest start; `ends_at` is on the runtime's clock."""

    container: Container
    program: _Program
    ends_at: float | None = None


class SimulatedRuntime:
    """A Runtime. `clock` counts seconds from anywhere; while `away` is set, the engine does not answer."""

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
        clock: Clock = time.monotonic,
    ) -> None:
        self.away = False
        self._mps = mps
        self._cpus, self._memory_mib, self._address, self._start_s = cpus, memory_mib, address, start_s
        self._pull_s = pull_s
        self._disk = _disk(disk_mib)
        self._clock = clock
        self._epoch = time.time() - clock()
        self._lives: dict[str, _Life] = {}  # by container id
        self._on: dict[str, list[str]] = {}  # card or MIG device -> the containers that run there
        self._images: set[str] = set()
        self._ports = 0
        self._changed = threading.Condition()
        self._changes = 0
        self._closed = False

    def facts(self) -> RuntimeFacts:
        self._answer()
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
        self._answer()
        with self._changed:
            self._end_those_due()
            return [life.container for life in self._lives.values()], []

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        """Its containers live as long as it remembers them."""

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        self._answer()
        secret_values(assignment)
        if assignment.spec.image not in self._images:
            raise PullNeeded(assignment.spec.image)
        return self._start(assignment, cancelled)

    def pull(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Start | None:
        self._answer()
        image = assignment.spec.image
        progress(Reason(code="pulling_image", message=f"Pulling {image}"))
        if "missing" in image:
            raise StartRefused(Reason(code="image_not_found", message=f"There is no image {image}"))
        if not self._passed(self._pull_s, cancelled):
            return None
        self._images.add(image)
        return lambda: self._start(assignment, cancelled)

    def _start(self, assignment: Assignment, cancelled: Cancelled) -> Container | None:
        container_id = _container_id(assignment)
        if not self._passed(self._start_s, cancelled):
            return None
        self._answer()
        with self._changed:
            if container_id not in self._lives:
                self._lives[container_id] = self._created(assignment, container_id)
            return self._begun(container_id)

    def restart(self, container: Container) -> None:
        self._answer()
        with self._changed:
            self._end_those_due()
            if container.container_id not in self._lives:
                raise StartRefused(Reason(code="container_gone", message="Its container is gone"))
            self._begun(container.container_id)

    def begin_stop(self, container: Container) -> bool:
        return self._signal(container, SIGTERM_EXIT)

    def kill(self, container: Container) -> None:
        self._signal(container, SIGKILL_EXIT)

    def remove(self, container: Container) -> None:
        self._answer()
        with self._changed:
            life = self._lives.pop(container.container_id, None)
            if life is not None:
                self._leave(life.container)
                self._notify()

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        """Nothing is made: a simulated node is in no swarm."""
        self._answer()

    def logs(self, container_id: str, request: LogsRequest) -> Iterator[StreamFrame]:
        return line_frames(lambda: self._life_of(container_id), self._now, self._wait_a_second, request)

    def exec(self, container_id: str, request: ExecRequest) -> Iterator[StreamFrame]:
        self._answer()
        return exec_frames(self._life_of(container_id), request.command)

    def changes(self) -> Iterator[None]:
        """Also yields at the time when the next program ends by itself."""
        seen = self._changes
        while not self._closed:
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(self._until_next_end())
                self._end_those_due()
                news, seen = self._changes != seen, self._changes
            if news:
                yield

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._notify()

    def tenants(self, gpu_uuid: str) -> list[Tenant]:
        """Who runs on this card or MIG device."""
        with self._changed:
            now = self._clock()
            lives = [self._lives[container_id] for container_id in self._on.get(gpu_uuid, ())]
            return [
                tenant_of(life.container, life.program.gpu_memory_mib)
                for life in lives
                if life.ends_at is None or life.ends_at > now
            ]

    def _answer(self) -> None:
        if self.away:
            raise RuntimeUnavailable("the simulated engine is away")

    def _signal(self, container: Container, exit_code: int) -> bool:
        """Whether it ran."""
        self._answer()
        with self._changed:
            self._end_those_due()
            life = self._lives.get(container.container_id)
            if life is None or life.container.status != "running":
                return False
            self._end(life, exit_code, self._clock())
            return True

    def _passed(self, duration_s: float, cancelled: Cancelled) -> bool:
        """Whether the time passed before the start was cancelled."""
        until = time.monotonic() + duration_s
        while not cancelled():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return True
            time.sleep(min(left_s, CANCEL_POLL_S))
        return False

    def _created(self, assignment: Assignment, container_id: str) -> _Life:
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
            image_digest=f"sha256:{hashlib.sha256(assignment.spec.image.encode()).hexdigest()}",
            endpoints=tuple(self._endpoints(assignment.spec)),
        )
        return _Life(container, program_of(assignment.spec))

    def _endpoints(self, spec: InstanceSpec) -> Iterator[Endpoint]:
        for port in spec.ports:
            host_port = FIRST_PORT + self._ports % (65_536 - FIRST_PORT)
            self._ports += 1
            yield Endpoint(
                container=port.container, protocol=port.protocol, host=self._address, port=host_port
            )

    def _begun(self, container_id: str) -> Container:
        """Starts it, unless it runs."""
        life = self._lives[container_id]
        if life.container.status == "running":
            return life.container
        now = self._clock()
        running = replace(
            life.container, status="running", started_at=self._time(now), exit_code=None, finished_at=None
        )
        ends_at = None if life.program.runs_s is None else now + life.program.runs_s
        self._lives[container_id] = _Life(running, life.program, ends_at)
        for uuid in running.gpu_uuids:
            self._on.setdefault(uuid, []).append(container_id)
        self._notify()
        return running

    def _end_those_due(self) -> None:
        now = self._clock()
        for life in list(self._lives.values()):
            if life.ends_at is not None and life.ends_at <= now:
                self._end(life, life.program.exit_code, life.ends_at)

    def _end(self, life: _Life, exit_code: int, at: float) -> None:
        ended = replace(life.container, status="exited", exit_code=exit_code, finished_at=self._time(at))
        self._lives[ended.container_id] = _Life(ended, life.program)
        self._leave(ended)
        self._notify()

    def _leave(self, container: Container) -> None:
        for uuid in container.gpu_uuids:
            self._on[uuid] = [one for one in self._on.get(uuid, ()) if one != container.container_id]

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _until_next_end(self) -> float | None:
        ends = [life.ends_at for life in self._lives.values() if life.ends_at is not None]
        return max(0, min(ends) - self._clock()) if ends else None

    def _life_of(self, container_id: str) -> Container | None:
        self._answer()
        with self._changed:
            self._end_those_due()
            life = self._lives.get(container_id)
            return life.container if life else None

    def _wait_a_second(self) -> None:
        with self._changed:
            self._changed.wait(1)

    def _now(self) -> float:
        return self._epoch + self._clock()

    def _time(self, at: float) -> str:
        return rfc3339(self._epoch + at)


def program_of(spec: InstanceSpec) -> _Program:
    """What the command line would do."""
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


def _disk(total_mib: int) -> DiskFacts:
    return DiskFacts(
        total_mib=total_mib,
        allocatable_mib=DiskPolicy().allocatable_mib(total_mib),
        available_mib=total_mib,
        enforced=True,
        driver="simulated",
    )


def _container_id(assignment: Assignment) -> str:
    """64 digits like Docker's, and the same for the same attempt: a start is adopted, not repeated."""
    return hashlib.sha256(f"{assignment.instance_id}/{assignment.attempt}".encode()).hexdigest()
