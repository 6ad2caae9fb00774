"""Which images a project may run; and that all starts of an instance run the image of its first one."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.api.conftest import Corner
from tests.nodes import seen
from tests.problems import problem
from tests.service import Client

OURS = "docker.io/pytorch/*"
FIRST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.fixture
def project(shared: Client) -> Iterator[str]:
    made = shared.post("/v1/projects", json={"name": f"images-{uuid4().hex[:8]}"}).json()
    yield made["id"]


def _change(client: Client, project: str, **fields: Any) -> None:
    answer = client.patch(f"/v1/projects/{project}", json=fields)
    assert answer.status_code == 200, answer.text


def test_only_images_that_a_pattern_names_are_taken(corner: Corner, project: str) -> None:
    client = corner.client
    _change(client, project, allowed_images=[OURS, "ghcr.io/org/x"])
    body = {"image": "ghcr.io/org/other:1", "project_id": project}
    refused = problem(client.post("/v1/instances", json=body), 403, "image_not_allowed")
    assert (refused["image"], refused["allowed"]) == ("ghcr.io/org/other:1", [OURS, "ghcr.io/org/x"])
    assert OURS in refused["detail"]
    problem(client.post("/v1/instances?dry_run=true", json=body), 403, "image_not_allowed")
    assert client.items("/v1/instances", project_id=project) == []
    corner.create(image="pytorch/pytorch:2.8", project_id=project)
    corner.create(image="index.docker.io/pytorch/pytorch@" + FIRST, project_id=project)
    corner.create(image="ghcr.io/org/x:1", project_id=project)
    corner.create(image="ghcr.io/org/other:1")  # of another project
    _change(client, project, allowed_images=[])
    refused = problem(client.post("/v1/instances", json=body), 403, "image_not_allowed")
    assert "none at all" in refused["detail"]
    _change(client, project, allowed_images=None)
    corner.create(**body)


def test_a_list_made_narrower_holds_from_the_next_start_on(corner: Corner, project: str) -> None:
    client = corner.client
    assignment = corner.running(image="pytorch/pytorch:1", project_id=project)
    one = f"/v1/instances/{assignment.instance_id}"
    _change(client, project, allowed_images=["busybox"])
    problem(client.post(f"{one}/restart"), 403, "image_not_allowed")
    assert client.instance(assignment.instance_id)["state"] == "running"
    client.post(f"{one}/stop")
    corner.sync(seen(assignment, "exited", exit_code=0))
    problem(client.post(f"{one}/start"), 403, "image_not_allowed")
    assert client.instance(assignment.instance_id)["state"] == "stopped"
    _change(client, project, allowed_images=["busybox", OURS])
    assert client.post(f"{one}/start").status_code == 202


@pytest.mark.parametrize(
    "pattern", ["python:3", "Pytorch/x", "a b", "", "/x", "ghcr.io/", "x[ab]", "x@sha256:1"]
)
def test_what_could_never_match_is_no_pattern(shared: Client, project: str, pattern: str) -> None:
    answer = shared.patch(f"/v1/projects/{project}", json={"allowed_images": [pattern]})
    assert problem(answer, 422)["errors"][0]["pointer"] == "/allowed_images/0"


def test_the_first_digest_is_the_one_of_every_start(corner: Corner) -> None:
    first = corner.placed()
    assert first.image_digest is None
    corner.sync(seen(first, "running", image_digest=FIRST))
    one = f"/v1/instances/{first.instance_id}"

    corner.client.post(f"{one}/restart")
    (second,) = corner.sync(instances=None).assignments
    assert (second.attempt, second.image_digest) == (2, FIRST)
    # A node that ran another image all the same does not change what is to run.
    (told,) = corner.sync(seen(second, "running", image_digest=OTHER)).assignments
    assert told.image_digest == corner.client.instance(first.instance_id)["image_digest"] == FIRST

    corner.client.post(f"{one}/stop")
    corner.sync(seen(second, "exited", exit_code=0, image_digest=OTHER))
    corner.client.post(f"{one}/start")
    assert corner.client.wait(first.instance_id, "scheduled")["image_digest"] == FIRST
    third = corner.assignment(first.instance_id)
    assert (third.attempt, third.image_digest) == (3, FIRST)


def test_an_image_without_a_digest_has_none(corner: Corner) -> None:
    assignment = corner.running()
    assert corner.client.instance(assignment.instance_id)["image_digest"] is None
    assert corner.sync(seen(assignment, "running")).assignments[0].image_digest is None


def test_the_projects_profile_goes_with_each_of_its_instances(corner: Corner, project: str) -> None:
    usual, strict = corner.placed(), corner.placed(project_id=project)
    assert (usual.security_profile, strict.security_profile) == ("standard", "standard")
    _change(corner.client, project, security_profile="strict")
    assert corner.assignment(usual.instance_id).security_profile == "standard"
    assert corner.assignment(strict.instance_id).security_profile == "strict"
