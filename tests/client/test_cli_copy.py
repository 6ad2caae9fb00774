"""Archives of `mooring cp`: hostile ones are rejected before they take memory or leave their folder.

tests/walk/test_copy.py runs the command with real containers.
"""

import io
import os
import tarfile
import tracemalloc
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from mooring_client.cli.copying.archives import (
    ArchiveSource,
    BrokenArchive,
    CopyFailed,
    leads_out,
    path_below,
    split_path,
)
from mooring_client.cli.copying.packing import Packer
from mooring_client.cli.copying.unpacking import Unpacker

MIB = 1024 * 1024
END = bytes(1024)


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, target: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, target
    return member.tobuf(tarfile.GNU_FORMAT)


def extended(records: bytes, size: int | None = None) -> bytes:
    """A header of extended attributes, which claims to have this size."""
    length = len(records) if size is None else size
    return header("x", tarfile.XHDTYPE, length) + records + bytes(-len(records) % 512)


def record(name: str, value: bytes) -> bytes:
    content = f" {name}=".encode() + value + b"\n"
    length = len(content) + 2
    return str(length if len(str(length)) == 2 else length + 1).encode() + content


def unpack(parts: Iterator[bytes], folder: Path, top: str | None = None) -> list[str]:
    """Unpack as the command does. Returns the messages on what was left out."""
    source = ArchiveSource(parts)
    skipped: list[str] = []
    with Unpacker(str(folder), top, skipped.append) as unpacker:
        for member in source.members():
            path = path_below(member, ".")
            if member.islnk():
                unpacker.link(path, path_below(tarfile.TarInfo(member.linkname), "."))
            else:
                unpacker.place(path, member, source.data(member.size))
        unpacker.finish()
    return skipped


# --- headers


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        # A header of 1 GiB.
        (chain([extended(b"", 1024 * MIB)], repeat(bytes(MIB), 1024)), "a header is too long"),
        (
            chain([header("n", tarfile.GNUTYPE_LONGNAME, 1024 * MIB)], repeat(bytes(MIB))),
            "a header is too long",
        ),
        # Headers of headers, without an end.
        (chain(repeat(extended(record("path", b"a")), 10_000)), "a header is too long"),
        # The map of a sparse file, without an end.
        (
            chain(
                [extended(record("GNU.sparse.major", b"1") + record("GNU.sparse.minor", b"0"))],
                [header("a", size=1024 * MIB), b"999999999\n"],
                repeat(b"1\n" * 512),
            ),
            "a header is too long",
        ),
        (iter([extended(record("size", b"-4096")), header("a"), END]), "a size is negative"),
        (iter([header("a", size=-4096), END]), "a size is negative"),
        (iter([b"\xff" * 512, END]), "broken archive"),
        (iter([header("a"), b"junk" * 1000]), "it ends without an end mark"),
        (iter([header("a")]), "it ends without an end mark"),
        (iter([header("a"), bytes(100)]), "it ends without an end mark"),
        (iter([header("a", size=4), b"1"]), "it ends within a file"),
        (iter([header("a", tarfile.DIRTYPE, size=4), b"1"]), "it ends without an end mark"),
        (iter([b"hello"]), "truncated header"),
        (iter([]), "empty file"),
    ],
)
def test_a_header_takes_neither_memory_nor_time(
    tmp_path: Path, archive: Iterator[bytes], message: str
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BrokenArchive, match=message):
            unpack(archive, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_files() -> None:
    number = 5000
    block = extended(record("comment", b"c")) + header("a")
    source = ArchiveSource(chain(repeat(block, number), [END]))
    tracemalloc.start()
    try:
        found = sum(1 for _member in source.members())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == number
    assert peak < MIB


@pytest.mark.parametrize("mtime", [b"nan", b"inf", b"-inf", b"1e300", b"x"])
def test_a_time_that_cannot_be_is_1970(tmp_path: Path, mtime: bytes) -> None:
    assert unpack(iter([extended(record("mtime", mtime)), header("a"), END]), tmp_path) == []
    assert (tmp_path / "a").stat().st_mtime == 0


# --- paths


@pytest.mark.parametrize(
    "archive",
    [
        header("../a"),
        header("a/../../b"),
        header("/a"),
        header("a/" * 101 + "b"),
        extended(record("path", b"a\0b")) + header("a"),
        header("l", tarfile.LNKTYPE, target="/etc/hostname"),
        header("l", tarfile.LNKTYPE, target="../a"),
        header("l", tarfile.LNKTYPE, target="folder"),
        header("l", tarfile.LNKTYPE, target="link"),
        header("l", tarfile.LNKTYPE, target="link/a"),
        header("l", tarfile.LNKTYPE, target="l"),
        header("l", tarfile.LNKTYPE, target="."),
        header(".", tarfile.LNKTYPE, target="file"),
        header("."),
        header(".", tarfile.SYMTYPE, target="file"),
        header("link", tarfile.DIRTYPE),
        header("link/a"),
        header("link/a", tarfile.DIRTYPE),
        header("link/a", tarfile.SYMTYPE, target="a"),
        header("link/a", tarfile.LNKTYPE, target="file"),
        header("file/a"),
        header("n" * 300),
    ],
)
def test_nothing_is_written_elsewhere(tmp_path: Path, archive: bytes) -> None:
    folder = tmp_path / "folder"
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_bytes(b"1")
    (folder / "link").symlink_to("../outside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"1")
    with pytest.raises(CopyFailed):
        unpack(iter([archive, END]), folder)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["a"]
    assert (tmp_path / "outside" / "a").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "outside"]
    assert not [path for path in folder.rglob("*") if path.name.startswith(".mooring-")]


@pytest.mark.parametrize("name", ["other", ".", "", "data2", "datax/data", "x/data"])
def test_what_was_not_asked_for_is_rejected(name: str) -> None:
    with pytest.raises(CopyFailed, match="not asked for"):
        path_below(tarfile.TarInfo(name), "data")
    assert path_below(tarfile.TarInfo("./data//x/./y/"), "data") == ["x", "y"]


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V"])
def test_devices_and_unknown_kinds_are_left_out(tmp_path: Path, kind: bytes) -> None:
    parts = iter([header("a", kind), header("b", tarfile.SYMTYPE, target="/"), header("c"), END])
    assert unpack(parts, tmp_path) == ["a is a special file", "b is a link to /, outside of what is copied"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("target", "depth", "leads"),
    [
        ("a", 0, False), ("a/b/", 0, False), ("./a", 0, False), (".", 0, False), ("..", 0, True),
        ("../a", 1, False), (".././../a", 2, False), ("../../a", 1, True), ("./../a", 0, True),
        ("/a", 3, True), ("a/..", 3, True), ("../a/../b", 3, True), ("a\0", 3, True), ("...", 0, False),
    ],
)  # fmt: skip
def test_a_link_leads_out_if_it_climbs_too_far(target: str, depth: int, leads: bool) -> None:
    assert leads_out(target, depth) is leads


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a", (".", "a")), ("a/b/", ("a", "b")), ("/", ("/", ".")), ("/a", ("/", "a")), ("//", ("/", ".")),
        ("a/.", ("a/.", ".")), (".", (".", ".")), ("a/..", ("a/..", ".")), ("-a", (".", "-a")),
        ("a\n", (".", "a\n")), ("...", (".", "...")),
    ],
)  # fmt: skip
def test_a_path_is_split_into_folder_and_name(path: str, expected: tuple[str, str]) -> None:
    assert split_path(path) == expected


# --- round trips


@pytest.mark.parametrize("size", [1, 511, 512, 513, MIB])
def test_what_is_packed_is_unpacked(tmp_path: Path, size: int) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    for number in (0, 1, 511, 512, 513, 70_000):
        (root / "sub" / str(number)).write_bytes(os.urandom(number))
    (root / ("n" * 200)).symlink_to("t" * 200)
    (root / "again").hardlink_to(root / "sub" / "513")
    (root / "sub").chmod(0o555)
    packed = bytearray()
    skipped: list[str] = []
    packer = Packer(packed.extend, skipped.append, follow_links=False)
    packer.add(root, ".")
    packer.end()
    archive = bytes(packed)
    parts = (archive[start : start + size] for start in range(0, len(archive), size))
    assert unpack(parts, tmp_path, "copy") == skipped == []
    for path in root.rglob("*"):
        copy = tmp_path / "copy" / path.relative_to(root)
        assert copy.lstat().st_mode | 0o700 == path.lstat().st_mode | 0o700
        assert int(copy.lstat().st_mtime) == int(path.lstat().st_mtime)
        if path.is_file():
            assert copy.read_bytes() == path.read_bytes()
    assert (tmp_path / "copy" / ("n" * 200)).readlink() == Path("t" * 200)
    assert (tmp_path / "copy" / "again").samefile(tmp_path / "copy" / "sub" / "513")


def test_an_unreadable_file_is_named_and_the_rest_packed(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"1")
    # A link to itself cannot be followed.
    (tmp_path / "loop").symlink_to("loop")
    packed, skipped = bytearray(), list[str]()
    packer = Packer(packed.extend, skipped.append, follow_links=True)
    packer.add_content(tmp_path)
    packer.end()
    assert skipped == [f"cannot read {tmp_path}/loop: Too many levels of symbolic links"]
    with tarfile.open(fileobj=io.BytesIO(bytes(packed))) as archive:
        assert archive.getnames() == ["good"]
