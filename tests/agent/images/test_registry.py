"""Which image runs, and who may have it: real registries, one of which wants a password (R15, R16)."""

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
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment
from tests.agent.builders import pull_and_start
from tests.agent.docker_assignments import assignment, output_of, runtime_on, start, with_more
from tests.testbed.dockerd import DockerNode
from tests.testbed.registry import PASSWORDS, Registry
from tests.testbed.waiting import wait_until

NewRuntime = Callable[[], DockerRuntime]


@pytest.fixture
def new_runtime(node: DockerNode, tmp_path: Path) -> Iterator[NewRuntime]:
    """The runtime of an agent that remembers in the test's folder, as often as it is started anew."""
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


def wants(image: str, user: str | None = None, password: str | None = None, **fields: Any) -> Assignment:
    """An assignment of this image, in a project with these credentials of the image's registry."""
    if user is not None:
        server = image.split("/", maxsplit=1)[0]
        known = password or PASSWORDS[user]
        fields["registry"] = {"server": server, "username": user, "password": known}
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
    container = start(runtime, wants(image, "alice"))
    assert container.image_digest == private_registry.digest(image)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"private/once" in written  # so that what follows looks at what the agent wrote
    assert PASSWORDS["alice"].encode() not in written
    assert PASSWORDS["alice"] not in caplog.text
    assert not list(home.iterdir())


@pytest.mark.parametrize(
    ("user", "password"), [(None, None), ("alice", "wrong-and-quoted"), ("eve", "eve-s")]
)
def test_without_good_credentials_it_is_refused_and_none_is_quoted(
    runtime: DockerRuntime, private_registry: Registry, user: str | None, password: str | None
) -> None:
    image = private_registry.add_image("private/refused", extra_layers=1)
    given = wants(image, user, password)
    reason = refusal_of(runtime, given)
    assert reason.code == "image_access_denied"
    assert image in reason.message
    assert "credentials" in reason.message
    if password is not None:
        assert password not in reason.message + repr(given)


def test_credentials_are_not_shown_to_another_registry(
    runtime: DockerRuntime, private_registry: Registry, registry: Registry
) -> None:
    """Its owner would have the password."""
    image = private_registry.add_image("private/elsewhere", extra_layers=1)
    credentials = {"server": registry.name, "username": "alice", "password": PASSWORDS["alice"]}
    assert refusal_of(runtime, wants(image, registry=credentials)).code == "image_access_denied"


# --- R15: digests


def test_a_tag_that_moves_moves_nobody_who_has_started(runtime: DockerRuntime, registry: Registry) -> None:
    image = registry.add_image("moving/tag", extra_layers=1)
    first = start(runtime, wants(image))
    registry.add_image("moving/tag", extra_layers=1, edition=2)
    assert registry.digest(image) != first.image_digest
    again = start(runtime, wants(image, image_digest=first.image_digest))
    assert again.image_digest == first.image_digest


def test_a_pinned_image_is_pulled_by_its_digest_where_its_tag_has_moved(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = registry.add_image("moving/pinned", extra_layers=1)
    digest = registry.digest(image)
    registry.add_image("moving/pinned", extra_layers=2, edition=2)
    container = start(runtime, wants(image, image_digest=digest))
    assert container.image_digest == digest
    assert output_of(runtime, container, ["ls", "/"]).count("layer-") == 1
    # The tag's own image is another one, and is there beside it.
    newer = start(runtime, wants(image))
    assert newer.image_digest == registry.digest(image) != digest
    assert start(runtime, wants(image, image_digest=digest)).image_digest == digest


def test_a_digest_that_is_nowhere_is_refused(runtime: DockerRuntime, registry: Registry) -> None:
    image = registry.add_image("moving/gone")
    start(runtime, wants(image))
    assert refusal_of(runtime, wants(image, image_digest=f"sha256:{0:064}")).code == "image_not_found"


# --- an image that one project pulled is not another's


def test_what_credentials_pulled_is_not_given_to_others(
    runtime: DockerRuntime, new_runtime: NewRuntime, private_registry: Registry
) -> None:
    image = private_registry.add_image("tenant/a", extra_layers=1)
    digest = start(runtime, wants(image, "alice")).image_digest
    for agent in (runtime, new_runtime()):  # also not by an agent that was started since
        for given in (wants(image), wants(image, "eve", "nobodys"), wants(image, image_digest=digest)):
            assert refusal_of(agent, given).code == "image_access_denied"
        assert start(agent, wants(image, "bob")).image_digest == digest
        assert start(agent, wants(image, "alice", image_digest=digest)).image_digest == digest


def test_nor_under_the_name_of_another_registry(
    runtime: DockerRuntime, private_registry: Registry, registry: Registry
) -> None:
    """Anybody can run a registry that offers an image of this digest: Docker fetches nothing it has."""
    image = private_registry.add_image("tenant/copied", extra_layers=1)
    start(runtime, wants(image, "alice"))
    same = registry.add_image("tenant/copied", extra_layers=1)
    assert registry.digest(same) == private_registry.digest(image)
    for name in (same, f"{same.rpartition(':')[0]}@{registry.digest(same)}"):
        assert refusal_of(runtime, wants(name)).code == "image_pull_failed"
        shown = {"server": registry.name, "username": "eve", "password": "accepted-here"}
        assert refusal_of(runtime, wants(name, registry=shown)).code == "image_pull_failed"
    start(runtime, wants(image, "alice"))


def test_a_registry_that_is_away_is_asked_again(runtime: DockerRuntime, private_registry: Registry) -> None:
    image = private_registry.add_image("tenant/away", extra_layers=1)
    start(runtime, wants(image, "alice"))
    private_registry.stop()
    try:
        for given in (wants(image, "alice"), wants(image)):
            with pytest.raises(StartDelayed) as caught:
                start(runtime, given)
            assert caught.value.reason.code == "registry_unavailable"
            assert private_registry.name in caught.value.reason.message
    finally:
        private_registry.start()
    start(runtime, wants(image, "alice"))


def test_a_public_image_stays_free_when_somebody_pulls_it_with_credentials(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    """As those do who have an account for the sake of its rate limits."""
    image = registry.add_image("public/with-account", extra_layers=1)
    credentials = {"server": registry.name, "username": "alice", "password": "whatever"}
    start(runtime, wants(image, registry=credentials))
    start(runtime, wants(image))
    registry.freeze()
    try:
        start(runtime, wants(image))  # and from then on without a word to the registry
    finally:
        registry.thaw()


def test_what_was_there_for_all_stays_so(
    runtime: DockerRuntime, private_registry: Registry, registry: Registry
) -> None:
    free = registry.add_image("free/first", extra_layers=1)
    start(runtime, wants(free))
    same = private_registry.add_image("free/first", extra_layers=1)
    start(runtime, wants(same, "alice"))
    registry.freeze()
    private_registry.freeze()
    try:
        start(runtime, wants(free))
    finally:
        registry.thaw()
        private_registry.thaw()


def test_an_agent_that_dies_in_a_pull_has_guarded_what_comes_of_it(
    node: DockerNode,
    runtime: DockerRuntime,
    new_runtime: NewRuntime,
    private_registry: Registry,
    tmp_path: Path,
) -> None:
    image = private_registry.add_image("tenant/died", extra_layers=1)
    repository = image.rpartition(":")[0]
    given_up = threading.Event()
    pull = threading.Thread(
        target=lambda: pull_and_start(runtime, wants(image, "alice"), lambda _reason: None, given_up.is_set)
    )
    private_registry.freeze()
    try:
        pull.start()
        memory = tmp_path / "private_images"
        wait_until(lambda: memory.exists() and repository in memory.read_text())
        given_up.set()
        pull.join()
    finally:
        private_registry.thaw()
    # The engine comes to the end of it all the same.
    auth = {"username": "alice", "password": PASSWORDS["alice"]}
    node.client.api.pull(repository, tag="1", auth_config=auth)
    later = new_runtime()
    assert refusal_of(later, wants(image)).code == "image_access_denied"
    start(later, wants(image, "bob"))
