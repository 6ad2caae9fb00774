"""Which heartbeats are stored, and which ask for a report, when nodes are locked or the server is slow."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from mooring.api.http import heartbeats
from mooring.api.http.heartbeats import HeartbeatBatches, Store
from mooring.control.nodes.heartbeats import HeartbeatOutcome, NodeHeartbeat
from mooring.schemas.agent import Heartbeat

STORED, LOCKED = HeartbeatOutcome.STORED, HeartbeatOutcome.LOCKED


def _sent(seq: int = 7, wait_s: float = 5) -> NodeHeartbeat:
    return NodeHeartbeat("hash", Heartbeat(session=1, seq=seq, generation=2, revision=3, wait_s=wait_s))


def _with_outcomes(*outcomes: HeartbeatOutcome) -> Store:
    """A store in which each batch has the next outcome."""
    left = list(outcomes)

    def store(sent: Mapping[str, NodeHeartbeat]) -> Mapping[str, HeartbeatOutcome]:
        return dict.fromkeys(sent, left.pop(0))

    return store


def _stored(store: Store, sent: Sequence[NodeHeartbeat]) -> list[bool]:
    """The results of concurrent heartbeats of one node."""

    async def send() -> list[bool]:
        batches = HeartbeatBatches()
        return await asyncio.gather(*(batches.stored("nod_1", each, store) for each in sent))

    return asyncio.run(send())


@pytest.fixture(autouse=True)
def _no_pause_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "BETWEEN_BATCHES_S", 0)


def test_a_heartbeat_waits_until_its_node_is_no_longer_locked() -> None:
    assert _stored(_with_outcomes(LOCKED, LOCKED, STORED), [_sent()]) == [True]


def test_a_node_that_stays_locked_is_asked_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LOCKED_S", 0)
    assert _stored(_with_outcomes(LOCKED, LOCKED), [_sent()]) == [False]


def test_a_slow_server_asks_for_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports would make it slower still: 3,000 nodes brought a server down that way."""
    monkeypatch.setattr(heartbeats, "LOCKED_S", 0)
    assert _stored(_with_outcomes(STORED), [_sent()]) == [True]


def test_a_repeated_heartbeat_gets_the_result_of_the_first() -> None:
    assert _stored(_with_outcomes(STORED), [_sent(), _sent(wait_s=4)]) == [True, True]


def test_a_concurrent_heartbeat_of_another_report_is_not_stored() -> None:
    assert _stored(_with_outcomes(STORED), [_sent(), _sent(seq=8)]) == [True, False]
