"""Stores why instances wait, without rewriting thousands of rows at each change of the cluster."""

import time
from collections.abc import Callable, Sequence
from itertools import islice

from mooring.control.instances.waiting_reasons import set_reasons
from mooring.db.session import Database
from mooring.scheduler.model import Unplaced
from mooring.scheduler.plan import Waiting
from mooring.scheduler.units import Age

# Rows written in one transaction.
_BATCH = 100
# Sentences that have changed, such as "(best: 1 on gpu-7)", are written at this rate.
_REWRITTEN_PER_S = 100
_MOST_REWRITTEN = 500
# Unchanged reasons, too, are written again after this time: another replica may have written an older one.
_REWRITE_ALL_S = 60.0


class WaitingReasons:
    """Writes the reason of each newly pending instance, and each new code, at once; new sentences as the
    rate permits. Not thread-safe.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._known: dict[Age, Unplaced] = {}  # with the time since when, because one may be queued again
        self._whys: set[Unplaced] = set()  # the values of `_known`
        self._stale: dict[str, Unplaced] = {}  # by instance id, the first to be written first
        self._allowance = float(_MOST_REWRITTEN)
        self._called_at = self._rewritten_at = clock()

    def write(self, waiting: Sequence[Waiting]) -> None:
        """Write what has changed since the last call.

        Args:
            waiting: all pending instances.
        """
        urgent = self._changes(waiting)
        for instance_id in urgent:
            self._stale.pop(instance_id, None)
        for instance_id in list(islice(self._stale, self._allowed())):
            urgent[instance_id] = self._stale.pop(instance_id)
        items = list(urgent.items())
        for start in range(0, len(items), _BATCH):
            with self._database.write() as session:
                set_reasons(session, dict(items[start : start + _BATCH]))

    def _changes(self, waiting: Sequence[Waiting]) -> dict[str, Unplaced]:
        """The reasons to write now; others that have changed are added to `_stale`."""
        urgent: dict[str, Unplaced] = {}
        known: dict[Age, Unplaced] = {}
        interned = {why: why for why in self._whys}
        rewrite_all = self._rewrite_all()
        for each in waiting:
            why = interned.setdefault(each.why, each.why)
            # By identity: comparing thousands of equal reasons takes longer than the rest of a cycle.
            for age in (
                each.queued if rewrite_all else [a for a in each.queued if self._known.get(a) is not why]
            ):
                old = self._known.get(age)
                if old is None or old.code != why.code:
                    urgent[age[1]] = why
                else:
                    self._stale[age[1]] = why
            known.update(dict.fromkeys(each.queued, why))
        self._known, self._whys = known, {interned[each.why] for each in waiting}
        return urgent

    def _rewrite_all(self) -> bool:
        is_due = self._clock() - self._rewritten_at > _REWRITE_ALL_S
        if is_due:
            self._rewritten_at = self._clock()
        return is_due

    def _allowed(self) -> int:
        """How many stale reasons may be written now."""
        passed_s = self._clock() - self._called_at
        self._called_at += passed_s
        self._allowance = min(self._allowance + passed_s * _REWRITTEN_PER_S, _MOST_REWRITTEN)
        allowed = min(int(self._allowance), len(self._stale))
        self._allowance -= allowed
        return allowed
