"""The toolbox's files as a tar archive, which is the same for the same files. Pure."""

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

_FOLDER_MODE: Final = 0o755


@dataclass(frozen=True, slots=True)
class Content:
    """A file that cannot be executed."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Program:
    data: bytes


@dataclass(frozen=True, slots=True)
class Link:
    target: str


@dataclass(frozen=True, slots=True)
class Folder:
    pass


Entry = Content | Program | Link | Folder
Files = dict[str, Entry]


def packed(files: Mapping[str, Entry], folder: str) -> bytes:
    """Return the files below `folder`, an absolute path: owned by root, writable for nobody else, undated."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, entry in sorted(_with_folders(files).items()):
            name = f"{folder.lstrip('/')}/{path}".rstrip("/")
            archive.addfile(*_member(name, entry))
    return buffer.getvalue()


def digest(files: Mapping[str, Entry]) -> str:
    return hashlib.sha256(packed(files, "/")).hexdigest()


def same_as_archive(files: Mapping[str, Entry], archive: bytes) -> bool:
    """Return whether an archive of the folder has exactly these files, with mode and content, of one owner.

    The owner is not root if the engine maps the users of containers (`userns-remap`).

    Args:
        archive: its first component of paths, the folder's name, is not compared.
    """
    expected = {}
    for path, entry in _with_folders(files).items():
        member, data = _member(path, entry)
        expected[path] = _described(member, data.read() if data else b"")
    found, owners = {}, set()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for member in opened:
                file = opened.extractfile(member) if member.isfile() else None
                path = "/".join(PurePosixPath(member.name).parts[1:])
                found[path] = _described(member, file.read() if file else b"")
                owners.add((member.uid, member.gid))
    except tarfile.TarError:
        return False
    return found == expected and len(owners) == 1


def _with_folders(files: Mapping[str, Entry]) -> dict[str, Entry]:
    parents = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
    return {"": Folder(), **{path: Folder() for path in parents}, **files}


def _member(name: str, entry: Entry) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    member = tarfile.TarInfo(name)
    match entry:
        case Folder():
            member.type, member.mode = tarfile.DIRTYPE, _FOLDER_MODE
        case Link():
            member.type, member.mode, member.linkname = tarfile.SYMTYPE, 0o777, entry.target
        case Content() | Program():
            member.mode = 0o755 if isinstance(entry, Program) else 0o644
            member.size = len(entry.data)
            return member, io.BytesIO(entry.data)
    return member, None


def _described(member: tarfile.TarInfo, data: bytes) -> tuple[bytes, int, str, bytes]:
    mode = 0 if member.issym() else member.mode & 0o7777
    return member.type, mode, member.linkname, data
