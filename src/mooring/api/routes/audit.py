"""`/v1/audit-log`: as pages, or the whole log as JSON lines."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from pydantic import Field
from pydantic_core import to_json
from sqlalchemy import Select, select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from mooring.api.auth import audited_reads
from mooring.api.auth.authorization import CurrentAccess, CurrentLiveAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import pagination, responses
from mooring.api.http.body import StrictRoute
from mooring.api.openapi.responses import errors
from mooring.api.views.show import show
from mooring.auth.credentials import LiveAccess
from mooring.control.audit import chains
from mooring.core.access import Access
from mooring.db.session import Database
from mooring.db.tables import AuditEntry
from mooring_client.errors import NotFound
from mooring_client.schemas.audit import AuditEntry as AuditEntryShown
from mooring_client.schemas.audit import AuditHead, AuditLog
from mooring_client.schemas.base import Json
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1", tags=["audit"], route_class=StrictRoute)

JSON_LINES = "application/x-ndjson"
_BATCH = 500


class AuditQuery(pagination.PageQuery):
    project_id: Annotated[Text | None, Field(max_length=64)] = None
    action: Annotated[Text | None, Field(max_length=64)] = None
    actor_id: Annotated[Text | None, Field(max_length=64)] = None
    target_id: Annotated[Text | None, Field(max_length=96)] = None


@router.get(
    "/audit-log",
    response_model=AuditLog,
    responses={200: {"content": {JSON_LINES: {"schema": {"type": "string"}}}}, **errors()},
    operation_id="list_audit_log",
)
async def list_audit_log(
    context: Ctx,
    live: CurrentLiveAccess,
    params: Annotated[AuditQuery, Query()],
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Response:
    """List audit log entries. Returns the newest first. Owners see those of their projects, admins all.

    With `Accept: application/x-ndjson`, the response is the whole log as JSON lines, oldest first.
    """
    if accept is not None and JSON_LINES in accept:
        await run_in_threadpool(_record_export, context, live.access, params)
        return StreamingResponse(_exported(context, live, params), media_type=JSON_LINES)
    content = await run_in_threadpool(_page, context, _filtered(live.access, params), params)
    return responses.respond(responses.json_answer(content))


@router.get(
    "/audit-log/head", response_model=AuditHead, responses=errors(NotFound), operation_id="get_audit_head"
)
def get_audit_head(context: Ctx, _access: CurrentAccess) -> Response:
    """Get the audit log head. It is a hash over the log; store it elsewhere for `mooring audit verify`."""
    with context.database.read() as session:
        head = chains.newest_head(session)
    if head is None:
        raise NotFound("the audit log has no head yet; the first is made a minute after the start")
    return responses.respond(responses.json_answer(asdict(head)))


def _record_export(context: Context, access: Access, params: AuditQuery) -> None:
    """Record who exported what. An export of one project is recorded in that project."""
    own = access.projects
    project_id = next(iter(own)) if own is not None and len(own) == 1 else params.project_id
    if not access.caller.may(access.permission, project_id):
        project_id = None
    with context.database.write() as session:
        context.audited_reads.record(
            session, access, audited_reads.EXPORT, None, project_id, {"filters": params.filters()}
        )


def _page(context: Context, query: Select[Any], params: AuditQuery) -> Json:
    with context.database.read() as session:
        rows, cursor = pagination.page(session, query, AuditEntry.seq, params, context.identity.cursor_secret)
        return {"items": _with_links(session, [row[0] for row in rows]), "next_cursor": cursor}


def _with_links(session: Session, rows: Sequence[AuditEntry]) -> list[Json]:
    links = chains.links_of(session, [row.seq for row in rows])
    return [show(AuditEntryShown, row, link=links.get(row.seq)) for row in rows]


async def _exported(context: Context, live: LiveAccess, params: AuditQuery) -> AsyncIterator[bytes]:
    """Yield the export. When the caller loses access it fails, so that it does not look complete."""
    after = 0
    while True:
        query = _filtered(await live.renewed(), params)
        text, after = await run_in_threadpool(some_lines, context.database, query, after)
        if not text:
            return
        yield text


def _filtered(access: Access, params: AuditQuery) -> Select[Any]:
    query = pagination.visible(select(AuditEntry), AuditEntry.project_id, access)
    query = pagination.matching(query, params, AuditEntry.project_id, AuditEntry.action, AuditEntry.target_id)
    if params.actor_id is not None:
        query = query.where(AuditEntry.actor["id"].as_string() == params.actor_id)
    return query


def some_lines(database: Database, query: Select[Any], after: int) -> tuple[bytes, int]:
    """Return the next entries as JSON lines, oldest first, and the `seq` of the last one."""
    # One transaction for each batch: a client that reads slowly must not keep one open.
    with database.read() as session:
        page = query.where(AuditEntry.seq > after).order_by(AuditEntry.seq).limit(_BATCH)
        rows = session.scalars(page).all()
        entries = _with_links(session, rows)
    text = b"".join(to_json(entry) + b"\n" for entry in entries)
    return text, rows[-1].seq if rows else after
