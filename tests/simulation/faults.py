"""The faults of a run. Each is begun at a random time, and heals by itself or at the end of the run."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.nodes import Node
from tests.simulation.replicas import LOST_AFTER_S
from tests.simulation.virtual import Process, hub

if TYPE_CHECKING:
    from tests.simulation.world import World

Fault = Callable[["World"], None]


def _kill(process: Process | None) -> None:
    """Kill a process now, or in the middle of whatever it does next."""
    if process is not None and process.is_alive:
        if hub().random.random() < 0.3:
            process.kill()
        else:
            process.steps_left = hub().random.randrange(1, 80)


def kill_replica(world: "World") -> None:
    _kill(hub().random.choice(world.replicas).process)


def freeze_replica(world: "World") -> None:
    process = hub().random.choice(world.replicas).process
    if process is not None:
        process.frozen_until = hub().now + hub().random.choice([2.0, 12.0])


def kill_agent(world: "World") -> None:
    node = _node(world)
    node.excuse()
    _kill(node.process)


def freeze_agent(world: "World") -> None:
    node = _node(world)
    if node.process is not None:
        seconds = hub().random.choice([3.0, 15.0])
        node.excuse(seconds + 25)
        node.process.frozen_until = hub().now + seconds


def agent_stays_down(world: "World") -> None:
    """The agent does not come back before its node counts as lost, and its containers run on."""
    node = _node(world)
    seconds = hub().random.choice([5.0, LOST_AFTER_S * 1.3])
    node.excuse(seconds + 40)
    node.down_until = hub().now + seconds
    if node.process is not None:
        node.process.kill()


def cut(world: "World") -> None:
    """A partition: whole, or in one direction, and sometimes for longer than `lost_after`."""
    node = _node(world)
    node.link.loses_requests = hub().random.random() < 0.7
    node.link.loses_answers = not node.link.loses_requests or hub().random.random() < 0.5
    _later(world, hub().random.choice([2.0, 12.0, LOST_AFTER_S * 1.4]), node.link.heal)


def cut_most(world: "World") -> None:
    for node in world.nodes[: len(world.nodes) * 2 // 3 + 1]:
        node.link.loses_requests = True
        _later(world, hub().random.choice([12.0, LOST_AFTER_S * 1.3]), node.link.heal)


def bad_link(world: "World") -> None:
    link = _node(world).link
    link.loss, link.delay_s = hub().random.choice([0.1, 0.4]), hub().random.choice([0.05, 2.0])
    link.repeats = True
    _later(world, 15, link.heal)


def freeze_engine(world: "World") -> None:
    node, seconds = _node(world), hub().random.choice([2.0, 12.0])
    node.engine.is_down = True
    node.excuse(seconds + 30)

    def thaw() -> None:
        node.engine.is_down = False

    _later(world, seconds, thaw)


def engine_loses_answers(world: "World") -> None:
    node = _node(world)
    node.engine.fails_after_effect = True
    node.excuse(40)

    def end() -> None:
        node.engine.fails_after_effect = False

    _later(world, 10, end)


def restart_engine(world: "World") -> None:
    _node(world).kill_containers(remove=False)


def remove_containers(world: "World") -> None:
    _node(world).kill_containers(remove=True)


def freeze_database(world: "World") -> None:
    world.database_is_frozen = True

    def thaw() -> None:
        world.database_is_frozen = False

    _later(world, hub().random.choice([2.0, 8.0]), thaw)


def jump_control_clock(world: "World") -> None:
    world.control_machine.clock_error_s += hub().random.choice([-86_400.0, 3600.0, 86_400.0, 3e8])


def jump_node_clock(world: "World") -> None:
    _node(world).machine.clock_error_s += hub().random.choice([-86_400.0, 3600.0, 3e8])


def fill_disk(world: "World") -> None:
    node = _node(world)
    node.disk_is_full = True

    def empty() -> None:
        node.disk_is_full = False

    _later(world, 10, empty)


def renew_credential(world: "World") -> None:
    world.request_renewal(_node(world))


def start_twin(world: "World") -> None:
    world.start_twin(_node(world))


def restore(world: "World") -> None:
    world.restore_database()


# Each with its weight.
FAULTS: dict[Fault, int] = {
    kill_replica: 6,
    freeze_replica: 2,
    kill_agent: 6,
    freeze_agent: 2,
    agent_stays_down: 2,
    cut: 6,
    cut_most: 1,
    bad_link: 4,
    freeze_engine: 4,
    engine_loses_answers: 3,
    restart_engine: 2,
    remove_containers: 2,
    freeze_database: 3,
    jump_control_clock: 2,
    jump_node_clock: 2,
    fill_disk: 2,
    renew_credential: 2,
    start_twin: 1,
    restore: 1,
}


def _node(world: "World") -> Node:
    return hub().random.choice(world.nodes)


def _later(world: "World", seconds: float, heal: Callable[[], None]) -> None:
    def wait() -> None:
        hub().sleep(seconds)
        heal()

    world.outside.spawn(wait, "heal")
