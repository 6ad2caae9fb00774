"""Access of tenants to images on a node: local images, moved tags, and the operator's credentials.

Tenants are projects without `local_images`. With a real registry and a real daemon.
"""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.images.pulled_images import PulledImages
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.agent.sync.identity import StateDirectory
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason
from tests.agent.docker_assignments import assignment, output_of, runtime_on, start, with_more
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.registry import PASSWORDS, Registry

NewRuntime = Callable[[], DockerRuntime]


@pytest.fixture
def new_runtime(node: DockerNode, tmp_path: Path) -> Iterator[NewRuntime]:
    """Creates runtimes of one agent, as if it restarted: they share the state in the test's folder."""
    made: list[DockerRuntime] = []

    def new() -> DockerRuntime:
        state = StateDirectory(tmp_path)
        saved = {
            "private_images": PrivateImages.of_node(state),
            "pulled_images": PulledImages.of_node(state),
        }
        made.append(runtime_on(node, **saved))
        return made[-1]

    yield new
    for runtime in made:
        runtime.close()


@pytest.fixture
def runtime(new_runtime: NewRuntime) -> DockerRuntime:
    return new_runtime()


def tenant(image: str, user: str | None = None, **fields: Any) -> Assignment:
    """An assignment of a project without `local_images`, with this user's credentials of the registry."""
    if user is not None:
        server = image.split("/", maxsplit=1)[0]
        fields["registry"] = {"server": server, "username": user, "password": PASSWORDS[user]}
    return with_more(assignment(image=image), local_images=False, **fields)


def refusal_of(runtime: DockerRuntime, given: Assignment) -> Reason:
    with pytest.raises(StartRefused) as caught:
        start(runtime, given)
    return caught.value.reason


def build_on(node: DockerNode, name: str, marker: str) -> str:
    """Create an image that only this node has, as its operator would build it."""
    repository, _, tag = name.rpartition(":")
    node.client.api.import_image_from_data(
        images.busybox_layer(), repository=repository, tag=tag, changes=[f"ENV BUILT={marker}"]
    )
    return name


def test_a_tenant_cannot_use_a_local_image(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = build_on(node, f"{registry.name}/operators/own:1", "here")
    assert refusal_of(runtime, tenant(image)).code == "image_not_found"
    start(runtime, assignment(image=image))  # a project with `local_images` may run it


def test_a_tag_is_resolved_by_its_registry(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = registry.add_image("stale/tag", extra_layers=1)
    old = start(runtime, assignment(image=image)).image_digest
    registry.add_image("stale/tag", extra_layers=1, edition=2)
    assert start(runtime, tenant(image)).image_digest == registry.digest(image) != old


def test_a_tenants_pull_moves_no_tag_on_the_node(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    """Otherwise anyone who can push under that name could replace an image that another project runs."""
    image = registry.add_image("local/build", extra_layers=1)
    build_on(node, image, "by-the-operator")
    start(runtime, tenant(image))
    container = start(runtime, assignment(image=image))
    assert "by-the-operator" in output_of(runtime, container, ["env"])


def test_a_pulled_digest_starts_again_without_its_registry(
    new_runtime: NewRuntime, registry: Registry
) -> None:
    image = registry.add_image("pulled/once", extra_layers=1)
    digest = start(new_runtime(), tenant(image)).image_digest
    pinned = tenant(image, image_digest=digest)
    registry.stop()
    try:
        start(new_runtime(), pinned)  # also after a restart of the agent
        with pytest.raises(StartDelayed, match="retries"):
            start(new_runtime(), tenant(image))
    finally:
        registry.start()
    start(new_runtime(), tenant(image))


def test_an_image_pulled_by_hand_needs_its_registrys_permission(
    node: DockerNode, runtime: DockerRuntime, private_registry: Registry
) -> None:
    """Also by its digest: the daemon does not contact the registry for a digest that it has."""
    image = private_registry.add_image("by/hand", extra_layers=1)
    auth = {"username": "alice", "password": PASSWORDS["alice"]}
    node.client.api.pull(image.rpartition(":")[0], tag="1", auth_config=auth)
    digest = private_registry.digest(image)
    for given in (tenant(image), tenant(image, image_digest=digest)):
        assert refusal_of(runtime, given).code == "image_access_denied"
    assert start(runtime, tenant(image, "bob", image_digest=digest)).image_digest == digest


@pytest.mark.parametrize("local_images", [False, True])
def test_a_private_image_and_a_missing_one_have_the_same_error(
    runtime: DockerRuntime, private_registry: Registry, local_images: bool
) -> None:
    there = private_registry.add_image(f"oracle/there-{local_images}".lower(), extra_layers=1)
    digest = start(runtime, tenant(there, "alice")).image_digest
    missing = there.replace("there", "gone")
    for pinned in ({}, {"image_digest": digest}):
        private = refusal_of(runtime, with_more(tenant(there, **pinned), local_images=local_images))
        of_missing = refusal_of(runtime, with_more(tenant(missing, **pinned), local_images=local_images))
        assert private.code == of_missing.code
        assert private.message == of_missing.message.replace("gone", "there")


def test_tenants_do_not_pull_with_the_operators_credentials(
    node: DockerNode,
    private_registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = base64.b64encode(f"alice:{PASSWORDS['alice']}".encode()).decode()
    config = {"auths": {private_registry.name: {"auth": token}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    image = private_registry.add_image("operators/private", extra_layers=1)
    runtime = runtime_on(node)
    try:
        for local_images in (False, True):
            given = with_more(tenant(image), local_images=local_images)
            assert refusal_of(runtime, given).code == "image_access_denied"
    finally:
        runtime.close()
