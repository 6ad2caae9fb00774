"""Writing local files and folders as a tar archive for a container.

GNU's format, because busybox reads long names and names that are not UTF-8 in no other. Times are in whole
seconds, and all files belong to root, until the container's `tar` gives them to its own user.
"""

import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mooring_client.cli.copying.archives import CopyFailed
from mooring_client.stream_messages import MAX_DATA_BYTES

_END: Final = bytes(2 * tarfile.BLOCKSIZE)


class Packer:
    """Writes an archive.

    Args:
        write: is called with parts of it.
        follow_links: write what links lead to.
        skipped: is called with a message for each file that is left out.
    """

    def __init__(
        self, write: Callable[[bytes], None], skipped: Callable[[str], None], *, follow_links: bool
    ) -> None:
        self._write_out = write
        self._skipped = skipped
        self._follow_links = follow_links
        self._buffer = bytearray()
        self._links: dict[tuple[int, int], str] = {}
        self._above: set[tuple[int, int]] = set()

    def add(self, path: Path, name: str) -> None:
        """Write a file, or a folder with all that it has.

        Args:
            name: what the archive calls it; `.`: it is the folder into which the archive is unpacked.

        Raises:
            CopyFailed: it became shorter meanwhile.
        """
        try:
            found = path.stat(follow_symlinks=self._follow_links)
            if stat.S_ISDIR(found.st_mode):
                self._add_folder(path, name, found)
            elif stat.S_ISREG(found.st_mode):
                self._add_file(path, name)
            elif stat.S_ISLNK(found.st_mode):
                self._header(name, found, tarfile.SYMTYPE, target=_target(path))
            else:
                self._skipped(f"{path} is a special file")
        except OSError as error:
            self._skipped(f"cannot read {path}: {error.strerror}")

    def add_content(self, path: Path) -> None:
        """Write what a folder has, without the folder itself. Raises CopyFailed."""
        try:
            entries = sorted(path.iterdir())
        except OSError as error:
            self._skipped(f"cannot read {path}: {error.strerror}")
            return
        for entry in entries:
            self.add(entry, entry.name)

    def end(self) -> None:
        """Write the end mark."""
        self._write(_END)
        self._write_out(bytes(self._buffer))

    def _add_folder(self, path: Path, name: str, found: os.stat_result) -> None:
        identity = found.st_dev, found.st_ino
        if identity in self._above:  # only with followed links
            self._skipped(f"{path} leads to a folder above it")
            return
        entries = sorted(path.iterdir())
        self._header(name, found, tarfile.DIRTYPE, also=stat.S_IRWXU)
        self._above.add(identity)
        for entry in entries:
            self.add(entry, entry.name if name == "." else f"{name}/{entry.name}")
        self._above.remove(identity)
        # Again, because busybox sets permissions and times at once: nothing could be created in a folder that
        # is read-only, and what was created has changed its time.
        self._header(name, found, tarfile.DIRTYPE)

    def _add_file(self, path: Path, name: str) -> None:
        # It might have been replaced by a link or a pipe since.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if self._follow_links else os.O_NOFOLLOW)
        fd = os.open(path, flags)
        try:
            found = os.fstat(fd)
            identity = found.st_dev, found.st_ino
            if found.st_nlink > 1 and identity in self._links:
                self._header(name, found, tarfile.LNKTYPE, target=self._links[identity])
                return
            self._header(name, found, tarfile.REGTYPE)
            self._copy(fd, path, found.st_size)
            if found.st_nlink > 1:
                self._links[identity] = name
        finally:
            os.close(fd)

    def _header(
        self, name: str, found: os.stat_result, kind: bytes, *, target: str = "", also: int = 0
    ) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        member.mode, member.mtime = stat.S_IMODE(found.st_mode) | also, int(found.st_mtime)
        member.size = found.st_size if kind == tarfile.REGTYPE else 0
        self._write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def _copy(self, fd: int, path: Path, size: int) -> None:
        left = size
        while left:
            try:
                data = os.read(fd, min(left, MAX_DATA_BYTES))
            except OSError as error:
                raise CopyFailed(f"cannot read {path}: {error.strerror}") from None
            if not data:
                raise CopyFailed(f"{path} became shorter while it was copied; try again")
            left -= len(data)
            self._write(data)
        self._write(bytes(-size % tarfile.BLOCKSIZE))

    def _write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= MAX_DATA_BYTES:
            self._write_out(bytes(self._buffer[:MAX_DATA_BYTES]))
            del self._buffer[:MAX_DATA_BYTES]


def _target(path: Path) -> str:
    return os.readlink(path)  # noqa: PTH115 - a Path would change the text
