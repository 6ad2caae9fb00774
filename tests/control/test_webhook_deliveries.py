"""Deliveries in the database: made once, in order, claimed by one control plane, dropped beyond a limit."""

import math
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from mooring.control import event_order, events, locks
from mooring.control.events import EventKind
from mooring.control.webhooks import attempts, fan_out, webhooks
from mooring.control.webhooks.attempts import Attempt, AttemptResult, RunningAttempts
from mooring.control.webhooks.webhooks import TargetRules
from mooring.core.access import SYSTEM
from mooring.core.webhooks import SCHEDULE, AddressRules
from mooring.db.session import Database
from mooring.db.tables import Project, Webhook, WebhookDelivery
from mooring.db.types import now
from mooring.loops.webhook_requests import RequestSender
from mooring.loops.webhooks import Webhooks
from mooring.server import ControlPlane, open_control_plane
from mooring_client.schemas.webhooks import WebhookApply
from tests.service import running, settings_for
from tests.testbed.waiting import wait_until
from tests.webhooks.receivers import LOOPBACK, Receiver

pytestmark = pytest.mark.both_databases

ALL = ["instance.state_changed"]


@pytest.fixture
def plane(database_url: str, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane without loops, so that nothing is sent."""
    made = open_control_plane(settings_for(database_url, tmp_path / "data"))
    yield made
    made.database.dispose()


def _webhook(plane: ControlPlane, **fields: object) -> str:
    request = WebhookApply.model_validate({"url": "https://receiver.invalid/", "events": ALL, **fields})
    with plane.database.write() as session:
        project = session.scalars(select(Project)).one()
        rules = TargetRules(AddressRules(), mail=False)
        return webhooks.create(session, SYSTEM, plane.encryptor, rules, project, request)[0].id


def _append(session: Session, instance_id: str, version: int) -> None:
    data = {"instance_id": instance_id, "to": "running", "version": version}
    project_id = session.scalars(select(Project.id)).one()
    kind = EventKind.INSTANCE_STATE_CHANGED
    events.append(session, kind, data, project_id=project_id, instance_id=instance_id)


def _events(plane: ControlPlane, *instance_ids: str) -> None:
    with plane.database.write() as session:
        for version, instance_id in enumerate(instance_ids):
            _append(session, instance_id, version)


def _fan_out(database: Database, after: int | None = None) -> int:
    """Make the deliveries of new events. Returns up to which `seq`."""
    with database.read() as session:
        complete_to = event_order.complete_to(session)
    with database.write() as session:
        stored = locks.webhooks(session)
        examined = fan_out.examine(session, stored if after is None else after, complete_to)
        fan_out.fan_out(session, examined)
        fan_out.move_progress(session, examined.to)
    return examined.to


def _claim(plane: ControlPlane) -> list[Attempt]:
    with plane.database.write() as session:
        locks.webhooks(session)
        return attempts.claim(session, plane.encryptor, RunningAttempts(Counter(), Counter()))


def _record(plane: ControlPlane, *results: AttemptResult) -> Counter[str]:
    with plane.database.write() as session:
        locks.webhooks(session)
        return attempts.record(session, results, SCHEDULE)


def _rows(plane: ControlPlane) -> list[WebhookDelivery]:
    with plane.database.read() as session:
        return list(session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.number)))


def test_only_the_first_of_an_instance_is_due(plane: ControlPlane) -> None:
    _webhook(plane)
    _events(plane, "ins_a", "ins_a", "ins_b", "ins_a")
    _fan_out(plane.database)
    first, of_b = _claim(plane)
    assert (b'"version":0' in first.body, b"ins_b" in of_b.body) == (True, True)
    assert _claim(plane) == []
    _record(plane, AttemptResult(first.number, first.claim, 503, "rejected"))
    assert _claim(plane) == []  # in five seconds, and later ones of the instance wait for it
    _make_due(plane)
    (again,) = _claim(plane)
    assert again.number == first.number
    assert _record(plane, AttemptResult(again.number, again.claim, 200)) == {"delivered": 1}
    (second,) = _claim(plane)
    assert b'"version":1' in second.body


def _make_due(plane: ControlPlane) -> None:
    with plane.database.write() as session:
        waiting = WebhookDelivery.next_attempt_at.is_not(None) & WebhookDelivery.claim.is_(None)
        past = now() - timedelta(seconds=1)
        session.execute(update(WebhookDelivery).where(waiting).values(next_attempt_at=past))


def test_a_late_result_of_another_claim_is_ignored(plane: ControlPlane) -> None:
    """As after a control plane stood still for longer than its claim lasts."""
    _webhook(plane)
    _events(plane, "ins_a")
    _fan_out(plane.database)
    (late,) = _claim(plane)
    with plane.database.write() as session:
        past = now() - timedelta(seconds=1)
        session.execute(update(WebhookDelivery).values(next_attempt_at=past))
    (current,) = _claim(plane)
    assert (current.number, current.message_id) == (late.number, late.message_id)
    assert _record(plane, AttemptResult(late.number, late.claim, 200)) == {}
    assert [(row.status, row.claim, row.attempts) for row in _rows(plane)] == [("pending", current.claim, 2)]


def test_beyond_the_limit_the_oldest_are_dropped(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "MAX_PENDING", 3)
    _webhook(plane)
    _events(plane, "ins_a", "ins_a", "ins_a")
    _fan_out(plane.database)
    _events(plane, "ins_a", "ins_b")
    _fan_out(plane.database)
    rows = _rows(plane)
    assert [row.status for row in rows] == ["dropped", "dropped", "pending", "pending", "pending"]
    assert [row.next_attempt_at is not None for row in rows] == [False, False, True, False, True]
    assert all(row.finished_at is not None for row in rows[:2])


def test_events_have_their_deliveries_once(plane: ControlPlane) -> None:
    """Another control plane that has read the same events finds that they have deliveries."""
    _webhook(plane)
    _events(plane, "ins_a", "ins_b")
    to = _fan_out(plane.database)
    assert _fan_out(plane.database) == to
    assert len(_rows(plane)) == 2


def test_an_event_that_is_committed_late_is_not_missed(plane: ControlPlane) -> None:
    if plane.database.is_sqlite:
        return  # one writer at a time
    _webhook(plane)
    with Session(plane.database.engine, info=dict(plane.database.session_info)) as slow:
        _append(slow, "ins_slow", 0)
        events._write(slow)  # has a `seq`, and is not committed
        _events(plane, "ins_fast")
        _fan_out(plane.database)
        assert _rows(plane) == []
        slow.commit()
    _fan_out(plane.database)
    assert [row.instance_id for row in _rows(plane)] == ["ins_slow", "ins_fast"]


def test_a_webhook_gets_no_events_from_before_it(plane: ControlPlane) -> None:
    _events(plane, "ins_before")
    made = _webhook(plane)
    _events(plane, "ins_after")
    _fan_out(plane.database)
    assert [row.instance_id for row in _rows(plane)] == ["ins_after"]
    with plane.database.write() as session:
        row = session.get_one(Webhook, made)
        rules = TargetRules(AddressRules(), mail=False)
        webhooks.change(session, SYSTEM, rules, row, {"enabled": False})
    _events(plane, "ins_while_disabled")
    with plane.database.write() as session:
        webhooks.change(session, SYSTEM, rules, session.get_one(Webhook, made), {"enabled": True})
    _events(plane, "ins_enabled")
    _fan_out(plane.database)
    assert [row.instance_id for row in _rows(plane)] == ["ins_after", "ins_enabled"]


def test_of_one_project_only_its_share_is_claimed(plane: ControlPlane) -> None:
    for _ in range(3):
        _webhook(plane)
    _events(plane, *(f"ins_{number}" for number in range(40)))
    _fan_out(plane.database)
    claimed = _claim(plane)
    assert len(claimed) == attempts.PER_PROJECT
    assert max(Counter(each.webhook_id for each in claimed).values()) == attempts.PER_WEBHOOK


def test_without_webhooks_events_are_not_examined(plane: ControlPlane) -> None:
    _events(plane, "ins_a")
    with plane.database.read() as session:
        assert fan_out.position(session, math.inf) == events.newest_seq(session)
    _webhook(plane)
    with plane.database.read() as session:
        assert fan_out.position(session, math.inf) is None


def test_two_control_planes_send_each_event_once(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(
        database_url, tmp_path / "data", rate_limits="off", webhook_allowed_networks=LOOPBACK
    )
    with Receiver() as receiver, running(settings) as service, service.client as client:
        other = Webhooks(
            service.plane.database, service.plane.encryptor, RequestSender(settings.webhook_addresses)
        )
        other.start()
        try:
            body = {"url": receiver.url, "events": ALL, "name": f"w-{uuid4().hex[:6]}"}
            assert client.post("/v1/webhooks", json=body).status_code == 201
            ids = [client.create(node_selector={"no": "where"})["id"] for _ in range(40)]
            wait_until(lambda: receiver.transitions().keys() >= set(ids))
        finally:
            other.stop()
        assert len({each.message_id for each in receiver.received}) == len(receiver.received)
