"""Reading a tar archive that is not trusted: the container's own `tar` made it, or something in its place."""

import posixpath
import tarfile
from collections.abc import Iterator
from tarfile import TarInfo
from typing import Final

from mooring_client.failures import ClientFailure

# `tarfile` reads names, and the records of extended headers, into memory, and takes a time for some of them
# that grows with the square of their size (CVE-2024-6232). A path has at most 4096 bytes.
_MAX_HEADER_BYTES: Final = 64 * 1024
_MAX_DEPTH: Final = 100


class CopyFailed(ClientFailure):
    """Files were not copied, or not all; the message says which, and why."""


class BrokenArchive(CopyFailed):
    """What the instance sent is no archive, or ends too early."""


class ArchiveSource:
    """The output of `tar`, as the file of a `TarFile`, which reads only headers from it.

    Args:
        parts: the output.

    Attributes:
        ended: whether there is no more output.
    """

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.ended = False
        self._parts = parts
        self._rest = memoryview(b"")
        self._position = 0
        self._header_bytes = 0
        self._last_read = b""

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        """Return the next bytes of a header; fewer at the end of the output.

        Raises:
            BrokenArchive: the headers of one file are too long.
        """
        self._header_bytes += size
        if size < 0 or self._header_bytes > _MAX_HEADER_BYTES:
            raise _broken("a header is too long")
        self._last_read = b"".join(self._take(size))
        return self._last_read

    def seek(self, position: int) -> None:
        """Skip data. Raises BrokenArchive: the position is behind, as no archive of a `tar` needs."""
        if position < self._position:
            raise _broken("a size is negative")
        for _skipped in self._take(position - self._position):
            pass

    def data(self, size: int) -> Iterator[memoryview]:
        """The content of the current file. Raises BrokenArchive: the output ends before."""
        if size < 0:
            raise _broken("a size is negative")
        before = self._position
        yield from self._take(size)
        if self._position - before != size:
            raise _broken("it ends within a file")

    def require_end(self) -> None:
        """Check that an end mark ended the headers. `tarfile` ends at a bad header without an error."""
        if len(self._last_read) != tarfile.BLOCKSIZE or any(self._last_read):
            raise _broken("it ends without an end mark")

    def members(self) -> Iterator[TarInfo]:
        """The headers of the files, one after the other; `data` is of the last one.

        Raises:
            BrokenArchive: this is no archive.
        """
        try:
            archive = tarfile.TarFile(fileobj=self, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                # Otherwise both grow with the number of files.
                archive.members = []  # type: ignore[attr-defined]
                archive.pax_headers = {}
                self._header_bytes = 0
                yield member
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise _broken(str(error)) from None
        self.require_end()

    def _take(self, size: int) -> Iterator[memoryview]:
        while size > 0:
            if not self._rest:
                if not (part := next(self._parts, b"")):
                    self.ended = True
                    return
                self._rest = memoryview(part)
            found, self._rest = self._rest[:size], self._rest[size:]
            self._position += len(found)
            size -= len(found)
            yield found


def _broken(why: str) -> BrokenArchive:
    return BrokenArchive(f"the instance sent a broken archive: {why}")


def path_below(member: TarInfo, root: str) -> list[str]:
    """The names that lead from the copied file or folder to a member; empty: it is that itself.

    Args:
        root: the name that was asked for; `.`: the content of a folder.

    Raises:
        CopyFailed: it is outside, or was not asked for.
    """
    parts = [part for part in member.name.split("/") if part not in {"", "."}]
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise CopyFailed(f"the instance sent a file outside of what it was asked for: {member.name!r}")
    if len(parts) > _MAX_DEPTH:
        raise CopyFailed(f"folders are nested too deeply: {member.name[:100]!r}")
    if root == ".":
        return parts
    if parts[:1] != [root]:
        raise CopyFailed(f"the instance sent a file that was not asked for: {member.name!r}")
    return parts[1:]


def leads_out(target: str, depth: int) -> bool:
    """Whether a link may lead out of the copied folder.

    It may climb only at its start. A later `..` could climb from wherever another link leads.

    Args:
        depth: the number of folders between the copied folder and the link.
    """
    parts = [part for part in target.split("/") if part not in {"", "."}]
    climbs = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return target.startswith("/") or "\0" in target or climbs > depth or ".." in parts[climbs:]


def split_path(path: str) -> tuple[str, str]:
    """The folder and the name of a path in a container; `.` if it names the content of a folder."""
    stripped = path.rstrip("/") or "/"
    name = posixpath.basename(stripped)
    if name in {"", ".", ".."}:
        return stripped, "."
    return posixpath.dirname(stripped) or ".", name
