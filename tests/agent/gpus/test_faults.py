"""Reports of GPU faults: complete, merged, and repeated until they are answered."""

from mooring.agent.gpus.event_ledger import NEWS_AFTER_S, EventLedger
from mooring.agent.gpus.faults import FAULT_PAUSE_S, MAX_REPORTED, GpuFaults
from mooring.agent.nvml.types import GpuEvent
from mooring_client.schemas.states import Reason


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _event(code: str, count: int = 1, uuid: str | None = "GPU-1", at: str = "then") -> GpuEvent:
    return {
        "uuid": uuid, "code": code, "mig_uuids": [], "count": count, "first_at": at, "last_at": at
    }  # fmt: skip


def test_a_fault_is_reported_until_its_report_is_answered() -> None:
    clock = Clock()
    faults = GpuFaults(lambda _: None, clock)
    faults.add_events((_event("xid_31", 3),))
    first = faults.faults()
    assert [(one.code, one.count) for one in first] == [("xid_31", 3)]
    for total in (10, 1000):
        clock.now += FAULT_PAUSE_S
        faults.add_events((_event("xid_31", total),))
        assert faults.faults() == first  # new events wait for the answer, merged into one fault
    faults.answered([], first)
    [merged] = faults.faults()
    assert merged.count == 1000 - 3
    assert merged.id != first[0].id
    faults.answered([], [merged])
    assert faults.faults() == []


def test_reports_of_a_kind_of_fault_are_rate_limited() -> None:
    clock = Clock()
    faults = GpuFaults(lambda _: None, clock)
    reports = 0
    for second in range(60):
        faults.add_events((_event("xid_31", (second + 1) * 1000),))
        sent = faults.faults()
        faults.answered([], sent)
        reports += bool(sent)
        clock.now += 1
    assert reports == 60 / FAULT_PAUSE_S


def test_fatal_codes_are_incidents_and_the_recovery_action_decides_others() -> None:
    for recovery_action, incidents in ((None, ["xid_79", "xid_48"]), ("none", ["xid_79"])):
        faults = GpuFaults(lambda _, action=recovery_action: action)  # type: ignore[misc]
        faults.add_events((_event("xid_79"), _event("xid_48"), _event("xid_31"), _event("xid_79", uuid=None)))
        assert [one.code for one in faults.incidents()] == incidents
        assert {one.code for one in faults.faults()} == {"xid_48", "xid_31"} - set(incidents)


def test_events_that_only_refresh_the_inventory_are_not_reported() -> None:
    faults = GpuFaults(lambda _: None)
    faults.add_events((_event("recovery_action_changed"), _event("mig_changed")))
    assert (faults.incidents(), faults.faults()) == ([], [])


def test_the_size_of_a_report_is_limited() -> None:
    clock = Clock()
    faults = GpuFaults(lambda _: None, clock)
    kinds = [_event(f"xid_{number}", 1, f"GPU-{gpu}") for gpu in range(300) for number in (13, 31, 32, 43)]
    faults.add_events(tuple(kinds))
    faults.add_events(tuple(_event("xid_79", number, at=str(number)) for number in range(1, 2000)))
    faults.report_incident(["GPU-1"], "ins_1/1", Reason(code="gpu_mismatch", message="…"), "ins_1")
    assert len(faults.faults()) == MAX_REPORTED
    assert len(faults.incidents()) == MAX_REPORTED


def test_equal_events_are_counted_and_are_news_again_after_a_while() -> None:
    ledger = EventLedger()
    assert ledger.events() == ()
    assert ledger.add([_event("xid_31")], 0.0)
    assert not ledger.add([_event("xid_31", 5, at="later")], 1.0)
    assert ledger.add([_event("xid_79")], 1.5)
    assert not ledger.add([], 2.0)
    events = ledger.events()
    assert [(event["code"], event["count"]) for event in events] == [("xid_31", 6), ("xid_79", 1)]
    assert (events[0]["first_at"], events[0]["last_at"]) == ("then", "later")
    assert ledger.events() is events
    assert ledger.add([_event("xid_31")], 1.0 + NEWS_AFTER_S)
