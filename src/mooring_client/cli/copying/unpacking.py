"""Placing the files of an archive that is not trusted below a local folder."""

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from tarfile import TarInfo
from types import TracebackType
from typing import Final, Self

from mooring_client.cli.copying.archives import CopyFailed, leads_out

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LAST_TIME: Final = 2**33  # later ones are an error; file systems reject them
_PREFIX: Final = ".mooring-"


@dataclass(frozen=True, slots=True)
class _Folder:
    """An open folder. `member` is its header, once it was in the archive."""

    name: str
    fd: int
    member: TarInfo | None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A complete file that does not have its name yet."""

    folder: int
    temporary: str
    path: Sequence[str]


class Unpacker:
    """Places files and folders below a folder.

    Every folder is opened from the one above it and never through a link, so nothing that the archive has, or
    that another program does meanwhile, leads out. (The filter of `tarfile` decides by names, before, and
    gets them wrong in some releases: CVE-2025-4517.) Like that filter it takes write permissions from group
    and others, and no device and no link that leads out of the copied folder is made.

    A file gets its name when it is complete, and the last one only by `finish`.

    Args:
        folder: path of the folder.
        top: the name of the copied folder below it; None: what is copied goes into it.
        skipped: is called with a message for each file that is left out.
    """

    def __init__(self, folder: str, top: str | None, skipped: Callable[[str], None]) -> None:
        self._top = [] if top is None else [top]
        self._skipped = skipped
        self._pending: _Pending | None = None
        try:
            # The user named it, so it may be a link.
            self._open = [_Folder(folder, os.open(folder, _DIRECTORY & ~os.O_NOFOLLOW), None)]
        except OSError as error:
            raise CopyFailed(f"cannot open {folder}: {error.strerror}") from None

    def place(self, path: Sequence[str], member: TarInfo, data: Iterable[memoryview]) -> None:
        """Create what a member of the archive describes.

        Args:
            path: the names that lead to it from the copied file or folder.
            data: its content.

        Raises:
            CopyFailed: it cannot be created.
        """
        path = [*self._top, *path]
        try:
            self._complete()
            if member.isdir():
                self._enter(path, member)
            elif not path:
                raise CopyFailed("the instance sent a file in place of the folder")
            elif member.isreg() and not member.issparse():
                self._write(self._enter(path[:-1]), path, member, data)
            elif member.issym():
                self._link(self._enter(path[:-1]), path, member)
            else:
                self._skipped(f"{'/'.join(path)} is a special file")
        except OSError as error:
            raise CopyFailed(f"cannot write {'/'.join(path)}: {error.strerror}") from None

    def link(self, path: Sequence[str], target: Sequence[str]) -> None:
        """Create a second name of a file. Both paths are relative to the copied folder.

        Raises:
            CopyFailed: there is no such file.
        """
        path, target = [*self._top, *path], [*self._top, *target]
        if not path or not target:
            raise CopyFailed("the instance sent a link in place of the folder")
        try:
            self._complete()
            folder = self._folder_of(target)
            try:
                self._link_file(folder, target[-1], self._enter(path[:-1]), path[-1])
            finally:
                os.close(folder)
        except OSError as error:
            raise CopyFailed(f"cannot link {'/'.join(path)}: {error.strerror}") from None

    def finish(self) -> None:
        """Give the last file its name, and folders their permissions and times.

        Raises:
            CopyFailed: that is not possible.
        """
        try:
            self._complete()
            self._leave(1)
        except OSError as error:
            raise CopyFailed(f"cannot write {self._open[-1].name}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove a file that has no name yet, and close the folders."""
        if self._pending is not None:
            with suppress(OSError):
                os.unlink(self._pending.temporary, dir_fd=self._pending.folder)
        for folder in self._open:
            os.close(folder.fd)

    def _enter(self, path: Sequence[str], member: TarInfo | None = None) -> int:
        """Open a folder, and create it and those above it if need be. Leave all others."""
        common = 0
        while common < min(len(path), len(self._open) - 1) and self._open[common + 1].name == path[common]:
            common += 1
        self._leave(common + 1)
        for number in range(common, len(path)):
            above, name = self._open[-1].fd, path[number]
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=above)  # for its owner only, until it has its permissions
            try:
                self._open.append(_Folder(name, os.open(name, _DIRECTORY, dir_fd=above), None))
            except NotADirectoryError:
                raise CopyFailed(f"{'/'.join(path[: number + 1])} is not a folder here") from None
        if member is not None and path:
            self._open[-1] = _Folder(path[-1], self._open[-1].fd, member)
        return self._open[-1].fd

    def _leave(self, depth: int) -> None:
        """Close folders, the innermost first. Files in them changed their times, so these are set last."""
        while len(self._open) > depth:
            folder = self._open.pop()
            try:
                if folder.member is not None:
                    os.fchmod(folder.fd, folder.member.mode & 0o755 | 0o700)
                    os.utime(folder.fd, ns=_times(folder.member))
            finally:
                os.close(folder.fd)

    def _folder_of(self, path: Sequence[str]) -> int:
        """A new descriptor of the folder of an existing file."""
        fd = os.dup(self._open[0].fd)
        for name in path[:-1]:
            above = fd
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=above)
            finally:
                os.close(above)
        return fd

    @staticmethod
    def _link_file(folder: int, name: str, parent: int, new_name: str) -> None:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise CopyFailed(f"{name} is not a file")
        # Not by a temporary name: renaming one link to another of the same file does nothing.
        with suppress(FileNotFoundError):
            os.unlink(new_name, dir_fd=parent)
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)

    def _write(self, folder: int, path: Sequence[str], member: TarInfo, data: Iterable[memoryview]) -> None:
        temporary = _temporary_name()
        fd = os.open(temporary, _NEW_FILE, 0o600, dir_fd=folder)
        try:
            try:
                for part in data:
                    _write_all(fd, part)
                os.fchmod(fd, member.mode & 0o755)
                os.utime(fd, ns=_times(member))
            finally:
                os.close(fd)  # some file systems report a full disk here
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        self._pending = _Pending(folder, temporary, path)

    def _link(self, folder: int, path: Sequence[str], member: TarInfo) -> None:
        below = len(path) - len(self._top) - 1
        if below < 0:
            self._skipped(f"{path[-1]} is a link to {member.linkname}; -L copies what it leads to")
            return
        if leads_out(member.linkname, below):
            self._skipped(f"{'/'.join(path)} is a link to {member.linkname}, outside of what is copied")
            return
        temporary = _temporary_name()
        os.symlink(member.linkname, temporary, dir_fd=folder)
        self._pending = _Pending(folder, temporary, path)
        os.utime(temporary, ns=_times(member), dir_fd=folder, follow_symlinks=False)

    def _complete(self) -> None:
        """Give the pending file its name."""
        if self._pending is not None:
            folder, temporary = self._pending.folder, self._pending.temporary
            try:
                os.rename(temporary, self._pending.path[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except IsADirectoryError:
                raise CopyFailed(f"{'/'.join(self._pending.path)} is a folder here") from None
            self._pending = None


def _temporary_name() -> str:
    return _PREFIX + token_hex(8)


def _times(member: TarInfo) -> tuple[int, int]:
    """Access and modification time in nanoseconds; 0 for times that no file system has, or NaN."""
    time_s = member.mtime if -_LAST_TIME < member.mtime < _LAST_TIME else 0
    return (round(time_s * 1e9),) * 2


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
