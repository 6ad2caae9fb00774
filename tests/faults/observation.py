"""Containers that no fault may touch, and the invariants that hold at any time, also during a fault."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import docker.errors
import requests
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from mooring.db.session import normalized
from tests.faults.clients import SMALL, Clients
from tests.faults.fleet import Fleet
from tests.invariants import containers
from tests.walk.checker import Found, containers_on
from tests.walk.product import AgentProcess

DOCKER_ERRORS = (docker.errors.DockerException, requests.RequestException, OSError)
_PERIOD_S = 2.0
# Longer than a report takes: the end of an allocation follows that of its container.
_RECENT = timedelta(seconds=30)


class Bystanders:
    """One instance on each node that nobody stops: its container must be the same after each fault."""

    def __init__(self, fleet: Fleet, clients: Clients) -> None:
        self._fleet, self._clients = fleet, clients
        self._made = 0
        self._ids: dict[str, str] = {}  # by node name
        self._containers: dict[str, Found] = {}

    def prepare(self) -> None:
        """Create those that are missing, and remember the containers of those that run."""
        for number, agent in enumerate(self._fleet.agents):
            name = agent.node.name
            if name not in self._ids:
                self._ids[name] = self._create(number)
            running = self._fleet.admin.instance(self._ids[name])["state"] == "running"
            if running and name not in self._containers:
                self._containers[name] = self.container(agent)

    def id(self, agent: AgentProcess) -> str:
        return self._ids[agent.node.name]

    def container(self, agent: AgentProcess) -> Found:
        found = containers_on(agent.node, self.id(agent))
        assert len(found) == 1, found
        return found[0]

    def replace(self, agent: AgentProcess) -> None:
        """Delete one that a fault has ended, so that `prepare` creates another."""
        instance_id = self._ids.pop(agent.node.name)
        self._containers.pop(agent.node.name, None)
        answer = self._fleet.admin.delete(f"/v1/instances/{instance_id}")
        assert answer.status_code == 202, answer.text
        self._clients.deleted(instance_id)

    def problems(self) -> Iterator[str]:
        for agent in self._fleet.agents:
            before = self._containers.get(agent.node.name)
            if before is None:
                continue
            shown = self._fleet.admin.instance(self.id(agent))
            if (shown["state"], shown["attempt"]) != ("running", before.attempt):
                state = f"{shown['state']} in attempt {shown['attempt']}"
                yield f"I16: {shown['name']} is {state}: {shown['reason']}"
            elif (after := self.container(agent)) != before:
                yield f"I16: the container of {shown['name']} was {before} and is {after}"

    def _create(self, number: int) -> str:
        self._made += 1
        name = f"bystander-{number}-{self._made}"
        self._clients.asked(name)
        made = self._fleet.admin.create(
            **SMALL,
            name=name,
            gpus={"count": 1},
            priority=100,
            max_duration_s=864_000,
            node_selector={"number": str(number)},
        )
        self._clients.acknowledged(name, made["id"])
        return str(made["id"])


class Monitor:
    """Looks at all containers every two seconds. A violation counts when two looks in a row show it:

    Docker lists containers and describes them one after another, meanwhile one may end and the next begin.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engine = create_engine(normalized(fleet.database_url))
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._found: list[str] = []
        self.looks = 0
        self._thread = threading.Thread(target=self._run, name="monitor")
        self._thread.start()

    def take(self) -> list[str]:
        """The violations since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def close(self) -> None:
        self._ended.set()
        self._thread.join(60)
        self._engine.dispose()

    def _run(self) -> None:
        before: set[str] = set()
        while not self._ended.wait(_PERIOD_S):
            now = set(self._look())
            self.looks += 1
            with self._lock:
                self._found += sorted((now & before) - set(self._found))
            before = now

    def _look(self) -> Iterator[str]:
        since = datetime.now(UTC) - _RECENT
        found: list[Found] = []
        for node in self._fleet.nodes:
            try:
                found += containers_on(node)
            except DOCKER_ERRORS:
                continue  # a fault of Docker is in progress
        seen = [each.as_container() for each in found]
        yield from containers.violations(seen)
        try:
            with Session(self._engine) as session:
                allocated = containers.uses(session, ended_since=since)
        except DBAPIError:
            return  # a fault of the database is in progress
        yield from containers.unallocated(seen, allocated)
