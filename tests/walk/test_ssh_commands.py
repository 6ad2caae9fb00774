"""`mooring ssh`, and plain OpenSSH after `mooring ssh-config`, into real containers through a gateway."""

import json
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.toolbox import toolbox_on
from tests.testbed.workspace import Workspace
from tests.walk.cli_client import WITHIN_S, CliClient
from tests.walk.conftest import Cluster, NewServer
from tests.walk.product import GatewayProcess
from tests.walk.test_operations import SMALL

MIB = 1024 * 1024
Done = subprocess.CompletedProcess[bytes]


@pytest.fixture(scope="module")
def shared_cluster(
    new_server: NewServer,
    docker_nodes: Callable[[int], list[DockerNode]],
    workspace: Workspace,
    root_address: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """A server that knows the address of its gateway, and one node with a toolbox, so that scp works."""
    port, node = workspace.take_port(), docker_nodes(1)[0]
    server = new_server(MOORING_SSH_HOST=root_address, MOORING_SSH_PORT=str(port))
    with toolbox_on(node):
        made = Cluster(server, [node], tmp_path_factory.mktemp("agents"))
        yield made
        made.close()
    workspace.give_back_port(port)


@pytest.fixture(scope="module")
def gateway(
    shared_cluster: Cluster, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """The gateway at that address."""
    environment, port = shared_cluster.server.environment, workspace.take_port()
    host, ssh_port = environment["MOORING_SSH_HOST"], int(environment["MOORING_SSH_PORT"])
    made = GatewayProcess(environment, tmp_path_factory.mktemp("gateway"), host, port, ssh_port)
    made.environment["MOORING_GATEWAY_DRAIN_S"] = "0.5"
    made.forked = True
    made.start()
    yield made
    made.stop()
    workspace.give_back_port(port)


@pytest.fixture
def box(admin: Client, gateway: GatewayProcess) -> dict[str, Any]:
    made = admin.create(name="box", gpus={"count": 1}, command=["sleep", "100000"], **SMALL)
    return admin.wait(made["id"], "running")


@pytest.fixture
def cli(cluster: Cluster, box: dict[str, Any], tmp_path: Path) -> CliClient:
    return CliClient(cluster.server.url, tmp_path)


class PlainSsh:
    """OpenSSH's programs with the configuration that `mooring ssh-config --write` has written."""

    def __init__(self, cli: CliClient, folder: Path) -> None:
        done = cli.run("ssh-config", "--write")
        assert done.returncode == 0, done
        self.cli, self.config = cli, folder / ".ssh" / "config"

    def run(self, program: str, *arguments: str, given: bytes = b"") -> Done:
        # OpenSSH takes the home folder from passwd, not from HOME.
        argv = [program, "-F", str(self.config), "-o", "BatchMode=yes", *arguments]
        return _run(argv, self.cli, given)


def _run(argv: list[str], cli: CliClient, given: bytes = b"") -> Done:
    return subprocess.run(
        argv, env=cli.environment, input=given, capture_output=True, timeout=WITHIN_S, check=False
    )


@pytest.fixture
def plain(cli: CliClient, tmp_path: Path) -> PlainSsh:
    return PlainSsh(cli, tmp_path)


def files_of(folder: Path) -> Path:
    return folder / "mooring" / "ssh"


def state_of(folder: Path) -> Path:
    """The file that says where the gateway is, and when the certificate expires."""
    (found,) = files_of(folder).glob("*.json")
    return found


def certificate_of(folder: Path) -> Path:
    (found,) = files_of(folder).glob("*-cert.pub")
    return found


def expire(folder: Path) -> None:
    """Replace the certificate by one that no gateway accepts, and let it be two hours old."""
    file = state_of(folder)
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {part: state[part] - 7200 for part in ("renewed_at", "expires_at")}))
    certificate_of(folder).write_text((files_of(folder) / "id_ed25519.pub").read_text())


def test_a_command_has_its_output_input_and_exit_code(cli: CliClient) -> None:
    done = cli.run("ssh", "box", "--", "cat; echo bad >&2; exit 7", given=b"some input")
    assert (done.stdout, done.returncode) == (b"some input", 7), done
    assert done.stderr.endswith(b"bad\n")
    assert cli.run("ssh", "box", "--", "true").returncode == 0


def test_an_instance_is_named_by_its_id_too(cli: CliClient, box: dict[str, Any]) -> None:
    assert cli.run("ssh", box["id"], "hostname").returncode == 0


def test_the_terminal_is_the_users(cli: CliClient) -> None:
    terminal = cli.terminal("ssh", "box")
    terminal.expect_exact("# ")
    terminal.sendline("stty size; exit 3")
    terminal.expect_exact("24 80\r\n")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 3


def test_arguments_of_ssh_are_passed_on(cli: CliClient) -> None:
    cli.run("ssh", "box", "--", "echo hello > /tmp/index.html; httpd -p 127.0.0.1:8080 -h /tmp")
    request = b"GET /index.html HTTP/1.0\r\n\r\n"
    done = cli.run("ssh", "box", "--", "-W", "localhost:8080", given=request)
    assert done.stdout.endswith(b"hello\n"), done


def test_only_the_owner_can_read_the_files_and_the_next_call_reuses_them(
    cli: CliClient, tmp_path: Path
) -> None:
    assert cli.run("ssh", "box", "--", "true").returncode == 0
    kept = {file: file.read_bytes() for file in files_of(tmp_path).iterdir()}
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in kept}
    assert stat.S_IMODE(files_of(tmp_path).stat().st_mode) == 0o700
    assert {mode for name, mode in modes.items() if name != "id_ed25519.pub"} == {0o600}
    assert cli.run("ssh", "box", "--", "true").returncode == 0
    assert {file: file.read_bytes() for file in files_of(tmp_path).iterdir()} == kept


@pytest.mark.parametrize("with_public", [True, False], ids=["with-pub-file", "private-only"])
def test_a_key_of_the_user(cli: CliClient, tmp_path: Path, with_public: bool) -> None:
    key = tmp_path / "own key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    if not with_public:
        key.with_name("own key.pub").unlink()
    done = cli.run("ssh", "-i", str(key), "box", "--", "exit 7")
    assert done.returncode == 7, done
    assert certificate_of(tmp_path).exists()
    assert not (files_of(tmp_path) / "id_ed25519").exists()


def test_plain_ssh_scp_and_rsync_work_after_ssh_config(
    plain: PlainSsh, box: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("box", "box.default", box["id"]):
        assert plain.run("ssh", f"{name}.mooring", "exit 7").returncode == 7, name
    content, file, back = os.urandom(MIB), tmp_path / "a file", tmp_path / "back"
    file.write_bytes(content)
    done = plain.run("scp", str(file), "box.mooring:/tmp/copy")
    assert done.returncode == 0, done
    assert plain.run("scp", "box.mooring:/tmp/copy", str(back)).returncode == 0
    assert back.read_bytes() == content
    again = tmp_path / "again"
    argv = ["rsync", "-a", f"--rsh=ssh -F {plain.config}", "box.mooring:/tmp/copy", str(again)]
    done = _run(argv, plain.cli)
    assert (done.returncode, again.read_bytes() == content) == (0, True), done


def test_an_editor_can_forward_ports_dynamically(plain: PlainSsh, workspace: Workspace) -> None:
    """As VS Code does: one connection with a shell on its input, and a SOCKS port."""
    port = workspace.take_port()
    done = plain.run("ssh", "-T", "-D", str(port), "box.mooring", "sh", given=b"echo in; exit 5\n")
    workspace.give_back_port(port)
    assert (done.stdout, done.returncode) == (b"in\n", 5), done


def test_other_hosts_are_not_affected(plain: PlainSsh) -> None:
    shown = plain.run("ssh", "-G", "example.org").stdout
    assert b"hostname example.org\n" in shown
    assert b"mooring" not in shown.replace(str(plain.config).encode(), b"")


def test_writing_the_configuration_keeps_the_users_own(cli: CliClient, tmp_path: Path) -> None:
    own, linked = b"Host *\r\n  User b\xf6b\r\n", tmp_path / "dotfiles"
    (tmp_path / ".ssh").mkdir()
    linked.write_bytes(own)
    linked.chmod(0o640)
    (tmp_path / ".ssh" / "config").symlink_to(linked)
    for _ in range(2):
        assert cli.run("ssh-config", "--write").returncode == 0
    line = f'Include "{files_of(tmp_path) / "config"}"\n\n'
    assert linked.read_bytes() == line.encode() + own
    assert stat.S_IMODE(linked.stat().st_mode) == 0o640
    assert (tmp_path / ".ssh" / "config").is_symlink()


def test_the_printed_configuration_works_anywhere(cli: CliClient, tmp_path: Path) -> None:
    printed = cli.run("ssh-config").stdout
    assert not (tmp_path / ".ssh").exists()
    (tmp_path / "config").write_bytes(printed)
    done = _run(["ssh", "-F", str(tmp_path / "config"), "box.mooring", "exit 7"], cli)
    assert done.returncode == 7, done


def test_an_expired_certificate_is_renewed(cli: CliClient, plain: PlainSsh, tmp_path: Path) -> None:
    for run, name in ((plain.run, "box.mooring"), (cli.run, "box")):
        expire(tmp_path)
        assert run("ssh", name, "true").returncode == 0, name
        assert b"-cert-v01@openssh.com" in certificate_of(tmp_path).read_bytes()


def test_concurrent_first_connections_share_one_key(cli: CliClient, tmp_path: Path) -> None:
    started = [cli.start("ssh", "box", "--", "echo in") for _ in range(4)]
    outputs = [process.communicate(timeout=WITHIN_S) for process in started]
    assert [out for out, _err in outputs] == [b"in\n"] * 4, outputs
    assert sorted(file.name for file in files_of(tmp_path).glob("id_*")) == ["id_ed25519", "id_ed25519.pub"]


def test_the_host_key_is_not_trusted_on_first_use(plain: PlainSsh, cli: CliClient, tmp_path: Path) -> None:
    (known,) = files_of(tmp_path).glob("*.known_hosts")
    alias, own = known.read_text().split()[0], (files_of(tmp_path) / "id_ed25519.pub").read_text()
    for keys in (f"{alias} {own}", ""):
        known.write_text(keys)
        for done in (plain.run("ssh", "box.mooring", "true"), cli.run("ssh", "box", "--", "true")):
            assert done.returncode == 255, done
            assert b"Host key verification failed" in done.stderr
    assert cli.run("ssh-config", "--write").returncode == 0
    assert plain.run("ssh", "box.mooring", "true").returncode == 0


def test_a_websocket_can_be_chosen(cli: CliClient, gateway: GatewayProcess, tmp_path: Path) -> None:
    url, content = f"ws://{gateway.host}:{gateway.port}/v1/ssh", os.urandom(8 * MIB)
    done = cli.run("ssh", "--via", url, "box", "--", "cat; exit 4", given=content)
    assert (done.stdout == content, done.returncode) == (True, 4), done.stderr
    assert done.stderr == b""
    (tmp_path / "config").write_bytes(cli.run("ssh-config", "--via", url).stdout)
    done = _run(["ssh", "-v", "-F", str(tmp_path / "config"), "box.mooring", "exit 7"], cli)
    assert done.returncode == 7, done
    assert f"ssh-proxy {url}".encode() in done.stderr


@contextmanager
def one_host(api: str, gateway: GatewayProcess, host: str, port: int) -> Iterator[str]:
    """As an operator's TLS proxy: the paths of one host lead to the API, and `/v1/ssh` to a gateway."""
    api_host, _, api_port = api.removeprefix("http://").partition(":")
    targets = {True: (gateway.host, gateway.port), False: (api_host, int(api_port))}

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            head = client.recv(65_536)
            with socket.create_connection(targets[head.startswith(b"GET /v1/ssh ")]) as server:
                server.sendall(head)
                back = threading.Thread(target=copy, args=(server, client), daemon=True)
                back.start()
                copy(client, server)
                back.join()

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server((host, port)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://{host}:{port}"
        listener.shutdown(socket.SHUT_RDWR)


def test_https_is_used_where_the_ssh_port_cannot_be_reached(
    plain: PlainSsh,
    cluster: Cluster,
    gateway: GatewayProcess,
    workspace: Workspace,
    tmp_path: Path,
) -> None:
    cli = plain.cli
    port, other_port = workspace.take_port(), workspace.take_port()
    elsewhere = GatewayProcess(
        cluster.server.environment,
        tmp_path,
        gateway.host,
        gateway.port,
        other_port,
        MOORING_GATEWAY_DRAIN_S="0.5",
    )
    elsewhere.forked = True
    gateway.stop()
    with ExitStack() as exits:
        exits.callback(gateway.start)
        done = plain.run("ssh", "box.mooring", "true")
        assert done.returncode == 255
        assert b"mooring: no gateway at " in done.stderr
        elsewhere.start()
        exits.callback(elsewhere.stop)
        url = exits.enter_context(one_host(cluster.server.url, gateway, gateway.host, port))
        cli.environment["MOORING_URL"] = url
        assert cli.run("ssh", "box", "--", "exit 4").returncode == 4
        done = plain.run("ssh", "box.mooring", "exit 7")
        assert done.returncode == 7, done
    assert plain.run("ssh", "-v", "box.mooring", "true").returncode == 0
    workspace.give_back_port(port)
    workspace.give_back_port(other_port)


def test_a_valid_certificate_works_while_the_api_cannot_be_reached(
    cli: CliClient, cluster: Cluster, gateway: GatewayProcess, workspace: Workspace, tmp_path: Path
) -> None:
    port = workspace.take_port()
    with one_host(cluster.server.url, gateway, gateway.host, port) as url:
        cli.environment["MOORING_URL"] = url
        plain = PlainSsh(cli, tmp_path)
    file = state_of(tmp_path)
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"renewed_at": state["renewed_at"] - 2000}))
    done = plain.run("ssh", "box.mooring", "exit 7")
    assert done.returncode == 7, done
    expire(tmp_path)
    done = plain.run("ssh", "box.mooring", "exit 7")
    assert done.returncode == 255
    assert b"cannot be reached" in done.stderr
    workspace.give_back_port(port)


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch touched", "$(touch touched)", "a' || touch touched #", "a b", "../x", "*"]
)
def test_a_name_is_neither_an_option_nor_a_command(
    cli: CliClient, plain: PlainSsh, tmp_path: Path, name: str
) -> None:
    done = cli.run("ssh", "--", name, "true")
    assert done.returncode == 3, done
    assert b"there is no instance " in done.stderr
    assert cli.run("ssh-prepare", "--", f"{name}.mooring").returncode == 1
    for host in (f"{name}.mooring", f"'{name}'.mooring"):
        assert plain.run("ssh", "--", host, "true").returncode != 0
    assert not Path("touched").exists()
    assert not (files_of(tmp_path) / "hosts").exists() or not any((files_of(tmp_path) / "hosts").iterdir())


def test_without_a_valid_key_no_host_is_connected(plain: PlainSsh) -> None:
    plain.cli.environment["MOORING_API_KEY"] = "wrong"
    done = plain.run("ssh", "-v", "box.mooring", "true")
    assert done.returncode == 255
    assert b"mooring: " in done.stderr
    assert b"resolve" not in done.stderr
    assert plain.cli.run("ssh", "box", "--", "true").returncode == 4


def test_a_missing_ssh_is_named_with_its_package(cli: CliClient, tmp_path: Path) -> None:
    cli.environment["PATH"] = str(tmp_path)
    for arguments in (("ssh", "box"), ("ssh-config",)):
        done = cli.run(*arguments)
        assert done.returncode == 1
        assert b"apt install openssh-client" in done.stderr
