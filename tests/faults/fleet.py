"""Three replicas on one PostgreSQL, and three nodes, each with a balancer of its own to the replicas."""

import base64
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.balancer import Balancer, Link
from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.filesystems import small_file_system
from tests.testbed.postgres import PostgresCluster
from tests.testbed.wall_clock import WallClock
from tests.testbed.workspace import Workspace
from tests.walk.checker import Found, containers_on
from tests.walk.product import AgentProcess, ServerProcess

UNREACHABLE_AFTER_S = 15
LOST_AFTER_S = 45
READY_WITHIN_S = 60
_STATE_MIB = 16
_DISK_MIB = 2048


class Fleet:
    """The product as operators run it, but for shorter times until a node is unreachable and lost.

    Args:
        special: give PostgreSQL a filesystem of its own, the last node a Docker without live-restore and with
            a filesystem of its own, and its agent a small filesystem for its data; let the wall clocks of the
            last replica and the last agent be set.
    """

    def __init__(
        self,
        workspace: Workspace,
        host: str,
        folder: Path,
        rng: Random,
        *,
        replicas: int = 3,
        nodes: int = 3,
        special: bool = True,
    ) -> None:
        self.folder, self.host = folder, host
        self._workspace, self._rng = workspace, rng
        self._stack = ExitStack()
        try:
            self._start(replicas, nodes, special=special)
        except BaseException:
            self.close()
            raise

    def _start(self, replicas: int, nodes: int, *, special: bool) -> None:
        (self.folder / "clock").mkdir()
        self.clock = WallClock(self.folder / "clock")
        self.postgres = PostgresCluster(self._workspace, disk_mib=_DISK_MIB if special else None)
        self._stack.callback(self.postgres.destroy)
        self.postgres.start()
        self.database_url = self.postgres.create_database()
        self.replicas = self._new_replicas(replicas, special=special)
        for replica in self.replicas:
            replica.start(READY_WITHIN_S)
        self.public = self._new_balancer()
        self.links: list[Balancer] = []
        self.agents: list[AgentProcess] = []
        for index in range(nodes):
            self._add_node(index, is_special=special and index == nodes - 1)
        self.admin = Client(self.public.url)
        self._stack.callback(self.admin.close)
        for agent in self.agents:
            agent.await_ready(self.admin)

    @property
    def nodes(self) -> list[DockerNode]:
        return [agent.node for agent in self.agents]

    def containers(self) -> list[Found]:
        return [found for node in self.nodes for found in containers_on(node)]

    def node(self, agent: AgentProcess) -> dict[str, Any]:
        return self.admin.items("/v1/nodes", name=agent.node.name)[0]

    def heal(self) -> None:
        """End all faults: restart killed processes, thaw frozen ones, restore links."""
        for link in (self.public, *self.links):
            link.link = Link.OPEN
        if self.postgres.daemon.running:
            self.postgres.thaw()
        self.postgres.start()
        for agent in self.agents:
            for daemon in (agent.node.containerd, agent.node.dockerd):
                if daemon.running:
                    daemon.thaw()
            agent.node.reconnect()
            agent.node.start()
        # A server ends when its database was restored or has failed over: systemd would restart it.
        for program in (*self.replicas, *self.agents):
            if program.running:
                program.thaw()
            else:
                program.start()

    def ready(self) -> bool:
        """Whether all nodes are ready."""
        listed = self.admin.items("/v1/nodes")
        wanted = {node.name for node in self.nodes}
        return {node["name"] for node in listed if node["state"] == "ready"} >= wanted

    def keep_logs(self, folder: Path) -> None:
        """Copy the ends of all logs."""
        folder.mkdir(parents=True, exist_ok=True)
        logs = [(f"replica-{index}", each.log) for index, each in enumerate(self.replicas)]
        logs += [("postgres", self.postgres.daemon.log)]
        for agent in self.agents:
            name = agent.node.name
            logs += [(f"agent-{name}", agent.log), (f"dockerd-{name}", agent.node.dockerd.log)]
        for name, log in logs:
            with suppress(FileNotFoundError):
                (folder / f"{name}.log").write_bytes(log.read_bytes()[-200_000:])

    def close(self) -> None:
        self._stack.close()

    def _new_replicas(self, count: int, *, special: bool) -> list[ServerProcess]:
        settings = {
            "MOORING_DATABASE_URL": self.database_url,
            "MOORING_ENCRYPTION_KEYS": base64.urlsafe_b64encode(os.urandom(32)).decode(),
            "MOORING_AUDIT_KEYS": base64.urlsafe_b64encode(os.urandom(32)).decode(),
            "MOORING_UNREACHABLE_AFTER_S": str(UNREACHABLE_AFTER_S),
            "MOORING_LOST_AFTER_S": str(LOST_AFTER_S),
            "MOORING_RATE_LIMITS": "off",  # the clients of a trial come from one address
        }
        made = []
        for index in range(count):
            port = self._take_port()
            own = {"MOORING_ADVERTISE_URL": f"http://{self.host}:{port}"}
            server = ServerProcess(self.folder / f"replica-{index}", self.host, port, **settings, **own)
            server.forked = not (special and index == count - 1)
            if not server.forked:
                server.environment |= self.clock.environment
            self._stack.callback(server.kill)
            made.append(server)
        return made

    def _new_balancer(self) -> Balancer:
        addresses = [(self.host, int(each.environment["MOORING_PORT"])) for each in self.replicas]
        made = Balancer((self.host, self._take_port()), addresses, Random(self._rng.random()))
        self._stack.callback(made.close)
        return made

    def _add_node(self, index: int, *, is_special: bool) -> None:
        filesystem = "ext4" if is_special else ""
        node = DockerNode(
            self._workspace, live_restore=not is_special, filesystem=filesystem, size_mib=_DISK_MIB
        )
        self._stack.callback(node.destroy)
        node.start()
        node.load_images()
        link = self._new_balancer()
        folder = self.folder / f"agent-{index}"
        if is_special:
            self._stack.enter_context(small_file_system(folder, _STATE_MIB))
        agent = AgentProcess(node, self.replicas[0], folder)
        self._stack.callback(agent.engine.close)
        agent.environment |= {
            "MOORING_SERVER_URL": link.url,
            "MOORING_NODE_LABELS": f"number={index}",
            "MOORING_DISK_RESERVED_MIB": "0",
            "MOORING_DISK_LOW_MIB": "256",
        }
        agent.forked = not is_special
        if not agent.forked:
            agent.environment |= self.clock.environment
        self._stack.callback(agent.kill)
        agent.start()
        self.links.append(link)
        self.agents.append(agent)

    def _take_port(self) -> int:
        port = self._workspace.take_port()
        self._stack.callback(self._workspace.give_back_port, port)
        return port
