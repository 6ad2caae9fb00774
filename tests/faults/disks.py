"""Full disks of a node: the agent's state and logs, and Docker's data."""

from tests.faults.trial import Fault, Trial
from tests.testbed.filesystems import fill, take_all_space

_FULL_S = 8


def fill_state(trial: Trial) -> None:
    """F15. The agent's data and log have no space. It keeps reporting, and recovers without a restart."""
    agent, number = trial.fleet.agents[-1], len(trial.fleet.agents) - 1
    pid, filler = agent.pid, agent.folder / "filler"
    fill(filler)
    try:
        # Something new that the agent has to save.
        made = trial.create(
            trial.admin, trial.name("full"), trial.key(), node_selector={"number": str(number)}
        )
        trial.hold(_FULL_S)
        node = trial.fleet.node(agent)
        trial.require(node["state"] != "unreachable", f"the node is unreachable: {node['reason']}")
        trial.note(f"node {node['state']}")
    finally:
        filler.unlink()
    trial.delete(made.json()["id"])
    took_s = trial.await_state("the node is ready", trial.fleet.ready)
    trial.require(agent.running and agent.pid == pid, "the agent had to start again")
    trial.note(f"ready after {took_s:.1f} s")


def fill_engine(trial: Trial) -> None:
    """F15. Docker's data have no space: nothing is placed on the node until there is."""
    agent = trial.fleet.agents[-1]
    filler = agent.node.folder / "data" / "filler"
    take_all_space(filler)
    try:
        took_s = trial.await_state(
            "the disk's state is shown", lambda: trial.fleet.node(agent)["storage"]["pressure"]
        )
        trial.note(f"disk pressure after {took_s:.1f} s")
        trial.hold(_FULL_S)
    finally:
        filler.unlink()
    trial.await_state("the disk has space", lambda: not trial.fleet.node(agent)["storage"]["pressure"])


FAULTS = (
    Fault("F15", "fill the disk of an agent's state and log", fill_state),
    Fault("F15", "fill Docker's disk", fill_engine),
)
