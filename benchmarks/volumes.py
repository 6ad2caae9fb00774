"""Create -> running with volumes, compared with the same instance without any.

    python -m benchmarks.volumes [rounds]

In turns on one dockerd: no volume, one that the node has, and one that the node creates at this start.
"""

import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from tests.service import Client

from benchmarks import stack
from benchmarks.create_to_running import BODY, REST_S, remove
from benchmarks.figures import median, verdict

BAR_MS = 10.0
_numbers = count()


def main(rounds: int) -> int:
    with stack.on_docker() as made:
        client = made.admin
        _make(client, "kept")
        sides: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "none": list,
            "existing": lambda: [{"volume": "kept", "path": "/data"}],
            "new": lambda: [{"volume": _make(client, f"new-{next(_numbers)}"), "path": "/data"}],
        }
        for mounts in sides.values():  # all sides warm
            _once(client, mounts())
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            order = list(sides)[number % 3 :] + list(sides)[: number % 3]
            for side in order:
                volumes = sides[side]()
                time.sleep(REST_S)
                taken[side].append(_once(client, volumes) * 1e3)
    medians = {side: median(times) for side, times in taken.items()}
    shown = ", ".join(f"{side} {value:.1f} ms" for side, value in medians.items())
    print(f"create -> running, {rounds} rounds, medians by volume: {shown}")
    passed = [
        verdict(f"{side} volume: added", medians[side] - medians["none"], BAR_MS, " ms")
        for side in ("existing", "new")
    ]
    return 0 if all(passed) else 1


def _make(client: Client, name: str) -> str:
    answer = client.post("/v1/volumes", json={"name": name})
    assert answer.status_code == 201, answer.text
    return name


def _once(client: Client, volumes: list[dict[str, Any]]) -> float:
    """Seconds from the create to reading `running`."""
    began = time.perf_counter()
    instance_id = client.create(**BODY, volumes=volumes)["id"]
    client.wait(instance_id, "running")
    took = time.perf_counter() - began
    remove(client, instance_id)
    return took


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
