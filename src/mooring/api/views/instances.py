"""Instances as the API shows them."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.api.views import gpus as gpu_views
from mooring.api.views.show import show
from mooring.control.instances import specs
from mooring.control.instances.instances import QUEUED
from mooring.core.instance.state import HOLDS_GPUS, actions
from mooring.core.port_urls import PortUrls
from mooring.db import tables
from mooring_client.schemas.base import Json
from mooring_client.schemas.instances import Granted, Instance
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import State

# States in which the container may run, so that streams can be opened to it.
_WITH_STREAMS = frozenset({State.RUNNING, State.STOPPING, State.UNREACHABLE})


def instance(
    session: Session, row: tables.Instance, positions: Mapping[str, int], urls: PortUrls | None
) -> Json:
    """Return an instance as JSON.

    Args:
        urls: of ports through the proxy; None: there is no proxy.
        positions: positions in the queue by instance id (`SchedulerCache.positions`).
    """
    (shown,) = stable_fields(session, [row], urls)
    has_position = row.state is State.PENDING and was_considered(row)
    return {**shown, "queue_position": positions.get(row.id) if has_position else None}


def was_considered(row: tables.Instance) -> bool:
    """Return whether a scheduling cycle has considered the instance, which has no queue position before."""
    return row.reason is not None and row.reason["code"] != QUEUED.code


def stable_fields(session: Session, rows: Sequence[tables.Instance], urls: PortUrls | None) -> list[Json]:
    """Return all fields of each instance but the queue position. They change only together with `version`.

    Uses at most four queries for all rows.
    """
    with_devices = [row.id for row in rows if row.gpu_count and row.state in HOLDS_GPUS]
    devices = gpu_views.devices(session, with_devices) if with_devices else {}
    names = gpu_views.node_names(session, {row.node_id for row in rows if row.node_id})
    full_specs = specs.whole(session, rows)
    with_ports = [row for row in rows if row.state in _WITH_STREAMS and full_specs[row.id].get("ports")]
    endpoints = _endpoints(session, with_ports, full_specs, urls) if with_ports else {}
    return [
        _instance(
            row,
            full_specs[row.id],
            devices.get(row.id, []),
            names.get(row.node_id or ""),
            endpoints.get(row.id, []),
        )
        for row in rows
    ]


def _endpoints(
    session: Session, rows: Sequence[tables.Instance], full_specs: Mapping[str, Json], urls: PortUrls | None
) -> dict[str, list[Json]]:
    """Return the endpoints by instance: first those of the node, then those of the proxy alone."""
    projects = {row.project_id for row in rows} if urls else set()
    query = select(tables.Project.id, tables.Project.name).where(tables.Project.id.in_(projects))
    names: dict[str, str] = dict(session.execute(query).all()) if projects else {}
    found = {}
    for row in rows:
        at_node = [
            {**each, "url": _url(urls, row, names, each["container"]) if each["protocol"] == "tcp" else None}
            for each in row.endpoints
        ]
        proxied = [
            _at_proxy(url, port["container"])
            for port in full_specs[row.id]["ports"]
            if port.get("expose") == "proxy" and (url := _url(urls, row, names, port["container"]))
        ]
        found[row.id] = at_node + proxied
    return found


def _url(urls: PortUrls | None, row: tables.Instance, names: Mapping[str, str], port: int) -> str | None:
    return urls.url(port, row.id, row.name, names[row.project_id]) if urls else None


def _at_proxy(url: str, port: int) -> Json:
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    at = {"host": parts.hostname, "port": parts.port or default}
    return {"container": port, "protocol": "tcp", **at, "url": url}


def _instance(
    row: tables.Instance, spec: Json, devices: list[Json], node_name: str | None, endpoints: list[Json]
) -> Json:
    fields = show(
        Instance,
        row,
        _NOT_OF_ROW,
        node_name=node_name,
        granted=_granted(row),
        devices=devices,
        endpoints=endpoints,
        actions=actions(row.state),
    )
    return {**spec, **fields}


# Fields that `instance` adds or that come from the spec, even where a column has the name of such a field.
_NOT_OF_ROW = frozenset(InstanceSpec.model_fields) | {"queue_position"}
# Fields of `Granted` that come from the column `placed_as`.
_PLACED_AS = Granted.model_fields.keys() - {"cpus", "memory_mib", "disk_mib"}


def _granted(row: tables.Instance) -> Json | None:
    """Return the granted resources. Earlier releases stored no `placed_as`, and allocated whole GPUs only."""
    if row.node_id is None or row.cpu_milli is None:
        return None
    defaults = {"isolation": "exclusive" if row.gpu_count else None, "borrowed": False}
    placed_as = dict.fromkeys(_PLACED_AS) | defaults | (row.placed_as or {})
    return show(Granted, row, cpus=row.cpu_milli / 1000, **placed_as)
