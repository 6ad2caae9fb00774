"""Every error is a problem document, and every answer has a request ID."""

import pytest
from sqlalchemy import text

from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client, RunningService


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v2/instances", "/v1/instance", "/agent/v1/nothing", "/docs/x", "/%F0%9F"]
)
def test_an_unknown_path_is_404(shared: Client, path: str) -> None:
    problem(shared.get(path), 404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/instances/", "/v1/nodes/", "/healthz/", "/docs/", "/v1/instances/x/stop/"]
)
def test_a_path_with_a_trailing_slash_is_404_without_a_redirect(shared: Client, path: str) -> None:
    answer = shared.get(path, follow_redirects=False)
    problem(answer, 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/instances"),
        ("DELETE", "/v1/instances"),
        ("PUT", "/v1/nodes/x"),
        ("POST", "/healthz"),
        ("GET", "/agent/v1/sync"),
        ("OPTIONS", "/v1/instances"),
        ("TRACE", "/v1/instances"),
        ("PROPFIND", "/v1/gpus"),
    ],
)
def test_an_unknown_method_is_405(shared: Client, method: str, path: str) -> None:
    answer = shared.request(method, path)
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"]


def test_a_405_lists_the_allowed_methods(shared: Client) -> None:
    assert shared.options("/v1/instances").headers["allow"] == "GET, POST"
    assert shared.options("/v1/instances/x").headers["allow"] == "DELETE, GET, PATCH, PUT"


def test_valid_request_ids_are_echoed_and_others_are_replaced(shared: Client) -> None:
    for given in ("abc", "A-1_b.c:2", "x" * 128):
        for path in ("/healthz", "/v1/nothing", "/v1/instances/none"):
            answer = shared.get(path, headers={"X-Request-Id": given})
            assert answer.headers.get_list("x-request-id") == [given]
            if answer.status_code == 404:
                assert answer.json()["request_id"] == given
    for given in ("x" * 129, "a b", "<script>", "é", "", 'a"b', "a;b"):
        answer = shared.get("/v1/nothing", headers=[(b"X-Request-Id", given.encode())])
        assert problem(answer, 404)["request_id"].startswith("req_")
    assert shared.get("/healthz").headers["x-request-id"] != shared.get("/healthz").headers["x-request-id"]


def test_invalid_credentials_are_401_except_for_health_and_docs(shared: Client) -> None:
    document = shared.get("/openapi.json").json()
    with Client(str(shared.base_url), key="invalid") as caller:
        for path, operations in document["paths"].items():
            for method in operations:
                if path in {"/healthz", "/readyz", "/agent/v1/join"}:
                    continue
                answer = caller.request(
                    method,
                    path.replace("{", "").replace("}", ""),
                    content=b"{}" if method != "get" else None,
                    headers={"Content-Type": "application/json"},
                )
                problem(answer, 401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert caller.get("/docs").status_code == caller.get("/openapi.json").status_code == 200


def test_an_unexpected_error_is_a_500_with_its_request_id(
    service: RunningService, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    # A missing table is an error that no code expects and no retry repairs.
    with service.plane.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE instances RENAME TO instances_gone"))
    for _ in range(3):
        answer = client.get("/v1/instances", headers={"X-Request-Id": "find-me"})
        document = problem(answer, 500, "internal_error")
        assert document["request_id"] == "find-me"
        assert document["retryable"] is False
        assert "instances" not in document["detail"]  # only the log has the cause
    assert "find-me" in caplog.text
    with service.plane.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE instances_gone RENAME TO instances"))
    assert client.get("/v1/instances").status_code == 200


def test_answers_have_no_store_and_nosniff_headers(shared: Client) -> None:
    key = shared.post("/v1/api-keys", json={"name": "k", "role": "viewer"})
    for answer in (key, shared.get("/v1/instances"), shared.get("/v1/nothing"), shared.get("/healthz")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    assert shared.get("/docs/assets/start.js").headers["cache-control"] == "max-age=86400"


def test_concurrent_unauthorized_requests_are_all_401(shared: Client) -> None:
    with Client(str(shared.base_url), key="invalid") as caller:
        codes = run_concurrently(32, lambda _n: caller.get("/v1/instances").status_code)
    assert set(codes) == {401}
