"""Allowed images and security profiles of projects; every start runs the image of the first start."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.api.conftest import Sandbox
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client

PYTORCH = "docker.io/pytorch/*"
FIRST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.fixture
def project(shared: Client) -> Iterator[str]:
    made = shared.post("/v1/projects", json={"name": f"images-{uuid4().hex[:8]}"}).json()
    yield made["id"]


def _change(client: Client, project: str, **fields: Any) -> None:
    answer = client.patch(f"/v1/projects/{project}", json=fields)
    assert answer.status_code == 200, answer.text


def test_only_images_that_match_a_pattern_are_accepted(sandbox: Sandbox, project: str) -> None:
    client = sandbox.client
    _change(client, project, allowed_images=[PYTORCH, "ghcr.io/org/x"])
    body = {"image": "ghcr.io/org/other:1", "project_id": project}
    rejected = problem(client.post("/v1/instances", json=body), 403, "image_not_allowed")
    assert (rejected["image"], rejected["allowed"]) == ("ghcr.io/org/other:1", [PYTORCH, "ghcr.io/org/x"])
    assert PYTORCH in rejected["detail"]
    problem(client.post("/v1/instances?dry_run=true", json=body), 403, "image_not_allowed")
    assert client.items("/v1/instances", project_id=project) == []
    sandbox.create(image="pytorch/pytorch:2.8", project_id=project)
    sandbox.create(image="index.docker.io/pytorch/pytorch@" + FIRST, project_id=project)
    sandbox.create(image="ghcr.io/org/x:1", project_id=project)
    sandbox.create(image="ghcr.io/org/other:1")  # an instance of another project
    _change(client, project, allowed_images=[])
    rejected = problem(client.post("/v1/instances", json=body), 403, "image_not_allowed")
    assert "none at all" in rejected["detail"]
    _change(client, project, allowed_images=None)
    sandbox.create(**body)


def test_a_stricter_list_applies_from_the_next_start(sandbox: Sandbox, project: str) -> None:
    client = sandbox.client
    assignment = sandbox.running(image="pytorch/pytorch:1", project_id=project)
    path = f"/v1/instances/{assignment.instance_id}"
    _change(client, project, allowed_images=["busybox"])
    problem(client.post(f"{path}/restart"), 403, "image_not_allowed")
    assert client.instance(assignment.instance_id)["state"] == "running"
    client.post(f"{path}/stop")
    sandbox.sync(observed(assignment, "exited", exit_code=0))
    problem(client.post(f"{path}/start"), 403, "image_not_allowed")
    assert client.instance(assignment.instance_id)["state"] == "stopped"
    _change(client, project, allowed_images=["busybox", PYTORCH])
    assert client.post(f"{path}/start").status_code == 202


@pytest.mark.parametrize(
    "pattern", ["python:3", "Pytorch/x", "a b", "", "/x", "ghcr.io/", "x[ab]", "x@sha256:1"]
)
def test_a_pattern_that_cannot_match_is_rejected(shared: Client, project: str, pattern: str) -> None:
    answer = shared.patch(f"/v1/projects/{project}", json={"allowed_images": [pattern]})
    assert problem(answer, 422)["errors"][0]["pointer"] == "/allowed_images/0"


def test_every_start_uses_the_digest_of_the_first_start(sandbox: Sandbox) -> None:
    first = sandbox.placed()
    assert first.image_digest is None
    sandbox.sync(observed(first, "running", image_digest=FIRST))
    path = f"/v1/instances/{first.instance_id}"

    sandbox.client.post(f"{path}/restart")
    (second,) = sandbox.sync(instances=None).assignments
    assert (second.attempt, second.image_digest) == (2, FIRST)
    # Another digest in a report does not change the digest to run.
    (assignment,) = sandbox.sync(observed(second, "running", image_digest=OTHER)).assignments
    assert assignment.image_digest == sandbox.client.instance(first.instance_id)["image_digest"] == FIRST

    sandbox.client.post(f"{path}/stop")
    sandbox.sync(observed(second, "exited", exit_code=0, image_digest=OTHER))
    sandbox.client.post(f"{path}/start")
    assert sandbox.client.wait(first.instance_id, "scheduled")["image_digest"] == FIRST
    third = sandbox.assignment(first.instance_id)
    assert (third.attempt, third.image_digest) == (3, FIRST)


def test_an_instance_without_a_reported_digest_has_none(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    assert sandbox.client.instance(assignment.instance_id)["image_digest"] is None
    assert sandbox.sync(observed(assignment, "running")).assignments[0].image_digest is None


def test_assignments_have_the_security_profile_of_their_project(sandbox: Sandbox, project: str) -> None:
    usual, strict = sandbox.placed(), sandbox.placed(project_id=project)
    assert (usual.security_profile, strict.security_profile) == ("standard", "standard")
    _change(sandbox.client, project, security_profile="strict")
    assert sandbox.assignment(usual.instance_id).security_profile == "standard"
    assert sandbox.assignment(strict.instance_id).security_profile == "strict"
