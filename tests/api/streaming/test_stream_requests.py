"""Stream requests: a node polls for the streams that users wait for."""

import threading
import time
from collections.abc import Callable

import httpx
import pytest

from mooring.db.signals import Topic
from mooring.schemas.agent import SyncAnswer
from tests.api.conftest import Sandbox
from tests.nodes import observed, output, status
from tests.problems import problem
from tests.testbed.waiting import wait_until
from tests.waiters import waiters

MESSAGES = (output("hi\n"), status(0))
SHORT_S = 0.3

StartExec = Callable[[], Callable[[], httpx.Response]]


@pytest.fixture
def start_exec(sandbox: Sandbox) -> StartExec:
    """Starts a user's exec in a running instance, and returns a function that waits for the answer."""
    assignment = sandbox.running()
    path = f"/v1/instances/{assignment.instance_id}/exec"

    def begin() -> Callable[[], httpx.Response]:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(sandbox.client.post(path, json={"command": ["id"]}))
        )
        thread.start()

        def wait_for_answer() -> httpx.Response:
            thread.join(20)
            return answers[0]

        return wait_for_answer

    return begin


def test_a_waiting_call_is_answered_after_a_users_request(sandbox: Sandbox, start_exec: StartExec) -> None:
    received_at: list[float] = []

    def wait() -> None:
        (stream,) = sandbox.node.stream_requests(wait_s=30)
        received_at.append(time.monotonic())
        sandbox.node.bring(stream.id, *MESSAGES)

    waiting = threading.Thread(target=wait)
    waiting.start()
    signals, topic = sandbox.service.plane.database.signals, Topic.node_streams(sandbox.node.id)
    wait_until(lambda: waiters(signals, topic))
    began = time.monotonic()
    assert start_exec()().json()["stdout"] == "hi\n"
    waiting.join(20)
    assert received_at[0] - began < 10


def test_a_stream_known_to_the_node_does_not_end_its_wait(sandbox: Sandbox, start_exec: StartExec) -> None:
    wait_for_answer = start_exec()
    (stream,) = wait_until(sandbox.node.stream_requests)
    began = time.monotonic()
    assert sandbox.node.stream_requests(known=[stream.id], wait_s=SHORT_S) == [stream]
    assert time.monotonic() - began >= SHORT_S
    sandbox.node.bring(stream.id, *MESSAGES)
    assert wait_for_answer().status_code == 200
    assert sandbox.node.stream_requests() == []


def test_a_users_request_does_not_end_a_waiting_sync(sandbox: Sandbox, start_exec: StartExec) -> None:
    """Reports are expensive, so users must not be able to trigger them."""
    wait_for_answer = start_exec()
    (stream,) = wait_until(sandbox.node.stream_requests)
    began = time.monotonic()
    assert sandbox.node.sync(instances=None, wait_s=SHORT_S).streams == []
    assert time.monotonic() - began >= SHORT_S
    sandbox.node.bring(stream.id, *MESSAGES)
    assert wait_for_answer().status_code == 200


def test_an_agent_of_an_earlier_release_gets_streams_in_the_sync_answer(
    sandbox: Sandbox, start_exec: StartExec
) -> None:
    sandbox.node.facts = sandbox.node.facts.model_copy(update={"asks_for_streams": False})
    wait_for_answer = start_exec()
    (stream,) = wait_until(lambda: sandbox.node.sync(instances=None, wait_s=1).streams)
    sandbox.node.bring(stream.id, *MESSAGES)
    assert wait_for_answer().status_code == 200


def test_a_stale_session_gets_no_streams(sandbox: Sandbox, start_exec: StartExec) -> None:
    wait_for_answer = start_exec()
    (stream,) = wait_until(sandbox.node.stream_requests)
    old = sandbox.node.session
    sandbox.node.open_session()
    problem(sandbox.node.post_stream_requests(session=old), 409, "stale_session")
    sandbox.node.bring(stream.id, *MESSAGES)
    assert wait_for_answer().status_code == 200


def test_a_replaced_credential_gets_no_streams(sandbox: Sandbox) -> None:
    old = sandbox.node.http.headers["Authorization"]
    credential = sandbox.node.http.post("/agent/v1/credential").json()["credential"]
    sandbox.node.http.headers["Authorization"] = f"Bearer {credential}"
    assert sandbox.node.stream_requests() == []
    sandbox.node.sync()
    sandbox.node.http.headers["Authorization"] = old
    problem(sandbox.node.post_stream_requests(), 401, "unauthorized")


def test_a_brief_answer_leaves_out_a_known_desired_state(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    reported = observed(assignment, "running")

    def brief() -> SyncAnswer:
        return SyncAnswer.model_validate_json(sandbox.node.post_sync(reported, brief=True).content)

    known = sandbox.sync(reported)
    answer = brief()
    assert answer.brief
    assert (answer.generation, answer.assignments, answer.unchanged) == (known.generation, [], [])
    sandbox.client.post(f"/v1/instances/{assignment.instance_id}/stop", json={})
    answer = brief()
    assert not answer.brief
    wanted = [(each.instance_id, each.want) for each in (*answer.assignments, *answer.unchanged)]
    assert wanted == [(assignment.instance_id, "stopped")]
