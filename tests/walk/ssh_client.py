"""OpenSSH's client, as its users run it."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

from tests.service import Client
from tests.walk.product import GatewayProcess

WITHIN_S = 60


class SshClient:
    """OpenSSH with one key, which has been registered.

    Attributes:
        known_hosts: the file of host keys.
        unknown_hosts: what it does with other host keys (StrictHostKeyChecking).
    """

    def __init__(self, admin: Client, gateway: GatewayProcess, folder: Path, name: str = "key") -> None:
        self.gateway, self.admin = gateway, admin
        self.key = folder / name
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.key)]
        subprocess.run(argv, check=True)
        self.known_hosts, self.unknown_hosts = folder / "known_hosts", "accept-new"

    def register(self, **fields: Any) -> str:
        body = {"name": "test", "public_key": self.key.with_suffix(".pub").read_text(), **fields}
        answer = self.admin.post("/v1/ssh-keys", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def certify(self, client: Client | None = None) -> None:
        """Get a certificate, which OpenSSH finds beside the key."""
        body = {"public_key": self.key.with_suffix(".pub").read_text()}
        answer = (client or self.admin).post("/v1/ssh-certificates", json=body)
        assert answer.status_code == 201, answer.text
        self.key.with_name(f"{self.key.name}-cert.pub").write_text(answer.json()["certificate"])

    def options(self, port_flag: str = "-p") -> list[str]:
        return [
            *(port_flag, str(self.gateway.ssh_port)), "-F", "none", "-i", str(self.key),
            *("-o", "IdentitiesOnly=yes"), *("-o", "BatchMode=yes"),
            *("-o", f"StrictHostKeyChecking={self.unknown_hosts}"),
            *("-o", f"UserKnownHostsFile={self.known_hosts}"),
        ]  # fmt: skip

    def argv(self, name: str, *command: str, flags: tuple[str, ...] = ()) -> list[str]:
        return ["ssh", *self.options(), *flags, f"{name}@{self.gateway.host}", *command]

    def run(
        self, name: str, *command: str, flags: tuple[str, ...] = (), given: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        argv = self.argv(name, *command, flags=flags)
        return subprocess.run(argv, input=given, capture_output=True, timeout=WITHIN_S, check=False)

    def sftp(self, name: str, *commands: str) -> subprocess.CompletedProcess[bytes]:
        """Run commands of `sftp`, until one fails."""
        argv = ["sftp", *self.options("-P"), "-b", "-", f"{name}@{self.gateway.host}"]
        given = "\n".join(commands).encode()
        return subprocess.run(argv, input=given, capture_output=True, timeout=WITHIN_S, check=False)

    def scp(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        argv = ["scp", *self.options("-P"), *arguments]
        return subprocess.run(argv, capture_output=True, timeout=WITHIN_S, check=False)

    def rsync(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        argv = ["rsync", f"--rsh={self.remote_shell}", *arguments]
        return subprocess.run(argv, capture_output=True, timeout=WITHIN_S, check=False)

    @property
    def remote_shell(self) -> str:
        """The command line of `ssh`, for programs that add the host to it."""
        return shlex.join(["ssh", *self.options()])

    def at(self, name: str, path: str) -> str:
        """A path in an instance, for `scp` and `rsync`."""
        return f"{name}@{self.gateway.host}:{path}"

    def start(self, name: str, *command: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.argv(name, *command, flags=flags), stdin=pipe, stdout=pipe, stderr=pipe)
