"""The wall clock of the server's machine jumps."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.service import Client
from tests.testbed.parts import require
from tests.testbed.waiting import wait_until
from tests.testbed.wall_clock import WallClock
from tests.walk.up import Up

LIMITED = {"image": "x", "name": "limited", "gpus": {"count": 1}, "max_duration_s": 7200}


def test_jumps_of_the_wall_clock_end_no_instance_and_delete_no_history(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    require("compiler")
    clock = WallClock(tmp_path)
    first = up(MOORING_SIMULATE="1x8xH100", **clock.environment)
    key, once = first.key, {"Idempotency-Key": "once"}
    with Client(first.url, key) as admin:
        made = admin.post("/v1/instances", json=LIMITED, headers=once).json()
        admin.wait(made["id"], "running")
        clock.shift(timedelta(days=1))
        wait_until(lambda: "the clock has jumped" in first.printed(), 40)
        # Deadlines are still enforced, and after the true duration.
        short = admin.create(gpus={"count": 1}, max_duration_s=1)
        ended = admin.wait(short["id"], "stopped")
        assert ended["reason"]["code"] == "max_duration_reached"
        assert _time(ended["stopped_at"]) - _time(ended["created_at"]) < timedelta(minutes=5)
        assert admin.instance(made["id"])["state"] == "running"
        again = admin.post("/v1/instances", json=LIMITED, headers=once)
        assert (again.json()["id"], again.headers["idempotency-replayed"]) == (made["id"], "true")
        events = admin.items("/v1/events", limit=200)
    first.stop()

    clock.shift(timedelta(days=3650))
    second = up(MOORING_SIMULATE="1x8xH100", **clock.environment)
    with Client(second.url, key) as admin:
        assert admin.items("/v1/events", limit=200)[: len(events)] == events
        late = admin.create(gpus={"count": 1}, max_duration_s=1)
        assert abs(_time(late["created_at"]) - datetime.now(UTC)) < timedelta(minutes=5)
        assert admin.wait(late["id"], "stopped")["reason"]["code"] == "max_duration_reached"
        # It may have failed by now: containers of simulated nodes end with their program.
        kept = admin.instance(made["id"])
        assert (kept["reason"] or {}).get("code") != "max_duration_reached"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
