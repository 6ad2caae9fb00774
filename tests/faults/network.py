"""Faults of the network between nodes and replicas."""

from tests.faults.balancer import Link
from tests.faults.fleet import LOST_AFTER_S, UNREACHABLE_AFTER_S
from tests.faults.history import events_after, newest_seq
from tests.faults.trial import Fault, Trial

_LINK_FAULTS = (Link.SILENT, Link.ONE_WAY, Link.RESET, Link.SLOW, Link.LOSSY)
_CUT_S = (5.0, 20.0)  # some longer than it takes to become unreachable, none so long that a node is lost


def partition(trial: Trial) -> None:
    """F12. Nothing is started elsewhere, and the node continues where it was."""
    lasted = []
    for fault in trial.rng.sample(_LINK_FAULTS, len(_LINK_FAULTS)):
        index = trial.rng.randrange(len(trial.fleet.agents))
        bystander = trial.bystanders.id(trial.fleet.agents[index])
        link, lasts_s = trial.fleet.links[index], trial.rng.uniform(*_CUT_S)
        link.link = fault
        trial.hold(lasts_s)
        trial.require(trial.admin.instance(bystander)["attempt"] == 1, f"{bystander} was started elsewhere")
        link.link = Link.OPEN
        trial.await_state("the node is ready", trial.fleet.ready, 30)
        lasted.append(f"{fault.name.lower()} {lasts_s:.0f} s")
    trial.note(", ".join(lasted))


def cut_most_nodes(trial: Trial) -> None:
    """F13. Two of three nodes go silent for longer than a lost node: nothing is replaced, and one event."""
    newest = newest_seq(trial.admin)
    cut = trial.rng.sample(range(len(trial.fleet.links)), 2)
    for index in cut:
        trial.fleet.links[index].link = Link.SILENT
    trial.hold(LOST_AFTER_S + UNREACHABLE_AFTER_S)
    types = _types_after(trial, newest)
    trial.require(types.count("nodes.replacement_paused") == 1, f"the brake: {sorted(set(types))}")
    trial.require("node.lost" not in types, "a node was lost in spite of the brake")
    for index in cut:
        trial.fleet.links[index].link = Link.OPEN
    trial.await_state("all nodes are ready", trial.fleet.ready, 60)
    trial.await_state(
        "the brake is released", lambda: "nodes.replacement_resumed" in _types_after(trial, newest)
    )
    trial.require("node.lost" not in _types_after(trial, newest), "a node was lost after the brake")


def _types_after(trial: Trial, seq: int) -> list[str]:
    return [event["type"] for event in events_after(trial.admin, seq)]


FAULTS = (
    Fault("F12", "partition a node: silent, one-way, reset, slow, lossy", partition),
    Fault("F13", "cut two of three nodes", cut_most_nodes),
)
