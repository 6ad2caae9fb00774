"""Faults of GPUs and of NVML."""

from typing import Any

from tests.faults.history import events_after, newest_seq
from tests.faults.trial import Fault, Trial
from tests.walk.product import AgentProcess

# Codes of errors of NVML, and calls that may return them.
_CODES = (1, 2, 3, 4, 6, 9, 10, 13, 15, 17, 18, 999)
_CALLS = (
    "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlEventSetWait_v2",
)  # fmt: skip
_XIDS = {
    13: False,
    31: False,
    43: False,
    94: False,
    64: True,
    79: True,
    109: True,
    119: True,
}  # whether fatal
_ERRORS = 6
_HANG_S = 15


def fail_nvml(trial: Trial) -> None:
    """F20. Whatever NVML does, the node keeps reporting, and what runs goes on."""
    agent, newest = trial.rng.choice(trial.fleet.agents), newest_seq(trial.admin)
    try:
        for _ in range(_ERRORS):
            call, code = trial.rng.choice(_CALLS), trial.rng.choice(_CODES)
            agent.nvml.write(*agent.fleet(), f"error {call} {code}")
            trial.hold(3)
            _require_reporting(trial, agent, f"{call} = {code}")
        call = trial.rng.choice(_CALLS)
        agent.nvml.write(*agent.fleet(), f"hang {call} {_HANG_S}")
        trial.hold(_HANG_S + 3)
        _require_reporting(trial, agent, f"{call} hangs")
    finally:
        agent.nvml.write(*agent.fleet())
    trial.await_state("all GPUs are listed", lambda: len(trial.fleet.node(agent)["gpus"]) == 8)
    unreachable = [
        event
        for event in events_after(trial.admin, newest)
        if event["type"] == "node.state_changed" and event["data"].get("to") == "unreachable"
    ]
    trial.require(not unreachable, f"the node became unreachable: {unreachable}")
    _clear(trial, agent)
    trial.note(f"{_ERRORS} errors, 1 hang")


def _require_reporting(trial: Trial, agent: AgentProcess, what: str) -> None:
    node = trial.fleet.node(agent)
    trial.require(node["state"] != "unreachable", f"{what}: the node is unreachable")
    trial.require(agent.running, f"{what}: the agent has ended: {agent.tail()[-500:]}")


def raise_xids(trial: Trial) -> None:
    """F20. Fatal errors quarantine their GPU and no other; errors of programs quarantine none."""
    agent = trial.rng.choice(trial.fleet.agents)
    assigned = dict(zip(range(8), trial.rng.sample(sorted(_XIDS), len(_XIDS)), strict=False))
    agent.nvml.write(*agent.fleet(), *[f"xid {gpu} {xid}" for gpu, xid in assigned.items()])
    fatal = {agent.gpu_uuids[gpu] for gpu, xid in assigned.items() if _XIDS[xid]}

    def unhealthy() -> set[str]:
        return {gpu["uuid"] for gpu in _gpus(trial, agent) if gpu["health"] != "healthy"}

    took_s = trial.await_state("the fatal errors are shown", lambda: unhealthy() == fatal, 30)
    trial.hold(3)
    trial.require(unhealthy() == fatal, f"unhealthy: {sorted(unhealthy())}, fatal: {sorted(fatal)}")
    trial.note(f"{len(fatal)} of {len(assigned)} XIDs quarantine, after {took_s:.1f} s")
    # A driver that was loaded again does not report them again, and the stand-in would.
    agent.nvml.write(*agent.fleet())
    agent.kill()
    agent.start()
    trial.await_state("the node is ready", trial.fleet.ready)
    _clear(trial, agent)


def _gpus(trial: Trial, agent: AgentProcess) -> list[dict[str, Any]]:
    mine = set(agent.gpu_uuids)
    return [gpu for gpu in trial.admin.items("/v1/gpus", limit=200) if gpu["uuid"] in mine]


def _clear(trial: Trial, agent: AgentProcess) -> None:
    def all_healthy() -> bool:
        left = [gpu["uuid"] for gpu in _gpus(trial, agent) if gpu["health"] != "healthy"]
        for uuid in left:
            trial.admin.post(f"/v1/gpus/{uuid}/clear")
        return not left

    trial.await_state("all GPUs are healthy", all_healthy)


FAULTS = (
    Fault("F20", "errors and a hang of NVML", fail_nvml),
    Fault("F20", "XIDs", raise_xids),
)
