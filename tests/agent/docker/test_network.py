"""One network per project on a real dockerd: what instances reach, and when a network exists."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from docker.types import IPAMConfig, IPAMPool

from mooring.agent.docker.create import bridge_name, network_name
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, RuntimeUnavailable, StartRefused
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    all_containers,
    assignment,
    output_of,
    runtime_on,
    start,
    stop,
)
from tests.agent.host.test_firewall import SERVED, answers, firewall_of, flush_rules, reached
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

# Docker's default address ranges, except the first and the test bed's own 172.30.
LATER_RANGES = (
    "172.18.0.0/15",
    "172.20.0.0/14",
    "172.24.0.0/14",
    "172.28.0.0/15",
    "172.31.0.0/16",
    "192.168.0.0/16",
)


def of_project(project_id: str, **spec: Any) -> Assignment:
    return assignment(**spec).model_copy(update={"project_id": project_id})


def networks(node: DockerNode) -> set[str]:
    names = {str(network["Name"]) for network in node.client.api.networks()}
    return {name for name in names if name.startswith("mooring-")}


def stop_and_remove(runtime: DockerRuntime, container: Container) -> None:
    stop(runtime, container, 1)
    runtime.remove(container)


def pool(subnet: str) -> IPAMConfig:
    return IPAMConfig(pool_configs=[IPAMPool(subnet=subnet)])


def address_of(node: DockerNode, container: Container) -> str:
    settings = node.client.api.inspect_container(container.container_id)["NetworkSettings"]
    [network] = settings["Networks"].values()
    return str(network["IPAddress"])


def test_instances_reach_their_own_project_by_name_and_no_other(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    flush_rules(node)
    source = start(runtime, of_project("proj-1"))
    same_project = of_project("proj-1", command=SERVED)
    neighbour = start(runtime, same_project)
    allowed = {same_project.name, address_of(node, neighbour)}
    other_project = of_project("proj-2", command=SERVED, ports=[{"container": 80}])
    other = start(runtime, other_project)
    forbidden = {other_project.name, address_of(node, other)}
    port = other.endpoints[0].port
    published = {f"{node.address}:{port}", f"172.30.0.1:{port}"}
    wait_until(lambda: reached(runtime, source, *allowed) == allowed)
    # Docker isolates the networks from each other, but not from ports that are published on the node.
    assert reached(runtime, source, *forbidden, *published, *allowed) == published | allowed
    firewall_of(node).ensure_rules([bridge_name(project, CONTROL_PLANE) for project in ("proj-1", "proj-2")])
    assert reached(runtime, source, *forbidden, *published, *allowed) == allowed
    # From outside the node, the published port is still reached.
    assert answers(lambda *argv: list(argv), f"{node.address}:{port}")


def test_a_network_has_labels_and_a_named_interface(node: DockerNode, runtime: DockerRuntime) -> None:
    container = start(runtime, of_project("proj-1"))
    assert "eth0" not in output_of(runtime, container, ["cat", "/proc/net/if_inet6"])
    found = node.client.api.inspect_network("mooring-proj-1")
    assert found["Labels"] == {"mooring.control_plane": CONTROL_PLANE, "mooring.project": "proj-1"}
    assert (found["Driver"], found["EnableIPv6"], found["Attachable"]) == ("bridge", False, False)
    interface = found["Options"]["com.docker.network.bridge.name"]
    assert interface.startswith("mr-") and len(interface) <= 15


def test_concurrent_starts_create_one_network(node: DockerNode, runtime: DockerRuntime) -> None:
    second_agent = runtime_on(node)
    given = [of_project("proj-1") for _ in range(4)]
    with ThreadPoolExecutor() as starts:
        started = list(starts.map(start, [runtime, second_agent] * 2, given))
    assert [container.status for container in started] == ["running"] * 4
    assert len(node.client.api.networks(names=["mooring-proj-1"])) == 1
    second_agent.close()


def test_a_network_is_removed_after_its_last_instance(node: DockerNode, runtime: DockerRuntime) -> None:
    first, second = start(runtime, of_project("proj-1")), start(runtime, of_project("proj-1"))
    other_plane = runtime_on(node, control_plane_id="cp-other")
    start(other_plane, of_project("proj-3"))
    stop(runtime, first, 1)
    stop_and_remove(runtime, second)
    runtime.facts()
    assert networks(node) == {"mooring-proj-1", "mooring-proj-3"}
    runtime.restart(first)
    stop_and_remove(runtime, first)
    runtime.facts()
    assert networks(node) == {"mooring-proj-3"}
    other_plane.close()


def test_a_network_that_a_start_uses_is_not_removed(node: DockerNode, runtime: DockerRuntime) -> None:
    def sweep_before_the_create() -> bool:
        wait_until(lambda: networks(node))
        for _ in range(10):  # one that coincides with the creation removes nothing
            runtime.facts()
        return False

    container = runtime.start(of_project("proj-1"), lambda _reason: None, sweep_before_the_create)
    assert container is not None and container.status == "running"
    assert networks(node) == {"mooring-proj-1"}


def test_a_foreign_network_with_a_projects_name_is_not_used(node: DockerNode, runtime: DockerRuntime) -> None:
    node.client.networks.create(network_name("proj-1"))
    with pytest.raises(StartRefused) as caught:
        start(runtime, of_project("proj-1"))
    assert caught.value.reason.code == "network_unavailable"
    assert all_containers(node) == []
    runtime.facts()
    assert networks(node) == {"mooring-proj-1"}


def test_nothing_starts_on_a_network_without_rules(node: DockerNode) -> None:
    no_rules = Reason(code="isolation_unavailable", message="iptables failed")
    with closing(runtime_on(node, isolate=lambda _bridges: no_rules)) as runtime:
        with pytest.raises(RuntimeUnavailable, match="iptables failed"):
            start(runtime, of_project("proj-1"))
        assert all_containers(node) == []


def test_unused_networks_are_removed_when_address_ranges_run_out(
    node: DockerNode, runtime: DockerRuntime
) -> None:
    for number, range_ in enumerate(LATER_RANGES):
        node.client.networks.create(f"held-{number}", ipam=pool(range_))
    stop_and_remove(runtime, start(runtime, of_project("proj-1")))
    start(runtime, of_project("proj-2"))  # in the range that proj-1 had
    with pytest.raises(StartRefused) as caught:
        start(runtime, of_project("proj-3"))
    assert caught.value.reason.code == "network_unavailable"
    assert "default-address-pools" in caught.value.reason.message
    assert networks(node) == {"mooring-proj-2"}
