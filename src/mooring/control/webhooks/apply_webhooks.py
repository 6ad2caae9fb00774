"""Applying webhooks by name."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import applying, concurrency, locks
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.tenants.encryption import Encryptor
from mooring.control.webhooks import webhooks
from mooring.control.webhooks.webhooks import TargetRules
from mooring.core.access import Access
from mooring.core.json_differences import differences
from mooring.db.tables import Project, Webhook
from mooring_client.schemas.webhooks import WebhookApply


def apply_by_name(
    session: Session,
    access: Access,
    encryptor: Encryptor,
    rules: TargetRules,
    project: Project | None,
    name: str,
    request: WebhookApply,
    if_match: int | None,
) -> ApplyResult[Webhook]:
    """Create or change the webhook of this name. Nobody sees a new one's secret: rotating it shows one.

    Raises:
        MooringError: as `webhooks.create` and `webhooks.patch`.
    """
    if project is not None:
        locks.project_key(session, project.id)
    locks.webhooks(session)
    project_id = None if project is None else project.id
    query = select(Webhook).where(Webhook.project_id == project_id, Webhook.name == name).with_for_update()
    row = session.scalar(query)
    if row is None:
        applying.require_no_version("webhook", name, if_match)
        asked = request.model_copy(update={"name": name})
        return applying.created(webhooks.create(session, access, encryptor, rules, project, asked)[0])
    concurrency.require_current_version("webhook", row.version, if_match)
    stored = webhooks.values_of(row)
    result = applying.compared(row, differences(stored, request.model_dump(include=set(stored))), stored)
    if result.outcome is ApplyOutcome.CHANGED:
        fields = {each.field for each in result.differences}
        webhooks.change(session, access, rules, row, request.model_dump(include=fields))
    return result
