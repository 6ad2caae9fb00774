"""Two nodes in one Docker Swarm, with networks that span both."""

from typing import Any

from tests.testbed.dockerd import DockerNode
from tests.testbed.workspace import Workspace

SWARM_PORT = 2377


class Swarm:
    """A manager and a worker. Docker supports swarms only without live-restore."""

    def __init__(self, workspace: Workspace) -> None:
        self.manager, self.worker = (DockerNode(workspace, live_restore=False) for _ in range(2))

    @property
    def nodes(self) -> tuple[DockerNode, DockerNode]:
        return self.manager, self.worker

    def form(self) -> None:
        for node in self.nodes:
            node.start()
            node.load_images()
        api: Any = self.manager.client.api
        api.init_swarm(advertise_addr=self.manager.address, listen_addr=self.manager.address)
        token = api.inspect_swarm()["JoinTokens"]["Worker"]
        joining: Any = self.worker.client.api
        joining.join_swarm(
            [f"{self.manager.address}:{SWARM_PORT}"],
            token,
            advertise_addr=self.worker.address,
            listen_addr=self.worker.address,
        )

    def clear(self) -> None:
        """Remove all containers from both nodes, and all networks but Docker's own."""
        for node in reversed(self.nodes):
            node.remove_containers()

    def destroy(self) -> None:
        for node in reversed(self.nodes):
            node.destroy()
