"""Templates: named specs with parameters, of a project or of all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select, update

from mooring.control.tenants import row_limits, shipped_templates
from mooring.db import tables
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.tenancy.tenants import make_key, post

SPEC = {"image": "busybox:${tag}", "command": ["echo", "${text}"], "gpus": {"count": "${gpus}"}}
PARAMETERS = {
    "tag": {"default": "1.36", "choices": ["1.36", "1.37"]},
    "text": {"description": "what to print"},
    "gpus": {"type": "integer", "default": 1},
}
NAMES = {"code-server", "comfyui", "jupyter", "pytorch-ssh", "skypilot-ready", "vllm"}


@pytest.fixture
def template(shared: Client) -> dict[str, Any]:
    return created(shared)


def created(client: Client, **fields: Any) -> dict[str, Any]:
    name = f"template-{uuid4().hex[:8]}"
    answer = client.post(
        "/v1/templates", json={"name": name, "spec": SPEC, "parameters": PARAMETERS, **fields}
    )
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/templates/{answer.json()['id']}"
    return dict(answer.json())


def rendered(client: Client, template: dict[str, Any], **parameters: Any) -> Any:
    return client.post(f"/v1/templates/{template['id']}/render", json={"parameters": parameters})


def test_a_rendered_template_can_be_created(shared: Client, template: dict[str, Any]) -> None:
    assert template["id"].startswith("tpl_")
    assert template["spec"] == SPEC
    answer = rendered(shared, template, text="a ${b} c", gpus=2)
    assert answer.status_code == 200
    spec = answer.json()["spec"]
    assert spec == {
        "image": "busybox:1.36",
        "command": ["echo", "a ${b} c"],
        "gpus": {"count": 2},
        "labels": {"template": template["name"]},
    }
    made = shared.post("/v1/instances", json=spec)
    assert made.status_code == 201, made.text
    shared.delete(f"/v1/instances/{made.json()['id']}")


@pytest.mark.parametrize(
    ("parameters", "pointer", "code"),
    [
        ({}, "/parameters/text", "missing_parameter"),
        ({"text": "x", "gpus": "2"}, "/parameters/gpus", "bad_value"),
        ({"text": "x", "gpus": True}, "/parameters/gpus", "bad_value"),
        ({"text": 5}, "/parameters/text", "bad_value"),
        ({"text": "x", "tag": "2"}, "/parameters/tag", "bad_value"),
        ({"text": "x", "other": 1}, "/parameters/other", "unknown_parameter"),
    ],
)
def test_parameters_that_do_not_fit_are_named(
    shared: Client, template: dict[str, Any], parameters: dict[str, Any], pointer: str, code: str
) -> None:
    found = problem(rendered(shared, template, **parameters), 422, "invalid_parameters")
    assert [(each["pointer"], each["code"]) for each in found["errors"]] == [(pointer, code)]
    assert "parameters of template-" in found["detail"]


def test_a_value_that_makes_no_instance_is_named(shared: Client, template: dict[str, Any]) -> None:
    found = problem(rendered(shared, template, text="x", gpus=-1), 422, "validation_failed")
    assert found["errors"][0]["pointer"] == "/spec/gpus/count"


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"spec": {"image": "busybox", "cpu": 1}}, "unknown_field", "/spec/cpu"),
        ({"spec": {"command": ["x"]}}, "required", "/spec/image"),
        ({"spec": {"image": "busybox", "user": "${who}"}}, "unknown_parameter", "/spec"),
        ({"spec": {"image": "busybox", "command": ["x" * 40_000]}}, "spec_too_large", ""),
        (
            {"spec": {"image": "busybox", "env": {"NVIDIA_VISIBLE_DEVICES": "all"}}},
            "reserved_env",
            "/spec/env",
        ),
        (
            {"parameters": {**PARAMETERS, "gpus": {"type": "integer", "default": "1"}}},
            "bad_value",
            "/parameters/gpus",
        ),
        ({"scope": "global", "project_id": "prj_x"}, "scope_of_no_project", ""),
    ],
)
def test_a_template_that_cannot_work_is_rejected(
    shared: Client, fields: dict[str, Any], code: str, pointer: str
) -> None:
    body = {"name": "wrong", "spec": SPEC, "parameters": PARAMETERS, **fields}
    found = problem(shared.post("/v1/templates", json=body), 422)
    assert (found["errors"][0]["code"], found["errors"][0]["pointer"]) == (code, pointer)


def test_a_name_is_unique_in_its_project(shared: Client, template: dict[str, Any]) -> None:
    body = {"name": template["name"], "spec": {"image": "busybox"}}
    problem(shared.post("/v1/templates", json=body), 409, "name_taken")
    # A global one of the same name is another.
    other = created(shared, scope="global", name=template["name"])
    assert other["project_id"] is None
    found = shared.items("/v1/templates", name=template["name"])
    assert {each["id"] for each in found} == {template["id"], other["id"]}
    assert shared.delete(f"/v1/templates/{other['id']}").status_code == 204


def test_applied_twice_nothing_changes(shared: Client) -> None:
    path = f"/v1/templates/by-name/applied-{uuid4().hex[:8]}"
    body = {"spec": SPEC, "parameters": PARAMETERS}
    first = shared.put(path, json=body)
    assert (first.status_code, first.headers["mooring-applied"]) == (201, "created")
    again = shared.put(path, json=body)
    assert (again.status_code, again.headers["mooring-applied"]) == (200, "unchanged")
    assert again.json() == first.json()
    plan = shared.put(f"{path}?dry_run=true", json={**body, "description": "new"}).json()
    assert (plan["outcome"], [each["pointer"] for each in plan["changes"]]) == ("changed", ["/description"])
    changed = shared.put(path, json={**body, "description": "new"}, headers={"If-Match": '"1"'})
    assert (changed.headers["mooring-applied"], changed.json()["version"]) == ("changed", 2)
    problem(shared.put(path, json=body, headers={"If-Match": '"1"'}), 412)
    problem(shared.delete(f"/v1/templates/{first.json()['id']}", headers={"If-Match": '"1"'}), 412)


def test_values_of_env_are_not_in_plans(shared: Client) -> None:
    path = f"/v1/templates/by-name/applied-{uuid4().hex[:8]}"
    assert shared.put(path, json={"spec": {"image": "busybox", "env": {"A": "one"}}}).status_code == 201
    plan = shared.put(f"{path}?dry_run=true", json={"spec": {"image": "busybox", "env": {"A": "two"}}})
    assert "two" not in plan.text
    assert plan.json()["changes"][0]["pointer"] == "/spec/env/A"


# --- global templates


@pytest.fixture
def member(shared_service: RunningService, shared: Client) -> Iterator[Client]:
    project = post(shared, "/v1/projects", name=f"templates-{uuid4().hex[:8]}")
    with Client(
        shared_service.url, make_key(shared, project_id=project["id"], role="owner")["key"]
    ) as client:
        yield client


def test_only_admins_change_global_templates(shared: Client, member: Client) -> None:
    body = {"name": "mine", "spec": {"image": "busybox"}, "scope": "global"}
    problem(member.post("/v1/templates", json=body), 403, "forbidden")
    problem(member.put("/v1/templates/by-name/jupyter", json={**body, "name": "jupyter"}), 403, "forbidden")
    (jupyter,) = member.items("/v1/templates", name="jupyter")
    problem(member.delete(f"/v1/templates/{jupyter['id']}"), 403, "forbidden")
    assert rendered(member, jupyter).json()["spec"]["ports"] == [{"container": 8888, "expose": "proxy"}]


def test_templates_of_other_projects_are_not_seen(member: Client, template: dict[str, Any]) -> None:
    assert {each["name"] for each in member.items("/v1/templates")} >= NAMES
    assert template["id"] not in {each["id"] for each in member.items("/v1/templates")}
    problem(member.get(f"/v1/templates/{template['id']}"), 404)
    problem(rendered(member, template, text="x"), 404)


def test_the_templates_of_a_project_are_deleted_with_it(shared: Client, member: Client) -> None:
    made = created(member)
    assert shared.delete(f"/v1/projects/{made['project_id']}").status_code == 204
    problem(shared.get(f"/v1/templates/{made['id']}"), 404)


def test_the_number_of_templates_of_a_project_is_limited(
    member: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_limits, "LIMITS", {**row_limits.LIMITS, tables.Template: (1, "templates")})
    created(member)
    body = {"name": "second", "spec": {"image": "busybox"}}
    problem(member.post("/v1/templates", json=body), 409, "too_many")
    problem(member.put("/v1/templates/by-name/second", json=body), 409, "too_many")


# --- the templates that come with Mooring


def test_every_shipped_template_makes_an_instance(shared: Client) -> None:
    found = {each["name"]: each for each in shared.items("/v1/templates") if each["shipped"]}
    assert found.keys() == NAMES == shipped_templates.files().keys()
    for name, each in found.items():
        given = {"model": "Qwen/Qwen3-8B"} if name == "vllm" else {}
        spec = rendered(shared, each, **given).json()["spec"]
        answer = shared.post("/v1/instances?dry_run=true", json=spec)
        assert answer.status_code == 200, (name, answer.text)
        assert each["description"]


def test_shipped_templates_belong_to_the_admin_after_the_first_start(tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")
    with running(settings) as service, service.client as admin:
        found = {each["name"]: each for each in admin.items("/v1/templates")}
        assert admin.delete(f"/v1/templates/{found['vllm']['id']}").status_code == 204
        pinned = {"spec": {"image": f"quay.io/jupyter/pytorch-notebook@sha256:{'a' * 64}"}, "scope": "global"}
        assert admin.put("/v1/templates/by-name/jupyter", json=pinned).status_code == 200
        with service.plane.database.write() as session:  # as an older release has stored it
            session.execute(
                update(tables.Template).where(tables.Template.name == "comfyui").values(description="old")
            )
    with running(settings) as service, service.client as admin:
        after = {each["name"]: each for each in admin.items("/v1/templates")}
        assert after.keys() == NAMES - {"vllm"}
        assert after["jupyter"]["spec"] == pinned["spec"]
        assert after["comfyui"] == found["comfyui"]
        # An admin's own one of the same name is another.
        assert admin.put("/v1/templates/by-name/vllm", json=pinned).status_code == 201
    with running(settings) as service, service.client as admin:
        assert [each["shipped"] for each in admin.items("/v1/templates", name="vllm")] == [False]
        with service.plane.database.read() as session:
            assert len(session.scalars(select(tables.Template)).all()) == len(NAMES) + 1


def test_a_mirror_replaces_the_registry_of_global_templates(tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")
    mirror = "registry.lan:5000/hub"
    with running(settings.model_copy(update={"template_mirror": mirror})) as service, service.client as admin:
        images = {}
        for name in ("jupyter", "skypilot-ready"):
            (found,) = admin.items("/v1/templates", name=name)
            images[name] = rendered(admin, found).json()["spec"]["image"]
        (found,) = admin.items("/v1/templates", name="skypilot-ready")
        same = rendered(admin, found, image=f"{mirror}/x:1").json()["spec"]["image"]
        own = rendered(admin, created(admin), text="x").json()["spec"]["image"]
    assert images == {
        "jupyter": f"{mirror}/quay.io/jupyter/pytorch-notebook:cuda12-python-3.12",
        "skypilot-ready": f"{mirror}/docker.io/library/skypilot-ready:latest",
    }
    assert (same, own) == (f"{mirror}/x:1", "busybox:1.36")
