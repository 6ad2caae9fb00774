"""Runs faults one after another: inject, heal, wait until the fleet has settled, check."""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import httpx
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from mooring.db.session import normalized
from tests.faults.clients import SMALL, Clients
from tests.faults.fleet import Fleet
from tests.faults.observation import DOCKER_ERRORS, Bystanders, Monitor
from tests.invariants import acknowledged
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.checker import Invariants

SETTLED_WITHIN_S = 60  # I12
_MOST_PROBLEMS = 20
_IN_PROGRESS = frozenset({"idempotency_in_progress", "conflict"})


class Trial:
    """One fault in progress: what it may use, and what it found.

    Attributes:
        notes: figures for the report.
        problems: criteria that did not hold.
    """

    def __init__(self, fleet: Fleet, clients: Clients, bystanders: Bystanders, rng: Random) -> None:
        self.fleet, self.clients, self.bystanders, self.rng = fleet, clients, bystanders, rng
        self.admin = fleet.admin
        self.notes: list[str] = []
        self.problems: list[str] = []

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.problems.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def hold(self, seconds: float) -> None:
        """Let the fault last, while the clients go on."""
        self.clients.rest(seconds)

    def await_state(self, description: str, holds: Callable[[], object], within_s: float = 60) -> float:
        """Wait for a criterion; returns the seconds that it took. The answers of an outage are no result."""
        began = time.monotonic()

        def holds_now() -> bool:
            try:
                return bool(holds())
            except (httpx.TransportError, AssertionError, *DOCKER_ERRORS):
                return False

        try:
            wait_until(holds_now, within_s, 0.1)
        except AssertionError:
            self.problems.append(f"not within {within_s:g} s: {description}")
        return time.monotonic() - began

    def name(self, prefix: str) -> str:
        """A name that no other instance, project or folder of this run has."""
        return f"{prefix}-{self.rng.getrandbits(40):010x}"

    def key(self) -> str:
        """An Idempotency-Key."""
        return str(UUID(int=self.rng.getrandbits(128), version=4))

    def create(self, client: Client, name: str, key: str, **fields: Any) -> httpx.Response:
        """Create an instance: repeat the request until it is acknowledged or rejected."""
        self.clients.asked(name)
        body = {**SMALL, "gpus": {"count": 1}, **fields, "name": name}

        def answered() -> httpx.Response | None:
            try:
                answer = client.post("/v1/instances", json=body, headers={"Idempotency-Key": key})
            except httpx.TransportError:
                return None
            may_run = answer.status_code == 409 and answer.json()["code"] in _IN_PROGRESS
            return None if may_run or answer.status_code in {429, 503} else answer

        answer = wait_until(answered, 90, 0.1)
        if answer.status_code == 201:
            self.clients.acknowledged(name, answer.json()["id"])
        else:
            self.clients.rejected(name)
        return answer

    def delete(self, instance_id: str) -> None:
        answer = self.admin.delete(f"/v1/instances/{instance_id}")
        assert answer.status_code in {202, 404}, answer.text
        self.clients.deleted(instance_id)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to try. `strike` injects it, lets it last, checks its criteria, and may heal it."""

    number: str
    title: str
    strike: Callable[[Trial], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: Fault
    problems: list[str]
    recovered_s: float
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        held = "VIOLATED" if self.problems else "held"
        notes = ", ".join([f"recovered in {self.recovered_s:.1f} s", *self.notes])
        return f"{self.fault.number:<4} {self.fault.title:<58} {held:<9} {notes}"


class Trials:
    """The load, the observers and the checks around a sequence of faults.

    Args:
        settled_within_s: for I12.
        folder: gets the logs of trials with violations.
    """

    def __init__(
        self,
        fleet: Fleet,
        rng: Random,
        folder: Path,
        *,
        per_s: float = 8.0,
        settled_within_s: float = SETTLED_WITHIN_S,
    ) -> None:
        self._fleet, self._rng, self._folder = fleet, rng, folder
        self._settled_within_s = settled_within_s
        self.clients = Clients(fleet.public.url, rng, per_s=per_s)
        self.bystanders = Bystanders(fleet, self.clients)
        self.monitor = Monitor(fleet)
        self._engine = create_engine(normalized(fleet.database_url))
        self.outcomes: list[Outcome] = []

    def begin(self) -> None:
        """Start the load once the bystanders run."""
        self.bystanders.prepare()
        for agent in self._fleet.agents:
            self._fleet.admin.wait(self.bystanders.id(agent), "running", 60)
        self.bystanders.prepare()
        self.clients.resume()

    def run(self, fault: Fault) -> Outcome:
        self.bystanders.prepare()
        self.clients.statistics = type(self.clients.statistics)()
        trial = Trial(self._fleet, self.clients, self.bystanders, Random(self._rng.random()))
        try:
            fault.strike(trial)
        except Exception:
            trial.problems.append(f"the trial ended early: {traceback.format_exc()}")
        recovered_s = self._recover(trial)
        trial.problems += [*self.monitor.take(), *self.clients.statistics.problems]
        trial.note(str(self.clients.statistics))
        outcome = Outcome(fault, trial.problems[:_MOST_PROBLEMS], recovered_s, trial.notes)
        self.outcomes.append(outcome)
        if outcome.problems:
            self._keep_evidence(outcome)
        self.clients.resume()
        return outcome

    def close(self) -> None:
        self.clients.end()
        self.monitor.close()
        self._engine.dispose()

    def _recover(self, trial: Trial) -> float:
        """Heal everything, and check that all invariants hold in time; returns the seconds until then."""
        began = time.monotonic()
        problems: list[str] = []

        def settled() -> bool:
            problems[:] = self._violations()
            return not problems

        try:
            self._fleet.heal()
            self.clients.pause()
            wait_until(settled, self._settled_within_s, 0.3)
            trial.problems += self.bystanders.problems()
        except Exception as failure:
            trial.problems += problems or [f"not healed: {failure}"]
        return time.monotonic() - began

    def _violations(self) -> list[str]:
        """The invariants that do not hold now. The clients are paused."""
        try:
            if not self._fleet.ready():
                return ["I12: not all nodes are ready"]
            return list(self._all_violations())
        except (httpx.TransportError, AssertionError, DBAPIError, *DOCKER_ERRORS) as failure:
            return [f"I12: no answer: {failure!r}"]

    def _all_violations(self) -> Iterator[str]:
        yield from Invariants(self._fleet.admin, self._fleet.nodes, self._fleet.database_url).check()
        with Session(self._engine) as session:
            yield from acknowledged.violations(session, self.clients.history)

    def _keep_evidence(self, outcome: Outcome) -> None:
        folder = self._folder / f"{len(self.outcomes):02}-{outcome.fault.number}"
        self._fleet.keep_logs(folder)
        (folder / "problems.txt").write_text("\n".join([str(outcome), *outcome.problems, ""]))
