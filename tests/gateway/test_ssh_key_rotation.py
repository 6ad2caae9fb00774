"""`mooring gateway-keys`: the keys change while the gateway runs, and clients that follow notice nothing."""

import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import HOST
from tests.service import Client
from tests.testbed.parts import require
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import MOORING, GatewayProcess, ServerProcess, clean_environment, running_gateway
from tests.walk.ssh_client import WITHIN_S, SshClient

KNOWN = b"the instance is pending"  # the login has succeeded; there is no node
UNKNOWN_HOST = b"Host key verification failed"
UNKNOWN_USER = b"Permission denied (publickey)"


class Rotation:
    """A service, and an OpenSSH client that accepts only host keys that it knows."""

    def __init__(self, server: ServerProcess, gateway: GatewayProcess, admin: Client, folder: Path) -> None:
        self._server, self._admin, self._folder = server, admin, folder
        self.client = SshClient(admin, gateway, folder)
        self.hosts = folder / "hosts"

    def keys(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        argv = [*MOORING, "gateway-keys", *command]
        environment = {**self._server.environment, **settings}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def pin(self) -> list[str]:
        """Write the host keys that the API shows. Returns them."""
        shown = self._admin.get("/v1/me/ssh").json()
        port = self.client.gateway.ssh_port
        self.hosts.write_text("".join(f"[{HOST}]:{port} {key}\n" for key in shown["host_keys"]))
        assert len(shown["known_hosts"].splitlines()) == len(shown["host_keys"])
        return list(shown["host_keys"])

    def errors(self, client: SshClient | None = None, hosts: Path | None = None) -> bytes:
        """What the client says when it tries to run a command."""
        client = client or self.client
        client.known_hosts, client.unknown_hosts = hosts or self.hosts, "yes"
        return client.run("waits", "true", flags=("-o", "UpdateHostKeys=no")).stderr

    def learn(self, count: int) -> None:
        """Connect again and again until the client knows so many host keys."""
        self.client.known_hosts, self.client.unknown_hosts = self.hosts, "yes"
        flags = ("-N", "-o", "UpdateHostKeys=yes")
        deadline = time.monotonic() + WITHIN_S
        while len(self.hosts.read_text().splitlines()) != count:
            assert time.monotonic() < deadline, self.hosts.read_text()
            with self.client.start("waits", flags=flags) as connected:
                with suppress(AssertionError):
                    wait_until(lambda: len(self.hosts.read_text().splitlines()) == count, 1)
                connected.kill()

    def audited(self, count: int) -> list[tuple[str, Any, Any]]:
        """The newest rotations, the last one first: action, keys before, and keys after."""
        return [
            (entry["action"], entry["before"], entry["after"])
            for entry in self._admin.items("/v1/audit-log")
            if entry["action"].startswith("gateway_keys.")
        ][:count]

    def certified(self, name: str) -> SshClient:
        """A client with a certificate, whose key is not registered."""
        made = SshClient(self._admin, self.client.gateway, self._folder, name)
        made.certify()
        return made


@pytest.fixture
def rotation(server: ServerProcess, workspace: Workspace, tmp_path: Path) -> Iterator[Rotation]:
    require("ssh")
    with (
        running_gateway(server.environment, workspace, tmp_path, HOST) as gateway,
        server.client as admin,
    ):
        made = Rotation(server, gateway, admin, tmp_path)
        key_id = made.client.register()
        waiting = admin.create(name="waits")
        yield made
        admin.delete(f"/v1/instances/{waiting['id']}")
        admin.delete(f"/v1/ssh-keys/{key_id}")


def test_clients_learn_the_next_host_key_before_it_is_used(rotation: Rotation, tmp_path: Path) -> None:
    (old,) = rotation.pin()
    stale = tmp_path / "stale"
    stale.write_text(rotation.hosts.read_text())
    done = rotation.keys("rotate", "--host")
    assert done.returncode == 0, done.stderr
    assert rotation.keys("rotate", "--host").returncode == 2, "a second one before the first has ended"
    assert KNOWN in rotation.errors(hosts=stale), "the old key is still used"
    rotation.learn(2)
    assert rotation.keys("retire", "--host").returncode == 0
    wait_until(lambda: UNKNOWN_HOST in rotation.errors(hosts=stale), WITHIN_S)
    assert KNOWN in rotation.errors()
    (new,) = rotation.pin()
    assert new != old
    assert rotation.keys("retire", "--host").returncode == 2, "the only one"


def test_certificates_stay_valid_until_the_old_authority_is_retired(rotation: Rotation) -> None:
    rotation.pin()
    old = rotation.certified("old")
    assert KNOWN in rotation.errors(old)
    assert rotation.keys("rotate", "--ca").returncode == 0
    new = rotation.certified("new")
    wait_until(lambda: KNOWN in rotation.errors(new), WITHIN_S)
    assert KNOWN in rotation.errors(old)
    assert rotation.keys("retire", "--ca").returncode == 0
    wait_until(lambda: UNKNOWN_USER in rotation.errors(old), WITHIN_S)
    assert KNOWN in rotation.errors(new)


def shown(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str]]:
    """The kind, the fingerprint and the use of each key."""
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return [(kind, key, use) for kind, key, use in lines]


def test_a_rotation_is_shown_and_audited(rotation: Rotation) -> None:
    assert "--host" in rotation.keys("rotate").stderr
    old = {kind: key for kind, key, _use in shown(rotation.keys("show"))}
    both = shown(rotation.keys("rotate", "--host", "--ca", "--link"))
    new = {kind: key for kind, key, _use in both[1::2]}
    assert both == [
        ("host", old["host"], "used until it is retired"), ("host", new["host"], "used after that"),
        ("ca", old["ca"], "trusted until it is retired"), ("ca", new["ca"], "signs"),
        ("link", old["link"], "trusted until it is retired"), ("link", new["link"], "signs"),
    ]  # fmt: skip
    retired = shown(rotation.keys("retire", "--host", "--ca", "--link"))
    assert retired == [
        ("host", new["host"], "used"),
        ("ca", new["ca"], "signs"),
        ("link", new["link"], "signs"),
    ]
    assert rotation.audited(6) == [
        *(
            ("gateway_keys.retire", {f"{kind}_keys": [old[kind], new[kind]]}, {f"{kind}_keys": [new[kind]]})
            for kind in ("link", "ca", "host")
        ),
        *(
            ("gateway_keys.rotate", {f"{kind}_keys": [old[kind]]}, {f"{kind}_keys": [old[kind], new[kind]]})
            for kind in ("link", "ca", "host")
        ),
    ]


def test_other_encryption_keys_are_explained(rotation: Rotation) -> None:
    other = {"MOORING_ENCRYPTION_KEYS": b64encode(bytes(32)).decode()}
    for command in (["show"], ["rotate", "--host"]):
        done = rotation.keys(*command, **other)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("MOORING_ENCRYPTION_KEYS"), done.stderr


def test_without_a_server_there_are_no_keys(tmp_path: Path) -> None:
    environment = {
        **clean_environment(), "MOORING_DATA_DIR": str(tmp_path),
        "MOORING_ENCRYPTION_KEYS": b64encode(bytes(32)).decode(),
    }  # fmt: skip
    subprocess.run([*MOORING, "db", "upgrade"], env=environment, capture_output=True, check=True)
    for command in (["gateway-keys", "show"], ["gateway-keys", "rotate", "--ca"], ["gateway"]):
        done = subprocess.run(
            [*MOORING, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2, command
        assert "start the server first" in done.stderr, done.stderr
