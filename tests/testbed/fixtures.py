"""Fixtures for the real parts. Each starts when a test first requires it, and ends with the session.

If a part is missing, its fixture skips the test; under CI=true, it fails the test. Session fixtures are
shared: a test that kills, freezes or fills a part must create its own with a `new_…` factory.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from tests.testbed import images, isolation
from tests.testbed.dockerd import DockerNode
from tests.testbed.filesystems import require_filesystem
from tests.testbed.parts import require
from tests.testbed.postgres import PostgresCluster
from tests.testbed.registry import Registry
from tests.testbed.swarm import Swarm
from tests.testbed.workspace import Workspace

# docker-py 7.2 leaves the socket of a refused connection to the garbage collector. Its warning, turned into
# an error, would hit whichever test happens to run then.
REFUSED_UNIX_SOCKET = r"ignore:unclosed <socket\.socket .*family=(1|AddressFamily\.AF_UNIX):ResourceWarning"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", REFUSED_UNIX_SOCKET)


class NewDockerNode(Protocol):
    """Starts a node and loads the images. Skips the test if the kernel lacks the filesystem."""

    def __call__(
        self, *, live_restore: bool = True, filesystem: str = "", size_mib: int = 1024
    ) -> DockerNode: ...


class NewPostgresCluster(Protocol):
    """Starts a server, by default one that flushes to the disk. With `disk_mib`, it has its own disk."""

    def __call__(self, *, durable: bool = True, disk_mib: int | None = None) -> PostgresCluster: ...


@pytest.fixture(scope="session")
def workspace() -> Iterator[Workspace]:
    """This session's folder, subnet and ports. All that is created in it is removed at the end."""
    session_workspace = Workspace()
    yield session_workspace
    session_workspace.release()


@pytest.fixture(scope="session")
def root_address(workspace: Workspace) -> str:
    """The address at which nodes reach this process, for control planes under test."""
    require("docker")
    isolation.make_bridge(workspace.prefix, workspace.root_address)
    return workspace.root_address


@pytest.fixture(scope="session")
def docker_nodes(workspace: Workspace) -> Iterator[Callable[[int], list[DockerNode]]]:
    """The first `count` running nodes of the session; later calls return the same ones."""
    require("docker")
    nodes: list[DockerNode] = []

    def first(count: int) -> list[DockerNode]:
        while len(nodes) < count:
            nodes.append(_started(DockerNode(workspace)))
        return nodes[:count]

    yield first
    for node in nodes:
        node.destroy()


@pytest.fixture(scope="session")
def docker_node(docker_nodes: Callable[[int], list[DockerNode]]) -> DockerNode:
    return docker_nodes(1)[0]


@pytest.fixture
def new_docker_node(workspace: Workspace) -> Iterator[NewDockerNode]:
    """Nodes for this test only."""
    require("docker")
    nodes: list[DockerNode] = []

    def new(*, live_restore: bool = True, filesystem: str = "", size_mib: int = 1024) -> DockerNode:
        if filesystem:
            require_filesystem(workspace, filesystem)
        node = DockerNode(workspace, live_restore=live_restore, filesystem=filesystem, size_mib=size_mib)
        nodes.append(_started(node))
        return nodes[-1]

    yield new
    for node in nodes:
        node.destroy()


def _started(node: DockerNode) -> DockerNode:
    node.start()
    node.load_images()
    return node


@pytest.fixture(scope="session")
def swarm_of_two(workspace: Workspace) -> Iterator[Swarm]:
    """Two nodes of the session whose daemons are in one swarm: one manager, one worker."""
    require("docker")
    swarm = Swarm(workspace)
    swarm.form()
    yield swarm
    swarm.destroy()


@pytest.fixture(scope="session")
def busybox_image() -> str:
    """The reference of an image that every node has."""
    return images.BUSYBOX


@pytest.fixture(scope="session")
def cuda_env_image() -> str:
    """As `busybox_image`, with NVIDIA_VISIBLE_DEVICES=all in the image's environment."""
    return images.CUDA_ENV


@pytest.fixture(scope="session")
def registry(workspace: Workspace) -> Iterator[Registry]:
    require("registry")
    server = Registry(workspace)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def private_registry(workspace: Workspace) -> Iterator[Registry]:
    """A registry that requires a login with a name and password of `registry.PASSWORDS`."""
    require("registry")
    server = Registry(workspace, private=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def postgres_cluster(workspace: Workspace) -> Iterator[PostgresCluster]:
    """The session's server; it does not flush to the disk."""
    require("postgres")
    cluster = PostgresCluster(workspace, durable=False)
    cluster.start()
    yield cluster
    cluster.destroy()


@pytest.fixture
def new_postgres_cluster(workspace: Workspace) -> Iterator[NewPostgresCluster]:
    """Running servers for this test only."""
    require("postgres")
    clusters: list[PostgresCluster] = []

    def new(*, durable: bool = True, disk_mib: int | None = None) -> PostgresCluster:
        if disk_mib:
            require_filesystem(workspace, "ext4")
        clusters.append(PostgresCluster(workspace, durable=durable, disk_mib=disk_mib))
        clusters[-1].start()
        return clusters[-1]

    yield new
    for cluster in clusters:
        cluster.destroy()
