"""Faults of PostgreSQL and of migrations."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from sqlalchemy import create_engine

from mooring.db import migrate
from mooring.db.session import normalized
from tests.faults.history import events_after, newest_seq
from tests.faults.trial import Fault, Trial
from tests.testbed.filesystems import take_all_space
from tests.testbed.waiting import wait_until
from tests.walk.product import Program, clean_environment

ROOT = Path(__file__).parents[2]
_FROZEN_S = 15
_DOWN_S = 5
_FULL_S = 10
# The server may write until the space within its files is used.
_FULL_WITHIN_S = 120
# The product's limit is 5 s. The rest is for a machine that is busy with three replicas and three nodes.
_ANSWERED_WITHIN_S = 8
_UPGRADES = 4


class _Probe:
    """Reads from each replica all the time, and checks how an outage is answered."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._ended = threading.Event()
        self.slowest_s = 0.0
        self.unavailable = 0
        self._threads = [
            threading.Thread(target=self._read, args=[replica.url]) for replica in trial.fleet.replicas
        ]

    def __enter__(self) -> "_Probe":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _read(self, url: str) -> None:
        with (
            self._trial.fleet.replicas[0].client as template,
            httpx.Client(base_url=url, headers=template.headers, timeout=60, verify=False) as client,
        ):
            while not self._ended.wait(0.2):
                began = time.monotonic()
                answer = client.get("/v1/instances", params={"limit": 1})
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if answer.status_code == 503:
                    self.unavailable += 1
                    self._trial.require("retry-after" in answer.headers, "a 503 without Retry-After")
                    self._trial.require(
                        answer.headers["content-type"] == "application/problem+json", answer.text
                    )
                else:
                    self._trial.require(answer.status_code == 200, f"{answer.status_code}: {answer.text}")
                health = client.get("/healthz").status_code
                self._trial.require(health == 200, f"/healthz answers {health}")

    def check(self, *, must_fail: bool = True) -> None:
        """Check how reads were answered. `must_fail`: there was no database, so some cannot have worked."""
        self._trial.require(self.unavailable > 0 or not must_fail, "no request was answered with 503")
        self._trial.require(self.slowest_s <= _ANSWERED_WITHIN_S, f"an answer took {self.slowest_s:.1f} s")
        self._trial.note(f"{self.unavailable} reads got 503, slowest answer {self.slowest_s:.1f} s")


def freeze_postgres(trial: Trial) -> None:
    """F9. Requests are answered with 503, and no healthy node becomes unreachable."""
    newest = newest_seq(trial.admin)
    with _Probe(trial) as probe:
        trial.fleet.postgres.freeze()
        trial.hold(_FROZEN_S)
        trial.fleet.postgres.thaw()
        trial.await_state("reads work", lambda: trial.admin.get("/v1/instances").status_code == 200)
        trial.hold(3)
    probe.check()
    _require_no_unreachable_node(trial, newest)


def kill_postgres(trial: Trial) -> None:
    """F10. What was acknowledged is there after the restart."""
    newest = newest_seq(trial.admin)
    with _Probe(trial) as probe:
        trial.fleet.postgres.kill()
        trial.hold(_DOWN_S)
        trial.fleet.postgres.start()
        took_s = trial.await_state("writes work", lambda: trial.admin.get("/readyz").status_code == 200)
    probe.check()
    trial.note(f"ready after {took_s:.1f} s")
    _require_no_unreachable_node(trial, newest)


def fill_disk(trial: Trial) -> None:
    """F15. While its disk is full, PostgreSQL rejects writes or ends. Nothing acknowledged is lost."""
    newest, postgres = newest_seq(trial.admin), trial.fleet.postgres
    filler = postgres.data / "filler"
    with _Probe(trial) as probe:
        take_all_space(filler)
        try:
            took_s = trial.await_state(
                "writes get 503", lambda: trial.admin.get("/readyz").status_code == 503, _FULL_WITHIN_S
            )
            trial.note(f"no writes after {took_s:.1f} s")
            trial.hold(_FULL_S)
            trial.note(f"PostgreSQL {'runs' if postgres.daemon.running else 'has ended'}")
        finally:
            filler.unlink()
        postgres.start()
        took_s = trial.await_state("writes work", lambda: trial.admin.get("/readyz").status_code == 200)
    probe.check(must_fail=False)
    trial.note(f"ready after {took_s:.1f} s")
    _require_no_unreachable_node(trial, newest)


def _require_no_unreachable_node(trial: Trial, after: int) -> None:
    for event in events_after(trial.admin, after):
        silent = event["type"] == "node.state_changed" and event["data"].get("to") == "unreachable"
        trial.require(not silent, f"a healthy node became unreachable: {event}")


def fail_over(trial: Trial) -> None:
    """F11. Its own test has the primary and the standby; the load goes on beside it."""
    argv = [sys.executable, "-m", "pytest", "tests/walk/test_failover.py"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    trial.require(done.returncode == 0, f"{' '.join(argv)}:\n{done.stdout[-3000:]}")
    trial.note(done.stdout.strip().splitlines()[-1])


def kill_upgrades(trial: Trial) -> None:
    """F21. The next upgrade completes one that was killed, on both databases."""
    killed = 0
    for number in range(_UPGRADES):
        folder = trial.fleet.folder / trial.name("upgrade")
        folder.mkdir()
        on_postgres = number % 2 == 0
        url = trial.fleet.postgres.create_database() if on_postgres else f"sqlite:///{folder / 'm.db'}"
        killed += _kill_upgrade(trial, folder, url)
        again = _upgrade(folder, url)
        again.start()
        trial.require(again.wait(60) == 0, f"the second upgrade failed: {again.tail()}")
        engine = create_engine(normalized(url))
        trial.require(migrate.current(engine) == migrate.newest(), "the database is not migrated")
        engine.dispose()
        if on_postgres:
            trial.fleet.postgres.drop_database(url)
    trial.note(f"{killed} of {_UPGRADES} upgrades were killed in the middle")


def _kill_upgrade(trial: Trial, folder: Path, url: str) -> bool:
    """Kill an upgrade at a random time; returns whether it had begun and not ended."""
    first = _upgrade(folder, url)
    first.start()
    used_s = trial.rng.uniform(0.05, 0.65)  # CPU time, so that a busy machine does not move the kill
    wait_until(lambda: not first.running or first.processor_s() > used_s, 60)
    in_progress = first.running
    first.kill()
    return in_progress


def _upgrade(folder: Path, url: str) -> Program:
    settings = {"MOORING_DATA_DIR": str(folder), "MOORING_DATABASE_URL": url}
    made = Program(["db", "upgrade"], clean_environment() | settings, folder / "upgrade.log")
    made.forked = True
    return made


FAULTS = (
    Fault("F9", "freeze PostgreSQL for 15 s", freeze_postgres),
    Fault("F10", "kill -9 PostgreSQL", kill_postgres),
    Fault("F15", "fill PostgreSQL's disk", fill_disk),
    Fault("F11", "failover to a standby (tests/walk/test_failover.py)", fail_over),
    Fault("F21", "kill -9 mooring db upgrade", kill_upgrades),
)
