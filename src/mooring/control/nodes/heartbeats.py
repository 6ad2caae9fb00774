"""Heartbeats: nodes confirm that their last report is still true. Many are stored in one transaction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from pydantic_core import to_json
from sqlalchemy import Row, bindparam, func, select, update
from sqlalchemy.orm import Session

from mooring.control.nodes import approval
from mooring.db.tables import Node
from mooring.db.types import now
from mooring.schemas.agent import Heartbeat
from mooring_client.schemas.gpus import Sample


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """A heartbeat, and the credential that it came with."""

    credential_hash: str
    heartbeat: Heartbeat

    def confirms_the_same_as(self, other: "NodeHeartbeat") -> bool:
        """Whether both confirm the same report; samples and waits may differ."""
        one, two = self.heartbeat, other.heartbeat
        return (
            self.credential_hash == other.credential_hash
            and (one.session, one.seq) == (two.session, two.seq)
            and (one.generation, one.revision) == (two.generation, two.revision)
        )


class HeartbeatOutcome(Enum):
    STORED = auto()
    REPORT_WANTED = auto()  # not stored
    LOCKED = auto()  # another transaction has locked the node; not stored


_COMPARED: Final[tuple[Any, ...]] = (
    Node.id, Node.credential_hash, Node.session, Node.seq, Node.generation, Node.revision, Node.renewal_due,
    Node.deleted_at, Node.approved,
)  # fmt: skip
_CONFIRMED = update(Node).values(heartbeats=Node.heartbeats + 1, last_heartbeat_at=bindparam("at"))
_SAME_SAMPLES = _CONFIRMED.where(Node.id.in_(bindparam("ids", expanding=True)))
# One statement with the samples of all nodes as JSON, by id: a statement for each would be most of the cost.
_READ = func.json_each(bindparam("read")).table_valued("key", "value").alias("read")
_NEW_SAMPLES = _CONFIRMED.values(samples=_READ.c.value).where(Node.id == _READ.c.key)


def store(session: Session, heartbeats: Mapping[str, NodeHeartbeat]) -> dict[str, HeartbeatOutcome]:
    """Store heartbeats, by node id, like reports in which nothing but the samples has changed.

    A heartbeat is stored only if its report would be applied and would change nothing. It never waits for the
    lock of a node, so it does not delay those that hold one.
    """
    # Not FOR UPDATE: inserts of rows that refer to a node need not wait.
    query = select(*_COMPARED).where(Node.id.in_(heartbeats)).order_by(Node.id)
    rows = session.execute(query.with_for_update(skip_locked=True, key_share=True)).all()
    current = [row for row in rows if _is_current(row, heartbeats[row.id])]
    _update(session, current, heartbeats)
    # Nodes are never removed, so another transaction has locked those that are missing.
    outcomes = dict.fromkeys(heartbeats, HeartbeatOutcome.LOCKED)
    outcomes |= {row.id: HeartbeatOutcome.REPORT_WANTED for row in rows}
    return outcomes | {row.id: HeartbeatOutcome.STORED for row in current}


def _is_current(row: Row[Any], caller: NodeHeartbeat) -> bool:
    """Whether the heartbeat's report is the last one of the node, and nothing has changed here since."""
    heartbeat = caller.heartbeat
    return (
        row.deleted_at is None
        and row.credential_hash == caller.credential_hash  # a new credential needs a report
        and not row.renewal_due
        and (row.session, row.seq) == (heartbeat.session, heartbeat.seq)
        and (row.generation, row.revision) == (heartbeat.generation, heartbeat.revision)
    )


def _update(session: Session, rows: Sequence[Row[Any]], heartbeats: Mapping[str, NodeHeartbeat]) -> None:
    read: dict[str, list[Sample]] = {}
    for row in rows:
        if samples := heartbeats[row.id].heartbeat.samples:
            own = (row.approved or {}).get(approval.GPUS) or {}
            read[row.id] = [each for each in samples if each.uuid in own]
    others = [row.id for row in rows if row.id not in read]
    connection, at = session.connection(), now()
    if read:
        connection.execute(_NEW_SAMPLES, {"at": at, "read": to_json(read).decode()})
    if others:
        connection.execute(_SAME_SAMPLES, {"at": at, "ids": others})
