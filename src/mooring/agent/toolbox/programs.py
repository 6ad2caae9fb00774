"""The files of the toolbox, collected from this machine's packages.

bin/sh                       busybox, static, and so independent of the image
bin/{rsync,scp,sftp-server}  scripts for bin/sh that run the programs in libexec
applets/                     busybox under its other names
lib/                         the loader, and the libraries of the programs
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooring.agent.docker.toolbox_mount import SHELL, TOOLBOX
from mooring.agent.toolbox.archive import Content, Files, Link, Program

_LIBRARY: Final = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_NOT_FOUND: Final = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)
_LDD_TIMEOUT_S: Final = 30
# The C library before 2.34 loads it to read /etc/passwd, so no program lists it.
_LOADED_LATER: Final = "libnss_files.so.2"


@dataclass(frozen=True, slots=True)
class Source:
    """A program or library of a Debian package, at the first of `paths` that exists."""

    name: str
    package: str
    paths: tuple[str, ...]


BUSYBOX: Final = Source("busybox", "busybox-static", ("bin/busybox", "usr/bin/busybox"))
PROGRAMS: Final = (
    Source("rsync", "rsync", ("usr/bin/rsync",)),
    Source("scp", "openssh-client", ("usr/bin/scp",)),
    Source(
        "sftp-server",
        "openssh-sftp-server",
        # In the places of Debian, Alpine and Red Hat.
        ("usr/lib/openssh/sftp-server", "usr/lib/ssh/sftp-server", "usr/libexec/openssh/sftp-server"),
    ),
)
# Answers with a user's entry where /etc/passwd has none.
USERS: Final = Source(
    "libnss_wrapper.so",
    "libnss-wrapper",
    ("usr/lib/*-linux-gnu/libnss_wrapper.so", "usr/lib64/libnss_wrapper.so", "usr/lib/libnss_wrapper.so"),
)
# OpenSSH's programs end with "No user found for uid 0" without one.
_NEED_A_USER: Final = {"scp", "sftp-server"}

# A variable of the image must not load its libraries or settings into programs of another system.
_RUN: Final = f"""\
unset LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT GLIBC_TUNABLES GCONV_PATH LOCPATH OPENSSL_MODULES OPENSSL_ENGINES
export OPENSSL_CONF=/dev/null

run() {{
    exec {TOOLBOX}/lib/@LOADER@ --inhibit-cache --library-path {TOOLBOX}/lib "$@"
}}

# Sets uid and gid of this process. Returns whether /etc/passwd has the user.
find_user() {{
    while read -r field real effective rest; do
        case $field in Uid:) uid=$effective ;; Gid:) gid=$effective ;; esac
    done </proc/self/status
    while IFS=: read -r name password found rest; do
        [ "$found" = "$uid" ] && return 0
    done 2>/dev/null </etc/passwd
    return 1
}}

# For programs that need an entry of their user. The library reads regular files only, so no pipe will do.
run_with_user() {{
    find_user && run "$@"
    file=$({TOOLBOX}/applets/mktemp /dev/shm/mooring.XXXXXX) || exit 1
    echo "user:x:$uid:$gid::${{HOME:-/}}:{SHELL}" >"$file"
    exec 9<"$file"
    {TOOLBOX}/applets/rm -f "$file"
    export NSS_WRAPPER_PASSWD=/proc/self/fd/9 NSS_WRAPPER_GROUP={TOOLBOX}/etc/group
    run --preload {TOOLBOX}/lib/{USERS.name} "$@"
}}
"""
_SCRIPT: Final = f"""\
#!{SHELL}
. {TOOLBOX}/libexec/run
@RUN@ {TOOLBOX}/libexec/@PROGRAM@ "$@"
"""


class ToolboxError(Exception):
    """The toolbox cannot be built. The message says what to do."""


def collect(root: Path = Path("/")) -> Files:
    """Return the files of the toolbox by path, relative to its folder.

    Raises:
        ToolboxError: a package is missing, or a program cannot be used.
    """
    sources = (BUSYBOX, *PROGRAMS, USERS)
    found = {source.name: path for source in sources if (path := _find(root, source)) is not None}
    missing = sorted(source.package for source in sources if source.name not in found)
    if missing:
        raise ToolboxError(
            f"packages are missing: {', '.join(missing)}. On Debian and Ubuntu, as root:\n"
            f"  apt-get update && apt-get install --no-install-recommends {' '.join(missing)}"
        )
    return dict(sorted({**_shell(found[BUSYBOX.name]), **_programs(found)}.items()))


def _find(root: Path, source: Source) -> Path | None:
    matches = (match for pattern in source.paths for match in sorted(root.glob(pattern)))
    return next((match for match in matches if match.is_file()), None)


def _shell(busybox: Path) -> Files:
    if _libraries(busybox):
        raise ToolboxError(
            f"{busybox} is not static; install the package {BUSYBOX.package} instead of busybox, as root:\n"
            f"  apt-get update && apt-get install --no-install-recommends {BUSYBOX.package}"
        )
    names = _output(busybox, "--list").split()
    applets: Files = {f"applets/{name}": Link("../bin/sh") for name in names if name != "busybox"}
    return applets | {"bin/sh": Program(busybox.read_bytes())}


def _programs(found: dict[str, Path]) -> Files:
    """Return the programs with their scripts, and the libraries of all."""
    libraries: dict[str, Path] = {USERS.name: found[USERS.name]}
    loaders: set[str] = set()
    files: Files = {"etc/group": Content(b"root:x:0:\n")}
    for path in (*(found[program.name] for program in PROGRAMS), found[USERS.name]):
        for library in _libraries(path):
            libraries[library.name] = library
            loaders |= {library.name} if library.name.startswith("ld-") else set()
    if len(loaders) != 1:
        raise ToolboxError(f"the programs of this machine need {len(loaders)} loaders; one is supported")
    for program in PROGRAMS:
        run = "run_with_user" if program.name in _NEED_A_USER else "run"
        script = _SCRIPT.replace("@RUN@", run).replace("@PROGRAM@", program.name)
        files[f"bin/{program.name}"] = Program(script.encode())
        files[f"libexec/{program.name}"] = Program(found[program.name].read_bytes())
    files["libexec/run"] = Content(_RUN.replace("@LOADER@", loaders.pop()).encode())
    later = [path.parent / _LOADED_LATER for path in libraries.values()]
    libraries |= {path.name: path for path in later if path.is_file()}
    return files | {f"lib/{name}": Program(path.read_bytes()) for name, path in libraries.items()}


def _libraries(path: Path) -> Sequence[Path]:
    """Return the loader and the libraries of a program or library; none of a static one."""
    try:
        output = _output(Path("ldd"), str(path))
    except subprocess.CalledProcessError:
        return ()  # "not a dynamic executable"
    if missing := _NOT_FOUND.findall(output):
        raise ToolboxError(f"{path} needs libraries that this machine lacks: {', '.join(missing)}")
    return [Path(found) for _name, found in _LIBRARY.findall(output)]


def _output(program: Path, *arguments: str) -> str:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    argv = [str(program), *arguments]
    done = subprocess.run(  # noqa: S603 - programs of the machine's own packages
        argv, capture_output=True, text=True, check=True, env=environment, timeout=_LDD_TIMEOUT_S
    )
    return done.stdout
