"""Faults of agents."""

import shutil

from tests.faults.trial import Fault, Trial
from tests.walk.product import AgentProcess

_KILLS = 3
_ADOPTED_WITHIN_S = 30


def kill_agents(trial: Trial) -> None:
    """F4. The next agent adopts the running containers."""
    slowest_s = 0.0
    for _ in range(_KILLS):
        slowest_s = max(slowest_s, _kill(trial, trial.rng.choice(trial.fleet.agents)))
    trial.note(f"{_KILLS} kills, adopted after at most {slowest_s:.1f} s")


def _kill(trial: Trial, agent: AgentProcess) -> float:
    before = trial.bystanders.container(agent)
    agent.kill()
    trial.hold(trial.rng.uniform(0, 2))
    agent.start()
    name = agent.node.name
    took_s = trial.await_state(
        f"the agent of {name} adopts", lambda: _executes(trial, agent), _ADOPTED_WITHIN_S
    )
    trial.require(trial.bystanders.container(agent) == before, f"I16: {before} is not the same")
    return took_s


def _executes(trial: Trial, agent: AgentProcess) -> bool:
    path = f"/v1/instances/{trial.bystanders.id(agent)}/exec"
    answer = trial.admin.post(path, json={"command": ["echo", "here"], "timeout_s": 5})
    return answer.status_code == 200 and answer.json()["stdout"] == "here\n"


def start_a_twin(trial: Trial) -> None:
    """F5. Of two agents with one identity, the older one ends and touches nothing."""
    agent = trial.rng.choice(trial.fleet.agents[:-1])
    folder = trial.fleet.folder / trial.name("twin")
    twin = AgentProcess(agent.node, trial.fleet.replicas[0], folder)
    try:
        shutil.copytree(agent.folder / "agent", folder / "agent")
        settings = ("MOORING_SERVER_URL", "MOORING_NODE_LABELS", "MOORING_DISK_RESERVED_MIB")
        twin.environment |= {name: agent.environment[name] for name in (*settings, "MOORING_DISK_LOW_MIB")}
        twin.forked = True
        twin.start()
        status = agent.wait(60)
        trial.require(status == 3, f"the older agent ended with {status}")
        trial.hold(3)
        trial.await_state("the twin serves the node", lambda: _executes(trial, agent))
        trial.require(twin.running, "the twin has ended too")
        agent.start()  # the first agent takes over again
        trial.require(twin.wait(60) == 3, "the twin did not end")
    finally:
        twin.close()


FAULTS = (
    Fault("F4", "kill -9 an agent", kill_agents),
    Fault("F5", "two agents with one identity", start_a_twin),
)
