"""Requests for log and exec streams: a row exists until the node connects or the user disconnects."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, delete, select
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.instances import instances
from mooring.control.nodes import nodes
from mooring.core.access import Access
from mooring.core.errors import NodeUnreachable, NotFound, NotRunning
from mooring.core.instance.state import State
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, Node, Stream
from mooring.db.types import now
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamRequest

_NODE_AND_REQUESTS = (
    select(Node.deleted_at, Node.session, Node.credential_hash, Node.next_credential_hash, Stream.request)
    .outerjoin(Stream, Stream.node_id == Node.id)
    .where(Node.id == bindparam("node"))
)


def check(session: Session, access: Access, instance_id: str, *, running: bool) -> tuple[Instance, str]:
    """Return the instance and its node's id, if the node can open a stream to its container.

    Raises:
        NotFound, Forbidden: as `instances.get`.
        NotRunning: it has no container, or, with `running`, no running one.
        NodeUnreachable: its node does not report.
    """
    row = instances.get(session, access, instance_id)
    if row.node_id is None or row.state in {State.PENDING, State.SCHEDULED}:
        raise NotRunning(f"the instance is {row.state} and has no container yet", state=str(row.state))
    if running and row.state not in {State.RUNNING, State.STOPPING, State.UNREACHABLE}:
        raise NotRunning(f"the instance is {row.state}, not running", state=str(row.state))
    if nodes.get(session, row.node_id).silent:
        raise NodeUnreachable("the instance's node is unreachable; try again later")
    return row, row.node_id


def request(
    session: Session,
    access: Access,
    row: Instance,
    stream_id: str,
    request: LogsRequest | ExecRequest,
    url: str | None,
) -> None:
    """Store the request for the node, and wake the node's call that waits for such requests."""
    if isinstance(request, ExecRequest):
        # Only the program is recorded: its arguments may contain secrets.
        audit_log.record(session, access, row.id, row.project_id, after={"program": request.command[0][:255]})
    stream = StreamRequest(
        id=stream_id,
        instance_id=row.id,
        attempt=row.attempt,
        url=url,
        logs=request if isinstance(request, LogsRequest) else None,
        exec=request if isinstance(request, ExecRequest) else None,
    )
    session.add(
        Stream(id=stream_id, node_id=row.node_id, request=stream.model_dump(mode="json"), created_at=now())
    )
    assert row.node_id is not None  # see `check`
    notify(session, Topic.node_streams(row.node_id))


def waiting(session: Session, node_id: str) -> list[StreamRequest]:
    """The requested streams to which the node has not connected yet."""
    rows = session.scalars(select(Stream).where(Stream.node_id == node_id))
    return [StreamRequest.model_validate(row.request) for row in rows]


def waiting_for_agent(
    session: Session, node_id: str, credential_hash: str, agent_session: int
) -> list[StreamRequest]:
    """As `waiting`, with checks of the calling agent, in one small query: agents ask all the time.

    Raises:
        NotFound: the node is deleted.
        Unauthorized: the credential was replaced.
        StaleSession: the node has a newer agent.
    """
    rows: Sequence[Any] = session.execute(_NODE_AND_REQUESTS, {"node": node_id}).all()
    if not rows or rows[0].deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    nodes.require_current_credential(rows[0], credential_hash)
    nodes.require_current_session(rows[0], agent_session)
    return [StreamRequest.model_validate(row.request) for row in rows if row.request is not None]


def forget(session: Session, stream_id: str) -> None:
    session.execute(delete(Stream).where(Stream.id == stream_id))
