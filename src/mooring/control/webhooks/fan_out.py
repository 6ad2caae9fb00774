"""Makes the deliveries of events: for each event and each webhook that wants it, one row.

The transactions that append events know nothing of webhooks. The loop reads events in the order of `seq`, as
far as it is complete (`event_order`), and inserts the deliveries in the transaction that moves
`webhook_progress`. So each event has its deliveries once, whichever control plane makes them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import func, insert, select, text, tuple_, update
from sqlalchemy.orm import Session

from mooring.control import events
from mooring.core import ids, notice_texts, webhooks
from mooring.db.tables import Event, Instance, Project, Webhook, WebhookDelivery, WebhookProgress
from mooring.db.tables.webhooks import PENDING, Status
from mooring.db.types import JsonObject, new_id, now
from mooring_client.schemas.base import timestamp

# Of a webhook. Beyond it, the oldest are dropped.
MAX_PENDING: Final = 10_000
BATCH: Final = 500
_CHUNK: Final = 400  # parameters of one query

# The webhook and the order key of deliveries.
Queue = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Examined:
    """Events that were compared with the webhooks.

    Attributes:
        to: the `seq` of the last one.
        wanted: those that some webhook gets, with these webhooks.
        has_more: later events are committed. `held_back`: some of them after one that is not committed yet.
    """

    to: int
    wanted: Sequence[tuple[Event, Sequence[Webhook]]]
    has_more: bool = False
    held_back: bool = False


def position(session: Session, complete_to: float) -> int | None:
    """Up to which `seq` no event needs to be examined, since there are no webhooks; None: there are some."""
    if session.scalar(select(Webhook.id).where(Webhook.enabled).limit(1)) is not None:
        return None
    return events.newest_complete_seq(session, complete_to)


def progress(session: Session) -> int:
    """Up to which `seq` deliveries of events exist."""
    return session.scalars(select(WebhookProgress.seq)).one()


def move_progress(session: Session, seq: int) -> None:
    """Note that events up to `seq` have their deliveries, if they need some."""
    session.execute(update(WebhookProgress).where(WebhookProgress.seq < seq).values(seq=seq))


def count(session: Session, outcomes: Mapping[str, int]) -> None:
    """Count results of deliveries for the metrics: delivered, failed, dropped or retried."""
    if outcomes:
        sums = {name: getattr(WebhookProgress, name) + number for name, number in outcomes.items()}
        session.execute(update(WebhookProgress).values(sums))


def examine(session: Session, after: int, complete_to: float) -> Examined:
    """Compare the next events with the webhooks.

    Args:
        complete_to: what `event_order.complete_to` returned in an earlier transaction.
    """
    query = select(Event).where(Event.seq > after).order_by(Event.seq).limit(BATCH)
    found = session.scalars(query).all()
    readable = [event for event in found if event.seq <= complete_to]
    # Read after the events: a webhook that was committed before one of them is found.
    receivers = session.scalars(select(Webhook).where(Webhook.enabled)).all() if readable else ()
    wanted = []
    for event in readable:
        if getting := [each for each in receivers if _wants(each, event)]:
            wanted.append((event, getting))
    to = readable[-1].seq if readable else after
    held_back = len(readable) < len(found)
    return Examined(to, wanted, has_more=len(readable) == BATCH, held_back=held_back)


def _wants(receiver: Webhook, event: Event) -> bool:
    """Events of nodes and GPUs have no project: only webhooks for all projects get them."""
    if receiver.project_id is not None and receiver.project_id != event.project_id:
        return False
    return event.seq > receiver.after_seq and webhooks.is_wanted(receiver.events, event.type, event.data)


def fan_out(session: Session, examined: Examined) -> int:
    """Insert the deliveries of examined events. The caller has `locks.webhooks`.

    Returns:
        The number of deliveries that are dropped, because their webhook has too many.
    """
    texts = _Names(session, [event for event, _ in examined.wanted])
    rows = [_row(receiver, event, texts) for event, receivers in examined.wanted for receiver in receivers]
    return insert_rows(session, rows)


def _row(receiver: Webhook, event: Event, names: "_Names") -> JsonObject:
    return new_row(
        receiver, event.id, event.type, event.at, event.data, names.text(event),
        instance_id=event.instance_id,
    )  # fmt: skip


def new_row(
    receiver: Webhook,
    event_id: str,
    kind: str,
    at: datetime,
    data: JsonObject,
    sentence: str,
    *,
    instance_id: str | None = None,
) -> JsonObject:
    """The values of a delivery. `sentence`: the event for chats and e-mails."""
    if webhooks.mail_address(receiver.url) is not None:
        body = sentence.encode()
    elif receiver.format == "slack":
        body = webhooks.slack_body(sentence)
    else:
        body = webhooks.body_of(kind, timestamp(at), data)
    return {
        "id": new_id(ids.DELIVERY), "webhook_id": receiver.id, "event_id": event_id, "type": kind,
        "instance_id": instance_id, "order_key": webhooks.order_key(instance_id, kind, data), "body": body,
        "status": str(Status.PENDING), "attempts": 0, "claim": None, "last_code": None, "last_error": None,
        "created_at": now(), "finished_at": None,
    }  # fmt: skip


def insert_rows(session: Session, rows: Sequence[JsonObject]) -> int:
    """Insert deliveries. Those behind an unfinished one of the same queue wait for it.

    Returns:
        The number of deliveries that are dropped, because their webhook has too many.
    """
    if not rows:
        return 0
    busy, at = _busy(session, {(row["webhook_id"], row["order_key"]) for row in rows}), now()
    for row in rows:
        queue = row["webhook_id"], row["order_key"]
        row["next_attempt_at"] = None if queue in busy else at
        busy.add(queue)
    session.execute(insert(WebhookDelivery), rows)
    return _drop_beyond_limit(session, {row["webhook_id"] for row in rows})


def _busy(session: Session, queues: Iterable[Queue]) -> set[Queue]:
    """Those of the queues that have an unfinished delivery."""
    columns = WebhookDelivery.webhook_id, WebhookDelivery.order_key
    found: set[Queue] = set()
    for part in _chunks(queues):
        query = select(*columns).where(tuple_(*columns).in_(part), text(PENDING)).distinct()
        found |= {(webhook_id, key) for webhook_id, key in session.execute(query)}
    return found


def _chunks(queues: Iterable[Queue]) -> Iterator[Sequence[Queue]]:
    ordered = sorted(queues)
    for start in range(0, len(ordered), _CHUNK):
        yield ordered[start : start + _CHUNK]


def advance(session: Session, queues: Iterable[Queue]) -> None:
    """Let the next delivery of each queue begin, unless one of the queue has begun."""
    columns = WebhookDelivery.webhook_id, WebhookDelivery.order_key
    for part in _chunks(queues):
        query = select(func.min(WebhookDelivery.number)).where(tuple_(*columns).in_(part), text(PENDING))
        query = query.group_by(*columns).having(func.count(WebhookDelivery.next_attempt_at) == 0)
        if numbers := session.scalars(query).all():
            statement = update(WebhookDelivery).where(WebhookDelivery.number.in_(numbers))
            session.execute(statement.values(next_attempt_at=now()))


def _drop_beyond_limit(session: Session, webhook_ids: Iterable[str]) -> int:
    query = select(WebhookDelivery.webhook_id, func.count())
    query = query.where(WebhookDelivery.webhook_id.in_(set(webhook_ids)), text(PENDING))
    query = query.group_by(WebhookDelivery.webhook_id).having(func.count() > MAX_PENDING)
    excess = Counter({key: count - MAX_PENDING for key, count in session.execute(query)})
    for webhook_id, count in excess.items():
        _drop_oldest(session, webhook_id, count)
    return excess.total()


def _drop_oldest(session: Session, webhook_id: str, count: int) -> None:
    """Drop deliveries that are not being attempted just now."""
    delivery = WebhookDelivery
    oldest = select(delivery.number).where(delivery.webhook_id == webhook_id, text(PENDING))
    oldest = oldest.where(delivery.claim.is_(None)).order_by(delivery.number).limit(count)
    dropped = {"status": str(Status.DROPPED), "next_attempt_at": None, "finished_at": now()}
    statement = update(delivery).where(delivery.number.in_(oldest)).values(dropped)
    keys = session.scalars(statement.returning(delivery.order_key)).all()
    advance(session, {(webhook_id, key) for key in keys})


class _Names:
    """Sentences about events, with the names of their instances and projects."""

    def __init__(self, session: Session, found: Sequence[Event]) -> None:
        self._instances = _names(session, Instance, {event.instance_id for event in found})
        self._projects = _names(session, Project, {event.project_id for event in found})

    def text(self, event: Event) -> str:
        instance = self._instances.get(event.instance_id or "")
        project = self._projects.get(event.project_id or "")
        return notice_texts.text_of(event.type, event.data, instance, project)


def _names(
    session: Session, table: type[Instance] | type[Project], row_ids: set[str | None]
) -> dict[str, str]:
    wanted = [row_id for row_id in row_ids if row_id is not None]
    return dict(session.execute(select(table.id, table.name).where(table.id.in_(wanted))).all())
