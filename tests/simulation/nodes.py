"""Nodes: machines with an engine and GPUs, on which the product's agent runs. Engines outlive agents."""

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx

from mooring.agent.decide.reconcile import is_live
from mooring.agent.gpus.telemetry import Machine as AgentMachine
from mooring.agent.runtime import (
    Cancelled,
    ContainerStream,
    Progress,
    RuntimeFacts,
    RuntimeUnavailable,
    Start,
)
from mooring.agent.runtime import Container as AgentContainer
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.simulated.timers import Timers
from mooring.agent.streams.loop import StreamLoop, Work
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import ControlPlaneClient, RequestRejected, Unreachable
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from mooring.schemas.agent import Assignment, OverlayNetwork, ReportedVolume
from mooring.schemas.agent_streams import AttachRequest, DialRequest, ExecRequest, LogsRequest
from mooring_client.schemas.nodes import Orphan
from tests.invariants.containers import Container
from tests.simulation.network import AgentHttp, Link
from tests.simulation.virtual import Machine, Process, hub

if TYPE_CHECKING:
    from tests.simulation.world import World

GPUS = 4
# How long an agent's call waits for an engine that does not answer (agent/docker/client.py).
_ENGINE_DEADLINE_S = 10.0


class NoStreams(StreamLoop):
    """The simulation has no streams: their event loop would wait in real time, and so stop its clock."""

    def begin(self, work: Work) -> Callable[[], None]:
        return lambda: None


class Engine:
    """The agent's side of an engine: calls take time, fail, or fail although they have had their effect."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self.is_down = False
        self.fails_after_effect = False

    def _reach(self) -> None:
        hub().step(0.05)
        until = hub().now + _ENGINE_DEADLINE_S
        while self.is_down:
            hub().sleep(0.5)
            if hub().now >= until:
                raise RuntimeUnavailable("the engine does not answer")

    def _after(self) -> None:
        hub().step(0.05)
        if self.is_down or (self.fails_after_effect and hub().random.random() < 0.5):
            raise RuntimeUnavailable("the engine's answer was lost")

    def facts(self) -> RuntimeFacts:
        self._reach()
        return self._runtime.facts()

    def containers(self) -> tuple[list[AgentContainer], list[Orphan]]:
        self._reach()
        found = self._runtime.containers()
        self._after()
        return found

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        self._runtime.assigned(assignments)

    def start(
        self, assignment: Assignment, progress: Progress, cancelled: Cancelled
    ) -> AgentContainer | None:
        self._reach()
        started = self._runtime.start(assignment, progress, cancelled)
        self._after()
        return started

    def pull(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Start | None:
        self._reach()
        start = self._runtime.pull(assignment, progress, cancelled)
        if start is None:
            return None
        begin = start

        def started() -> AgentContainer | None:
            self._reach()
            container = begin()
            self._after()
            return container

        return started

    def restart(self, container: AgentContainer) -> None:
        self._reach()
        self._runtime.restart(container)
        self._after()

    def begin_stop(self, container: AgentContainer) -> bool:
        self._reach()
        sent = self._runtime.begin_stop(container)
        self._after()
        return sent

    def kill(self, container: AgentContainer) -> None:
        self._reach()
        self._runtime.kill(container)
        self._after()

    def remove(self, container: AgentContainer) -> None:
        self._reach()
        self._runtime.remove(container)
        self._after()

    def keep_overlays(self, wanted: Sequence[OverlayNetwork]) -> None:
        self._runtime.keep_overlays(wanted)

    def volumes(self) -> Sequence[ReportedVolume]:
        return self._runtime.volumes()

    def remove_volumes(self, volume_ids: Sequence[str]) -> None:
        self._reach()
        self._runtime.remove_volumes(volume_ids)
        self._after()

    async def logs(self, container_id: str, request: LogsRequest) -> ContainerStream:
        return await self._runtime.logs(container_id, request)

    async def exec(self, container_id: str, request: ExecRequest) -> ContainerStream:
        return await self._runtime.exec(container_id, request)

    async def end_left_commands(self, container_id: str) -> None:
        await self._runtime.end_left_commands(container_id)

    async def dial(self, container_id: str, request: DialRequest) -> ContainerStream:
        return await self._runtime.dial(container_id, request)

    async def attach(self, container_id: str, request: AttachRequest) -> ContainerStream:
        return await self._runtime.attach(container_id, request)

    def watch(self, on_change: Callable[[], None], ended: Callable[[], bool]) -> None:
        """Some events are lost, and so are those of the time in which the engine does not answer."""
        running = hub().current
        assert running is not None
        process = running.process

        def heard() -> None:
            if process.is_alive and not self.is_down and hub().random.random() > 0.05:
                on_change()

        self._runtime.watch(heard, ended)

    def close(self) -> None:
        """The engine goes on."""


class _EngineTimers(Timers):
    """Those of the engine, which outlives the agent whose call sets a timer."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        def wait() -> None:
            hub().sleep(seconds)
            function()

        self._world.outside.spawn(wait, "timer")


class AgentDirectory(StateDirectory):
    """The agent's files, on a disk that may be full. The agent may be killed before and after each write."""

    def __init__(self, directory: Path, node: "Node") -> None:
        super().__init__(directory)
        self._node = node

    def write(self, name: str, content: bytes) -> None:
        hub().step()
        if self._node.disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        super().write(name, content)
        hub().step()

    def save_generation(self, generation: int) -> None:
        super().save_generation(generation)
        self._node.note_generation(generation)


class Node:
    """A machine, its engine, and its agent with its successors."""

    def __init__(self, world: "World", number: int, folder: Path) -> None:
        self.world, self.name, self.folder = world, f"node-{number}", folder
        self.machine = Machine(self.name)
        self.link = Link()
        self.runtime = SimulatedRuntime(
            cpus=96, memory_mib=1_048_576, start_s=0.05, pull_s=0.5, timers=_EngineTimers(world)
        )
        self.engine = Engine(self.runtime)
        self.process: Process | None = None
        self.token = ""
        self.has_twins = number % 2 == 1
        self.disk_is_full = False
        self.generation = 0  # the highest that an agent has saved
        # Until then, containers may run longer than a working agent would let them.
        self.excused_until = 0.0
        self.down_until = 0.0  # no agent is started before

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive

    def start_agent(self) -> None:
        self.process = self.world.process(f"agent of {self.name}", self.machine, self._agent_ended)
        self.process.spawn(self._run_agent, "main")

    def containers(self) -> list[Container]:
        """The containers that exist, whoever can see them."""
        found, _foreign = self.runtime.containers()
        return [
            Container(
                node=self.name,
                id=each.container_id,
                name=f"mooring-{each.instance_id}-{each.attempt}",
                instance=each.instance_id,
                attempt=each.attempt,
                is_running=is_live(each),
                gpus=each.gpu_uuids,
                has_share=each.share is not None,
            )
            for each in found
        ]

    def note_generation(self, generation: int) -> None:
        if generation < self.generation:
            self.world.violation(f"I7: {self.name} saved generation {generation} after {self.generation}")
        self.generation = generation

    def forget_generation(self) -> None:
        """What an operator does after the restore of an older database (docs/operating.md)."""
        (self.folder / "generation").unlink(missing_ok=True)
        self.generation = 0

    def kill_containers(self, *, remove: bool) -> None:
        """The engine restarts without live-restore; or somebody removes all containers by hand."""
        for each in self.runtime.containers()[0]:
            self.runtime.kill(each)
            if remove:
                self.runtime.remove(each)

    def remove_container(self, container_id: str) -> None:
        for each in self.runtime.containers()[0]:
            if each.container_id == container_id:
                self.runtime.kill(each)
                self.runtime.remove(each)

    def excuse(self, for_s: float = 25.0) -> None:
        self.excused_until = max(self.excused_until, hub().now + for_s)

    def _agent_ended(self, failure: BaseException | None) -> None:
        self.excuse()
        self.world.on_process_end(f"agent of {self.name}", failure)

    def _run_agent(self) -> None:
        directory = AgentDirectory(self.folder, self)
        http = cast(httpx.Client, AgentHttp(self.world, self.link, self.name))
        client = ControlPlaneClient("http://127.0.0.1:1", http=http)
        identity = directory.identity() or self._join(directory, client)
        client.identify(identity)
        gpus = SimulatedGpuReader(identity.node_id, GPUS, "H100", users=self.runtime.gpu_users)
        agent = Agent(
            identity=identity,
            state=directory,
            runtime=self.engine,
            gpus=gpus,
            control_plane=client,
            machine=AgentMachine(self.name, "10.0.0.1"),
            container_of=gpus.container_of,
            stream_loop=NoStreams(),
        )
        exit_code = agent.run()
        self.world.on_agent_exit(self, exit_code)

    def _join(self, directory: StateDirectory, client: ControlPlaneClient) -> NodeIdentity:
        """As `mooring agent`, which repeats a join without an answer."""
        credential = directory.credential_to_join()
        while True:
            try:
                answer = client.join(self.token, self.name, self.name, credential)
            except Unreachable:
                hub().sleep(1)
                continue
            except RequestRejected as error:
                self.world.violation(f"the join of {self.name} was rejected: {error}")
                hub().sleep(3600)
                continue
            identity = NodeIdentity.from_answer(answer, credential)
            directory.save_joined(identity)
            return identity

    def twin(self) -> "Node":
        """A second agent with a copy of this one's files, for the same engine."""
        folder = self.folder.with_name(f"{self.folder.name}-twin")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        other = Node(self.world, 0, folder)
        other.name, other.machine, other.link = self.name, self.machine, self.link
        other.runtime, other.engine = self.runtime, self.engine
        other.generation = self.generation
        return other
