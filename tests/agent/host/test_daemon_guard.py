"""R25: the Docker daemon cannot reach cloud metadata with a pull; other programs on the machine can."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.host.daemon_guard import CHAIN, DaemonGuard, daemon_groups, rules
from mooring.agent.host.firewall import METADATA as METADATA_NETWORKS
from mooring.agent.host.firewall import Firewall, FirewallUnavailable
from mooring.agent.runtime import StartDelayed
from tests.agent.docker_assignments import assignment, start
from tests.testbed.dockerd import DockerNode
from tests.testbed.parts import program
from tests.testbed.waiting import wait_until

METADATA = "169.254.169.254"
# Writes a line for each connection.
SERVER = f"""
import socket, sys
server = socket.create_server(("{METADATA}", 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()[0].close()
    print("connected", file=open(sys.argv[1], "a"), flush=True)
"""
CONNECT = f"import socket, sys; socket.create_connection(('{METADATA}', int(sys.argv[1])), timeout=5)"


def daemon_pid(node: DockerNode) -> int:
    return int((node.folder / "dockerd.pid").read_text())


def namespace_of(node: DockerNode) -> str:
    return str(Path(f"/proc/{daemon_pid(node)}/ns/net").readlink())


@pytest.fixture
def group(node: DockerNode, tmp_path: Path) -> Iterator[str]:
    """A separate control group for the daemon, as systemd creates it."""
    root = tmp_path / "cgroup2"
    root.mkdir()
    subprocess.run([program("mount"), "-t", "cgroup2", "none", str(root)], check=True)
    name = f"{node.name}-daemon"
    try:
        (root / name).mkdir()
        (root / name / "cgroup.procs").write_text(str(daemon_pid(node)))
        yield name
        (root / "cgroup.procs").write_text(str(daemon_pid(node)))
        (root / name).rmdir()
    finally:
        subprocess.run([program("umount"), str(root)], check=True)


@contextmanager
def metadata_service(node: DockerNode, requests: Path) -> Iterator[int]:
    def change_address(action: str) -> None:
        argv = [program("ip"), "address", action, f"{METADATA}/32", "dev", "lo"]
        subprocess.run(node.inside(*argv), check=True)

    change_address("add")
    argv = node.inside(sys.executable, "-c", SERVER, str(requests))
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
        change_address("del")


def pull_from(runtime: DockerRuntime, port: int) -> None:
    """Make the daemon connect to the metadata service, as if that were a registry; no pull succeeds."""
    with pytest.raises(StartDelayed):
        start(runtime, assignment(image=f"{METADATA}:{port}/latest/meta-data:1"))


def rules_of(node: DockerNode) -> list[str]:
    listed = subprocess.run(
        node.inside(program("iptables"), "-w", "-S"), check=True, capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if CHAIN in line]


@pytest.fixture
def firewall(node: DockerNode) -> Iterator[Firewall]:
    yield Firewall(enter=node.inside())
    for argv in (["-D", "OUTPUT", "-j", CHAIN], ["-F", CHAIN], ["-X", CHAIN]):
        subprocess.run(node.inside(program("iptables"), "-w", *argv), check=False, capture_output=True)


def test_the_daemon_cannot_reach_metadata_but_others_can(
    node: DockerNode, runtime: DockerRuntime, firewall: Firewall, group: str, tmp_path: Path
) -> None:
    requests = tmp_path / "requests"
    with metadata_service(node, requests) as port:
        pull_from(runtime, port)
        before = requests.read_text()
        DaemonGuard(firewall, namespace_of(node)).ensure_rules()
        pull_from(runtime, port)
        assert requests.read_text() == before
        subprocess.run(node.inside(sys.executable, "-c", CONNECT, str(port)), check=True)
        assert wait_until(lambda: requests.read_text() != before)


def test_missing_rules_are_restored_and_existing_rules_are_kept(
    node: DockerNode, firewall: Firewall, group: str
) -> None:
    guard = DaemonGuard(firewall, namespace_of(node), every_s=0)
    guard.ensure_rules()
    before = rules_of(node)
    assert f"-A OUTPUT -j {CHAIN}" in before
    subprocess.run(node.inside(program("iptables"), "-w", "-F", CHAIN), check=True)
    guard.ensure_rules()
    assert rules_of(node) == before
    guard.ensure_rules()
    assert rules_of(node) == before


def test_a_daemon_without_its_own_group_is_logged_once(
    node: DockerNode, firewall: Firewall, caplog: pytest.LogCaptureFixture
) -> None:
    guard = DaemonGuard(firewall, namespace_of(node), every_s=0)
    guard.ensure_rules()
    guard.ensure_rules()
    assert [record.message for record in caplog.records if "cloud metadata" in record.message] == [
        "the Docker daemon of this node can reach cloud metadata: found no daemon with a control group of "
        "its own (cgroup v2, as the agent sees it)"
    ]
    assert not rules_of(node)


def test_only_daemons_in_this_network_namespace_match(tmp_path: Path) -> None:
    def process(pid: int, name: str, namespace: str, group: str) -> None:
        folder = tmp_path / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "ns" / "net").symlink_to(namespace)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cgroup").write_text(f"4:memory:/x\n0::{group}\n")

    process(1, "systemd", "net:[1]", "/init.scope")
    process(2, "dockerd", "net:[1]", "/system.slice/docker.service")
    process(3, "dockerd", "net:[2]", "/another")
    process(4, "dockerd", "net:[1]", "/../../seen/from-inside")
    process(5, "dockerd", "net:[1]", "/")
    found = daemon_groups(tmp_path, "net:[1]")
    assert found == {"system.slice/docker.service", "seen/from-inside"}


def test_the_rules_block_the_metadata_of_all_clouds_except_dns() -> None:
    made = rules(4, {"system.slice/docker.service"}) + rules(6, {"system.slice/docker.service"})
    for network in METADATA_NETWORKS:
        (rule,) = (each for each in made if f"-d {network} " in each)
        assert "! --dport 53" in rule
        assert "--path system.slice/docker.service" in rule


def test_unavailable_rules_are_not_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    firewall = Firewall(program_path=str(tmp_path))
    with pytest.raises(FirewallUnavailable):
        firewall.listing(4, ())
    DaemonGuard(firewall).ensure_rules()
    assert "cloud metadata" in caplog.text
