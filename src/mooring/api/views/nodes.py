"""Nodes as the API shows them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.api.views import gpus as gpu_views
from mooring.api.views.show import show
from mooring.control.instances import capacity
from mooring.control.nodes import approval
from mooring.control.nodes.nodes import state_of_row
from mooring.core.access import Access
from mooring.core.node import allocatable_memory_mib
from mooring.db import tables
from mooring_client.schemas.base import Json
from mooring_client.schemas.nodes import Node, Storage, Versions


def nodes(session: Session, access: Access, rows: Sequence[tables.Node]) -> list[Json]:
    """Return nodes with their GPUs. Only admins see other projects' details and machine addresses."""
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
    return listed if access.caller.is_admin else [{**node, **_HIDDEN_FIELDS} for node in listed]


# Fields that would help to attack a machine.
_HIDDEN_FIELDS: Json = {
    "orphans": [],
    "hostname": None,
    "address": None,
    "versions": dict.fromkeys(Versions.model_fields),
    "overrides": [],
    "facts_changed": None,
}


def _node(row: tables.Node, used: capacity.Used, gpus: list[Json]) -> Json:
    facts: Mapping[str, Any] = row.facts or {}
    known = bool(facts)
    return show(
        Node,
        row,
        ("reserved_for",),
        state=state_of_row(row),
        reason=_node_reason(row),
        hostname=facts.get("hostname"),
        address=facts.get("address"),
        labels=facts.get("labels", {}),
        cpus=facts.get("cpus"),
        memory_mib=facts.get("memory_mib"),
        cpus_free=facts["cpus"] - used.cpu_milli / 1000 if known else None,
        memory_mib_free=allocatable_memory_mib(facts["memory_mib"]) - used.memory_mib if known else None,
        **_disk(facts.get("disk"), used),
        versions={name: facts.get(f"{name}_version") for name in Versions.model_fields},
        gpus=gpus,
        overrides=facts.get("overrides", []),
        facts_changed=_facts_changed(row),
        simulated=bool(facts.get("simulated_containers") or facts.get("simulated_gpus")),
    )


def _reserved_for(row: tables.Node, access: Access) -> list[str] | None:
    """Return those projects that the caller may see; empty if the node is reserved for others only."""
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
    return {
        "disk_mib": facts["total_mib"],
        "disk_allocatable_mib": facts["allocatable_mib"],
        "disk_mib_free": facts["allocatable_mib"] - used.disk_mib,
        "disk_enforced": facts["enforced"],
        "storage": {name: facts[name] for name in Storage.model_fields},
    }


def _node_reason(row: tables.Node) -> Json | None:
    if not row.silent:
        return row.problem
    if row.last_heartbeat_at is None:
        return {"code": "never_heard", "message": "the node has joined, but its agent has not reported yet"}
    return {
        "code": "node_unreachable",
        "message": "the agent does not report; check that it runs and can reach the control plane",
    }
