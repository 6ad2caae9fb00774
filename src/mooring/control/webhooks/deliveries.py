"""Deliveries as their owners handle them: looking at one, sending one again, and a test."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.audit import audit_log
from mooring.control.tenants import owned
from mooring.control.webhooks import fan_out
from mooring.core import ids, notice_texts, webhooks
from mooring.core.access import Access
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Webhook, WebhookDelivery
from mooring.db.tables.webhooks import Status
from mooring.db.types import new_id, now
from mooring_client.errors import NotFound, WebhookDisabled


def ping(session: Session, access: Access, webhook_id: str) -> WebhookDelivery:
    """Send an event of the type `webhook.ping`.

    Raises:
        WebhookDisabled.
        NotFound, Forbidden: as `owned.get`.
    """
    receiver = _enabled(session, access, webhook_id)
    data = {"webhook_id": receiver.id, "name": receiver.name}
    sentence = notice_texts.text_of(webhooks.PING, data, None, None)
    row = fan_out.new_row(receiver, new_id(ids.EVENT), webhooks.PING, now(), data, sentence)
    fan_out.count(session, {"dropped": fan_out.insert_rows(session, [row])})
    notify(session, Topic.WEBHOOKS)
    audit_log.record(session, access, row["id"], receiver.project_id, after={"webhook_id": receiver.id})
    return session.scalars(select(WebhookDelivery).where(WebhookDelivery.id == row["id"])).one()


def replay(session: Session, access: Access, webhook_id: str, delivery_id: str) -> WebhookDelivery:
    """Send a delivery again at once, with the same body and id: now also before earlier ones of its instance.

    Raises:
        WebhookDisabled.
        NotFound, Forbidden: as `owned.get`; the webhook has no such delivery.
    """
    receiver = _enabled(session, access, webhook_id)
    query = select(WebhookDelivery).where(WebhookDelivery.id == delivery_id).with_for_update()
    row = session.scalar(query)
    if row is None or row.webhook_id != receiver.id:
        raise NotFound(f"no delivery {delivery_id} of the webhook {webhook_id}")
    if row.claim is None:  # otherwise it is being sent just now
        row.status, row.attempts, row.finished_at = str(Status.PENDING), 0, None
        row.next_attempt_at = now()
    notify(session, Topic.WEBHOOKS)
    audit_log.record(session, access, row.id, receiver.project_id, after={"webhook_id": receiver.id})
    return row


def _enabled(session: Session, access: Access, webhook_id: str) -> Webhook:
    locks.webhooks(session)
    row = owned.locked(session, access, Webhook, webhook_id)
    if not row.enabled:
        raise WebhookDisabled("the webhook is disabled; enable it first", id=row.id)
    return row
