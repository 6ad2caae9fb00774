"""Faults of wall clocks. Those of the last replica and the last agent can be set."""

from datetime import UTC, datetime, timedelta

from tests.faults.fleet import READY_WITHIN_S
from tests.faults.history import events_after, newest_seq
from tests.faults.trial import Fault, Trial
from tests.testbed.waiting import wait_until

_JUMPS = (timedelta(days=-1), timedelta(hours=1), timedelta(days=3650))
_AHEAD_S = 8
_TOLERANCE = timedelta(minutes=2)


def jump(trial: Trial) -> None:
    """F14. Deadlines and heartbeats go on by the true duration, also through a restart with a wrong clock."""
    fleet, newest = trial.fleet, newest_seq(trial.admin)
    for shift in trial.rng.sample(_JUMPS, len(_JUMPS)):
        fleet.clock.shift(shift)
        trial.hold(_AHEAD_S)
    replica, agent = fleet.replicas[-1], fleet.agents[-1]
    for program in (replica, agent):
        program.kill()
    replica.start(READY_WITHIN_S)
    agent.start()
    trial.await_state("the node is ready with the wrong clock", fleet.ready)
    with replica.client as client:
        short = trial.create(client, trial.name("short"), trial.key(), max_duration_s=2)
        made = short.json()
        created_at = datetime.fromisoformat(made["created_at"])
        trial.require(abs(created_at - datetime.now(UTC)) < _TOLERANCE, f"created at {created_at}")
    ended = trial.admin.get(f"/v1/instances/{made['id']}/wait", params={"state": "stopped", "timeout_s": 60})
    code = (ended.json()["instance"]["reason"] or {}).get("code")
    trial.require(code == "max_duration_reached", f"an instance of 2 s ended with {code}")
    trial.delete(made["id"])
    fleet.clock.shift(timedelta(0))
    late = [
        event["data"]["instance_id"]
        for event in events_after(trial.admin, newest)
        if _reason(event) == "max_duration_reached" and event["data"]["instance_id"] != made["id"]
    ]
    trial.require(not late, f"the clock ended {late}")
    wait_until(fleet.ready, 60)
    trial.note("-1 d, +1 h, +10 y")


def _reason(event: dict[str, object]) -> object:
    data = event["data"]
    reason = data.get("reason") if isinstance(data, dict) else None
    return reason.get("code") if isinstance(reason, dict) else None


FAULTS = (Fault("F14", "set the wall clocks of a replica and an agent", jump),)
