"""The latency of the API while 500 MB pass through a gateway.

    python -m benchmarks.copy_beside_api [shared]

The API and its caller have one CPU for themselves, as on a machine of their own; the gateway, the node and
the client that copies have another one. With `shared`, all of them share all CPUs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from benchmarks.ssh import NAME, sleeping_instance, ssh_client

ROUNDS = 7
GETS = 1000
COPIED = 500 * 1000 * 1000
API_CPU, OTHER_CPU = 0, 1


def main(*, shared: bool) -> int:
    if not shared:
        os.sched_setaffinity(0, {OTHER_CPU})  # what is started from here on inherits it
    with ExitStack() as exits:
        made = exits.enter_context(stack.on_docker(through_proxy=False))
        client = ssh_client(made, exits.enter_context(stack.folder()), exits)
        sleeping_instance(made)
        if not shared:
            for pid in (made.server.pid, os.getpid()):
                _move_to_api_cpu(pid)
        get = partial(made.admin.get, "/v1/instances")
        copy = client.argv(NAME, f"head -c {COPIED} /dev/zero")
        ratios = []
        for number in range(ROUNDS + 1):
            idle = percentile([_timed(get) for _ in range(GETS)], 0.99) * 1e3
            busy = percentile(_while_copying(copy, get, shared=shared), 0.99) * 1e3
            print(f"GET p99: {busy:.1f} ms during a copy, {idle:.1f} ms without")
            if number:  # the first round warms both sides
                ratios.append(busy / idle)
    return 0 if verdict("GET p99, to that without a copy", median(ratios), 1.3, "") else 1


def _move_to_api_cpu(pid: int) -> None:
    """Each thread of a process, but not its children."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {API_CPU})


def _while_copying(copy: list[str], get: Callable[[], object], *, shared: bool) -> list[float]:
    """Seconds that each call took while one copy ran."""
    argv = copy if shared else ["taskset", "--cpu-list", str(OTHER_CPU), *copy]
    took = []
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as copying:
        while copying.poll() is None:
            took.append(_timed(get))
    assert copying.returncode == 0
    return took


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main(shared=sys.argv[1:] == ["shared"]))
