"""Dry runs, immediate placements and explanations: the scheduler asked about one request."""

from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from mooring.control import locks, placement_rules, placing, quotas, requests
from mooring.control.world import World
from mooring.core.errors import InsufficientCapacity
from mooring.core.instance import InstanceRequest, State
from mooring.db.tables import Instance, Project
from mooring.scheduler import prospects
from mooring.scheduler import quotas as rules
from mooring.scheduler.model import Forecast, Over, Placement, Refusal, Request, Snapshot, Unplaced
from mooring.scheduler.order import Ahead
from mooring.scheduler.reasons import Alternatives, would_fit
from mooring.scheduler.reasons import explain as refusals_of
from mooring.scheduler.schedule import schedule


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scheduler says of one request in the present world."""

    placement: Placement | None
    refusals: tuple[Refusal, ...]
    alternatives: Alternatives | None
    over: Over | None = None  # the quota that it waits for
    unplaced: Unplaced | None = None  # why it waits, in a sentence
    position: int | None = None  # in the queue, from 1, if it waits
    forecast: Forecast | None = None  # when it will start, as far as declared durations tell
    ahead: tuple[Ahead, ...] = ()  # the first of those that come before it
    max_duration_now_s: int | None = None  # with a declared end so near it would start now
    snapshot: Snapshot | None = None  # all that this is about


NOTHING_TO_EXPLAIN = Outcome(None, (), None)


def dry_run(session: Session, world: World, project_id: str, asked: InstanceRequest) -> Outcome:
    """Raises QuotaExceeded where a create would."""
    snapshot = world.snapshot(session)
    project = session.get_one(Project, project_id)
    selector = placement_rules.selectors(session, [project_id]).get(project_id)
    request = replace(
        requests.of_spec(asked, project_id, selector),
        queued_at=snapshot.now,
        disk_limits=project.require_disk_limits,
    )
    quota = quotas.as_if_asked(session, request)
    quotas_then = snapshot.quotas if quota is None else {**snapshot.quotas, project_id: quota}
    snapshot = replace(snapshot, requests=(*snapshot.requests, request), quotas=quotas_then)
    return _outcome(world, snapshot, request)


def explain(session: Session, world: World, row: Instance) -> Outcome:
    """Why a pending instance waits; for any other there is nothing to explain but its reason."""
    if row.state is not State.PENDING:
        return NOTHING_TO_EXPLAIN
    snapshot = world.snapshot(session)
    request = next((each for each in snapshot.requests if each.instance_id == row.id), None)
    return NOTHING_TO_EXPLAIN if request is None else _outcome(world, snapshot, request)


def explain_group(session: Session, world: World, group_id: str) -> Outcome:
    """As `explain`, of the first member that waits."""
    snapshot = world.snapshot(session)
    members = (each for each in snapshot.requests if each.gang and each.gang.group_id == group_id)
    first = min(members, key=lambda each: each.instance_id, default=None)
    return NOTHING_TO_EXPLAIN if first is None else _outcome(world, snapshot, first)


def place_now(session: Session, world: World, row: Instance) -> None:
    """Place an instance in the transaction that creates it; it may not delay what waits and comes before it.

    Raises:
        InsufficientCapacity: no node can host it now; the fields say what would fit.
        QuotaExceeded: it would have to wait for a quota.
    """
    session.flush()
    # The lock comes before the look, so that no other transaction takes what is seen here.
    locks.placing(session)
    outcome = explain(session, world, row)
    if outcome.over is not None:
        raise quotas.exceeded(outcome.over)
    if outcome.placement is None or not placing.assign(session, [outcome.placement]):
        raise _insufficient(outcome)


def _outcome(world: World, snapshot: Snapshot, request: Request) -> Outcome:
    request = replace(request, quota=snapshot.quotas.get(request.project_id))
    with world.thinking() as memory:
        plan = schedule(snapshot, memory)
        placed = next((each for each in plan.placements if each.instance_id == request.instance_id), None)
        refused = refusals_of(
            [node for node in snapshot.nodes if placed is None or node.id != placed.node_id],
            request,
            snapshot.at,
        )
        if placed is not None:
            return Outcome(placed, refused, None)
        told = next((each for each in plan.unplaced if each.instance_id == request.instance_id), None)
        ordered = prospects.line(snapshot, memory)
        return Outcome(
            None,
            refused,
            would_fit(snapshot.nodes, _in_its_place(request), snapshot.at, memory),
            over=told.over if told else None,
            unplaced=told,
            position=ordered.position(request.instance_id),
            forecast=prospects.forecast(snapshot, request.instance_id, memory),
            ahead=ordered.ahead(request.instance_id),
            max_duration_now_s=prospects.max_duration_now(snapshot, request.instance_id, memory),
            snapshot=snapshot,
        )


def _in_its_place(request: Request) -> Request:
    """Something else instead of it: the quota counts what others wait for, but not the request itself."""
    return replace(request, quota=rules.without(request.quota, request)) if request.quota else request


def _insufficient(outcome: Outcome) -> InsufficientCapacity:
    fits = outcome.alternatives
    most = fits.max_count_now if fits else 0
    hint = f"up to {most} such GPUs would start now" if most else "leave on_capacity out to wait in the queue"
    return InsufficientCapacity(
        f"no node can host this now; {hint}",
        would_fit={"max_count_now": most, "models_now": list(fits.models_now) if fits else []},
        refusals=[
            {
                "node_id": refusal.node_id,
                "node_name": refusal.node_name,
                "code": refusal.code,
                "wanted": refusal.wanted,
                "had": refusal.had,
            }
            for refusal in outcome.refusals
        ],
    )
