"""Composes the agent: settings -> identity -> runtime and GPU reader -> one `Agent` per node."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from mooring.agent.disk.disk import disk_settings
from mooring.agent.docker.container_records import ContainerRecords
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.fleet import (
    EXIT_NOT_SET_UP,
    Parts,
    PlannedNode,
    ProcessNodes,
    TokenFor,
    TooFewFiles,
    allow_connections,
)
from mooring.agent.gpus.mps import Mps
from mooring.agent.gpus.processes import ProcessContainers
from mooring.agent.gpus.reader import GpuReader, NvmlGpuReader, Pace
from mooring.agent.gpus.telemetry import Machine
from mooring.agent.host.safeguards import isolation_of, preflight_of
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.images.pulled_images import PulledImages
from mooring.agent.settings import AgentSettings
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.simulated.timers import Timers
from mooring.agent.sync.client import InsecureUrl
from mooring.agent.sync.identity import NodeIdentity, StateDirectory, StateError
from mooring.core.simulation import SimulatedFleet

# How long to wait for the first reading. Without persistence mode, eight GPUs need long to initialise.
GPUS_WITHIN_S: Final = 65.0
CPUS_PER_GPU: Final = 24
MEMORY_MIB_PER_GPU: Final = 262_144
DISK_MIB_PER_GPU: Final = 4 * 2**20
SIMULATED_GPUS: Final = 8
SIMULATED_MODEL: Final = "H100"

log = logging.getLogger(__name__)


def run(
    settings: AgentSettings,
    token_for: TokenFor | None = None,
    *,
    simulate_missing: bool = False,
    parent_fd: int | None = None,
) -> int:
    """Run the nodes of these settings until a signal. Containers are left as they are.

    Args:
        token_for: returns the join token for a node's name; called only if the node has not joined yet.
            By default the settings' own token is used.
        simulate_missing: without Docker, simulate containers (and GPUs, if there are none either).
        parent_fd: when the other end of this pipe closes, the process ends as after a signal.

    Returns:
        The exit code: 0 after SIGTERM or SIGINT, 2 not set up (no token, directory in use or copied, insecure
        URL, too few open files), 3 another agent has taken over, 4 token or credential rejected.
    """
    _log_to_stderr()
    fleet = ProcessNodes(settings, token_for or (lambda _: _own_token(settings)))
    _stop_on_signals(fleet.stopping, parent_fd)
    try:
        allow_connections(sum(simulated.nodes for simulated in settings.simulate))
        fleet.begin(_plans(settings, simulate_missing))
        fleet.stopping.wait()
    except (StateError, InsecureUrl, TooFewFiles) as error:
        log.critical("%s", error)
        return EXIT_NOT_SET_UP
    finally:
        fleet.end()
    return fleet.exit_code


def _plans(settings: AgentSettings, simulate_missing: bool) -> Iterator[PlannedNode]:
    if not settings.simulate:
        yield PlannedNode(
            settings.resolved_node_name,
            settings.state_dir,
            partial(_this_machine, settings, simulate_missing=simulate_missing),
        )
        return
    log.warning("MOORING_SIMULATE is set: nodes, GPUs and containers are SIMULATED")
    timers = Timers()
    fleets = [fleet for fleet in settings.simulate for _ in range(fleet.nodes)]
    for number, fleet in enumerate(fleets, 1):
        name = f"{settings.node_name or 'sim'}-{number}"
        parts = partial(_simulated_parts, settings, fleet=fleet, timers=timers)
        yield PlannedNode(name, settings.state_dir / name, parts)


def _this_machine(settings: AgentSettings, identity: NodeIdentity, *, simulate_missing: bool) -> Parts:
    gpus = NvmlGpuReader(Pace(sample_interval_s=settings.sample_interval_s))
    docker = _docker(settings, identity, gpus)
    if not simulate_missing:
        return _real(settings, docker, gpus)
    real = _detect_real_parts(StateDirectory(settings.state_dir), docker, gpus)
    has_docker, has_gpus = "docker" in real, "gpus" in real
    if has_docker and has_gpus:
        return _real(settings, docker, gpus)
    if has_docker:
        log.warning("This machine has no NVIDIA GPU: containers are real, their 8 H100 are SIMULATED")
        gpus.close()
        docker.close()
        return _docker_with_simulated_gpus(settings, identity)
    docker.close()
    log.warning("Docker does not answer on this machine: containers are SIMULATED")
    if has_gpus:
        machine = _machine(settings, socket.gethostname())
        return Parts(_simulated_runtime(machine), gpus, machine, ProcessContainers().container_of)
    log.warning("This machine has no NVIDIA GPU either: 8 H100 are SIMULATED")
    gpus.close()
    fleet = SimulatedFleet(1, SIMULATED_GPUS, SIMULATED_MODEL)
    return _simulated_parts(settings, identity, fleet=fleet, timers=Timers())


def _detect_real_parts(state: StateDirectory, docker: DockerRuntime, gpus: GpuReader) -> frozenset[str]:
    """The parts that this machine has, or once had.

    While Docker does not answer, its containers may keep running: a simulation in its place would report them
    as gone, and release their GPUs.
    """
    before = state.real_parts()
    gpus.wait_first(GPUS_WITHIN_S)
    detected = {"docker": docker.facts().version is not None, "gpus": bool(gpus.latest().inventory)}
    real = before.union(part for part, is_present in detected.items() if is_present)
    if real != before:
        state.save_real_parts(real)
    return real


def _real(settings: AgentSettings, docker: DockerRuntime, gpus: GpuReader) -> Parts:
    return Parts(docker, gpus, _machine(settings, socket.gethostname()), ProcessContainers().container_of)


def _docker(settings: AgentSettings, identity: NodeIdentity, gpus: GpuReader) -> DockerRuntime:
    return DockerRuntime(
        address=_machine(settings, socket.gethostname()).address,
        control_plane_id=identity.control_plane_id,
        minor_of=lambda uuid: _minor_of(gpus, uuid),
        parent_of=lambda uuid: _parent_of(gpus, uuid),
        preflight=preflight_of(settings, has_gpus=lambda: bool(gpus.latest().inventory)),
        isolate=isolation_of(settings),
        private_images=PrivateImages.of_node(StateDirectory(settings.state_dir)),
        pulled_images=PulledImages.of_node(StateDirectory(settings.state_dir)),
        pull_timeouts=settings.pull_timeouts,
        records=ContainerRecords.of_node(StateDirectory(settings.state_dir)),
        container_runtime=settings.runtime,
        mps=Mps(settings.mps_pipe_directory, lambda: _shareable_gpus(gpus)),
        disk=disk_settings(settings, StateDirectory(settings.state_dir)),
    )


def _docker_with_simulated_gpus(settings: AgentSettings, identity: NodeIdentity) -> Parts:
    machine = _machine(settings, socket.gethostname())
    docker = DockerRuntime(
        address=machine.address,
        control_plane_id=identity.control_plane_id,
        simulated_gpus=True,
        disk=disk_settings(settings, StateDirectory(settings.state_dir)),
        preflight=preflight_of(settings, has_gpus=lambda: False),
        isolate=isolation_of(settings),
        private_images=PrivateImages.of_node(StateDirectory(settings.state_dir)),
        pulled_images=PulledImages.of_node(StateDirectory(settings.state_dir)),
        pull_timeouts=settings.pull_timeouts,
        records=ContainerRecords.of_node(StateDirectory(settings.state_dir)),
        container_runtime=settings.runtime,
    )
    gpus = SimulatedGpuReader(identity.node_id, SIMULATED_GPUS, SIMULATED_MODEL, users=docker.gpu_users)
    return Parts(docker, gpus, machine, gpus.container_of)


def _simulated_parts(
    settings: AgentSettings, identity: NodeIdentity, *, fleet: SimulatedFleet, timers: Timers
) -> Parts:
    machine = _machine(settings, identity.node_name)
    size = max(1, fleet.gpus)
    runtime = SimulatedRuntime(
        cpus=CPUS_PER_GPU * size,
        memory_mib=MEMORY_MIB_PER_GPU * size,
        disk_mib=DISK_MIB_PER_GPU * size,
        address=machine.address,
        mps=fleet.mps,
        timers=timers,
    )
    gpus = SimulatedGpuReader(
        identity.node_id, fleet.gpus, fleet.model, users=runtime.gpu_users, mig=fleet.mig
    )
    return Parts(runtime, gpus, machine, gpus.container_of)


def _simulated_runtime(machine: Machine) -> SimulatedRuntime:
    memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return SimulatedRuntime(cpus=os.cpu_count() or 1, memory_mib=memory_mib, address=machine.address)


def _machine(settings: AgentSettings, hostname: str) -> Machine:
    address = settings.node_address or address_towards(settings.server_url)
    return Machine(hostname, address, settings.node_labels, settings.overrides)


def address_towards(url: str) -> str:
    """This machine's address on the route to a server. A UDP connect sends no packet."""
    parts = urlsplit(url)
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _minor_of(gpus: GpuReader, uuid: str) -> int | None:
    for gpu in gpus.latest().inventory or ():
        if uuid in {gpu["uuid"], *(device["uuid"] for device in gpu["mig_devices"])}:
            return gpu["minor_number"]
    return None


def _parent_of(gpus: GpuReader, mig_uuid: str) -> str | None:
    for gpu in gpus.latest().inventory or ():
        if mig_uuid in {device["uuid"] for device in gpu["mig_devices"]}:
            return gpu["uuid"]
    return None


def _shareable_gpus(gpus: GpuReader) -> list[str]:
    """GPUs without MIG devices: only these can be shared."""
    return [gpu["uuid"] for gpu in gpus.latest().inventory or () if gpu["mig_mode"] != "enabled"]


def _own_token(settings: AgentSettings) -> str | None:
    return settings.join_token.get_secret_value() if settings.join_token else None


def _stop_on_signals(stopping: threading.Event, parent_fd: int | None) -> None:
    if threading.current_thread() is threading.main_thread():
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)  # as `set_wakeup_fd` requires
        # Written to as soon as a signal arrives. A handler in Python runs in the main thread, which may be
        # about to block in `wait`, or be inside it: it would run too late, or deadlock if it set the event.
        signal.set_wakeup_fd(write_fd)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=_await_signal, args=[read_fd, stopping], name="signals", daemon=True).start()
    if parent_fd is not None:
        threading.Thread(target=_await_parent, args=[parent_fd, stopping], name="parent", daemon=True).start()


def _await_signal(read_fd: int, stopping: threading.Event) -> None:
    os.read(read_fd, 1)
    stopping.set()


def _await_parent(parent_fd: int, stopping: threading.Event) -> None:
    """Wait for the end of the parent: even after SIGKILL, its end of the pipe closes."""
    while os.read(parent_fd, 1):
        pass
    log.info("the parent process is gone")
    stopping.set()


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every call
