"""Who may run what is on a node: images that no registry gave, tags that moved, the operator's credentials.

Projects without `local_images` are the tenants here; a real registry and a real daemon.
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
from mooring.agent.runtime import StartRefused
from mooring.agent.sync.identity import StateDirectory
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment
from tests.agent.docker_assignments import assignment, output_of, runtime_on, start, with_more
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.registry import PASSWORDS, Registry

NewRuntime = Callable[[], DockerRuntime]


@pytest.fixture
def new_runtime(node: DockerNode, tmp_path: Path) -> Iterator[NewRuntime]:
    """The runtime of an agent that remembers in the test's folder, as often as it is started anew."""
    made: list[DockerRuntime] = []

    def new() -> DockerRuntime:
        state = StateDirectory(tmp_path)
        remembered = {
            "private_images": PrivateImages.of_node(state),
            "pulled_images": PulledImages.of_node(state),
        }
        made.append(runtime_on(node, **remembered))
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


def built_on(node: DockerNode, name: str, marker: str) -> str:
    """An image that only this node has, as its operator would build it."""
    repository, _, tag = name.rpartition(":")
    node.client.api.import_image_from_data(
        images.busybox_layer(), repository=repository, tag=tag, changes=[f"ENV BUILT={marker}"]
    )
    return name


def test_an_image_that_only_the_node_has_is_not_given_to_a_tenant(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = built_on(node, f"{registry.name}/operators/own:1", "here")
    assert refusal_of(runtime, tenant(image)).code == "image_not_found"
    start(runtime, assignment(image=image))  # a project with `local_images` may run it


def test_a_tag_is_what_its_registry_says_it_is(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = registry.add_image("stale/tag", extra_layers=1)
    old = start(runtime, assignment(image=image)).image_digest
    registry.add_image("stale/tag", extra_layers=1, edition=2)
    assert start(runtime, tenant(image)).image_digest == registry.digest(image) != old


def test_a_tenants_pull_moves_no_tag_of_the_node(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    """Otherwise who can publish under the name of another project's local build would replace that."""
    image = registry.add_image("local/build", extra_layers=1)
    built_on(node, image, "by-the-operator")
    start(runtime, tenant(image))
    container = start(runtime, assignment(image=image))
    assert "by-the-operator" in output_of(runtime, container, ["env"])


def test_what_was_pulled_is_given_again_by_its_digest_without_its_registry(
    new_runtime: NewRuntime, registry: Registry
) -> None:
    image = registry.add_image("pulled/once", extra_layers=1)
    digest = start(new_runtime(), tenant(image)).image_digest
    pinned = tenant(image, image_digest=digest)
    registry.stop()
    try:
        start(new_runtime(), pinned)  # also by an agent that was started since
        assert refusal_of(new_runtime(), tenant(image)).code == "image_pull_failed"
    finally:
        registry.start()
    start(new_runtime(), tenant(image))


def test_what_was_pulled_by_hand_is_asked_of_its_registry(
    node: DockerNode, runtime: DockerRuntime, private_registry: Registry
) -> None:
    """Also by its digest: the daemon pulls no digest that it has, and would ask nobody."""
    image = private_registry.add_image("by/hand", extra_layers=1)
    auth = {"username": "alice", "password": PASSWORDS["alice"]}
    node.client.api.pull(image.rpartition(":")[0], tag="1", auth_config=auth)
    digest = private_registry.digest(image)
    for given in (tenant(image), tenant(image, image_digest=digest)):
        assert refusal_of(runtime, given).code == "image_access_denied"
    assert start(runtime, tenant(image, "bob", image_digest=digest)).image_digest == digest


@pytest.mark.parametrize("local_images", [False, True])
def test_a_private_image_on_the_node_is_refused_in_the_words_for_a_missing_one(
    runtime: DockerRuntime, private_registry: Registry, local_images: bool
) -> None:
    there = private_registry.add_image(f"oracle/there-{local_images}".lower(), extra_layers=1)
    digest = start(runtime, tenant(there, "alice")).image_digest
    missing = there.replace("there", "gone")
    for pinned in ({}, {"image_digest": digest}):
        told = refusal_of(runtime, with_more(tenant(there, **pinned), local_images=local_images))
        of_missing = refusal_of(runtime, with_more(tenant(missing, **pinned), local_images=local_images))
        assert told.code == of_missing.code
        assert told.message == of_missing.message.replace("gone", "there")


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
