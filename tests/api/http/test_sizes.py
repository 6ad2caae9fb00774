"""Limits on the size of requests, of answers and of a project's rows."""

import pytest

from mooring.api.views import rendered
from mooring.control.tenants import row_limits
from mooring.db.tables import ApiKey, Member, Registry, Secret
from mooring_client.schemas.spec import MAX_TEXT_BYTES
from tests.problems import problem
from tests.service import Client

IMAGE = "mooring-test/busybox:1"


def test_the_text_of_a_request_is_limited_to_a_quarter_of_a_megabyte(client: Client) -> None:
    fits = {f"V{number}": "x" * 30_000 for number in range(8)}
    assert client.create(env=fits)["env"] == fits
    body = {"image": IMAGE, "env": fits, "command": ["x" * (MAX_TEXT_BYTES - 8 * 30_000)]}
    problem(client.post("/v1/instances", json=body), 422, "spec_too_large")


def test_a_page_of_large_instances_is_shortened_without_losing_any(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [client.create(gpus={"count": 1}, env={"V": "x" * 10_000})["id"] for _ in range(5)]
    monkeypatch.setattr(rendered, "_MAX_PAGE_BYTES", 25_000)
    seen, sizes, cursor = [], [], None
    while True:
        params = {"limit": 4} | ({"cursor": cursor} if cursor else {})
        answer = client.get("/v1/instances", params=params).json()
        seen += [item["id"] for item in answer["items"]]
        sizes.append(len(answer["items"]))
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]
    assert sizes == [2, 2, 1]


def test_the_rows_of_a_project_are_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ApiKey, Secret, Registry, Member):
        monkeypatch.setitem(row_limits.LIMITS, kind, (1, "of them"))
    assert client.post("/v1/secrets", json={"name": "one", "value": "x"}).status_code == 201
    problem(client.post("/v1/secrets", json={"name": "two", "value": "x"}), 409, "too_many")
    registry = {"username": "x", "password": "x"}
    assert client.post("/v1/registries", json={"server": "a.example", **registry}).status_code == 201
    problem(client.post("/v1/registries", json={"server": "b.example", **registry}), 409, "too_many")
    project = client.items("/v1/projects")[0]["id"]
    first, second = (client.post("/v1/users", json={"name": name}).json()["id"] for name in "ab")
    path = f"/v1/projects/{project}/members"
    for _ in range(2):  # changing a member's role adds no row
        assert client.put(f"{path}/{first}", json={"role": "viewer"}).status_code == 200
    problem(client.put(f"{path}/{second}", json={"role": "viewer"}), 409, "too_many")
    made = client.post("/v1/api-keys", json={"name": "one", "role": "viewer"}).json()
    problem(client.post("/v1/api-keys", json={"name": "two", "role": "viewer"}), 409, "too_many")
    assert client.delete(f"/v1/api-keys/{made['id']}").status_code == 204
    assert client.post("/v1/api-keys", json={"name": "two", "role": "viewer"}).status_code == 201
