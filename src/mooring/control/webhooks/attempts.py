"""Attempts of deliveries: which are due, who makes them, and their results.

A control plane claims a delivery before it sends it. If it ends meanwhile, the claim expires and another
attempt begins: a receiver may get a delivery twice, but always gets it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import random, shuffle
from typing import Final

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from mooring.control.tenants.encryption import Encryptor
from mooring.control.webhooks import fan_out, webhooks
from mooring.control.webhooks.fan_out import Queue
from mooring.core import webhooks as rules
from mooring.db.tables import Webhook, WebhookDelivery
from mooring.db.tables.webhooks import DUE, PENDING, Status
from mooring.db.types import new_id, now

# Longer than an attempt can last. Afterwards, its control plane is thought to be gone.
CLAIMED_FOR: Final = timedelta(seconds=60)

# Attempts at one time, by each control plane. A slow receiver uses what its webhook and its project have.
PER_WEBHOOK: Final = 16
PER_PROJECT: Final = 32
IN_ALL: Final = 512


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to be made.

    Attributes:
        claim: identifies it, so that a late result of another attempt of the delivery is ignored.
        holder: whose share of the attempts at one time it uses: a project, or the webhook of an admin.
        refused: why nothing may be sent; None: it may be sent.
    """

    number: int
    claim: str
    webhook_id: str
    holder: str
    url: str
    message_id: str
    body: bytes
    secrets: Sequence[str]
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """What came of an attempt.

    Attributes:
        code: the status of the answer; None: there was none.
        error: why it failed; None: it has succeeded.
        retry_after_s: when the receiver asks to try again.
        is_gone: the receiver wants no more deliveries.
    """

    number: int
    claim: str
    code: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class RunningAttempts:
    """How many attempts run in this process: of each webhook, and of each holder."""

    of_webhook: Counter[str]
    of_holder: Counter[str]

    def room(self, webhook_id: str, holder: str) -> int:
        return min(
            PER_WEBHOOK - self.of_webhook[webhook_id],
            PER_PROJECT - self.of_holder[holder],
            IN_ALL - self.of_webhook.total(),
        )


def holder_of(row: Webhook) -> str:
    return row.project_id or row.id


def due(session: Session, running: RunningAttempts) -> list[Webhook]:
    """The enabled webhooks that have deliveries to attempt now, and room for them; in random order."""
    with_some = select(WebhookDelivery.webhook_id).where(text(DUE), WebhookDelivery.next_attempt_at <= now())
    query = select(Webhook).where(Webhook.id.in_(with_some.distinct()), Webhook.enabled)
    found = [row for row in session.scalars(query) if running.room(row.id, holder_of(row)) > 0]
    shuffle(found)
    return found


def claim(session: Session, encryptor: Encryptor, running: RunningAttempts) -> list[Attempt]:
    """Claim deliveries that are due, and make them after the commit. The caller has `locks.webhooks`."""
    claimed: list[Attempt] = []
    counted = RunningAttempts(running.of_webhook.copy(), running.of_holder.copy())
    for row in due(session, running):
        room = counted.room(row.id, holder_of(row))
        if room <= 0:
            continue
        made = _claim(session, encryptor, row, room)
        counted.of_webhook[row.id] += len(made)
        counted.of_holder[holder_of(row)] += len(made)
        claimed += made
    return claimed


def _claim(session: Session, encryptor: Encryptor, webhook: Webhook, most: int) -> list[Attempt]:
    query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook.id, text(DUE))
    query = query.where(WebhookDelivery.next_attempt_at <= now())
    query = query.order_by(WebhookDelivery.next_attempt_at, WebhookDelivery.number).limit(most)
    secrets, refused = webhooks.signing_secrets(encryptor, webhook), _refused(session, webhook)
    made = []
    for row in session.scalars(query):
        row.claim, row.attempts = new_id("clm"), row.attempts + 1
        row.next_attempt_at = now() + CLAIMED_FOR
        made.append(
            Attempt(
                row.number, row.claim, webhook.id, holder_of(webhook), webhook.url, row.event_id, row.body,
                secrets, refused if secrets else "no_secret",
            )
        )  # fmt: skip
    return made


def _refused(session: Session, webhook: Webhook) -> str | None:
    """Members leave projects, and addresses change: an address is checked again before each e-mail."""
    address = rules.mail_address(webhook.url)
    if address is not None and not webhooks.may_get_mail(session, webhook.project_id, address):
        return "not_a_member"
    return None


def record(session: Session, results: Sequence[AttemptResult], schedule: Sequence[float]) -> Counter[str]:
    """Store results of attempts. The caller has `locks.webhooks`. Returns the number of each outcome."""
    by_number = {each.number: each for each in results}
    query = select(WebhookDelivery).where(WebhookDelivery.number.in_(by_number), text(PENDING))
    outcomes: Counter[str] = Counter()
    free: set[Queue] = set()
    for row in session.scalars(query):
        result = by_number[row.number]
        if row.claim != result.claim:
            continue
        _store(row, result, schedule)
        outcomes["retried" if row.status == Status.PENDING else row.status] += 1
        if row.status != Status.PENDING:
            free.add((row.webhook_id, row.order_key))
        if result.is_gone:
            _disable(session, row.webhook_id)
    session.flush()
    fan_out.advance(session, free)
    return outcomes


def _store(row: WebhookDelivery, result: AttemptResult, schedule: Sequence[float]) -> None:
    row.claim, row.last_code, row.last_error = None, result.code, result.error
    pause_s = None
    if result.error is not None and not result.is_gone:
        pause_s = rules.pause_s(schedule, row.attempts, result.retry_after_s, random())  # noqa: S311
    if pause_s is not None:
        row.next_attempt_at = now() + timedelta(seconds=pause_s)
        return
    row.status = str(Status.DELIVERED if result.error is None else Status.FAILED)
    row.next_attempt_at, row.finished_at = None, now()


def _disable(session: Session, webhook_id: str) -> None:
    row = session.get(Webhook, webhook_id, with_for_update=True)
    if row is not None and row.enabled:
        row.enabled, row.disabled_reason, row.version = False, "gone", row.version + 1


def release(session: Session, claims: Mapping[int, str]) -> None:
    """Let attempts that were not completed begin again at once: their process ends."""
    query = select(WebhookDelivery).where(WebhookDelivery.number.in_(claims), text(PENDING))
    for row in session.scalars(query):
        if row.claim == claims[row.number]:
            row.claim, row.next_attempt_at = None, now()
