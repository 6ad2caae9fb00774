"""Waiting and fairness over a month: the production scheduler beside what others do.

    python -m benchmarks.month --nodes FILE --pods FILE [--times 3] [--load 0.95] [--docs FOLDER]

FILEs: Alibaba's 2023 GPU trace, openb_node_list_gpu_node.csv and openb_pod_list_default.csv.
With --docs the plots and the table are written there.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.month_figures import Figures, figures
from benchmarks.month_simulation import Cluster, Decide, Outcome, simulate
from benchmarks.month_workload import machines, month
from mooring.scheduler.learning import Learning
from mooring.scheduler.memory import Memory
from mooring.scheduler.model import Placement, Policy, Request
from mooring.scheduler.schedule import Look

MOORING = "Mooring"


def mooring() -> Decide:
    memory, learning = Memory(), Learning()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        snapshot = learning.look(cluster.snapshot(waiting), memory)
        return Look(snapshot, memory).decisions().placements

    return decide


def fifo() -> Decide:
    """Strictly in the order of arrival: who does not fit holds up everybody behind."""
    memory = Memory()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        return _one_by_one(cluster, waiting, memory, stop_at_first=True)

    return decide


def best_fit() -> Decide:
    """Whatever fits starts, the oldest first; nothing is kept for who does not fit."""
    memory = Memory()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        return _one_by_one(cluster, waiting, memory, stop_at_first=False)

    return decide


def _one_by_one(
    cluster: Cluster, waiting: Sequence[Request], memory: Memory, *, stop_at_first: bool
) -> Sequence[Placement]:
    """Each asked for alone, on a copy of the cluster's nodes that shrinks."""
    copy = Cluster(cluster.machines, cluster.policy, cluster.now, dict(cluster.nodes))
    copy.nodes = dict(cluster.nodes)
    placements: list[Placement] = []
    failed: set[tuple[object, ...]] = set()
    for request in waiting:
        shape = (
            request.gpu_count, request.gpu_milli, request.cpu_milli, request.memory_mib,
            request.project_id if request.gpu_milli < 1000 else "",
        )  # fmt: skip
        found = () if shape in failed else Look(copy.snapshot([request]), memory).decisions().placements
        for placement in found:
            copy.place(placement, request)
            placements.append(placement)
        if not found:
            failed.add(shape)
            if stop_at_first:
                break
    return placements


# FIFO with EASY is the production scheduler where everybody is overdue at once: oldest first, whoever it is.
POLICIES: dict[str, tuple[Decide, Policy]] = {
    MOORING: (mooring(), Policy()),
    "Mooring, conservative": (mooring(), Policy(backfill="conservative")),
    "FIFO + EASY": (mooring(), Policy(overdue_after_s=0)),
    "FIFO": (fifo(), Policy()),
    "best fit": (best_fit(), Policy()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3, help="how often each recorded task arrives")
    parser.add_argument("--load", type=float, default=0.95, help="of the GPUs' time, asked for by the month")
    parser.add_argument("--longest-h", type=float, default=48.0, help="what ran longer ends then")
    parser.add_argument("--undeclared", type=float, default=0.0, help="the part without a declared duration")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--only", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--docs", type=Path, help="where the plots and the table go")
    asked = parser.parse_args()
    tasks = month(asked.pods, asked.times, asked.seed, asked.undeclared, asked.longest_h * 3600)
    fleet = machines(asked.nodes, tasks, asked.load, asked.seed)
    print(f"{len(tasks)} tasks, {len(fleet)} nodes, {sum(machine.gpus for machine in fleet)} GPUs")
    outcomes: dict[str, Outcome] = {}
    table = [HEAD]
    print(HEAD)
    for name in asked.only:
        decide, policy = POLICIES[name]
        cluster = Cluster(fleet, policy)
        begin = time.perf_counter()
        outcomes[name] = simulate(tasks, cluster, decide)
        seconds = time.perf_counter() - begin
        table.append(row(name, figures(outcomes[name], cluster.gpus)))
        print(table[-1], f"   {seconds:.0f} s for {outcomes[name].asked} looks", flush=True)
    if asked.docs:
        from benchmarks.month_plots import write  # noqa: PLC0415 - matplotlib takes a second

        write(asked.docs, table, outcomes, sum(machine.gpus for machine in fleet))


HEAD = (
    "| policy | mean wait, min | p99 wait, h | worst wait, h | worst wait of 8 GPUs, h | GPUs in use | Jain |"
    " never started |\n|---|---|---|---|---|---|---|---|"
)


def row(name: str, got: Figures) -> str:
    hours = (got.p99_wait_s, got.worst_wait_s, got.worst_large_wait_s)
    return (
        f"| {name} | {got.mean_wait_s / 60:.1f} | "
        + " | ".join(f"{seconds / 3600:.1f}" for seconds in hours)
        + f" | {got.utilization:.1%} | {got.jain:.3f} | {got.never} |"
    )


if __name__ == "__main__":
    main()
