"""Webhooks, their deliveries, and up to which event deliveries exist."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import Base, one_of, partial_index
from mooring.db.types import BigId


class Status(StrEnum):
    """Of a delivery. Only `pending` ones have attempts before them."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    DROPPED = "dropped"


# The exact text of the conditions of indexes: otherwise SQLite does not use them.
PENDING: Final = "status = 'pending'"
DUE: Final = "status = 'pending' AND next_attempt_at IS NOT NULL"


class Webhook(Base):
    """A receiver of events. `project_id` null: it gets those of all projects and machines."""

    __tablename__ = "webhooks"
    __table_args__ = (
        Index("uq_webhooks_project_id_name", "project_id", "name", unique=True),
        # In the index above, nulls differ from each other.
        partial_index("uq_webhooks_name", "name", where="project_id IS NULL", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    url: Mapped[str]
    events: Mapped[list[Any]]
    enabled: Mapped[bool]
    disabled_reason: Mapped[str | None]
    format: Mapped[str]
    sealed_secret: Mapped[bytes] = mapped_column(LargeBinary)
    # The secret before the last rotation; it signs too until `former_secret_until`.
    sealed_former_secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    former_secret_until: Mapped[datetime | None]
    # Events up to this `seq` are not for it: they are older than it, or than its last change of `events`.
    after_seq: Mapped[int] = mapped_column(BigInteger)
    version: Mapped[int]
    created_at: Mapped[datetime]


class WebhookDelivery(Base):
    """An event on its way to a webhook. `number` is the order of the deliveries of an `order_key`."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        one_of("status", Status),
        Index("uq_webhook_deliveries_id", "id", unique=True),
        Index("ix_webhook_deliveries_webhook_id_number", "webhook_id", "number"),
        partial_index("ix_webhook_deliveries_due", "webhook_id", "next_attempt_at", where=DUE),
        partial_index("ix_webhook_deliveries_queue", "webhook_id", "order_key", "number", where=PENDING),
        partial_index("ix_webhook_deliveries_finished_at", "finished_at", where="finished_at IS NOT NULL"),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    id: Mapped[str]
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event_id: Mapped[str]
    type: Mapped[str]
    instance_id: Mapped[str | None]
    # Deliveries of a webhook with the same key are sent one after the other.
    order_key: Mapped[str]
    body: Mapped[bytes] = mapped_column(LargeBinary)
    status: Mapped[str]
    attempts: Mapped[int]
    # Null: finished, or an earlier delivery with the same key is pending.
    next_attempt_at: Mapped[datetime | None]
    # The attempt that is being made; until `next_attempt_at`, no other one begins.
    claim: Mapped[str | None]
    last_code: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class WebhookProgress(Base):
    """A single row: deliveries of all events up to `seq` exist. Its lock is that of all deliveries.

    It also counts the results of deliveries, for the metrics.
    """

    __tablename__ = "webhook_progress"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    seq: Mapped[int] = mapped_column(BigInteger)
    delivered: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    dropped: Mapped[int] = mapped_column(BigInteger)
    retried: Mapped[int] = mapped_column(BigInteger)
