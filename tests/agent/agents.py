"""Runs an agent with the test's runtime and GPU reader, and the control plane that it reports to."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.gpus.reader import GpuReader
from mooring.agent.gpus.telemetry import ContainerOf, Machine
from mooring.agent.runtime import Runtime
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from tests.agent.control_planes import OWN, TOKEN, TinyControlPlane, control_plane


@contextmanager
def agent_with(
    runtime: Runtime,
    reader: GpuReader,
    container_of: ContainerOf,
    directory: Path,
    *,
    release_within_s: float = 1,
) -> Iterator[TinyControlPlane]:
    with control_plane() as server, ExitStack() as stack:
        client = stack.enter_context(closing(ControlPlaneClient(server.url)))
        identity = NodeIdentity.from_answer(client.join(TOKEN, "gpu-1", "host-1", OWN), OWN)
        client.identify(identity)
        state = StateDirectory(directory)
        state.save_joined(identity)
        stack.enter_context(closing(runtime))
        if isinstance(runtime, DockerRuntime):
            runtime.control_plane_id = identity.control_plane_id
        agent = Agent(
            identity=identity,
            state=state,
            runtime=runtime,
            gpus=reader,
            control_plane=client,
            machine=Machine("host-1", "10.0.0.7"),
            container_of=container_of,
            release_within_s=release_within_s,
        )
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield server
        finally:
            server.shut_down()
            agent.stop()
            thread.join(5)
