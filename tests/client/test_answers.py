"""A client reads the answers of newer and older servers."""

import json
from typing import Any

import pytest

from mooring_client import answers, errors
from mooring_client.cli.exits import message_of
from mooring_client.failures import BadAnswer, ConnectionFailed
from mooring_client.schemas.events import EventList
from mooring_client.schemas.instances import Instance, InstanceList
from mooring_client.schemas.nodes import Versions
from mooring_client.schemas.spec import GpuRequest
from mooring_client.schemas.states import DesiredState, Reason, State

INSTANCE: dict[str, Any] = {
    "id": "ins_1", "name": "a", "project_id": "prj_1", "image": "busybox", "labels": {}, "state": "running",
    "desired_state": "running", "reason": None, "version": 1, "generation": 1, "attempt": 1, "node_id": None,
    "node_name": None, "group_id": None, "group_rank": None, "granted": None, "devices": [], "endpoints": [],
    "container_id": None, "image_digest": None, "exit_code": None, "queue_position": None, "actions": [],
    "simulated": True, "created_at": "2026-11-21T08:00:00.000Z", "scheduled_at": None, "started_at": None,
    "stopped_at": None, "expires_at": None,
}  # fmt: skip


def _instance(**changed: Any) -> Any:
    """An instance as it was read: of values that this version does not know, the types differ."""
    return answers.read_model(Instance, json.dumps({**INSTANCE, **changed}).encode())


def test_unknown_fields_are_ignored_at_every_depth() -> None:
    found = _instance(
        added=1, gpus={"count": 2, "added": 1}, reason={"code": "a", "message": "b", "added": 1}
    )
    assert (found.gpus.count, found.reason) == (2, Reason(code="a", message="b"))


def test_an_unknown_state_is_kept_as_it_is() -> None:
    found = _instance(state="hibernating", gpus={"count": 2}, reason={"code": "a", "message": "b"})
    assert found.state == "hibernating"
    assert found.desired_state is DesiredState.RUNNING
    assert (found.gpus, found.reason) == (GpuRequest(count=2), Reason(code="a", message="b"))


def test_one_unknown_value_of_a_list_spoils_no_other_item() -> None:
    content = json.dumps({"items": [INSTANCE, {**INSTANCE, "state": "hibernating"}], "next_cursor": "x"})
    found = answers.read_model(InstanceList, content.encode())
    assert [item.state for item in found.items] == [State.RUNNING, "hibernating"]
    assert all(isinstance(item, Instance) for item in found.items)
    assert found.next_cursor == "x"


def test_a_value_of_another_type_deep_inside_is_kept() -> None:
    found = _instance(gpus={"count": "many", "model": "H100"}, granted={"cpus": 1.0})
    assert (found.gpus.count, found.gpus.model) == ("many", "H100")
    assert found.granted is not None
    assert (found.granted.cpus, found.granted.memory_mib) == (1.0, None)


def test_missing_fields_of_an_older_server_are_none_or_their_default() -> None:
    older = {name: value for name, value in INSTANCE.items() if name not in {"queue_position", "actions"}}
    found: Any = answers.read_model(Instance, json.dumps(older).encode())
    assert (found.queue_position, found.actions, found.restart) == (None, None, "never")
    assert answers.read_model(EventList, b'{"items": []}').next_cursor is None


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'"x"', b"null", b"\xff"])
def test_an_answer_of_something_else_is_a_bad_answer(content: bytes) -> None:
    with pytest.raises(BadAnswer, match="check the URL"):
        answers.read_model(Versions, content)


def _problem(code: str, status: int, **more: Any) -> bytes:
    return json.dumps({"code": code, "status": status, "detail": "why", "request_id": "r", **more}).encode()


def test_an_error_has_the_class_of_its_code_and_its_fields() -> None:
    found: Any = answers.error(403, _problem("quota_exceeded", 403, limit=8, used=8, asked=1), None)
    assert isinstance(found, errors.QuotaExceeded)
    assert (str(found), found.fields, found.request_id) == ("why", {"limit": 8, "used": 8, "asked": 1}, "r")


@pytest.mark.parametrize("code", sorted(errors.MooringError.by_code))
def test_every_code_is_read_as_its_class(code: str) -> None:
    each = errors.MooringError.by_code[code]
    found = answers.error(each.status, _problem(each.code, each.status), None)
    assert type(found) is each


def test_an_unknown_code_has_the_class_of_its_status() -> None:
    found: Any = answers.error(409, _problem("brand_new", 409), "7")
    assert isinstance(found, errors.Conflict)
    assert (found.code, found.status, found.retry_after_s) == ("brand_new", 409, 7)
    assert not found.retryable
    # A server cannot fill the memory of the client with codes.
    assert "brand_new" not in errors.MooringError.by_code


def test_an_unknown_code_may_be_retryable() -> None:
    content = json.dumps({**json.loads(_problem("brand_new", 503)), "retryable": True}).encode()
    found: Any = answers.error(503, content, None)
    assert isinstance(found, errors.Unavailable)
    assert found.retryable


def test_members_of_a_problem_may_have_any_name() -> None:
    members = {"message": "m", "retry_after_s": 1, "self": 2, "errors": None}
    content = json.dumps({**json.loads(_problem("not_found", 404)), **members}).encode()
    found: Any = answers.error(404, content, None)
    assert found.fields == members
    assert found.retry_after_s is None
    assert "not_found" in message_of(found)


def test_the_error_of_a_server_without_a_code_of_its_own() -> None:
    assert type(answers.error(500, _problem("internal_error", 500), None)) is errors.MooringError


def test_a_429_of_a_proxy_can_be_retried() -> None:
    found: Any = answers.error(429, b"<html>Too Many Requests</html>", "3")
    assert isinstance(found, errors.TooManyRequests)
    assert (found.retryable, found.retry_after_s) == (True, 3)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_error_of_a_proxy_counts_as_a_lost_connection(status: int) -> None:
    assert isinstance(answers.error(status, b"<html>Bad gateway</html>", None), ConnectionFailed)


def test_another_servers_error_is_a_bad_answer() -> None:
    with pytest.raises(BadAnswer, match="404 from something that is not Mooring: nginx; check the URL"):
        answers.error(404, b"nginx", None)
