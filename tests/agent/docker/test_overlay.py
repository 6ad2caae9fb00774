"""Networks of groups that span nodes, with two real dockerds in one swarm."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker.client import Engine
from mooring.agent.docker.create import Abilities, Image, environment
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.overlay import GATEWAY, Overlays, start_with_network, swarm_of
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.host.firewall import Isolation, forward_rules, input_rules
from mooring.agent.host.preflight import Check, engine_checks
from mooring.agent.runtime import Container, RuntimeFacts, RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment, OverlayNetwork
from mooring_client.schemas.states import Reason
from tests.agent.control_planes import TinyControlPlane, control_plane
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    all_containers,
    assignment,
    output_of,
    runtime_on,
    start,
    stop,
    with_more,
)
from tests.agent.host.test_firewall import (
    METADATA,
    PORT,
    SERVED,
    answers,
    firewall_of,
    flush_rules,
    listening,
    reached,
)
from tests.agent.sync.test_agent import Node, RecordingRuntime
from tests.testbed.dockerd import DockerNode
from tests.testbed.parts import program
from tests.testbed.swarm import Swarm
from tests.testbed.waiting import wait_until

_groups = itertools.count(1)


@pytest.fixture
def swarm(swarm_of_two: Swarm) -> Iterator[Swarm]:
    for node in swarm_of_two.nodes:
        flush_rules(node)
    yield swarm_of_two
    swarm_of_two.clear()


@pytest.fixture
def runtimes(swarm: Swarm) -> Iterator[tuple[DockerRuntime, DockerRuntime]]:
    """The runtimes of the manager and of the worker, without firewall rules."""
    manager, worker = (runtime_on(node) for node in swarm.nodes)
    yield manager, worker
    manager.close()
    worker.close()


def overlay(*, encrypted: bool = False, project_id: str = "proj-1") -> OverlayNetwork:
    """The network of a new group."""
    number = next(_groups)
    return OverlayNetwork(
        name=f"mooring-group-{number}", group_id=f"grp-{number}", project_id=project_id, encrypted=encrypted
    )


def member(of: OverlayNetwork, rank: int, **spec: Any) -> Assignment:
    group = {
        "group_id": of.group_id,
        "rank": rank,
        "count": 2,
        "hostname": f"train-{rank}",
        "network": "overlay",
        "overlay_name": of.name,
        "env": {"RANK": str(rank), "MASTER_ADDR": "train-0"},
    }
    return with_more(assignment(**spec), group=group, project_id=of.project_id)


def on_other_network(network: str, rank: int = 0, **spec: Any) -> Assignment:
    given = member(overlay(), rank, **spec)
    assert given.group is not None
    return with_more(given, group={**given.group.model_dump(), "network": network, "overlay_name": None})


def overlay_address(node: DockerNode, container: Container) -> str:
    settings = node.client.api.inspect_container(container.container_id)["NetworkSettings"]
    [network] = settings["Networks"].values()
    return str(network["IPAddress"])


def addresses(runtime: DockerRuntime, container: Container) -> dict[str, str]:
    """The container's IPv4 addresses by interface."""
    output = output_of(runtime, container, ["ip", "-4", "-o", "address"])
    lines = [line.split() for line in output.splitlines()]
    return {line[1]: line[3].split("/")[0] for line in lines if line[1] != "lo"}


def overlays_of(node: DockerNode) -> set[str]:
    names = {str(network["Name"]) for network in node.client.api.networks()}
    return {name for name in names if name.startswith("mooring-group-")}


def stop_and_remove(runtime: DockerRuntime, container: Container) -> None:
    stop(runtime, container, 1)
    runtime.remove(container)


# --- the swarm that a node reports


def test_both_nodes_report_the_same_swarm_and_their_role(
    runtimes: tuple[DockerRuntime, DockerRuntime],
) -> None:
    manager, worker = (runtime.facts().swarm for runtime in runtimes)
    assert manager is not None
    assert worker is not None
    assert (manager.manager, worker.manager) == (True, False)
    assert manager.cluster_id == worker.cluster_id


def test_a_daemon_outside_a_swarm_reports_none_and_members_wait(docker_node: DockerNode) -> None:
    runtime = runtime_on(docker_node)
    assert runtime.info()["Swarm"]["LocalNodeState"] == "inactive"
    assert runtime.facts().swarm is None
    with pytest.raises(StartDelayed) as caught:
        start(runtime, member(overlay(), 0))
    assert caught.value.reason.code == "waiting_for_network"
    assert all_containers(docker_node) == []
    runtime.close()


def test_a_worker_with_an_unreadable_certificate_reports_no_swarm(tmp_path: Path) -> None:
    swarm = {"LocalNodeState": "active", "ControlAvailable": False}
    assert swarm_of({"Swarm": swarm, "DockerRootDir": str(tmp_path)}) is None


def test_doctor_reports_the_swarm_and_its_requirements(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime], tmp_path: Path
) -> None:
    def checks_of(info: dict[str, Any]) -> dict[str, Check]:
        return {check.name: check for check in engine_checks(info, [], {})}

    on_manager, on_worker = (checks_of(runtime.info()) for runtime in runtimes)
    assert (on_manager["swarm"].ok, "manager" in on_manager["swarm"].detail) == (True, True)
    assert (on_worker["swarm"].ok, "worker" in on_worker["swarm"].detail) == (True, True)
    # A node in a swarm must have live-restore off, so doctor must not advise to turn it on.
    assert (on_worker["live-restore"].ok, "swarm" in on_worker["live-restore"].remedy) == (None, True)
    unreadable = checks_of(runtimes[1].info() | {"DockerRootDir": str(tmp_path)})["swarm"]
    assert (unreadable.ok, "swarm-node.crt" in unreadable.remedy) == (None, True)


# --- connections between members


def test_members_on_two_nodes_find_each_other_by_name_and_exchange_bytes(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    shared = overlay()
    manager.keep_overlays([shared])
    first = start(manager, member(shared, 0, command=SERVED))
    second = start(worker, member(shared, 1, command=SERVED, ports=[{"container": 80}]))
    assert reached(worker, second, "train-0", "train-1") == {"train-0", "train-1"}
    assert reached(manager, first, "train-0", "train-1") == {"train-0", "train-1"}
    # A member's published port is reached from outside, like that of any instance.
    assert answers(swarm.manager.inside, f"{swarm.worker.address}:{second.endpoints[0].port}")


def test_a_members_host_name_resolves_to_its_group_address(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    shared = overlay()
    manager.keep_overlays([shared])
    container = start(worker, member(shared, 1))
    for _ in range(2):
        own = overlay_address(swarm.worker, container)
        # NCCL and Gloo use the first interface, so the host name must have only the address of that.
        assert addresses(worker, container)["eth0"] == own
        assert output_of(worker, container, ["hostname"]) == "train-1\n"
        hosts = output_of(worker, container, ["cat", "/etc/hosts"])
        assert [line.split()[0] for line in hosts.splitlines() if line.endswith("train-1")] == [own]
        stop(worker, container, 1)
        worker.restart(container)


def test_members_on_one_node_find_each_other_on_their_projects_bridge(docker_node: DockerNode) -> None:
    runtime = runtime_on(docker_node)
    first = start(runtime, on_other_network("bridge", 0, command=SERVED))
    second = start(runtime, on_other_network("bridge", 1))
    try:
        assert reached(runtime, second, "train-0") == {"train-0"}
    finally:
        for container in (first, second):
            stop_and_remove(runtime, container)
        runtime.facts()
        runtime.close()


def test_a_member_on_the_host_network_is_reachable_at_its_port(
    docker_node: DockerNode,
) -> None:
    runtime = runtime_on(docker_node)
    given = on_other_network("host", 0, command=SERVED, ports=[{"container": 80}])
    container = start(runtime, given)
    try:
        assert [(one.host, one.port) for one in container.endpoints] == [(docker_node.address, 80)]
        wait_until(lambda: answers(docker_node.inside, f"{docker_node.address}:80") or None)
        assert output_of(runtime, container, ["hostname"]) == "train-0\n"
        assert runtime.containers()[0][0].endpoints == container.endpoints
    finally:
        stop_and_remove(runtime, container)
        runtime.close()


def test_an_overlay_cannot_have_the_name_of_the_host_network(docker_node: DockerNode) -> None:
    runtime = runtime_on(docker_node)
    named_host = overlay().model_copy(update={"name": "host"})
    with pytest.raises(StartRefused) as caught:
        start(runtime, member(named_host, 0))
    assert caught.value.reason.code == "network_unavailable"
    runtime.close()


def test_variables_of_the_group_replace_the_users_except_for_interfaces() -> None:
    env = {"RANK": "7", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "eth9"}
    given = environment(member(overlay(), 1, env=env), Image("sha256:0", None), Abilities())
    assert {"RANK=1", "MASTER_ADDR=train-0", "MASTER_PORT=1"} <= set(given)
    assert {"NCCL_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth9"} <= set(given)
    assert len(given) == len({entry.split("=")[0] for entry in given})


# --- networks are created and removed


def test_a_start_waits_until_a_manager_has_created_the_network(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    shared = overlay()
    reasons: list[Reason] = []

    def progress(reason: Reason) -> None:
        reasons.append(reason)
        manager.keep_overlays([shared])

    container = worker.start(member(shared, 0), progress, lambda: False)
    assert container is not None
    assert container.status == "running"
    assert {reason.code for reason in reasons} == {"waiting_for_network"}
    assert shared.name in reasons[0].message


def test_a_start_cancelled_while_it_waits_leaves_no_container(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    reasons: list[Reason] = []
    assert runtimes[1].start(member(overlay(), 0), reasons.append, lambda: bool(reasons)) is None
    assert all_containers(swarm.worker) == []


def test_a_start_without_network_is_retried_later() -> None:
    def start_without_network() -> None:
        raise EngineRefused(500, "Could not attach to network n: rpc error: code = NotFound desc = …")

    with pytest.raises(StartDelayed) as caught:
        start_with_network(start_without_network, "n", lambda _: None, lambda: False, wait_s=0)
    assert caught.value.reason.code == "waiting_for_network"


def test_an_overlay_is_removed_with_its_group_when_no_node_uses_it(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    used, idle, encrypted = overlay(), overlay(), overlay(encrypted=True)
    other_plane = runtime_on(swarm.manager, control_plane_id="cp-other")
    foreign = overlay()
    other_plane.keep_overlays([foreign])
    manager.keep_overlays([used, idle, encrypted])
    inspect = swarm.manager.client.api.inspect_network
    wait_until(lambda: inspect(encrypted.name)["Driver"] == "overlay" == inspect(used.name)["Driver"])
    found = inspect(encrypted.name)
    assert (found["Scope"], found["Attachable"], found["EnableIPv6"]) == ("swarm", True, False)
    assert found["Labels"] == {
        "mooring.control_plane": CONTROL_PLANE,
        "mooring.group": encrypted.group_id,
        "mooring.project": "proj-1",
    }
    assert "encrypted" in found["Options"]
    assert "encrypted" not in inspect(used.name)["Options"]
    container = start(worker, member(used, 0))
    manager.keep_overlays([])
    assert overlays_of(swarm.manager) == {used.name, foreign.name}
    stop_and_remove(worker, container)

    def gone() -> bool:
        manager.keep_overlays([])
        return overlays_of(swarm.manager) == {foreign.name}

    wait_until(gone)
    other_plane.close()


def test_many_managers_create_one_network(swarm: Swarm) -> None:
    shared = overlay()
    managers = [runtime_on(swarm.manager) for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda manager: manager.keep_overlays([shared]), managers))
    assert len(swarm.manager.client.api.networks(names=[shared.name])) == 1
    for manager in managers:
        manager.close()


def test_a_foreign_network_with_a_groups_name_is_not_used(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    shared = overlay()
    swarm.worker.client.networks.create(shared.name)
    with pytest.raises(StartRefused) as caught:
        start(runtimes[1], member(shared, 0))
    assert caught.value.reason.code == "network_unavailable"


# --- what members reach, and what reaches them (R10)


@contextmanager
def with_rules(swarm: Swarm, *management: str) -> Iterator[tuple[DockerRuntime, DockerRuntime]]:
    """As `runtimes`, but with firewall rules."""
    manager, worker = (
        runtime_on(node, isolate=Isolation(firewall_of(node, *management), required=True).problem)
        for node in swarm.nodes
    )
    try:
        yield manager, worker
    finally:
        manager.close()
        worker.close()


def test_members_and_containers_outside_their_group_cannot_reach_each_other(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    group, other_group = overlay(), overlay(project_id="proj-2")
    manager.keep_overlays([group, other_group])
    published: dict[str, Any] = {"command": SERVED, "ports": [{"container": 80}]}
    first, second = start(manager, member(group, 0)), start(worker, member(group, 1, **published))
    other_member = start(worker, member(other_group, 0, **published))
    single = start(worker, with_more(assignment(**published), project_id="proj-3"))
    in_group = {"train-1", overlay_address(swarm.worker, second)}
    of_second = {*in_group, *addresses(worker, second).values()}
    of_others = {*addresses(worker, other_member).values(), *addresses(worker, single).values()}
    ports = {f"{swarm.worker.address}:{one.endpoints[0].port}" for one in (second, other_member, single)}
    # Without rules, they reach each other's published ports.
    assert reached(manager, first, *in_group) == in_group
    assert all(reached(worker, one, *ports) for one in (other_member, single))
    with with_rules(swarm) as (_, agent):
        assert agent.facts().problem is None
    cases: list[tuple[DockerRuntime, Container, set[str], set[str]]] = [
        (manager, first, in_group, in_group),
        (worker, second, in_group | of_others | ports, in_group),
        # In its own group, the name train-1 would be another member's.
        (worker, other_member, of_second - {"train-1"} | ports, set()),
        (worker, single, of_second | ports, set()),
    ]
    with ThreadPoolExecutor() as pool:
        tries = [pool.submit(reached, agent, source, *targets) for agent, source, targets, _ in cases]
    assert [each.result() for each in tries] == [expected for *_, expected in cases]
    # From outside the node, the published ports are still reached.
    assert all(answers(swarm.manager.inside, port) for port in ports)


def test_members_cannot_reach_metadata_management_or_the_node(swarm: Swarm) -> None:
    targets = {f"{host}:{PORT}" for host in (METADATA, swarm.manager.address, swarm.worker.address)}
    route = ["ip", "route", "add", METADATA, "via", swarm.manager.address]
    subprocess.run(swarm.manager.inside("ip", "address", "add", f"{METADATA}/32", "dev", "lo"), check=True)
    subprocess.run(swarm.worker.inside(*route), check=True)
    shared = overlay()
    with (
        with_rules(swarm, f"{swarm.manager.address}/32") as (manager, worker),
        listening(swarm.manager.inside),
        listening(swarm.worker.inside),
    ):
        manager.keep_overlays([shared])
        start(manager, member(shared, 0, command=SERVED))
        second = start(worker, member(shared, 1))
        flush_rules(swarm.worker)
        assert reached(worker, second, *targets) == targets
        assert worker.facts().problem is None
        assert reached(worker, second, "train-0", *targets) == {"train-0"}
    subprocess.run(swarm.manager.inside("ip", "address", "del", f"{METADATA}/32", "dev", "lo"), check=True)
    subprocess.run(swarm.worker.inside("ip", "route", "del", METADATA), check=True)


def test_foreign_hosts_cannot_inject_packets_into_an_overlay(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    """Without rules, a node accepts any packet at its VXLAN port, for the network that the packet names."""
    manager, worker = runtimes
    shared = overlay()
    manager.keep_overlays([shared])
    victim = start(worker, member(shared, 0))
    attacker = start(manager, with_more(assignment(), project_id="proj-2"))
    details = swarm.worker.client.api.inspect_network(shared.name)
    vni = int(details["Options"]["com.docker.network.driver.overlay.vxlanid_list"])
    forged = vxlan(vni, overlay_address(swarm.worker, victim), b"forged")

    def arrives() -> bool:
        with listener(swarm.worker, victim) as received:
            send = ["-c", SEND_UDP, swarm.worker.address, "4789", forged.hex()]
            subprocess.run([*within(swarm.manager, attacker), sys.executable, *send], check=True)
            return received() == b"forged"

    assert arrives()
    with with_rules(swarm) as (agent, _):
        assert agent.facts().problem is None
    assert not arrives()


SEND_UDP = """
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(bytes.fromhex(sys.argv[3]), (sys.argv[1], int(sys.argv[2])))
"""
RECEIVE_UDP = """
import socket, sys
receiver = socket.socket(type=socket.SOCK_DGRAM)
receiver.bind(("", 9999))
receiver.settimeout(1)
print("listening", flush=True)
sys.stdout.buffer.write(receiver.recv(100))
"""


def within(node: DockerNode, container: Container) -> list[str]:
    """A prefix that runs a program of this machine in the container's network: busybox has none for UDP."""
    pid = node.client.api.inspect_container(container.container_id)["State"]["Pid"]
    return [program("nsenter"), f"--net=/proc/{pid}/ns/net"]


@contextmanager
def listener(node: DockerNode, container: Container) -> Iterator[Callable[[], bytes]]:
    """Listen in the container's network. The function returns the packet; b"" if none came in a second."""
    argv = [*within(node, container), sys.executable, "-c", RECEIVE_UDP]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    yield lambda: process.communicate()[0]
    assert process.wait(5) is not None


def vxlan(vni: int, to: str, payload: bytes) -> bytes:
    """A UDP packet to port 9999 of the member `to`, as one node sends it to another."""
    address = bytes(int(part) for part in to.split("."))
    source = address[:3] + bytes([200])
    udp = (9998).to_bytes(2) + (9999).to_bytes(2) + (8 + len(payload)).to_bytes(2) + bytes(2) + payload
    header = b"\x45\0" + (20 + len(udp)).to_bytes(2) + bytes(4) + b"\x40\x11\0\0" + source + address
    total = sum(int.from_bytes(header[at : at + 2]) for at in range(0, 20, 2))
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    header = header[:10] + checksum.to_bytes(2) + header[12:]
    ethernet = b"\x02\x42" + address + b"\x02\x42" + source + b"\x08\0"
    return b"\x08\0\0\0" + vni.to_bytes(3) + b"\0" + ethernet + header + udp


def test_the_shared_gateway_must_isolate_projects(docker_node: DockerNode) -> None:
    engine = Engine({"DOCKER_HOST": docker_node.url})
    overlays = Overlays(engine)
    assert overlays.gateway() is None
    assert overlays.ensure_gateway() == overlays.gateway() == GATEWAY
    docker_node.client.api.remove_network(GATEWAY)
    docker_node.client.networks.create(GATEWAY)
    try:
        with pytest.raises(StartRefused, match="enable_icc=false"):
            overlays.ensure_gateway()
    finally:
        docker_node.client.api.remove_network(GATEWAY)
        engine.close()


def test_the_gateway_of_overlays_has_the_rules_of_projects_and_isolates_its_containers() -> None:
    rules = forward_rules(4, [], ["gw"])
    assert {"-i mr-+ -o gw -j DROP", "-i gw -o mr-+ -j DROP", "-i gw -o gw -j DROP"} <= set(rules)
    assert "-i gw -d 169.254.0.0/16 -j DROP" in rules
    assert {"-i mr-+ -j DROP", "-i gw -j DROP"} <= set(input_rules(4, ["gw"]))


# --- which agents create the networks


class ManagingRuntime(RecordingRuntime):
    """A runtime that reports this swarm, and records the networks of each `keep_overlays`."""

    def __init__(self, swarm: SwarmFacts | None) -> None:
        super().__init__()
        self.swarm = swarm
        self.kept: list[list[str]] = []

    def facts(self) -> RuntimeFacts:
        return replace(super().facts(), swarm=self.swarm)

    def keep_overlays(self, wanted: Any) -> None:
        super().keep_overlays(wanted)
        self.kept.append([network.name for network in wanted])


@pytest.mark.parametrize(
    ("swarm", "is_manager"),
    [(SwarmFacts(cluster_id="c", manager=True), True), (SwarmFacts(cluster_id="c", manager=False), False)],
)
def test_only_agents_of_managers_manage_overlays(tmp_path: Path, swarm: SwarmFacts, is_manager: bool) -> None:
    wanted = overlay()
    with control_plane(overlays=[wanted]) as server:
        node = Node(server, tmp_path)
        runtime = node.runtime = ManagingRuntime(swarm)
        node.begin()
        try:
            wait_until(lambda: _last_report(server) == (swarm, 1))
            server.overlays = []
            server.wants()
            wait_until(lambda: _last_report(server) == (swarm, 2))
            wait_until(lambda: runtime.kept == ([[wanted.name], []] if is_manager else []))
        finally:
            node.end()


class EngineAway(ManagingRuntime):
    """Refuses to keep networks until it is back."""

    is_back = False

    def keep_overlays(self, wanted: Any) -> None:
        if not self.is_back:
            raise RuntimeUnavailable("not created")
        super().keep_overlays(wanted)


def test_a_manager_tries_again_to_create_a_network_without_a_new_desired_state(tmp_path: Path) -> None:
    wanted = overlay()
    with control_plane(overlays=[wanted], revision=1) as server:
        node = Node(server, tmp_path)
        runtime = node.runtime = EngineAway(SwarmFacts(cluster_id="c", manager=True))
        node.begin()
        try:
            wait_until(lambda: len(server.heartbeats) > 2)  # nothing changes, so they replace the reports
            runtime.is_back = True
            wait_until(lambda: runtime.kept == [[wanted.name]])
        finally:
            node.end()


def _last_report(server: TinyControlPlane) -> tuple[SwarmFacts | None, int] | None:
    """The swarm in the newest report, and the report's generation."""
    last = server.last()
    return (last.facts.swarm, last.generation) if last else None
