"""The cache of pending instances: it holds what a complete read finds, whatever happened before."""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from sqlalchemy.orm import Session

from mooring.control import event_order, events
from mooring.control.events import EventKind
from mooring.control.scheduling import pending as module
from mooring.control.scheduling.pending import READ_ALL_S, Pending
from mooring.db.session import Database, Ending, at_end
from mooring.db.tables import Instance
from mooring.scheduler.model import Request
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases

WAITING: dict[str, Any] = {"gpus": {"count": 9}}
TEMPLATE = {"image": "mooring-test/busybox:1", "gpus": {"count": 9}}


@pytest.fixture
def database(service: RunningService) -> Database:
    return service.plane.database


def _refreshed(database: Database, pending: Pending) -> dict[str, Request]:
    with database.read() as session:
        complete_to = event_order.complete_to(session)
    with database.read() as session:
        return {each.instance_id: each for each in pending.refresh(session, complete_to)}


def _current(database: Database, pending: Pending) -> dict[str, Request]:
    with database.read() as session:
        return {each.instance_id: each for each in pending.current(session)}


def _never_again() -> Pending:
    """It reads everything once only."""
    return Pending(clock=lambda: 0.0)


class _History:
    """Random requests of users and admins that change which instances wait, and for what."""

    def __init__(self, client: Client, random: Random) -> None:
        self._client = client
        self._random = random
        self._project = client.post("/v1/projects", json={"name": "changing"}).json()["id"]

    def step(self) -> None:
        steps = (self._create, self._delete, self._stop, self._start, self._patch, self._change_project)
        self._random.choice((*steps, self._create, self._create_group, self._delete_group))()

    def _create(self) -> None:
        self._client.create(**WAITING, **self._random.choice([{}, {"project_id": self._project}]))

    def _some(self, path: str) -> str | None:
        items = self._client.items(path)
        return self._random.choice(items)["id"] if items else None

    def _delete(self) -> None:
        if found := self._some("/v1/instances"):
            self._client.delete(f"/v1/instances/{found}")

    def _stop(self) -> None:
        if found := self._some("/v1/instances"):
            self._client.post(f"/v1/instances/{found}/stop")

    def _start(self) -> None:
        if found := self._some("/v1/instances"):
            self._client.post(f"/v1/instances/{found}/start")

    def _patch(self) -> None:
        if found := self._some("/v1/instances"):
            change = self._random.choice([{"priority": 40}, {"max_duration_s": 60}, {"labels": {"a": "b"}}])
            self._client.patch(f"/v1/instances/{found}", json=change)

    def _change_project(self) -> None:
        change = self._random.choice(
            [{"node_selector": {"zone": "a"}}, {"node_selector": {}}, {"require_disk_limits": True}]
        )
        answer = self._client.patch(f"/v1/projects/{self._project}", json=change)
        assert answer.status_code == 200, answer.text

    def _create_group(self) -> None:
        self._client.post("/v1/instance-groups", json={"count": 2, "template": TEMPLATE})

    def _delete_group(self) -> None:
        if found := self._some("/v1/instance-groups"):
            self._client.delete(f"/v1/instance-groups/{found}")


@pytest.mark.parametrize("rereads", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_changes_lead_to_the_same_requests_as_a_complete_read(
    client: Client, database: Database, seed: int, rereads: bool
) -> None:
    random = Random(seed)
    clock = itertools.count(step=READ_ALL_S / 100 if rereads else 0)
    history, pending = _History(client, random), Pending(clock=lambda: next(clock))
    for number in range(40):
        history.step()
        read = random.choice((_refreshed, _current))
        assert read(database, pending) == _current(database, Pending()), number


def test_an_unchanged_request_stays_the_same_object(client: Client, database: Database) -> None:
    pending = _never_again()
    first = client.create(**WAITING)["id"]
    before = _refreshed(database, pending)[first]
    second = client.create(**WAITING)["id"]
    after = _refreshed(database, pending)
    assert after[first] is before
    assert after.keys() == {first, second}


def test_an_older_snapshot_does_not_bring_an_instance_back(client: Client, database: Database) -> None:
    pending = _never_again()
    gone = client.create(**WAITING)["id"]
    _refreshed(database, pending)
    with database.read() as older:
        pending.current(older)  # its snapshot begins here
        other = client.create(**WAITING)["id"]
        client.delete(f"/v1/instances/{gone}")
        assert _current(database, pending).keys() == {other}
        assert {each.instance_id for each in pending.current(older)} == {other}
    assert _current(database, pending).keys() == {other}


def test_everything_is_read_again_from_time_to_time(client: Client, database: Database) -> None:
    now = 0.0
    pending = Pending(clock=lambda: now)
    made = client.create(**WAITING)["id"]
    _refreshed(database, pending)
    pending._requests.clear()  # damaged by a fault of ours
    pending._current = ()
    assert _refreshed(database, pending) == {}
    now = READ_ALL_S
    assert _refreshed(database, pending).keys() == {made}


@pytest.mark.parametrize("fault", ["lost", "outdated", "added"])
def test_a_long_queue_is_read_again_in_parts(
    client: Client, database: Database, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_AGAIN", 3)
    now = 0.0
    pending = Pending(clock=lambda: now)
    made = [client.create(**WAITING)["id"] for _ in range(6)]
    expected = _refreshed(database, pending)
    damage(pending, fault, made[4])
    assert _refreshed(database, pending) != expected
    is_mended = []
    for _ in range(6):
        now += READ_ALL_S / 3
        is_mended.append(_refreshed(database, pending) == expected)
    assert not is_mended[0], "the first part was the whole queue"
    assert is_mended[-1]
    assert pending._rows.keys() == expected.keys()


def damage(pending: Pending, fault: str, instance_id: str) -> None:
    """What a fault of ours might do to the cache."""
    request = pending._requests[instance_id]
    if fault == "lost":
        pending._rows.pop(instance_id)
        pending._forget(instance_id)
    elif fault == "outdated":
        pending._keys[instance_id] = replace(pending._keys[instance_id], changeable=())
        pending._requests[instance_id] = replace(request, priority=99)
    else:
        pending._rows["ghost"] = pending._rows[instance_id]
        pending._requests["ghost"] = replace(request, instance_id="ghost")
    pending._current = tuple(pending._requests.values())


def test_events_that_are_committed_late_are_seen(client: Client, database: Database) -> None:
    """On PostgreSQL a transaction may commit an event below the newest `seq`."""
    if database.is_sqlite:
        pytest.skip("one writer at a time")
    pending = _never_again()
    changed = client.create(**WAITING)
    _refreshed(database, pending)
    meanwhile: list[dict[str, Request]] = []

    def commit_another(_session: Session) -> None:
        client.create(**WAITING)
        meanwhile.append(_refreshed(database, pending))

    with database.write() as session:
        session.get_one(Instance, changed["id"]).priority = 41
        events.append(session, EventKind.INSTANCE_STATE_CHANGED, {}, instance_id=changed["id"])
        at_end(session, Ending.COUNTS, commit_another)
    assert len(meanwhile[0]) == 2
    assert meanwhile[0][changed["id"]].priority == changed["priority"]
    assert _current(database, pending)[changed["id"]].priority == 41
