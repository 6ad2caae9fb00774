"""What a report says about the machine, its GPUs and their faults.

While NVML fails, the node reports a problem, so that nothing new is placed. For a minute it still reports the
last inventory, because a driver call that hangs changes no GPU. After that the GPUs are unknown.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from mooring import __version__
from mooring.agent.gpus.faults import GpuFaults
from mooring.agent.gpus.reader import NOT_READ_YET, GpuReader, GpuReading
from mooring.agent.nvml.types import NodeFault, NvmlSample
from mooring.agent.runtime import Container, RuntimeFacts, facts_without_engine
from mooring.core.gpu import GpuFacts
from mooring.core.node import NodeFacts
from mooring_client.schemas.gpus import Sample
from mooring_client.schemas.states import Reason

INVENTORY_KEPT_S: Final = 60

ContainerOf = Callable[[int], str | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the settings say about this machine."""

    hostname: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()  # safety checks that the operator has turned off


class Telemetry:
    """Uses the reader's newest reading, without waiting. Call from one thread at a time, except `faults`."""

    def __init__(
        self, gpus: GpuReader, container_of: ContainerOf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader, self._container_of, self._clock = gpus, container_of, clock
        self._failing_since: float | None = None
        self._inventory: tuple[object, list[GpuFacts]] = (None, [])  # as read, and validated
        self.faults = GpuFaults(self._recovery_of, clock)

    def reading(self) -> GpuReading:
        """The newest reading. Its error and its events are noted."""
        reading = self._reader.latest()
        if reading.error is None:
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = self._clock()
        self.faults.add_events(reading.events)
        return reading

    def inventory(self, reading: GpuReading) -> list[GpuFacts] | None:
        if reading.inventory is None or self._failing_for_long():
            return None
        if reading.inventory is not self._inventory[0]:
            facts = [GpuFacts.model_validate(gpu) for gpu in reading.inventory]
            self._inventory = (reading.inventory, facts)
            for gpu in reading.unreadable:
                log.error("GPU %s cannot be read (%s), so it is not reported", gpu["index"], gpu["code"])
        return self._inventory[1]

    def samples(self, reading: GpuReading, containers: Iterable[Container]) -> list[Sample]:
        """The live samples. Each process of an instance has the instance's id."""
        instance_ids = {container.container_id: container.instance_id for container in containers}
        return [self._attributed(sample, instance_ids) for sample in reading.samples]

    def _failing_for_long(self) -> bool:
        return self._failing_since is not None and self._clock() - self._failing_since > INVENTORY_KEPT_S

    def _recovery_of(self, uuid: str) -> str | None:
        matches = (gpu for gpu in self._reader.latest().inventory or () if gpu["uuid"] == uuid)
        return next((gpu["recovery_action"] for gpu in matches), None)

    def _attributed(self, sample: NvmlSample, instance_ids: Mapping[str, str]) -> Sample:
        """`instance_ids`: by container id."""
        if not sample["processes"]:
            return Sample.model_validate(sample)
        processes = []
        for process in sample["processes"]:
            container_id = self._container_of(process["pid"])
            processes.append({**process, "instance_id": instance_ids.get(container_id or "")})
        return Sample.model_validate({**sample, "processes": processes})


def gpu_problem(error: NodeFault | None) -> Reason | None:
    """Why nothing may be placed on this node, if its GPUs cannot be read."""
    if error is None or error == NOT_READ_YET:
        return None
    return Reason(code=error["code"], message=error["message"])


def node_facts(machine: Machine, engine: RuntimeFacts, reading: GpuReading) -> NodeFacts:
    return NodeFacts(
        hostname=machine.hostname,
        address=machine.address,
        cpus=engine.cpus,
        memory_mib=engine.memory_mib,
        labels=dict(machine.labels),
        agent_version=__version__,
        docker_version=engine.version,
        driver_version=reading.driver_version,
        cuda_version=reading.cuda_version,
        simulated_containers=engine.simulated,
        simulated_gpus=reading.simulated,
        overrides=list(machine.overrides),
        mps=engine.mps,
        grants=True,
        asks_for_secrets=True,
        asks_for_streams=True,
        fences_itself=True,
        mounts_volumes=True,
        swarm=engine.swarm,
        disk=engine.disk,
    )


def unknown_engine() -> RuntimeFacts:
    """The facts reported before the container engine has answered for the first time."""
    message = "The container engine of this node has not answered yet"
    return replace(facts_without_engine(), problem=Reason(code="docker_unavailable", message=message))
