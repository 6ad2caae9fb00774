"""Events for people: instances that end soon, quotas that are nearly used, and their e-mails."""

import smtplib
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import update

from mooring.control import notices
from mooring.control.events import EventKind
from mooring.db.tables import Instance, Project
from mooring.db.types import now
from mooring.loops import webhook_mails
from mooring.loops.notices import Notices
from mooring.loops.webhook_mails import MailServer
from mooring.loops.webhook_requests import NotSent
from tests.api.conftest import Sandbox
from tests.api.tenants.test_secrets import Tenant
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 does not have them
    import asyncore
    import smtpd

both_databases = pytest.mark.both_databases


def _events(client: Client, kind: EventKind, **wanted: Any) -> list[dict[str, Any]]:
    found, after = [], 0
    while page := client.get("/v1/events", params={"after": after, "limit": 200}).json()["items"]:
        found += [each["data"] for each in page if each["type"] == str(kind)]
        after = page[-1]["seq"]
    return [each for each in found if wanted.items() <= each.items()]


@both_databases
def test_an_instance_is_announced_once_15_minutes_before_it_expires(sandbox: Sandbox) -> None:
    database = sandbox.service.plane.database
    running_id = sandbox.running(max_duration_s=3600).instance_id
    short_id = sandbox.running(max_duration_s=600).instance_id

    def announced(instance_id: str) -> list[dict[str, Any]]:
        Notices(database).tick()
        return _events(sandbox.client, EventKind.INSTANCE_EXPIRING, instance_id=instance_id)

    assert announced(running_id) == []
    soon = now() + timedelta(minutes=14)
    _expire_at(sandbox.service, running_id, soon)
    (data,) = announced(running_id)
    assert data["expires_at"] == sandbox.client.instance(running_id)["expires_at"]
    assert len(announced(running_id)) == 1
    # Extended, and near its end again: once more.
    answer = sandbox.client.patch(f"/v1/instances/{running_id}", json={"max_duration_s": 7200})
    assert answer.status_code == 200
    assert len(announced(running_id)) == 1
    _expire_at(sandbox.service, running_id, now() + timedelta(minutes=10))
    assert len(announced(running_id)) == 2
    assert announced(short_id) == []


def _expire_at(service: RunningService, instance_id: str, at: Any) -> None:
    with service.plane.database.write() as session:
        session.execute(update(Instance).where(Instance.id == instance_id).values(expires_at=at))


@both_databases
def test_a_quota_is_announced_once_until_it_is_below_80_percent_again(
    shared: Client, shared_service: RunningService
) -> None:
    name = f"quotas-{uuid4().hex[:8]}"
    with Tenant(shared, name) as tenant:
        shared.patch(f"/v1/projects/{tenant.id}", json={"quotas": {"instances": 5, "cpus": 1000}})

        def announced() -> list[dict[str, Any]]:
            Notices(shared_service.plane.database).tick()
            return _events(tenant.owner, EventKind.PROJECT_QUOTA_NEARLY_USED)

        made = [tenant.member.create(node_selector={"no": "where"})["id"] for _ in range(3)]
        assert announced() == []
        made.append(tenant.member.create(node_selector={"no": "where"})["id"])
        expected = {
            "project_id": tenant.id, "project_name": name, "quota": "instances", "limit": 5, "used": 4,
            "percent": 80,
        }  # fmt: skip
        assert announced() == [expected]
        tenant.member.create(node_selector={"no": "where"})
        assert announced() == [expected]
        for instance_id in made[:2]:
            tenant.member.delete(f"/v1/instances/{instance_id}")
        assert announced() == [expected]
        for _ in range(2):
            tenant.member.create(node_selector={"no": "where"})
        assert len(announced()) == 2
        with shared_service.plane.database.read() as session:
            assert session.get_one(Project, tenant.id).quotas_announced == ["instances"]


def test_two_control_planes_announce_a_quota_once(shared: Client, shared_service: RunningService) -> None:
    with Tenant(shared, f"quotas-{uuid4().hex[:8]}") as tenant:
        shared.patch(f"/v1/projects/{tenant.id}", json={"quotas": {"gpu_hours_per_day": 10, "instances": 1}})
        tenant.member.create(node_selector={"no": "where"})
        database = shared_service.plane.database
        with database.read() as session:
            (changed,) = [each for each in notices.changed_quotas(session) if each.project_id == tenant.id]
        for _ in range(2):
            with database.write() as session:
                notices.announce_quotas(session, changed)
        assert len(_events(tenant.owner, EventKind.PROJECT_QUOTA_NEARLY_USED)) == 1


class _Mailbox(smtpd.SMTPServer):
    """A mail server that refuses the recipients in `refused`."""

    def __init__(self) -> None:
        self.map: dict[int, Any] = {}
        super().__init__(("127.0.0.1", 0), ("", 0), map=self.map, decode_data=True)
        assert self.socket is not None
        self.port: int = self.socket.getsockname()[1]
        self.mails: list[tuple[str, list[str], str]] = []
        self.refusal: str | None = None

    def process_message(
        self, peer: tuple[str, int], mailfrom: str, rcpttos: list[str], data: Any, **kwargs: Any
    ) -> str | None:
        if self.refusal is not None:
            return self.refusal
        self.mails.append((mailfrom, rcpttos, data))
        return None


@contextmanager
def _mail_server() -> Iterator[_Mailbox]:
    mailbox = _Mailbox()
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            asyncore.loop(timeout=0.05, count=1, map=mailbox.map)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield mailbox
    finally:
        ended.set()
        thread.join(5)
        asyncore.close_all(mailbox.map)


def _person(client: Client, name: str) -> dict[str, Any]:
    body = {"name": name, "email": f"{name}-{uuid4().hex[:6]}@lab.example"}
    return dict(client.post("/v1/users", json=body).json())


def test_members_get_e_mails(database_url: str, tmp_path: Path) -> None:
    with _mail_server() as mailbox:
        settings = settings_for(
            database_url, tmp_path / "data", smtp_host="127.0.0.1", smtp_port=mailbox.port,
            smtp_from="mooring@lab.example", smtp_security="none",
        )  # fmt: skip
        with running(settings, webhook_schedule=(0.0, 0.1, 60.0)) as service, service.client as client:
            _check_mails(client, mailbox)


def _check_mails(client: Client, mailbox: _Mailbox) -> None:
    alice, mallory = _person(client, "alice"), _person(client, "mallory")
    with Tenant(client, "lab") as tenant:
        client.put(f"/v1/projects/{tenant.id}/members/{alice['id']}", json={"role": "member"})
        of_nobody = {"url": f"mailto:{mallory['email']}"}
        problem(tenant.owner.post("/v1/webhooks", json=of_nobody), 422, "webhook_url_not_allowed")
        body = {"url": f"mailto:{alice['email'].upper()}", "events": ["instance.state_changed"]}
        made = tenant.owner.post("/v1/webhooks", json=body).json()
        tenant.member.create(name="train", node_selector={"no": "where"})
        ((sender, recipients, text),) = wait_until(lambda: mailbox.mails)
        assert (sender, recipients) == ("mooring@lab.example", [alice["email"]])
        assert "Subject: [Mooring] Instance train in the project lab is pending" in text
        path = f"/v1/webhooks/{made['id']}/deliveries"
        wait_until(lambda: tenant.owner.items(path, status="delivered"))
        mailbox.refusal = "554 not today"
        tenant.member.create(node_selector={"no": "where"})
        (waiting,) = wait_until(lambda: tenant.owner.items(path, status="pending"))
        wait_until(lambda: tenant.owner.items(path, status="pending")[0]["attempts"] == 2)
        assert tenant.owner.items(path, status="pending")[0]["last_code"] == 554
        # No longer a member: nothing more is sent.
        client.delete(f"/v1/projects/{tenant.id}/members/{alice['id']}")

        def is_refused() -> bool:
            # While an attempt is being made, a replay is that attempt.
            assert tenant.owner.post(f"{path}/{waiting['id']}/replay").status_code == 202
            return bool(tenant.owner.items(path)[0]["last_error"] == "not_a_member")

        wait_until(is_refused)
        assert len(mailbox.mails) == 1


def test_without_a_mail_server_there_are_no_e_mails(shared: Client) -> None:
    problem(shared.post("/v1/webhooks", json={"url": "mailto:somebody@lab.example"}), 409, "mail_off")


def test_nothing_is_sent_without_tls_unless_the_settings_say_so() -> None:
    with _mail_server() as mailbox:
        server = MailServer("127.0.0.1", mailbox.port, "mooring@lab.example")
        with pytest.raises(NotSent, match=r"^tls_failed$"):
            webhook_mails.send(server, "alice@lab.example", "evt_1", "text")
        assert mailbox.mails == []


def test_a_sentence_cannot_add_headers_to_an_e_mail() -> None:
    with _mail_server() as mailbox:
        server = MailServer("127.0.0.1", mailbox.port, "mooring@lab.example", security="none")
        text = "Instance x\r\nBcc: mallory@evil.example\r\n\r\nhello"
        began = time.monotonic()
        assert webhook_mails.send(server, "alice@lab.example", "evt_1", text).code == 250
        assert time.monotonic() - began < 5
        ((_sender, recipients, mail),) = mailbox.mails
        assert recipients == ["alice@lab.example"]
        head, _empty, _body = mail.partition("\n\n")
        assert "\nBcc:" not in head
        assert "Message-ID: <evt_1@mooring>" in head


def test_a_mail_server_that_is_away_is_an_error() -> None:
    server = MailServer("127.0.0.1", 9, "mooring@lab.example")
    with pytest.raises(NotSent, match=r"^connection_failed$"):
        webhook_mails.send(server, "alice@lab.example", "evt_1", "text")
    assert issubclass(smtplib.SMTPRecipientsRefused, smtplib.SMTPException)
