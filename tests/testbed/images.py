"""Container images built locally, without a registry or network."""

import io
import re
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import docker

from tests.testbed.parts import program

BUSYBOX = "mooring-test/busybox:1"
# Has the variable of CUDA images: a container sees all GPUs of the machine unless the variable is overridden.
CUDA_ENV = "mooring-test/cuda-env:1"
BAKED_VARIABLE = "NVIDIA_VISIBLE_DEVICES=all"

# The kernel applies no default action of a signal to the first process of a container: `sleep` alone would
# ignore SIGTERM, and every stop would last until SIGKILL.
WAITER = "/bin/wait-for-term"
WAITER_SCRIPT = b"#!/bin/sh\ntrap 'exit 0' TERM INT\nwhile :; do sleep 3600 & wait $!; done\n"
WAIT = ["sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"]  # in other images
COMMAND = f'CMD ["{WAITER}"]'

PASSWD = b"""\
root:x:0:0:root:/root:/bin/sh
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534::/:/bin/false
"""
GROUP = b"root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"


@cache
def busybox_layer() -> bytes:
    """Return a root filesystem as a tar archive: busybox under all its names, and standard files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _add_busybox(archive, PASSWD)
    return buffer.getvalue()


def _add_busybox(archive: tarfile.TarFile, passwd: bytes) -> None:
    busybox = program("busybox")
    for folder in ("bin", "dev", "etc", "home", "home/user", "proc", "root", "sys", "var"):
        add_folder(archive, folder)
    add_folder(archive, "tmp", 0o1777)
    add_file(archive, "bin/busybox", Path(busybox).read_bytes(), 0o755)
    add_file(archive, WAITER.lstrip("/"), WAITER_SCRIPT, 0o755)
    add_file(archive, "etc/passwd", passwd)
    add_file(archive, "etc/group", GROUP)
    for applet in sorted(_applets(busybox)):
        add_link(archive, f"bin/{applet}", "busybox")


@cache
def scratch_layer() -> bytes:
    """Return a root filesystem of one static program, which sleeps: no shell, no /etc, no /tmp."""
    return single_file_layer("sleep", Path(program("busybox")).read_bytes(), 0o755)


@cache
def glibc_layer() -> bytes:
    """Return a root filesystem like that of Debian: bash as the shell of root, git, and their libraries."""
    programs = {f"usr/bin/{name}": program(name) for name in ("bash", "git")}
    loaded = {found.lstrip("/"): found for found in libraries(*map(Path, programs.values()))}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _add_busybox(archive, PASSWD.replace(b"/root:/bin/sh", b"/root:/bin/bash"))
        for name, path in {**programs, **loaded}.items():
            add_file(archive, name, Path(path).read_bytes(), 0o755)
        add_link(archive, "bin/bash", "../usr/bin/bash")
        for name in ("git-upload-pack", "git-receive-pack"):
            add_link(archive, f"usr/bin/{name}", "git")
    return buffer.getvalue()


def libraries(*files: Path) -> set[str]:
    """The paths of the shared libraries that programs and libraries load, of this machine."""
    # It fails if one of them loads none.
    listed = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False)
    return set(re.findall(r"(/\S+) \(0x", listed.stdout))


def _applets(busybox: str) -> set[str]:
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    return set(listed.stdout.split()) - {"busybox"}


def single_file_layer(name: str, content: bytes, mode: int = 0o644) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add_file(archive, name, content, mode)
    return buffer.getvalue()


def add_folder(archive: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry)


def add_file(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)


def import_images(client: docker.DockerClient) -> None:
    """Import both images. They share one layer."""
    for reference, changes in ((BUSYBOX, [COMMAND]), (CUDA_ENV, [COMMAND, f"ENV {BAKED_VARIABLE}"])):
        repository, tag = reference.split(":")
        client.api.import_image_from_data(busybox_layer(), repository=repository, tag=tag, changes=changes)
