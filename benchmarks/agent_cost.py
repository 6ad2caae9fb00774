"""CPU (percent of a core) and resident memory of an agent that reads 8 GPUs once a second.

    python -m benchmarks.agent_cost [seconds]

Counts the agent and its NVML child process, on the test bed's dockerd and the NVML stand-in.
"""

import sys
import time

import psutil

from benchmarks import stack
from benchmarks.figures import verdict


def main(seconds: float) -> int:
    with stack.on_docker(gpus=8) as made:
        time.sleep(5)
        share = stack.cpu_share(made.agent.pid, seconds)
        processes = [psutil.Process(made.agent.pid), *made.agent.children()]
        resident = sum(process.memory_info().rss for process in processes) / 2**20
        shared = sum(process.memory_full_info().pss for process in processes) / 2**20
    print(f"{len(processes)} processes, {resident:.0f} MiB resident ({shared:.0f} MiB proportional)")
    passed = [
        verdict("agent's CPU", share, 1, " % of a core"),
        verdict("agent's resident memory", resident, 120, " MiB"),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60))
