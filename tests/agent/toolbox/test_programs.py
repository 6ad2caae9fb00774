"""Which files the toolbox is made of, and what the command says if this machine lacks them."""

import io
import shutil
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooring.agent.toolbox import programs
from mooring.agent.toolbox.archive import Content, Files, Link, Program, digest, packed, same_as_archive
from mooring.agent.toolbox.programs import BUSYBOX, PROGRAMS, USERS, ToolboxError, collect
from mooring_client.cli.main import app
from tests.testbed.toolbox import toolbox_files

FILES: Files = {"bin/sh": Program(b"x"), "etc/group": Content(b"y"), "applets/ls": Link("../bin/sh")}


def root_with(folder: Path, *names: str) -> Path:
    """A root folder with copies of this machine's programs of these names."""
    toolbox_files()
    for source in (BUSYBOX, *PROGRAMS, USERS):
        found = next(match for pattern in source.paths for match in Path("/").glob(pattern))
        if source.name in names:
            copy = folder / found.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, copy)
    return folder


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), "busybox-static libnss-wrapper openssh-client openssh-sftp-server rsync"),
        (("busybox", "scp", "rsync"), "libnss-wrapper openssh-sftp-server"),
    ],
)
def test_missing_packages_are_named_with_the_command_to_install_them(
    tmp_path: Path, present: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(ToolboxError) as caught:
        collect(root_with(tmp_path, *present))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"packages are missing: {missing.replace(' ', ', ')}. On Debian and Ubuntu, as root:"
    assert lines[1].endswith(f"apt-get install --no-install-recommends {missing}")


def test_a_busybox_with_libraries_is_refused(tmp_path: Path) -> None:
    root = root_with(tmp_path, "busybox", "scp", "sftp-server", "rsync", "libnss_wrapper.so")
    busybox = next(path for path in root.rglob("busybox"))
    shutil.copy("/usr/bin/rsync", busybox)
    with pytest.raises(ToolboxError, match="is not static; install the package busybox-static"):
        collect(root)


def test_the_command_fails_and_prints_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Files:
        raise ToolboxError("packages are missing: rsync")

    monkeypatch.setattr(programs, "collect", fail)
    done = CliRunner().invoke(app, ["toolbox"])
    assert done.exit_code == 1
    assert "packages are missing: rsync" in done.output


def test_each_program_has_its_script_and_all_its_libraries() -> None:
    files = toolbox_files()
    for program in PROGRAMS:
        script = files[f"bin/{program.name}"]
        assert isinstance(script, Program)
        assert script.data.startswith(b"#!/.mooring/bin/sh\n")
        assert f"libexec/{program.name}" in files
    libraries = {path for path in files if path.startswith("lib/")}
    assert {"lib/libc.so.6", f"lib/{USERS.name}"} < libraries
    run = files["libexec/run"]
    assert isinstance(run, Content)
    loader = next(path for path in libraries if path.startswith("lib/ld-"))
    assert f"/.mooring/{loader} ".encode() in run.data
    assert b"@" not in run.data.replace(b'"$@"', b"")


def test_the_archive_is_the_same_for_the_same_files() -> None:
    other_order = dict(reversed(FILES.items()))
    assert packed(FILES, "/.mooring") == packed(other_order, "/.mooring")
    assert digest(FILES) == digest(other_order)
    assert digest(FILES) != digest({**FILES, "bin/sh": Content(b"x")})


def test_an_archive_has_only_folders_files_and_links_of_root() -> None:
    with tarfile.open(fileobj=io.BytesIO(packed(FILES, "/.mooring"))) as archive:
        members = {member.name: member for member in archive}
    assert list(members) == [
        ".mooring", ".mooring/applets", ".mooring/applets/ls", ".mooring/bin", ".mooring/bin/sh",
        ".mooring/etc", ".mooring/etc/group",
    ]  # fmt: skip
    for member in members.values():
        assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
        assert member.isdir() or member.isfile() or member.issym()
        assert member.issym() or member.mode & 0o7022 == 0


@pytest.mark.parametrize(
    "changed",
    [
        {**FILES, "bin/more": Content(b"")},
        {path: entry for path, entry in FILES.items() if path != "etc/group"},
        {**FILES, "bin/sh": Program(b"z")},
        {**FILES, "bin/sh": Content(b"x")},
        {**FILES, "applets/ls": Link("/bin/sh")},
    ],
)
def test_any_difference_to_an_archive_is_found(changed: Files) -> None:
    assert same_as_archive(FILES, packed(FILES, "/x"))
    assert not same_as_archive(FILES, packed(changed, "/x"))
    assert not same_as_archive(FILES, packed(FILES, "/x")[:700])
