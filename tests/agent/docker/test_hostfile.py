"""The hostfile of members of groups, in real containers."""

import io
import re
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.schemas.agent import Assignment
from tests.agent.docker.test_overlay import on_other_network, stop_and_remove
from tests.agent.docker_assignments import output_of, runtime_on, start, stop, with_more
from tests.testbed.dockerd import DockerNode
from tests.testbed.images import BUSYBOX

CONTENT = "train-0 slots=8\ntrain-1 slots=8\n"


@pytest.fixture
def runtime(docker_node: DockerNode) -> Iterator[DockerRuntime]:
    made = runtime_on(docker_node)
    yield made
    made.close()


def with_hostfile(**spec: Any) -> Assignment:
    given = on_other_network("bridge", 0, **spec)
    assert given.group is not None
    return with_more(given, group={**given.group.model_dump(), "hostfile": CONTENT})


def image_with_member(node: DockerNode, name: str, member: tarfile.TarInfo) -> str:
    """The busybox image with a further member of the root folder."""
    api: Any = node.client.api
    container = api.create_container(BUSYBOX)["Id"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member)
    assert api.put_archive(container, "/", buffer.getvalue())
    api.commit(container, f"mooring-test/{name}", "1")
    api.remove_container(container)
    return f"mooring-test/{name}:1"


def member_of(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


def test_a_member_has_a_hostfile_also_after_a_restart(runtime: DockerRuntime) -> None:
    container = start(runtime, with_hostfile())
    found = output_of(runtime, container, ["sh", "-c", "ls -ln /job && cat /job/hostfile"])
    assert re.search(rf"-rw-r--r-- +1 0 +0 .* hostfile\n{CONTENT}$", found)
    stop(runtime, container, 1)
    runtime.restart(container)
    assert output_of(runtime, container, ["cat", "/job/hostfile"]) == CONTENT
    stop_and_remove(runtime, container)


def test_an_image_without_a_place_for_it_starts_without(
    runtime: DockerRuntime, docker_node: DockerNode
) -> None:
    image = image_with_member(docker_node, "file-at-job", member_of("job", tarfile.REGTYPE))
    container = start(runtime, with_hostfile(image=image))
    assert output_of(runtime, container, ["ls", "-d", "/job"]) == "/job\n"
    stop_and_remove(runtime, container)


def test_a_link_in_the_image_leads_nowhere_on_the_node(
    runtime: DockerRuntime, docker_node: DockerNode, tmp_path: Any
) -> None:
    target = f"../../../../../../../..{tmp_path}"
    image = image_with_member(docker_node, "link-at-job", member_of("job", tarfile.SYMTYPE, target))
    container = start(runtime, with_hostfile(image=image))
    assert list(tmp_path.iterdir()) == []
    stop_and_remove(runtime, container)
