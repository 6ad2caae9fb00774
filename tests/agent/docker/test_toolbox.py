"""The toolbox in real containers: built once, the same everywhere, and never changed by a container."""

import errno
import fcntl
import io
import os
import signal
import socket
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.docker.toolbox_mount import FILES, LABEL, TOOLBOX, Toolbox
from mooring.agent.docker.toolbox_volumes import current_toolbox
from mooring.agent.runtime import Container, RuntimeUnavailable, StartRefused, StreamRefused
from mooring.agent.toolbox.archive import Content
from mooring.agent.toolbox.build import Built
from tests.agent.container_streams import Ran, run
from tests.agent.docker_assignments import (
    all_containers,
    assignment,
    output_of,
    runtime_on,
    start,
    the_ended,
    with_more,
)
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.images import COMMAND, busybox_layer, scratch_layer
from tests.testbed.toolbox import (
    GLIBC,
    SCRATCH,
    build_on,
    import_images,
    import_layer,
    remove_toolboxes,
    toolbox_files,
    toolbox_on,
    toolbox_volumes,
)
from tests.testbed.waiting import wait_until

F_SETSIG = 10  # fcntl.h; the module has no name for it


@pytest.fixture(scope="module")
def toolbox(docker_node: DockerNode) -> Iterator[Built]:
    """The toolbox on the node. A test that changes it builds it again."""
    import_images(docker_node)
    with toolbox_on(docker_node) as built:
        yield built


@pytest.fixture
def without_toolbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooring.agent.docker.runtime.current_toolbox", lambda _engine: None)


def on_disk(node: DockerNode, volume: str) -> dict[str, tuple[int, int, bytes]]:
    """Mode, owner and content of each entry of a volume, read from the host."""
    root = Path(node.client.api.inspect_volume(volume)["Mountpoint"])
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        content = str(path.readlink()).encode() if path.is_symlink() else b""
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else content
        found[str(path.relative_to(root))] = (status.st_mode, status.st_uid, content)
    return found


def image_of(
    node: DockerNode, name: str, *changes: str, links: Mapping[str, str] | None = None, layer: bytes = b""
) -> str:
    """The busybox image with these lines of a Dockerfile, and with symbolic links in its root."""
    buffer = io.BytesIO(layer or busybox_layer())
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        for link, target in (links or {}).items():
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return import_layer(node, f"mooring-test/{name}", buffer.getvalue(), [COMMAND, *changes])


def in_shell(runtime: DockerRuntime, container: Container, script: str, **more: Any) -> Ran:
    """Run a script in the user's login shell."""
    return run(runtime, container, "sh", "-c", script, login_shell=True, **more)


def test_a_volume_below_the_toolbox_is_refused(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    """It would be writable, without a limit, and in place of the toolbox's own folder."""
    with pytest.raises(StartRefused, match="where Mooring mounts files of its own"):
        start(runtime, assignment(image=image_of(node, "below", "VOLUME /.mooring/bin")))


def test_a_build_is_repeatable_and_leaves_only_the_volumes(node: DockerNode, toolbox: Built) -> None:
    assert toolbox.is_new
    assert toolbox_volumes(node) == [toolbox.volume, f"{toolbox.volume}-complete"]
    images = {tag for image in node.client.api.images() for tag in image["RepoTags"] or ()}
    again = build_on(node)
    assert (again.volume, again.is_new, again.removed) == (toolbox.volume, False, [])
    assert all_containers(node) == []
    assert not [tag for tag in images if tag.startswith("mooring-toolbox")]


def test_all_files_belong_to_root_and_nobody_else_can_change_them(node: DockerNode, toolbox: Built) -> None:
    found = on_disk(node, toolbox.volume)
    assert set(found) > {f"files/{path}" for path in toolbox_files()}
    for path, (mode, uid, _content) in found.items():
        assert uid == 0, path
        assert mode & 0o170000 == 0o120000 or mode & 0o7022 == 0, (path, oct(mode))


def test_an_interrupted_build_is_not_used_and_the_next_one_completes_it(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    whole = on_disk(node, toolbox.volume)
    remove_toolboxes(node)
    node.client.api.create_volume(toolbox.volume, labels={LABEL: FILES})
    root = Path(node.client.api.inspect_volume(toolbox.volume)["Mountpoint"])
    (root / "files" / "bin").mkdir(parents=True)
    (root / "files" / "bin" / "sh").write_bytes(b"half")
    container = start(runtime, assignment())
    assert not node.client.api.inspect_container(container.container_id)["Mounts"]
    assert build_on(node).is_new
    assert on_disk(node, toolbox.volume) == whole


def test_a_volume_that_the_engine_made_is_replaced(node: DockerNode, toolbox: Built) -> None:
    whole = on_disk(node, toolbox.volume)
    node.client.api.remove_volume(toolbox.volume)
    node.client.api.create_volume(toolbox.volume)
    with closing(Engine({"DOCKER_HOST": node.url})) as engine:
        assert current_toolbox(engine) is None
        assert build_on(node).is_new
        found = current_toolbox(engine)
    assert found is not None
    assert found.volume == toolbox.volume
    assert on_disk(node, toolbox.volume) == whole


def test_a_container_keeps_its_toolbox_until_it_is_removed(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    container = start(runtime, assignment())
    newer = build_on(node, {**toolbox_files(), "etc/version": Content(b"2")})
    assert newer.kept == [toolbox.volume]
    assert in_shell(runtime, container, "ls /.mooring/etc").stdout == b"group\n"
    other = start(runtime, assignment())
    assert in_shell(runtime, other, "ls /.mooring/etc").stdout == b"group\nversion\n"
    again = build_on(node, {**toolbox_files(), "etc/version": Content(b"2")})
    assert (again.kept, again.removed) == ([toolbox.volume], [])
    runtime.kill(container)
    runtime.remove(container)
    assert build_on(node, {**toolbox_files(), "etc/version": Content(b"2")}).removed == [toolbox.volume]
    assert in_shell(runtime, other, "ls /.mooring/etc").stdout == b"group\nversion\n"
    runtime.kill(other)
    runtime.remove(other)
    assert build_on(node).kept == [newer.volume], "an agent may be about to use it"
    assert build_on(node).removed == [newer.volume]
    assert toolbox_volumes(node) == [toolbox.volume, f"{toolbox.volume}-complete"]


def test_a_start_without_its_toolbox_leaves_no_container(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Toolbox("mooring-toolbox-gone", "/nowhere")
    monkeypatch.setattr("mooring.agent.docker.runtime.current_toolbox", lambda _engine: gone)
    with pytest.raises(RuntimeUnavailable, match="was removed during a start"):
        start(runtime, assignment())
    assert all_containers(node) == []
    assert toolbox_volumes(node) == [toolbox.volume, f"{toolbox.volume}-complete"]


def test_a_removed_container_leaves_no_volume(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    container = start(runtime, assignment())
    assert len(toolbox_volumes(node)) == 3
    runtime.kill(container)
    runtime.remove(container)
    assert toolbox_volumes(node) == [toolbox.volume, f"{toolbox.volume}-complete"]


def test_a_container_can_be_restarted_with_its_toolbox(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    container = start(runtime, assignment())
    runtime.kill(container)
    runtime.restart(the_ended(runtime))
    assert in_shell(runtime, container, "rsync --version | head -1").stdout.startswith(b"rsync  version")


def test_containers_keep_the_toolbox_when_the_engine_is_killed(new_docker_node: NewDockerNode) -> None:
    node = new_docker_node()
    built = build_on(node)
    with closing(runtime_on(node)) as runtime:
        container = start(runtime, assignment())
        script = "rsync --version | head -1"
        node.kill()
        node.start()
        wait_until(lambda: in_shell(runtime, container, script).stdout.startswith(b"rsync  version"))
        runtime.kill(container)
        runtime.restart(the_ended(runtime))
        assert in_shell(runtime, container, script).stdout.startswith(b"rsync  version")
        runtime.kill(container)
        the_ended(runtime)
        runtime.remove(container)
    assert not build_on(
        node
    ).is_new  # also with the volume that Docker 20 does not remove before its next start
    node.kill()
    node.start()
    build_on(node)
    assert toolbox_volumes(node) == [built.volume, f"{built.volume}-complete"]
    assert f"{node.folder}/data/volumes/" not in Path("/proc/self/mounts").read_text()


def test_a_lease_of_one_container_does_not_stop_another(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    def program_in(container: Container) -> str:
        pid = node.client.api.inspect_container(container.container_id)["State"]["Pid"]
        return f"/proc/{pid}/root{TOOLBOX}/libexec/rsync"

    one, other = (program_in(start(runtime, assignment())) for _ in range(2))
    leased = os.open(one, os.O_RDONLY)
    try:
        fcntl.fcntl(leased, F_SETSIG, signal.SIGURG)  # the default signal would end this process
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.close(os.open(other, os.O_RDONLY | os.O_NONBLOCK))
        with pytest.raises(BlockingIOError):  # so the lease is one
            os.open(one, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(leased)


@pytest.mark.parametrize(
    "attempt",
    [
        "touch /.mooring/new",
        "echo x >/.mooring/bin/sh",
        "rm -rf /.mooring/bin",
        "chmod 777 /.mooring",
        "mkfifo /.mooring/fifo",
        "ln -s /etc /.mooring/link",
        "mv /.mooring /elsewhere",
        "mount -o remount,rw /.mooring",
        "umount /.mooring",
    ],
)
def test_root_in_a_container_cannot_change_the_toolbox(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built, attempt: str
) -> None:
    before = on_disk(node, toolbox.volume)
    container = start(runtime, assignment())
    assert run(runtime, container, "sh", "-c", attempt).status.exit_code != 0
    assert on_disk(node, toolbox.volume) == before


def test_no_socket_can_be_made_in_the_toolbox(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    container = start(runtime, assignment())
    pid = node.client.api.inspect_container(container.container_id)["State"]["Pid"]
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError) as caught:
        listener.bind(f"/proc/{pid}/root{TOOLBOX}/socket")
    assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    ("changes", "links"),
    [
        (("VOLUME /.mooring",), {}),
        (("VOLUME /.mooring/new",), {}),
        (("VOLUME /.mooring/bin",), {}),
        (("VOLUME /other/new",), {"other": "/.mooring"}),
        (("VOLUME /other",), {"other": "/.mooring/new"}),
        (("WORKDIR /.mooring/new",), {}),
        ((), {".mooring": "/tmp"}),
        ((), {".mooring": "/new"}),
        ((), {".mooring": "/etc"}),
        ((), {".mooring": "/"}),
        ((), {".mooring": "."}),
        ((), {".mooring": "../../../../../../../etc"}),
        ((), {".mooring": "/proc"}),
        ((), {".mooring": "/dev"}),
        ((), {".mooring": "/proc/1/root"}),
    ],
    ids=str,
)
def test_no_image_changes_the_toolbox_or_gets_files_of_the_host(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built, changes: tuple[str, ...], links: dict[str, str]
) -> None:
    before = on_disk(node, toolbox.volume)
    host_etc = set(Path("/etc").iterdir())
    try:
        container = start(runtime, assignment(image=image_of(node, "odd", *changes, links=links)))
    except StartRefused as refused:
        assert changes != ("VOLUME /.mooring",), refused
    else:
        for attempt in ("echo x >/.mooring/x", "echo x >/.mooring/bin/sh", "mkdir /other/y"):
            run(runtime, container, "sh", "-c", attempt)
    assert on_disk(node, toolbox.volume) == before
    assert set(Path("/etc").iterdir()) == host_etc


@pytest.mark.parametrize("folder", ["dev", "dev/shm", "etc", "proc", "sys"])
def test_a_system_folder_that_links_to_the_toolbox_changes_nothing(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built, folder: str
) -> None:
    before = on_disk(node, toolbox.volume)
    image = image_of(node, "system", layer=scratch_layer(), links={folder: TOOLBOX})
    with suppress(StartRefused):
        start(runtime, assignment(image=image, command=["/sleep", "1000"]))
    assert on_disk(node, toolbox.volume) == before


def test_files_of_an_image_at_the_path_are_hidden(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    buffer = io.BytesIO(busybox_layer())
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        entry = tarfile.TarInfo(".mooring/bin/own")
        archive.addfile(entry)
    image = import_layer(node, "mooring-test/own-folder", buffer.getvalue(), [COMMAND])
    before = on_disk(node, toolbox.volume)
    container = start(runtime, assignment(image=image))
    assert output_of(runtime, container, ["ls", "/.mooring/bin"]).split() == [
        "rsync", "scp", "sftp-server", "sh",
    ]  # fmt: skip
    assert on_disk(node, toolbox.volume) == before


@pytest.mark.parametrize("user", [None, "12345", "12345:100"])
def test_an_image_without_a_shell_gets_the_one_of_the_toolbox(
    runtime: DockerRuntime, toolbox: Built, user: str | None
) -> None:
    container = start(
        runtime,
        with_more(
            assignment(image=SCRATCH, user=user, command=["/sleep", "1000"]), security_profile="strict"
        ),
    )
    ran = in_shell(runtime, container, "echo $SHELL; ls / | head -1; env true; id -u")
    assert ran.stdout.decode().split() == ["/.mooring/bin/sh", "dev", (user or "0").split(":")[0]]
    assert ran.stderr == b""
    version = in_shell(runtime, container, "rsync --version | head -1; scp 2>&1 | head -1; sftp-server -h")
    assert b"rsync  version" in version.stdout
    assert b"usage: scp" in version.stdout
    assert b"usage: " in version.stderr
    assert b"No user" not in version.stderr
    assert in_shell(runtime, container, "ls -A /dev/shm").stdout == b"", "a file was left"


def test_the_shell_of_the_user_and_the_programs_of_the_image_come_first(
    runtime: DockerRuntime, toolbox: Built
) -> None:
    container = start(runtime, assignment(image=GLIBC, env={"PATH": "/tmp:/usr/bin:/bin"}))
    script = "printf '#!/bin/sh\\n' >/tmp/scp; chmod +x /tmp/scp; echo $SHELL $PATH; which scp rsync"
    lines = in_shell(runtime, container, script).stdout.decode().split()
    assert lines == ["/bin/bash", "/tmp:/usr/bin:/bin:/.mooring/bin", "/tmp/scp", "/.mooring/bin/rsync"]


def test_variables_of_the_image_do_not_change_the_programs(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built
) -> None:
    names = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "OPENSSL_CONF", "GCONV_PATH", "ENV")
    image = image_of(node, "variables", *(f"ENV {name}=/tmp/broken.so" for name in names))
    container = start(runtime, assignment(image=image))
    script = "echo broken >/tmp/broken.so; rsync --version | head -1; /.mooring/bin/sftp-server -h"
    ran = in_shell(runtime, container, script)
    assert ran.stdout.startswith(b"rsync  version")
    assert ran.stderr.startswith(b"usage: ")


def test_a_container_without_a_toolbox_and_a_shell_says_why(
    node: DockerNode, runtime: DockerRuntime, without_toolbox: None
) -> None:
    import_images(node)
    container = start(runtime, assignment(image=SCRATCH, command=["/sleep", "1000"]))
    for more in ({"login_shell": True}, {"any_shell": True}):
        with pytest.raises(StreamRefused, match="mooring toolbox") as caught:
            run(runtime, container, "/bin/sh", "-c", "true", **more)
        assert caught.value.status.reason is not None
        assert caught.value.status.reason.code == "exec_rejected"


def test_a_container_without_a_toolbox_has_the_login_shell_of_its_image(
    runtime: DockerRuntime, without_toolbox: None
) -> None:
    container = start(runtime, assignment())
    ran = in_shell(runtime, container, "echo $SHELL $USER; echo $PATH")
    assert ran.stdout.split()[:2] == [b"/bin/sh", b"root"]
    assert b".mooring" not in ran.stdout


def test_an_engine_that_cannot_list_volumes_still_starts_containers(
    node: DockerNode, runtime: DockerRuntime, toolbox: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: Engine, _label: str) -> list[Document]:
        raise EngineRefused(500, "a volume plugin failed")

    monkeypatch.setattr(Engine, "volumes", fail)
    container = start(runtime, assignment())
    assert not node.client.api.inspect_container(container.container_id)["Mounts"]
