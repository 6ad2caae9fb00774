"""The tables. What SQL must filter, join, sum or constrain is a column; what only a reader shows is JSON."""

from mooring.db.tables.base import Base
from mooring.db.tables.history import AuditEntry, ControlPlane, Event, IdempotencyKey
from mooring.db.tables.machines import Gpu, GpuCondition, GpuIncident, JoinToken, Node, Stream
from mooring.db.tables.tenants import ApiKey, Member, Project, Registry, Secret, User
from mooring.db.tables.work import Allocation, Instance, InstanceGroup, ProjectUsage, Reservation

__all__ = [
    "Allocation", "ApiKey", "AuditEntry", "Base", "ControlPlane", "Event", "Gpu", "GpuCondition",
    "GpuIncident", "IdempotencyKey",
    "Instance", "InstanceGroup", "JoinToken", "Member", "Node", "Project", "ProjectUsage", "Registry",
    "Reservation", "Secret", "Stream", "User",
]  # fmt: skip
