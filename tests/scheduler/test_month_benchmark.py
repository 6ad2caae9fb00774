"""The simulated month: no task is lost or cut short, no GPU is allocated twice; and its figures."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import month as command
from benchmarks import trace
from benchmarks.month_figures import figures, jain, jain_over_time, longest_as_oldest, max_min
from benchmarks.month_policies import CONTENDERS
from benchmarks.month_simulation import CYCLE_S, Cluster, Interval, Outcome, Started, simulate
from benchmarks.month_workload import MONTH_S, Assumed, Job, gpu_seconds, month, nodes_for
from benchmarks.trace import Machine, Recorded, synthetic

from mooring.core.policy import Policy
from mooring.scheduler.model import Placement

HOUR_S = 3600.0
LONGEST_S = 12 * HOUR_S
Work = tuple[list[Job], list[Machine]]


def recorded() -> list[Recorded]:
    """Three days of arrivals."""
    _machines, tasks = synthetic(nodes=1, count=50)
    return [
        Recorded(task, 4000 * number, 4000 * number + 5, 4000 * number + 5 + 3600 * (1 + number % 13))
        for number, task in enumerate(tasks)
    ]


@pytest.fixture(scope="module")
def work() -> Work:
    """Tasks request more GPUs than there are while they arrive."""
    jobs = month(recorded(), Assumed(times=2, longest_s=LONGEST_S))
    machines, _tasks = synthetic(nodes=9, count=1)
    return jobs, nodes_for(jobs, machines, load=0.1, seed=42)


@pytest.fixture(scope="module", params=list(CONTENDERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcome(work: Work, name: str) -> Outcome:
    jobs, fleet = work
    contender = CONTENDERS[name]
    return simulate(jobs, Cluster(fleet, contender.policy), contender.decide())


class TestAllPolicies:
    def test_each_task_starts_once_after_its_arrival(self, work: Work, outcome: Outcome) -> None:
        jobs, _fleet = work
        assert Counter(each.job.name for each in outcome.started) == Counter(job.name for job in jobs)
        assert not outcome.never
        assert all(each.waited_s >= 0 and each.at % CYCLE_S == 0 for each in outcome.started)
        assert max(each.waited_s for each in outcome.started) > HOUR_S

    def test_each_task_runs_for_its_duration(self, work: Work, outcome: Outcome) -> None:
        jobs, _fleet = work
        held = sum(each.seconds * sum(each.held.values()) / 1000 for each in outcome.intervals)
        assert held == pytest.approx(gpu_seconds(jobs))

    def test_nothing_is_allocated_twice_or_to_two_projects(self, work: Work, outcome: Outcome) -> None:
        _jobs, fleet = work
        limits = {machine.name: machine.cpu_milli for machine in fleet}
        allocated: Counter[str] = Counter()
        owners: dict[str, Counter[str]] = {}
        for _at, sign, name, project, amount in sorted(changes(outcome)):
            allocated[name] += sign * amount
            assert allocated[name] <= limits.get(name, 1000)
            if name not in limits:
                owner = owners.setdefault(name, Counter())
                owner[project] += sign * amount
                assert len(+owner) <= 1

    def test_the_wait_of_the_oldest_task_is_bounded(self, outcome: Outcome, name: str) -> None:
        """At most until it is overdue, and then until the running tasks reach their declared ends."""
        policy = CONTENDERS[name].policy
        if name != "best fit":
            bound = policy.overdue_after_s + LONGEST_S + 10 * policy.start_overhead_s + CYCLE_S
            assert longest_as_oldest(outcome) <= bound


def changes(outcome: Outcome) -> Iterator[tuple[float, int, str, str, int]]:
    """Time, sign, GPU or node, project, thousandths; at equal times, ends come before starts."""
    for each in outcome.started:
        placed, ends = each.placement, each.at + each.job.runs_s
        taken = [(allocation.gpu_uuid, allocation.milli) for allocation in placed.allocations]
        for name, amount in [*taken, (placed.node_id, placed.cpu_milli)]:
            yield each.at, 1, name, each.job.project, amount
            yield ends, -1, name, each.job.project, amount


class TestFigures:
    def test_max_min_gives_no_project_more_than_it_wants(self) -> None:
        assert max_min({"a": 1, "b": 10, "c": 10}, 9) == {"a": 1, "b": 4, "c": 4}
        assert max_min({"a": 1, "b": 2}, 9) == {"a": 1, "b": 2}

    def test_jain_is_1_if_all_have_the_same_fraction_of_their_share(self) -> None:
        assert jain({"a": 2, "b": 4}, {"a": 4, "b": 8}) == 1
        assert jain({"a": 4, "b": 0}, {"a": 4, "b": 4}) == 0.5

    def test_only_times_of_contention_count(self) -> None:
        """On the first day no task waits; on the second, one project has all that two want."""
        calm = Interval(100.0, {"a": 3000}, {"a": 3000})
        unfair = Interval(100.0, {"a": 4000, "b": 0}, {"a": 4000, "b": 4000})
        assert jain_over_time([calm, unfair], 4, window_s=100.0) == pytest.approx(
            jain({"a": 4, "b": 0}, {"a": 2, "b": 2})
        )
        assert jain_over_time([calm], 4, window_s=100.0) == 1

    def test_capacity_is_wasted_only_while_tasks_wait_for_it(self, work: Work) -> None:
        jobs, fleet = work
        never = simulate(jobs, Cluster(fleet, Policy()), lambda _cluster, _waiting: ())
        assert len(never.never) == len(jobs)
        never.intervals = [
            Interval(MONTH_S / 2, {"a": 0}, {"a": 500}),
            Interval(MONTH_S, {"a": 1000}, {"a": 1000}),
        ]
        never.started = [Started(jobs[0], jobs[0].arrives_at, Placement(jobs[0].name, "", (), 0, 0))]
        result = figures(never)
        assert result.wasted == pytest.approx(0.5 * 0.5 / never.gpus)
        assert result.used == pytest.approx(0.5 * 1.0 / never.gpus)


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, pods = files(tmp_path)
    docs = tmp_path / "docs"
    command.main([
        "--nodes", str(nodes), "--pods", str(pods), "--times", "1", "--load", "0.1", "--only", "FIFO",
        "--processes", "1", "--docs", str(docs),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    (table,) = (line for line in (docs / "table.md").read_text().splitlines() if "| FIFO" in line)
    assert table in printed
    assert {path.suffix for path in docs.iterdir()} == {".md", ".svg"}


def files(folder: Path) -> tuple[Path, Path]:
    """A trace in the format of the real one."""
    machines, _tasks = synthetic(nodes=9, count=1)
    nodes, pods = folder / "nodes.csv", folder / "pods.csv"
    rows = [f"{each.name},{each.cpu_milli},{each.memory_mib},{each.gpus},{each.model}" for each in machines]
    nodes.write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *rows]) + "\n")
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,scheduled_time"
    rows = [
        f"{task.name},{task.cpu_milli},{task.memory_mib},{task.gpus},{task.gpu_milli},,"
        f"{each.created_at},{each.deleted_at},{each.scheduled_at}"
        for each in recorded()
        for task in [each.task]
    ]
    rows.append("never-ran,1000,1000,1,1000,,5,5000,")
    pods.write_text("\n".join([head, *rows]) + "\n")
    return nodes, pods


def test_tasks_that_never_ran_are_left_out_and_copies_arrive_within_an_hour(tmp_path: Path) -> None:
    _nodes, pods = files(tmp_path)
    recorded_tasks = trace.recorded(pods)
    jobs = month(recorded_tasks, Assumed(times=2, longest_s=5 * HOUR_S, undeclared=0.5))
    assert len(jobs) == 2 * (len(recorded_tasks) - 1)
    by_name = {each.task.name: each for each in recorded_tasks}
    begin = max(each.created_at for each in recorded_tasks) - MONTH_S
    for job in jobs:
        original = by_name[job.task.name]
        assert abs(job.arrives_at - (original.created_at - begin)) <= HOUR_S
        assert job.runs_s == min(5 * HOUR_S, original.deleted_at - (original.scheduled_at or 0))
        assert job.declared_s is None or job.runs_s <= job.declared_s <= 5 * HOUR_S
    assert 0.3 < sum(job.declared_s is None for job in jobs) / len(jobs) < 0.7


def test_the_page_contains_the_output_of_the_command() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page, table = (docs / "fairness.md").read_text(), (docs / "fairness" / "table.md").read_text()
    assert table in page
    assert all(f"(fairness/{plot.name})" in page for plot in (docs / "fairness").glob("*.svg"))
