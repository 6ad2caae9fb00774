"""Starts the service clock, compares it with the wall clock, and keeps its record in the data directory."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sqlalchemy import select, text

from mooring.db.clock import CLOCK, Record, ServiceClock
from mooring.db.session import Database
from mooring.db.tables import Event

RECORD_FILE: Final = "clock.json"
# A record that differs by less from the clock is kept, so that the file is seldom written.
_RECORD_TOLERANCE_S: Final = 0.1
# The record also tells after a reboot which time had been reached.
_RECORD_MAX_AGE_S: Final = 86_400.0


def start(database: Database, folder: Path, clock: ServiceClock = CLOCK) -> None:
    """Start the clock from the record of this boot, or from the wall clock if that is plausible."""
    record = _read(folder)
    reached = [*_newest_event(database), *([record.at_s] if record else [])]
    is_of_this_boot = record is not None and record.boot_id == _boot_id()
    clock.start(_reference(database, clock), max(reached, default=None), record if is_of_this_boot else None)


def check(database: Database, folder: Path, clock: ServiceClock = CLOCK) -> None:
    """Compare the clock with the wall clock or the database's clock, and record it if it has changed."""
    clock.observe(_reference(database, clock))
    record = clock.record(_boot_id())
    if record is not None and _is_outdated(_read(folder), record):
        _write(folder, record)


def accept_wall_clock(folder: Path) -> str:
    """Let the next process start at the wall clock.

    Returns:
        The time, in ISO 8601.

    Raises:
        OSError: the record cannot be written.
    """
    clock = ServiceClock()
    _write(folder, Record(_boot_id(), clock.steady(), clock.wall()))
    return datetime.fromtimestamp(clock.wall(), UTC).isoformat(timespec="seconds")


def _write(folder: Path, record: Record) -> None:
    new = folder / f".{RECORD_FILE}.{os.getpid()}"
    new.write_text(json.dumps(asdict(record)))
    new.replace(folder / RECORD_FILE)


def _read(folder: Path) -> Record | None:
    """The stored record; None: there is none, or a crash has cut it off."""
    try:
        return Record(**json.loads((folder / RECORD_FILE).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _is_outdated(stored: Record | None, record: Record) -> bool:
    if stored is None or stored.boot_id != record.boot_id:
        return True
    passed_s = record.steady_s - stored.steady_s
    return passed_s > _RECORD_MAX_AGE_S or abs(record.at_s - stored.at_s - passed_s) > _RECORD_TOLERANCE_S


def _reference(database: Database, clock: ServiceClock) -> float:
    if database.is_sqlite:
        return clock.wall()
    with database.read() as session:
        return float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def _newest_event(database: Database) -> list[float]:
    with database.read() as session:
        newest = session.scalars(select(Event.at).order_by(Event.seq.desc()).limit(1)).all()
    return [at.timestamp() for at in newest]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
