"""Waiting times and fairness over a simulated month: the production scheduler and other policies.

    python -m benchmarks.month --nodes FILE --pods FILE [--times 3] [--load 0.8] [--docs FOLDER]

FILEs: Alibaba's 2023 GPU trace, openb_node_list_gpu_node.csv and openb_pod_list_default.csv.
With --docs, writes the plots and the printed table (without the seconds) to that folder.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import trace
from benchmarks.month_figures import Figures, figures
from benchmarks.month_policies import CONTENDERS
from benchmarks.month_simulation import Cluster, Outcome, simulate
from benchmarks.month_workload import MONTH_S, Assumed, Job, gpu_seconds, month, nodes_for
from benchmarks.trace import Machine

# Without conservative backfill: with slots for hundreds of requests, a cycle takes seconds and a month hours.
USUAL = [name for name in CONTENDERS if name != "Mooring, conservative"]
HEAD = (
    "| policy | mean wait, min | median, min | p99, h | worst, h | worst of 8 GPUs, h | oldest for, h "
    "| GPUs used | GPUs wasted | Jain, days | Jain, month | never started |",
    "|---" * 12 + "|",
)


def main(argv: Sequence[str] | None = None) -> None:
    options = _arguments(argv)
    assumed = Assumed(options.times, options.longest_h * 3600, options.undeclared, options.seed)
    jobs = month(trace.recorded(options.pods), assumed)
    fleet = nodes_for(jobs, trace.machines(options.nodes), options.load, options.seed)
    lines = [workload(jobs, fleet), "", *HEAD]
    print("\n".join(lines), flush=True)
    outcomes: dict[str, Outcome] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        futures = {name: pool.submit(_run, name, jobs, fleet) for name in options.only}
        for name, future in futures.items():
            outcomes[name], seconds = future.result()
            lines.append(row(name, figures(outcomes[name])))
            print(lines[-1], f"   {seconds:.0f} s for {outcomes[name].cycles} cycles", flush=True)
    if options.docs:
        from benchmarks.month_plots import write  # noqa: PLC0415 - matplotlib takes a second

        write(options.docs, lines, outcomes)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3, help="copies of each recorded task")
    parser.add_argument("--load", type=float, default=0.8, help="fraction of the GPU time that tasks request")
    parser.add_argument("--longest-h", type=float, default=48.0, help="limit of run times")
    parser.add_argument(
        "--undeclared", type=float, default=0.0, help="fraction of tasks without a declared duration"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=USUAL)
    parser.add_argument("--docs", type=Path, help="folder for the plots and the table")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args(argv)


def _run(name: str, jobs: Sequence[Job], fleet: Sequence[Machine]) -> tuple[Outcome, float]:
    contender = CONTENDERS[name]
    began = time.perf_counter()
    outcome = simulate(jobs, Cluster(fleet, contender.policy), contender.decide())
    return outcome, time.perf_counter() - began


def workload(jobs: Sequence[Job], fleet: Sequence[Machine]) -> str:
    gpus = sum(machine.gpus for machine in fleet)
    load = gpu_seconds(jobs) / (gpus * MONTH_S)
    what = f"{len(jobs)} tasks on {len(fleet)} nodes with {gpus} GPUs"
    return f"{what}. The tasks request {load:.1%} of the GPU time."


def row(name: str, result: Figures) -> str:
    cells: Iterable[str] = (
        name,
        *(f"{seconds / 60:.1f}" for seconds in (result.mean_wait_s, result.median_wait_s)),
        *(
            f"{seconds / 3600:.1f}"
            for seconds in (
                result.p99_wait_s, result.worst_wait_s, result.worst_large_wait_s, result.longest_as_oldest_s
            )
        ),
        *(f"{part:.1%}" for part in (result.used, result.wasted)),
        *(f"{index:.3f}" for index in (result.jain_days, result.jain_month)),
        str(result.never),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
