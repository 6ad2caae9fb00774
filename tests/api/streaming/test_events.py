"""Events: one per change, in order and without gaps."""

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, update

from mooring.api.streaming import sse
from mooring.db.signals import Topic
from mooring.db.tables import Event
from mooring.db.types import now
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.retention import purge
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until
from tests.waiters import waiters

pytestmark = pytest.mark.both_databases


def _instance_events(client: Client, instance_id: str) -> list[dict[str, Any]]:
    return client.items(f"/v1/instances/{instance_id}/events")


def test_each_state_change_is_one_event_in_version_order(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(gpus={"count": 1})
    path = f"/v1/instances/{assignment.instance_id}"
    for _ in range(2):  # the second report changes nothing
        sandbox.sync(observed(assignment, "starting"))
    sandbox.sync(observed(assignment, "running"))
    sandbox.client.patch(path, json={"labels": {"a": "b"}})  # no change of state
    for _ in range(2):  # the second stop changes nothing
        sandbox.client.post(f"{path}/stop")
    sandbox.sync(observed(assignment, "exited", exit_code=143))
    sandbox.client.post(f"{path}/start")
    sandbox.client.wait(assignment.instance_id, "scheduled")

    changes = _instance_events(sandbox.client, assignment.instance_id)
    steps = [(event["data"]["from"], event["data"]["to"]) for event in changes]
    assert steps == [
        (None, "pending"), ("pending", "scheduled"), ("scheduled", "starting"), ("starting", "running"),
        ("running", "stopping"), ("stopping", "stopped"), ("stopped", "pending"), ("pending", "scheduled"),
    ]  # fmt: skip
    versions = [event["data"]["version"] for event in changes]
    assert versions == sorted(set(versions))
    assert {event["type"] for event in changes} == {"instance.state_changed"}
    assert {event["data"]["instance_id"] for event in changes} == {assignment.instance_id}
    assert changes[4]["data"]["reason"]["code"] == "stopped_by_user"
    seqs = [event["seq"] for event in changes]
    assert sandbox.client.items(f"{path}/events", after=seqs[2], limit=2) == changes[3:5]
    problem(sandbox.client.get("/v1/instances/none/events"), 404, "not_found")


def test_the_event_log_is_paged_without_gaps(client: Client, node: WireNode) -> None:
    made = run_concurrently(20, lambda _n: client.create(gpus={"count": 64})["id"])
    for instance_id in made[:5]:
        client.delete(f"/v1/instances/{instance_id}")
    found: list[dict[str, Any]] = []
    while True:
        page = client.get("/v1/events", params={"after": found[-1]["seq"] if found else 0, "limit": 7}).json()
        if not page["items"]:
            assert page["last_seq"] == found[-1]["seq"]
            break
        assert page["last_seq"] == page["items"][-1]["seq"]
        found += page["items"]
    seqs = [event["seq"] for event in found]
    assert seqs == sorted(set(seqs))
    assert len({event["id"] for event in found}) == len(found)
    created = [each["data"]["instance_id"] for each in found if each["data"].get("to") == "pending"]
    assert sorted(created) == sorted(made)
    deleted = [each["data"]["instance_id"] for each in found if each["data"].get("to") == "deleted"]
    assert sorted(deleted) == sorted(made[:5])


def test_a_follower_of_many_writers_misses_no_event(client: Client) -> None:
    """Sequence numbers are drawn before the commit: without ordered commits, 8 could be visible before 7."""
    received: list[int] = []
    done = threading.Event()

    def follow() -> None:
        with Client(str(client.base_url)) as own:
            after = 0
            while not (done.is_set() and not own.items("/v1/events", after=after)):
                items = own.items("/v1/events", after=after, limit=200, wait_s=0.2)
                received.extend(item["seq"] for item in items)
                after = received[-1] if received else 0

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        run_concurrently(16, lambda _n: [client.create(gpus={"count": 64}) for _ in range(4)])
    finally:
        done.set()
        follower.join(30)
    everything: list[int] = []
    while items := client.items("/v1/events", after=everything[-1] if everything else 0, limit=200):
        everything += [item["seq"] for item in items]
    assert len(everything) >= 64
    assert received == everything


def test_a_long_poll_is_answered_by_the_next_event(client: Client) -> None:
    answers: list[httpx.Response] = []
    last = client.get("/v1/events", params={"limit": 200}).json()["last_seq"]
    params = {"after": last, "wait_s": 60}
    waiting = threading.Thread(target=lambda: answers.append(client.get("/v1/events", params=params)))
    waiting.start()
    made = client.create(gpus={"count": 64})
    waiting.join(20)
    assert answers[0].json()["items"][0]["data"]["instance_id"] == made["id"]
    newest = client.get("/v1/events", params={"limit": 200}).json()["last_seq"]
    nothing = client.get("/v1/events", params={"after": newest, "wait_s": 0.2})
    assert nothing.json() == {"items": [], "next_cursor": None, "last_seq": newest}
    assert nothing.elapsed.total_seconds() >= 0.2


class Stream:
    """An open SSE stream."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._lines: Iterator[str] = answer.iter_lines()

    def part(self) -> dict[str, str]:
        """The fields of the next part; a comment has the key `""`."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line:
                return fields
            name, _, value = line.partition(": ")
            fields[name.rstrip(":") if name else ""] = value or line
        raise AssertionError("the stream ended")

    def event(self) -> dict[str, Any]:
        while True:
            fields = self.part()
            if "data" in fields:
                data: dict[str, Any] = json.loads(fields["data"])
                assert fields["id"] == str(data["seq"])
                return data


EVENTS = {"Accept": "text/event-stream"}


def test_a_stream_resumes_after_its_last_event(client: Client) -> None:
    first = client.create(gpus={"count": 64})
    with client.stream("GET", "/v1/events", headers=EVENTS) as answer:
        assert answer.headers["cache-control"] == "no-cache"
        stream = Stream(answer)
        created = stream.event()
        assert created["data"]["instance_id"] == first["id"]
        second = client.create(gpus={"count": 64})
        following = stream.event()
        assert following["data"]["instance_id"] == second["id"]
    resumed = EVENTS | {"Last-Event-ID": str(created["seq"])}
    with client.stream("GET", "/v1/events?after=0", headers=resumed) as answer:
        assert Stream(answer).event() == following


def test_an_idle_stream_sends_keepalives(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sse.KEEPALIVE_S == 15
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.1)
    with client.stream("GET", "/v1/events", headers=EVENTS) as answer:
        assert Stream(answer).part() == {"": "still here"}


@pytest.mark.parametrize("given", ["-1", "x", "1.5", "", "٣", "9" * 31])
def test_a_malformed_last_event_id_is_rejected(shared: Client, given: str) -> None:
    headers = EVENTS | {"Last-Event-ID": given.encode()}
    answer = shared.get("/v1/events", headers=headers)  # type: ignore[arg-type]
    problem(answer, 400, "bad_event_id")


def test_a_last_event_id_that_is_too_long_is_rejected(shared: Client) -> None:
    problem(shared.get("/v1/events", headers=EVENTS | {"Last-Event-ID": "9" * 33}), 422)


def test_old_events_are_deleted_except_the_newest(service: RunningService, client: Client) -> None:
    for _ in range(4):
        client.create(gpus={"count": 64})
    seqs = [event["seq"] for event in client.items("/v1/events")]
    with service.plane.database.write() as session:
        old = now() - timedelta(days=31)
        session.execute(update(Event).where(Event.seq.in_(seqs[:2])).values(at=old))
    purge(service)
    # Reading from the start is never rejected.
    assert client.get("/v1/events").json()["items"][0]["seq"] == seqs[2]
    expired = problem(client.get("/v1/events", params={"after": seqs[0]}), 410, "events_expired")
    assert expired["oldest_seq"] == seqs[2]
    problem(client.get("/v1/events", params={"after": seqs[0]}, headers=EVENTS), 410, "events_expired")
    problem(client.get("/v1/events", headers=EVENTS | {"Last-Event-ID": str(seqs[0])}), 410, "events_expired")
    assert len(client.items("/v1/events", after=seqs[1])) == 2

    with service.plane.database.write() as session:
        session.execute(update(Event).values(at=now() - timedelta(days=31)))
    purge(service)
    assert [event["seq"] for event in client.items("/v1/events")] == [seqs[3]]
    client.create(gpus={"count": 64})
    assert client.items("/v1/events")[-1]["seq"] == seqs[3] + 1


def test_a_reader_can_start_after_the_newest_event(client: Client, service: RunningService) -> None:
    assert client.get("/v1/events", params={"newest": True}).json()["last_seq"] == 0
    client.create(gpus={"count": 64})
    newest = client.items("/v1/events")[-1]["seq"]
    answer = client.get("/v1/events", params={"newest": True}).json()
    assert (answer["items"], answer["last_seq"]) == ([], newest)
    second = client.create(gpus={"count": 64})
    later = client.items("/v1/events", after=answer["last_seq"])
    assert [event["data"]["instance_id"] for event in later] == [second["id"]]
    # The last event that a stream has had counts more: it continues there.
    resumed = {"Last-Event-ID": str(newest), "Accept": "application/json"}
    assert client.get("/v1/events", params={"newest": True}, headers=resumed).json()["items"] == later


def test_a_seq_that_no_event_has_is_rejected(client: Client, service: RunningService) -> None:
    """A consumer of a database that was restored to an older state would miss all events up to its number."""
    client.create(gpus={"count": 64})
    newest = client.items("/v1/events")[-1]["seq"]
    assert client.items("/v1/events", after=newest) == []
    later = problem(client.get("/v1/events", params={"after": newest + 1}), 410, "events_expired")
    assert later["newest_seq"] == newest
    assert "after=0" in later["detail"]
    problem(client.get("/v1/events", params={"after": newest + 1}, headers=EVENTS), 410, "events_expired")
    problem(
        client.get("/v1/events", headers=EVENTS | {"Last-Event-ID": str(newest + 1)}), 410, "events_expired"
    )

    # A number between stored ones, as after a restore: it skips the numbers of events that are lost.
    with service.plane.database.write() as session:
        session.execute(delete(Event).where(Event.seq == newest))
    client.create(gpus={"count": 64})
    problem(client.get("/v1/events", params={"after": newest}), 410, "events_expired")


def test_a_stream_ends_when_the_service_stops(database_url: str, tmp_path: Any) -> None:
    with running(settings_for(database_url, tmp_path / "data")) as service, service.client as client:
        ended = threading.Event()

        def follow() -> None:
            with Client(service.url) as own, own.stream("GET", "/v1/events", headers=EVENTS) as answer:
                for _line in answer.iter_lines():
                    pass
            ended.set()

        thread = threading.Thread(target=follow)
        thread.start()
        signals = service.plane.database.signals
        wait_until(lambda: waiters(signals, Topic.EVENTS))
        client.create(gpus={"count": 64})
        service.service.stop()
        assert ended.wait(10)
        thread.join(10)
