"""Retention: rows that are purged, the records kept of them, and rows that are never purged."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from mooring.control import retention, revisions
from mooring.control.retention import Horizons, RetentionTimes, Sweep
from mooring.control.tenants.storage import StorageLimits
from mooring.db.session import Database
from mooring.db.tables import (
    Allocation,
    ApiKey,
    Base,
    Event,
    IdempotencyKey,
    IdempotencyUsage,
    Instance,
    InstanceGroup,
    InstanceRecord,
    JoinToken,
    Project,
    ProjectStorage,
    ProjectUsage,
    Reservation,
    Stream,
    User,
)
from mooring.db.types import now
from mooring.loops import retention as loop
from mooring.loops.retention import Retention
from tests.nodes import WireNode, join_token, observed
from tests.problems import problem
from tests.retention import DEFAULTS, IMMEDIATE, LIMITS, purge
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases

IMAGE = "mooring-test/busybox:1"
LONG_AGO = timedelta(days=31)


def count(service: RunningService, table: type[Base]) -> int:
    with service.plane.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def age(service: RunningService, table: type[Base], **by: timedelta) -> None:
    """Set time columns of all rows of a table to a time in the past."""
    times = {column: now() - ago for column, ago in by.items()}
    with service.plane.database.write() as session:
        session.execute(update(table).values(**times))


def ran(client: Client, node: WireNode, **fields: Any) -> dict[str, Any]:
    """An instance that ran and is deleted."""
    made = client.create(**fields)
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync(instances=None).assignments
    node.sync(observed(assignment, "running"))
    client.delete(f"/v1/instances/{made['id']}")
    node.sync(instances=None)
    node.sync()
    assert client.get(f"/v1/instances/{made['id']}").status_code == 404
    return made


def test_a_deleted_instance_is_purged_and_its_gpu_hours_still_count(
    service: RunningService, client: Client, node: WireNode
) -> None:
    made = ran(client, node, name="trained", gpus={"count": 2}, preemptible=True)
    waiting = client.create(node_selector={"no": "where"})
    client.delete(f"/v1/instances/{waiting['id']}")
    with service.plane.database.write() as session:
        moved = {"from_at": now() - timedelta(minutes=2), "to_at": now() - timedelta(minutes=1)}
        session.execute(update(Allocation).values(**moved))
    project = f"/v1/projects/{made['project_id']}"
    used = client.get(project).json()["usage"]
    assert used["gpu_hours_this_month"] > 0
    purge(service)
    assert count(service, Instance) == 2  # not old enough
    age(service, Instance, deleted_at=LONG_AGO)
    purge(service)
    assert count(service, Instance) == 0
    problem(client.get(f"/v1/instances/{made['id']}"), 404, "not_found")
    assert client.get(project).json()["usage"] == used
    with service.plane.database.read() as session:
        record = session.scalars(select(InstanceRecord)).one()  # none for an instance that was never placed
        ledger = session.scalars(select(Allocation)).all()
    assert (record.id, record.name, record.project_id) == (made["id"], "trained", made["project_id"])
    assert (record.gpu_count, record.gpu_milli, record.attempts, record.preemptible) == (2, 2000, 1, True)
    assert record.started_at is not None
    assert {row.instance_id for row in ledger} == {made["id"]}
    assert len(ledger) == 2


def test_an_instance_with_a_gpu_is_never_purged(
    service: RunningService, client: Client, node: WireNode
) -> None:
    made = client.create(gpus={"count": 1})
    client.wait(made["id"], "scheduled")
    age(service, Instance, created_at=LONG_AGO, queued_at=LONG_AGO)
    purge(service, IMMEDIATE)
    assert client.instance(made["id"])["state"] == "scheduled"
    # Even if a bug marks it as deleted, the row stays while a GPU is allocated.
    age(service, Instance, deleted_at=LONG_AGO)
    purge(service, IMMEDIATE)
    assert count(service, Instance) == 1
    with service.plane.database.write() as session:
        session.execute(update(Instance).values(deleted_at=None))
        # The scheduling loop may have read the node while its instance was marked as deleted.
        revisions.changed(session, node.id)


def test_the_removal_skips_an_instance_that_has_a_gpu(
    service: RunningService, client: Client, node: WireNode
) -> None:
    made = client.create(gpus={"count": 1})
    client.wait(made["id"], "scheduled")
    with service.plane.database.write() as session:
        assert retention._purge(session, [made["id"]], Instance.id == made["id"]) == []
    assert client.instance(made["id"])["state"] == "scheduled"


def test_reading_purged_events_answers_410(service: RunningService, client: Client) -> None:
    kept, gone = client.create(gpus={"count": 64}), client.create(gpus={"count": 64})
    client.delete(f"/v1/instances/{gone['id']}")
    later = client.create(gpus={"count": 64})
    theirs = [event["seq"] for event in client.items("/v1/events") if _instance_of(event) == gone["id"]]
    purge(service, IMMEDIATE)
    left = client.items("/v1/events")
    assert {_instance_of(event) for event in left} == {kept["id"], later["id"]}
    body = problem(client.get("/v1/events", params={"after": theirs[-1] - 1}), 410, "events_expired")
    assert body["oldest_seq"] == theirs[-1] + 1
    following = client.items("/v1/events", after=theirs[-1])
    assert {_instance_of(event) for event in following} == {later["id"]}
    assert len(client.items(f"/v1/instances/{kept['id']}/events")) > 0


def test_an_interval_purges_a_limited_time_of_history(
    service: RunningService, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """When a wrong clock makes all history due, an operator has hours to notice it."""
    clock = [0.0]
    keeper = Retention(service.plane.database, DEFAULTS, LIMITS)
    keeper._horizons = Horizons(lambda: clock[0])
    first = now() - timedelta(days=60)
    made = [client.create(gpus={"count": 64})["id"] for _ in range(5)]
    for instance_id in made:
        client.delete(f"/v1/instances/{instance_id}")
    hours = (0, 5, 7, 11, 30)
    with service.plane.database.write() as session:
        # The last five events are of the deletes; each is as old as its instance.
        newest = sorted(session.scalars(select(Event.seq)))[-5:]
        for instance_id, seq, after in zip(made, newest, hours, strict=True):
            at = first + timedelta(hours=after)
            session.execute(update(Instance).where(Instance.id == instance_id).values(deleted_at=at))
            session.execute(update(Event).where(Event.seq == seq).values(at=at, instance_id=None))
        session.execute(update(Event).where(Event.seq < newest[0]).values(at=first))
    left = []
    for seconds in (0, 599, 600, 1200, 1800):
        clock[0] = seconds
        keeper.tick()
        with service.plane.database.read() as session:
            seqs = session.scalars(select(Event.seq).where(Event.seq.in_(newest))).all()
        left.append((count(service, Instance), len(seqs)))
    # The newest event always stays.
    assert left == [(3, 3), (3, 3), (1, 1), (0, 1), (0, 1)]
    assert "deleted instances are due" in caplog.text


def _instance_of(event: dict[str, Any]) -> str:
    return str(event["data"]["instance_id"])


def test_a_group_is_purged_after_its_members(service: RunningService, client: Client) -> None:
    template = {"image": IMAGE, "node_selector": {"no": "where"}}
    made = client.post("/v1/instance-groups", json={"count": 3, "template": template}).json()
    client.delete(f"/v1/instance-groups/{made['id']}")
    with service.plane.database.write() as session:
        session.execute(update(InstanceGroup).values(deleted_at=now() - LONG_AGO))
    purge(service)
    assert (count(service, Instance), count(service, InstanceGroup)) == (3, 1)
    age(service, Instance, deleted_at=LONG_AGO)
    purge(service)
    assert (count(service, Instance), count(service, InstanceGroup)) == (0, 0)
    assert stored(service) == 0


def stored(service: RunningService) -> int:
    with service.plane.database.read() as session:
        return session.scalar(select(func.sum(ProjectStorage.stored_bytes))) or 0


def test_stored_bytes_are_counted_exactly(service: RunningService, client: Client) -> None:
    made = client.create(env={"A": "ü" * 1000}, labels={"a": "b"})
    client.patch(f"/v1/instances/{made['id']}", json={"labels": {}, "priority": 7, "max_duration_s": 999_999})
    length = retention._stored_bytes()
    with service.plane.database.read() as session:
        assert session.scalar(select(length)) == stored(service) > 6000  # ü takes six bytes in JSON
    client.delete(f"/v1/instances/{made['id']}")
    purge(service, IMMEDIATE)
    assert stored(service) == 0


def test_only_the_oldest_deleted_rows_of_a_project_over_its_limit_are_purged(
    service: RunningService, client: Client
) -> None:
    made = [client.create(env={"A": "x" * 10_000})["id"] for _ in range(6)]
    for instance_id in made[:5]:
        client.delete(f"/v1/instances/{instance_id}")
    events_before = count(service, Event)
    for number, instance_id in enumerate(made[:4]):
        with service.plane.database.write() as session:
            deleted_at = now() - timedelta(hours=9 - number)
            session.execute(update(Instance).where(Instance.id == instance_id).values(deleted_at=deleted_at))
    purge(service, limits=StorageLimits(80_000, 1))  # 64 KB are stored; half of the limit is 40 KB
    with service.plane.database.read() as session:
        assert set(session.scalars(select(Instance.id))) == set(made[3:])
    assert count(service, Event) == events_before  # one project must not remove events of other readers
    purge(service, limits=StorageLimits(2, 1))
    with service.plane.database.read() as session:  # recently deleted rows stay
        assert set(session.scalars(select(Instance.id))) == set(made[4:])


def test_old_rows_are_purged_except_those_that_deny_access(
    service: RunningService, client: Client, node: WireNode
) -> None:
    user = client.post("/v1/users", json={"name": "gone", "email": "gone@example.org"}).json()
    client.delete(f"/v1/users/{user['id']}")
    project = client.post("/v1/projects", json={"name": "p"}).json()["id"]
    revoked = client.post("/v1/api-keys", json={"name": "k", "project_id": project, "role": "member"}).json()
    client.delete(f"/v1/api-keys/{revoked['id']}")
    admins = client.post("/v1/api-keys", json={"name": "a", "scopes": ["admin"]}).json()
    client.delete(f"/v1/api-keys/{admins['id']}")
    kept = client.post("/v1/api-keys", json={"name": "l", "project_id": project, "role": "member"}).json()
    join_token(client)
    to_at = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    reservation = client.post("/v1/reservations", json={"name": "r", "gpus": {"count": 1}, "to": to_at})
    assert reservation.status_code == 201, reservation.text
    client.delete(f"/v1/reservations/{reservation.json()['id']}")
    with service.plane.database.write() as session:
        session.add(
            User(
                id="usr_signed_on", name="s", email=None, is_admin=False, issuer="https://id.example",
                subject="s", version=1, created_at=now(), deleted_at=now(),
            )
        )  # fmt: skip
    purge(service)
    assert count(service, JoinToken) == 2
    assert count(service, User) == 2
    assert count(service, Reservation) == 1
    with service.plane.database.write() as session:
        past = now() - LONG_AGO
        for table, column in (
            (JoinToken, "expires_at"), (Reservation, "deleted_at"), (User, "deleted_at"),
        ):  # fmt: skip
            session.execute(update(table).values({column: past}))
        session.execute(update(ApiKey).where(ApiKey.revoked_at.is_not(None)).values(revoked_at=past))
    purge(service)
    assert (count(service, JoinToken), count(service, Reservation)) == (0, 0)
    with service.plane.database.read() as session:
        keys = set(session.scalars(select(ApiKey.id)))
        users = set(session.scalars(select(User.id)))
    assert revoked["id"] not in keys
    # An admin key stays revoked even if the settings name it: its row prevents another installation.
    assert {admins["id"], kept["id"]} <= keys
    # The row of a deleted user of an issuer rejects that user's tokens.
    assert users == {"usr_signed_on"}


def test_a_deleted_project_is_purged_when_nothing_refers_to_it(
    service: RunningService, client: Client, node: WireNode
) -> None:
    used, unused = (client.post("/v1/projects", json={"name": name}).json()["id"] for name in ("u", "v"))
    ran(client, node, project_id=used, gpus={"count": 1})
    waiting = client.create(project_id=unused, node_selector={"no": "where"})
    client.delete(f"/v1/instances/{waiting['id']}")
    with service.plane.database.write() as session:
        session.add(ProjectUsage(project_id=unused, gpu_s=0.0, cpu_s=0.0, memory_mib_s=0.0, as_of=now()))
    for project in (used, unused):
        assert client.delete(f"/v1/projects/{project}").status_code == 204
    purge(service, IMMEDIATE)
    with service.plane.database.read() as session:
        left = set(session.scalars(select(Project.id)))
        assert unused not in set(session.scalars(select(ProjectUsage.project_id)))
    assert used in left  # its GPU-hours may still be billed
    assert unused not in left


def test_the_idempotency_key_of_a_running_request_is_not_purged(
    service: RunningService, client: Client, node: WireNode
) -> None:
    client.post("/v1/instances", json={"image": IMAGE}, headers={"Idempotency-Key": "answered"})
    with service.plane.database.write() as session:
        session.add(
            IdempotencyKey(
                caller="key_x", key="running", fingerprint="f", created_at=now() - timedelta(minutes=69)
            )
        )
        session.add(
            Stream(id="str_x", node_id=node.id, request={}, created_at=now(), seen_at=now() - LONG_AGO)
        )
    assert count(service, IdempotencyUsage) == 1
    purge(service, IMMEDIATE)
    with service.plane.database.read() as session:
        assert session.scalars(select(IdempotencyKey.key)).all() == ["running"]
    assert (count(service, IdempotencyUsage), count(service, Stream)) == (0, 0)


class Numbers(Sweep):
    """A sweep of numbers instead of rows; the test sets how long a removal takes."""

    def __init__(self, there: int, takes_s: Callable[[int], float]) -> None:
        self.there, self._takes_s = there, takes_s
        self.batches: list[int] = []
        self.clock = 0.0

    def find(self, session: Any, most: int) -> list[int]:
        return list(range(min(most, self.there)))

    def remove(self, session: Any, keys: Any) -> int:
        self.batches.append(len(keys))
        self.there -= len(keys)
        self.clock += self._takes_s(len(keys))
        return len(keys)


@pytest.fixture
def swept(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Numbers], None]]:
    def sweep(numbers: Numbers) -> None:
        keeper = Retention(service.plane.database, DEFAULTS, LIMITS)
        monkeypatch.setattr(loop, "monotonic", lambda: numbers.clock)
        monkeypatch.setattr(keeper._stopping, "wait", lambda _timeout: False)
        try:
            keeper._sweep(numbers)
        finally:
            monkeypatch.undo()

    yield sweep


def test_a_run_purges_all_that_is_due_in_batches_of_limited_time(
    swept: Callable[[Numbers], None],
) -> None:
    quick = Numbers(100_000, lambda count: count * 0.00001)
    swept(quick)
    assert sum(quick.batches) == 100_000
    assert max(quick.batches) == loop.MAX_BATCH_SIZE
    slow = Numbers(1000, lambda count: count * 0.002)  # 40 ms for the first twenty
    swept(slow)
    assert sum(slow.batches) == 1000
    assert max(slow.batches) * 0.002 < 0.2
    slower = Numbers(50, lambda count: count * 0.06)
    swept(slower)
    assert slower.batches[:6] == [20, 10, 5, 2, 1, 1]


def test_a_failed_sweep_does_not_stop_the_others(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Sweep):
        def find(self, session: Any, most: int) -> list[int]:
            raise ValueError("broken")

        def remove(self, session: Any, keys: Any) -> int:
            raise AssertionError

    made = client.create(node_selector={"no": "where"})
    client.delete(f"/v1/instances/{made['id']}")
    real_sweeps = retention.sweeps
    monkeypatch.setattr(retention, "sweeps", lambda *given: [Broken(), *real_sweeps(*given)])
    with pytest.raises(ExceptionGroup, match="not purged"):
        purge(service, IMMEDIATE)
    assert count(service, Instance) == 0


@pytest.mark.parametrize(
    ("deleted", "answers", "interval_s"),
    [(timedelta(days=30), timedelta(hours=24), 600), (timedelta(seconds=80), timedelta(hours=1), 20)],
)
def test_the_interval_depends_on_the_shortest_retention(
    deleted: timedelta, answers: timedelta, interval_s: float
) -> None:
    kept = RetentionTimes(deleted, answers, timedelta(days=30))
    assert Retention(Database.__new__(Database), kept, LIMITS).interval_s == interval_s
