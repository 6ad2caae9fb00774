"""Invariants that hold whenever no operation is in progress: the API, the database and Docker agree."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import docker.errors
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from mooring.db import tables
from mooring.db.session import normalized
from tests.invariants import containers, events, ledger, settled
from tests.invariants.containers import Container
from tests.service import Client
from tests.testbed.dockerd import DockerNode


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

    def as_container(self) -> Container:
        return Container(
            self.node, self.id, self.name, self.instance, self.attempt, self.runs, self.requested
        )


def containers_on(node: DockerNode, instance: str = "") -> list[Found]:
    """The containers of the instance, or all containers on the node, including foreign ones.

    Docker answers no inspection of a container that it is starting, for seconds on a busy machine. So do not
    ask for all containers where those of one instance are enough.
    """
    found = []
    filters = {"label": f"mooring.instance={instance}"} if instance else None
    for entry in node.client.api.containers(all=True, filters=filters):
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
        found = [found for node in self._nodes for found in containers_on(node)]
        with _session(self._database_url) as session:
            self.problems += self._violations(session, [each.as_container() for each in found])
            shown = {row.id for row in session.scalars(select(tables.Instance)) if row.deleted_at is None}
            held = dict(containers.uses(session))
        after = all_instances(self._admin)
        if {key: item["version"] for key, item in before.items()} != {
            key: item["version"] for key, item in after.items()
        }:
            return ["the state changed during the check"]
        self._require(shown == after.keys(), f"the database has {shown}, the API shows {after.keys()}")
        self._devices(found)
        self._gpus(after, gpus, held)
        return self.problems

    def _violations(self, session: Session, found: list[Container]) -> Iterator[str]:
        yield from containers.violations(found)
        known = [each for each in found if each.name not in self._foreign]
        yield from containers.unallocated(known, containers.uses(session))
        yield from ledger.violations(session)
        yield from events.violations(session)
        yield from settled.violations(session, found, self._foreign)

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            self.problems.append(text)

    def _devices(self, found: list[Found]) -> None:
        """A container has the devices of its label, and sees no others."""
        for each in found:
            self._require(each.requested == each.labelled, f"{each.name}: device request is not its label")
            if each.runs and each.name not in self._foreign:
                expected = ",".join(each.requested) or "void"
                visible = ",".join(sorted(each.visible.split(",")))
                self._require(visible == expected, f"{each.name} sees {each.visible}")

    def _gpus(
        self, instances: dict[str, dict[str, Any]], gpus: dict[str, dict[str, Any]], held: dict[str, str]
    ) -> None:
        by_gpu = {uuid: gpu["instance_id"] for uuid, gpu in gpus.items() if gpu["instance_id"]}
        by_instance = {
            device["uuid"]: item["id"] for item in instances.values() for device in item["devices"]
        }
        self._require(by_gpu == by_instance, f"GPUs show {by_gpu}, instances show {by_instance}")
        self._require(by_gpu == held, f"GPUs show {by_gpu}, the ledger {held}")


@contextmanager
def _session(database_url: str) -> Iterator[Session]:
    engine = create_engine(normalized(database_url))
    try:
        with Session(engine) as session:
            yield session
    finally:
        engine.dispose()
