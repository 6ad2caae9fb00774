"""The `filters` and times of Docker's parameters."""

import json
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from mooring.control.instances.docker_containers import FoundContainer
from mooring.gateway.docker import views
from mooring_client.errors import BadRequest

Filters = dict[str, list[str]]

CONTAINER_FILTERS = frozenset({"id", "name", "status", "label", "ancestor", "exited"})
_STATUSES = frozenset({"created", "restarting", "running", "removing", "paused", "exited", "dead"})


def parsed(text: str | None, known: Collection[str]) -> Filters:
    """Raises BadRequest: the filters are not valid, or one is not supported."""
    if not text:
        return {}
    try:
        given = json.loads(text)
        found = {key: _values(value) for key, value in given.items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise BadRequest("invalid filter: the filters are not valid JSON") from None
    if unknown := sorted(found.keys() - set(known)):
        raise BadRequest(f"invalid filter '{unknown[0][:64]}': supported are {', '.join(sorted(known))}")
    if unknown := sorted(set(found.get("status", ())) - _STATUSES):
        raise BadRequest(f"invalid filter 'status={unknown[0][:64]}'")
    return found


def _values(value: object) -> list[str]:
    # A list, or as older clients send it: {"value": true}.
    if isinstance(value, dict):
        return [str(each) for each, is_set in value.items() if is_set]
    if isinstance(value, list):
        return [str(each) for each in value]
    raise TypeError


def matches(found: FoundContainer, wanted: Filters) -> bool:
    """Whether a container is wanted: of the values of a filter, one must match; of labels, all."""
    listed = views.listed(found)
    ids, names = wanted.get("id", []), wanted.get("name", [])
    exited = wanted.get("exited", [])
    return (
        (not ids or any(found.id.startswith(each) for each in ids))
        and (not names or any(_named(found.name, each) for each in names))
        and listed["State"] in (wanted.get("status") or [listed["State"]])
        and listed["Image"] in (wanted.get("ancestor") or [listed["Image"]])
        and (not exited or (found.instance is not None and str(views.exit_code(found.instance)) in exited))
        and has_labels(listed["Labels"], wanted.get("label", []))
    )


def _named(name: str, wanted: str) -> bool:
    """Clients send parts of names, or an anchored pattern such as `^/web$`."""
    plain = wanted.removeprefix("^").removeprefix("/").removesuffix("$")
    if wanted.startswith("^") and wanted.endswith("$"):
        return name == plain
    return name.startswith(plain) if wanted.startswith("^") else plain in name


def has_labels(labels: Mapping[str, str], wanted: Collection[str]) -> bool:
    for each in wanted:
        key, equals, value = each.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def nanoseconds_of(text: str | None) -> int | None:
    """A time as nanoseconds since 1970, from a Unix time with a fraction, or RFC 3339. None: none is given.

    Raises:
        BadRequest: it is neither.
    """
    if not text:
        return None
    match = re.fullmatch(r"(.+?)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", text, re.IGNORECASE)
    try:
        whole, fraction, zone = match.groups() if match is not None else (text, None, None)
        if re.fullmatch(r"\d{1,11}", whole) and zone is None:
            seconds = int(whole)
        else:
            at = datetime.fromisoformat(whole + (zone or ""))
            seconds = int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise BadRequest(f"invalid time: {text[:64]}") from None
    return seconds * 10**9 + int((fraction or "").ljust(9, "0"))


def time_of(text: str | None) -> float | None:
    """As `nanoseconds_of`, in seconds."""
    found = nanoseconds_of(text)
    return None if found is None else found / 1e9
