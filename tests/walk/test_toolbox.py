"""OpenSSH's and rsync's own clients, which copy files to and from instances through a gateway.

The nodes have a toolbox, and no image has an sftp-server or rsync.
"""

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.images import BUSYBOX, WAIT, WAITER
from tests.testbed.parts import require
from tests.testbed.toolbox import (
    DEBIAN,
    MUSL,
    SCRATCH,
    import_distributions,
    import_images,
    remove_toolboxes,
    toolbox_files,
)
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.conftest import Cluster
from tests.walk.product import MOORING, clean_environment
from tests.walk.ssh_client import WITHIN_S, SshClient
from tests.walk.test_operations import SMALL

# A glibc and a musl image, and one without any shell.
IMAGES = {"debian": DEBIAN, "musl": MUSL, "scratch": SCRATCH}
COMMANDS = {SCRATCH: ["/sleep", "100000"], BUSYBOX: [WAITER]}
MIB = 1024 * 1024

pytestmark = pytest.mark.timeout(300)  # the first test builds images

Tree = dict[str, tuple[int, bytes]]


@pytest.fixture(scope="module")
def toolbox(shared_cluster: Cluster) -> Iterator[None]:
    require("ssh")
    toolbox_files()  # skips if a package is missing
    for node in shared_cluster.nodes:
        import_images(node)
        import_distributions(node)
        assert "built" in mooring_toolbox(node).stdout
    yield
    for node in shared_cluster.nodes:
        remove_toolboxes(node)


@pytest.fixture(params=list(IMAGES))
def box(request: pytest.FixtureRequest, admin: Client, toolbox: None) -> dict[str, Any]:
    """A running instance of the name `box`."""
    return running(admin, IMAGES[request.param])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with files of several sizes, names and modes."""
    root = tmp_path / "tree"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").write_bytes(b"")
    (root / "sub" / "random").write_bytes(os.urandom(8 * MIB))
    (root / "sub" / "deep" / "a name with spaces").write_bytes(bytes(range(256)) * 100)
    (root / "sub" / "program").write_bytes(b"#!/bin/sh\n")
    (root / "sub" / "program").chmod(0o755)
    return root


def mooring_toolbox(node: DockerNode) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(), "DOCKER_HOST": node.url}
    return subprocess.run(
        [*MOORING, "toolbox"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )


def running(admin: Client, image: str, **fields: Any) -> dict[str, Any]:
    command = COMMANDS.get(image, WAIT)
    made = admin.create(name="box", image=image, command=command, **{**SMALL, "memory_mib": 128}, **fields)
    return admin.wait(made["id"], "running")


def content_of(root: Path) -> Tree:
    """Mode and content of each file."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


def succeeded(done: subprocess.CompletedProcess[bytes]) -> bytes:
    assert done.returncode == 0, done
    return done.stdout


def test_sftp_copies_a_folder_in_both_directions(
    ssh: SshClient, box: dict[str, Any], tree: Path, tmp_path: Path
) -> None:
    succeeded(ssh.sftp("box", "mkdir /copy", f"put -rp {tree} /copy"))
    listed = succeeded(ssh.sftp("box", "ls -l /copy/tree/sub")).decode()
    assert f"{8 * MIB}" in listed
    succeeded(ssh.sftp("box", f"get -rp /copy/tree {tmp_path / 'back'}"))
    assert content_of(tmp_path / "back") == content_of(tree)
    succeeded(ssh.sftp("box", "rename /copy/tree/empty /copy/moved", "rm /copy/moved", "mkdir /copy/new"))
    assert b"new" in succeeded(ssh.sftp("box", "ls /copy"))


@pytest.mark.parametrize("protocol", ["sftp", "scp"])
def test_scp_copies_a_folder_in_both_directions(
    ssh: SshClient, box: dict[str, Any], tree: Path, tmp_path: Path, protocol: str
) -> None:
    flags = ["-rp", *(["-O"] if protocol == "scp" else [])]
    succeeded(ssh.scp(*flags, str(tree), ssh.at("box", "/copy")))
    succeeded(ssh.scp(*flags, ssh.at("box", "/copy"), str(tmp_path / "back")))
    assert content_of(tmp_path / "back") == content_of(tree)


def test_rsync_copies_a_folder_and_deletes_what_is_gone(
    ssh: SshClient, box: dict[str, Any], tree: Path, tmp_path: Path
) -> None:
    there, back = ssh.at("box", "/copy/"), tmp_path / "back"
    succeeded(ssh.rsync("-a", "--delete", f"{tree}/", there))
    succeeded(ssh.rsync("-a", "--delete", there, f"{back}/"))
    assert content_of(back) == content_of(tree)
    (tree / "empty").unlink()
    (tree / "sub" / "random").write_bytes((tree / "sub" / "random").read_bytes()[: 4 * MIB] + b"changed")
    succeeded(ssh.rsync("-az", "--checksum", "--delete", f"{tree}/", there))
    succeeded(ssh.rsync("-a", "--delete", there, f"{back}/"))
    assert content_of(back) == content_of(tree)


def test_a_shell_runs_in_every_image(ssh: SshClient, box: dict[str, Any]) -> None:
    done = ssh.run("box", "cat | tr a-z A-Z; echo bad >&2; exit 7", given=b"some input")
    assert (done.stdout, done.stderr.splitlines()[-1], done.returncode) == (b"SOME INPUT", b"bad", 7)
    terminal = ssh.run("box", flags=("-tt",), given=b"stty size; exit 3\n")
    assert terminal.returncode == 3, terminal


def test_ports_of_every_image_are_forwarded(
    ssh: SshClient, box: dict[str, Any], workspace: Workspace
) -> None:
    script = "echo hello >/dev/shm/index.html; httpd -p 127.0.0.1:8080 -h /dev/shm"
    succeeded(ssh.run("box", f"/.mooring/bin/sh -c {shlex.quote(script)}"))
    request = b"GET /index.html HTTP/1.0\r\n\r\n"
    assert succeeded(ssh.run("box", flags=("-W", "localhost:8080"), given=request)).endswith(b"hello\n")
    port = workspace.take_port()
    with ssh.start("box", flags=("-N", "-L", f"127.0.0.1:{port}:localhost:8080")) as forwarding:
        answer = wait_until(lambda: answer_of(port, request), WITHIN_S)
        forwarding.kill()
    workspace.give_back_port(port)
    assert answer.endswith(b"hello\n")


def answer_of(port: int, request: bytes) -> bytes:
    """What a program answers on a local port; nothing while none listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), WITHIN_S) as connection:
            connection.sendall(request)
            return connection.makefile("rb").read()
    except ConnectionError:
        return b""


def test_git_clones_and_pushes_with_the_git_of_the_image(
    ssh: SshClient, admin: Client, toolbox: None, tmp_path: Path
) -> None:
    running(admin, DEBIAN)
    succeeded(ssh.run("box", "git init --quiet --bare /repository"))
    environment = {
        **os.environ,
        "GIT_SSH_COMMAND": ssh.remote_shell,
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def git(*arguments: str, at: Path) -> None:
        argv = ["git", *arguments]
        subprocess.run(argv, cwd=at, env=environment, check=True, capture_output=True, timeout=60)

    url = ssh.at("box", "/repository")
    git("clone", "--quiet", url, "first", at=tmp_path)
    (tmp_path / "first" / "file").write_bytes(os.urandom(MIB))
    git("add", "file", at=tmp_path / "first")
    git("commit", "--quiet", "--message", "one", at=tmp_path / "first")
    git("push", "--quiet", "origin", "HEAD", at=tmp_path / "first")
    git("clone", "--quiet", url, "second", at=tmp_path)
    assert (tmp_path / "second" / "file").read_bytes() == (tmp_path / "first" / "file").read_bytes()


def test_a_user_without_an_entry_in_passwd_can_copy(
    ssh: SshClient, admin: Client, toolbox: None, tree: Path, tmp_path: Path
) -> None:
    running(admin, SCRATCH, user="12345:100")
    succeeded(ssh.scp("-rp", str(tree), ssh.at("box", "/dev/shm/copy")))
    succeeded(ssh.scp("-Orp", ssh.at("box", "/dev/shm/copy"), str(tmp_path / "back")))
    assert content_of(tmp_path / "back") == content_of(tree)
    assert b"12345" in succeeded(ssh.run("box", "ls -ln /dev/shm"))


def test_links_in_an_instance_do_not_lead_to_its_node(
    ssh: SshClient, admin: Client, toolbox: None, tmp_path: Path
) -> None:
    running(admin, BUSYBOX)
    secret, planted = tmp_path / "secret", tmp_path / "planted"
    secret.write_bytes(b"of the node")
    links = {"one": str(secret), "two": f"/proc/1/root{secret}", "three": "../" * 30 + str(secret)}
    succeeded(ssh.run("box", "; ".join(f"ln -s {target} /{link}" for link, target in links.items())))
    succeeded(ssh.run("box", f"ln -s {planted} /planted; ln -s {tmp_path} /folder"))
    back = tmp_path / "back"
    for link in links:
        assert ssh.sftp("box", f"get /{link} {back}").returncode != 0
        assert ssh.scp("-O", ssh.at("box", f"/{link}"), str(back)).returncode != 0
        assert ssh.rsync("-L", ssh.at("box", f"/{link}"), str(back)).returncode != 0
    ssh.sftp("box", f"put {secret} /planted")
    ssh.scp("-O", str(secret), ssh.at("box", "/folder/planted"))
    assert not back.exists()
    assert not planted.exists()


def test_the_command_is_safe_to_repeat_and_says_what_it_did(toolbox: None, cluster: Cluster) -> None:
    lines = mooring_toolbox(cluster.nodes[0]).stdout.splitlines()
    assert lines[0].startswith("mooring-toolbox-")
    assert "unchanged" in lines[0]
