"""Invariants of every plan, checked together because clusters are slow to draw."""

from dataclasses import replace
from itertools import combinations
from math import inf

from hypothesis import event, given, settings

from mooring.scheduler.feasibility.filters import fits
from mooring.scheduler.feasibility.needs import needs, preference
from mooring.scheduler.model import Eviction, Gang, NodeView, Request, Running, Snapshot
from mooring.scheduler.node_changes import empty
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.schedule import schedule
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.busy import after, breaches, rebuilt, snapshots, time_after_evictions


@settings(deadline=None, max_examples=100)
@given(snapshots())
def test_invariants_of_every_plan(snapshot: Snapshot) -> None:
    plan = schedule(snapshot)
    for check in (
        nothing_is_overcommitted,
        placements_match_their_requests,
        each_request_is_placed_or_unplaced,
        unplaced_requests_fit_nowhere_or_wait_their_turn,
        forecast_requests_fit_at_their_start_time,
        gangs_are_placed_whole,
        evictions_are_allowed_and_needed,
    ):
        check(snapshot, plan)


def nothing_is_overcommitted(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    """No rule of `breaches` is broken, for example no GPU is allocated beside its MIG devices."""
    event(f"placed: {len(plan.placements)}")
    cluster = after(snapshot, plan)
    broken = {node.id: breaches(node, snapshot, cluster.requests) for node in cluster.nodes.values()}
    assert not any(broken.values()), broken


def placements_match_their_requests(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    requests = {request.instance_id: request for request in snapshot.requests}
    cluster = {node.id: node for node in snapshot.nodes}
    for placed in plan.placements:
        request, node = requests[placed.instance_id], cluster[placed.node_id]
        gpu_views = [gpu for gpu in node.gpus if gpu.uuid in placed.gpu_uuids]
        assert len(placed.allocations) == request.gpu_count
        assert all(allocation.milli == request.gpu_milli for allocation in placed.allocations)
        assert len({gpu.model for gpu in gpu_views}) <= 1
        assert all(preference(request, gpu.model) is not None for gpu in gpu_views)
        assert all(
            (gpu.compute_capability or "") >= (request.gpu_min_compute_capability or "") for gpu in gpu_views
        )
        if request.mig_profile is None:
            assert all(gpu.memory_mib >= (request.gpu_min_memory_mib or 0) for gpu in gpu_views)
        if request.same_numa and request.gpu_count > 1:
            assert len({gpu.numa_node for gpu in gpu_views}) == 1
            assert gpu_views[0].numa_node is not None
        assert node.state is NodeState.READY
        assert request.node_selector.items() <= node.labels.items()
        assert (placed.cpu_milli, placed.memory_mib) == needs(request, node)


def each_request_is_placed_or_unplaced(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    decided = [placed.instance_id for placed in plan.placements]
    decided += [waiting.instance_id for waiting in plan.unplaced]
    assert sorted(decided) == sorted(request.instance_id for request in snapshot.requests)
    assert list(plan.order) == [waiting.instance_id for waiting in plan.unplaced]


def unplaced_requests_fit_nowhere_or_wait_their_turn(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    cluster = after(snapshot, plan).nodes.values()
    requests = {request.instance_id: request for request in snapshot.requests}
    for waiting in plan.unplaced:
        request = requests[waiting.instance_id]
        event(waiting.code)
        assert waiting.summary
        if request.gang is None:
            assert waiting.ever == any(fits(empty(node), request, snapshot.at) for node in cluster)
            fits_now = any(fits(node, request, snapshot.at) for node in cluster)
            assert fits_now == (waiting.code == "waiting_for_turn")
            assert not fits_now or plan.forecasts


def forecast_requests_fit_at_their_start_time(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    """The first request with a slot on a node fits once the instances in `waits_for` have ended."""
    cluster = after(snapshot, plan)
    for forecast in plan.forecasts:
        pending = cluster.requests[forecast.instance_id]
        if pending.gang is not None:
            continue
        where = cluster.nodes[forecast.node_ids[0]]
        start = snapshot.now if forecast.starts_at is None else forecast.starts_at
        left = [
            each
            for each in where.running
            if each.instance_id not in forecast.waits_for
            and _ends(each, snapshot) > start
            and not _in_own_reservation(where, each, snapshot.now)
        ]
        others = [each for each in plan.forecasts if each.node_ids == forecast.node_ids]
        if others[0] == forecast:
            assert fits(rebuilt(where, left), pending, replace(snapshot.at, now=start))
        event("a start time" if forecast.starts_at else "a drained node")


def _in_own_reservation(node: NodeView, each: Running, now: float) -> bool:
    """Whether the instance uses GPUs that are reserved for its project: that takes precedence over slots."""
    uuids = {allocation.gpu_uuid for allocation in each.allocations}
    return any(
        gpu.uuid in uuids and period.project_id == each.project_id and period.from_at <= now < period.to_at
        for gpu in node.gpus
        for period in gpu.reserved
    )


def _ends(each: Running, snapshot: Snapshot) -> float:
    if each.ends_at is None:
        return inf
    return max(each.ends_at, snapshot.now) + snapshot.policy.start_overhead_s


def gangs_are_placed_whole(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    members = {each.instance_id: each for each in snapshot.requests if each.gang}
    by_id = {each.id: each for each in snapshot.nodes}
    placed = [each for each in plan.placements if each.instance_id in members]
    assert len(placed) in {0, len(members)}
    event(f"gang: {bool(members)}, placed: {bool(placed)}")
    nodes = [by_id[node_id] for node_id in sorted({each.node_id for each in placed})]
    if any(each.code == "never_placeable" for each in plan.unplaced if each.instance_id in members):
        emptied = tuple(map(empty, snapshot.nodes))
        alone = Snapshot(emptied, tuple(members.values()), now=snapshot.now, policy=snapshot.policy)
        assert not schedule(alone).placements
    gang = members[placed[0].instance_id].gang if placed else None
    if gang == Gang("gang", len(members), "overlay") and len(nodes) > 1:
        assert len({node.swarm for node in nodes}) == 1
        assert nodes[0].swarm is not None


def evictions_are_allowed_and_needed(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    event(f"evictions: {len(plan.evictions)}")
    requests = {each.instance_id: each for each in snapshot.requests}
    running = {run.instance_id: run for each in snapshot.nodes for run in each.running}
    for eviction in plan.evictions:
        victim, request = running[eviction.instance_id], requests[eviction.for_instance_id]
        _assert_allowed(snapshot, victim, request, eviction)
    assert len({each.instance_id for each in plan.evictions}) == len(plan.evictions)
    for instance_id in {each.for_instance_id for each in plan.evictions}:
        if requests[instance_id].gang is None:
            _assert_needed(snapshot, plan, requests[instance_id])


def _assert_allowed(snapshot: Snapshot, victim: Running, request: Request, eviction: Eviction) -> None:
    assert not victim.stopping
    assert snapshot.now - victim.since >= snapshot.policy.preemption_min_run_s
    if eviction.because == "priority":
        assert victim.preemptible
        assert victim.priority < request.priority
    else:
        owner = snapshot.projects[request.project_id]
        assert owner.guaranteed_gpu_milli
        assert victim.project_id != request.project_id


def _assert_needed(snapshot: Snapshot, plan: SchedulingPlan, request: Request) -> None:
    """The request fits after all its evictions, and does not if any one of the victims stays."""
    evictions = [each for each in plan.evictions if each.for_instance_id == request.instance_id]
    (node_id,) = {each.node_id for each in evictions}
    where = after(snapshot, plan).nodes[node_id]
    gone = {each.instance_id for each in evictions}
    assert fits(
        rebuilt(where, [run for run in where.running if run.instance_id not in gone]),
        request,
        time_after_evictions(snapshot),
    )
    before = next(each for each in snapshot.nodes if each.id == where.id)
    victims = [run for run in before.running if run.instance_id in gone]
    for fewer in combinations(victims, len(victims) - 1):
        left = [run for run in where.running if run.instance_id not in {each.instance_id for each in fewer}]
        assert not fits(rebuilt(where, left), request, time_after_evictions(snapshot))
