"""Operations on instances with real containers: restarts, ends, images, failed starts."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.registry import Registry
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster

SMALL: dict[str, Any] = {"cpus": 0.1, "memory_mib": 64}
WAITER = "/bin/wait-for-term"
IGNORES_TERM = ["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]


def await_deletion(admin: Client, instance: dict[str, Any], within_s: float = 20) -> None:
    wait_until(lambda: admin.get(f"/v1/instances/{instance['id']}").status_code == 404, within_s, 0.03)


def holders(admin: Client) -> set[str]:
    """The IDs of the instances that have GPUs allocated."""
    return {gpu["instance_id"] for gpu in admin.items("/v1/gpus", limit=200) if gpu["instance_id"]}


# --- restarts


@pytest.mark.parametrize(
    ("policy", "exit_code", "ends_as"),
    [("never", 0, "succeeded"), ("never", 3, "failed"), ("on_failure", 0, "succeeded")],
)
def test_an_accepted_exit_is_final(
    admin: Client, cluster: Cluster, policy: str, exit_code: int, ends_as: str
) -> None:
    made = admin.create(restart=policy, command=["sh", "-c", f"exit {exit_code}"], gpus={"count": 1}, **SMALL)
    ended = admin.wait(made["id"], ends_as)
    assert ended["exit_code"] == exit_code
    assert ended["devices"] == []
    assert (ended["reason"] or {}).get("code") == (None if exit_code == 0 else "exited_nonzero")
    assert not cluster.container(made).runs


def test_an_exit_is_noticed_before_the_next_full_listing(admin: Client) -> None:
    made = admin.create(command=["sleep", "1"], gpus={"count": 1}, **SMALL)
    admin.wait(made["id"], "succeeded", 10)


@pytest.mark.parametrize(("policy", "exit_code"), [("on_failure", 3), ("always", 0)])
def test_the_restart_policy_restarts_the_same_container(
    admin: Client, cluster: Cluster, policy: str, exit_code: int
) -> None:
    exit_at_first_start = f"[ $(wc -l < /tmp/starts) -lt 2 ] && sleep 1 && exit {exit_code}"
    command = ["sh", "-c", f"echo began >> /tmp/starts; {exit_at_first_start}; exec {WAITER}"]
    made = admin.create(restart=policy, command=command, gpus={"count": 1}, **SMALL)

    def ran_twice() -> bool:
        ran = admin.post(f"/v1/instances/{made['id']}/exec", json={"command": ["cat", "/tmp/starts"]})
        return ran.status_code == 200 and ran.json()["stdout"] == "began\nbegan\n"

    wait_until(ran_twice, 20, 0.1)
    running = admin.wait(made["id"], "running")
    assert running["attempt"] == 1
    assert {found.instance for found in cluster.containers()} == {made["id"]}
    changes = [
        event["data"]
        for event in admin.items(f"/v1/instances/{made['id']}/events")
        if event["type"] == "instance.state_changed"
    ]
    codes = [
        change["reason"]["code"] for change in changes if change["to"] == "starting" and change["reason"]
    ]
    assert "restarting" in codes, changes
    # A user's stop takes precedence over the policy.
    admin.post(f"/v1/instances/{made['id']}/stop")
    assert admin.wait(made["id"], "stopped")["reason"]["code"] == "stopped_by_user"


def test_restart_is_a_new_attempt_on_the_same_gpus(admin: Client, cluster: Cluster) -> None:
    made = admin.create(gpus={"count": 2}, **SMALL)
    before = admin.wait(made["id"], "running")
    old_container = cluster.container(made)
    answer = admin.post(f"/v1/instances/{made['id']}/restart")
    assert answer.status_code == 202, answer.text
    assert answer.json()["attempt"] == 2
    after = wait_until(lambda: _running_as(admin, made["id"], 2), 20)
    assert after["devices"] == before["devices"]
    new_container = cluster.container(made)
    assert (new_container.attempt, new_container.requested) == (2, old_container.requested)
    assert new_container.id != old_container.id


def _running_as(admin: Client, instance_id: str, attempt: int) -> dict[str, Any] | None:
    shown = admin.instance(instance_id)
    return shown if (shown["state"], shown["attempt"]) == ("running", attempt) else None


def test_a_stopped_instance_starts_again_in_a_new_container(admin: Client, cluster: Cluster) -> None:
    made = admin.create(gpus={"count": 1}, **SMALL)
    admin.wait(made["id"], "running")
    old_container = cluster.container(made)
    admin.post(f"/v1/instances/{made['id']}/stop")
    stopped = admin.wait(made["id"], "stopped")
    assert (stopped["exit_code"], stopped["devices"]) == (0, [])
    assert admin.post(f"/v1/instances/{made['id']}/start").status_code == 202
    running = wait_until(lambda: _running_as(admin, made["id"], 2), 20)
    assert running["exit_code"] is None
    assert cluster.container(made).id != old_container.id


# --- endings


def test_a_process_that_ignores_sigterm_is_killed_after_the_timeout(admin: Client, cluster: Cluster) -> None:
    made = admin.create(command=IGNORES_TERM, gpus={"count": 1}, **SMALL)
    admin.wait(made["id"], "running")
    assert admin.post(f"/v1/instances/{made['id']}/stop", json={"timeout_s": 2}).status_code == 202
    stopping = admin.instance(made["id"])
    assert stopping["state"] == "stopping"
    assert cluster.container(made).runs
    assert holders(admin) == {made["id"]}, "GPUs were released while the container runs"
    stopped = admin.wait(made["id"], "stopped")
    assert stopped["exit_code"] == 137
    assert stopped["reason"]["code"] == "stopped_by_user"


def test_max_duration_ends_an_instance(admin: Client) -> None:
    made = admin.create(max_duration_s=1, gpus={"count": 1}, **SMALL)
    ended = admin.wait(made["id"], "stopped")
    assert ended["reason"]["code"] == "max_duration_reached"
    ran = datetime.fromisoformat(ended["stopped_at"]) - datetime.fromisoformat(ended["started_at"])
    assert 1 <= ran.total_seconds() < 10


@pytest.mark.parametrize("state", ["scheduled", "starting"])
def test_delete_works_after_placement_and_during_a_start(admin: Client, cluster: Cluster, state: str) -> None:
    for _ in range(5):
        made = admin.create(gpus={"count": 8}, **SMALL)
        admin.wait(made["id"], state)
        assert admin.delete(f"/v1/instances/{made['id']}").status_code == 202
        await_deletion(admin, made)
    assert not holders(admin)
    assert not cluster.containers()


# --- images


def test_a_missing_image_fails_with_a_reason(admin: Client, cluster: Cluster, registry: Registry) -> None:
    made = admin.create(image=f"{registry.name}/nobody/nothing:1", gpus={"count": 8}, **SMALL)
    failed = admin.wait(made["id"], "failed")
    assert failed["reason"]["code"] == "image_not_found"
    assert "nobody/nothing" in failed["reason"]["message"]
    assert not holders(admin)
    assert not cluster.containers()


def freeze_in_mid_pull(registry: Registry, image: str) -> None:
    """Freeze the registry once its log shows a request for a blob of the image."""
    name = image.removeprefix(f"{registry.name}/").split(":")[0]
    wait_until(lambda: f'"GET /v2/{name}/blobs/' in registry.daemon.log.read_text(), 20, 0.001)
    registry.freeze()


def reason_with(admin: Client, instance: dict[str, Any], words: str) -> dict[str, Any] | None:
    shown = admin.instance(instance["id"])
    return shown if words in (shown["reason"] or {}).get("message", "") else None


def test_a_pull_shows_its_progress_and_is_cancelled_by_a_delete(
    admin: Client, cluster: Cluster, registry: Registry
) -> None:
    large = registry.add_image("large", extra_layers=4, layer_bytes=8_000_000)
    small = registry.add_image("small", extra_layers=1)
    try:
        pulled = admin.create(image=large, gpus={"count": 1}, **SMALL)
        freeze_in_mid_pull(registry, large)
        shown = wait_until(lambda: reason_with(admin, pulled, "layers"), 20)
        assert shown["state"] == "starting"
        assert shown["reason"]["code"] == "pulling_image"
        assert "of 5 layers" in shown["reason"]["message"]
        cancelled = admin.create(image=small, gpus={"count": 1}, **SMALL)
        admin.wait(cancelled["id"], "starting")
        admin.delete(f"/v1/instances/{cancelled['id']}")
        await_deletion(admin, cancelled)
        assert holders(admin) == {pulled["id"]}
    finally:
        registry.thaw()
    running = admin.wait(pulled["id"], "running")
    assert running["image_digest"] == registry.digest(large)


# --- failed starts


def test_a_bad_command_fails_with_a_reason(admin: Client, cluster: Cluster) -> None:
    made = admin.create(command=["no-such-program"], gpus={"count": 8}, **SMALL)
    failed = admin.wait(made["id"], "failed")
    assert failed["reason"]["code"] == "command_not_found"
    assert "no-such-program" in failed["reason"]["message"]
    assert not holders(admin)
    assert not cluster.containers()


HOLD_PORTS = """
import errno, socket, sys
held = []
for port in range(int(sys.argv[1]), int(sys.argv[1]) + 200):
    for family in (socket.AF_INET, socket.AF_INET6):
        held.append(socket.socket(family))
        if family == socket.AF_INET6:
            held[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            held[-1].bind(("", port))
            held[-1].listen()
        except OSError as error:
            # A connection of the node itself uses this port for a short time: both take ports of this range.
            if error.errno != errno.EADDRINUSE:
                raise
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def ports_held(node: DockerNode, first: int) -> Iterator[None]:
    """Another program on the node listens on 200 ports."""
    argv = node.inside(sys.executable, "-c", HOLD_PORTS, str(first))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield
        holder.communicate()


def test_a_port_in_use_fails_with_a_reason_and_a_retry_succeeds(admin: Client, cluster: Cluster) -> None:
    first = admin.create(ports=[{"container": 80}], gpus={"count": 8}, **SMALL)
    running = admin.wait(first["id"], "running")
    admin.post(f"/v1/instances/{first['id']}/stop")
    admin.wait(first["id"], "stopped")
    node = cluster.agent_of(running).node
    other = next(each for each in cluster.nodes if each is not node)
    other_id = admin.items("/v1/nodes", name=other.name)[0]["id"]
    admin.post(f"/v1/nodes/{other_id}/cordon")
    try:
        with ports_held(node, running["endpoints"][0]["port"] + 1):
            made = admin.create(ports=[{"container": 80}], gpus={"count": 8}, **SMALL)
            failed = admin.wait(made["id"], "failed")
            assert failed["reason"]["code"] == "port_in_use"
            assert not holders(admin)
            assert {found.instance for found in cluster.containers()} == {first["id"]}
        admin.post(f"/v1/instances/{made['id']}/start")
        assert wait_until(lambda: _running_as(admin, made["id"], 2), 20)["endpoints"]
    finally:
        admin.post(f"/v1/nodes/{other_id}/uncordon")
