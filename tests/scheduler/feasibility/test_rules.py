"""The tables of rules: an entry applies in all parts of the scheduler."""

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
from mooring.scheduler.model import Gang, GpuAllocation, NodeView, Request, Running, Snapshot, VolumeNeeds
from mooring.scheduler.node_changes import added, empty
from mooring.scheduler.reservations import ReservationSpec, choose, reservable_gpus
from mooring.scheduler.schedule import schedule
from tests.scheduler.busy import NOW, busy_node, request
from tests.scheduler.clusters import A10, AT, H100, gpus, node, place_one
from tests.scheduler.clusters import request as new_request

few_examples = settings(deadline=None, max_examples=30)
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


@few_examples
@given(NODES, request("i1"), OWNERS)
def test_a_rule_is_the_same_as_a_refusal_and_as_a_mask(
    nodes: tuple[NodeView, ...], pending: Request, owners: frozenset[str] | None
) -> None:
    nodes = (replace(nodes[0], reserved_for=owners), *nodes[1:])
    cluster = cached(nodes).cluster
    for rule in filters.RULES.all:
        failed = [rule.lacks(each, pending) > 0 for each in nodes]
        failed_if_empty = [rule.lacks(empty(each), pending) > 0 for each in nodes]
        with only(rule):
            assert (masks.stages(cluster, pending) < Stage.FITS).tolist() == failed
            assert (masks.stages(cluster, pending, if_empty=True) < Stage.FITS).tolist() == failed_if_empty
        if not rule.in_fleet:
            mask = masks.failing(cluster, rule, pending)
            assert ([False] * len(nodes) if mask is None else mask.tolist()) == failed
        for each in nodes:
            if rule.lacks(each, pending) > 0:
                reasons = list(rule.refuse(each, pending))
                assert reasons
                assert set(reasons) <= {
                    (refusal.code, refusal.wanted, refusal.had) for refusal in refusals(each, pending, AT)
                }


@few_examples
@given(busy_node("n1"), request("i1"))
def test_the_gpu_rules_leave_gpus_or_refuse(view: NodeView, pending: Request) -> None:
    left = gpu_rules.passing(view.gpus, pending)
    assert left == [
        gpu for gpu in view.gpus if all(each.passes(gpu, pending) for each in GPU_RULES if each.key(pending))
    ]
    assert (gpu_rules.refusal(view.gpus, pending) is None) == bool(left)
    (of_kind,) = cached((view,)).cluster.suitable(pending)
    assert bool(of_kind.models) == bool(left)


@few_examples
@given(busy_node("n1"), request("i1"))
def test_closed_and_admits_check_their_rules_only(view: NodeView, pending: Request) -> None:
    failed = [rule for rule in filters.RULES.all if rule.lacks(view, pending) > 0]
    assert closed(view, pending) == any(rule.amount is None for rule in failed)
    assert admits(view, pending) == (not any(rule.permanent for rule in failed))
    assert not failed or not fits(view, pending, AT)


def test_each_rule_that_fails_has_one_code_of_its_own() -> None:
    view = replace(
        node(labels={"zone": "b"}, cpu_milli_free=-1500, memory_mib_free=-2048, disk_mib=1024),
        reserved_for=frozenset("p"),
        disk_mib_free=-1,
        disk_pressure=True,
    )
    pending = new_request(0, node_selector={"zone": "a"}, disk_limits=True)
    pending = replace(pending, volume_needs=VolumeNeeds(frozenset({"elsewhere"})))
    found = {each.code: each.had for each in refusals(view, pending, AT)}
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


def busy(view: NodeView, *, ends_at: float | None = None, count: int = 1, gpu_count: int = 0) -> NodeView:
    for number in range(count):
        allocations = tuple(GpuAllocation(gpu.uuid) for gpu in view.gpus[:gpu_count])
        view = added(view, Running(
            f"r{number}", "p", allocations, 1000, 1024, 10, preemptible=True, since=-1e6, ends_at=ends_at
        ))  # fmt: skip
    return view


def test_a_new_rule_decides_on_placement_and_is_explained() -> None:
    pending = new_request(1)
    assert place_one([tainted()], pending, AT) is not None
    with with_rule(TAINTED):
        assert not fits(tainted(), pending, AT)
        assert place_one([tainted()], pending, AT) is None
        plan = schedule(Snapshot((tainted("n1"), node("n2", gpus(H100, on="n2"))), (pending,)))
        assert [placed.node_id for placed in plan.placements] == ["n2"]
        waiting = unplaced([tainted()], pending, AT)
    assert [each.code for each in waiting.refusals] == ["node_tainted"]
    assert (waiting.ever, waiting.code) == (False, "never_placeable")
    assert "node_tainted wanted no taint had yes" in waiting.summary


def test_a_new_rule_closes_nodes_to_backfill_preemption_gangs_and_reservations() -> None:
    full = busy(tainted(), ends_at=100.0, gpu_count=2)
    pending = new_request(2, priority=90)
    gang = Gang("g", 2, "host")
    members = tuple(new_request(2, instance_id=f"m{rank}", gang=gang) for rank in range(2))
    fleet = (tainted("n1"), node("n2", gpus(H100, 2, on="n2")))
    spec = ReservationSpec(new_request(2), 0.0, 100.0)

    def outcomes() -> tuple[bool, bool, bool, bool]:
        first = StartTimes(cached((full,)).cluster).bounds(pending, AT).values
        return (
            bool(first[0] == 130.0),
            bool(schedule(Snapshot((full,), (pending,))).evictions),
            bool(schedule(Snapshot(fleet, members)).placements),
            choose(reservable_gpus([tainted()], spec), spec) is not None,
        )

    assert outcomes() == (True, True, True, True)
    with with_rule(TAINTED):
        assert outcomes() == (False, False, False, False)
        codes = {each.code for each in schedule(Snapshot(fleet, members)).unplaced}
    assert codes == {"never_placeable"}


def test_a_new_amount_is_returned_when_instances_end_or_are_evicted() -> None:
    pending = new_request(0, priority=90)
    with with_rule(SLOTS):
        three = tuple(new_request(0, instance_id=f"i{number}") for number in range(3))
        assert len(schedule(Snapshot((node(),), three)).placements) == 2
        full = busy(node(), ends_at=100.0, count=2)
        assert unplaced([full], pending, AT).code == "waiting_for_capacity"
        assert StartTimes(cached((full,)).cluster).bounds(pending, AT).values[0] == 130.0
        assert len(schedule(Snapshot((full,), (pending,))).evictions) == 1
        no_preemption = Snapshot((full,), (replace(pending, priority=10),), now=10.0)
        assert [each.starts_at for each in schedule(no_preemption).forecasts] == [130.0]
    assert schedule(Snapshot((full,), (pending,))).placements


def test_a_new_rule_of_gpus_decides_everywhere() -> None:
    old = node("n1", gpus(A10, on="n1"))
    pending = new_request(1, priority=90)
    assert place_one([old], pending, AT) is not None
    with patch.object(gpu_rules, "GPU_RULES", (*GPU_RULES, NO_A10)):
        assert place_one([old], pending, AT) is None
        assert [each.code for each in refusals(old, pending, AT)] == ["gpu_too_old"]
        assert unplaced([old], pending, AT).code == "never_placeable"
        full = busy(old, ends_at=100.0, gpu_count=1)
        plan = schedule(Snapshot((full,), (pending,), now=NOW))
    assert (plan.evictions, plan.forecasts) == ((), ())
