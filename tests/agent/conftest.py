"""Fixtures for tests of the agent."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.gpus.reader import NvmlGpuReader
from mooring.agent.simulated.gpus import SimulatedGpuReader
from tests.agent.agents import agent_with
from tests.agent.control_planes import TinyControlPlane
from tests.agent.docker_assignments import runtime_on
from tests.agent.nvml_children import SELDOM, Standin
from tests.testbed.dockerd import DockerNode
from tests.testbed.nvml.standin import NvmlStandin
from tests.testbed.waiting import wait_until


@pytest.fixture
def node(docker_node: DockerNode) -> Iterator[DockerNode]:
    """The session's node; no container that a test leaves on it outlives the test."""
    yield docker_node
    docker_node.remove_containers()


@pytest.fixture
def runtime(node: DockerNode) -> Iterator[DockerRuntime]:
    """An agent's runtime on `node`."""
    with closing(runtime_on(node)) as made:
        yield made


@pytest.fixture
def docker_server(runtime: DockerRuntime, tmp_path: Path) -> Iterator[TinyControlPlane]:
    """The control plane of an agent on `node`."""
    with (
        closing(SimulatedGpuReader("gpu-1", 0, users=runtime.gpu_users)) as gpus,
        agent_with(runtime, gpus, gpus.container_of, tmp_path) as made,
    ):
        yield made


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlStandin:
    """One GPU that uses only the memory that the driver reserves."""
    return NvmlStandin(tmp_path, "gpus 1", "set 0 used_mib 5")


@pytest.fixture
def reader(nvml: NvmlStandin) -> Iterator[NvmlGpuReader]:
    """A reader that has read the GPUs of `nvml` once, and reads again only on request."""
    with closing(NvmlGpuReader(SELDOM, nvml.environment)) as made:
        assert wait_until(lambda: made.latest().samples)
        yield made


@pytest.fixture
def standin(tmp_path: Path) -> Standin:
    return lambda *lines, **options: NvmlStandin(tmp_path, *lines, **options)
