"""The `Runtime` for Docker: each instance is a container with Mooring's labels.

    start:  image (pull) -> create by name (or adopt) -> start -> inspect and verify (R5)
                     └────> network ──────────────────┘

A failed start removes the container. If the engine does not answer, the outcome is unknown, and the next call
finds the container by its name.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mooring.agent.decide.device_claims import HasDevices, devices_of
from mooring.agent.disk.disk import Disk, DiskSettings
from mooring.agent.docker import command_failure, stop, verify
from mooring.agent.docker.adopt import create_or_adopt
from mooring.agent.docker.client import Document, Engine, remove_container
from mooring.agent.docker.container_records import ContainerRecords
from mooring.agent.docker.container_settings import command_of, limits_here
from mooring.agent.docker.create import (
    RUNC,
    Abilities,
    ContainerLimits,
    Image,
    command_line,
    container_config,
    network_of,
)
from mooring.agent.docker.derive import ParentOf
from mooring.agent.docker.errors import EngineRefused, start_failure
from mooring.agent.docker.events import follow
from mooring.agent.docker.network import Attachments, Isolate
from mooring.agent.docker.observe import Observer
from mooring.agent.docker.overlay import start_with_network, swarm_of
from mooring.agent.docker.redaction import SecretRedactor
from mooring.agent.docker.streams.container_streams import DockerStreams
from mooring.agent.docker.toolbox_volumes import current_toolbox
from mooring.agent.docker.verify import MinorOf
from mooring.agent.docker.volumes import DockerVolumes, mount_delayed
from mooring.agent.gpus.mps import Mps
from mooring.agent.host.preflight import Preflight, runtime_problem
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.images.pull_pace import PullTimeouts
from mooring.agent.images.pulled_images import PulledImages
from mooring.agent.runtime import (
    Cancelled,
    Container,
    Progress,
    PullNeeded,
    RuntimeFacts,
    RuntimeUnavailable,
    Start,
    StartDelayed,
    StartRefused,
    facts_without_engine,
    secret_values,
)
from mooring.agent.simulated.gpus import GpuUser, gpu_user
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment, OverlayNetwork, ReportedVolume
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.states import Reason

_INFO_EVERY_S = 60.0  # `docker info` runs two programs; what is used of it changes only when Docker restarts
_PORT_TRIES = 3
# Only the ends of containers: the agent knows of starts from its own calls, and listing containers during a
# start would add load to dockerd. Starts by other programs are found when the agent next lists containers.
_EVENTS = '{"type":["container"],"label":["mooring.instance"],"event":["die","destroy"]}'

Begin = Callable[[], object]

log = logging.getLogger(__name__)


class DockerRuntime(DockerStreams):
    """Containers of one control plane on one engine. Every method may be called from any thread.

    Args:
        control_plane_id: set once the node has joined; until then, all containers are foreign.
        address: the host of published ports, as users reach it.
        minor_of: UUID -> minor number of a GPU, if NVML reports it.
        preflight: returns why nothing may start on this node although the engine answers (R1, R8).
        isolate: blocks containers from forbidden networks, or returns why it cannot (R10).
        private_images, pulled_images: the records of images on disk; by default in memory only.
        pull_timeouts: how long a pull may take.
        records: the records of containers on disk; by default in memory only.
        parent_of: UUID of a MIG device -> that of its GPU, if NVML reports it.
        container_runtime: name of the OCI runtime in the engine's configuration (R14).
        mps: the daemon that enforces the limits of GPU shares, where it runs.
        disk: how much disk images and containers may use; the defaults if None.
    """

    def __init__(
        self,
        *,
        address: str,
        control_plane_id: str | None = None,
        simulated_gpus: bool = False,
        limits: ContainerLimits | None = None,
        minor_of: MinorOf = lambda _uuid: None,
        preflight: Preflight = lambda _info: None,
        isolate: Isolate = lambda _bridges: None,
        private_images: PrivateImages | None = None,
        pull_timeouts: PullTimeouts | None = None,
        pulled_images: PulledImages | None = None,
        records: ContainerRecords | None = None,
        parent_of: ParentOf = lambda _uuid: None,
        container_runtime: str = RUNC,
        mps: Mps | None = None,
        disk: DiskSettings | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: int = 10,
    ) -> None:
        self.control_plane_id = control_plane_id
        self._simulated_gpus = simulated_gpus
        self._limits = replace(limits or limits_here(), runtime=container_runtime)
        self._minor_of = minor_of
        self._preflight = preflight
        self._mps = mps or Mps()
        self._engine = Engine(environment, timeout_s)
        super().__init__(self._engine.streams())
        self.disk = Disk(self._engine, disk or DiskSettings(), private_images, pulled_images, pull_timeouts)
        self._images = self.disk.images
        self._volumes = DockerVolumes(self._engine)
        self._observer = Observer(
            self._engine, address, records or ContainerRecords(), parent_of, simulated_gpus=simulated_gpus
        )
        self._attachments = Attachments(self._engine, self._swarm, isolate)
        self._info_lock = threading.Lock()
        self._info: tuple[float, Document] | None = None

    def facts(self) -> RuntimeFacts:
        """Return what the engine reports about its machine. An unreachable engine is a fact, not an error.

        Called every few seconds, so it also removes unused networks and restores lost firewall rules.
        """
        try:
            self._engine.ping()
            info = self.info()
            if self.control_plane_id is not None:
                self._attachments.networks.sweep(self.control_plane_id)
            not_isolated = self._attachments.isolate_all(self.control_plane_id)
            swarm = self._swarm()
            disk = self.disk.measure(info)
            if self.control_plane_id is not None:
                self._volumes.refresh(self.control_plane_id)
                self._volumes.tend_soon(self.control_plane_id, low_on_space=bool(disk and disk.pressure))
        except RuntimeUnavailable as error:
            self._info = None
            self.disk.forget()
            self._engine.forget_version()
            log.warning("%s", error)
            return facts_without_engine()
        return RuntimeFacts(
            version=info["ServerVersion"],
            cpus=info["NCPU"],
            memory_mib=info["MemTotal"] // 2**20,
            problem=self._preflight(info) or runtime_problem(info, self._limits.runtime) or not_isolated,
            simulated=False,
            swarm=swarm,
            mps=not self._simulated_gpus and self._mps.is_available(),
            disk=disk,
        )

    def info(self) -> Document:
        """Return the engine's `docker info`, at most a minute old.

        Raises:
            RuntimeUnavailable: the engine does not answer.
        """
        with self._info_lock:
            if self._info is None or time.monotonic() - self._info[0] > _INFO_EVERY_S:
                self._info = (time.monotonic(), self._engine.info())
            return self._info[1]

    def gpu_users(self, gpu_uuid: str) -> list[GpuUser]:
        """Return the containers on this GPU or MIG device, from which simulated GPUs compute their load."""
        return [gpu_user(container) for container in self._observer.running_on(gpu_uuid)]

    def containers(self) -> tuple[list[Container], list[Orphan]]:
        return self._observer.containers(self.control_plane_id)

    def volumes(self) -> Sequence[ReportedVolume] | None:
        return self._volumes.known()

    def remove_volumes(self, volume_ids: Sequence[str]) -> None:
        if self.control_plane_id is not None:
            self._volumes.remove(volume_ids, self.control_plane_id)

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        self._observer.expect(assignments)

    def start(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Container | None:
        self._require_startable(assignment)
        image = self._images.present(assignment)
        if image is None:
            raise PullNeeded(self._images.name_to_pull(assignment))
        return self._start_from(image, assignment, progress, cancelled)

    def pull(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Start | None:
        self._require_startable(assignment)  # before a pull, which may take minutes
        image = self._images.ensure(assignment, progress, cancelled)
        if image is None:
            return None
        return partial(self._start_from, image, assignment, progress, cancelled)

    def _require_startable(self, assignment: Assignment) -> None:
        """Check what does not depend on the image. Raises StartRefused or StartDelayed."""
        secret_values(assignment)  # raises if one is missing
        self._require_mps(devices_of(assignment))

    def _start_from(
        self, image: Image, assignment: Assignment, progress: Progress, cancelled: Cancelled
    ) -> Container | None:
        abilities = replace(self._abilities(), toolbox=current_toolbox(self._engine))
        if self.control_plane_id is None:
            raise RuntimeUnavailable("this node has not joined a control plane")
        config = container_config(assignment, image, abilities, self._limits, self.control_plane_id)
        with self._attachments.prepared_for(assignment, self.control_plane_id) as network_ready:
            if cancelled():
                return None
            self._volumes.ensure(assignment, self.control_plane_id)
            container_id, status = create_or_adopt(
                self._engine, self._observer, assignment, image, config, self.control_plane_id
            )
            try:
                self._volumes.require_ours(assignment, self.control_plane_id)
                network_ready()
            except (RuntimeUnavailable, StartRefused):
                if status == "created":
                    self._remove(container_id, force=True)
                raise
        if status == "created" and cancelled():
            self._remove(container_id, force=True)
            return None
        if status not in {"created", "running"}:
            # An earlier call started the container, and it has ended.
            return self._observer.read(container_id, self.control_plane_id)
        spec = assignment.spec
        if status == "created" and (spec.attach or spec.tty or spec.stdin):
            self._held.hold(container_id, stdin=spec.stdin)
        begin = partial(self._start, container_id, SecretRedactor.of(assignment))
        if assignment.group and assignment.group.network == "overlay":
            begin = partial(start_with_network, begin, network_of(assignment), progress, cancelled)
        command = command_line(spec, image)
        uuids = devices_of(assignment).gpu_uuids
        try:
            return self._start_and_verify(
                container_id, uuids, command, begin if status == "created" else None
            )
        except StartDelayed:
            self._remove(container_id, force=True)  # the next try uses the assignment as it is then
            if cancelled():
                return None
            raise
        except RuntimeUnavailable as error:
            self._engine.ping()  # raises unless only this start is the problem
            raise mount_delayed(assignment) or error from error

    def restart(self, container: Container) -> None:
        """Start an exited container again.

        Raises:
            StartRefused: it did not start, or must not run as it was created; nothing is left of it.
        """
        try:
            inspected = self._engine.container(container.container_id)
        except EngineRefused as refusal:
            if refusal.status != 404:
                raise
            message = "the container was removed from the node"
            raise StartRefused(Reason(code="container_gone", message=message)) from refusal
        if inspected["HostConfig"]["Runtime"] != self._limits.runtime:
            self._remove(container.container_id, force=True)
            message = "the node's operator has changed the container runtime; start the instance again"
            raise StartRefused(Reason(code="runtime_changed", message=message))
        self._require_mps(container)
        record = self._observer.record_of(inspected)
        redactor = SecretRedactor.of_container(inspected, record.secret_env if record else None)
        if inspected["Config"]["OpenStdin"]:
            self._held.hold(container.container_id, stdin=True)
        begin = partial(self._start, container.container_id, redactor)
        self._start_and_verify(container.container_id, container.gpu_uuids, command_of(inspected), begin)

    def begin_stop(self, container: Container) -> bool:
        began = stop.begin_stop(self._engine, container.container_id)
        if not began:
            self._observer.mark_changed(container.container_id)
        return began

    def kill(self, container: Container) -> None:
        stop.kill(self._engine, container.container_id)
        self._observer.mark_changed(container.container_id)

    def remove(self, container: Container) -> None:
        self._remove(container.container_id, force=False)

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        if self.control_plane_id is not None:
            self._attachments.overlays.keep(wanted, self.control_plane_id)

    def watch(self, on_change: Callable[[], None], ended: Callable[[], bool]) -> None:
        follow(self.changes, on_change, ended)

    def changes(self) -> Iterator[None]:
        """Yield when a container with Mooring's labels ends or is removed, until `close`.

        Raises:
            RuntimeUnavailable: the connection was lost. A frozen engine is not detected.
        """
        stream = self._engine.stream("GET", "/events", params={"filters": _EVENTS}, headers_in_s=10)
        rest = b""
        try:
            while chunk := stream.read():
                *lines, rest = (rest + chunk).split(b"\n")
                for event in map(json.loads, filter(None, map(bytes.strip, lines))):
                    if event["Action"] == "die":
                        self._observer.mark_changed(event["Actor"]["ID"])
                yield
        finally:
            stream.close()

    def close(self) -> None:
        self._engine.close()

    def _swarm(self) -> SwarmFacts | None:
        return swarm_of(self.info())

    def _abilities(self) -> Abilities:
        return self.disk.abilities(self.info(), simulated_gpus=self._simulated_gpus, mps=self._mps)

    def _require_mps(self, holder: HasDevices) -> None:
        """Raises StartDelayed if a share's MPS daemon does not run: programs would have no limits."""
        if not self._simulated_gpus:
            self._mps.require(holder.gpu_uuids, holder.share)

    def _start_and_verify(
        self, container_id: str, uuids: Sequence[str], command: list[str], begin: Begin | None
    ) -> Container:
        """Call `begin` (None: the container runs already), and verify the container's devices and command."""
        self._observer.forget(container_id)
        try:
            if begin is not None:
                begin()
            inspected = self._engine.container(container_id)
        except EngineRefused as refusal:
            self._remove(container_id, force=True)
            raise StartRefused(start_failure(refusal.message, command)) from refusal
        self._require_right_devices(inspected, uuids)
        container = self._observer.interpret(self._once_running(inspected, command), self.control_plane_id)
        if container is None:
            raise RuntimeUnavailable(f"container {container_id} cannot be interpreted after its start")
        return container

    def _start(self, container_id: str, redactor: SecretRedactor) -> None:
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                with redactor.masking():
                    self._engine.start(container_id)
            except EngineRefused as refusal:
                # Each start tries the next ports of the engine, which other processes may use.
                if not tries_left or start_failure(refusal.message, []).code != "port_in_use":
                    raise
            else:
                return

    def _require_right_devices(self, inspected: Document, uuids: Sequence[str]) -> None:
        seen = verify.gpu_minors_in(inspected["Id"], inspected["State"]["Pid"])
        reason = verify.mismatch(
            inspected, uuids, simulated=self._simulated_gpus, runtime=self._limits.runtime
        ) or verify.foreign_devices(seen, uuids, self._minor_of)
        if reason is not None:
            self._remove(inspected["Id"], force=True)
            raise StartRefused(reason, wrong_gpus=True)

    def _once_running(self, inspected: Document, command: list[str]) -> Document:
        """Wait until the command runs. Return the container's description, read again if it has ended."""
        container_id = inspected["Id"]
        has_init, pid = inspected["HostConfig"].get("Init"), inspected["State"]["Pid"]
        if not has_init or not command_failure.ended_at_once(pid):
            return inspected
        command_failure.wait_for_end(self._engine, container_id)
        inspected = self._engine.container(container_id)
        if (reason := command_failure.why_not_run(self._engine, inspected, command)) is not None:
            self._remove(container_id, force=True)
            raise StartRefused(reason)
        return inspected

    def _remove(self, container_id: str, *, force: bool) -> None:
        self._observer.forget(container_id)
        remove_container(self._engine, container_id, force=force)
