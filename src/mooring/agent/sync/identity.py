"""The files in which an agent keeps what must survive its restart.

<directory>/lock            held while an agent runs here
<directory>/node.json       the node's identity, readable by the owner only
<directory>/joining         the credential of a join that has not been answered yet
<directory>/generation      one number: the highest generation seen
<directory>/generation.before  the number saved before it, for when the file is damaged
<directory>/machine         a hash of the machine's id, so that a copy of the directory is not used elsewhere
<directory>/real            what `mooring up` has detected on this machine: docker, gpus
<directory>/private_images  images whose use requires a check at their registry; contains no credential
<directory>/pulled_images   images pulled from a registry, by reference
<directory>/image_usage     images that Mooring pulled, and how long each has been unused
<directory>/containers.json the devices and settings of each container (container_records.py); no secrets
<directory>/stops           when containers were sent their stop signal
<directory>/contact         the last contact with the control plane (self_fence.py)
"""

import fcntl
import hashlib
import hmac
import logging
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe
from typing import Final

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_serializer

from mooring.schemas.agent import JoinAnswer

# Set when the operating system is installed: https://www.freedesktop.org/software/systemd/man/machine-id.html
_MACHINE_ID_FILE: Final = Path("/etc/machine-id")

log = logging.getLogger(__name__)


class StateError(Exception):
    """The data directory cannot be used; the message says why and how to fix it."""


class NodeIdentity(BaseModel):
    """A node's ids and credential, from its join."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node_id: str
    node_name: str
    credential: SecretStr
    control_plane_id: str
    # The one before the last renewal. It is used if the control plane does not know the newest one: a request
    # for a renewal that was repeated on its way has replaced that, or an older database was restored.
    former_credential: SecretStr | None = None

    @classmethod
    def from_answer(cls, answer: JoinAnswer, credential: SecretStr) -> "NodeIdentity":
        """The identity after a join with this credential; an earlier release answers with its own."""
        return cls.model_validate(
            answer.model_dump() | {"credential": answer.credential or credential.get_secret_value()}
        )

    @field_serializer("credential", "former_credential", when_used="json")
    def _plain_credential(self, credential: SecretStr | None) -> str | None:
        return credential.get_secret_value() if credential else None


def identities(state_dir: Path) -> list[NodeIdentity]:
    """The nodes that have joined from this data directory, without those whose file is damaged."""
    found = []
    for path in (state_dir / "node.json", *sorted(state_dir.glob("*/node.json"))):
        with suppress(FileNotFoundError, ValidationError):
            found.append(NodeIdentity.model_validate_json(path.read_bytes()))
    return found


def _machine_hash(id_file: Path) -> bytes | None:
    """A hash, because the id itself must stay secret; None: there is no id, as in most containers."""
    try:
        machine_id = id_file.read_bytes().strip()
    except OSError:
        return None
    if machine_id in {b"", b"uninitialized"}:
        return None
    return hmac.digest(machine_id, b"mooring agent", hashlib.sha256).hex().encode()


class StateDirectory:
    """The files of one node. `lock` excludes a second agent until `unlock`, or until this process ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock: int | None = None

    def lock(self) -> None:
        """Raises StateError when another agent runs in the same directory."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"another agent runs in {self._directory}; stop it, or set another MOORING_DATA_DIR"
            ) from error
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def require_machine(self, id_file: Path = _MACHINE_ID_FILE) -> None:
        """Record which machine this is, at the first call. A machine without an id is not checked.

        Raises:
            StateError: another machine was recorded. There, the node's containers may still run, and a report
                from here would release their GPUs.
        """
        if (here := _machine_hash(id_file)) is None:
            return
        recorded = self.read("machine")
        if recorded is None:
            self.write("machine", here)
        elif recorded != here:
            raise StateError(
                f"{self._directory} belongs to another machine. If it was copied, delete the copy and join "
                f"this machine as a new node. If the system was installed again or the disk was moved here, "
                f"delete {self._directory / 'machine'}"
            )

    def identity(self) -> NodeIdentity | None:
        """None before the first join. Raises StateError if the file is damaged."""
        path = self._directory / "node.json"
        try:
            return NodeIdentity.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            # Without the ValidationError's text, which could contain the credential.
            raise StateError(f"{path} is damaged; delete it and join the node again") from error

    def credential_to_join(self) -> SecretStr:
        """The credential for a join. It is on disk before its first use, so that a join can be repeated."""
        saved = self.read("joining")
        if not saved:
            saved = f"mn_{token_urlsafe(32)}".encode()
            self.write("joining", saved)
        return SecretStr(saved.decode())

    def save_joined(self, identity: NodeIdentity) -> None:
        """Save a new identity, and forget the generation and the real parts of the former one."""
        for name in ("generation", "generation.before", "real"):
            (self._directory / name).unlink(missing_ok=True)
        self.write("node.json", identity.model_dump_json().encode())
        (self._directory / "joining").unlink(missing_ok=True)

    def save_renewed(self, identity: NodeIdentity) -> None:
        """Save the same node with a new credential."""
        self.write("node.json", identity.model_dump_json().encode())

    def generation(self) -> int:
        """The highest generation seen; if its file is damaged, the one saved before it; 0: none.

        Raises:
            StateError: both files are damaged.
        """
        path = self._directory / "generation"
        if not path.exists():
            return 0
        for name in (path.name, "generation.before"):
            with suppress(FileNotFoundError, ValueError):
                saved = int((self._directory / name).read_bytes())
                if name != path.name:
                    log.error("%s is damaged: the agent continues with %d, saved before it", path, saved)
                return saved
        raise StateError(f"{path} is damaged; delete it if the control plane's database is intact")

    def save_generation(self, generation: int) -> None:
        """Save durably, and keep the number saved before."""
        link = self._directory / "generation.before.new"
        with suppress(OSError):  # there is no number yet, or the file system has no hard links
            link.unlink(missing_ok=True)
            link.hardlink_to(self._directory / "generation")
            link.rename(self._directory / "generation.before")
        self.write("generation", str(generation).encode())

    def real_parts(self) -> frozenset[str]:
        """Which of `docker` and `gpus` this machine has, or once had: these are never simulated again."""
        try:
            return frozenset((self._directory / "real").read_text().split())
        except FileNotFoundError:
            return frozenset()

    def save_real_parts(self, parts: frozenset[str]) -> None:
        self.write("real", " ".join(sorted(parts)).encode())

    def read(self, name: str) -> bytes | None:
        """A file's content; None: it does not exist."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file durably, readable by the owner only."""
        new = self._directory / f"{name}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(content)
            while rest:  # a full disk accepts a part, and fails at the next call
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        new.rename(self._directory / name)
        self._sync_directory()

    def _sync_directory(self) -> None:
        """Make a rename durable."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
