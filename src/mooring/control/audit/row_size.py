"""Bounds what one row of the audit log holds: such rows are never deleted."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

MOST_BYTES: Final = 4096


def bounded(details: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Details of an operation, with large values replaced by their hash and size until they fit.

    A replaced value reads `{"sha256": …, "bytes": …}`, over its JSON in UTF-8 with sorted keys and no spaces:
    who has the value can prove that it is the one.
    """
    if details is None:
        return None
    kept = dict(details)
    sizes = {name: len(_json(value)) for name, value in kept.items()}
    for name in sorted(kept, key=lambda name: -sizes[name]):
        if sum(sizes.values()) <= MOST_BYTES:
            break
        kept[name] = _digest(kept[name])
        sizes[name] = len(_json(kept[name]))
    return kept


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _digest(value: Any) -> dict[str, Any]:
    content = _json(value)
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
