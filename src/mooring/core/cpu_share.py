"""How long work that repeats must rest, so that it leaves the interpreter to other threads."""

from dataclasses import dataclass


@dataclass(slots=True)
class CpuShare:
    """Limits repeated work to `share` of a core. After idle time, `burst_s` seconds of CPU need no rest.

    No rest is longer than `longest_rest_s`, so work that needs more than its share runs more often than that.
    """

    share: float
    burst_s: float
    longest_rest_s: float
    _used_s: float = 0.0
    _used_at_s: float = 0.0

    def rest_after(self, cpu_s: float, now_s: float) -> float:
        """Seconds to rest after work that used `cpu_s` seconds of CPU until `now_s`, a monotonic time.

        A token bucket: the share refills it while time passes, also during a rest.
        """
        left_s = max(0.0, self._used_s - (now_s - self._used_at_s) * self.share)
        self._used_s = min(left_s + cpu_s, self.burst_s + self.longest_rest_s * self.share)
        self._used_at_s = now_s
        return max(0.0, self._used_s - self.burst_s) / self.share
