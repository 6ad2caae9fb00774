"""Webhooks: who gets events, at which URL, signed with which secret.

URLs are shown to owners only, and shortened in the audit log: chats authenticate callers by them.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from cryptography.fernet import InvalidToken
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from mooring.control import concurrency, event_order, events, locks
from mooring.control.audit import audit_log
from mooring.control.tenants import owned, projects, row_limits
from mooring.control.tenants.encryption import Encryptor
from mooring.core import ids, webhooks
from mooring.core.access import Access, Permission, lacking
from mooring.core.webhooks import AddressRules
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Member, Project, User, Webhook, WebhookDelivery
from mooring.db.tables.webhooks import PENDING
from mooring.db.types import new_id, now
from mooring_client.errors import Invalid, MailOff, NameTaken, WebhookUrlNotAllowed
from mooring_client.schemas.webhooks import WebhookApply

log = logging.getLogger(__name__)

# How long the former secret signs too after a rotation.
FORMER_SECRET_KEPT: Final = timedelta(hours=24)
_FIELDS: Final = ("url", "events", "enabled", "format")


@dataclass(frozen=True, slots=True)
class TargetRules:
    """What webhooks may reach. `mail`: e-mails can be sent."""

    addresses: AddressRules
    mail: bool


def project_of(session: Session, access: Access, request: WebhookApply, default: str) -> Project | None:
    """The project of a new webhook; None: it is for all projects.

    Raises:
        Forbidden: only admins may have events of all projects.
        Invalid: it is for all projects, and names one.
        MooringError: as `projects.for_new`.
    """
    if not request.all_projects:
        return projects.for_new(session, access, request.project_id, default)
    if not access.caller.is_admin:
        raise lacking(Permission.ADMIN)
    if request.project_id is not None:
        message = "a webhook for all projects has no project_id"
        where = {"pointer": "/project_id", "code": "all_projects", "message": message}
        raise Invalid(message, errors=[where])
    return None


def create(
    session: Session,
    access: Access,
    encryptor: Encryptor,
    rules: TargetRules,
    project: Project | None,
    request: WebhookApply,
) -> tuple[Webhook, str]:
    """Create a webhook. Returns it with its secret, which cannot be read again.

    Raises:
        NameTaken: another webhook of the project has this name.
        TooManyRows: the project has the maximum number.
        WebhookUrlNotAllowed, MailOff: as `_require_target`.
    """
    project_id = None if project is None else project.id
    if project_id is not None:
        projects.locked(session, access, project_id)
    locks.webhooks(session)
    row_limits.require_room(session, Webhook, project_id)
    _require_target(session, rules, project_id, request.url)
    webhook_id, secret = new_id(ids.WEBHOOK), _new_secret()
    name = request.name or f"webhook-{webhook_id[-6:]}"
    _require_free_name(session, project_id, name)
    row = Webhook(
        id=webhook_id, project_id=project_id, name=name, url=request.url, events=list(request.events),
        enabled=request.enabled, disabled_reason=None, format=request.format,
        sealed_secret=encryptor.encrypt(secret.encode()), sealed_former_secret=None,
        former_secret_until=None, after_seq=_newest_seq(session), version=1, created_at=now(),
    )  # fmt: skip
    session.add(row)
    session.flush()
    audit_log.record(session, access, row.id, project_id, after=_described(row))
    return row, secret


def _new_secret() -> str:
    return webhooks.new_secret(secrets.token_bytes(webhooks.SECRET_BYTES))


def _newest_seq(session: Session) -> int:
    return events.newest_complete_seq(session, event_order.complete_to(session))


def _require_free_name(session: Session, project_id: str | None, name: str) -> None:
    if session.scalar(select(Webhook.id).where(Webhook.project_id == project_id, Webhook.name == name)):
        raise NameTaken(f"a webhook named {name} exists; change it or choose another name", name=name)


def _require_target(session: Session, rules: TargetRules, project_id: str | None, url: str) -> None:
    """Check a URL as far as this is possible without the network.

    Raises:
        WebhookUrlNotAllowed: its address is not public, or nobody's who may see the events.
        MailOff: this server sends no e-mails.
    """
    address = webhooks.mail_address(url)
    if address is not None:
        if not rules.mail:
            raise MailOff("this server sends no e-mails; an admin can set MOORING_SMTP_HOST")
        if not may_get_mail(session, project_id, address):
            raise _not_allowed("it must be the e-mail address of a member of the project")
        return
    try:
        rules.addresses.require(webhooks.parse_target(url))
    except ValueError as error:
        raise _not_allowed(str(error)) from None


def _not_allowed(message: str) -> WebhookUrlNotAllowed:
    where = {"pointer": "/url", "code": WebhookUrlNotAllowed.code, "message": message}
    return WebhookUrlNotAllowed(f"webhooks cannot be sent to this URL: {message}", errors=[where])


def may_get_mail(session: Session, project_id: str | None, address: str) -> bool:
    """Whether an address is of a member of the project; for all projects: of an admin."""
    query = select(User.id).where(func.lower(User.email) == address, User.deleted_at.is_(None))
    if project_id is None:
        query = query.where(User.is_admin)
    else:
        query = query.join(Member, Member.user_id == User.id).where(Member.project_id == project_id)
    return session.scalar(query.limit(1)) is not None


def patch(
    session: Session,
    access: Access,
    rules: TargetRules,
    webhook_id: str,
    changes: Mapping[str, Any],
    if_match: int | None,
) -> Webhook:
    """Change some fields.

    Raises:
        PreconditionFailed, NameTaken, WebhookUrlNotAllowed, MailOff.
        NotFound, Forbidden: as `owned.get`.
    """
    row = _locked(session, access, webhook_id)
    concurrency.require_current_version("webhook", row.version, if_match)
    if changes.get("name", row.name) != row.name:
        _require_free_name(session, row.project_id, changes["name"])
    change(session, access, rules, row, changes)
    return row


def change(
    session: Session, access: Access, rules: TargetRules, row: Webhook, changes: Mapping[str, Any]
) -> None:
    """As `patch`, for a locked webhook."""
    before = _described(row)
    if "url" in changes:
        _require_target(session, rules, row.project_id, changes["url"])
    if changes.get("enabled", False) and not row.enabled:
        row.after_seq, row.disabled_reason = _newest_seq(session), None
        notify(session, Topic.WEBHOOKS)
    if set(changes.get("events", row.events)) - set(row.events):
        row.after_seq = _newest_seq(session)
    for field, value in changes.items():
        setattr(row, field, value)
    row.version += 1
    was, became = audit_log.changes(before, _described(row))
    audit_log.record(session, access, row.id, row.project_id, before=was, after=became)


def _locked(session: Session, access: Access, webhook_id: str) -> Webhook:
    locks.webhooks(session)
    return owned.locked(session, access, Webhook, webhook_id)


def delete(session: Session, access: Access, webhook_id: str, if_match: int | None) -> None:
    """Delete a webhook with its deliveries.

    Raises:
        PreconditionFailed.
        NotFound, Forbidden: as `owned.get`.
    """
    row = _locked(session, access, webhook_id)
    concurrency.require_current_version("webhook", row.version, if_match)
    session.delete(row)
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def rotate_secret(
    session: Session, access: Access, encryptor: Encryptor, webhook_id: str
) -> tuple[Webhook, str]:
    """Make a new secret. The former one signs too for 24 hours.

    Raises:
        NotFound, Forbidden: as `owned.get`.
    """
    row, secret = _locked(session, access, webhook_id), _new_secret()
    row.sealed_former_secret, row.former_secret_until = row.sealed_secret, now() + FORMER_SECRET_KEPT
    row.sealed_secret = encryptor.encrypt(secret.encode())
    row.version += 1
    audit_log.record(session, access, row.id, row.project_id, after={"name": row.name})
    return row, secret


def signing_secrets(encryptor: Encryptor, row: Webhook) -> list[str]:
    """The secrets that sign now, the newest first. Those that cannot be decrypted are left out."""
    is_former_used = row.former_secret_until is not None and row.former_secret_until > now()
    found = []
    for encrypted in (row.sealed_secret, row.sealed_former_secret if is_former_used else None):
        try:
            found += [] if encrypted is None else [encryptor.decrypt(encrypted).decode()]
        except InvalidToken:
            log.warning("a secret of the webhook %s cannot be decrypted; rotate it", row.id)
    return found


def values_of(row: Webhook) -> dict[str, Any]:
    """What was requested of a webhook, besides its name and project."""
    return {field: getattr(row, field) for field in _FIELDS}


def _described(row: Webhook) -> dict[str, Any]:
    return {"name": row.name, **values_of(row), "url": webhooks.shown_url(row.url)}


def pending_counts(session: Session, webhook_ids: Sequence[str]) -> dict[str, int]:
    """The number of pending deliveries of those webhooks that have any."""
    query = select(WebhookDelivery.webhook_id, func.count())
    query = query.where(WebhookDelivery.webhook_id.in_(webhook_ids), text(PENDING))
    return dict(session.execute(query.group_by(WebhookDelivery.webhook_id)).all())
