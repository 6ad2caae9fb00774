"""The service clock: the time of all decisions and of all times in the database.

The machine's wall clock may be set by a person, by NTP, or to a wrong date at boot. If decisions followed it,
a jump of a day would stop instances with a maximum duration, expire deadlines and keys, and delete history.
So the service clock starts at the wall clock and then advances with CLOCK_BOOTTIME, which nobody can set. It
approaches the wall clock at 500 ppm, the rate of adjtime(3), and never jumps or goes back.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

log = logging.getLogger(__name__)

# 1.8 s an hour, so that a measured duration stays right to 0.05 %.
_MAX_RATE: Final = 0.0005
# Smaller differences are corrected within this time, so that the correction does not overshoot.
_CORRECTED_IN_S: Final = 60.0
# At a start, the wall clock is accepted if it is at most this much ahead of the newest known time.
_LONGEST_ABSENCE_S: Final = 60 * 86_400.0
# A larger difference from the wall clock is logged, and again every hour.
_TOLERANCE_S: Final = 5.0
_LOGGED_EVERY_S: Final = 3600.0
_ACCEPT: Final = "If the clock is right, run `mooring db accept-clock` and restart the service."


@dataclass(frozen=True, slots=True)
class Record:
    """What the service clock showed; valid until the machine reboots.

    Attributes:
        boot_id: the boot of the machine, as in /proc/sys/kernel/random/boot_id.
        steady_s: CLOCK_BOOTTIME, in seconds.
        at_s: the service clock at the same time, as Unix time in seconds.
    """

    boot_id: str
    steady_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class _Course:
    """The service clock as a function of CLOCK_BOOTTIME: `at_s` at `steady_s`, advancing at `rate`."""

    steady_s: float
    at_s: float
    rate: float

    def at(self, steady_s: float) -> float:
        return self.at_s + (steady_s - self.steady_s) * self.rate


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ServiceClock:
    """Shows the wall clock until `start`. Safe for use by several threads.

    Args:
        wall: Unix time in seconds.
        steady: seconds since some time in the past. Like CLOCK_BOOTTIME, it counts while the machine is
            suspended.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _boottime
    ) -> None:
        self.wall, self.steady = wall, steady
        self._course: _Course | None = None
        self._is_doubtful = False
        self._logged_at: float | None = None
        self._lock = threading.Lock()

    def time(self) -> float:
        """Unix time in seconds."""
        course = self._course
        return self.wall() if course is None else course.at(self.steady())

    def start(self, reference_s: float, newest_s: float | None, record: Record | None) -> None:
        """Begin to advance on its own.

        Args:
            reference_s: the wall clock, or on PostgreSQL the database's clock, which all replicas share.
            newest_s: the newest known time that the clock has already reached; None: nothing is known.
            record: of an earlier process in this boot of the machine.
        """
        steady_s = self.steady()
        self._is_doubtful = False
        if record is not None and record.steady_s <= steady_s:
            start_s = record.at_s + steady_s - record.steady_s
        elif newest_s is None or _is_plausible(reference_s, newest_s):
            start_s = reference_s
        else:
            start_s, self._is_doubtful = newest_s, True
            log.warning(
                "the clock shows %s, but the newest time in the database is %s; the service continues from "
                "there until the clock is set. %s",
                *map(_shown, (reference_s, newest_s)),
                _ACCEPT,
            )
        self._course = _Course(steady_s, start_s, 1.0)

    def observe(self, reference_s: float) -> None:
        """Compare with the wall clock or the database's clock; to be called about once in ten seconds."""
        with self._lock:
            steady_s = self.steady()
            course = self._course or _Course(steady_s, reference_s, 1.0)
            at_s = course.at(steady_s)
            if self._is_doubtful and _is_plausible(reference_s, at_s):
                log.info(
                    "the clock has been set to %s; the service continues from there", _shown(reference_s)
                )
                at_s, self._is_doubtful = reference_s, False
            ahead_s = reference_s - at_s
            correction = max(-_MAX_RATE, min(_MAX_RATE, ahead_s / _CORRECTED_IN_S))
            self._course = _Course(steady_s, at_s, 1.0 + correction)
            self._log(ahead_s, reference_s, steady_s)

    def _log(self, ahead_s: float, reference_s: float, steady_s: float) -> None:
        if abs(ahead_s) <= _TOLERANCE_S:
            self._logged_at = None
        elif self._logged_at is None or steady_s - self._logged_at >= _LOGGED_EVERY_S:
            self._logged_at = steady_s
            log.warning(
                "the clock has jumped: it shows %s, and the service's time is %s. The service approaches it "
                "by 1.8 s an hour. %s",
                *map(_shown, (reference_s, reference_s - ahead_s)),
                _ACCEPT,
            )

    def record(self, boot_id: str) -> Record | None:
        """What a later process in this boot continues from; None: the clock may be wrong since the boot."""
        if self._is_doubtful:
            return None
        steady_s = self.steady()
        course = self._course
        return Record(boot_id, steady_s, self.wall() if course is None else course.at(steady_s))


def _is_plausible(reference_s: float, newest_s: float) -> bool:
    return 0 <= reference_s - newest_s <= _LONGEST_ABSENCE_S


def _shown(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{unix_s:.0f} s after 1970"


CLOCK: Final = ServiceClock()
