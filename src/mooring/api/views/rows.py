"""Rows as they are shown. Plain dicts, since a page of a hundred is built for every second request."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.api.views import gpus as gpu_views
from mooring.control.instances import capacity, specs
from mooring.control.instances.instances import QUEUED
from mooring.control.nodes import approval
from mooring.control.nodes.nodes import state_of_row
from mooring.control.tenants import api_keys
from mooring.core.access import SCOPES, Access, Caller, Permission, role_of
from mooring.core.instance import HOLDS_GPUS, State, actions
from mooring.core.node import allocatable_memory_mib
from mooring.db import tables
from mooring.schemas.base import Json, timestamp
from mooring.schemas.projects import QuotaValues


def instance(session: Session, row: tables.Instance, positions: Mapping[str, int]) -> Json:
    """One instance as it is now.

    Args:
        positions: in the queue, of those that wait (`World.positions`).
    """
    (shown,) = lasting(session, [row])
    waits = row.state is State.PENDING and was_looked_at(row)
    return {**shown, "queue_position": positions.get(row.id) if waits else None}


def was_looked_at(row: tables.Instance) -> bool:
    """A place in the queue is told from the scheduler's first look on; most are placed by that look."""
    return row.reason is not None and row.reason["code"] != QUEUED.code


def lasting(session: Session, rows: Sequence[tables.Instance]) -> list[Json]:
    """All that stays the same for as long as the version does: all but the place in the queue.

    Three queries at most, however many rows.
    """
    holders = [row.id for row in rows if row.gpu_count and row.state in HOLDS_GPUS]
    devices = gpu_views.devices(session, holders) if holders else {}
    names = gpu_views.node_names(session, {row.node_id for row in rows if row.node_id})
    whole = specs.whole(session, rows)
    return [
        _instance(row, whole[row.id], devices.get(row.id, []), names.get(row.node_id or "")) for row in rows
    ]


def _instance(row: tables.Instance, spec: Json, devices: list[Json], node_name: str | None) -> Json:
    granted = None
    if row.node_id is not None and row.cpu_milli is not None:
        given = {"cpus": row.cpu_milli / 1000, "memory_mib": row.memory_mib, "disk_mib": row.disk_mib}
        granted = {**given, **_placed_as(row)}
    return {
        "id": row.id,
        "name": row.name,
        "project_id": row.project_id,
        **spec,
        "labels": row.labels,
        "state": row.state,
        "desired_state": row.desired_state,
        "reason": row.reason,
        "version": row.version,
        "generation": row.generation,
        "attempt": row.attempt,
        "node_id": row.node_id,
        "node_name": node_name,
        "group_id": row.group_id,
        "group_rank": row.group_rank,
        "granted": granted,
        "devices": devices,
        "endpoints": row.endpoints,
        "container_id": row.container_id,
        "image_digest": row.image_digest,
        "exit_code": row.exit_code,
        "actions": actions(row.state),
        "simulated": row.simulated,
        "created_at": timestamp(row.created_at),
        "scheduled_at": timestamp(row.scheduled_at),
        "started_at": timestamp(row.started_at),
        "stopped_at": timestamp(row.stopped_at),
        "expires_at": timestamp(row.expires_at),
    }


def _placed_as(row: tables.Instance) -> Json:
    """What was placed by an earlier release was given whole cards."""
    exclusive = "exclusive" if row.gpu_count else None
    placed = row.placed_as or {}
    return {
        "isolation": placed.get("isolation", exclusive),
        "link_score": placed.get("link_score"),
        "borrowed": placed.get("borrowed", False),
    }


def nodes(session: Session, access: Access, rows: Sequence[tables.Node]) -> list[Json]:
    """Nodes with their GPUs; what belongs to other projects, and how to reach a machine, is for admins."""
    ids = [row.id for row in rows]
    used = capacity.used_by_node(session, ids)
    query = select(tables.Gpu).where(tables.Gpu.node_id.in_(ids)).order_by(tables.Gpu.index, tables.Gpu.uuid)
    grouped: dict[str, list[Json]] = defaultdict(list)
    for shown in gpu_views.gpus(session, access, session.scalars(query).all()):
        grouped[shown["node_id"]].append(shown)
    listed = [
        {
            **_node(row, used.get(row.id, capacity.Used()), grouped[row.id]),
            "reserved_for": _reserved_for(row, access),
        }
        for row in rows
    ]
    return listed if access.caller.is_admin else [{**node, **_FOR_ADMINS} for node in listed]


# What tells strangers which machine to attack, and with what.
_FOR_ADMINS: Json = {
    "orphans": [],
    "hostname": None,
    "address": None,
    "versions": dict.fromkeys(("agent", "docker", "driver", "cuda")),
    "overrides": [],
    "facts_changed": None,
}


def _node(row: tables.Node, used: capacity.Used, gpus: list[Json]) -> Json:
    facts: Mapping[str, Any] = row.facts or {}
    known = bool(facts)
    return {
        "id": row.id,
        "name": row.name,
        "state": state_of_row(row),
        "reason": _node_reason(row),
        "cordoned": row.cordoned,
        "draining": row.draining,
        "drain_deadline_at": timestamp(row.drain_deadline_at),
        "hostname": facts.get("hostname"),
        "address": facts.get("address"),
        "labels": facts.get("labels", {}),
        "cpus": facts.get("cpus"),
        "memory_mib": facts.get("memory_mib"),
        "cpus_free": facts["cpus"] - used.cpu_milli / 1000 if known else None,
        "memory_mib_free": allocatable_memory_mib(facts["memory_mib"]) - used.memory_mib if known else None,
        **_disk(facts.get("disk"), used),
        "versions": {name: facts.get(f"{name}_version") for name in ("agent", "docker", "driver", "cuda")},
        "gpus": gpus,
        "orphans": row.orphans,
        "overrides": facts.get("overrides", []),
        "facts_changed": _facts_changed(row),
        "simulated": bool(facts.get("simulated_containers") or facts.get("simulated_gpus")),
        "version": row.version,
        "last_heartbeat_at": timestamp(row.last_heartbeat_at),
        "created_at": timestamp(row.created_at),
    }


def _reserved_for(row: tables.Node, access: Access) -> list[str] | None:
    """Without the projects that the caller is not in; empty where it is reserved for others alone."""
    if row.reserved_for is None:
        return None
    return [project_id for project_id in row.reserved_for if access.caller.sees(project_id)]


def _facts_changed(row: tables.Node) -> Json | None:
    if not row.difference:
        return None
    return {"id": approval.difference_id(row.difference), "changes": row.difference}


def _disk(facts: Mapping[str, Any] | None, used: capacity.Used) -> Json:
    if facts is None:
        names = ("disk_mib", "disk_allocatable_mib", "disk_mib_free", "disk_enforced", "storage")
        return dict.fromkeys(names)
    shown = ("driver", "filesystem", "available_mib", "images_mib", "pressure")
    return {
        "disk_mib": facts["total_mib"],
        "disk_allocatable_mib": facts["allocatable_mib"],
        "disk_mib_free": facts["allocatable_mib"] - used.disk_mib,
        "disk_enforced": facts["enforced"],
        "storage": {name: facts[name] for name in shown},
    }


def _node_reason(row: tables.Node) -> Json | None:
    if not row.silent:
        return row.problem
    if row.last_heartbeat_at is None:
        return {"code": "never_heard", "message": "it has joined, and its agent has not reported yet"}
    return {
        "code": "node_unreachable",
        "message": "its agent is silent; is it running, and does it reach us?",
    }


def event(row: tables.Event) -> Json:
    return {"id": row.id, "seq": row.seq, "type": row.type, "at": timestamp(row.at), "data": row.data}


def project(row: tables.Project, usage: Json | None = None) -> Json:
    return {
        "id": row.id,
        "name": row.name,
        "labels": row.labels,
        "quotas": NO_QUOTAS | row.quotas,
        "usage": usage,
        "weight": row.weight,
        "allowed_images": row.allowed_images,
        "security_profile": row.security_profile,
        "max_priority": row.max_priority,
        "guaranteed_gpus": row.guaranteed_gpus,
        "gpu_sharing": row.gpu_sharing,
        "host_network": row.host_network,
        "node_selector": row.node_selector or {},
        "local_images": row.local_images,
        "require_disk_limits": row.require_disk_limits,
        "version": row.version,
        "created_at": timestamp(row.created_at),
    }


NO_QUOTAS: Json = QuotaValues().model_dump(mode="json")


def members(session: Session, rows: Sequence[tables.Member]) -> list[Json]:
    query = select(tables.User).where(tables.User.id.in_([row.user_id for row in rows]))
    people = {person.id: person for person in session.scalars(query)}
    return [_member(row, people[row.user_id]) for row in rows]


def _member(row: tables.Member, person: tables.User) -> Json:
    return {
        "project_id": row.project_id,
        "user_id": row.user_id,
        "name": person.name,
        "email": person.email,
        "role": row.role,
        "created_at": timestamp(row.created_at),
    }


def user(row: tables.User, *, to_admin: bool = True) -> Json:
    return {
        "id": row.id,
        "name": row.name,
        "email": row.email,
        "is_admin": row.is_admin if to_admin else None,
        "sso": row.issuer is not None,
        "version": row.version,
        "created_at": timestamp(row.created_at),
    }


def api_key(row: tables.ApiKey) -> Json:
    return {
        "id": row.id,
        "name": row.name,
        "prefix": row.prefix,
        "project_id": row.project_id,
        "user_id": row.user_id,
        "role": row.role,
        "scopes": row.scopes,
        "created_at": timestamp(row.created_at),
        "expires_at": timestamp(row.expires_at),
        "last_used_at": timestamp(row.last_used_at),
    }


def secret(row: tables.Secret) -> Json:
    return {
        "id": row.id,
        "name": row.name,
        "project_id": row.project_id,
        "created_at": timestamp(row.created_at),
    }


def registry(row: tables.Registry) -> Json:
    return {
        "id": row.id,
        "server": row.server,
        "username": row.username,
        "project_id": row.project_id,
        "created_at": timestamp(row.created_at),
    }


def me(session: Session, caller: Caller) -> Json:
    """Who the caller is. Everything is read anew but what they may do, which is as the gate saw it."""
    key = session.get(tables.ApiKey, caller.id) if caller.kind == "key" else None
    person = session.get(tables.User, caller.user_id) if caller.user_id else None
    names = api_keys.names(session, caller.permissions)
    projects = [
        {"id": project_id, "name": names[project_id], "role": role, "scopes": _scopes(held)}
        for project_id, held in sorted(caller.permissions.items())
        if project_id in names
        for role in (role_of(held),)
    ]
    own = next((item for item in projects if item["id"] == caller.project_id), None)
    return {
        "kind": caller.kind,
        "key": api_key(key) if key else None,
        "user": user(person) if person else None,
        "project": own,
        "role": own["role"] if own else None,
        "scopes": own["scopes"] if own else _scopes(caller.everywhere),
        "is_admin": caller.is_admin,
        "projects": projects,
    }


def _scopes(held: frozenset[Permission]) -> list[str]:
    return sorted(held & SCOPES)


def audit_entry(row: tables.AuditEntry, link: Json | None) -> Json:
    return {
        "id": row.id,
        "seq": row.seq,
        "at": timestamp(row.at),
        "actor": row.actor,
        "address": row.address,
        "request_id": row.request_id,
        "action": row.action,
        "project_id": row.project_id,
        "target_id": row.target_id,
        "before": row.before,
        "after": row.after,
        "previous_hash": row.previous_hash,
        "hash": row.hash,
        "link": link,
    }
