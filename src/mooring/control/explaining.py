"""Dry runs, immediate placements and explanations: the scheduler asked about one request."""

from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from mooring.control import locks, placement, quotas, requests
from mooring.core.errors import InsufficientCapacity
from mooring.core.instance import InstanceRequest, State
from mooring.db.tables import Instance
from mooring.scheduler import quotas as rules
from mooring.scheduler.model import NodeView, Over, Placement, Refusal, Request
from mooring.scheduler.reasons import Alternatives, over_quota, would_fit
from mooring.scheduler.reasons import explain as refusals_of
from mooring.scheduler.schedule import place_one


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scheduler says of one request in the present world."""

    placement: Placement | None
    refusals: tuple[Refusal, ...]
    alternatives: Alternatives | None
    over: Over | None = None  # the quota that it waits for


NOTHING_TO_EXPLAIN = Outcome(None, (), None)


def dry_run(session: Session, project_id: str, asked: InstanceRequest) -> Outcome:
    """Raises QuotaExceeded where a create would."""
    request = quotas.as_if_asked(session, requests.of_spec(asked, project_id))
    return _ask(placement.node_views(session), request)


def explain(session: Session, row: Instance) -> Outcome:
    """Why a pending instance waits; for any other there is nothing to explain but its reason."""
    if row.state is not State.PENDING:
        return NOTHING_TO_EXPLAIN
    return _ask(placement.node_views(session), _request(session, row))


def place_now(session: Session, row: Instance) -> None:
    """Place an instance in the transaction that creates it.

    Raises:
        InsufficientCapacity: no node can host it now; the fields say what would fit.
        QuotaExceeded: it would have to wait for a quota.
    """
    session.flush()
    # The lock comes before the look, so that no other transaction takes what is seen here.
    locks.placing(session)
    outcome = _ask(placement.node_views(session), _request(session, row))
    if outcome.over is not None:
        raise quotas.exceeded(outcome.over)
    if outcome.placement is None or not placement.assign(session, [outcome.placement]):
        raise _insufficient(outcome)


def _request(session: Session, row: Instance) -> Request:
    quota = quotas.of_projects(session, [row.project_id]).get(row.project_id)
    return replace(requests.of_row(row), quota=quota)


def _ask(nodes: tuple[NodeView, ...], request: Request) -> Outcome:
    placed = place_one(nodes, request)
    if placed is not None:
        return Outcome(placed, _others(nodes, request, placed.node_id), None)
    return Outcome(None, refusals_of(nodes, request), _instead(nodes, request), over_quota(nodes, request))


def _instead(nodes: tuple[NodeView, ...], request: Request) -> Alternatives:
    others = rules.without(request.quota, request) if request.quota else None
    return would_fit(nodes, replace(request, quota=others))


def _others(nodes: tuple[NodeView, ...], request: Request, chosen: str) -> tuple[Refusal, ...]:
    return refusals_of([node for node in nodes if node.id != chosen], request)


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
