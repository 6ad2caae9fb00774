"""Image digests and credentials, with real registries, one of which requires a password (R15, R16)."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.agent.sync.identity import StateDirectory
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason
from tests.agent.builders import pull_and_start
from tests.agent.docker_assignments import assignment, output_of, runtime_on, start, with_more
from tests.testbed.dockerd import DockerNode
from tests.testbed.registry import PASSWORDS, Registry
from tests.testbed.waiting import wait_until

NewRuntime = Callable[[], DockerRuntime]


@pytest.fixture
def new_runtime(node: DockerNode, tmp_path: Path) -> Iterator[NewRuntime]:
    """Creates runtimes of one agent, as if it restarted: they share the state in the test's folder."""
    made: list[DockerRuntime] = []

    def new() -> DockerRuntime:
        made.append(runtime_on(node, private_images=PrivateImages.of_node(StateDirectory(tmp_path))))
        return made[-1]

    yield new
    for runtime in made:
        runtime.close()


@pytest.fixture
def runtime(new_runtime: NewRuntime) -> DockerRuntime:
    return new_runtime()


def assign(image: str, user: str | None = None, password: str | None = None, **fields: Any) -> Assignment:
    """Return an assignment of this image with a user's credentials; without `password`, the correct one."""
    if user is not None:
        server = image.split("/", maxsplit=1)[0]
        sent = password or PASSWORDS[user]
        fields["registry"] = {"server": server, "username": user, "password": sent}
    return with_more(assignment(image=image), **fields)


def refusal_of(runtime: DockerRuntime, given: Assignment) -> Reason:
    with pytest.raises(StartRefused) as caught:
        start(runtime, given)
    return caught.value.reason


# --- R16: credentials


def test_a_private_image_is_pulled_with_the_projects_credentials(
    runtime: DockerRuntime,
    private_registry: Registry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    caplog.set_level(logging.DEBUG)
    image = private_registry.add_image("private/once", extra_layers=1)
    container = start(runtime, assign(image, "alice"))
    assert container.image_digest == private_registry.digest(image)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"private/once" in written  # proves that the next line searches the agent's files
    assert PASSWORDS["alice"].encode() not in written
    assert PASSWORDS["alice"] not in caplog.text
    assert not list(home.iterdir())


@pytest.mark.parametrize(
    ("user", "password"), [(None, None), ("alice", "wrong-and-quoted"), ("eve", "eve-s")]
)
def test_wrong_credentials_are_rejected_and_not_quoted(
    runtime: DockerRuntime, private_registry: Registry, user: str | None, password: str | None
) -> None:
    image = private_registry.add_image("private/refused", extra_layers=1)
    given = assign(image, user, password)
    reason = refusal_of(runtime, given)
    assert reason.code == "image_access_denied"
    assert image in reason.message
    assert "credentials" in reason.message
    if password is not None:
        assert password not in reason.message + repr(given)


def test_credentials_are_not_sent_to_another_registry(
    runtime: DockerRuntime, private_registry: Registry, registry: Registry
) -> None:
    """Otherwise the owner of that registry would get the password."""
    image = private_registry.add_image("private/elsewhere", extra_layers=1)
    credentials = {"server": registry.name, "username": "alice", "password": PASSWORDS["alice"]}
    assert refusal_of(runtime, assign(image, registry=credentials)).code == "image_access_denied"


# --- R15: digests


def test_a_moved_tag_does_not_change_a_started_instance(runtime: DockerRuntime, registry: Registry) -> None:
    image = registry.add_image("moving/tag", extra_layers=1)
    first = start(runtime, assign(image))
    registry.add_image("moving/tag", extra_layers=1, edition=2)
    assert registry.digest(image) != first.image_digest
    again = start(runtime, assign(image, image_digest=first.image_digest))
    assert again.image_digest == first.image_digest


def test_a_pinned_image_is_pulled_by_digest_after_its_tag_moved(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = registry.add_image("moving/pinned", extra_layers=1)
    digest = registry.digest(image)
    registry.add_image("moving/pinned", extra_layers=2, edition=2)
    container = start(runtime, assign(image, image_digest=digest))
    assert container.image_digest == digest
    assert output_of(runtime, container, ["ls", "/"]).count("layer-") == 1
    # The tag's current image is on the node as well.
    newer = start(runtime, assign(image))
    assert newer.image_digest == registry.digest(image) != digest
    assert start(runtime, assign(image, image_digest=digest)).image_digest == digest


def test_an_unknown_digest_is_rejected(runtime: DockerRuntime, registry: Registry) -> None:
    image = registry.add_image("moving/gone")
    start(runtime, assign(image))
    assert refusal_of(runtime, assign(image, image_digest=f"sha256:{0:064}")).code == "image_not_found"


# --- private images


def test_an_image_pulled_with_credentials_requires_credentials(
    runtime: DockerRuntime, new_runtime: NewRuntime, private_registry: Registry
) -> None:
    image = private_registry.add_image("tenant/a", extra_layers=1)
    digest = start(runtime, assign(image, "alice")).image_digest
    for agent in (runtime, new_runtime()):  # also after a restart of the agent
        for given in (
            assign(image),
            assign(image, "eve", "nobodys"),
            assign(image, image_digest=digest),
        ):
            assert refusal_of(agent, given).code == "image_access_denied"
        assert start(agent, assign(image, "bob")).image_digest == digest
        assert start(agent, assign(image, "alice", image_digest=digest)).image_digest == digest


def test_another_registry_cannot_grant_access_to_a_private_image(
    runtime: DockerRuntime, private_registry: Registry, registry: Registry
) -> None:
    """Anyone can run a registry that offers this digest: Docker does not download what it has."""
    image = private_registry.add_image("tenant/copied", extra_layers=1)
    start(runtime, assign(image, "alice"))
    same = registry.add_image("tenant/copied", extra_layers=1)
    assert registry.digest(same) == private_registry.digest(image)
    for name in (same, f"{same.rpartition(':')[0]}@{registry.digest(same)}"):
        assert refusal_of(runtime, assign(name)).code == "image_pull_failed"
        shown = {"server": registry.name, "username": "eve", "password": "accepted-here"}
        assert refusal_of(runtime, assign(name, registry=shown)).code == "image_pull_failed"
    start(runtime, assign(image, "alice"))


def test_an_unreachable_registry_delays_the_start(runtime: DockerRuntime, private_registry: Registry) -> None:
    image = private_registry.add_image("tenant/away", extra_layers=1)
    start(runtime, assign(image, "alice"))
    private_registry.stop()
    try:
        for given in (assign(image, "alice"), assign(image)):
            with pytest.raises(StartDelayed) as caught:
                start(runtime, given)
            assert caught.value.reason.code == "registry_unavailable"
            assert private_registry.name in caught.value.reason.message
    finally:
        private_registry.start()
    start(runtime, assign(image, "alice"))


def test_a_public_image_stays_public_after_a_pull_with_credentials(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    """For example with an account that only raises the rate limit."""
    image = registry.add_image("public/with-account", extra_layers=1)
    credentials = {"server": registry.name, "username": "alice", "password": "whatever"}
    start(runtime, assign(image, registry=credentials))
    start(runtime, assign(image))
    registry.freeze()
    try:
        start(runtime, assign(image))  # the registry is no longer contacted
    finally:
        registry.thaw()


def test_a_public_image_stays_public_when_a_private_registry_has_it_too(
    runtime: DockerRuntime, private_registry: Registry, registry: Registry
) -> None:
    free = registry.add_image("free/first", extra_layers=1)
    start(runtime, assign(free))
    same = private_registry.add_image("free/first", extra_layers=1)
    start(runtime, assign(same, "alice"))
    registry.freeze()
    private_registry.freeze()
    try:
        start(runtime, assign(free))
    finally:
        registry.thaw()
        private_registry.thaw()


def test_an_image_of_an_aborted_pull_is_private(
    node: DockerNode,
    runtime: DockerRuntime,
    new_runtime: NewRuntime,
    private_registry: Registry,
    tmp_path: Path,
) -> None:
    image = private_registry.add_image("tenant/died", extra_layers=1)
    repository = image.rpartition(":")[0]
    aborted = threading.Event()
    pull = threading.Thread(
        target=lambda: pull_and_start(runtime, assign(image, "alice"), lambda _reason: None, aborted.is_set)
    )
    private_registry.freeze()
    try:
        pull.start()
        saved = tmp_path / "private_images"
        wait_until(lambda: saved.exists() and repository in saved.read_text())
        aborted.set()
        pull.join()
    finally:
        private_registry.thaw()
    # As if the engine had completed the pull.
    auth = {"username": "alice", "password": PASSWORDS["alice"]}
    node.client.api.pull(repository, tag="1", auth_config=auth)
    later = new_runtime()
    assert refusal_of(later, assign(image)).code == "image_access_denied"
    start(later, assign(image, "bob"))
