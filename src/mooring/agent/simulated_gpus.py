"""Cards that exist only in memory, with the facts and the habits of real models.

Everything is a function of the card's UUID, the time and whether somebody holds it: two readers of the
same node agree, and a restarted one goes on where the first was.
"""

import math
import time
import uuid
from collections.abc import Callable
from typing import Final

from mooring.agent.gpu_types import GpuFacts, NvLinkPeer, Process, Sample
from mooring.agent.gpus import GpuReading
from mooring.agent.timestamps import rfc3339
from mooring.core.simulation import MODELS, GpuModel, model_key

NAMESPACE: Final = uuid.UUID("6d6f6f72-696e-4700-8000-736967707573")
DRIVER_VERSION: Final = "580.95.05"
CUDA_VERSION: Final = "13.0"
PID_MAX: Final = 1 << 22  # Linux gives no process a higher one, so none of this machine's is meant

# A DGX-1's lanes between its eight V100: two quads, each fully joined, and four links across.
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


def gpu_uuid(node_name: str, index: int) -> str:
    """The UUID of a node's card: the same at every start."""
    return f"GPU-{uuid.uuid5(NAMESPACE, f'{node_name}/{index}')}"


class SimulatedGpuReader:
    """A GpuReader without hardware; `busy` tells whether somebody holds the card of a UUID."""

    def __init__(
        self,
        node_name: str,
        count: int = 8,
        model: str = "H100",
        busy: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = MODELS[model_key(model)]
        self._uuids = [gpu_uuid(node_name, index) for index in range(count)]
        self._inventory = tuple(_facts(self._model, self._uuids, index) for index in range(count))
        self._busy, self._clock = busy, clock

    def latest(self) -> GpuReading:
        return GpuReading(
            taken_at=time.monotonic(),
            inventory=self._inventory,
            samples=tuple(
                sample(self._model, uuid, index, busy=self._busy(uuid), at=self._clock())
                for index, uuid in enumerate(self._uuids)
            ),
            driver_version=DRIVER_VERSION,
            cuda_version=CUDA_VERSION,
            simulated=True,
        )

    def wait_first(self, timeout_s: float) -> bool:
        return True

    def fresh(self, timeout_s: float) -> GpuReading:
        return self.latest()

    def close(self) -> None:
        return


def sample(model: GpuModel, uuid: str, index: int, *, busy: bool, at: float) -> Sample:
    """What the card of this UUID shows at `at` (Unix time, seconds)."""
    load = _load(uuid, at) if busy else 0.0
    power_w = model.idle_power_w + load * 0.92 * (model.power_limit_w - model.idle_power_w)
    return {
        "uuid": uuid,
        "index": index,
        "sampled_at": rfc3339(at),
        "utilization_gpu_pct": round(100 * load),
        "utilization_memory_pct": round(55 * load),
        "memory_used_mib": round(model.memory_mib * (0.35 + 0.5 * load)) if busy else 0,
        "memory_total_mib": model.memory_mib,
        "power_w": round(power_w, 1),
        "power_limit_w": float(model.power_limit_w),
        "temperature_c": round(29 + 38 * load + 3 * _phase(uuid, "temperature")),
        "sm_clock_mhz": model.sm_clock_mhz if busy else model.sm_clock_mhz // 6,
        "memory_clock_mhz": model.memory_clock_mhz,
        "fan_pct": round(30 + 50 * load) if model.has_fan else None,
        "energy_j": _energy_j(model, at),
        "processes": _processes(model, uuid, load) if busy else [],
    }


def _facts(model: GpuModel, uuids: list[str], index: int) -> GpuFacts:
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
        "mig_mode": "disabled" if _knows_mig(model) else None,
        "mig_devices": [],
        "compute_capability": model.compute_capability,
        "power_limit_w": float(model.power_limit_w),
        "fault": None,
    }


def _nvlink_peers(model: GpuModel, uuids: list[str], index: int) -> list[NvLinkPeer]:
    if model.cube_mesh:
        lanes = CUBE_MESH[index] if index < len(CUBE_MESH) else {}
    else:
        lanes = {other: model.nvlink for other in range(len(uuids)) if other != index and model.nvlink}
    return [{"uuid": uuids[other], "links": links} for other, links in lanes.items() if other < len(uuids)]


def _socket(index: int, count: int) -> int:
    """Two sockets, the first half of the cards on the first."""
    return 0 if index < (count + 1) // 2 else 1


def _knows_mig(model: GpuModel) -> bool:
    return model.compute_capability in {"8.0", "9.0", "10.0"}


def _load(uuid: str, at: float) -> float:
    """Between 0.62 and 0.98, in waves of some 7 and 47 s, out of step between cards."""
    slow = math.sin(2 * math.pi * (at / 47 + _phase(uuid, "slow")))
    fast = math.sin(2 * math.pi * (at / 7 + _phase(uuid, "fast")))
    return 0.8 + 0.12 * slow + 0.06 * fast


def _phase(uuid: str, salt: str) -> float:
    """A number in 0..1 that belongs to this card."""
    return _hash(uuid, salt) % 4096 / 4096


def _hash(uuid: str, salt: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(uuid[-12:] + salt))


def _energy_j(model: GpuModel, at: float) -> float:
    """A counter that only rises: the idle power since the start of the year 2026."""
    return float(round((at - 1_767_225_600) * model.idle_power_w))


def _processes(model: GpuModel, uuid: str, load: float) -> list[Process]:
    pid = PID_MAX + _hash(uuid, "pid") % 1_000_000
    return [{"pid": pid, "name": "python", "memory_used_mib": round(model.memory_mib * (0.35 + 0.5 * load))}]
