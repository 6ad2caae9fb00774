"""`/v1/webhooks`: where events are sent, and the deliveries."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session, defer
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.responses import IfMatch, etag
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.views.show import show
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import owned
from mooring.control.webhooks import deliveries, webhooks
from mooring.db import tables
from mooring.db.types import now
from mooring_client.errors import (
    MailOff,
    NameTaken,
    NotFound,
    ProjectRequired,
    TooManyRows,
    WebhookDisabled,
    WebhookUrlNotAllowed,
)
from mooring_client.schemas.base import Json, timestamp
from mooring_client.schemas.text import Text
from mooring_client.schemas.webhooks import (
    DeliveryStatus,
    NewWebhook,
    Webhook,
    WebhookCreate,
    WebhookDelivery,
    WebhookDeliveryList,
    WebhookList,
    WebhookPatch,
)

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], route_class=StrictRoute)


class WebhookQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None
    project_id: Annotated[Text | None, Field(max_length=64)] = None


class DeliveryQuery(pagination.PageQuery):
    status: DeliveryStatus | None = None


@router.post(
    "",
    status_code=201,
    response_model=NewWebhook,
    responses=errors(MailOff, NameTaken, NotFound, ProjectRequired, TooManyRows, WebhookUrlNotAllowed),
    operation_id="create_webhook",
)
def create_webhook(body: WebhookCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a webhook. Only this response shows the secret that verifies its signatures.

    It gets the events that are committed after it, each at least once.
    """

    def act(session: Session) -> StoredAnswer:
        project = webhooks.project_of(session, call.access, body, context.identity.default_project_id)
        row, secret = webhooks.create(
            session, call.access, context.encryptor, context.webhook_targets, project, body
        )
        return _with_secret(session, row, secret, 201)

    return transactions.idempotent(context, call, act)


def answer_of(session: Session, row: tables.Webhook, status: int = 200) -> StoredAnswer:
    session.flush()
    return responses.json_answer(_shown(session, [row])[0], status, _headers(row, status))


def _with_secret(session: Session, row: tables.Webhook, secret: str, status: int) -> StoredAnswer:
    session.flush()
    content = {**_shown(session, [row])[0], "secret": secret}
    return responses.json_answer(content, status, _headers(row, status), encrypted=True)


def _headers(row: tables.Webhook, status: int) -> dict[str, str]:
    return etag(row.version) | ({"Location": f"/v1/webhooks/{row.id}"} if status == 201 else {})


def _shown(session: Session, rows: Sequence[tables.Webhook]) -> list[Json]:
    pending, at = webhooks.pending_counts(session, [row.id for row in rows]), now()
    return [
        show(
            Webhook,
            row,
            all_projects=row.project_id is None,
            pending=pending.get(row.id, 0),
            former_secret_until=timestamp(row.former_secret_until)
            if row.former_secret_until is not None and row.former_secret_until > at
            else None,
        )
        for row in rows
    ]


@router.get("", response_model=WebhookList, responses=errors(), operation_id="list_webhooks")
def list_webhooks(context: Ctx, access: CurrentAccess, params: Annotated[WebhookQuery, Query()]) -> Response:
    """List webhooks. Returns those of the projects that you own, newest first, without their secrets."""
    query = pagination.visible(select(tables.Webhook), tables.Webhook.project_id, access)
    query = pagination.matching(query, params, tables.Webhook.name, tables.Webhook.project_id)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.Webhook.id, params, secret)
        content = {"items": _shown(session, [row[0] for row in rows]), "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{webhook_id}", response_model=Webhook, responses=errors(), operation_id="get_webhook")
def get_webhook(webhook_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a webhook. The response does not contain its secret."""
    with context.database.read() as session:
        row = owned.get(session, access, tables.Webhook, webhook_id)
        return responses.respond(answer_of(session, row))


@router.patch(
    "/{webhook_id}",
    response_model=Webhook,
    responses=errors(MailOff, NameTaken, WebhookUrlNotAllowed),
    operation_id="update_webhook",
)
def update_webhook(
    webhook_id: str, body: WebhookPatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update a webhook. Enabled again, it continues with its pending deliveries, and with new events."""
    changes = body.model_dump(exclude_unset=True)

    def act(session: Session) -> StoredAnswer:
        row = webhooks.patch(session, access, context.webhook_targets, webhook_id, changes, if_match)
        return answer_of(session, row)

    return transactions.audited(context, access, act)


@router.delete("/{webhook_id}", status_code=204, responses=errors(), operation_id="delete_webhook")
def delete_webhook(webhook_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch) -> Response:
    """Delete a webhook. Its deliveries are deleted too, pending ones included."""

    def act(session: Session) -> StoredAnswer:
        webhooks.delete(session, access, webhook_id, if_match)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)


@router.post(
    "/{webhook_id}/rotate-secret",
    response_model=NewWebhook,
    responses=errors(),
    operation_id="rotate_webhook_secret",
)
def rotate_webhook_secret(webhook_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Rotate the secret of a webhook. Only this response shows the new one; the former signs for 24 h too."""

    def act(session: Session) -> StoredAnswer:
        row, secret = webhooks.rotate_secret(session, call.access, context.encryptor, webhook_id)
        return _with_secret(session, row, secret, 200)

    return transactions.idempotent(context, call, act)


@router.post(
    "/{webhook_id}/test",
    status_code=202,
    response_model=WebhookDelivery,
    responses=errors(WebhookDisabled),
    operation_id="test_webhook",
)
def test_webhook(webhook_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Test a webhook. Sends an event of the type `webhook.ping`; its deliveries show what came of it."""

    def act(session: Session) -> StoredAnswer:
        row = deliveries.ping(session, call.access, webhook_id)
        return responses.json_answer(show(WebhookDelivery, row), 202)

    return transactions.idempotent(context, call, act)


@router.get(
    "/{webhook_id}/deliveries",
    response_model=WebhookDeliveryList,
    responses=errors(),
    operation_id="list_webhook_deliveries",
)
def list_webhook_deliveries(
    webhook_id: str, context: Ctx, access: CurrentAccess, params: Annotated[DeliveryQuery, Query()]
) -> Response:
    """List the deliveries of a webhook, newest first. Finished ones are kept for a week."""
    table = tables.WebhookDelivery
    query = select(table).where(table.webhook_id == webhook_id).options(defer(table.body))
    query = pagination.matching(query, params, table.status)
    with context.database.read() as session:
        owned.get(session, access, tables.Webhook, webhook_id)
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, table.number, params, secret)
        content = {"items": [show(WebhookDelivery, row[0]) for row in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}/replay",
    status_code=202,
    response_model=WebhookDelivery,
    responses=errors(WebhookDisabled),
    operation_id="replay_webhook_delivery",
)
def replay_webhook_delivery(webhook_id: str, delivery_id: str, context: Ctx, call: CurrentCall) -> Response:
    """Replay a delivery. Sends it again at once, with the same `webhook-id` and body."""

    def act(session: Session) -> StoredAnswer:
        row = deliveries.replay(session, call.access, webhook_id, delivery_id)
        session.flush()
        return responses.json_answer(show(WebhookDelivery, row), 202)

    return transactions.idempotent(context, call, act)
