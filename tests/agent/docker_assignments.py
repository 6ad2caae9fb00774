"""Helpers of the Docker tests: assignments, runtimes on a node, and calls that an agent does not make."""

import hashlib
import io
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from mooring.agent.decide.reconcile import is_live
from mooring.agent.docker.create import Abilities, ContainerLimits, Image, container_config, container_name
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container
from mooring.schemas.agent import Assignment
from tests.agent import builders
from tests.agent.container_streams import run
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

CONTROL_PLANE = "cp-tests"
_numbers = itertools.count(1)


def assignment(
    *, instance_id: str | None = None, gpu_uuids: tuple[str, ...] = (), cpus: float = 1, **spec: Any
) -> Assignment:
    """An assignment of a new instance, or of `instance_id`. Every node of the test bed has its image.

    The project may run images that exist only on the node, and pull from the test bed's registries.
    """
    made = builders.assignment(
        instance_id=instance_id or f"inst-{next(_numbers)}",
        project_id="proj-1",
        gpu_uuids=gpu_uuids,
        cpus=cpus,
        **{"image": images.BUSYBOX, **spec},
    )
    return with_more(made, local_images=True, registry_listed=True)


def with_more(given: Assignment, **fields: Any) -> Assignment:
    """The assignment with these fields outside its spec, such as secrets, a registry or a pinned digest."""
    return Assignment.model_validate({**given.model_dump(), **fields})


def runtime_on(node: DockerNode, **options: Any) -> DockerRuntime:
    """An agent's runtime on this node. The caller closes it."""
    return DockerRuntime(
        **{
            "address": node.address,
            "control_plane_id": CONTROL_PLANE,
            "environment": {"DOCKER_HOST": node.url},
            **options,
        }
    )


def start(runtime: DockerRuntime, given: Assignment) -> Container:
    """Start a container, which must succeed."""
    container = builders.pull_and_start(runtime, given)
    assert container is not None
    return container


def stop(runtime: DockerRuntime, container: Container, timeout_s: float) -> None:
    """Send the stop signal, and SIGKILL after the timeout. Returns when the container has ended."""
    if not runtime.begin_stop(container):
        return
    try:
        wait_until(lambda: not _runs(runtime, container), timeout_s)
    except AssertionError:
        runtime.kill(container)


def _runs(runtime: DockerRuntime, container: Container) -> bool:
    found = runtime.containers()[0]
    return any(is_live(one) for one in found if one.container_id == container.container_id)


def the_ended(runtime: DockerRuntime) -> Container:
    """Wait until a container has ended, and return the first such container of the listing."""

    def ended() -> Container | None:
        return next((found for found in runtime.containers()[0] if found.status == "exited"), None)

    found = wait_until(ended)
    assert found is not None
    return found


def output_of(runtime: DockerRuntime, container: Container, command: list[str]) -> str:
    ran = run(runtime, container, *command)
    return (ran.stdout + ran.stderr).decode()


def all_containers(node: DockerNode) -> list[str]:
    return [entry["Id"] for entry in node.client.api.containers(all=True)]


def image_with(node: DockerNode, name: str, changes: list[str]) -> str:
    """The busybox image, changed by these lines of a Dockerfile."""
    repository = f"mooring-test/{name}"
    layer = images.busybox_layer()
    node.client.api.import_image_from_data(layer, repository=repository, tag="1", changes=changes)
    return f"{repository}:1"


def create_by_hand(
    node: DockerNode,
    given: Assignment,
    *,
    labels: dict[str, str] | None = None,
    host: dict[str, Any] | None = None,
    env: list[str] | None = None,
) -> str:
    """Create a container as the agent would, with these changes. `labels={}` removes all labels."""
    api: Any = node.client.api
    image = api.inspect_image(given.spec.image)["Id"]
    config = container_config(
        given, Image(id=image, digest=image), Abilities(), ContainerLimits(open_files=1024), CONTROL_PLANE
    )
    if labels is not None:
        config["Labels"] = config["Labels"] | labels if labels else {}
    config["HostConfig"] |= host or {}
    config["Env"] = env or config["Env"]
    name = container_name(given.instance_id, given.attempt)
    return str(api.create_container_from_config(config, name)["Id"])


class PortsTaken:
    """Occupies the TCP ports of a node from `first` to `last`, in a process outside Docker."""

    SCRIPT = (
        "import socket, sys\n"
        "held = []\n"
        "for port in range(int(sys.argv[1]), int(sys.argv[2]) + 1):\n"
        "    one = socket.socket(); one.bind(('', port)); one.listen(); held.append(one)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )

    def __init__(self, node: DockerNode, first: int, last: int) -> None:
        self._argv = node.inside(sys.executable, "-c", self.SCRIPT, str(first), str(last))

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"held\n"

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def image_of_config(node: DockerNode, name: str, **config: Any) -> str:
    """The busybox image with exactly this configuration, even if an image builder would reject it."""
    layer, tag = images.busybox_layer(), f"mooring-test/{name}:1"
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": [images.WAITER], **config},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    files = {
        "layer.tar": layer,
        "config.json": json.dumps(described).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file, content in files.items():
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    buffer.seek(0)
    node.client.images.load(buffer.read())
    return tag


def processes_in(container: Container) -> list[str]:
    """The NUL-separated command lines of a container's processes, as the host sees them."""
    found = []
    for cgroup in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if container.container_id in cgroup.read_text():
                found.append((cgroup.parent / "cmdline").read_text())
        except OSError:
            continue
    return found
