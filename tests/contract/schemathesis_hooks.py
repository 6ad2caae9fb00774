# mypy: ignore-errors
# It runs in the tools' own environment (requirements.txt), the only one with Schemathesis.
"""Hooks for Schemathesis: rules that the document cannot state, and limits on what its requests may do.

It runs inside Schemathesis (schemathesis.toml names it).
"""

import itertools
import os
import time
from contextlib import suppress

import httpx
import schemathesis

# Codes of rules that no schema can state: on times, on several fields together, or on stored data. A request
# that is rejected with one of these codes is well-formed.
NOT_IN_A_SCHEMA = {
    "bad_cursor",  # must come from the service, for the same filters
    "bad_event_id",  # the time of an existing line
    "idempotency_key_reused",  # no other request may have used the key
    "name_differs",  # the body may only have the name of the path
    "ambiguous_user",  # either an ID or an e-mail address
    "bad_period",  # a reservation ends after it begins, and in the future
    "share_of_mig",  # either a share or a MIG profile
    "share_of_many",
    "share_too_fine",  # must be a multiple of 0.001
    "duplicate_port",  # {"container": 80} equals {"container": 80, "protocol": "tcp"}
    "not_supported_yet",
    "reserved_env",  # NVIDIA_* and the like
    "reserved_label",  # mooring.*
    "spec_too_large",  # 256 KiB over several fields
    "secrets_too_large",
    "unknown_secret",  # must exist in the project
    "unknown_project",  # must exist
    "webhook_url_not_allowed",  # must be public, or of a member, in any notation
    "all_projects",  # excludes project_id
    "registry_not_allowed",  # must be on the public internet, in any notation of the address
    "too_many_ports",  # the schema allows more, for stored requests of earlier releases
    "working_dir_not_allowed",  # any notation of /proc
    "no_permissions",  # a key needs a role or scopes
    "scope_of_no_project",
    "expired",  # a time in the past
    "invalid_parameters",  # of the template
    "bad_value",  # a default of a parameter has its type
    "unknown_parameter",  # a placeholder names a parameter
    "volume_path_not_allowed",  # any notation of /proc, /etc and the like
    "volume_paths_overlap",
    "unknown_volume",  # must exist in the project
    "volume_not_for_groups",
    "nfs_incomplete",  # which options a volume has depends on its driver
    "size_of_nfs",
    "options_not_allowed",
    "selector_not_allowed",
    "invalid_public_key",  # the line of a .pub file
    "upgrade_required",  # the request must be the handshake of a WebSocket
}
# Long polls are shortened: their answers stay the same, and the run takes only a minute.
LONGEST_WAIT_S = {"timeout_s": 1, "wait_s": 0.2}
WAITING_WITH_A_BODY = {"/agent/v1/sync", "/agent/v1/heartbeat", "/agent/v1/stream-requests"}
DELETED_WITHIN_S = 10

_client = httpx.Client(
    base_url=os.environ["CONTRACT_URL"],
    headers={"Authorization": f"Bearer {os.environ['CONTRACT_KEY']}"},
    timeout=15,
)


def _ids_to_keep() -> set[str]:
    """IDs of the caller's key, user and project, and CONTRACT_KEEP: a run needs them until its end."""
    me = _client.get("/v1/me").json()
    found = (me.get(name) or {} for name in ("key", "user", "project"))
    return {thing["id"] for thing in found if "id" in thing} | set(os.environ["CONTRACT_KEEP"].split())


_KEEP = _ids_to_keep()


_keys_used = itertools.count()


@schemathesis.hook
def before_call(context, case, kwargs):
    _shorten_waits(case)
    _use_a_new_key(case)
    if case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        case.body = _with_whole_numbers(case.body)
    if case.method in {"DELETE", "PATCH", "PUT", "POST"} and case.path_parameters:
        for name, value in case.path_parameters.items():
            if value in _KEEP:
                case.path_parameters[name] = "none"


def _shorten_waits(case):
    if case.path.endswith("/wait") and (case.query is None or isinstance(case.query, dict)):
        case.query = {"timeout_s": 1, **(case.query or {})}
    for name, longest in LONGEST_WAIT_S.items():
        for place in (case.query, case.body if case.path in WAITING_WITH_A_BODY else None):
            if isinstance(place, dict) and name in place:
                with suppress(TypeError, ValueError):
                    if longest < float(place[name]) <= 60:
                        place[name] = longest
    if isinstance(case.query, dict) and str(case.query.get("follow")).lower() == "true":
        # The stream ends with the container; simulated containers do not end.
        case.query["follow"] = False


def _with_whole_numbers(value):
    """Convert 1.0 to 1: JSON Schema treats them as equal, Mooring rejects the fraction."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _use_a_new_key(case):
    """Make idempotency keys unique: a reused key would be rejected before the request itself is checked."""
    key = (case.headers or {}).get("idempotency-key")
    if case.meta.generation.mode.is_positive and isinstance(key, str) and 0 < len(key) < 240:
        case.headers["idempotency-key"] = f"{key}-{next(_keys_used)}"


# Deleted IDs, and all values of created resources: a key is deleted with its user or project.
_deleted: set[object] = set()
_created_values: dict[object, set[object]] = {}


@schemathesis.hook
def after_call(context, case, response):
    if response.status_code == 201:
        made = response.json()
        _created_values[made.get("id")] = {value for value in made.values() if isinstance(value, str)}
    if case.method == "DELETE" and response.status_code in {202, 204}:
        _deleted.update((case.path_parameters or {}).values())
    if case.method == "DELETE" and response.status_code == 202:
        # The deletion is asynchronous; the following checks expect it to be complete.
        path = response.request.path_url.split("?")[0]
        deadline = time.monotonic() + DELETED_WITHIN_S
        while _client.get(path).status_code != 404 and time.monotonic() < deadline:
            time.sleep(0.02)


@schemathesis.hook
def filter_failure(context, failure, case, response):
    kind = type(failure).__name__
    if kind == "EnsureResourceAvailability":
        requested_ids = set((case.path_parameters or {}).values())
        return not any(_created_values.get(each, set()) & _deleted for each in requested_ids)
    if kind not in {"RejectedPositiveData", "ServerError"}:
        return True
    problem = response.json()
    if response.status_code == 503:
        # The run itself reported this GPU, without samples.
        return problem["code"] != "no_sample"
    errors = problem.get("errors", ())
    if response.request.path_url.startswith("/v1/templates") and any(
        item["pointer"].startswith("/spec") for item in errors
    ):
        return False  # with its placeholders filled in, it is no spec of an instance
    codes = {problem["code"], *(item["code"] for item in errors)}
    return not codes & NOT_IN_A_SCHEMA
