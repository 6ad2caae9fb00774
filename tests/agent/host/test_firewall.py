"""R10: what a container can reach, first without the rules, then with them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from pathlib import Path

import pytest

from mooring.agent.docker.create import bridge_name
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.host.firewall import (
    Firewall,
    FirewallUnavailable,
    Isolation,
    forward_rules,
    input_rules,
    management_addresses,
    restore_script,
)
from mooring.agent.runtime import Container, RuntimeUnavailable
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    all_containers,
    assignment,
    output_of,
    runtime_on,
    start,
)
from tests.testbed import isolation
from tests.testbed.dockerd import DockerNode
from tests.testbed.parts import program
from tests.testbed.workspace import Workspace

METADATA = "169.254.169.254"
PORT = 8080
HELLO = "hello"
SERVER = f"""
import http.server, sys
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{HELLO}")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("", {PORT}), Hello)
print("listening", flush=True)
server.serve_forever()
"""
SERVED = ["sh", "-c", f"echo {HELLO} > /tmp/index.html; exec httpd -f -p 80 -h /tmp"]


@contextmanager
def listening(inside: Callable[..., list[str]]) -> Iterator[None]:
    process = subprocess.Popen(inside(sys.executable, "-c", SERVER), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"listening\n"
        yield
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Neighbour:
    """A machine beside the node that answers at the metadata address and at its own."""

    address: str
    namespace: Path

    def inside(self, *argv: str) -> list[str]:
        return [program("nsenter"), f"--net={self.namespace}", *argv]


@pytest.fixture(scope="module")
def neighbour(workspace: Workspace, docker_node: DockerNode) -> Iterator[Neighbour]:
    host = workspace.take_host()
    name, address = f"{workspace.prefix}-{host}", workspace.node_address(host)
    namespace = isolation.make_namespace(name, workspace.prefix, address, workspace.root_address)
    made = Neighbour(address, namespace)
    subprocess.run(made.inside("ip", "address", "add", f"{METADATA}/32", "dev", "lo"), check=True)
    subprocess.run(docker_node.inside("ip", "route", "add", METADATA, "via", address), check=True)
    with listening(made.inside):
        yield made
    subprocess.run(docker_node.inside("ip", "route", "del", METADATA), check=True)
    isolation.clear(name, workspace.root / name)
    workspace.give_back_host(host)


@pytest.fixture
def node(docker_node: DockerNode) -> Iterator[DockerNode]:
    """A node without the rules that agents of other tests leave."""
    flush_rules(docker_node)
    yield docker_node
    docker_node.remove_containers()


def iptables(node: DockerNode, *arguments: str, check: bool = True) -> str:
    argv = node.inside(program("iptables"), "-w", *arguments)
    return subprocess.run(argv, capture_output=True, text=True, check=check).stdout


def flush_rules(node: DockerNode) -> None:
    for chain in ("MOORING-FORWARD", "MOORING-INPUT"):
        iptables(node, "-F", chain, check=False)


def firewall_of(node: DockerNode, *management: str) -> Firewall:
    networks = tuple(ip_network(text) for text in management)
    return Firewall(lambda: networks, enter=node.inside())


def reached(runtime: DockerRuntime, container: Container, *urls: str) -> set[str]:
    """Return the URLs that a program in the container can reach. All are tried at the same time."""
    tries = " ".join(
        f"(timeout 2 wget -q -O - http://{url}/ | grep -q {HELLO} && echo {url}) &" for url in urls
    )
    return set(output_of(runtime, container, ["sh", "-c", f"({tries} wait) 2>/dev/null"]).split())


def answers(inside: Callable[..., list[str]], url: str) -> bool:
    """Return whether a program that `inside` starts can reach the URL."""
    client = f"import urllib.request as r; print(r.urlopen('http://{url}/', timeout=5).read().decode())"
    done = subprocess.run(inside(sys.executable, "-c", client), capture_output=True, text=True, check=False)
    return done.stdout.strip() == HELLO


def test_containers_cannot_reach_metadata_management_or_the_node(
    node: DockerNode, runtime: DockerRuntime, neighbour: Neighbour
) -> None:
    container = start(runtime, assignment(command=SERVED, ports=[{"container": 80}]))
    bridge = bridge_name("proj-1", CONTROL_PLANE)
    [gateway] = output_of(runtime, container, ["sh", "-c", "ip route | awk '/default/ {print $3}'"]).split()
    targets = {f"{host}:{PORT}" for host in (METADATA, neighbour.address, gateway, node.address)}
    published = f"{node.address}:{container.endpoints[0].port}"
    firewall = firewall_of(node, f"{neighbour.address}/32")
    with listening(node.inside):
        assert reached(runtime, container, *targets) == targets
        firewall.ensure_rules([bridge])
        assert firewall.check()
        assert reached(runtime, container, *targets) == set()
        # Published ports are reachable, also from the management network and the node itself.
        assert answers(neighbour.inside, published)
        assert answers(lambda *argv: list(argv), published)
        assert answers(node.inside, f"127.0.0.1:{container.endpoints[0].port}")


@pytest.mark.parametrize(
    "change",
    [
        ["-F", "INPUT"],
        ["-F", "DOCKER-USER"],
        ["-D", "FORWARD", "-j", "DOCKER-USER"],
        ["-F", "MOORING-INPUT"],
        ["-F", "MOORING-FORWARD"],
        ["-I", "INPUT", "1", "-j", "ACCEPT"],
        ["-I", "DOCKER-USER", "1", "-j", "RETURN"],
    ],
)
def test_changed_rules_are_restored(node: DockerNode, change: list[str]) -> None:
    firewall = firewall_of(node)
    firewall.ensure_rules([])
    before = iptables(node, "-S")
    iptables(node, *change)
    assert iptables(node, "-S") != before
    firewall.ensure_rules([])
    assert firewall.check()
    after = iptables(node, "-S")
    for chain in ("MOORING-FORWARD", "MOORING-INPUT"):
        assert after.count(f"-j {chain}\n") == 1
        assert lines_of(after, chain) == lines_of(before, chain)
    if change[0] == "-I":  # undo it for other tests
        iptables(node, "-D", change[1], *change[3:])


def lines_of(listing: str, chain: str) -> list[str]:
    return [line for line in listing.splitlines() if line.startswith(f"-A {chain} ")]


def test_existing_rules_are_not_changed(node: DockerNode, caplog: pytest.LogCaptureFixture) -> None:
    firewall = firewall_of(node)
    firewall.ensure_rules([])
    caplog.clear()
    with caplog.at_level("INFO"):
        firewall.ensure_rules([])
    assert caplog.messages == []


def test_each_report_of_the_agent_restores_missing_rules(node: DockerNode) -> None:
    isolated = Isolation(firewall_of(node), required=True)
    runtime = runtime_on(node, isolate=isolated.problem)
    start(runtime, assignment())
    assert firewall_of(node).check()
    flush_rules(node)
    assert not firewall_of(node).check()
    assert runtime.facts().problem is None
    assert firewall_of(node).check()
    runtime.close()


def test_nothing_starts_if_required_rules_cannot_be_set(node: DockerNode) -> None:
    # This process is not in Docker's network namespace, which has the rules.
    runtime = runtime_on(node, isolate=Isolation(Firewall(), required=True).problem)
    problem = runtime.facts().problem
    assert problem is not None
    assert (problem.code, "network namespace" in problem.message) == ("network_isolation_unavailable", True)
    with pytest.raises(RuntimeUnavailable, match="network namespace"):
        start(runtime, assignment())
    assert all_containers(node) == []
    runtime.close()


def test_best_effort_starts_and_logs_a_warning_once(
    node: DockerNode, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_on(node, isolate=Isolation(Firewall(), required=False).problem)
    assert runtime.facts().problem is None
    assert runtime.facts().problem is None
    assert start(runtime, assignment()).status == "running"
    assert len([line for line in caplog.messages if "reach the node itself" in line]) == 1
    runtime.close()


def test_a_bridge_that_is_not_in_dockers_rules_is_an_error(node: DockerNode) -> None:
    with pytest.raises(FirewallUnavailable, match="in Docker's network namespace"):
        firewall_of(node).ensure_rules(["mr-nowhere"])


def test_errors_name_the_remedy(node: DockerNode, tmp_path: Path) -> None:
    with pytest.raises(FirewallUnavailable, match="install the package iptables"):
        Firewall(program_path=str(tmp_path)).ensure_rules([])
    as_nobody = [*node.inside(), program("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    with pytest.raises(FirewallUnavailable, match="run the agent as root"):
        Firewall(enter=as_nobody).ensure_rules([])


def test_projects_are_isolated_without_dockers_rule(node: DockerNode, runtime: DockerRuntime) -> None:
    """Newer releases of Docker have no isolation rule for published ports."""
    first = start(runtime, assignment())
    second = start(runtime, assignment(command=SERVED).model_copy(update={"project_id": "proj-2"}))
    details = node.client.api.inspect_container(second.container_id)["NetworkSettings"]["Networks"]
    address = details["mooring-proj-2"]["IPAddress"]
    jump = ["FORWARD", "-j", "DOCKER-ISOLATION-STAGE-1"]
    iptables(node, "-D", *jump)
    try:
        assert reached(runtime, first, address) == {address}
        firewall_of(node).ensure_rules([])
        assert reached(runtime, first, address) == set()
    finally:
        iptables(node, "-I", jump[0], "2", *jump[1:])


def test_the_rules_of_each_ip_version() -> None:
    management = [ip_network("10.0.0.0/24"), ip_network("fd12::/16")]
    assert [rule for rule in forward_rules(4, management) if " -d " in rule] == [
        "-i mr-+ -d 168.63.129.16/32 -p udp -m udp --dport 53 -j RETURN",
        "-i mr-+ -d 168.63.129.16/32 -p tcp -m tcp --dport 53 -j RETURN",
        "-i mr-+ -d 169.254.0.0/16 -j DROP",
        "-i mr-+ -d 168.63.129.16/32 -j DROP",
        "-i mr-+ -d 100.100.100.200/32 -j DROP",
        "-i mr-+ -d 192.0.0.192/32 -j DROP",
        "-i mr-+ -d 10.0.0.0/24 -j DROP",
    ]
    assert [rule for rule in forward_rules(6, management) if " -d " in rule] == [
        "-i mr-+ -d fd00:ec2::254/128 -j DROP",
        "-i mr-+ -d fd20:ce::254/128 -j DROP",
        "-i mr-+ -d fd00:c1::a9fe:a9fe/128 -j DROP",
        "-i mr-+ -d fd00:42::42/128 -j DROP",
        "-i mr-+ -d fd12::/16 -j DROP",
    ]
    for version in (4, 6):
        assert input_rules(version)[-1] == "-i mr-+ -j DROP"


def test_without_dockers_chain_the_jump_is_from_forward() -> None:
    assert "-I FORWARD 1 -j MOORING-FORWARD" in restore_script(6, ["-P FORWARD ACCEPT"], [])
    assert "-I DOCKER-USER 1 -j MOORING-FORWARD" in restore_script(4, ["-N DOCKER-USER"], [])


@pytest.mark.parametrize(
    ("given", "url", "expected"),
    [
        (None, "http://127.0.0.1:8700", set()),
        (None, "http://localhost:8700", set()),
        (None, "https://192.0.2.7:8700", {"192.0.2.7/32"}),
        (None, "https://[2001:db8::7]", {"2001:db8::7/128"}),
        (None, "https://no-such-host.invalid", set()),
        ((), "https://192.0.2.7", set()),
        ((IPv4Network("10.0.0.0/8"),), "https://192.0.2.7", {"10.0.0.0/8"}),
    ],
)
def test_management_addresses_default_to_the_control_plane(
    given: tuple[IPv4Network, ...] | None, url: str, expected: set[str]
) -> None:
    assert {str(network) for network in management_addresses(given, url)()} == expected
