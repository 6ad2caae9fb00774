"""One agent process with many simulated nodes: threads, memory, CPU, and the time until all are ready.

python -m benchmarks.fleet [nodes] [--database postgresql]
"""

import argparse
import os
import sys
import time
from typing import Final

import psutil
from tests.nodes import join_token
from tests.service import Client
from tests.walk.product import Program

from benchmarks import stack
from benchmarks.figures import verdict

LOOK_EVERY_S: Final = 5.0
READY_WITHIN_S: Final = 900.0
SETTLE_S: Final = 15.0
MEASURE_S: Final = 30.0
THREADS: Final = 100


def main(nodes: int, database: str) -> int:
    with stack.servers(database, 1) as servers, stack.folder() as base, servers[0].client as admin:
        environment = {
            **os.environ,
            "MOORING_DATA_DIR": str(base),
            "MOORING_SERVER_URL": servers[0].url,
            "MOORING_SIMULATE": f"{nodes}x8xH100",
            "MOORING_JOIN_TOKEN": ",".join(join_token(admin) for _ in range(nodes)),
        }
        agent = Program(["agent"], environment, base / "agent.log")
        agent.start()
        try:
            began = time.monotonic()
            ready_s = _await_ready(admin, nodes, began)
            time.sleep(SETTLE_S)
            pids = (agent.pid, servers[0].pid)
            before, at = [stack.cpu_seconds(pid) for pid in pids], time.monotonic()
            time.sleep(MEASURE_S)
            shares = [
                (stack.cpu_seconds(pid) - used) / (time.monotonic() - at)
                for pid, used in zip(pids, before, strict=True)
            ]
            process = psutil.Process(agent.pid)
            threads = process.num_threads()
            print(
                f"{nodes} nodes, {database}: all ready after {ready_s:.0f} s; agent {threads} threads, "
                f"{process.memory_info().rss / 2**20:.0f} MiB, {process.num_fds()} open files, "
                f"{shares[0]:.1%} of a core; server {shares[1]:.1%} of a core; "
                f"{stack.ready_nodes(admin)} ready at the end"
            )
        finally:
            agent.stop()
    return 0 if verdict("threads of the agent", threads, THREADS) else 1


def _await_ready(admin: Client, nodes: int, began: float) -> float:
    while stack.ready_nodes(admin) < nodes:
        if time.monotonic() - began > READY_WITHIN_S:
            raise TimeoutError(f"not all of {nodes} nodes are ready")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", nargs="?", type=int, default=1000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    given = parser.parse_args()
    sys.exit(main(given.nodes, given.database))
