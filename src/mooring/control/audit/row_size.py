"""Bounds the size of a row of the audit log, since rows are never deleted."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

MAX_BYTES: Final = 4096


def bounded(details: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The details of an action, with the largest values replaced by hash and size until they fit.

    A replaced value is `{"sha256": …, "bytes": …}`, over its JSON in UTF-8 with sorted keys and no spaces, so
    that anyone who has the value can prove that it was this one.
    """
    if details is None:
        return None
    kept = dict(details)
    sizes = {name: len(_json(value)) for name, value in kept.items()}
    for name in sorted(kept, key=lambda name: -sizes[name]):
        if sum(sizes.values()) <= MAX_BYTES:
            break
        kept[name] = _digest(kept[name])
        sizes[name] = len(_json(kept[name]))
    return kept


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _digest(value: Any) -> dict[str, Any]:
    content = _json(value)
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
