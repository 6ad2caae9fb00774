"""Groups over several nodes, on two real dockerds in one swarm: who finds and who reaches whom."""

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
from mooring.agent.runtime import Container, RuntimeFacts, StartDelayed, StartRefused
from mooring.core.instance.state import Reason
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment, OverlayNetwork
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
from tests.agent.sync.test_agent import CountingRuntime, Node
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
    """The agents' of the manager and of the worker; neither makes rules."""
    manager, worker = (runtime_on(node) for node in swarm.nodes)
    yield manager, worker
    manager.close()
    worker.close()


def overlay(*, encrypted: bool = False, project_id: str = "proj-1") -> OverlayNetwork:
    """Of a group of its own."""
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
    [network] = node.client.api.inspect_container(container.container_id)["NetworkSettings"][
        "Networks"
    ].values()
    return str(network["IPAddress"])


def addresses(runtime: DockerRuntime, container: Container) -> dict[str, str]:
    """The container's IPv4 addresses by interface."""
    said = output_of(runtime, container, ["ip", "-4", "-o", "address"])
    lines = [line.split() for line in said.splitlines()]
    return {line[1]: line[3].split("/")[0] for line in lines if line[1] != "lo"}


def overlays_of(node: DockerNode) -> set[str]:
    names = {str(network["Name"]) for network in node.client.api.networks()}
    return {name for name in names if name.startswith("mooring-group-")}


def ended(runtime: DockerRuntime, container: Container) -> None:
    stop(runtime, container, 1)
    runtime.remove(container)


# --- what a node says


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
    def told(info: dict[str, Any]) -> dict[str, Check]:
        return {check.name: check for check in engine_checks(info, [], {})}

    on_manager, on_worker = (told(runtime.info()) for runtime in runtimes)
    assert (on_manager["swarm"].ok, "manager" in on_manager["swarm"].detail) == (True, True)
    assert (on_worker["swarm"].ok, "worker" in on_worker["swarm"].detail) == (True, True)
    # Docker takes part in a swarm only without live-restore: to turn it on is no advice.
    assert (on_worker["live-restore"].ok, "swarm" in on_worker["live-restore"].remedy) == (None, True)
    unread = told(runtimes[1].info() | {"DockerRootDir": str(tmp_path)})["swarm"]
    assert (unread.ok, "swarm-node.crt" in unread.remedy) == (None, True)


# --- members among themselves


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
    # What it publishes is reached from outside, as of any instance.
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
        # The first interface is what NCCL and Gloo are told to use; the own name is of one address only.
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
            ended(runtime, container)
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
        ended(runtime, container)
        runtime.close()


def test_only_a_group_gets_another_network(docker_node: DockerNode) -> None:
    runtime = runtime_on(docker_node)
    sly = member(replace_name(overlay(), "host"), 0)
    with pytest.raises(StartRefused) as caught:
        start(runtime, sly)
    assert caught.value.reason.code == "network_unavailable"
    runtime.close()


def replace_name(given: OverlayNetwork, name: str) -> OverlayNetwork:
    return given.model_copy(update={"name": name})


def test_group_variables_win_and_users_choose_interfaces() -> None:
    env = {"RANK": "7", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "eth9"}
    given = environment(member(overlay(), 1, env=env), Image("sha256:0", None), Abilities())
    assert {"RANK=1", "MASTER_ADDR=train-0", "MASTER_PORT=1"} <= set(given)
    assert {"NCCL_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth9"} <= set(given)
    assert len(given) == len({entry.split("=")[0] for entry in given})


# --- networks come and go


def test_a_start_waits_until_a_manager_has_created_the_network(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    shared = overlay()
    waited: list[Reason] = []

    def progress(reason: Reason) -> None:
        waited.append(reason)
        manager.keep_overlays([shared])

    container = worker.start(member(shared, 0), progress, lambda: False)
    assert container is not None
    assert container.status == "running"
    assert {reason.code for reason in waited} == {"waiting_for_network"}
    assert shared.name in waited[0].message


def test_a_start_cancelled_while_it_waits_leaves_no_container(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    waited: list[Reason] = []
    assert runtimes[1].start(member(overlay(), 0), waited.append, lambda: bool(waited)) is None
    assert all_containers(swarm.worker) == []


def test_a_start_without_network_is_retried_later() -> None:
    def not_there() -> None:
        raise EngineRefused(500, "Could not attach to network n: rpc error: code = NotFound desc = …")

    with pytest.raises(StartDelayed) as caught:
        start_with_network(not_there, "n", lambda _: None, lambda: False, wait_s=0)
    assert caught.value.reason.code == "waiting_for_network"


def test_an_overlay_is_removed_with_its_group_when_no_node_uses_it(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    used, idle, encrypted = overlay(), overlay(), overlay(encrypted=True)
    strangers = runtime_on(swarm.manager, control_plane_id="cp-other")
    theirs = overlay()
    strangers.keep_overlays([theirs])
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
    assert overlays_of(swarm.manager) == {used.name, theirs.name}
    ended(worker, container)

    def gone() -> bool:
        manager.keep_overlays([])
        return overlays_of(swarm.manager) == {theirs.name}

    wait_until(gone)
    strangers.close()


def test_many_managers_create_one_network(swarm: Swarm) -> None:
    shared = overlay()
    managers = [runtime_on(swarm.manager) for _ in range(4)]
    with ThreadPoolExecutor() as making:
        list(making.map(lambda manager: manager.keep_overlays([shared]), managers))
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


# --- who reaches whom (R10)


@contextmanager
def guarded(swarm: Swarm, *management: str) -> Iterator[tuple[DockerRuntime, DockerRuntime]]:
    """As `runtimes`, of agents that make their rules."""
    manager, worker = (
        runtime_on(node, isolate=Isolation(firewall_of(node, *management), required=True).problem)
        for node in swarm.nodes
    )
    try:
        yield manager, worker
    finally:
        manager.close()
        worker.close()


def test_members_and_foreign_hosts_cannot_reach_each_other(
    swarm: Swarm, runtimes: tuple[DockerRuntime, DockerRuntime]
) -> None:
    manager, worker = runtimes
    mine, theirs = overlay(), overlay(project_id="proj-2")
    manager.keep_overlays([mine, theirs])
    published: dict[str, Any] = {"command": SERVED, "ports": [{"container": 80}]}
    first, second = start(manager, member(mine, 0)), start(worker, member(mine, 1, **published))
    other = start(worker, member(theirs, 0, **published))
    alone = start(worker, with_more(assignment(**published), project_id="proj-3"))
    ours = {"train-1", overlay_address(swarm.worker, second)}
    inside = {*ours, *addresses(worker, second).values()}
    doors = {f"{swarm.worker.address}:{one.endpoints[0].port}" for one in (second, other, alone)}
    others = {*addresses(worker, other).values(), *addresses(worker, alone).values()}
    # By way of the node they meet, before there are rules.
    assert reached(manager, first, *ours) == ours
    assert all(reached(worker, one, *doors) for one in (other, alone))
    with guarded(swarm) as (_, agent):
        assert agent.facts().problem is None
    tries = [
        (manager, first, ours, ours),
        (worker, second, ours | others | doors, ours),
        (worker, other, inside - {"train-1"} | doors, set()),  # its own group has a train-1
        (worker, alone, inside | doors, set()),
    ]
    with ThreadPoolExecutor() as at_once:
        got = list(at_once.map(lambda each: reached(each[0], each[1], *each[2]), tries))
    assert got == [expected for *_, expected in tries]
    # Published is published: for everybody outside, and for containers on other machines.
    assert all(answers(swarm.manager.inside, door) for door in doors)


def test_members_cannot_reach_metadata_management_or_the_node(swarm: Swarm) -> None:
    targets = {f"{host}:{PORT}" for host in (METADATA, swarm.manager.address, swarm.worker.address)}
    route = ["ip", "route", "add", METADATA, "via", swarm.manager.address]
    subprocess.run(swarm.manager.inside("ip", "address", "add", f"{METADATA}/32", "dev", "lo"), check=True)
    subprocess.run(swarm.worker.inside(*route), check=True)
    shared = overlay()
    with (
        guarded(swarm, f"{swarm.manager.address}/32") as (manager, worker),
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
    """A node takes whatever comes to its VXLAN port for a packet of the network that it names."""
    manager, worker = runtimes
    shared = overlay()
    manager.keep_overlays([shared])
    victim = start(worker, member(shared, 0))
    stranger = start(manager, with_more(assignment(), project_id="proj-2"))
    details = swarm.worker.client.api.inspect_network(shared.name)
    vni = int(details["Options"]["com.docker.network.driver.overlay.vxlanid_list"])
    forged = vxlan(vni, overlay_address(swarm.worker, victim), b"forged")

    def arrives() -> bool:
        with listener(swarm.worker, victim) as heard:
            send = ["-c", SEND_UDP, swarm.worker.address, "4789", forged.hex()]
            subprocess.run([*within(swarm.manager, stranger), sys.executable, *send], check=True)
            return heard() == b"forged"

    assert arrives()
    with guarded(swarm) as (agent, _):
        assert agent.facts().problem is None
    assert not arrives()


SEND_UDP = """
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(bytes.fromhex(sys.argv[3]), (sys.argv[1], int(sys.argv[2])))
"""
HEAR_UDP = """
import socket, sys
heard = socket.socket(type=socket.SOCK_DGRAM)
heard.bind(("", 9999))
heard.settimeout(1)
print("listening", flush=True)
sys.stdout.buffer.write(heard.recv(100))
"""


def within(node: DockerNode, container: Container) -> list[str]:
    """What runs a program of this machine in the container's network: busybox has none that speaks UDP."""
    pid = node.client.api.inspect_container(container.container_id)["State"]["Pid"]
    return [program("nsenter"), f"--net=/proc/{pid}/ns/net"]


@contextmanager
def listener(node: DockerNode, container: Container) -> Iterator[Callable[[], bytes]]:
    argv = [*within(node, container), sys.executable, "-c", HEAR_UDP]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    yield lambda: process.communicate()[0]
    assert process.wait(5) is not None


def vxlan(vni: int, to: str, payload: bytes) -> bytes:
    """A UDP packet to port 9999 of a member, as one node sends it to another."""
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


def test_a_shared_bridge_has_the_rules_of_projects_and_one_more() -> None:
    rules = forward_rules(4, [], ["gw"])
    assert {"-i mr-+ -o gw -j DROP", "-i gw -o mr-+ -j DROP", "-i gw -o gw -j DROP"} <= set(rules)
    assert "-i gw -d 169.254.0.0/16 -j DROP" in rules
    assert {"-i mr-+ -j DROP", "-i gw -j DROP"} <= set(input_rules(4, ["gw"]))


# --- what the agent does with what it hears


class ManagingRuntime(CountingRuntime):
    """One that says it manages a swarm, or does not, and notes which networks it was told to keep."""

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
    ("swarm", "is_told"),
    [(SwarmFacts(cluster_id="c", manager=True), True), (SwarmFacts(cluster_id="c", manager=False), False)],
)
def test_only_agents_of_managers_manage_overlays(tmp_path: Path, swarm: SwarmFacts, is_told: bool) -> None:
    wanted = overlay()
    with control_plane(overlays=[wanted]) as server:
        node = Node(server, tmp_path)
        runtime = node.runtime = ManagingRuntime(swarm)
        node.begin()
        try:
            wait_until(lambda: _told(server) == (swarm, 1))
            server.overlays = []
            server.wants()
            wait_until(lambda: _told(server) == (swarm, 2))
            wait_until(lambda: runtime.kept == ([[wanted.name], []] if is_told else []))
        finally:
            node.end()


def _told(server: TinyControlPlane) -> tuple[SwarmFacts | None, int] | None:
    """The swarm that the newest report names, and the generation that it was made under."""
    last = server.last()
    return (last.facts.swarm, last.generation) if last else None
