"""Simulated GPUs with the facts and typical readings of real models.

Every value is a function of the GPU's UUID, the time and the containers on the GPU: two readers of one node
agree, and a restarted reader continues where the first one stopped.
"""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mooring.agent.gpus.reader import GpuReading
from mooring.agent.nvml.types import (
    NvmlGpuFacts,
    NvmlMigDevice,
    NvmlMigSample,
    NvmlNvLinkPeer,
    NvmlProcess,
    NvmlSample,
)
from mooring.agent.runtime import Container
from mooring.agent.timestamps import rfc3339
from mooring.core.bounded_dict import BoundedDict
from mooring.core.simulation import MODELS, GpuModel, mig_memory_mib, model_key, supports_mig

NAMESPACE: Final = uuid.UUID("6d6f6f72-696e-4700-8000-736967707573")
DRIVER_VERSION: Final = "580.95.05"
CUDA_VERSION: Final = "13.0"
MAX_PIDS: Final = 10_000
PID_MAX: Final = 1 << 22  # Linux assigns no higher pid, so simulated pids match no process of this machine

# The NVLink lanes of a DGX-1 with eight V100: two fully connected quads, and four links between them.
CUBE_MESH: Final = (
    {1: 1, 2: 1, 3: 2, 4: 2},
    {0: 1, 2: 2, 3: 1, 5: 2},
    {0: 1, 1: 2, 3: 2, 6: 1},
    {0: 2, 1: 1, 2: 2, 7: 1},
    {0: 2, 5: 1, 6: 1, 7: 2},
    {1: 2, 4: 1, 6: 2, 7: 1},
    {2: 1, 4: 1, 5: 2, 7: 2},
    {3: 1, 4: 2, 5: 1, 6: 2},
)


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A container that uses a GPU or MIG device."""

    container_id: str
    may_use_mib: int | None = None  # None: all memory of the device
    uses_mib: int | None = None  # None: a varying part of what it may use


def gpu_user(container: Container, uses_mib: int | None = None) -> GpuUser:
    return GpuUser(container.container_id, container.share.memory_mib if container.share else None, uses_mib)


def gpu_uuid(node_name: str, index: int) -> str:
    """The UUID of a node's GPU: the same at every start."""
    return f"GPU-{uuid.uuid5(NAMESPACE, f'{node_name}/{index}')}"


def mig_uuid(node_name: str, index: int, number: int) -> str:
    """The UUID of a MIG device of a node's GPU."""
    return f"MIG-{uuid.uuid5(NAMESPACE, f'{node_name}/{index}/{number}')}"


class SimulatedGpuReader:
    """A GpuReader without hardware.

    Args:
        users: returns the users of the GPU or MIG device with this UUID.
        mig: the profiles of the MIG devices of each GPU; empty: MIG is disabled.
    """

    def __init__(
        self,
        node_name: str,
        count: int = 8,
        model: str = "H100",
        users: Callable[[str], Sequence[GpuUser]] = lambda _: (),
        mig: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = MODELS[model_key(model)]
        self._uuids = [gpu_uuid(node_name, index) for index in range(count)]
        devices = [_mig_devices(node_name, index, mig) for index in range(count)]
        self._inventory = tuple(
            _facts(self._model, self._uuids, index, devices[index]) for index in range(count)
        )
        self._users, self._clock = users, clock
        self._containers: BoundedDict[int, str] = BoundedDict(MAX_PIDS)  # by simulated pid

    def latest(self) -> GpuReading:
        return GpuReading(
            taken_at=time.monotonic(),
            inventory=self._inventory,
            samples=tuple(self._sample(gpu, self._clock()) for gpu in self._inventory),
            driver_version=DRIVER_VERSION,
            cuda_version=CUDA_VERSION,
            simulated=True,
        )

    def container_of(self, pid: int) -> str | None:
        """The container of a simulated process."""
        return self._containers.get(pid)

    def _sample(self, gpu: NvmlGpuFacts, at: float) -> NvmlSample:
        if gpu["mig_devices"]:
            return self._mig_sample(gpu, at)
        users = self._users(gpu["uuid"])
        self._remember_pids(gpu["uuid"], users)
        return sample(self._model, gpu["uuid"], gpu["index"], users, at)

    def _mig_sample(self, gpu: NvmlGpuFacts, at: float) -> NvmlSample:
        """With MIG the driver reports the memory of each device, but no utilization."""
        devices: list[NvmlMigSample] = []
        processes: list[NvmlProcess] = []
        for device in gpu["mig_devices"]:
            users = self._users(device["uuid"])
            self._remember_pids(device["uuid"], users)
            total = device["memory_mib"] or 0
            running = _processes(total, device["uuid"], users, at, mig_uuid=device["uuid"])
            used = sum(process["memory_used_mib"] or 0 for process in running)
            devices.append({"uuid": device["uuid"], "memory_used_mib": used, "memory_total_mib": total})
            processes += running
        any_user = [GpuUser("")] if processes else []  # makes the GPU as a whole busy
        return {
            **sample(self._model, gpu["uuid"], gpu["index"], any_user, at),
            "utilization_gpu_pct": None,
            "utilization_memory_pct": None,
            "memory_used_mib": sum(one["memory_used_mib"] or 0 for one in devices),
            "processes": processes,
            "mig_devices": devices,
        }

    def _remember_pids(self, uuid: str, users: Sequence[GpuUser]) -> None:
        for user in users:
            self._containers[_pid(uuid, user)] = user.container_id

    def wait_first(self, timeout_s: float) -> bool:
        return True

    def fresh(self, timeout_s: float) -> GpuReading:
        return self.latest()

    def on_news(self, callback: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        return


def sample(model: GpuModel, uuid: str, index: int, users: Sequence[GpuUser], at: float) -> NvmlSample:
    """The sample of this GPU at `at` (Unix time, seconds)."""
    busy, processes = bool(users), _processes(model.memory_mib, uuid, users, at)
    load = _load(uuid, at) if busy else 0.0
    power_w = model.idle_power_w + load * 0.92 * (model.power_limit_w - model.idle_power_w)
    return {
        "uuid": uuid,
        "index": index,
        "sampled_at": rfc3339(at),
        "utilization_gpu_pct": round(100 * load),
        "utilization_memory_pct": round(55 * load),
        "memory_used_mib": sum(process["memory_used_mib"] or 0 for process in processes),
        "memory_total_mib": model.memory_mib,
        "power_w": round(power_w, 1),
        "power_limit_w": float(model.power_limit_w),
        "temperature_c": round(29 + 38 * load + 3 * _phase(uuid, "temperature")),
        "sm_clock_mhz": model.sm_clock_mhz if busy else model.sm_clock_mhz // 6,
        "memory_clock_mhz": model.memory_clock_mhz,
        "fan_pct": round(30 + 50 * load) if model.has_fan else None,
        "energy_j": _energy_j(model, at),
        "processes": processes,
        "mig_devices": [],
    }


def _mig_devices(node_name: str, index: int, profiles: Sequence[str]) -> list[NvmlMigDevice]:
    return [
        {
            "uuid": mig_uuid(node_name, index, number),
            "profile": profile,
            "memory_mib": mig_memory_mib(profile),
        }
        for number, profile in enumerate(profiles)
    ]


def _facts(model: GpuModel, uuids: list[str], index: int, mig_devices: list[NvmlMigDevice]) -> NvmlGpuFacts:
    return {
        "uuid": uuids[index],
        "index": index,
        "model": model.name,
        "memory_mib": model.memory_mib,
        "pci_bus_id": f"00000000:{0x19 + 0x11 * index:02X}:00.0",
        "minor_number": index,
        "numa_node": _socket(index, len(uuids)),
        "nvlink_peers": _nvlink_peers(model, uuids, index),
        "topology": {
            uuid: "node" if _socket(index, len(uuids)) == _socket(other, len(uuids)) else "system"
            for other, uuid in enumerate(uuids)
            if other != index
        },
        "mig_mode": "enabled" if mig_devices else "disabled" if supports_mig(model) else None,
        "mig_devices": mig_devices,
        "compute_capability": model.compute_capability,
        "power_limit_w": float(model.power_limit_w),
        "fault": None,
        "recovery_action": "none",
        "conditions": [],
    }


def _nvlink_peers(model: GpuModel, uuids: list[str], index: int) -> list[NvmlNvLinkPeer]:
    if model.cube_mesh:
        lanes = CUBE_MESH[index] if index < len(CUBE_MESH) else {}
    else:
        lanes = {other: model.nvlink for other in range(len(uuids)) if other != index and model.nvlink}
    return [{"uuid": uuids[other], "links": links} for other, links in lanes.items() if other < len(uuids)]


def _socket(index: int, count: int) -> int:
    """Two sockets, with the first half of the GPUs on the first."""
    return 0 if index < (count + 1) // 2 else 1


def _load(uuid: str, at: float) -> float:
    """Between 0.62 and 0.98, in waves of 7 and 47 s with a different phase for each GPU."""
    slow = math.sin(2 * math.pi * (at / 47 + _phase(uuid, "slow")))
    fast = math.sin(2 * math.pi * (at / 7 + _phase(uuid, "fast")))
    return 0.8 + 0.12 * slow + 0.06 * fast


def _phase(uuid: str, salt: str) -> float:
    """A number in 0..1 that is constant for this GPU."""
    return _hash(uuid, salt) % 4096 / 4096


def _hash(uuid: str, salt: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(uuid[-12:] + salt))


def _energy_j(model: GpuModel, at: float) -> float:
    """A counter that only rises: idle power since the start of 2026."""
    return float(round((at - 1_767_225_600) * model.idle_power_w))


def _processes(
    memory_mib: int, uuid: str, users: Sequence[GpuUser], at: float, mig_uuid: str | None = None
) -> list[NvmlProcess]:
    """One process per user, which by default uses 66 to 84 % of the memory that the user may use."""
    part = 0.35 + 0.5 * _load(uuid, at)
    return [
        {
            "pid": _pid(uuid, user),
            "name": "python",
            "memory_used_mib": (
                round((user.may_use_mib or memory_mib) * part)
                if user.uses_mib is None
                else min(user.uses_mib, memory_mib)
            ),
            "mig_uuid": mig_uuid,
        }
        for user in users
    ]


def _pid(uuid: str, user: GpuUser) -> int:
    return PID_MAX + _hash(uuid + user.container_id[-12:], "pid") % 1_000_000
