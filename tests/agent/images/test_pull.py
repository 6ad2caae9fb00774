"""Pulls from a real registry."""

import re
import threading

import pytest

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.images.pull import _Layers as Layers
from mooring.agent.images.pull import image_of
from mooring.agent.runtime import Container, RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.images import ImageName
from mooring_client.schemas.states import Reason
from tests.agent.builders import pull_and_start
from tests.agent.docker_assignments import assignment, runtime_on, start
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.registry import Registry
from tests.testbed.waiting import wait_until


def refusal_of(runtime: DockerRuntime, image: str) -> Reason:
    with pytest.raises(StartRefused) as caught:
        start(runtime, assignment(image=image))
    return caught.value.reason


def test_a_missing_image_is_pulled_and_its_digest_reported(
    runtime: DockerRuntime, registry: Registry
) -> None:
    image = registry.add_image("pulled/once", extra_layers=2)
    reasons: list[Reason] = []
    container = pull_and_start(runtime, assignment(image=image, command=None), reasons.append, lambda: False)
    assert container is not None
    assert container.status == "running"
    assert container.image_digest == registry.digest(image)
    assert {reason.code for reason in reasons} == {"pulling_image"}
    assert image in reasons[0].message


def test_an_image_is_pulled_by_its_digest(runtime: DockerRuntime, registry: Registry) -> None:
    tag = registry.add_image("pulled/digest")
    digest = registry.digest(tag)
    image = f"{tag.rpartition(':')[0]}@{digest}"
    assert start(runtime, assignment(image=image)).image_digest == digest


def test_an_image_on_the_node_is_not_pulled_again(runtime: DockerRuntime, registry: Registry) -> None:
    image = registry.add_image("pulled/kept")
    start(runtime, assignment(image=image))
    registry.freeze()
    try:
        start(runtime, assignment(image=image))
    finally:
        registry.thaw()


def test_a_start_with_a_missing_image_is_rejected(runtime: DockerRuntime, registry: Registry) -> None:
    assert refusal_of(runtime, f"{registry.name}/no/such:1").code == "image_not_found"
    registry.add_image("some/image")
    assert refusal_of(runtime, f"{registry.name}/some/image:9").code == "image_not_found"


def test_a_start_with_an_unreachable_registry_is_delayed(runtime: DockerRuntime) -> None:
    with pytest.raises(StartDelayed) as caught:
        start(runtime, assignment(image="127.0.0.1:1/some/image:1"))
    assert caught.value.reason.code == "registry_unavailable"
    assert caught.value.refusal is not None and caught.value.refusal.code == "image_pull_failed"


def test_concurrent_starts_share_one_pull(runtime: DockerRuntime, registry: Registry) -> None:
    image = registry.add_image("pulled/twice", extra_layers=1)
    log_before = registry.daemon.log.stat().st_size
    threads = [threading.Thread(target=start, args=(runtime, assignment(image=image))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = registry.daemon.log.read_bytes()[log_before:].decode()
    assert len(runtime.containers()[0]) == 4
    blobs = re.findall(r"GET /v2/pulled/twice/blobs/\S+", log)
    assert blobs
    assert len(blobs) == len(set(blobs))


def test_a_cancelled_pull_ends_while_the_registry_does_not_answer(
    node: DockerNode, runtime: DockerRuntime, registry: Registry
) -> None:
    image = registry.add_image("pulled/never", extra_layers=1)
    cancelled = threading.Event()
    results: list[Container | None] = []
    reasons: list[Reason] = []

    def pull() -> None:
        results.append(pull_and_start(runtime, assignment(image=image), reasons.append, cancelled.is_set))

    registry.freeze()
    try:
        # One thread pulls the image, the other waits for that pull.
        threads = [threading.Thread(target=pull) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(reasons) >= 2)
        cancelled.set()
        for thread in threads:
            thread.join(5)
    finally:
        registry.thaw()
    assert results == [None, None]
    assert node.client.api.containers(all=True) == []


def test_an_engine_that_dies_during_a_pull_is_unavailable(
    new_docker_node: NewDockerNode, registry: Registry
) -> None:
    node = new_docker_node()
    runtime = runtime_on(node)
    image = registry.add_image("pulled/broken")
    reasons: list[Reason] = []
    raised: list[RuntimeUnavailable] = []

    def pull() -> None:
        try:
            pull_and_start(runtime, assignment(image=image), reasons.append, lambda: False)
        except RuntimeUnavailable as error:
            raised.append(error)

    registry.freeze()
    try:
        puller = threading.Thread(target=pull)
        puller.start()
        wait_until(lambda: reasons)
        node.kill()
        puller.join(10)
    finally:
        registry.thaw()
    assert len(raised) == 1
    runtime.close()


def progress(layer: str, status: str, current: int = 0, total: int = 0) -> bytes:
    detail = f'{{"current": {current}, "total": {total}}}' if total else "{}"
    return f'{{"id": "{layer}", "status": "{status}", "progressDetail": {detail}}}\r\n'.encode()


GIB = 2**30


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "pulling x"),
        (b'{"status": "Pulling from x", "id": "latest"}\r\n', "pulling x"),
        (progress("a", "Pulling fs layer") + progress("b", "Already exists"), "pulling x: 1 of 2 layers"),
        (
            progress("a", "Downloading", GIB, 3 * GIB) + progress("b", "Downloading", GIB // 2, GIB),
            "pulling x: 0 of 2 layers, 1.5 of 4.0 GiB",
        ),
        (
            progress("a", "Downloading", 1, 2**21) + progress("a", "Download complete"),
            "pulling x: 0 of 1 layers, 2.0 of 2.0 MiB",
        ),
        (
            progress("a", "Downloading", 1, GIB) + progress("a", "Pull complete"),
            "pulling x: 1 of 1 layers, 1.0 of 1.0 GiB",
        ),
    ],
)
def test_progress_is_summed_for_any_chunk_size(lines: bytes, message: str) -> None:
    for size in (1, 7, 10_000):
        layers = Layers("x")
        for at in range(0, len(lines), size):
            layers.feed(lines[at : at + size])
        assert layers.reason().message == message


def test_an_error_line_is_raised() -> None:
    with pytest.raises(EngineRefused, match="manifest unknown"):
        Layers("x").feed(b'{"errorDetail": {"message": "manifest unknown"}, "error": "manifest unknown"}\r\n')


@pytest.mark.parametrize(
    ("reference", "repo_digests", "digest"),
    [
        ("x:1", [], None),
        ("r/x:1", ["other/x@sha256:1", "r/x@sha256:2"], "sha256:2"),
        ("busybox", ["docker.io/library/busybox@sha256:3"], "sha256:3"),
        ("docker.io/library/busybox", ["r/x@sha256:2", "busybox@sha256:3"], "sha256:3"),
        ("r/x:1", ["mirror/x@sha256:1"], "sha256:1"),
        ("r/x@sha256:9", ["r/x@sha256:2", "r/x@sha256:9"], "sha256:9"),
    ],
)
def test_the_reported_digest(reference: str, repo_digests: list[str], digest: str | None) -> None:
    inspected = {"Id": "sha256:id", "RepoDigests": repo_digests, "Config": None}
    assert image_of(inspected, ImageName.parse(reference)).digest == digest
