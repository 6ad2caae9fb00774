"""The toolbox of instances on a node of the test bed, built from this machine's packages."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from mooring.agent.docker.client import Engine
from mooring.agent.docker.toolbox_mount import LABEL
from mooring.agent.toolbox.archive import Files
from mooring.agent.toolbox.build import Built, build
from mooring.agent.toolbox.programs import ToolboxError, collect
from tests.testbed import distributions, images
from tests.testbed.dockerd import DockerNode
from tests.testbed.images import WAIT
from tests.testbed.parts import skip

SCRATCH = "mooring-test/scratch:1"
GLIBC = "mooring-test/glibc:1"
DEBIAN = "mooring-test/debian:1"
MUSL = "mooring-test/musl:1"


def toolbox_files() -> Files:
    """Return the files. Skips the test if a package is missing; under CI=true, fails it."""
    found = _collected()
    if isinstance(found, str):
        skip(f"{found}; run tests/testbed/install.sh")
    return found


@cache
def _collected() -> Files | str:
    try:
        return collect()
    except ToolboxError as error:
        return str(error)


def build_on(node: DockerNode, files: Files | None = None) -> Built:
    with closing(Engine({"DOCKER_HOST": node.url}, timeout_s=60)) as engine:
        return build(engine, files or toolbox_files())


@contextmanager
def toolbox_on(node: DockerNode) -> Iterator[Built]:
    """The toolbox on a node, which has none afterwards."""
    try:
        yield build_on(node)
    finally:
        remove_toolboxes(node)


def remove_toolboxes(node: DockerNode) -> None:
    """Remove all containers and toolboxes of the node."""
    node.remove_containers()
    for volume in toolbox_volumes(node):
        node.client.api.remove_volume(volume)


def toolbox_volumes(node: DockerNode) -> list[str]:
    listed = node.client.api.volumes(filters={"label": LABEL})["Volumes"] or []
    return sorted(volume["Name"] for volume in listed)


def import_layer(node: DockerNode, name: str, layer: bytes | Path, changes: list[str]) -> str:
    repository, _, tag = name.partition(":")
    api = node.client.api
    if isinstance(layer, Path):
        api.import_image_from_file(str(layer), repository=repository, tag=tag or "1", changes=changes)
    else:
        api.import_image_from_data(layer, repository=repository, tag=tag or "1", changes=changes)
    return f"{repository}:{tag or '1'}"


def import_images(node: DockerNode) -> None:
    import_layer(node, SCRATCH, images.scratch_layer(), ['CMD ["/sleep", "100000"]'])
    import_layer(node, GLIBC, images.glibc_layer(), [images.COMMAND])


def import_distributions(node: DockerNode) -> None:
    """Skips the test if an image cannot be built; under CI=true, fails it."""
    for name, layer in ((DEBIAN, distributions.debian_layer()), (MUSL, distributions.musl_layer())):
        import_layer(node, name, layer, [f"CMD {json.dumps(WAIT)}"])
