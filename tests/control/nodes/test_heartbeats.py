"""Heartbeats: a node says that its last report is still true."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from mooring.control import locks
from mooring.control.nodes import heartbeats, nodes
from mooring.control.nodes.heartbeats import HeartbeatOutcome, NodeHeartbeat
from mooring.db.tables import Gpu, Instance, Node
from mooring.schemas.agent import Assignment, Heartbeat
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for

pytestmark = pytest.mark.both_databases


@pytest.fixture
def reported(node: WireNode) -> WireNode:
    """The node, after a report in its current state."""
    node.sync()
    node.sync()
    return node


def _stored(service: RunningService, node: WireNode) -> Node:
    with service.plane.database.read() as session:
        return session.get_one(Node, node.id)


def _sample(node: WireNode, memory_mib: int, uuid: str | None = None) -> dict[str, Any]:
    uuid = uuid or node.gpus[0].uuid
    return {"uuid": uuid, "index": 0, "sampled_at": "2026-01-01T00:00:00Z", "memory_used_mib": memory_mib}


def test_a_heartbeat_counts_as_a_report(service: RunningService, reported: WireNode) -> None:
    before = _stored(service, reported)
    assert reported.heartbeat()
    after = _stored(service, reported)
    assert after.heartbeats == before.heartbeats + 1
    assert before.last_heartbeat_at is not None
    assert after.last_heartbeat_at is not None
    assert after.last_heartbeat_at >= before.last_heartbeat_at
    assert (after.seq, after.revision) == (before.seq, before.revision)


def test_samples_of_heartbeats_are_shown(client: Client, reported: WireNode) -> None:
    uuid = reported.gpus[0].uuid
    assert reported.heartbeat(samples=[_sample(reported, 1234)])
    assert client.get(f"/v1/gpus/{uuid}/metrics").json()["memory_used_mib"] == 1234
    assert reported.heartbeat()  # without samples, the last ones stay
    assert client.get(f"/v1/gpus/{uuid}/metrics").json()["memory_used_mib"] == 1234


def test_samples_of_gpus_that_are_not_the_nodes_are_dropped(
    service: RunningService, reported: WireNode
) -> None:
    assert reported.heartbeat(samples=[_sample(reported, 1, "GPU-of-another"), _sample(reported, 2)])
    with service.plane.database.read() as session:
        samples = session.get_one(Node, reported.id).samples
    assert [each["memory_used_mib"] for each in samples] == [2]


def test_a_heartbeat_after_another_report_wants_a_report(service: RunningService, reported: WireNode) -> None:
    before = _stored(service, reported).heartbeats
    assert not reported.heartbeat(seq=reported.seq - 1)
    assert _stored(service, reported).heartbeats == before


@pytest.mark.parametrize("field", ["session", "seq", "generation", "revision"])
def test_a_heartbeat_of_an_unknown_report_wants_a_report(reported: WireNode, field: str) -> None:
    """As after the restore of an older database."""
    known = {"session": reported.session, "seq": reported.seq, "generation": reported.generation}
    known["revision"] = reported.revision or 0
    assert not reported.heartbeat(**{field: known[field] + 1})
    assert reported.heartbeat()


def test_a_heartbeat_of_an_older_agent_wants_a_report_which_gets_409(reported: WireNode) -> None:
    older = reported.session
    reported.open_session()
    assert not reported.heartbeat(session=older, revision=0)
    assert reported.post_sync(session=older).status_code == 409


def test_a_change_of_the_node_by_an_admin_wants_a_report(client: Client, reported: WireNode) -> None:
    assert client.post(f"/v1/nodes/{reported.id}/cordon").is_success
    assert not reported.heartbeat()
    reported.sync()
    assert reported.heartbeat()


def test_a_credential_that_is_to_be_renewed_wants_a_report(client: Client, reported: WireNode) -> None:
    assert client.post(f"/v1/nodes/{reported.id}/renew-credential").is_success
    assert not reported.heartbeat()
    assert reported.sync().renew_credential


def test_a_replaced_credential_is_rejected(reported: WireNode) -> None:
    older = reported.http.headers["Authorization"]
    renewed = reported.http.post("/agent/v1/credential").json()["credential"]
    reported.http.headers["Authorization"] = f"Bearer {renewed}"
    assert not reported.heartbeat()
    reported.sync()
    assert reported.heartbeat()
    reported.http.headers["Authorization"] = older
    answer = reported.post_heartbeat()
    assert answer.status_code == 401 or answer.json()["report_wanted"]
    assert reported.post_sync().status_code == 401


def test_a_deleted_node_is_not_stored(service: RunningService, client: Client, reported: WireNode) -> None:
    before = _stored(service, reported).heartbeats
    assert client.delete(f"/v1/nodes/{reported.id}").is_success
    answer = reported.post_heartbeat()
    assert answer.status_code == 401 or answer.json()["report_wanted"]
    assert _stored(service, reported).heartbeats == before


def test_an_unreachable_node_is_ready_again_after_its_next_heartbeat(
    service: RunningService, client: Client, reported: WireNode
) -> None:
    with service.plane.database.write() as session:
        nodes.mark_unreachable(session, reported.id)
    assert not reported.heartbeat()
    reported.sync()
    assert client.get(f"/v1/nodes/{reported.id}").json()["state"] == "ready"
    assert reported.heartbeat()


def test_a_waiting_heartbeat_is_answered_when_the_desired_state_changes(
    client: Client, reported: WireNode
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reported.heartbeat, wait_s=60)
        made = client.create(gpus={"count": 1})
        assert not waiting.result(timeout=50)
    assert [each.instance_id for each in reported.sync().assignments] == [made["id"]]


def test_a_node_with_a_gpu_of_another_sends_reports(client: Client, reported: WireNode) -> None:
    """The GPU moves to it with the first report after the other node is deleted."""
    claiming = WireNode(client, "claiming", gpus=0)
    claiming.sync(gpus=reported.gpus)
    claiming.sync(gpus=reported.gpus)
    assert claiming.revision is None
    claiming.close()


def test_heartbeats_survive_a_restart_of_the_server(
    database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("service")
    with running(settings_for(database_url, folder)) as first, first.client as admin:
        node = WireNode(admin, "kept")
        node.sync()
        node.sync()
    with running(settings_for(database_url, folder)) as second:
        node.http.base_url = second.url
        assert node.heartbeat()
        node.close()


def test_a_locked_node_does_not_delay_the_heartbeats_of_others(
    service: RunningService, client: Client, reported: WireNode
) -> None:
    if service.plane.database.is_sqlite:
        pytest.skip("one writer at a time, no locks of rows")
    other = WireNode(client, "other")
    other.sync()
    other.sync()
    with service.plane.database.write() as session:
        locks.node(session, reported.id)
        assert other.heartbeat()
        sent = {each.id: _sent(service, each) for each in (reported, other)}
        with service.plane.database.write() as inner:
            outcomes = heartbeats.store(inner, sent)
    assert outcomes == {reported.id: HeartbeatOutcome.LOCKED, other.id: HeartbeatOutcome.STORED}
    other.close()


def test_the_calls_that_nodes_make_all_the_time_have_the_limits_of_others(reported: WireNode) -> None:
    """They bypass FastAPI, but not what protects the server."""
    long, chunks = "x" * (1024 * 1024 + 1), iter([b"x" * 1024 * 1024, b"x"])
    for content in (long, chunks):
        json_type = {"Content-Type": "application/json"}
        answer = reported.http.post("/agent/v1/stream-requests", content=content, headers=json_type)
        problem(answer, 413, "body_too_large")
    problem(reported.http.post("/agent/v1/heartbeat", content=b"{}"), 415, "unsupported_media_type")
    problem(reported.http.post("/agent/v1/heartbeat?x=%00", json={}), 400, "bad_request")
    problem(reported.http.get("/agent/v1/heartbeat"), 405, "method_not_allowed")
    problem(httpx.post(f"{reported.http.base_url}/agent/v1/heartbeat", json={}), 401, "unauthorized")


def test_a_heartbeat_that_cannot_be_stored_is_answered_503(
    service: RunningService, reported: WireNode
) -> None:
    """The node must know that the control plane does not count it as live."""

    def fail(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        if statement.startswith("UPDATE nodes SET heartbeats"):
            raise OperationalError(statement, None, Exception("disk is full"))

    engine = service.plane.database.engine
    event.listen(engine, "before_cursor_execute", fail)
    try:
        assert reported.post_heartbeat().status_code == 503
    finally:
        event.remove(engine, "before_cursor_execute", fail)
    assert reported.heartbeat()


def _sent(service: RunningService, node: WireNode) -> NodeHeartbeat:
    assert node.revision is not None
    stored = _stored(service, node)
    beat = Heartbeat(session=node.session, seq=node.seq, generation=node.generation, revision=node.revision)
    return NodeHeartbeat(stored.credential_hash, beat)


# Any sequence of reports and heartbeats stores the same as reports only.


@dataclass
class _Pair:
    """Two nodes with equal histories. One sends only reports, the other heartbeats when an agent may."""

    service: RunningService
    client: Client
    reporting: WireNode
    beating: WireNode
    assignments: dict[str, list[Assignment]]
    phase: str = "running"
    confirmed: object = None
    cordoned: bool = False
    listed: bool = True
    silenced: bool = False

    @property
    def both(self) -> tuple[WireNode, WireNode]:
        return self.reporting, self.beating

    def report(self, node: WireNode) -> None:
        seen = [observed(each, self.phase) for each in self.assignments[node.name]]
        gpus = node.gpus if self.listed else node.gpus[:-1]
        given = node.sync(*seen, gpus=gpus)
        self.assignments[node.name] = given.assignments

    def call(self) -> None:
        """The next call of each node: of the second one a heartbeat, if its report has not changed."""
        self.silenced = False
        self.report(self.reporting)
        now = (self.phase, self.listed)
        may = self.beating.revision is not None and self.confirmed == now
        if not (may and self.beating.heartbeat()):
            before = self.beating.generation
            self.report(self.beating)
            self.confirmed = now if self.beating.generation == before else None

    def place(self) -> None:
        """Place an instance on each node, if they are ready."""
        if self.cordoned or self.silenced:
            return
        for node in self.both:
            selector = {"node": node.name}
            made = self.client.create(cpus=0.5, memory_mib=16, node_selector=selector)
            self.client.wait(made["id"], "scheduled")

    def stop(self) -> None:
        for node in self.both:
            for each in self.assignments[node.name][:1]:
                self.client.post(f"/v1/instances/{each.instance_id}/stop")

    def silence(self) -> None:
        self.silenced = True
        for node in self.both:
            with self.service.plane.database.write() as session:
                nodes.mark_unreachable(session, node.id)

    def cordon(self) -> None:
        self.cordoned = not self.cordoned
        for node in self.both:
            self.client.post(f"/v1/nodes/{node.id}/{'cordon' if self.cordoned else 'uncordon'}")

    def exit(self) -> None:
        self.phase = "exited" if self.phase == "running" else "running"

    def lose(self) -> None:
        self.listed = not self.listed

    def stored(self, node: WireNode) -> dict[str, Any]:
        """What is stored of a node, without names, ids, times and counters of calls."""
        with self.service.plane.database.read() as session:
            row = session.get_one(Node, node.id)
            gpus = session.query(Gpu).where(Gpu.node_id == node.id).order_by(Gpu.index).all()
            query = session.query(Instance).where(Instance.node_id == node.id)
            instances = query.order_by(Instance.created_at, Instance.id).all()
            return {
                "node": [getattr(row, name) for name in ("silent", "problem", "cordoned", "heartbeats")],
                "gpus": [(gpu.health, gpu.health_reason, gpu.milli_held > 0) for gpu in gpus],
                "instances": [
                    (each.state, each.desired_state, each.attempt, each.exit_code) for each in instances
                ],
            }


_STEPS: dict[str, Callable[[_Pair], None]] = {
    "call": _Pair.call,
    "place": _Pair.place,
    "stop": _Pair.stop,
    "silence": _Pair.silence,
    "cordon": _Pair.cordon,
    "exit": _Pair.exit,
    "lose": _Pair.lose,
}


@pytest.fixture
def pairs(service: RunningService, client: Client) -> Iterator[Callable[[], _Pair]]:
    made: list[_Pair] = []

    def new() -> _Pair:
        names = [f"{kind}-{len(made)}" for kind in ("reporting", "beating")]
        both = [WireNode(client, name, gpus=2) for name in names]
        for node in both:
            node.facts = node.facts.model_copy(update={"labels": {"node": node.name}})
        made.append(_Pair(service, client, both[0], both[1], {name: [] for name in names}))
        return made[-1]

    yield new
    for pair in made:
        for node in pair.both:
            node.close()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["call", "call", *sorted(_STEPS)]), max_size=10))
def test_reports_and_heartbeats_store_the_same_as_reports_only(
    pairs: Callable[[], _Pair], steps: list[str]
) -> None:
    pair = pairs()
    for step in ["call", "call", *steps, "call", "call"]:
        _STEPS[step](pair)
    assert pair.stored(pair.beating) == pair.stored(pair.reporting)
