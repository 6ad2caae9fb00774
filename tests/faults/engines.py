"""Faults of Docker."""

import psutil

from tests.faults.trial import Fault, Trial

_FROZEN_S = 20
_DOWN_S = 5


def kill_dockerd(trial: Trial) -> None:
    """F6. With live-restore, containers keep running, and their states do not change."""
    agent = trial.rng.choice(trial.fleet.agents[:-1])
    before = trial.bystanders.container(agent)
    agent.node.kill()
    trial.hold(_DOWN_S)
    trial.require(psutil.pid_exists(before.pid), "the container has ended with dockerd")
    agent.node.start()
    took_s = trial.await_state("the node is ready", lambda: trial.fleet.node(agent)["state"] == "ready")
    trial.require(trial.bystanders.container(agent) == before, f"I16: {before} is not the same")
    trial.note(f"ready after {took_s:.1f} s")


def kill_dockerd_without_live_restore(trial: Trial) -> None:
    """F7. The next dockerd ends the containers; until then their GPUs stay allocated."""
    agent = trial.fleet.agents[-1]
    bystander, before = trial.bystanders.id(agent), trial.bystanders.container(agent)
    agent.node.kill()
    trial.hold(_DOWN_S)
    held = {gpu["instance_id"] for gpu in trial.admin.items("/v1/gpus", limit=200)}
    trial.require(not psutil.pid_exists(before.pid) or bystander in held, "I5: freed while its process runs")
    agent.node.start()
    took_s = trial.await_state(
        "the instance has ended", lambda: trial.admin.instance(bystander)["state"] in {"failed", "succeeded"}
    )
    trial.require(not psutil.pid_exists(before.pid), "I5: the instance has ended, and its process runs")
    trial.note(f"{trial.admin.instance(bystander)['state']} after {took_s:.1f} s")
    trial.bystanders.replace(agent)


def freeze_dockerd(trial: Trial) -> None:
    """F8. The node keeps reporting, and other nodes serve. What Docker did late is adopted."""
    agent, other = trial.rng.sample(trial.fleet.agents, 2)
    agent.node.freeze()
    trial.hold(_FROZEN_S)
    node = trial.fleet.node(agent)
    trial.require(node["state"] != "unreachable", f"the node is unreachable: {node['reason']}")
    ran = trial.admin.post(
        f"/v1/instances/{trial.bystanders.id(other)}/exec", json={"command": ["true"], "timeout_s": 10}
    )
    trial.require(ran.status_code == 200, f"an instance on another node: {ran.status_code} {ran.text}")
    agent.node.thaw()


FAULTS = (
    Fault("F6", "kill -9 dockerd, with live-restore", kill_dockerd),
    Fault("F7", "kill -9 dockerd, without live-restore", kill_dockerd_without_live_restore),
    Fault("F8", "freeze dockerd for 20 s", freeze_dockerd),
)
