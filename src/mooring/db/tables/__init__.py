"""The tables. Data that SQL filters, joins, sums or constrains has columns; most other data is JSON."""

from mooring.db.tables.base import Base
from mooring.db.tables.history import (
    AuditEntry,
    AuditHead,
    AuditLink,
    ControlPlane,
    Event,
    IdempotencyKey,
    IdempotencyUsage,
)
from mooring.db.tables.machines import Gpu, GpuCondition, GpuIncident, JoinToken, Node, Stream
from mooring.db.tables.tenants import (
    ApiKey,
    Member,
    PortLink,
    Project,
    Registry,
    Secret,
    SshKey,
    Template,
    User,
)
from mooring.db.tables.volumes import InstanceVolume, NodeVolume, Volume
from mooring.db.tables.webhooks import Webhook, WebhookDelivery, WebhookProgress
from mooring.db.tables.work import (
    Allocation,
    DockerContainer,
    Instance,
    InstanceGroup,
    InstanceRecord,
    ProjectStorage,
    ProjectUsage,
    Reservation,
)

__all__ = [
    "Allocation", "ApiKey", "AuditEntry", "AuditHead", "AuditLink", "Base", "ControlPlane", "DockerContainer",
    "Event", "Gpu",
    "GpuCondition", "GpuIncident", "IdempotencyKey", "IdempotencyUsage", "Instance", "InstanceGroup",
    "InstanceRecord", "InstanceVolume", "JoinToken", "Member", "Node", "NodeVolume", "PortLink",
    "Project", "ProjectStorage", "ProjectUsage", "Registry", "Reservation", "Secret", "SshKey", "Stream",
    "Template", "User", "Volume", "Webhook", "WebhookDelivery", "WebhookProgress",
]  # fmt: skip
