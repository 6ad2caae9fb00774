"""The nodes of one process: each joins if needed, and is then served by its `Agent`.

This machine as a node has a few threads of its own. Simulated nodes share one event loop and a few threads,
because a thousand of them run in one process.
"""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Self

from mooring.agent.gpus.reader import GpuReader
from mooring.agent.gpus.telemetry import ContainerOf, Machine
from mooring.agent.runtime import Runtime
from mooring.agent.settings import AgentSettings
from mooring.agent.streams.loop import StreamLoop
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import (
    ControlPlaneClient,
    LoopClient,
    RequestRejected,
    Unreachable,
    blocking_client,
)
from mooring.agent.sync.exchange import EXIT_UNAUTHORIZED, new_backoff
from mooring.agent.sync.identity import NodeIdentity, StateDirectory, StateError
from mooring.agent.sync.reachability import Reachability
from mooring.agent.sync.tasks import LoopTasks, Tasks, ThreadTasks
from mooring.agent.sync.worker_pools import WorkerPools

EXIT_NOT_SET_UP: Final = 2
# Of a simulated node: two calls that wait, and one that reports a change.
CONNECTIONS: Final = 3
OTHER_FILES: Final = 256
# How many nodes join and send their first report at a time. All at once, they would get no answer in time.
STARTING: Final = 16

TokenFor = Callable[[str], str | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of one node."""

    runtime: Runtime
    gpus: GpuReader
    machine: Machine
    container_of: ContainerOf


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node that this process is to run. `parts` makes its components once its identity is known."""

    name: str
    directory: Path
    parts: Callable[[NodeIdentity], Parts]


class TooFewFiles(Exception):
    """This process may not open as many files as its nodes need connections; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the nodes of a process share."""

    tasks: Tasks
    pools: WorkerPools
    client: Callable[[], ControlPlaneClient]
    stream_loop: StreamLoop = field(default_factory=StreamLoop)

    @classmethod
    def of_this_machine(cls, url: str, *, insecure_http: bool) -> Self:
        client = partial(ControlPlaneClient, url, insecure_http=insecure_http)
        return cls(ThreadTasks(), WorkerPools.default(), client)

    @classmethod
    def of_simulated_nodes(cls, url: str, *, insecure_http: bool) -> Self:
        client = partial(LoopClient, url, insecure_http=insecure_http, http=blocking_client(url))
        return cls(LoopTasks(), WorkerPools.of_simulated_nodes(), client)


class ProcessNodes:
    """The agents of this process. If one ends by itself, all end.

    Attributes:
        stopping: set when the process is to end; `end` must then be called.
        exit_code: that of the first agent that ended by itself, else 0.
    """

    def __init__(self, settings: AgentSettings, token_for: TokenFor) -> None:
        self.stopping = threading.Event()
        self.exit_code = 0
        self._settings, self._token_for = settings, token_for
        of_nodes = Shared.of_simulated_nodes if settings.simulate else Shared.of_this_machine
        self._shared = of_nodes(settings.server_url, insecure_http=settings.insecure_http)
        self._ended = self._shared.tasks.signal()
        self._reachability = Reachability()
        self._starting = threading.Semaphore(STARTING)
        self._lock = threading.Lock()  # of the lists
        self._agents: list[Agent] = []
        self._parts: list[Parts] = []
        self._directory: StateDirectory | None = None

    def begin(self, plans: Iterable[PlannedNode]) -> None:
        """Start all nodes, a few at a time. Returns early when the process is to end.

        Raises:
            StateError: the data directory cannot be used.
            InsecureUrl: the URL would send credentials unencrypted over a network.
        """
        directory = StateDirectory(self._settings.state_dir)
        directory.lock()
        self._directory = directory
        directory.require_machine()
        for plan in plans:
            state, control_plane = StateDirectory(plan.directory), self._shared.client()
            identity = state.identity()
            token = None if identity else self._token_for(plan.name)
            if identity is None and token is None:
                log.critical(
                    "node %s has not joined yet: set MOORING_JOIN_TOKEN to a new join token", plan.name
                )
                self._end_with(EXIT_NOT_SET_UP)
                return
            while not (self.stopping.is_set() or self._starting.acquire(timeout=0.1)):
                pass
            if self.stopping.is_set():
                return
            run = partial(self._run, plan, state, control_plane, identity, token)
            self._shared.tasks.start(run, plan.name)

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            agents, parts = list(self._agents), list(self._parts)
        for agent in agents:
            agent.stop()
        for each in parts:
            each.gpus.close()
        if self._directory is not None:
            self._directory.unlock()

    async def _run(
        self,
        plan: PlannedNode,
        state: StateDirectory,
        control_plane: ControlPlaneClient,
        identity: NodeIdentity | None,
        token: str | None,
    ) -> None:
        """Run one node until the end."""
        if identity is None and token is not None:
            identity = await self._join(plan, state, control_plane, token)
        if identity is None:
            return
        control_plane.identify(identity)
        try:
            agent = await self._shared.tasks.call(partial(self._agent, plan, state, control_plane, identity))
        except StateError as error:
            log.critical("%s", error)
            self._end_with(EXIT_NOT_SET_UP)
            return
        if not self._ended.is_set():
            log.info(
                "node %s (%s) reports to %s", identity.node_name, identity.node_id, self._settings.server_url
            )
            self._end_with(await agent.serve())

    def _end_with(self, exit_code: int) -> None:
        self.exit_code = self.exit_code or exit_code
        self.stopping.set()

    def _agent(
        self,
        plan: PlannedNode,
        state: StateDirectory,
        control_plane: ControlPlaneClient,
        identity: NodeIdentity,
    ) -> Agent:
        parts = plan.parts(identity)
        with self._lock:
            self._parts.append(parts)
        agent = Agent(
            identity=identity,
            state=state,
            runtime=parts.runtime,
            gpus=parts.gpus,
            control_plane=control_plane,
            machine=parts.machine,
            container_of=parts.container_of,
            tasks=self._shared.tasks,
            pools=self._shared.pools,
            stream_loop=self._shared.stream_loop,
            reachability=self._reachability,
            on_first_call=self._starting.release,
        )
        with self._lock:
            self._agents.append(agent)
        return agent

    async def _join(
        self, plan: PlannedNode, state: StateDirectory, control_plane: ControlPlaneClient, token: str
    ) -> NodeIdentity | None:
        """The node's new identity; None if the token is rejected, or the process is to end."""
        call, backoff = self._shared.tasks.call, new_backoff()
        credential = await call(state.credential_to_join)
        while not self._ended.is_set():
            sent_at = time.monotonic()
            try:
                answer = await call(
                    lambda: control_plane.join(token, plan.name, socket.gethostname(), credential)
                )
            except Unreachable as error:
                self._reachability.failed(plan.name, error)
                await self._ended.wait(backoff.pause_s())
            except RequestRejected as error:
                log.critical("the join token was rejected (%s): create a new one, each works once", error)
                self._end_with(EXIT_UNAUTHORIZED)
                return None
            else:
                self._reachability.succeeded(plan.name, sent_at)
                identity = NodeIdentity.from_answer(answer, credential)
                await call(partial(state.save_joined, identity))
                log.info("joined %s as node %s", self._settings.server_url, identity.node_name)
                return identity
        return None


def allow_connections(nodes: int) -> None:
    """Raise this process's limit on open files to what simulated nodes need.

    Raises:
        TooFewFiles: the limit cannot be raised that far.
    """
    needed = nodes * CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TooFewFiles(
            f"{nodes} simulated nodes need {needed} open files, and this process may open {hard}: raise its "
            "limit (ulimit -Hn, or LimitNOFILE of systemd), or simulate fewer nodes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
