# mypy: ignore-errors
# It runs in the tools' own environment (requirements.txt), where Schemathesis is; ours has it not.
"""What Schemathesis must know of Mooring beyond the document, and where its requests would wait or end it.

It runs inside Schemathesis (schemathesis.toml names it).
"""

import itertools
import os
import time
from contextlib import suppress

import httpx
import schemathesis

# Rules that no schema can state: of the moment, between fields, or of a default. Requests refused with these
# codes were well-formed.
NOT_IN_A_SCHEMA = {
    "bad_cursor",  # one that the service gave out, for the same filters
    "bad_event_id",  # a line's time: one that there is
    "idempotency_key_reused",  # a key that no other request had
    "bad_period",  # a reservation ends after it begins, and in the future
    "share_of_mig",  # one or the other
    "share_of_many",
    "share_too_fine",  # thousandths, whatever a float makes of them
    "duplicate_port",  # {"container": 80} and {"container": 80, "protocol": "tcp"} are one port
    "not_supported_yet",
    "reserved_env",  # NVIDIA_* and the like
    "reserved_label",  # mooring.*
    "spec_too_large",  # 256 KiB over several fields
    "secrets_too_large",
    "unknown_secret",  # one that the project has
    "unknown_project",  # one that there is
    "registry_not_allowed",  # one on the public internet, by any spelling of an address
    "too_many_ports",  # stored requests of earlier releases may have more
    "working_dir_not_allowed",  # by any spelling of /proc
    "no_permissions",  # a key has a role, or scopes, or both
    "scope_of_no_project",
    "expired",  # a moment in the past
}
# Long polls are asked for shortly: what they answer is the same, and the run has a minute.
LONGEST_WAIT_S = {"timeout_s": 1, "wait_s": 0.2}
HELD_WITH_A_BODY = {"/agent/v1/sync", "/agent/v1/stream-requests"}
DELETED_WITHIN_S = 10

_client = httpx.Client(
    base_url=os.environ["CONTRACT_URL"],
    headers={"Authorization": f"Bearer {os.environ['CONTRACT_KEY']}"},
    timeout=15,
)


def _own_ids() -> set[str]:
    """The caller's own key, user and project: a run that deletes its own key says nothing from then on."""
    me = _client.get("/v1/me").json()
    found = (me.get(name) or {} for name in ("key", "user", "project"))
    return {thing["id"] for thing in found if "id" in thing} | set(os.environ["CONTRACT_KEEP"].split())


_KEEP = _own_ids()


_keys_used = itertools.count()


@schemathesis.hook
def before_call(context, case, kwargs):
    _wait_shortly(case)
    _use_a_new_key(case)
    if case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        case.body = _with_whole_numbers(case.body)
    if case.method in {"DELETE", "PATCH", "PUT", "POST"} and case.path_parameters:
        for name, value in case.path_parameters.items():
            if value in _KEEP:
                case.path_parameters[name] = "none"


def _wait_shortly(case):
    if case.path.endswith("/wait") and (case.query is None or isinstance(case.query, dict)):
        case.query = {"timeout_s": 1, **(case.query or {})}
    for name, longest in LONGEST_WAIT_S.items():
        for place in (case.query, case.body if case.path in HELD_WITH_A_BODY else None):
            if isinstance(place, dict) and name in place:
                with suppress(TypeError, ValueError):
                    if longest < float(place[name]) <= 60:
                        place[name] = longest
    if isinstance(case.query, dict) and str(case.query.get("follow")).lower() == "true":
        # A stream of lines that ends when the container does; simulated ones have no end.
        case.query["follow"] = False


def _with_whole_numbers(value):
    """1.0 as 1: the same to JSON Schema, and to us a fraction, as nothing is coerced."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _use_a_new_key(case):
    """A key that another request had is refused, which would hide what the request itself leads to."""
    key = (case.headers or {}).get("idempotency-key")
    if case.meta.generation.mode.is_positive and isinstance(key, str) and 0 < len(key) < 240:
        case.headers["idempotency-key"] = f"{key}-{next(_keys_used)}"


# What was deleted; and of what was made, everything it names: a key ends with its user, its project.
_deleted: set[object] = set()
_named: dict[object, set[object]] = {}


@schemathesis.hook
def after_call(context, case, response):
    if response.status_code == 201:
        made = response.json()
        _named[made.get("id")] = {value for value in made.values() if isinstance(value, str)}
    if case.method == "DELETE" and response.status_code in {202, 204}:
        _deleted.update((case.path_parameters or {}).values())
    if case.method == "DELETE" and response.status_code == 202:
        # It will be gone. The checks that follow expect it to be gone at once.
        path = response.request.path_url.split("?")[0]
        deadline = time.monotonic() + DELETED_WITHIN_S
        while _client.get(path).status_code != 404 and time.monotonic() < deadline:
            time.sleep(0.02)


@schemathesis.hook
def filter_failure(context, failure, case, response):
    kind = type(failure).__name__
    if kind == "EnsureResourceAvailability":
        asked_for = set((case.path_parameters or {}).values())
        return not any(_named.get(one, set()) & _deleted for one in asked_for)
    if kind not in {"RejectedPositiveData", "ServerError"}:
        return True
    problem = response.json()
    if response.status_code == 503:
        # Figures of a GPU of which this run itself has told, in a report that it made up.
        return problem["code"] != "no_sample"
    codes = {problem["code"], *(item["code"] for item in problem.get("errors", ()))}
    return not codes & NOT_IN_A_SCHEMA
