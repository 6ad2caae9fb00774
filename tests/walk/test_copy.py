"""`mooring cp` with real containers: both directions, hostile names and archives, full disks."""

import io
import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.service import Client
from tests.testbed.filesystems import small_file_system
from tests.testbed.images import BUSYBOX, WAIT, WAITER
from tests.testbed.toolbox import (
    DEBIAN,
    SCRATCH,
    build_on,
    import_distributions,
    import_images,
    remove_toolboxes,
    toolbox_files,
)
from tests.testbed.waiting import wait_until
from tests.walk.cli_client import WITHIN_S, CliClient
from tests.walk.conftest import Cluster

pytestmark = pytest.mark.timeout(300)  # the first test builds images

MIB = 1024 * 1024
COMMANDS = {SCRATCH: ["/sleep", "100000"], BUSYBOX: [WAITER]}
# Bytes, because not every name is text. The longest is as long as file systems allow.
NAMES = [
    b"-rf", b"--help", b"a\nb\n", b" spaces ", b"tab\t", b"quote'\"", b"$(id)", b"back\\slash", b"a:b", b"*",
    b"~", "gr\u00fc\u00df".encode(), b"not-utf-8-\xff", b"\x1b[31mred", b"n" * 255,
]  # fmt: skip
OLD = 981_173_106
Entry = tuple[str, int, int, bytes]
Fields = dict[str, object]


@pytest.fixture(scope="module")
def toolbox(shared_cluster: Cluster) -> Iterator[None]:
    files = toolbox_files()
    for node in shared_cluster.nodes:
        build_on(node, files)
    yield
    for node in shared_cluster.nodes:
        remove_toolboxes(node)


@pytest.fixture
def cli(cluster: Cluster, tmp_path: Path) -> CliClient:
    return CliClient(cluster.server.url, tmp_path)


def started(admin: Client, image: str = BUSYBOX, **fields: object) -> None:
    """Start an instance of the name `box`."""
    made = admin.create(
        name="box",
        image=image,
        command=COMMANDS.get(image, WAIT),
        **{"cpus": 0.5, "memory_mib": 256, "shm_mib": 1, **fields},
    )
    admin.wait(made["id"], "running")


@pytest.fixture
def box(admin: Client) -> None:
    started(admin)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder for what is copied, apart from the configuration of the command."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def tree(here: Path) -> Path:
    """A folder with files of all kinds that are kept."""
    root = here / "tree"
    deep = root.joinpath("sub", *(str(level) * 40 for level in range(6)))
    deep.mkdir(parents=True)
    (deep / "far").write_bytes(b"down")
    for number, name in enumerate(NAMES):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(bytes([number]) * number * 700)
    (root / "-folder\n").mkdir(mode=0o700)
    (root / "-folder\n" / "large").write_bytes(os.urandom(3 * MIB + 1))
    (root / "program").write_bytes(b"#!/bin/sh\n")
    (root / "program").chmod(0o755)
    (root / "secret").write_bytes(b"mine")
    (root / "secret").chmod(0o400)
    (root / "link").symlink_to("program")
    (root / "sub" / "up").symlink_to("../-folder\n/large")
    (root / "sub" / "nowhere").symlink_to("no/such/./file/")
    (root / "again").hardlink_to(root / "program")
    for number, path in enumerate([*root.rglob("*"), root]):
        os.utime(path, (OLD + number, OLD + number), follow_symlinks=False)
    return root


def content_of(root: Path, *, gnu: bool = False) -> dict[str, Entry]:
    """Kind, permissions, time and content of everything in a folder, and of the folder itself.

    Args:
        gnu: with times of folders and links, which busybox does not keep.
    """
    return {os.path.relpath(path, root): _entry(path, gnu=gnu) for path in [root, *root.rglob("*")]}


def _entry(path: Path, *, gnu: bool) -> Entry:
    found = path.lstat()
    mode, time = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if path.is_symlink():
        return "link", 0, time if gnu else 0, os.fsencode(os.readlink(path))  # noqa: PTH115 - its exact text
    return (
        ("folder", mode, time if gnu else 0, b"")
        if path.is_dir()
        else ("file", mode, time, path.read_bytes())
    )


def listed_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def succeeded(done: "subprocess.CompletedProcess[bytes]") -> "subprocess.CompletedProcess[bytes]":
    assert (done.returncode, done.stderr) == (0, b""), done
    return done


def failed(done: "subprocess.CompletedProcess[bytes]", message: str, code: int = 1) -> None:
    assert (done.returncode, done.stdout) == (code, b""), done
    assert message in done.stderr.decode(), done
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stderr


def shell(cli: CliClient, script: str) -> str:
    """The output of a script in the instance, which must succeed."""
    return succeeded(cli.run("exec", "box", "--", "/bin/sh", "-c", script)).stdout.decode()


# --- both directions


@pytest.mark.parametrize("image", [BUSYBOX, DEBIAN, SCRATCH])
def test_a_folder_is_copied_in_both_directions(
    request: pytest.FixtureRequest,
    cli: CliClient,
    cluster: Cluster,
    admin: Client,
    tree: Path,
    here: Path,
    image: str,
) -> None:
    for node in cluster.nodes:
        import_images(node)
        if image == DEBIAN:
            import_distributions(node)
    if image == SCRATCH:
        request.getfixturevalue("toolbox")
    started(admin, image)

    def content(root: Path) -> dict[str, Entry]:
        return content_of(root, gnu=image == DEBIAN)

    expected = content(tree)
    succeeded(cli.run("cp", str(tree), "box:/copy"))
    succeeded(cli.run("cp", "box:/copy", str(here / "back")))
    assert content(here / "back") == expected
    assert (here / "back" / "again").stat().st_ino == (here / "back" / "program").stat().st_ino
    # Now both exist, so each is copied into the other.
    succeeded(cli.run("cp", str(tree), "box:/copy"))
    succeeded(cli.run("cp", "box:/copy/tree", str(here / "back")))
    assert content(here / "back" / "tree") == expected
    # A second time, it replaces what is there.
    succeeded(cli.run("cp", str(tree), "box:/copy/"))
    succeeded(cli.run("cp", "box:/copy/tree/", str(here / "back")))
    assert content(here / "back" / "tree") == expected
    # The content alone; an existing folder keeps its own permissions.
    (here / "back" / "tree").chmod(0o711)
    succeeded(cli.run("cp", f"{tree}/.", "box:/dev/shm/.."))
    succeeded(cli.run("cp", "box:/copy/tree/.", str(here / "back" / "tree")))
    succeeded(cli.run("cp", "box:/copy/tree/.", str(here / "content")))
    assert content(here / "content") == expected
    again = content(here / "back" / "tree")
    assert again.pop(".")[:2] == ("folder", 0o711)
    assert again == {name: entry for name, entry in expected.items() if name != "."}


@pytest.mark.parametrize("name", [b"-rf", b"a\nb\n", b"quote'\"", b"$(id)", b"*", b"n" * 255])
def test_a_file_of_any_name_is_copied(cli: CliClient, box: None, here: Path, name: bytes) -> None:
    path = here / os.fsdecode(name)
    path.write_bytes(b"content")
    succeeded(cli.run("cp", "--", str(path), "box:/dev/shm"))
    path.unlink()
    succeeded(cli.run("cp", f"box:/dev/shm/{path.name}", str(here)))
    assert path.read_bytes() == b"content"


def test_the_rules_for_a_file_are_those_of_docker(cli: CliClient, box: None, here: Path) -> None:
    file = here / "file"
    file.write_bytes(b"1")
    file.chmod(0o640)
    succeeded(cli.run("cp", str(file), "box:/tmp"))
    succeeded(cli.run("cp", str(file), "box:/tmp/renamed"))
    succeeded(cli.run("cp", str(file), "box:relative"))  # to the working folder
    listed = shell(cli, "ls -l /tmp; ls -l relative; pwd")
    assert listed.count("-rw-r-----    1 root     root             1 ") == 3
    assert listed.endswith("/\n")
    failed(cli.run("cp", str(file), "box:/tmp/none/"), "there is no folder /tmp/none")
    failed(cli.run("cp", str(file), "box:/none/file"), "there is no folder /none")
    shell(cli, "mkdir -p /tmp/folder/file /data")
    failed(cli.run("cp", str(file), "box:/tmp/folder"), "/tmp/folder/file is a folder")
    failed(
        cli.run("cp", str(here), "box:/tmp/renamed"),
        "mkdir: can't create directory '/tmp/renamed': File exists",
    )
    failed(cli.run("cp", str(here / "none"), "box:/tmp"), "none: No such file or directory")

    succeeded(cli.run("cp", "box:/tmp/renamed", f"{here}/new"))
    assert stat.S_IMODE((here / "new").stat().st_mode) == 0o640
    failed(cli.run("cp", "box:/tmp/renamed", f"{here}/none/"), f"there is no folder {here}/none/")
    failed(cli.run("cp", "box:/tmp/renamed", f"{here}/none/new"), f"cannot open {here}/none: No such file")
    failed(cli.run("cp", "box:/data", f"{here}/new"), f"{here}/new is not a folder")
    failed(cli.run("cp", "box:/none", str(here)), "there is no none in /")
    failed(cli.run("cp", "box:/tmp/renamed", "/dev/full"), "/dev/full is a special file")
    assert Path("/dev/full").is_char_device()
    (here / "renamed").mkdir()
    failed(cli.run("cp", "box:/tmp/renamed", str(here)), "renamed is a folder here")
    assert listed_in(here) == ["file", "new", "renamed"]  # no temporary file
    assert shell(cli, "ls -a /tmp").split() == [".", "..", "file", "folder", "renamed"]


def test_the_sides_are_checked(cli: CliClient, box: None, here: Path) -> None:
    for arguments in (("a", "b"), ("box:/a", "box:/b"), ("./box:a", "-"), ("box:", "a")):
        failed(cli.run("cp", *arguments), "either SRC or DST must be INSTANCE:PATH", code=2)
    failed(cli.run("cp", "none:/a", "b"), "there is no instance 'none'", code=3)
    (here / "a:b").write_bytes(b"1")
    succeeded(cli.run("cp", str(here / "a:b"), "box:/"))
    (here / os.fsdecode(b"\xff")).write_bytes(b"1")
    failed(cli.run("cp", os.fsdecode(os.fsencode(here) + b"/\xff"), "box:/"), "is not UTF-8")


def test_archives_pass_through(cli: CliClient, box: None, tree: Path, here: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        writer.add(tree, "tree")
    succeeded(cli.run("cp", "-", "box:/tmp", given=archive.getvalue()))
    read = succeeded(cli.run("cp", "box:/tmp/tree", "-")).stdout
    with tarfile.open(fileobj=io.BytesIO(read)) as reader:
        reader.extractall(here / "back", filter="fully_trusted")
    assert content_of(here / "back" / "tree") == content_of(tree)
    failed(cli.run("cp", "-", "box:/none", given=archive.getvalue()), "/none is not a folder")
    failed(cli.run("cp", "-", "box:/tmp", given=b"no archive" * 100), "tar: ")
    failed(cli.run("cp", "box:/none", "-"), "there is no none in /")
    for arguments in (("-", "box:/"), ("box:/bin/sh", "-")):
        terminal = cli.terminal("cp", *arguments)
        terminal.expect_exact("terminal")
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 2


def test_links_are_followed_only_on_request(cli: CliClient, box: None, here: Path) -> None:
    (here / "tree").mkdir()
    (here / "outside").write_bytes(b"outside")
    (here / "tree" / "link").symlink_to(here / "outside")
    (here / "tree" / "self").symlink_to(here / "tree")
    failed(cli.run("cp", str(here / "tree" / "link"), "box:/"), "link is a link; -L copies what it leads to")
    done = cli.run("cp", "-L", str(here / "tree"), "box:/tree")
    failed(done, "self leads to a folder above it")
    assert shell(cli, "cat /tree/link; ls /tree") == "outsidelink\n"
    shell(
        cli,
        "mkdir /here; echo there >/there; cd /here; ln -s ../there link; ln -s ../there two; ln -s . self",
    )
    failed(
        cli.run("cp", "box:/here/link", str(here)), "link is a link to ../there; -L copies what it leads to"
    )
    done = cli.run("cp", "box:/here", str(here))
    failed(done, "here/link is a link to ../there, outside of what is copied")
    assert listed_in(here / "here") == ["self"]
    shell(cli, "rm /here/self")
    succeeded(cli.run("cp", "-L", "box:/here", str(here / "followed")))
    assert {path.name: path.read_bytes() for path in (here / "followed").iterdir()} == {
        "link": b"there\n",
        "two": b"there\n",
    }


def test_what_cannot_be_copied_is_named_and_the_rest_copied(cli: CliClient, box: None, here: Path) -> None:
    shell(cli, "mkdir /data; cd /data; mkfifo pipe; echo good >good; chmod 4777 good")
    done = cli.run("cp", "box:/data", str(here))
    failed(done, "mooring: data/pipe is a special file\n")
    assert listed_in(here / "data") == ["good"]
    # No setuid, and nothing that others may write.
    assert stat.S_IMODE((here / "data" / "good").stat().st_mode) == 0o755
    os.mkfifo(here / "data" / "pipe")
    failed(cli.run("cp", str(here / "data"), "box:/back"), f"mooring: {here}/data/pipe is a special file\n")
    assert shell(cli, "cat /back/*") == "good\n"


# --- hostile containers


def archive_of(*members: tuple[str, Fields]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, fields in members:
            member = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(b"bad!"[: member.size]))
    return buffer.getvalue()


FOLDER: Fields = {"type": tarfile.DIRTYPE, "mode": 0o755}
FILE: Fields = {"size": 4}


def linked(target: str) -> Fields:
    return {"type": tarfile.SYMTYPE, "linkname": target}


# tests/client/test_cli_copy.py has many more.
HOSTILE = {
    "parent": (archive_of(("data", FOLDER), ("data/../../x", FILE)), "sent a file outside of what"),
    "other": (archive_of(("data", FOLDER), (".bashrc", FILE)), "sent a file that was not asked for"),
    "link": (
        archive_of(("data", FOLDER), ("data/l", linked(".")), ("data/l/x", FILE)),
        "data/l is not a folder here",
    ),
    "escape": (
        archive_of(("data", FOLDER), ("data/l", linked("s/../..")), ("data/l", linked("/"))),
        "outside of what is copied",
    ),
    "cut": (archive_of(("data", FOLDER), ("data/f", FILE))[:1026], "it ends within a file"),
    "empty": (b"", "broken archive"),
}


def replace_shell(cli: CliClient, script: str) -> None:
    """Replace the shell of the instance, with which the command runs its scripts."""
    shell(cli, f"rm /bin/sh; printf '#!/bin/busybox sh\\n{script}' >/bin/sh; chmod +x /bin/sh")


def test_an_archive_of_a_hostile_container_stays_in_its_folder(cli: CliClient, box: None, here: Path) -> None:
    replace_shell(cli, "echo read; cat /archive")
    for name, (archive, message) in HOSTILE.items():
        with cli.start("exec", "-i", "box", "--", "busybox", "sh", "-c", "cat >/archive") as process:
            process.communicate(archive, timeout=WITHIN_S)
        target = here / name / "target"
        target.mkdir(parents=True)
        done = cli.run("cp", "box:/data", str(target))
        failed(done, message)
        assert listed_in(target.parent) == ["target"]
        assert set(listed_in(target)) <= {"data"}, name
        for path in target.rglob("*"):
            assert not path.is_symlink() or not path.readlink().is_absolute()


def test_a_hostile_shell_cannot_ask_for_other_data(cli: CliClient, box: None, here: Path) -> None:
    (here / "file").write_bytes(b"content")
    replace_shell(cli, "echo archive; cat >/stolen")
    failed(
        cli.run("cp", str(here / "file"), "box:/", given=b"secret"),
        "tar in the instance ended with exit code 0",
    )
    done = cli.run("exec", "box", "--", "cat", "/stolen")
    assert done.stdout == b""


def test_a_local_link_is_not_followed(cli: CliClient, box: None, here: Path) -> None:
    shell(cli, "mkdir -p /data/sub; echo new >/data/sub/file; echo new >/data/file")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "file").write_bytes(b"old")
    (here / "data").mkdir()
    (here / "data" / "file").symlink_to("../elsewhere/file")
    succeeded(cli.run("cp", "box:/data/file", str(here / "data")))
    assert not (here / "data" / "file").is_symlink()
    (here / "data" / "sub").symlink_to("../elsewhere")
    failed(cli.run("cp", "box:/data", str(here)), "data/sub is not a folder here")
    assert (here / "elsewhere" / "file").read_bytes() == b"old"
    # But the user may name one.
    (here / "named").symlink_to("elsewhere")
    succeeded(cli.run("cp", "box:/data/file", str(here / "named")))
    assert (here / "elsewhere" / "file").read_bytes() == b"new\n"


# --- full disks, lost connections, Ctrl-C


def test_a_full_local_disk_leaves_no_half_file(cli: CliClient, box: None, here: Path) -> None:
    shell(cli, "mkdir /data; echo small >/data/1; head -c 8388608 /dev/zero >/data/large")
    with small_file_system(here / "small", 2) as small:
        (small / "large").write_bytes(b"before")
        for path, target in (("/data/large", small / "new"), ("/data/large", small), ("/data", small)):
            failed(
                cli.run("cp", f"box:{path}", str(target)),
                "large: No space left on device" if target == small else "new: No space",
            )
        assert listed_in(small) == ["data", "large"]
        assert (small / "large").read_bytes() == b"before"
        assert set(listed_in(small / "data")) <= {"1"}
        with (small / "archive").open("wb") as output:
            argv = [*cli.argv, "cp", "box:/data/large", "-"]
            done = subprocess.run(
                argv, env=cli.environment, stdout=output, stderr=subprocess.PIPE, check=False
            )
        assert (done.returncode, done.stderr) == (
            1,
            b"mooring: cannot write to stdout: No space left on device\n",
        )


def test_a_full_disk_of_the_instance_leaves_no_half_file(cli: CliClient, box: None, here: Path) -> None:
    (here / "large").write_bytes(bytes(64 * MIB))
    shell(cli, "echo before >/dev/shm/large")
    failed(cli.run("cp", str(here / "large"), "box:/dev/shm"), "No space left on device")
    assert shell(cli, "cat /dev/shm/large; ls -a /dev/shm").split() == ["before", ".", "..", "large"]
    failed(cli.run("cp", str(here), "box:/dev/shm/folder"), "No space left on device")


def test_a_file_that_becomes_shorter_is_not_copied(cli: CliClient, box: None, here: Path) -> None:
    # It has no content, although it has a size.
    file = "/sys/kernel/uevent_seqnum"
    failed(cli.run("cp", file, "box:/tmp/new"), f"{file} became shorter while it was copied; try again")
    assert shell(cli, "ls -A /tmp") == ""


def peak_kib(process: "subprocess.Popen[bytes]") -> int:
    """The peak of the memory of a process, which must succeed."""
    peaks = [0]

    def has_ended() -> bool:
        # Not that of `wait4`, which has the parent's from before `exec`.
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        peaks.extend([int(found[1])] if found else [])
        return process.poll() is not None

    with process:
        wait_until(has_ended, WITHIN_S)
        assert process.returncode == 0
    return max(peaks)


def test_memory_does_not_grow_with_the_file(cli: CliClient, box: None, here: Path) -> None:
    size = 160 * MIB
    with (here / "large").open("wb") as file:
        file.truncate(size)
    for arguments in ((str(here / "large"), "box:/copy"), ("box:/copy", str(here / "back"))):
        assert peak_kib(cli.start("cp", *arguments)) < 100 * 1024
    assert (here / "back").stat().st_size == size


def endless(cli: CliClient) -> None:
    """Make a file in the instance that takes long to read."""
    shell(cli, "mkdir /data; truncate -s 1099511627776 /data/large")


def test_ctrl_c_ends_a_copy_at_once_and_removes_the_part(cli: CliClient, box: None, here: Path) -> None:
    endless(cli)
    terminal = cli.terminal("cp", "box:/data/large", str(here))
    terminal.expect(r"copied [0-9.]+ [MG]iB of 1 TiB, [0-9.]+ MiB/s")
    terminal.sendintr()
    terminal.expect(pexpect.EOF, timeout=8)
    terminal.close()
    assert terminal.exitstatus == 130
    assert b"Traceback" not in (terminal.before or b"")
    assert listed_in(here) == []
    # Its tar was killed with it.
    wait_until(lambda: "tar -cf" not in shell(cli, "ps"), WITHIN_S)

    with (here / "large").open("wb") as file:
        file.truncate(MIB**2)
    terminal = cli.terminal("cp", str(here / "large"), "box:/data/other")
    terminal.expect(r"copied [0-9.]+ [MG]iB of 1 TiB, [0-9.]+ MiB/s")
    terminal.sendintr()
    terminal.expect_exact("mooring: stopping; Ctrl-C again does not wait for the instance")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    assert shell(cli, "ls -A /data") == "large\n"


def test_the_second_ctrl_c_does_not_wait_for_the_instance(cli: CliClient, box: None, here: Path) -> None:
    replace_shell(cli, "echo file; exec sleep 1000")
    with (here / "large").open("wb") as file:
        file.truncate(MIB**2)
    terminal = cli.terminal("cp", str(here / "large"), "box:/copy")
    terminal.expect_exact("copied")
    terminal.sendintr()
    terminal.expect_exact("stopping")
    terminal.sendintr()
    terminal.expect(pexpect.EOF, timeout=5)
    terminal.close()
    assert terminal.exitstatus == 130
    assert b"Traceback" not in (terminal.before or b"")


@pytest.mark.parametrize("downloads", [True, False])
def test_a_server_that_is_killed_fails_the_copy(
    cli: CliClient, cluster: Cluster, box: None, here: Path, downloads: bool
) -> None:
    endless(cli)
    (here / "target").mkdir()
    with (here / "large").open("wb") as file:
        file.truncate(MIB**2)
    arguments = (
        ("box:/data/large", str(here / "target")) if downloads else (str(here / "large"), "box:/data/other")
    )
    with cli.start("cp", *arguments) as process:
        if downloads:
            wait_until(lambda: listed_in(here / "target"), WITHIN_S)
        else:
            wait_until(lambda: ".mooring-" in shell(cli, "ls -a /data"), WITHIN_S)
        cluster.server.kill()
        out, messages = process.communicate(timeout=WITHIN_S)
    assert (out, process.returncode) == (b"", 1)
    assert messages.startswith(b"mooring: the connection ended before the command")
    assert listed_in(here / "target") == []
