"""The control plane's own row, events, the audit log, and stored answers."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Index,
    LargeBinary,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import Base
from mooring.db.types import BigId, JsonObject


class ControlPlane(Base):
    """A single row: the identity and the secrets of this control plane."""

    __tablename__ = "control_plane"

    id: Mapped[str] = mapped_column(primary_key=True)
    cursor_secret: Mapped[bytes] = mapped_column(LargeBinary)
    # A known text, encrypted: detects a wrong encryption key at startup.
    key_check: Mapped[bytes | None] = mapped_column(LargeBinary)
    # Id of the key that signs the audit log: detects a wrong key at startup.
    audit_key_id: Mapped[str | None]
    # The private keys of all gateways, encrypted: see control/gateway_keys.py.
    sealed_ssh_host_key: Mapped[bytes | None] = mapped_column(LargeBinary)
    sealed_ssh_ca_key: Mapped[bytes | None] = mapped_column(LargeBinary)
    # Signs links and cookies of the port proxy, encrypted: see control/gateway_keys.py.
    sealed_port_key: Mapped[bytes | None] = mapped_column(LargeBinary)
    # The highest `seq` of the events that were deleted.
    events_purged_to: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    # Whether lost nodes' instances are not replaced now, because too many nodes went silent at once.
    replacement_paused: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Counted up to find out whether the database accepts writes.
    write_checks: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class Event(Base):
    """The event log, append-only. Readers follow `seq` (see control/event_order.py)."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_instance_id_seq", "instance_id", "seq"),
        # Reads a project's next events without scanning those of others.
        Index("ix_events_project_id_seq", "project_id", "seq"),
        # Otherwise SQLite would reuse the number of a deleted last row.
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
    """Who did what. Append-only by triggers. `hash` is a signature of this row; `seq` is not the order of
    commits. Rows of releases before signing have a plain hash that covers `previous_hash`.
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
    # The changed fields before and after; null before a create and after a delete.
    before: Mapped[JsonObject | None]
    after: Mapped[JsonObject | None]
    previous_hash: Mapped[str]
    hash: Mapped[str]


class AuditLink(Base):
    """The position of an audit log row in the chain of its project. Append-only by triggers."""

    __tablename__ = "audit_links"
    __table_args__ = (
        Index("uq_audit_links_entry_seq", "entry_seq", unique=True),
        Index("uq_audit_links_chain_position", "chain", "position", unique=True),
        {"sqlite_autoincrement": True},
    )

    # In the order of commits, since there is one writer at a time.
    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    entry_seq: Mapped[int] = mapped_column(BigId)
    chain: Mapped[str]
    position: Mapped[int] = mapped_column(BigId)
    hash: Mapped[str]


class AuditHead(Base):
    """A hash over all links so far, made each minute if there are new ones. Append-only by triggers."""

    __tablename__ = "audit_heads"

    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    last_link: Mapped[int] = mapped_column(BigId)
    # The number of links that the head covers.
    links: Mapped[int] = mapped_column(BigId)
    hash: Mapped[str]


class IdempotencyKey(Base):
    """The stored answer of a POST, written in the transaction of its effect.

    Without a status the request is still running. A status without a body: the body was too large to store.
    """

    __tablename__ = "idempotency_keys"

    caller: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    status: Mapped[int | None]
    headers: Mapped[JsonObject | None]
    # Whether `body` is encrypted, because the answer contains a secret.
    sealed: Mapped[bool] = mapped_column(default=False)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    # The project of the caller's API key, if any.
    project_id: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(index=True)


class IdempotencyUsage(Base):
    """Bytes of stored answers of a holder: a caller or a project."""

    __tablename__ = "idempotency_usage"

    holder: Mapped[str] = mapped_column(primary_key=True)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
