"""GPU faults from the driver to the API: the real reader on an NVML stand-in, agent and control plane."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.gpus.reader import NvmlGpuReader
from mooring.agent.gpus.telemetry import Machine
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from tests.nodes import join_token
from tests.service import Client, running, settings_for
from tests.testbed.nvml.standin import NvmlStandin, uuid_of
from tests.testbed.waiting import wait_until

WITHIN_S = 6.0
GPUS = 8
# Directives of the stand-in for one GPU, the code of the fault, and NVIDIA's action. The stand-in reports
# faults in the order of its configuration, so each case is appended to the ones before.
FATAL = [
    ("xid {gpu} 79", "xid_79", "reboot"),
    ("xid {gpu} 109", "xid_109", "reset"),
    ("xid {gpu} 119", "xid_119", "reset"),
    ("xid {gpu} 64", "xid_64", "reset"),
    ("event {gpu} 8192 1", "fatal_poison", "reset"),
    ("set {gpu} recovery 6\nevent {gpu} 32768 6", "recovery_bus_reset", "reset"),
    ("set {gpu} recovery 7\nxid {gpu} 154", "recovery_system_reboot", "reboot"),
]


@dataclass(frozen=True, slots=True)
class Node:
    client: Client
    nvml: NvmlStandin

    def gpu(self, index: int) -> dict[str, Any]:
        answer = self.client.get(f"/v1/gpus/{uuid_of(index)}")
        return dict(answer.json()) if answer.status_code == 200 else {}

    def gpu_events(self, instance_id: str) -> list[tuple[str, str, str, str]]:
        """Type, GPU, code and action of the events about an instance's GPUs."""
        return [
            (
                event["type"],
                event["data"]["gpu_uuid"],
                event["data"]["reason"]["code"],
                event["data"]["action"],
            )
            for event in self.client.items(f"/v1/instances/{instance_id}/events", limit=200)
            if event["type"].startswith("instance.gpu_")
        ]


@contextmanager
def _agent(client: Client, nvml: NvmlStandin, folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        calls = stack.enter_context(closing(ControlPlaneClient(str(client.base_url))))
        state = StateDirectory(folder)
        credential = state.credential_to_join()
        joined = calls.join(join_token(client), "gpu-1", "gpu-1", credential)
        identity = NodeIdentity.from_answer(joined, credential)
        calls.identify(identity)
        state.save_joined(identity)
        runtime = stack.enter_context(closing(SimulatedRuntime(cpus=192, memory_mib=1_048_576)))
        reader = stack.enter_context(closing(NvmlGpuReader(environment=nvml.environment)))
        assert reader.wait_first(20)
        agent = Agent(
            identity=identity, state=state, runtime=runtime, gpus=reader, control_plane=calls,
            machine=Machine("gpu-1", "127.0.0.1"),
        )  # fmt: skip
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield
        finally:
            agent.stop()
            thread.join(20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with the intervals of production: a report every 5 s, and a sample every second."""
    with ExitStack() as stack:
        settings = settings_for(
            f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data", report_interval_s=5.0
        )
        client = stack.enter_context(stack.enter_context(running(settings)).client)
        nvml = NvmlStandin(tmp_path, f"gpus {GPUS}")
        stack.enter_context(_agent(client, nvml, tmp_path / "node"))
        made = Node(client, nvml)
        wait_until(lambda: made.gpu(GPUS - 1), timeout_s=20)
        yield made


def test_each_error_that_needs_a_reset_or_reboot_quarantines_within_six_seconds(node: Node) -> None:
    instance = node.client.create(gpus={"count": GPUS})["id"]
    node.client.wait(instance, "running")
    lines = [f"gpus {GPUS}"]
    for gpu, (line, code, action) in enumerate(FATAL):
        lines += line.format(gpu=gpu).split("\n")
        began = time.monotonic()
        node.nvml.write(*lines)
        wait_until(lambda gpu=gpu: node.gpu(gpu)["health"] != "healthy", timeout_s=20)  # type: ignore[misc]
        assert time.monotonic() - began < WITHIN_S, code
        shown = node.gpu(gpu)
        assert (shown["health"], shown["placement"]) == ("quarantined", "none")
        assert code in {each["code"] for each in shown["conditions"]}
        assert ("instance.gpu_unhealthy", uuid_of(gpu), code, action) in node.gpu_events(instance)
    assert node.gpu(GPUS - 1)["health"] == "healthy"


def test_ten_thousand_application_faults_quarantine_no_gpu(node: Node) -> None:
    instance = node.client.create(gpus={"count": GPUS})["id"]
    node.client.wait(instance, "running")
    codes = [13, 31, 32, 69, 80, 94]
    flood = [f"xids {gpu} {codes[gpu % len(codes)]} 1250" for gpu in range(GPUS)]
    node.nvml.write(f"gpus {GPUS}", *flood, "set 3 remap_pending 1", "xid 5 109")

    def counted() -> bool:
        conditions = [each for gpu in range(GPUS) for each in node.gpu(gpu)["conditions"]]
        return sum(int(each["count"]) for each in conditions if each["severity"] == "info") == 10_000

    wait_until(counted, timeout_s=40)
    # The hardware error and the warning are reported at the end of the flood.
    wait_until(lambda: node.gpu(5)["health"] == "quarantined", timeout_s=20)
    wait_until(lambda: node.gpu(3)["placement"] == "last", timeout_s=20)
    assert [node.gpu(gpu)["health"] for gpu in range(GPUS) if gpu != 5] == ["healthy"] * 7
    faults = [event for event in node.gpu_events(instance) if event[0] == "instance.gpu_fault"]
    assert sorted(faults) == sorted(
        ("instance.gpu_fault", uuid_of(gpu), f"xid_{codes[gpu % len(codes)]}", "restart_app")
        for gpu in range(GPUS)
    )
    assert node.client.instance(instance)["state"] == "running"
    # At its end, all GPUs but the quarantined one are released: application faults do not delay this.
    node.client.post(f"/v1/instances/{instance}/stop")
    node.client.wait(instance, "stopped")
    assert node.client.wait(node.client.create(gpus={"count": GPUS - 1})["id"], "running")["devices"]
