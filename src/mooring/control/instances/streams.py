"""Open streams, and requests for them: a row exists from the request to the end of the stream."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import bindparam, delete, select, update
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.instances import instances
from mooring.control.nodes import nodes
from mooring.core.access import Access
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, Node, Stream
from mooring.db.types import now
from mooring.schemas.agent_streams import (
    AttachRequest,
    DialRequest,
    ExecRequest,
    LogsRequest,
    StreamRequest,
)
from mooring_client.errors import (
    InstanceDeleted,
    MooringError,
    NodeUnreachable,
    NotFound,
    NotRunning,
)
from mooring_client.schemas.states import DesiredState, State

Requested = LogsRequest | ExecRequest | DialRequest | AttachRequest
Attempt = tuple[str, int]  # instance id, attempt

# The process that serves a stream says so at this interval. Without it, the process has ended.
SEEN_EVERY_S: Final = 60.0
LOST_AFTER: Final = timedelta(minutes=10)
_CHUNK: Final = 1000  # databases limit a query to some ten thousand parameters
_UNKNOWN: Final = "server_lost"  # the reason in the audit log

_NODE_AND_REQUESTS = (
    select(Node.deleted_at, Node.session, Node.credential_hash, Node.next_credential_hash, Stream.request)
    .outerjoin(Stream, (Stream.node_id == Node.id) & Stream.is_connected.is_(False))
    .where(Node.id == bindparam("node"))
)


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """How a stream ended, for the audit log.

    Attributes:
        bytes_in: from the user to the instance.
        reason: the code of the reason if it did not end by itself.
    """

    duration_s: float
    bytes_in: int | None
    bytes_out: int | None
    exit_code: int | None
    reason: str | None


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


def ended_attempts(session: Session, attempts: Collection[Attempt]) -> dict[Attempt, MooringError]:
    """The attempts to which no stream may stay open, with the reasons.

    The reason is InstanceDeleted if the instance is deleted, or about to be; NotRunning if it has been
    started again.
    """
    ids = sorted({instance_id for instance_id, _attempt in attempts})
    columns = (Instance.id, Instance.attempt, Instance.state, Instance.desired_state, Instance.deleted_at)
    found: dict[str, Any] = {}
    for start in range(0, len(ids), _CHUNK):
        query = select(*columns).where(Instance.id.in_(ids[start : start + _CHUNK]))
        found |= {row.id: row for row in session.execute(query)}
    errors: dict[Attempt, MooringError] = {}
    for instance_id, attempt in attempts:
        row = found.get(instance_id)
        if row is None or row.desired_state is DesiredState.DELETED or row.deleted_at is not None:
            errors[instance_id, attempt] = InstanceDeleted("the instance was deleted")
        elif row.attempt != attempt:
            errors[instance_id, attempt] = NotRunning("the instance was started again", state=str(row.state))
    return errors


def request(
    session: Session, access: Access, row: Instance, stream_id: str, requested: Requested, url: str | None
) -> None:
    """Store the request for the node, and wake the node's call that waits for such requests."""
    assert row.node_id is not None  # see `check`
    stream = StreamRequest(
        id=stream_id,
        instance_id=row.id,
        attempt=row.attempt,
        url=url,
        logs=requested if isinstance(requested, LogsRequest) else None,
        exec=requested if isinstance(requested, ExecRequest) else None,
        dial=requested if isinstance(requested, DialRequest) else None,
        attach=requested if isinstance(requested, AttachRequest) else None,
    )
    session.add(
        Stream(
            id=stream_id,
            node_id=row.node_id,
            request=stream.model_dump(mode="json"),
            created_at=now(),
            seen_at=now(),
            audit=audit_log.entry_of(access, row.id, row.project_id, after=_recorded(requested)),
        )
    )
    notify(session, Topic.node_streams(row.node_id))


def _recorded(requested: Requested) -> Mapping[str, Any]:
    """What the audit log shows of a request: never the values of variables, which may be secrets."""
    match requested:
        case ExecRequest():
            shown = {"command": requested.command, "tty": requested.tty, "user": requested.user}
            return shown | {"env": sorted(requested.env)}
        case DialRequest():
            return {"port": requested.port}
        case AttachRequest():
            return {"stdin": requested.stdin, "signal": requested.signal}
        case LogsRequest():
            return {}


def waiting(session: Session, node_id: str) -> list[StreamRequest]:
    """The requested streams to which the node has not connected yet."""
    rows = session.scalars(select(Stream).where(Stream.node_id == node_id, Stream.is_connected.is_(False)))
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


def connected(session: Session, stream_id: str) -> None:
    """Record that the node has connected, and forget the request, whose variables may be secrets."""
    session.execute(update(Stream).where(Stream.id == stream_id).values(is_connected=True, request={}))


def seen(session: Session, stream_ids: Iterable[str]) -> None:
    """Record that these streams are still open."""
    session.execute(update(Stream).where(Stream.id.in_(list(stream_ids))).values(seen_at=now()))


def end(session: Session, stream_id: str, outcome: StreamOutcome | None) -> None:
    """Remove a stream, and record it in the audit log.

    Args:
        outcome: None: unknown, because the process that served it has ended.
    """
    columns = (Stream.audit, Stream.created_at, Stream.seen_at)
    row = session.execute(delete(Stream).where(Stream.id == stream_id).returning(*columns)).one_or_none()
    if row is None or row.audit is None:
        return
    outcome = outcome or StreamOutcome(
        (row.seen_at - row.created_at).total_seconds(), None, None, None, _UNKNOWN
    )
    audit_log.add(session, {**row.audit, "after": {**row.audit["after"], **asdict(outcome)}})


def lost(session: Session, most: int) -> Sequence[str]:
    """The ids of streams whose process has ended without ending them."""
    return session.scalars(select(Stream.id).where(Stream.seen_at < now() - LOST_AFTER).limit(most)).all()
