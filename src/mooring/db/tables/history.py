"""What happened and who did it, and what was answered."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Index,
    LargeBinary,
)
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import Base
from mooring.db.types import BigId, JsonObject


class ControlPlane(Base):
    """One row: who this control plane is, to its nodes and to the cursors it signs."""

    __tablename__ = "control_plane"

    id: Mapped[str] = mapped_column(primary_key=True)
    cursor_secret: Mapped[bytes] = mapped_column(LargeBinary)
    # A known text under the encryption key, by which a wrong key is noticed at the start.
    key_check: Mapped[bytes | None] = mapped_column(LargeBinary)
    # Names the key that signs the audit log, so that a wrong one is noticed at the start.
    audit_key_id: Mapped[str | None]
    # The highest `seq` of an event that was purged with its instance, before its time was over.
    events_purged_to: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime]


class Event(Base):
    """The history, append-only. `seq` is the order of commits (see control/events.py)."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_instance_id_seq", "instance_id", "seq"),
        # A project's next events, without reading past those of all others.
        Index("ix_events_project_id_seq", "project_id", "seq"),
        # SQLite would otherwise give the number of a deleted last row to the next one.
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    id: Mapped[str]
    type: Mapped[str]
    project_id: Mapped[str | None]
    instance_id: Mapped[str | None]
    at: Mapped[datetime]
    data: Mapped[JsonObject]


class AuditEntry(Base):
    """Who did what. Append-only by triggers. `hash` is a keyed signature of the row alone; `seq` is not the
    order of commits. Rows of releases before the keys have a plain hash, over `previous_hash` too.
    """

    __tablename__ = "audit_log"
    __table_args__ = (
        Index("ix_audit_log_project_id_seq", "project_id", "seq"),
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    id: Mapped[str]
    at: Mapped[datetime]
    actor: Mapped[JsonObject]
    address: Mapped[str | None]
    request_id: Mapped[str | None]
    action: Mapped[str]
    project_id: Mapped[str | None]
    target_id: Mapped[str | None]
    # The fields that changed, as they were and as they are; null: there was, or is, nothing.
    before: Mapped[JsonObject | None]
    after: Mapped[JsonObject | None]
    previous_hash: Mapped[str]
    hash: Mapped[str]


class AuditLink(Base):
    """The place of a committed row of the audit log in the chain of its project. Append-only by triggers."""

    __tablename__ = "audit_links"
    __table_args__ = (
        Index("uq_audit_links_entry_seq", "entry_seq", unique=True),
        Index("uq_audit_links_chain_position", "chain", "position", unique=True),
        {"sqlite_autoincrement": True},
    )

    # One writer at a time: the order of numbers is the order of commits.
    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    entry_seq: Mapped[int] = mapped_column(BigId)
    chain: Mapped[str]
    position: Mapped[int] = mapped_column(BigId)
    hash: Mapped[str]


class AuditHead(Base):
    """A hash over all links up to one, made each minute in which there were some. Append-only by triggers."""

    __tablename__ = "audit_heads"

    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    last_link: Mapped[int] = mapped_column(BigId)
    # How many links it covers.
    links: Mapped[int] = mapped_column(BigId)
    hash: Mapped[str]


class IdempotencyKey(Base):
    """The stored answer of a POST, written in the transaction of its effect. No status: still running.

    A status without a body: the body was not kept, since it was too large.
    """

    __tablename__ = "idempotency_keys"

    caller: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    status: Mapped[int | None]
    headers: Mapped[JsonObject | None]
    # An answer that shows a secret this once is kept encrypted.
    sealed: Mapped[bool] = mapped_column(default=False)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    # Of the caller's key, where it belongs to one.
    project_id: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(index=True)


class IdempotencyUsage(Base):
    """How many bytes of stored answers a caller or a project has."""

    __tablename__ = "idempotency_usage"

    holder: Mapped[str] = mapped_column(primary_key=True)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
