"""Invariants that always hold: the API, the database and Docker agree."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import docker.errors
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from mooring.core.instance.state import HOLDS_GPUS, TRANSITIONS, State
from mooring.db import tables
from mooring.db.session import normalized
from tests.service import Client
from tests.testbed.dockerd import DockerNode

SETTLED = {"pending", "running", "stopped", "succeeded", "failed"}


@dataclass(frozen=True)
class Found:
    """One container as Docker describes it."""

    node: str
    id: str
    name: str
    instance: str
    attempt: int
    status: str
    pid: int
    requested: tuple[str, ...]
    labelled: tuple[str, ...]
    visible: str

    @property
    def runs(self) -> bool:
        return self.status == "running"


def containers_on(node: DockerNode) -> list[Found]:
    """All containers on the node, including foreign ones."""
    found = []
    for entry in node.client.api.containers(all=True):
        try:
            inspected: dict[str, Any] = node.client.api.inspect_container(entry["Id"])
        except docker.errors.NotFound:
            continue
        found.append(_found(node.name, inspected))
    return found


def _found(node: str, inspected: dict[str, Any]) -> Found:
    labels = inspected["Config"]["Labels"] or {}
    environment = dict(item.split("=", 1) for item in inspected["Config"]["Env"] or [] if "=" in item)
    requests = inspected["HostConfig"]["DeviceRequests"] or []
    return Found(
        node=node,
        id=inspected["Id"],
        name=inspected["Name"].lstrip("/"),
        instance=labels.get("mooring.instance", ""),
        attempt=int(labels.get("mooring.attempt") or 0),
        status=inspected["State"]["Status"],
        pid=inspected["State"]["Pid"],
        requested=tuple(sorted(uuid for request in requests for uuid in request["DeviceIDs"] or [])),
        labelled=tuple(sorted(filter(None, labels.get("mooring.gpus", "").split(",")))),
        visible=environment.get("NVIDIA_VISIBLE_DEVICES", ""),
    )


def all_instances(admin: Client) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    cursor: str | None = None
    while True:
        page = admin.get("/v1/instances", params={"limit": 200, **({"cursor": cursor} if cursor else {})})
        assert page.status_code == 200, page.text
        found |= {item["id"]: item for item in page.json()["items"]}
        cursor = page.json()["next_cursor"]
        if cursor is None:
            return found


class Invariants:
    """Checks the invariants and lists the problems.

    Args:
        foreign: names of containers that the test made by hand.
    """

    def __init__(
        self, admin: Client, nodes: Iterable[DockerNode], database_url: str, foreign: Iterable[str] = ()
    ) -> None:
        self._admin, self._nodes, self._database_url = admin, list(nodes), database_url
        self._foreign = set(foreign)
        self.problems: list[str] = []

    def unmet(self) -> list[str]:
        """The violations now. Operations in progress count as well, so wait until there are none."""
        self.problems = []
        before = all_instances(self._admin)
        gpus = {gpu["uuid"]: gpu for gpu in self._admin.items("/v1/gpus", limit=200)}
        containers = [found for node in self._nodes for found in containers_on(node)]
        after = all_instances(self._admin)
        if {key: item["version"] for key, item in before.items()} != {
            key: item["version"] for key, item in after.items()
        }:
            return ["the state changed during the check"]
        self._containers(containers)
        for instance in after.values():
            self._instance(instance, [found for found in containers if found.instance == instance["id"]])
        self._leftovers(after, containers)
        self._gpus(after, gpus)
        self._database(after, gpus)
        return self.problems

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            self.problems.append(text)

    def _containers(self, containers: list[Found]) -> None:
        """I1 and I4 as Docker reports them."""
        holders: dict[str, list[str]] = defaultdict(list)
        running: dict[str, list[str]] = defaultdict(list)
        for found in containers:
            self._require(found.requested == found.labelled, f"{found.name}: device request is not its label")
            if found.runs:
                for uuid in found.requested:
                    holders[uuid].append(found.name)
                if found.instance:
                    running[found.instance].append(found.name)
                seen = ",".join(found.requested) or "void"
                visible = ",".join(sorted(found.visible.split(",")))
                self._require(
                    visible == seen or found.name in self._foreign, f"{found.name} sees {found.visible}"
                )
        for uuid, names in holders.items():
            self._require(len(names) == 1, f"I1: {uuid} is in {names}")
        for instance, names in running.items():
            self._require(len(names) == 1, f"I4: {instance} runs as {names}")

    def _instance(self, instance: dict[str, Any], containers: list[Found]) -> None:
        who, state = f"{instance['name']} ({instance['id']}, {instance['state']})", instance["state"]
        self._require(state in SETTLED, f"{who} is in transition: {instance['reason']}")
        devices = tuple(sorted(device["uuid"] for device in instance["devices"]))
        if state == "running":
            exact = [
                (found.id, found.attempt, found.runs, found.requested, found.node) for found in containers
            ]
            wanted = (
                instance["container_id"], instance["attempt"], True, devices, instance["node_name"],
            )  # fmt: skip
            self._require(exact == [wanted], f"{who} should be {wanted} and is {exact}")
            self._require(len(devices) == instance["gpus"]["count"], f"{who} holds {devices}")
            return
        self._require(not devices, f"{who} holds {devices}")
        self._require(not any(found.runs for found in containers), f"{who} has running {containers}")
        self._require(len(containers) <= (state != "pending"), f"{who} has {containers}")

    def _leftovers(self, instances: dict[str, dict[str, Any]], containers: list[Found]) -> None:
        for found in containers:
            known = found.instance in instances or found.name in self._foreign
            self._require(known, f"left over on {found.node}: {found.name}, {found.status}")

    def _gpus(self, instances: dict[str, dict[str, Any]], gpus: dict[str, dict[str, Any]]) -> None:
        held = {uuid: gpu["instance_id"] for uuid, gpu in gpus.items() if gpu["instance_id"]}
        given = {device["uuid"]: item["id"] for item in instances.values() for device in item["devices"]}
        self._require(held == given, f"GPUs are held by {held}, instances hold {given}")

    def _database(self, instances: dict[str, dict[str, Any]], gpus: dict[str, dict[str, Any]]) -> None:
        engine = create_engine(normalized(self._database_url))
        try:
            with Session(engine) as session:
                self._ledger(session, gpus)
                self._history(session, instances)
        finally:
            engine.dispose()

    def _ledger(self, session: Session, gpus: dict[str, dict[str, Any]]) -> None:
        """The allocation intervals of a GPU never overlap."""
        ended: dict[str, Any] = {}
        held: dict[str, str] = {}
        order = (tables.Allocation.gpu_uuid, tables.Allocation.id)
        for row in session.scalars(select(tables.Allocation).order_by(*order)):
            self._require(row.gpu_uuid not in held, f"I1: {row.gpu_uuid} was allocated twice")
            last = ended.get(row.gpu_uuid)
            self._require(last is None or row.from_at >= last, f"I8: intervals of {row.gpu_uuid} overlap")
            if row.to_at is None:
                held[row.gpu_uuid] = row.instance_id
            else:
                self._require(row.to_at >= row.from_at, f"I8: an interval of {row.gpu_uuid} is negative")
                ended[row.gpu_uuid] = row.to_at
        shown = {uuid: gpu["instance_id"] for uuid, gpu in gpus.items() if gpu["instance_id"]}
        self._require(held == shown, f"the ledger says {held}, the API {shown}")

    def _history(self, session: Session, instances: dict[str, dict[str, Any]]) -> None:
        """I6, I13: each state change is one event, in version order, and an allowed transition."""
        last: dict[str, tuple[str | None, int]] = {}
        changes = select(tables.Event).where(tables.Event.type == "instance.state_changed")
        for event in session.scalars(changes.order_by(tables.Event.seq)):
            who, data = event.instance_id or "", event.data
            state, version = last.get(who, (None, 0))
            self._require(data["from"] == state, f"I13: {who} was {state}, its next event says {data}")
            self._require(data["version"] > version, f"I6: versions of {who} go back: {data}")
            allowed = state is None or State(data["to"]) in TRANSITIONS[State(state)]
            self._require(allowed, f"I6: {who} went from {state} to {data['to']}")
            last[who] = data["to"], data["version"]
        for row in session.scalars(select(tables.Instance)):
            shown = instances.get(row.id)
            self._require(
                last[row.id][0] == row.state, f"I13: {row.id} is {row.state}, its events {last[row.id]}"
            )
            self._require(
                (shown is not None) == (row.deleted_at is None), f"I2: {row.id} is not what is shown"
            )
            gone = row.deleted_at is not None and row.state is State.DELETED
            self._require(gone or row.deleted_at is None, f"{row.id} is deleted and {row.state}")
            self._require(
                row.state not in HOLDS_GPUS or row.node_id is not None, f"{row.id} is {row.state} nowhere"
            )
