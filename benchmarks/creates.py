"""Creates a second on SQLite with simulated nodes, at 16 clients.

    python -m benchmarks.creates [seconds]

The nodes' 80 GPUs are soon held and the queue grows: the rate is that of a control plane that also schedules,
syncs with ten nodes and tells thousands why they wait.
"""

import sys

from benchmarks import load, stack
from benchmarks.figures import median, percentile, verdict

BODY: dict[str, object] = {"image": "busybox:1", "command": ["sleep", "100000"], "gpus": {"count": 1}}


def main(seconds: float) -> int:
    with stack.server_alone() as server, stack.simulated_fleet(server, "10x8xH100"):
        made = load.closed_loop(server.url, "POST", "/v1/instances", BODY, seconds)
        with server.client as admin:
            running = len(admin.items("/v1/instances", state="running", limit=200))
    latencies = made.latencies_s
    print(f"{len(latencies)} creates in {made.seconds:.1f} s at {load.CLIENTS} clients: median "
          f"{median(latencies) * 1e3:.1f} ms, p99 {percentile(latencies, 0.99) * 1e3:.1f} ms; "
          f"{running} run on 80 GPUs")  # fmt: skip
    held = [
        verdict("creates a second", made.rate, 300, "/s", at_least=True),
        verdict("p99", percentile(latencies, 0.99) * 1e3, 150, " ms"),
        verdict("GPUs in use at the end", running, 80, at_least=True),
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 20))
