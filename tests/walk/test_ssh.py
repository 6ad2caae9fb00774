"""OpenSSH into real containers through a gateway: sessions, forwarding, refusals, and what they leave."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mooring.schemas.agent_streams import MAX_ARGUMENT_BYTES
from tests.service import Client
from tests.testbed.toolbox import SCRATCH, import_images
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster
from tests.walk.product import GatewayProcess
from tests.walk.ssh_client import WITHIN_S, SshClient
from tests.walk.test_operations import SMALL
from tests.walk.test_stream_faults import commands_in

MIB = 1024 * 1024


@pytest.fixture
def instance(admin: Client) -> dict[str, Any]:
    made = admin.create(name="box", gpus={"count": 1}, command=["sleep", "100000"], **SMALL)
    return admin.wait(made["id"], "running")


def test_a_command_has_its_output_input_and_exit_code(ssh: SshClient, instance: dict[str, Any]) -> None:
    done = ssh.run("box", "cat; echo bad >&2; exit 7", given=b"some input")
    assert (done.stdout, done.returncode) == (b"some input", 7)
    assert done.stderr.splitlines()[-1] == b"bad"


def test_a_command_may_be_as_long_as_linux_allows(ssh: SshClient, instance: dict[str, Any]) -> None:
    """SkyPilot sends programs of 40 KB as one command."""
    longest = f": {'x' * (MAX_ARGUMENT_BYTES - len(': ; echo end'))}; echo end"
    assert ssh.run("box", longest).stdout == b"end\n"
    refused = ssh.run("box", longest, "more")
    assert (refused.returncode, refused.stdout) == (255, b"")
    assert f"a command may have {MAX_ARGUMENT_BYTES} bytes" in refused.stderr.decode()


def test_an_instance_is_named_by_id_or_with_its_project(ssh: SshClient, instance: dict[str, Any]) -> None:
    for name in (instance["id"], "box", "box.default"):
        assert ssh.run(name, "hostname").returncode == 0, name


def test_a_command_runs_in_the_login_shell_of_the_user(ssh: SshClient, instance: dict[str, Any]) -> None:
    done = ssh.run("box", "echo $SHELL $USER $HOME")
    assert done.stdout == b"/bin/sh root /root\n"


def test_a_command_gets_the_clients_language_and_no_other_variable(
    ssh: SshClient, instance: dict[str, Any]
) -> None:
    done = ssh.run(
        "box", "echo $LC_TIME,$LD_PRELOAD,$TZ", flags=("-o", "SetEnv=LC_TIME=C LD_PRELOAD=x TZ=UTC")
    )
    assert done.stdout == b"C,,UTC\n"


def test_a_terminal_has_the_size_and_type_of_the_clients(ssh: SshClient, instance: dict[str, Any]) -> None:
    done = ssh.run("box", flags=("-tt",), given=b"tty; stty size; exit 3\n")
    assert done.returncode == 3
    assert b"/dev/pts/" in done.stdout
    assert f"box ({instance['id']}) in project default".encode() in done.stdout
    assert b"GPUs: 1 x " in done.stdout


def test_a_large_file_passes_unchanged_in_both_directions(ssh: SshClient, instance: dict[str, Any]) -> None:
    content = bytes(range(256)) * (64 * MIB // 256)
    assert ssh.run("box", "cat > /tmp/file", given=content).returncode == 0
    assert ssh.run("box", "cat /tmp/file").stdout == content


def test_a_forwarded_connection_reaches_a_port_on_loopback(ssh: SshClient, instance: dict[str, Any]) -> None:
    ssh.run("box", "echo hello > /tmp/index.html; httpd -p 127.0.0.1:8080 -h /tmp")
    done = ssh.run("box", flags=("-W", "localhost:8080"), given=b"GET /index.html HTTP/1.0\r\n\r\n")
    assert done.stdout.endswith(b"hello\n"), done


def test_a_destination_outside_the_instance_is_refused(ssh: SshClient, instance: dict[str, Any]) -> None:
    for host in ("169.254.169.254", ssh.gateway.host, "example.org"):
        done = ssh.run("box", flags=("-W", f"{host}:80"))
        assert done.returncode != 0
        assert b"use localhost" in done.stderr, done


def test_an_unknown_instance_is_named_in_the_reason(ssh: SshClient, admin: Client) -> None:
    done = ssh.run("nothing", "true")
    assert done.returncode == 255
    assert b"sees no instance nothing" in done.stderr


def test_an_unknown_key_is_rejected(
    admin: Client, gateway: GatewayProcess, tmp_path: Path, instance: dict[str, Any]
) -> None:
    done = SshClient(admin, gateway, tmp_path).run("box", "true")
    assert done.returncode == 255
    assert b"Permission denied (publickey)" in done.stderr


def test_a_key_of_another_project_sees_no_instance(
    admin: Client, gateway: GatewayProcess, tmp_path: Path, instance: dict[str, Any]
) -> None:
    project = admin.post("/v1/projects", json={"name": "other"}).json()
    client = SshClient(admin, gateway, tmp_path)
    client.register(project_id=project["id"])
    for name in (instance["id"], "box", "box.default"):
        assert b"sees no instance" in client.run(name, "true").stderr


def test_a_certificate_needs_no_registration(
    admin: Client, gateway: GatewayProcess, tmp_path: Path, instance: dict[str, Any]
) -> None:
    client = SshClient(admin, gateway, tmp_path)
    client.certify()
    assert client.run("box", "echo in").stdout == b"in\n"
    assert client.run("box", flags=("-tt",), given=b"exit 5\n").returncode == 5


def test_a_certificate_ends_with_the_key_that_asked_for_it(
    admin: Client, gateway: GatewayProcess, tmp_path: Path, instance: dict[str, Any]
) -> None:
    made = admin.post("/v1/api-keys", json={"name": "k", "role": "member"}).json()
    client = SshClient(admin, gateway, tmp_path)
    with Client(str(admin.base_url), key=made["key"]) as member:
        client.certify(member)
    running = client.start("box", "echo started; sleep 4324")
    assert running.stdout is not None
    assert running.stdout.readline() == b"started\n"
    admin.delete(f"/v1/api-keys/{made['id']}")
    began = time.monotonic()
    running.communicate(timeout=WITHIN_S)
    assert running.returncode == 255
    assert time.monotonic() - began < WITHIN_S / 2
    done = client.run("box", "true")
    assert done.returncode == 255
    assert b"was revoked or has expired" in done.stderr, done


def test_a_certificate_of_another_authority_is_refused(
    admin: Client, gateway: GatewayProcess, tmp_path: Path, instance: dict[str, Any]
) -> None:
    client = SshClient(admin, gateway, tmp_path)
    other = SshClient(admin, gateway, tmp_path, "other")
    principal = admin.get("/v1/me").json()["key"]["id"]
    argv = ["ssh-keygen", "-q", "-s", str(other.key), "-I", principal, "-n", principal]
    subprocess.run([*argv, str(client.key.with_suffix(".pub"))], check=True)
    done = client.run("box", "true")
    assert done.returncode == 255
    assert b"Permission denied (publickey)" in done.stderr


def test_a_key_that_several_have_registered_needs_the_project(
    ssh: SshClient, admin: Client, instance: dict[str, Any]
) -> None:
    """Anyone can register the key of another person, and create an instance with the name of theirs."""
    project = admin.post("/v1/projects", json={"name": "third"}).json()
    body = {"name": "k", "role": "member", "project_id": project["id"]}
    made = admin.post("/v1/api-keys", json=body).json()
    with Client(str(admin.base_url), key=made["key"]) as other:
        ssh_key = {"name": "not mine", "public_key": ssh.key.with_suffix(".pub").read_text()}
        assert other.post("/v1/ssh-keys", json=ssh_key).status_code == 201
    done = ssh.run("box", "true")
    assert done.returncode == 255
    assert b"name the project too" in done.stderr
    assert b"box.default" in done.stderr
    for name in ("box.default", instance["id"]):
        assert ssh.run(name, "true").returncode == 0
    admin.delete(f"/v1/api-keys/{made['id']}")
    assert ssh.run("box", "true").returncode == 0


PROXY = """
import os, sys, threading
from websockets.sync.client import connect
with connect(sys.argv[1], subprotocols=["tcp"]) as stream:
    def send():
        while data := os.read(0, 65536):
            stream.send(data)
        stream.close()
    threading.Thread(target=send, daemon=True).start()
    for data in stream:
        os.write(1, data)
"""


def test_ssh_passes_through_a_websocket(
    ssh: SshClient, gateway: GatewayProcess, tmp_path: Path, instance: dict[str, Any]
) -> None:
    script = tmp_path / "proxy.py"
    script.write_text(PROXY)
    url = f"ws://{gateway.host}:{gateway.port}/v1/ssh"
    flags = ("-o", f"ProxyCommand={sys.executable} {script} {url}")
    content = bytes(range(256)) * (MIB // 64)
    done = ssh.run("box", "cat; exit 4", flags=flags, given=content)
    assert (done.stdout, done.returncode) == (content, 4), done.stderr


def test_a_disconnected_client_leaves_no_command(
    ssh: SshClient, cluster: Cluster, instance: dict[str, Any]
) -> None:
    container = cluster.container(instance)
    running = ssh.start("box", "sleep 4321")
    wait_until(lambda: commands_in(container, "4321"), WITHIN_S)
    running.kill()
    running.communicate()
    wait_until(lambda: not commands_in(container, "4321"), WITHIN_S)
    assert cluster.container(instance) == container


def test_a_signal_reaches_the_command(ssh: SshClient, cluster: Cluster, instance: dict[str, Any]) -> None:
    done = ssh.run("box", "kill -TERM $$")
    assert done.returncode == 128 + signal.SIGTERM


def test_a_deleted_key_ends_its_connections(
    ssh: SshClient, admin: Client, cluster: Cluster, instance: dict[str, Any]
) -> None:
    running = ssh.start("box", "sleep 4322")
    wait_until(lambda: commands_in(cluster.container(instance), "4322"), WITHIN_S)
    for key in admin.items("/v1/ssh-keys"):
        admin.delete(f"/v1/ssh-keys/{key['id']}")
    began = time.monotonic()
    _output, errors = running.communicate(timeout=WITHIN_S)
    assert running.returncode == 255, errors
    assert time.monotonic() - began < WITHIN_S / 2


def test_an_idle_connection_of_a_deleted_key_ends(
    ssh: SshClient, admin: Client, instance: dict[str, Any]
) -> None:
    """It has no stream whose access is checked."""
    running = ssh.start("box", flags=("-N", "-o", "LogLevel=DEBUG1"))
    assert running.stderr is not None
    while b"Authenticated to" not in running.stderr.readline():
        assert running.poll() is None
    for key in admin.items("/v1/ssh-keys"):
        admin.delete(f"/v1/ssh-keys/{key['id']}")
    _output, errors = running.communicate(timeout=WITHIN_S)
    assert running.returncode == 255
    assert b"was revoked or has expired" in errors


def test_a_stopping_gateway_says_so(
    ssh: SshClient, gateway: GatewayProcess, instance: dict[str, Any]
) -> None:
    running = ssh.start("box", "echo started; sleep 4325")
    assert running.stdout is not None
    assert running.stdout.readline() == b"started\n"
    gateway.stop()
    _output, errors = running.communicate(timeout=WITHIN_S)
    gateway.start()
    assert running.returncode == 255
    assert b"the gateway is shutting down; connect again" in errors


def test_a_killed_gateway_ends_the_session_and_not_the_container(
    ssh: SshClient, cluster: Cluster, gateway: GatewayProcess, instance: dict[str, Any]
) -> None:
    container = cluster.container(instance)
    running = ssh.start("box", "sleep 4323")
    wait_until(lambda: commands_in(container, "4323"), WITHIN_S)
    gateway.kill()
    running.communicate(timeout=WITHIN_S)
    assert running.returncode == 255
    wait_until(lambda: not commands_in(container, "4323"), WITHIN_S)
    gateway.start()
    assert ssh.run("box", "true").returncode == 0
    assert cluster.container(instance) == container


def test_sftp_without_a_toolbox_says_what_is_missing(ssh: SshClient, instance: dict[str, Any]) -> None:
    done = ssh.sftp("box", "ls /")
    assert done.returncode != 0
    assert b"this image has none" in done.stderr, done
    assert b"mooring toolbox" in done.stderr


def test_an_image_without_a_shell_and_a_toolbox_says_what_is_missing(
    ssh: SshClient, admin: Client, cluster: Cluster
) -> None:
    for node in cluster.nodes:
        import_images(node)
    made = admin.create(name="bare", image=SCRATCH, command=["/sleep", "100000"], **SMALL)
    admin.wait(made["id"], "running")
    for done in (ssh.run("bare", "true"), ssh.sftp("bare", "ls /")):
        assert done.returncode == 255, done
        assert b"the image has no /bin/sh" in done.stderr, done
        assert b"mooring toolbox" in done.stderr
