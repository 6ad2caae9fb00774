"""Files that other programs read. They are replaced only as long as nobody else has changed them."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from mooring_client.failures import ClientFailure


class WrittenFiles:
    """The files that this command has written below a folder, with hashes of what it wrote.

    Args:
        record: the file that lists them, below the folder.
    """

    def __init__(self, folder: Path, record: PurePosixPath) -> None:
        self.folder = folder
        self._record = folder / record
        try:
            self._hashes: dict[str, str] = dict(json.loads(self._record.read_text()))
        except (OSError, ValueError, TypeError):
            self._hashes = {}

    def path(self, name: PurePosixPath) -> Path:
        return self.folder / name

    def is_foreign(self, name: PurePosixPath) -> bool:
        """Whether the file exists, and is not as this command has left it."""
        try:
            found = self.path(name).read_bytes()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self._hashes.get(str(name)) != _hash(found)

    def require_own(self, names: Iterable[PurePosixPath]) -> None:
        """Raises ClientFailure if a file was made or changed by others."""
        foreign = [str(self.path(name)) for name in names if self.is_foreign(name)]
        if foreign:
            listed = ", ".join(foreign)
            raise ClientFailure(
                f"not written by this command, or changed since: {listed}; --force replaces it"
            )

    def write(self, texts: Mapping[PurePosixPath, str]) -> None:
        """Write files that their owner alone can read; other processes see the old or the new content."""
        for name, text in texts.items():
            _write(self.path(name), text)
            self._hashes[str(name)] = _hash(text.encode())
            _write(self._record, json.dumps(self._hashes, indent=2) + "\n")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
        output.write(text)
    new.replace(file)
