"""The tables of rules: one entry decides in all parts of the scheduler."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.scheduler.backfill.planner import StartTimes
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import unplaced
from mooring.scheduler.feasibility import filters, gpu_rules, masks
from mooring.scheduler.feasibility.filters import Amount, NodeRule, NodeRules, admits, closed, fits, refusals
from mooring.scheduler.feasibility.gpu_rules import GPU_RULES, GpuRule
from mooring.scheduler.feasibility.stages import Stage
from mooring.scheduler.model import Gang, GpuAllocation, NodeView, Request, Running, Snapshot
from mooring.scheduler.node_changes import added, empty
from mooring.scheduler.reservations import ReservationSpec, choose, reservable_gpus
from mooring.scheduler.schedule import schedule
from tests.scheduler.busy import NOW, busy_node, request
from tests.scheduler.clusters import A10, AT, H100, gpus, node, place_one
from tests.scheduler.clusters import request as asks

property_of = settings(deadline=None, max_examples=30)
NODES = st.tuples(*(busy_node(f"n{number}") for number in range(2)))
OWNERS = st.sampled_from([None, None, frozenset("a"), frozenset("bc")])


@contextmanager
def only(*rules: NodeRule) -> Iterator[None]:
    with patch.object(filters, "RULES", NodeRules(*rules)):
        yield


@contextmanager
def with_rule(rule: NodeRule) -> Iterator[None]:
    with only(*filters.RULES.all, rule):
        yield


def cached(nodes: tuple[NodeView, ...]) -> CycleCache:
    cache = CycleCache()
    cache.update(nodes)
    return cache


@property_of
@given(NODES, request("i1"), OWNERS)
def test_a_rule_is_the_same_as_a_refusal_and_as_a_mask(
    nodes: tuple[NodeView, ...], asked: Request, owners: frozenset[str] | None
) -> None:
    nodes = (replace(nodes[0], reserved_for=owners), *nodes[1:])
    cluster = cached(nodes).cluster
    for rule in filters.RULES.all:
        failed = [rule.lacks(each, asked) > 0 for each in nodes]
        failed_if_empty = [rule.lacks(empty(each), asked) > 0 for each in nodes]
        with only(rule):
            assert (masks.stages(cluster, asked) < Stage.FITS).tolist() == failed
            assert (masks.stages(cluster, asked, if_empty=True) < Stage.FITS).tolist() == failed_if_empty
        if not rule.in_fleet:
            mask = masks.failing(cluster, rule, asked)
            assert ([False] * len(nodes) if mask is None else mask.tolist()) == failed
        for each in nodes:
            if rule.lacks(each, asked) > 0:
                reasons = list(rule.refuse(each, asked))
                assert reasons
                assert set(reasons) <= {
                    (refusal.code, refusal.wanted, refusal.had) for refusal in refusals(each, asked, AT)
                }


@property_of
@given(busy_node("n1"), request("i1"))
def test_the_rules_of_a_gpu_leave_gpus_or_refuse(there: NodeView, asked: Request) -> None:
    left = gpu_rules.passing(there.gpus, asked)
    assert left == [
        gpu for gpu in there.gpus if all(each.passes(gpu, asked) for each in GPU_RULES if each.key(asked))
    ]
    assert (gpu_rules.refusal(there.gpus, asked) is None) == bool(left)
    (of_kind,) = cached((there,)).cluster.suitable(asked)
    assert bool(of_kind.models) == bool(left)


@property_of
@given(busy_node("n1"), request("i1"))
def test_the_groups_of_rules(there: NodeView, asked: Request) -> None:
    failed = [rule for rule in filters.RULES.all if rule.lacks(there, asked) > 0]
    assert closed(there, asked) == any(rule.amount is None for rule in failed)
    assert admits(there, asked) == (not any(rule.permanent for rule in failed))
    assert not failed or not fits(there, asked, AT)


def test_each_rule_has_codes_of_its_own() -> None:
    there = replace(
        node(labels={"zone": "b"}, cpu_milli_free=-1500, memory_mib_free=-2048, disk_mib=1024),
        reserved_for=frozenset("p"),
        disk_mib_free=-1,
        disk_pressure=True,
    )
    asked = asks(0, node_selector={"zone": "a"}, disk_limits=True)
    found = {each.code: each.had for each in refusals(there, asked, AT)}
    assert len(found) == len(filters.RULES.all) - 2  # it is ready, and reports its disk
    # More may be in use than there is, for example once the memory of a node was reduced.
    assert found["insufficient_cpu"] == "0"
    assert found["insufficient_memory"] == found["insufficient_disk"] == "0 GiB"


# ---- a new rule is one entry

TAINTED = NodeRule(
    "taint",
    lambda node, _request: "taint" in node.labels,
    lambda node, _request: [("node_tainted", "no taint", node.labels["taint"])],
    permanent=True,
)
# At most two instances on a node.
SLOTS = NodeRule(
    "slots",
    lambda node, _request: len(node.running) - 1,
    lambda node, _request: [("no_slot", "a slot", f"{len(node.running)} instances")],
    amount=Amount(lambda _request, _node: 1, lambda node: 2 - len(node.running), lambda _running: 1),
)
NO_A10 = GpuRule(
    Stage.CAPABILITY,
    lambda _request: True,
    lambda gpu, _request: gpu.model != A10,
    lambda _request, _gpus: ("gpu_too_old", "a newer GPU", A10),
)


def tainted(node_id: str = "n1") -> NodeView:
    return node(node_id, gpus(H100, 2, on=node_id), labels={"taint": "yes"})


def busy(there: NodeView, *, ends_at: float | None = None, count: int = 1, gpu_count: int = 0) -> NodeView:
    for number in range(count):
        allocations = tuple(GpuAllocation(gpu.uuid) for gpu in there.gpus[:gpu_count])
        there = added(there, Running(
            f"r{number}", "p", allocations, 1000, 1024, 10, preemptible=True, since=-1e6, ends_at=ends_at
        ))  # fmt: skip
    return there


def test_a_new_rule_decides_on_placement_and_is_explained() -> None:
    asked = asks(1)
    assert place_one([tainted()], asked, AT) is not None
    with with_rule(TAINTED):
        assert not fits(tainted(), asked, AT)
        assert place_one([tainted()], asked, AT) is None
        plan = schedule(Snapshot((tainted("n1"), node("n2", gpus(H100, on="n2"))), (asked,)))
        assert [placed.node_id for placed in plan.placements] == ["n2"]
        waiting = unplaced([tainted()], asked, AT)
    assert [each.code for each in waiting.refusals] == ["node_tainted"]
    assert (waiting.ever, waiting.code) == (False, "never_placeable")
    assert "node_tainted wanted no taint had yes" in waiting.summary


def test_a_new_rule_closes_nodes_to_backfill_preemption_gangs_and_reservations() -> None:
    full = busy(tainted(), ends_at=100.0, gpu_count=2)
    asked = asks(2, priority=90)
    gang = Gang("g", 2, "host")
    members = tuple(asks(2, instance_id=f"m{rank}", gang=gang) for rank in range(2))
    fleet = (tainted("n1"), node("n2", gpus(H100, 2, on="n2")))
    spec = ReservationSpec(asks(2), 0.0, 100.0)

    def outcomes() -> tuple[bool, bool, bool, bool]:
        first = StartTimes(cached((full,)).cluster).bounds(asked, AT).values
        return (
            bool(first[0] == 130.0),
            bool(schedule(Snapshot((full,), (asked,))).evictions),
            bool(schedule(Snapshot(fleet, members)).placements),
            choose(reservable_gpus([tainted()], spec), spec) is not None,
        )

    assert outcomes() == (True, True, True, True)
    with with_rule(TAINTED):
        assert outcomes() == (False, False, False, False)
        codes = {each.code for each in schedule(Snapshot(fleet, members)).unplaced}
    assert codes == {"never_placeable"}


def test_a_new_amount_is_returned_when_instances_end_or_are_evicted() -> None:
    asked = asks(0, priority=90)
    with with_rule(SLOTS):
        three = tuple(asks(0, instance_id=f"i{number}") for number in range(3))
        assert len(schedule(Snapshot((node(),), three)).placements) == 2
        full = busy(node(), ends_at=100.0, count=2)
        assert unplaced([full], asked, AT).code == "waiting_for_capacity"
        assert StartTimes(cached((full,)).cluster).bounds(asked, AT).values[0] == 130.0
        assert len(schedule(Snapshot((full,), (asked,))).evictions) == 1
        calm = Snapshot((full,), (replace(asked, priority=10),), now=10.0)
        assert [each.starts_at for each in schedule(calm).forecasts] == [130.0]
    assert schedule(Snapshot((full,), (asked,))).placements


def test_a_new_rule_of_gpus_decides_everywhere() -> None:
    old = node("n1", gpus(A10, on="n1"))
    asked = asks(1, priority=90)
    assert place_one([old], asked, AT) is not None
    with patch.object(gpu_rules, "GPU_RULES", (*GPU_RULES, NO_A10)):
        assert place_one([old], asked, AT) is None
        assert [each.code for each in refusals(old, asked, AT)] == ["gpu_too_old"]
        assert unplaced([old], asked, AT).code == "never_placeable"
        full = busy(old, ends_at=100.0, gpu_count=1)
        plan = schedule(Snapshot((full,), (asked,), now=NOW))
    assert (plan.evictions, plan.forecasts) == ((), ())
