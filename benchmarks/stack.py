"""Mooring on the test bed, with the same components as in the end-to-end tests."""

import os
import shutil
import tempfile
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.nodes import join_token
from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import AgentProcess, Program, ServerProcess

from mooring.core.simulation import parse_fleets

LOWEST_PRIORITY = 19
# Tests shorten the interval; benchmarks measure the default.
AS_SHIPPED = {"MOORING_REPORT_INTERVAL_S": "5"}


@contextmanager
def workspace() -> Iterator[Workspace]:
    made = Workspace()
    try:
        yield made
    finally:
        made.release()


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="mooring-bench-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@dataclass(frozen=True)
class Stack:
    bed: Workspace
    server: ServerProcess
    agent: AgentProcess
    node: DockerNode
    admin: Client


@contextmanager
def on_docker(gpus: int = 8, *, through_proxy: bool = True) -> Iterator[Stack]:
    """A server and one node with a real dockerd and simulated GPUs.

    Args:
        through_proxy: the agent reaches dockerd through the test bed's proxy, which costs CPU for each byte.
    """
    with ExitStack() as exits:
        bed, base = exits.enter_context(workspace()), exits.enter_context(folder())
        node = DockerNode(bed)
        exits.callback(node.destroy)
        node.start()
        node.load_images()
        server = ServerProcess(base / "server", bed.root_address, bed.take_port(), **AS_SHIPPED)
        server.start(within_s=120)
        exits.callback(server.stop)
        settings = {} if through_proxy else {"DOCKER_HOST": node.url}
        agent = AgentProcess(node, server, base / "agent", gpus, **settings)
        agent.start()
        exits.callback(agent.stop)
        admin = exits.enter_context(server.client)
        agent.await_ready(admin)
        yield Stack(bed, server, agent, node, admin)


@contextmanager
def server_alone(host: str = "127.0.0.1", **settings: str) -> Iterator[ServerProcess]:
    """A server on loopback, without nodes."""
    with workspace() as bed, folder() as base:
        server = ServerProcess(base / "server", host, bed.take_port(), **AS_SHIPPED, **settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def servers(database: str, replicas: int) -> Iterator[list[ServerProcess]]:
    """A server on SQLite, or replicas on PostgreSQL, without nodes."""
    if database == "sqlite":
        with server_alone() as server:
            yield [server]
    else:
        with replicas_on_postgresql(replicas) as started:
            yield started


@contextmanager
def replicas_on_postgresql(count: int) -> Iterator[list[ServerProcess]]:
    """Servers on loopback that share all keys and a new PostgreSQL, which flushes to disk."""
    keys = {name: urlsafe_b64encode(os.urandom(32)).decode() for name in ("ENCRYPTION_KEYS", "AUDIT_KEYS")}
    with ExitStack() as exits:
        bed, base = exits.enter_context(workspace()), exits.enter_context(folder())
        cluster = PostgresCluster(bed)
        exits.callback(cluster.destroy)
        cluster.start()
        settings = {f"MOORING_{name}": key for name, key in keys.items()}
        settings["MOORING_DATABASE_URL"] = cluster.create_database()
        servers = []
        for number in range(count):
            server = ServerProcess(
                base / f"server-{number}", "127.0.0.1", bed.take_port(), **AS_SHIPPED, **settings
            )
            server.start(within_s=120)
            exits.callback(server.stop)
            servers.append(server)
        yield servers


@contextmanager
def server_on(database: str) -> Iterator[ServerProcess]:
    """A server on loopback with SQLite or PostgreSQL."""
    with servers(database, 1) as started:
        yield started[0]


@contextmanager
def simulated_fleet(server: ServerProcess, fleet: str, *, elsewhere: bool = False) -> Iterator[int]:
    """Simulated nodes in another process; waits until all are ready. Yields the id of the process.

    Args:
        elsewhere: use the lowest priority, since real nodes do not use the server's CPUs.
    """
    wanted = sum(made.nodes for made in parse_fleets(fleet))
    with folder() as base, server.client as admin:
        tokens = ",".join(join_token(admin) for _ in range(wanted))
        environment = {
            **os.environ,
            "MOORING_DATA_DIR": str(base),
            "MOORING_SERVER_URL": server.url,
            "MOORING_SIMULATE": fleet,
            "MOORING_JOIN_TOKEN": tokens,
        }
        program = Program(["agent"], environment, base / "agent.log")
        program.start()
        try:
            if elsewhere:
                psutil.Process(program.pid).nice(LOWEST_PRIORITY)
            wait_until(lambda: ready_nodes(admin) == wanted, 60)
            yield program.pid
        finally:
            program.stop()


def ready_nodes(admin: Client) -> int:
    count, page = 0, {"next_cursor": ""}
    while page["next_cursor"] is not None:
        cursor = {"cursor": page["next_cursor"]} if page["next_cursor"] else {}
        page = admin.get("/v1/nodes", params={"limit": 200, **cursor}).json()
        count += sum(node["state"] == "ready" for node in page["items"])
    return count


def cpu_share(pid: int, seconds: float) -> float:
    """CPU of a process and its children over some time, in percent of one core."""
    before, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    """The user and system time so far of a process and its current children."""
    process = psutil.Process(pid)
    return sum(sum(part.cpu_times()[:2]) for part in (process, *process.children(recursive=True)))


def cpu_seconds_of(started: Sequence[ServerProcess]) -> float:
    return sum(cpu_seconds(server.pid) for server in started)
