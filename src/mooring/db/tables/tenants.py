"""Projects, users, memberships, API keys, secrets and registries."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from mooring.db.tables.base import LIVE, Base, one_of, partial_index
from mooring.db.types import JsonObject
from mooring_client.schemas.projects import Role


class Project(Base):
    """A tenant: it owns instances, keys, secrets and quotas."""

    __tablename__ = "projects"
    __table_args__ = (partial_index("uq_projects_name", "name", where=LIVE, unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    labels: Mapped[JsonObject]
    # As QuotaValues in schemas/projects.py; absent or null: unlimited.
    quotas: Mapped[JsonObject]
    weight: Mapped[float] = mapped_column(Float)
    # Patterns of core/images.py; null: all images.
    allowed_images: Mapped[list[Any] | None]
    security_profile: Mapped[str]
    # The highest priority that its instances may have; null: any.
    max_priority: Mapped[int | None]
    # The number of GPUs that it may reclaim from projects beyond their guarantee; null: none.
    guaranteed_gpus: Mapped[int | None]
    gpu_sharing: Mapped[bool] = mapped_column(default=False)
    host_network: Mapped[bool] = mapped_column(default=False)
    # Labels that nodes must have to run its instances; null: none.
    node_selector: Mapped[JsonObject | None]
    # Whether it may use images that exist only on a node.
    local_images: Mapped[bool] = mapped_column(default=False)
    require_disk_limits: Mapped[bool] = mapped_column(default=False)
    public_ports: Mapped[bool] = mapped_column(default=False, server_default=false())
    # The names of the quotas that an event has announced as nearly used; null: none.
    quotas_announced: Mapped[list[Any] | None]
    # Counts changes of its pending instances that have no event.
    pending_changes: Mapped[int] = mapped_column(default=0, server_default="0")
    version: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class User(Base):
    """A person. OIDC users are identified by issuer and subject, and created at their first request."""

    __tablename__ = "users"
    __table_args__ = (
        Index("uq_users_issuer_subject", "issuer", "subject", unique=True),
        partial_index("uq_users_email", "email", where=LIVE, unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    email: Mapped[str | None]
    is_admin: Mapped[bool]
    issuer: Mapped[str | None]
    subject: Mapped[str | None]
    version: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Member(Base):
    """A user's role in a project."""

    __tablename__ = "members"
    __table_args__ = (one_of("role", Role),)

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True, index=True)
    role: Mapped[Role] = mapped_column()
    # False: an owner added the user without asking, so this membership does not affect the default project.
    by_admin: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[datetime]


class ApiKey(Base):
    """A key of a project, or a key for the whole service. A user's key can do no more than the user."""

    __tablename__ = "api_keys"
    __table_args__ = (Index("ix_api_keys_project_id_id", "project_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    # The first characters of the key, for users to recognize it.
    prefix: Mapped[str]
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"), index=True)
    role: Mapped[Role | None] = mapped_column()
    scopes: Mapped[list[Any]]
    secret_hash: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class SshKey(Base):
    """A key of SSH clients. It acts as the API key or person that registered it."""

    __tablename__ = "ssh_keys"
    __table_args__ = (
        Index("uq_ssh_keys_api_key_id_fingerprint", "api_key_id", "fingerprint", unique=True),
        Index("uq_ssh_keys_user_id_fingerprint", "user_id", "fingerprint", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    public_key: Mapped[str]
    fingerprint: Mapped[str] = mapped_column(index=True)
    api_key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    # The only project to use it in; null: all.
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class PortLink(Base):
    """A link to a port of an instance that works once. Its use deletes the row."""

    __tablename__ = "port_links"

    id: Mapped[str] = mapped_column(primary_key=True)
    instance_id: Mapped[str] = mapped_column(ForeignKey("instances.id", ondelete="CASCADE"), index=True)
    expires_at: Mapped[datetime]


class Secret(Base):
    """A value that only containers see, stored encrypted."""

    __tablename__ = "secrets"
    __table_args__ = (Index("uq_secrets_project_id_name", "project_id", "name", unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    sealed_value: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]


class Template(Base):
    """A named spec of instances with parameters.

    Attributes:
        project_id: null: all projects see it.
        shipped: the name under which it came with Mooring; null: a user has created it.
        deleted_at: only of those that came with Mooring; others are deleted outright.
    """

    __tablename__ = "templates"
    __table_args__ = (
        partial_index(
            "uq_templates_project_id_name", "project_id", "name", where=f"{LIVE} AND project_id IS NOT NULL",
            unique=True,
        ),
        partial_index("uq_templates_name", "name", where=f"{LIVE} AND project_id IS NULL", unique=True),
        Index("uq_templates_shipped", "shipped", unique=True),
    )  # fmt: skip

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    description: Mapped[str]
    parameters: Mapped[JsonObject]
    spec: Mapped[JsonObject]
    shipped: Mapped[str | None]
    version: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Registry(Base):
    """A project's credentials for one image registry. The password is stored encrypted."""

    __tablename__ = "registries"
    __table_args__ = (Index("uq_registries_project_id_server", "project_id", "server", unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    server: Mapped[str]
    username: Mapped[str]
    sealed_password: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]
