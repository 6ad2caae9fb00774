"""Request rates of callers, and failed credentials per address."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from mooring.auth.rate_limits import (
    FAILED_ATTEMPTS,
    PROJECT_FACTOR,
    REQUESTS,
    WINDOW_S,
    ActionClass,
    FailedAttempts,
    MovingWindow,
    RequestRates,
    network_of,
)
from mooring.core.access import Caller
from mooring_client.errors import TooManyRequests, Unauthorized
from tests.nodes import WireNode, join_token
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

JSON = {"Content-Type": "application/json"}
MISSING_INSTANCE = "/v1/instances/ins_missing"


@pytest.fixture(scope="module")
def limited(
    tmp_path_factory: pytest.TempPathFactory, migrated_template: Callable[[str], str]
) -> Iterator[RunningService]:
    """A service with rate limits; each test uses its own client address."""
    folder = tmp_path_factory.mktemp("limited")
    template = Path(migrated_template("sqlite").removeprefix("sqlite:///"))
    (folder / "mooring.db").write_bytes(template.read_bytes())
    with running(settings_for(f"sqlite:///{folder / 'mooring.db'}", folder / "data")) as made:
        yield made


@pytest.fixture(scope="module")
def admin(limited: RunningService) -> Iterator[Client]:
    with limited.client as made:
        yield made


def new_key(admin: Client, **fields: Any) -> dict[str, Any]:
    answer = admin.post("/v1/api-keys", json={"name": "limited", "role": "member", **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


@contextmanager
def client_from(service: RunningService, address: str, key: str = "invalid") -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(local_address=address)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=service.url, transport=transport, headers=headers, timeout=20) as made:
        yield made


@pytest.fixture
def member(limited: RunningService, admin: Client) -> Iterator[Client]:
    with Client(limited.url, new_key(admin)["key"]) as made:
        yield made


def _state(answer: httpx.Response) -> tuple[str, int, int]:
    """Class, remaining requests and seconds of the RateLimit header; fails if the policy header differs."""
    policy = re.fullmatch(r'"(\w+)";q=(\d+);w=(\d+)', answer.headers["ratelimit-policy"])
    state = re.fullmatch(r'"(\w+)";r=(\d+);t=(\d+)', answer.headers["ratelimit"])
    assert policy, answer.headers
    assert state, answer.headers
    assert policy[1] == state[1]
    assert (int(policy[2]), int(policy[3])) == (REQUESTS[ActionClass(policy[1])], WINDOW_S)
    return state[1], int(state[2]), int(state[3])


def test_every_answer_reports_the_callers_rate_limit(member: Client) -> None:
    first = _state(member.get("/v1/me"))
    assert first[:2] == ("read", REQUESTS[ActionClass.READ] - 1)
    assert 0 < first[2] <= WINDOW_S
    assert _state(member.get(MISSING_INSTANCE))[1] == first[1] - 1  # 404
    assert _state(member.get("/v1/users/usr_x"))[1] == first[1] - 2  # 403
    assert _state(member.get("/v1/instances?limit=no"))[1] == first[1] - 3  # 422
    writes = [
        _state(member.post("/v1/instances", json={})),  # 422
        _state(member.post("/v1/instances", content=b"image=a")),  # 415
        _state(member.delete(MISSING_INSTANCE)),  # 404
    ]
    most = REQUESTS[ActionClass.WRITE]
    assert [state[:2] for state in writes] == [("write", most - 1), ("write", most - 2), ("write", most - 3)]
    assert _state(member.post(f"{MISSING_INSTANCE}/exec", json={"command": ["id"]}))[0] == "exec"
    assert _state(member.get("/v1/events"))[0] == "stream"


def test_admins_and_public_paths_have_no_rate_limit(admin: Client, member: Client) -> None:
    for answer in (admin.get("/v1/me"), admin.post("/v1/instances", json={}), member.get("/healthz")):
        assert not {"ratelimit", "ratelimit-policy"} & answer.headers.keys()


def test_a_request_over_the_limit_gets_429_and_retry_after_before_its_body_is_read(
    limited: RunningService, admin: Client, member: Client
) -> None:
    command = f"{MISSING_INSTANCE}/exec"
    for _ in range(REQUESTS[ActionClass.EXEC]):
        problem(member.post(command, json={"command": ["id"]}), 404)
    refused = member.post(command, content=b"not even JSON")
    document = problem(refused, 429, "too_many_requests")
    assert document["retryable"] is True
    name, remaining, seconds = _state(refused)
    assert (name, remaining) == ("exec", 0)
    assert refused.headers["retry-after"] == str(seconds)
    assert 0 < seconds <= WINDOW_S
    # Other classes, other keys and admins are not limited.
    assert member.get("/v1/me").status_code == 200
    with Client(limited.url, new_key(admin)["key"]) as other:
        problem(other.post(command, json={"command": ["id"]}), 404)
    problem(admin.post(command, json={"command": ["id"]}), 404)


def test_rate_limits_can_be_turned_off(database_url: str, tmp_path: Path) -> None:
    with (
        running(settings_for(database_url, tmp_path / "data", rate_limits="off")) as service,
        service.client as admin,
        Client(service.url, new_key(admin)["key"]) as member,
        Client(service.url, "invalid") as unauthorized_client,
    ):
        for _ in range(REQUESTS[ActionClass.EXEC] + 1):
            answer = member.post(f"{MISSING_INSTANCE}/exec", json={"command": ["id"]})
            problem(answer, 404)
        assert "ratelimit" not in answer.headers
        for _ in range(FAILED_ATTEMPTS + 1):
            problem(unauthorized_client.get("/v1/me"), 401, "unauthorized")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_window_admits_requests_after_the_announced_time() -> None:
    clock = Clock()
    window = MovingWindow(3, 60, clock)
    for _ in range(3):
        assert window.take("key").admitted
        clock.now += 10
    refused = window.take("key")
    assert (refused.admitted, refused.remaining, refused.more_in_s) == (False, 0, 30)
    assert window.wait_s_of("key") == 30
    clock.now += 29.9
    assert window.take("key").more_in_s == 1
    clock.now += 0.1
    again = window.take("key")
    # The rejected requests did not count.
    assert (again.admitted, again.remaining, again.more_in_s) == (True, 0, 10)
    assert window.take("other").remaining == 2


def test_more_keys_do_not_raise_the_limit_of_a_project() -> None:
    clock = Clock()
    rates = RequestRates(on=True, clock=clock)

    def take(key: str, project: str) -> tuple[dict[bytes, bytes], TooManyRequests | None]:
        headers, error = rates.take(Caller(key, "key", key, project_id=project), ActionClass.EXEC)
        return dict(headers), error

    most = REQUESTS[ActionClass.EXEC] * PROJECT_FACTOR
    for number in range(most):
        assert take(f"key_{number}", "a")[1] is None
    headers, error = take("key_new", "a")
    assert error is not None
    assert error.retry_after_s == WINDOW_S
    assert headers[b"ratelimit-policy"] == f'"exec";q={most};w={WINDOW_S}'.encode()
    assert headers[b"ratelimit"] == f'"exec";r=0;t={WINDOW_S}'.encode()
    assert take("key_b", "b")[1] is None
    clock.now += WINDOW_S
    assert take("key_new", "a")[1] is None


def test_expired_windows_are_dropped_and_the_number_of_addresses_is_bounded() -> None:
    clock = Clock()
    failures = FailedAttempts(on=True, clock=clock)

    def fail(address: str) -> None:
        with pytest.raises(Unauthorized), failures.watched(address):
            raise Unauthorized("no")

    for number in range(120_000):
        fail(f"2001:db8:{number >> 16:x}:{number & 0xFFFF:x}::1")
    assert len(failures) == 100_000
    clock.now += WINDOW_S
    fail("10.0.0.1")
    assert len(failures) == 1


def test_addresses_are_counted_by_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1:2:3") != network_of("2001:db8:0:1::1")
    assert network_of("10.0.0.1") == network_of("::ffff:10.0.0.1") != network_of("10.0.0.2")
    assert network_of(None) == network_of("x" * 10_000)


def _guess(client: httpx.Client, number: int) -> httpx.Response:
    return client.get("/v1/me", headers={"Authorization": f"Bearer mk_guess-{number}"})


@contextmanager
def _statements(service: RunningService) -> Iterator[list[str]]:
    """The SQL statements about credentials within the block."""
    recorded: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "api_keys" in statement or "credential_hash" in statement or "join_tokens" in statement:
            recorded.append(statement)

    engine = service.plane.database.engine
    event.listen(engine, "before_cursor_execute", record)
    try:
        yield recorded
    finally:
        event.remove(engine, "before_cursor_execute", record)


def test_keys_from_an_address_with_too_many_failures_are_rejected_without_a_query(
    limited: RunningService, admin: Client
) -> None:
    good, unused = new_key(admin), new_key(admin)["key"]
    with client_from(limited, "127.0.1.1") as attacker, client_from(limited, "127.0.1.2") as neighbour:
        own = {"Authorization": f"Bearer {good['key']}"}
        assert attacker.get("/v1/me", headers=own).status_code == 200
        for number in range(FAILED_ATTEMPTS):
            problem(_guess(attacker, number), 401, "unauthorized")
        with _statements(limited) as statements:
            refused = _guess(attacker, -1)
            problem(refused, 429, "too_many_requests")
            # A key that has not been used yet is rejected too, even if it is valid.
            problem(attacker.get("/v1/me", headers={"Authorization": f"Bearer {unused}"}), 429)
            problem(attacker.post("/agent/v1/session"), 429)
            problem(attacker.post("/agent/v1/join", json={"token": "mj_x", "hostname": "h"}), 429)
        assert statements == []
        assert 0 < int(refused.headers["retry-after"]) <= WINDOW_S
        # A key that has worked before is still checked, and other addresses are not affected.
        with _statements(limited) as statements:
            wait_until(lambda: attacker.get("/v1/me", headers=own).status_code == 200 and statements)
        problem(_guess(neighbour, 0), 401)
        # Once revoked, the key is rejected like an unknown one.
        admin.delete(f"/v1/api-keys/{good['id']}")
        wait_until(lambda: attacker.get("/v1/me", headers=own).status_code == 401)
        problem(attacker.get("/v1/me", headers=own), 429)


def test_failed_node_credentials_and_join_tokens_count(limited: RunningService, admin: Client) -> None:
    with client_from(limited, "127.0.2.1") as attacker:
        for number in range(FAILED_ATTEMPTS // 2):
            body = {"token": f"mj_guess-{number}", "hostname": "h"}
            problem(attacker.post("/agent/v1/join", json=body), 401)
            problem(attacker.post("/agent/v1/session"), 401)
        problem(attacker.post("/agent/v1/session"), 429, "too_many_requests")
        real = {"token": join_token(admin), "hostname": "h", "node_name": "late"}
        problem(attacker.post("/agent/v1/join", json=real), 429, "too_many_requests")
    with client_from(limited, "127.0.2.2") as honest:
        assert honest.post("/agent/v1/join", json=real).status_code == 201  # the token is not used up


def test_a_node_at_a_blocked_address_keeps_working(limited: RunningService, admin: Client) -> None:
    node = WireNode(admin, "beside-a-guesser")
    with client_from(limited, "127.0.8.1", node.identity.credential) as beside:
        for number in range(FAILED_ATTEMPTS):
            problem(_guess(beside, number), 401)
        problem(_guess(beside, -1), 429)
        assert beside.post("/agent/v1/session").status_code == 200
    node.close()


def test_requests_without_credentials_do_not_count_as_attempts(limited: RunningService) -> None:
    with client_from(limited, "127.0.3.1") as client:
        for _ in range(FAILED_ATTEMPTS + 5):
            problem(client.get("/v1/me", headers={"Authorization": ""}), 401)
        problem(_guess(client, 0), 401)


def test_unknown_revoked_and_expired_keys_get_the_same_answer(limited: RunningService, admin: Client) -> None:
    revoked, expired = new_key(admin), new_key(admin, expires_at="2999-01-01T00:00:00Z")
    admin.delete(f"/v1/api-keys/{revoked['id']}")
    with limited.plane.database.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE api_keys SET expires_at = '2020-01-01 00:00:00' WHERE id = ?", (expired["id"],)
        )
    with client_from(limited, "127.0.4.1") as client:
        answers = []
        for key in ("mk_unknown", revoked["key"], expired["key"], revoked["key"][:-1] + "x"):
            with _statements(limited) as statements:
                answer = client.get("/v1/me", headers={"Authorization": f"Bearer {key}"})
            document = problem(answer, 401, "unauthorized")
            answers.append((document["detail"], len(statements)))
        assert len(set(answers)) == 1, answers


def test_forwarded_for_is_ignored_without_a_trusted_proxy(limited: RunningService) -> None:
    with client_from(limited, "127.0.5.1") as attacker:
        for number in range(FAILED_ATTEMPTS):
            attacker.headers["X-Forwarded-For"] = f"203.0.113.{number}"
            problem(_guess(attacker, number), 401)
        problem(_guess(attacker, -1), 429)


def test_forwarded_for_is_read_from_trusted_proxies_only(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(
        database_url, tmp_path / "data", behind_tls_proxy=True, trusted_proxies="127.0.6.0/28"
    )
    with (
        running(settings) as service,
        client_from(service, "127.0.6.1") as proxy,
        client_from(service, "127.0.7.1") as direct,
    ):
        for client, status in ((proxy, 401), (direct, 429)):
            for number in range(FAILED_ATTEMPTS):
                client.headers["X-Forwarded-For"] = f"10.9.9.9, 203.0.113.{number}"
                problem(_guess(client, number), 401)
            problem(_guess(client, -1), status)
        # The proxy wrote the last address; the client itself may have sent the others.
        for number in range(FAILED_ATTEMPTS):
            proxy.headers["X-Forwarded-For"] = f"198.51.100.{number}, 192.0.2.1"
            problem(_guess(proxy, number), 401)
        problem(_guess(proxy, -1), 429)


def test_another_error_is_not_counted_as_a_failed_attempt() -> None:
    failures = FailedAttempts(on=True)
    with pytest.raises(TooManyRequests, match="elsewhere"), failures.watched("10.0.0.1"):
        raise TooManyRequests("elsewhere")
    assert len(failures) == 0


def test_streams_of_a_revoked_key_do_not_count_as_attempts(limited: RunningService, admin: Client) -> None:
    key, fresh = new_key(admin), new_key(admin)["key"]
    events = {"Accept": "text/event-stream"}
    with client_from(limited, "127.0.9.1", key["key"]) as member, ExitStack() as streams:
        opened = [
            streams.enter_context(member.stream("GET", "/v1/events", headers=events))
            for _ in range(FAILED_ATTEMPTS + 1)
        ]
        assert admin.delete(f"/v1/api-keys/{key['id']}").status_code == 204
        for answer in opened:
            assert "unauthorized" in answer.read().decode()
        own = {"Authorization": f"Bearer {fresh}"}
        assert member.get("/v1/me", headers=own).status_code == 200
