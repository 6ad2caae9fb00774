"""The packing benchmark on a synthetic trace: its output, and that its checks find errors."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import decisions, packing, trace
from benchmarks.packing_checks import Placed, broken_rules
from benchmarks.trace import Machine, Task

MACHINES = [Machine("a", 8000, 16_000, 2, "A"), Machine("b", 8000, 16_000, 1, "B")]
WHOLE = Task("whole", 4000, 8000, 1, 1000, ())
SHARE = Task("share", 1000, 1000, 1, 600, ("A",))


def wrong(offered: list[Task], placed: list[Placed]) -> list[str]:
    return list(broken_rules(MACHINES, offered, placed))


class TestChecks:
    def test_valid_placements(self) -> None:
        assert not wrong([WHOLE, SHARE, WHOLE], [Placed("a", (0,)), Placed("a", (1,)), Placed("b", (0,))])

    @pytest.mark.parametrize(
        ("offered", "placed", "what"),
        [
            ([SHARE, SHARE], [Placed("a", (0,)), Placed("a", (0,))], "more than a had"),
            ([SHARE], [Placed("b", (0,))], "wanted ('A',) and got B"),
            ([WHOLE], [Placed("", ())], "was dropped and fits a"),
            ([replace(WHOLE, models=("B",))], [Placed("", ())], "was dropped and fits b"),
            ([replace(WHOLE, gpus=2)], [Placed("a", (0, 0))], "wanted 2 GPUs"),
            ([WHOLE], [Placed("b", (1,))], "wanted 1 GPUs"),
            ([replace(WHOLE, cpu_milli=9000)], [Placed("a", (0,))], "more than a had"),
            ([replace(WHOLE, memory_mib=17_000)], [Placed("a", (0,))], "more than a had"),
        ],
    )
    def test_errors_are_found(self, offered: list[Task], placed: list[Placed], what: str) -> None:
        (found,) = wrong(offered, placed)
        assert what in found

    def test_a_task_without_gpus_that_fits_is_not_dropped(self) -> None:
        assert wrong([Task("cpu", 8000, 1, 0, 0, ())], [Placed("", ())])
        assert not wrong([Task("cpu", 8001, 1, 0, 0, ())], [Placed("", ())])


class TestProtocol:
    def test_every_task_is_offered_once_then_some_again(self) -> None:
        machines, tasks = trace.synthetic(nodes=30, count=100)
        milli = 1000 * sum(machine.gpus for machine in machines)
        offered = trace.arrivals(tasks, milli, 1.3, 42)
        assert sorted(task.name for task in offered[:100]) == sorted(task.name for task in tasks)
        requested = sum(task.milli for task in offered)
        assert 1.3 * milli - 8000 <= requested <= 1.3 * milli
        assert offered == trace.arrivals(list(reversed(tasks)), milli, 1.3, 42)
        assert offered != trace.arrivals(tasks, milli, 1.3, 43)

    def test_of_a_longer_list_a_random_part_is_offered(self) -> None:
        _machines, tasks = trace.synthetic(nodes=1, count=100)
        offered = trace.arrivals(tasks, 10_000, 1.3, 42)
        assert 5_000 <= sum(task.milli for task in offered) <= 13_000
        names = [task.name for task in offered]
        assert len(names) == len(set(names)) > 0
        assert set(names) < {task.name for task in tasks}
        assert offered != trace.arrivals(tasks, 10_000, 1.3, 43)

    def test_without_gpu_spec_any_model_is_accepted(self, tmp_path: Path) -> None:
        path = tmp_path / "pods.csv"
        path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\npod,4000,8192,1,460\n")
        assert trace.tasks(path) == [Task("pod", 4000, 8192, 1, 460, ())]


def test_the_command_prints_means_and_writes_placements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one.csv", "two.csv"):
        arguments = ["--synthetic", "--seeds", "42..43", "--placements", str(tmp_path / name)]
        assert packing.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "rules broken: 0" in printed
    assert "130" in printed
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()
    with (tmp_path / "one.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["seed"] for row in rows} == {"42", "43"}
    assert [row["offer"] for row in rows if row["seed"] == "43"][:2] == ["0", "1"]
    _machines, tasks = trace.synthetic(nodes=60, count=400)
    gpus = {task.name: task.gpus for task in tasks}
    assert all(
        not row["node"] or len(row["gpu_indices"].split("-")) == max(1, gpus[row["pod"]]) for row in rows
    )


def test_it_packs_better_than_other_policies() -> None:
    """By three points on this trace; the test fails if a change of the potential loses two of them."""
    machines, tasks = trace.synthetic(nodes=60, count=400)
    milli = 1000 * sum(machine.gpus for machine in machines)

    def full(policy: str) -> float:
        runs = [packing.run(policy, machines, tasks, 1.3, seed) for seed in (42, 43, 44)]
        pairs = [pair for ran in runs for pair in zip(ran.offered, ran.placed, strict=True)]
        return 100 * sum(task.milli for task, placed in pairs if placed.node) / milli / len(runs)

    assert full("mooring") - 1 > full("fgd") > full("best-fit") + 1


@pytest.mark.parametrize("policy", ["fgd", "best-fit", "random"])
def test_other_policies_keep_the_same_rules(policy: str) -> None:
    machines, tasks = trace.synthetic(nodes=20, count=100)
    ran = packing.run(policy, machines, tasks, 1.3, 42)
    assert not ran.wrong
    assert any(not placed.node for placed in ran.placed)


def test_broken_rules_set_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    rule = "offer 0 (whole) was dropped and fits a"
    assert packing.verdict([packing.Run(42, [WHOLE], [Placed("", ())], [0.001], [rule])]) == 1
    assert f"seed 42: {rule}" in capsys.readouterr().err
    assert packing.verdict([packing.Run(42, [WHOLE], [Placed("a", (0,))], [0.001], [])]) == 0


def test_without_a_trace_it_prints_where_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert packing.main([]) == 2
    assert "hkust-adsl/kubernetes-scheduler-simulator" in capsys.readouterr().err


def test_the_rate_of_decisions_is_measured_on_a_busy_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    decisions.main(["--nodes", "5", "--decisions", "20"])
    table = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    head, _rule, *rows = [[cell.strip() for cell in line] for line in table]
    assert head == ["nodes", "GPUs", "filling/s", "busy/s", "alone/s", "median us", "p99 us"]
    assert [row[:2] for row in rows] == [["5", "40"]]


def test_the_page_contains_the_output_of_the_command() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "speed" / "decisions.md").read_text() in (docs / "speed.md").read_text()
