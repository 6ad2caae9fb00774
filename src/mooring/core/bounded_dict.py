"""A cache for hot paths: `cachetools` is Python code, which costs 0.3 us more per lookup (ADR 2)."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(dict[Key, Value]):
    """Cleared by `d[key] = value` if full. Threads may share it, if each lookup is a single call."""

    def __init__(self, maxsize: int) -> None:
        super().__init__()
        self.maxsize = maxsize

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self.maxsize and key not in self:
            self.clear()
        super().__setitem__(key, value)
