"""Root filesystems with the programs of real distributions, built once and kept in `.testbed/images`.

They need the network at the first build only, and come from the Debian mirror that this machine's apt uses.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.testbed.images import GROUP, PASSWD, add_file, add_folder, add_link
from tests.testbed.parts import require, skip

BUILDS = Path(__file__).parents[2] / ".testbed" / "images"
WITHIN_S = 400

# Debian's own slim images leave out these.
DEBIAN_EXCLUDED = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
DEBIAN = [
    "--variant=minbase", "--mode=root", "--include=git", "--quiet",
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in DEBIAN_EXCLUDED),
    "bookworm",
]  # fmt: skip

MUSL_APPLETS = (
    "ash", "cat", "env", "head", "hostname", "httpd", "id", "ln", "ls", "mkdir", "mv", "rm", "sleep", "stty",
    "tar", "tr", "tty",
)  # fmt: skip
MUSL_OPTIONS = (
    "LFS", "SHOW_USAGE", "LONG_OPTS", "FEATURE_DEVPTS", "BUSYBOX", "SH_IS_ASH", "ASH_ECHO", "ASH_PRINTF",
    "ASH_TEST", "ASH_JOB_CONTROL", "FEATURE_LS_TIMESTAMPS", "FEATURE_LS_USERNAME", "FEATURE_TR_CLASSES",
)  # fmt: skip
MUSL_FOLDERS = ("bin", "dev", "etc", "home", "lib", "proc", "root", "sys", "usr", "usr/bin", "var")


def debian_layer() -> Path:
    """A tar archive of what debian:bookworm-slim contains, and git.

    It is made from the same packages, with the same folders of /usr/share left out. Not included are the
    settings of apt that Docker's image adds.
    """
    require("debian")
    return _built("debian", repr(DEBIAN), _build_debian)


def _build_debian(layer: Path) -> None:
    _run("mmdebstrap", *DEBIAN, str(layer))


def musl_layer() -> Path:
    """A tar archive of an image like Alpine's: busybox is its shell, and musl its only libc.

    Busybox is a dynamic program, compiled from Debian's source against Debian's musl. This is not Alpine: it
    has a tenth of the commands, no apk and no OpenSSL, and busybox and musl are of other versions, without
    Alpine's patches. What matters to SSH clients is the same: a musl loader in /lib, and no glibc, bash,
    /lib64 or nsswitch.conf.
    """
    require("musl")
    return _built("musl", repr((MUSL_APPLETS, MUSL_OPTIONS)), _build_musl)


def _build_musl(layer: Path) -> None:
    with TemporaryDirectory(dir=BUILDS) as scratch:
        folder = Path(scratch)
        _unpack_busybox(folder)
        busybox = _compiled_busybox(folder)
        # The loader is also the libc.
        loader = next(Path("/lib").glob("ld-musl-*.so.1"))
        with tarfile.open(layer, mode="w") as archive:
            for name in MUSL_FOLDERS:
                add_folder(archive, name)
            add_folder(archive, "tmp", 0o1777)
            add_file(archive, "bin/busybox", busybox, 0o755)
            add_file(archive, loader.as_posix().lstrip("/"), loader.read_bytes(), 0o755)
            add_file(archive, "etc/passwd", PASSWD.replace(b"/root:/bin/sh", b"/root:/bin/ash"))
            add_file(archive, "etc/group", GROUP)
            for applet in ("sh", *MUSL_APPLETS):
                add_link(archive, f"bin/{applet}", "busybox")


def _unpack_busybox(folder: Path) -> None:
    """Get Debian's source, with the lists of this machine's apt as lists of sources."""
    for name in ("lists", "lists/partial", "sources"):
        (folder / name).mkdir()
    own = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for path in own:
        if path.is_file() and path.suffix in {".list", ".sources"}:
            of_sources = re.sub(r"^(Types: *|)deb(?= |$)", r"\1deb-src", path.read_text(), flags=re.MULTILINE)
            (folder / "sources" / path.name).write_text(of_sources)
    settings = {
        "Dir::Etc::sourcelist": os.devnull,
        "Dir::Etc::sourceparts": str(folder / "sources"),
        "Dir::State::lists": str(folder / "lists"),
        "Dir::Cache": str(folder),
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(part for name in settings for part in ("-o", f"{name}={settings[name]}"))]
    _run(*apt, "update", at=folder)
    _run(*apt, "source", "--download-only", "busybox", at=folder)
    with tarfile.open(next(folder.glob("busybox_*.orig.tar.*"))) as archive:
        archive.extractall(folder / "source", filter="tar")


def _compiled_busybox(folder: Path) -> bytes:
    source = next((folder / "source").iterdir())
    headers = folder / "headers"  # of the kernel; musl-gcc does not use those of /usr/include
    headers.mkdir()
    for found in (Path("/usr/include/linux"), Path("/usr/include/asm-generic"), Path("/usr/include/mtd")):
        (headers / found.name).symlink_to(found)
    (headers / "asm").symlink_to(next(Path("/usr/include").glob("*-linux-gnu/asm")))
    make = ("make", f"--jobs={os.cpu_count()}", "CC=musl-gcc", f"EXTRA_CFLAGS=-idirafter {headers}")
    _run(*make, "allnoconfig", at=source)
    options = [f"CONFIG_{name}" for name in (*MUSL_OPTIONS, *(applet.upper() for applet in MUSL_APPLETS))]
    configuration = source / ".config"
    off = {f"# {name} is not set" for name in options}
    others = [line for line in configuration.read_text().splitlines() if line not in off]
    configuration.write_text("\n".join([*others, *(f"{name}=y" for name in options), ""]))
    _run(*make, "oldconfig", at=source)
    _run(*make, "busybox", at=source)
    return (source / "busybox").read_bytes()


def _run(*argv: str, at: Path | None = None) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    answers = "\n" * 10_000  # to questions of `make oldconfig`: the default
    done = subprocess.run(
        argv,
        cwd=at,
        env=environment,
        input=answers,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"{argv[0]}: {(done.stderr or done.stdout)[-2000:]}")


def _built(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """The archive of this recipe, built now unless it was before. Skips the test if it cannot be built."""
    layer = BUILDS / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.tar"
    BUILDS.mkdir(parents=True, exist_ok=True)
    with _locked(layer.with_suffix(".lock")):
        if not layer.exists():
            incomplete = layer.with_suffix(".incomplete.tar")
            incomplete.unlink(missing_ok=True)
            try:
                build(incomplete)
            except (OSError, subprocess.SubprocessError) as error:
                skip(f"{name}: cannot be built: {error}")
            incomplete.rename(layer)
    return layer


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Several test runs may build at once."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
