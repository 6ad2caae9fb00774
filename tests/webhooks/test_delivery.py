"""Deliveries of a running service: at least once, in order per instance, and one tenant beside another."""

import itertools
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from standardwebhooks import WebhookVerificationError

from tests.api.tenants.test_secrets import Tenant
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until
from tests.webhooks.receivers import LOOPBACK, Received, Receiver, Reply, stalled, verified

pytestmark = pytest.mark.both_databases

NOWHERE = {"nowhere": "yes"}
ALL = ["instance.state_changed"]
SCHEDULE = (0.0, 0.2, 0.4, *itertools.repeat(0.6, 30))


@pytest.fixture
def service(database_url: str, tmp_path: Path) -> Iterator[RunningService]:
    settings = settings_for(
        database_url, tmp_path / "data", rate_limits="off", webhook_allowed_networks=LOOPBACK
    )
    with running(settings, webhook_schedule=SCHEDULE) as made:
        yield made


@pytest.fixture
def client(service: RunningService) -> Iterator[Client]:
    with service.client as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


def _webhook(client: Client, url: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/webhooks", json={"url": url, "events": ALL, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def _pending(client: Client, **fields: Any) -> str:
    """The id of an instance that no node can host."""
    return str(client.create(node_selector=NOWHERE, **fields)["id"])


def _deliveries(client: Client, webhook: dict[str, Any], **params: Any) -> list[dict[str, Any]]:
    return client.items(f"/v1/webhooks/{webhook['id']}/deliveries", **params)


def test_an_event_arrives_signed_soon_after_its_commit(client: Client, receiver: Receiver) -> None:
    made = _webhook(client, f"{receiver.url}?source=mooring")
    instance = _pending(client)
    (received,) = receiver.wait(1)
    body = verified(made["secret"], received)
    assert received.path == "/hook?source=mooring"
    assert received.headers["content-type"] == "application/json"
    assert (body["type"], body["data"]["instance_id"], body["data"]["to"]) == (
        "instance.state_changed", instance, "pending",
    )  # fmt: skip
    event = client.items("/v1/events")[-1]
    assert (received.message_id, body["timestamp"], body["data"]) == (
        event["id"], event["at"], event["data"],
    )  # fmt: skip
    with pytest.raises(WebhookVerificationError):
        verified("whsec_" + "A" * 44, received)
    (delivery,) = wait_until(lambda: _deliveries(client, made, status="delivered"))
    assert (delivery["attempts"], delivery["last_code"], delivery["next_attempt_at"]) == (1, 204, None)
    assert delivery["event_id"] == event["id"]


def test_events_of_an_instance_come_in_order_while_others_go_on(client: Client) -> None:
    """A third of the answers is an error: each event comes nevertheless, after those before it."""
    calls = itertools.count()
    with Receiver(lambda _received: Reply(500 if next(calls) % 3 == 0 else 200)) as receiver:
        _webhook(client, receiver.url)
        instances = [_pending(client) for _ in range(12)]
        for instance in instances:
            assert client.delete(f"/v1/instances/{instance}").status_code == 202

        def complete() -> bool:
            found = receiver.transitions()
            return all({"pending", "deleted"} <= {to for _, to in found.get(key, [])} for key in instances)

        wait_until(complete, 30)
        for key in instances:
            versions = [version for version, _to in receiver.transitions()[key]]
            assert versions == sorted(versions)


def test_a_failing_delivery_holds_back_only_its_own_instance(client: Client) -> None:
    refused: list[str] = []

    def answer(received: Received) -> Reply:
        return Reply(503 if received.data["instance_id"] in refused else 204)

    def held_back() -> list[dict[str, Any]]:
        pending = _deliveries(client, made, status="pending")
        return [each for each in pending if each["instance_id"] == first]

    with Receiver(answer) as receiver:
        made = _webhook(client, receiver.url)
        first = _pending(client)
        receiver.wait(1)
        refused.append(first)
        client.delete(f"/v1/instances/{first}")
        wait_until(lambda: [each["last_error"] for each in held_back()][-1:] == ["rejected"])
        second = _pending(client)
        wait_until(lambda: second in receiver.transitions())
        assert all(each["attempts"] == 0 for each in held_back()[:-1])
        refused.clear()
        wait_until(lambda: not _deliveries(client, made, status="pending"))


def test_attempts_keep_their_id_and_end_after_the_schedule(client: Client) -> None:
    with Receiver(lambda _received: Reply(500)) as receiver:
        made = _webhook(client, receiver.url)
        _pending(client)
        attempts = receiver.wait(4)
        assert len({each.message_id for each in attempts}) == 1
        assert len({each.body for each in attempts}) == 1
        assert all(verified(made["secret"], each) for each in attempts)
        pauses = [later.at - earlier.at for earlier, later in itertools.pairwise(attempts)]
        assert all(pause >= least for pause, least in zip(pauses, SCHEDULE[1:], strict=False))


def test_a_delivery_fails_after_the_last_attempt_and_can_be_replayed(
    database_url: str, tmp_path: Path
) -> None:
    settings = settings_for(database_url, tmp_path / "data", webhook_allowed_networks=LOOPBACK)
    status = [500]
    with (
        Receiver(lambda _received: Reply(status[0])) as receiver,
        running(settings, webhook_schedule=(0.0, 0.1)) as service,
        service.client as client,
    ):
        made = _webhook(client, receiver.url)
        _pending(client)
        (failed,) = wait_until(lambda: _deliveries(client, made, status="failed"))
        assert (failed["attempts"], failed["last_code"], failed["last_error"]) == (2, 500, "rejected")
        status[0] = 200
        answer = client.post(f"/v1/webhooks/{made['id']}/deliveries/{failed['id']}/replay")
        assert answer.status_code == 202, answer.text
        (delivered,) = wait_until(lambda: _deliveries(client, made, status="delivered"))
        assert delivered["id"] == failed["id"]
        assert len({each.message_id for each in receiver.wait(3)}) == 1
        metrics = client.get("/metrics").text
        assert 'mooring_webhook_deliveries_total{outcome="failed"} 1.0' in metrics
        assert 'mooring_webhook_deliveries_total{outcome="delivered"} 1.0' in metrics


def test_a_receiver_that_was_away_gets_everything(client: Client) -> None:
    with Receiver() as gone:
        url = gone.url
    made = _webhook(client, url)
    instance = _pending(client)
    wait_until(lambda: [each["last_error"] for each in _deliveries(client, made)] == ["connection_failed"])
    client.delete(f"/v1/instances/{instance}")
    with Receiver() as receiver:
        assert client.patch(f"/v1/webhooks/{made['id']}", json={"url": receiver.url}).status_code == 200
        wait_until(lambda: [to for _, to in receiver.transitions().get(instance, [])][-1:] == ["deleted"])
        assert receiver.transitions()[instance][0][1] == "pending"


def test_410_disables_and_enabling_continues(client: Client) -> None:
    status = [410]
    with Receiver(lambda _received: Reply(status[0])) as receiver:
        made = _webhook(client, receiver.url)
        path = f"/v1/webhooks/{made['id']}"
        _pending(client)
        shown = wait_until(lambda: None if client.get(path).json()["enabled"] else client.get(path).json())
        assert shown["disabled_reason"] == "gone"
        skipped = _pending(client)
        problem(client.post(f"{path}/test"), 409, "webhook_disabled")
        status[0] = 204
        enabled = client.patch(path, json={"enabled": True}).json()
        assert (enabled["enabled"], enabled["disabled_reason"]) == (True, None)
        instance = _pending(client)
        wait_until(lambda: instance in receiver.transitions())
        assert skipped not in receiver.transitions()


def test_retry_after_delays_the_next_attempt(client: Client) -> None:
    with Receiver(lambda _received: Reply(429, {"Retry-After": "120"})) as receiver:
        made = _webhook(client, receiver.url)
        _pending(client)
        receiver.wait(1)
        (delivery,) = wait_until(
            lambda: [each for each in _deliveries(client, made) if each["last_code"] == 429]
        )
        created, following = delivery["created_at"], delivery["next_attempt_at"]
        assert following > created
        assert len(receiver.received) == 1
        assert _seconds(following) - _seconds(created) >= 120


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def test_both_secrets_sign_for_a_day_after_a_rotation(client: Client, receiver: Receiver) -> None:
    made = _webhook(client, receiver.url)
    rotated = client.post(f"/v1/webhooks/{made['id']}/rotate-secret").json()
    assert rotated["secret"] != made["secret"]
    assert rotated["former_secret_until"] is not None
    _pending(client)
    (received,) = receiver.wait(1)
    assert len(received.headers["webhook-signature"].split()) == 2
    assert verified(made["secret"], received) == verified(rotated["secret"], received)


def test_a_ping_tests_a_webhook(client: Client, receiver: Receiver) -> None:
    made = _webhook(client, receiver.url, name="chat")
    answer = client.post(f"/v1/webhooks/{made['id']}/test")
    assert answer.status_code == 202
    (received,) = receiver.wait(1)
    body = verified(made["secret"], received)
    assert (body["type"], body["data"]["name"]) == ("webhook.ping", "chat")
    assert answer.json()["event_id"] == received.message_id


def test_slack_gets_a_message_that_mentions_nobody(client: Client, receiver: Receiver) -> None:
    _webhook(client, receiver.url, format="slack")
    _pending(client, name="train")
    (received,) = receiver.wait(1)
    assert (
        received.event["text"]
        == "Instance train in the project default is pending: waiting for the scheduler"
    )
    assert received.event["blocks"][0]["text"]["type"] == "mrkdwn"


def test_a_slow_receiver_of_one_project_does_not_delay_another(client: Client) -> None:
    with (
        Tenant(client, f"slow-{uuid4().hex[:8]}") as slow,
        Tenant(client, f"fast-{uuid4().hex[:8]}") as fast,
        stalled() as (answer, released),
        Receiver(answer) as stuck,
        Receiver() as quick,
    ):
        for number in range(3):
            _webhook(slow.owner, stuck.url, name=f"stuck-{number}")
        _webhook(fast.owner, quick.url)
        for _ in range(40):
            _pending(slow.member)
        # All attempts that the project may have at one time.
        stuck.wait(32)
        began = time.monotonic()
        instance = _pending(fast.member)
        wait_until(lambda: instance in quick.transitions(), 5)
        assert time.monotonic() - began < 2
        assert len(stuck.received) == 32
        released.set()
        stuck.wait(120, 30)


def test_projects_get_their_own_events_and_an_admin_those_of_all(client: Client) -> None:
    with (
        Tenant(client, f"one-{uuid4().hex[:8]}") as one,
        Tenant(client, f"two-{uuid4().hex[:8]}") as two,
        Receiver() as of_one,
        Receiver() as of_all,
    ):
        _webhook(one.owner, of_one.url)
        _webhook(client, of_all.url, all_projects=True)
        instances = {_pending(one.member), _pending(two.member)}
        wait_until(lambda: instances <= of_all.transitions().keys())
        wait_until(of_one.transitions)
        assert len(of_one.transitions()) == 1


def test_deliveries_continue_after_a_restart(database_url: str, tmp_path: Path) -> None:
    """What is pending is sent by the next process, also what was being sent when the first one ended."""
    settings = settings_for(database_url, tmp_path / "data", webhook_allowed_networks=LOOPBACK)
    with stalled() as (answer, released), Receiver(answer) as receiver:
        with running(settings) as service, service.client as client:
            _webhook(client, receiver.url)
            instance = _pending(client)
            receiver.wait(1)
        released.set()
        with running(settings) as service, service.client as client:
            receiver.wait(2)
            client.delete(f"/v1/instances/{instance}")
            wait_until(lambda: [to for _, to in receiver.transitions()[instance]][-1] == "deleted")
    assert len({each.message_id for each in receiver.received[:2]}) == 1
