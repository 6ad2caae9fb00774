"""Invariants that hold whenever no operation is in progress: the API, the database and Docker agree."""

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
    """A container as Docker describes it.

    Attributes:
        instance: the ID in Mooring's label; "" without the label.
        requested: the UUIDs of its GPUs in Docker's device requests.
        labelled: the UUIDs of its GPUs in Mooring's label.
        visible: the value of NVIDIA_VISIBLE_DEVICES.
    """

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

    def check(self) -> list[str]:
        """The violations now. An operation in progress is one, so call this until there are none."""
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
        """A GPU is in one running container, and an instance has one."""
        holders: dict[str, list[str]] = defaultdict(list)
        running: dict[str, list[str]] = defaultdict(list)
        for found in containers:
            self._require(found.requested == found.labelled, f"{found.name}: device request is not its label")
            if found.runs:
                for uuid in found.requested:
                    holders[uuid].append(found.name)
                if found.instance:
                    running[found.instance].append(found.name)
                expected = ",".join(found.requested) or "void"
                visible = ",".join(sorted(found.visible.split(",")))
                self._require(
                    visible == expected or found.name in self._foreign, f"{found.name} sees {found.visible}"
                )
        for uuid, names in holders.items():
            self._require(len(names) == 1, f"{uuid} is in several containers: {names}")
        for instance, names in running.items():
            self._require(len(names) == 1, f"{instance} has several running containers: {names}")

    def _instance(self, instance: dict[str, Any], containers: list[Found]) -> None:
        name, state = f"{instance['name']} ({instance['id']}, {instance['state']})", instance["state"]
        self._require(state in SETTLED, f"{name} is in transition: {instance['reason']}")
        devices = tuple(sorted(device["uuid"] for device in instance["devices"]))
        if state == "running":
            actual = [
                (found.id, found.attempt, found.runs, found.requested, found.node) for found in containers
            ]
            expected = (
                instance["container_id"], instance["attempt"], True, devices, instance["node_name"],
            )  # fmt: skip
            self._require(actual == [expected], f"{name} should be {expected} and is {actual}")
            self._require(len(devices) == instance["gpus"]["count"], f"{name} holds {devices}")
            return
        self._require(not devices, f"{name} holds {devices}")
        self._require(not any(found.runs for found in containers), f"{name} has running {containers}")
        # An instance that has run keeps its last container, for its logs.
        most = 0 if state == "pending" else 1
        self._require(len(containers) <= most, f"{name} has {containers}")

    def _leftovers(self, instances: dict[str, dict[str, Any]], containers: list[Found]) -> None:
        for found in containers:
            known = found.instance in instances or found.name in self._foreign
            self._require(known, f"left over on {found.node}: {found.name}, {found.status}")

    def _gpus(self, instances: dict[str, dict[str, Any]], gpus: dict[str, dict[str, Any]]) -> None:
        by_gpu = {uuid: gpu["instance_id"] for uuid, gpu in gpus.items() if gpu["instance_id"]}
        by_instance = {
            device["uuid"]: item["id"] for item in instances.values() for device in item["devices"]
        }
        self._require(by_gpu == by_instance, f"GPUs show {by_gpu}, instances show {by_instance}")

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
            self._require(row.gpu_uuid not in held, f"{row.gpu_uuid} was allocated twice")
            last = ended.get(row.gpu_uuid)
            self._require(last is None or row.from_at >= last, f"intervals of {row.gpu_uuid} overlap")
            if row.to_at is None:
                held[row.gpu_uuid] = row.instance_id
            else:
                self._require(row.to_at >= row.from_at, f"an interval of {row.gpu_uuid} is negative")
                ended[row.gpu_uuid] = row.to_at
        shown = {uuid: gpu["instance_id"] for uuid, gpu in gpus.items() if gpu["instance_id"]}
        self._require(held == shown, f"the ledger says {held}, the API {shown}")

    def _history(self, session: Session, instances: dict[str, dict[str, Any]]) -> None:
        """Each state change is one event, in version order, and an allowed transition."""
        last: dict[str, tuple[str | None, int]] = {}
        changes = select(tables.Event).where(tables.Event.type == "instance.state_changed")
        for event in session.scalars(changes.order_by(tables.Event.seq)):
            instance_id, data = event.instance_id or "", event.data
            state, version = last.get(instance_id, (None, 0))
            self._require(data["from"] == state, f"{instance_id} was {state}, its next event says {data}")
            self._require(data["version"] > version, f"versions of {instance_id} go back: {data}")
            allowed = state is None or State(data["to"]) in TRANSITIONS[State(state)]
            self._require(allowed, f"{instance_id} went from {state} to {data['to']}")
            last[instance_id] = data["to"], data["version"]
        for row in session.scalars(select(tables.Instance)):
            shown = instances.get(row.id)
            self._require(
                last[row.id][0] == row.state, f"{row.id} is {row.state}, its last event says {last[row.id]}"
            )
            self._require(
                (shown is not None) == (row.deleted_at is None),
                f"{row.id} was deleted at {row.deleted_at}, and the API shows {shown}",
            )
            self._require(
                row.deleted_at is None or row.state is State.DELETED, f"{row.id} is deleted and {row.state}"
            )
            self._require(
                row.state not in HOLDS_GPUS or row.node_id is not None, f"{row.id} is {row.state} on no node"
            )
