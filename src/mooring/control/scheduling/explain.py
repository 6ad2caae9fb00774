"""Dry runs, explanations, and immediate placement of a single request."""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.instances import placement_rules, placements
from mooring.control.scheduling import quotas, requests
from mooring.control.scheduling.cache import SchedulerCache
from mooring.control.scheduling.evaluation import Outcome, as_alternative
from mooring.control.volumes import mounts
from mooring.db.tables import Instance, Project
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import FittingAlternatives, would_fit
from mooring.scheduler.explain.reasons import explain as refusals_of
from mooring.scheduler.model import Refusal, Request, Snapshot
from mooring.scheduler.schedule import plan_for
from mooring_client.errors import InsufficientCapacity
from mooring_client.schemas.spec import InstanceRequest
from mooring_client.schemas.states import State

NOTHING_TO_EXPLAIN = Outcome(None, (), None)


def dry_run(session: Session, cache: SchedulerCache, project_id: str, spec: InstanceRequest) -> Outcome:
    """The outcome of a create. Raises QuotaExceeded where a create would."""
    project = session.get_one(Project, project_id)
    selector = placement_rules.selectors(session, [project_id]).get(project_id)
    request = replace(
        requests.of_spec(spec, project_id, selector),
        disk_limits=project.require_disk_limits,
        volume_needs=mounts.needs_of(session, project_id, spec),
    )
    quota = quotas.with_request(session, request)
    with cache.evaluating(session) as evaluation:
        return evaluation.what_if(replace(request, queued_at=evaluation.snapshot.now), quota)


def explain(session: Session, cache: SchedulerCache, row: Instance) -> Outcome:
    """Why an instance is pending; an empty outcome for an instance in any other state."""
    if row.state is not State.PENDING:
        return NOTHING_TO_EXPLAIN
    with cache.evaluating(session) as evaluation:
        request = evaluation.requests.get(row.id)
        return NOTHING_TO_EXPLAIN if request is None else evaluation.outcome(request)


def explain_group(session: Session, cache: SchedulerCache, group_id: str) -> Outcome:
    """As `explain`, for the first pending member of the group."""
    with cache.evaluating(session) as evaluation:
        pending = evaluation.snapshot.requests
        members = (each for each in pending if each.gang and each.gang.group_id == group_id)
        first = min(members, key=lambda each: each.instance_id, default=None)
        return NOTHING_TO_EXPLAIN if first is None else evaluation.outcome(first)


def place_now(session: Session, cache: SchedulerCache, rows: Sequence[Instance]) -> None:
    """Place an instance, or all members of a group, in the transaction that creates them.

    Raises:
        InsufficientCapacity: they do not fit now with all that is ahead of them in the queue; the fields list
            what fits.
        QuotaExceeded: a quota keeps it pending.
    """
    session.flush()
    # Lock before reading, so that no other transaction allocates what is seen here as free.
    locks.placing(session)
    ids = {row.id for row in rows}
    snapshot = cache.snapshot(session, added=ids)
    request = next(each for each in snapshot.requests if each.instance_id in ids)
    # Other transactions wait for the locks of this one, so it does not wait for running explanations.
    with cache.immediate_placement() as cycle_cache:
        plan = plan_for(snapshot, request.instance_id, cycle_cache)
        unplaced = next(iter(plan.unplaced), None)
        if unplaced is not None and unplaced.over is not None:
            raise quotas.exceeded(unplaced.over)
        placed = [each for each in plan.placements if each.instance_id in ids]
        if len(placed) < len(ids) or len(placements.assign(session, placed)) < len(ids):
            raise _insufficient(snapshot, request, cycle_cache)


def _insufficient(snapshot: Snapshot, request: Request, cycle_cache: CycleCache) -> InsufficientCapacity:
    request = replace(request, quota=snapshot.quotas.get(request.project_id))
    fits = would_fit(snapshot.nodes, as_alternative(request), snapshot.at, cycle_cache)
    most = fits.max_count_now
    hint = f"up to {most} such GPUs would start now" if most else "omit on_capacity to wait in the queue"
    if request.gang is not None:
        hint = "omit on_capacity to wait in the queue"
        problem = f"the {request.gang.size} members do not fit all at once now"
    else:
        problem = "no node can host this now"
    return InsufficientCapacity(
        f"{problem}; {hint}",
        would_fit=_fitting(fits),
        refusals=[refusal_fields(each) for each in refusals_of(snapshot.nodes, request, snapshot.at)],
    )


def _fitting(fits: FittingAlternatives) -> dict[str, object]:
    return {"max_count_now": fits.max_count_now, "models_now": list(fits.models_now)}


def refusal_fields(refusal: Refusal) -> dict[str, str]:
    """The refusal as JSON. `dataclasses.asdict` is ten times slower, and there is one for each node."""
    return {
        "node_id": refusal.node_id,
        "node_name": refusal.node_name,
        "code": refusal.code,
        "wanted": refusal.wanted,
        "had": refusal.had,
    }
