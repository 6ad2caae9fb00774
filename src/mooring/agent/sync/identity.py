"""What the agent remembers on disk: who it is, and the newest desired state it has ever seen.

<directory>/lock            held while an agent runs here
<directory>/node.json       Identity, readable by the owner only
<directory>/generation      one number
<directory>/real            what `mooring up` has found on this machine: docker, gpus
<directory>/private_images  which images only their registries may hand out; no credential is in it
<directory>/pulled_images   which images a registry gave, by reference
<directory>/image_usage     which images Mooring pulled, and for how long each has been unused
<directory>/containers.json what each container was given (container_records.py); no secret is in it
<directory>/stops           when containers were sent their stop signal
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_serializer

from mooring.schemas.agent import JoinAnswer


class StateError(Exception):
    """The data directory cannot be used; the message says why and what to do."""


class NodeIdentity(BaseModel):
    """What a node was given when it joined."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node_id: str
    node_name: str
    credential: SecretStr
    control_plane_id: str

    @classmethod
    def given(cls, answer: JoinAnswer) -> "NodeIdentity":
        return cls.model_validate(answer.model_dump())

    @field_serializer("credential", when_used="json")
    def _shown_to_the_file(self, credential: SecretStr) -> str:
        return credential.get_secret_value()


def identities(state_dir: Path) -> list[NodeIdentity]:
    """Of the nodes that have joined from this data directory; a damaged file is for the agent to report."""
    found = []
    for path in (state_dir / "node.json", *sorted(state_dir.glob("*/node.json"))):
        with suppress(FileNotFoundError, ValidationError):
            found.append(NodeIdentity.model_validate_json(path.read_bytes()))
    return found


class StateDirectory:
    """The files of one node; `lock` keeps a second agent away for the life of this process."""

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
                f"another agent runs in {self._directory}; end it first, or set another MOORING_DATA_DIR"
            ) from error
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def identity(self) -> NodeIdentity | None:
        """None before the first join; raises StateError when the file makes no sense."""
        path = self._directory / "node.json"
        try:
            return NodeIdentity.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            # The values in a ValidationError's text could be the credential, so it is not passed on.
            raise StateError(f"{path} is damaged; delete it and join the node anew") from error

    def joined(self, identity: NodeIdentity) -> None:
        """Remember who we are now; generations count anew."""
        for name in ("generation", "real"):
            (self._directory / name).unlink(missing_ok=True)
        self.write("node.json", identity.model_dump_json().encode())

    def renewed(self, identity: NodeIdentity) -> None:
        """The same node with another credential."""
        self.write("node.json", identity.model_dump_json().encode())

    def generation(self) -> int:
        path = self._directory / "generation"
        try:
            return int(path.read_bytes())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise StateError(
                f"{path} is damaged; delete it if the control plane's database is intact"
            ) from error

    def save_generation(self, generation: int) -> None:
        """On disk when this returns."""
        self.write("generation", str(generation).encode())

    def real_parts(self) -> frozenset[str]:
        """What has been seen to be real here, and is never to be simulated again."""
        try:
            return frozenset((self._directory / "real").read_text().split())
        except FileNotFoundError:
            return frozenset()

    def save_real_parts(self, parts: frozenset[str]) -> None:
        self.write("real", " ".join(sorted(parts)).encode())

    def read(self, name: str) -> bytes | None:
        """A file of another part of the agent; None: there is none."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """On disk, and readable by the owner only, when this returns."""
        new = self._directory / f"{name}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(content)
            while rest:  # a disk that fills up takes a part and says so only at the next call
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        new.rename(self._directory / name)
        self._sync_directory()

    def _sync_directory(self) -> None:
        """A rename is on disk only when the directory is."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
