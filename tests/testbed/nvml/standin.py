"""A simulated NVML library, for tests of the real pynvml without a GPU.

The library reads its GPUs and their faults from a configuration file, which may be replaced while a process
uses the library. `standin.c` lists the directives of the file.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
BUILDS = HERE.parents[2] / ".testbed" / "nvml"
SOURCES = ("standin.c", "fleet.h")


def uuid_of(index: int) -> str:
    """Return the default UUID of a GPU."""
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def build(without: Iterable[str] = ()) -> Path:
    """Compile libnvidia-ml.so.1, unless this source was compiled before. Return the folder of the library.

    Args:
        without: functions that the library does not export, as in older drivers.
    """
    without = sorted(without)
    source = b"".join((HERE / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(source + repr(without).encode()).hexdigest()[:16]
    library = BUILDS / digest / "libnvidia-ml.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(library, without)
    return library.parent


def _compile(library: Path, without: list[str]) -> None:
    """Compile under a temporary name: several test runs may build at once."""
    incomplete = library.with_suffix(f".{os.getpid()}")
    version_script = library.with_suffix(f".{os.getpid()}.map")
    local = f"local: {' '.join(f'{name};' for name in without)} " if without else ""
    version_script.write_text(f"{{ global: *; {local}}};\n")
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    options.append(f"-Wl,--version-script={version_script}")
    subprocess.run(["gcc", *options, "-o", incomplete, HERE / "standin.c", "-lpthread"], check=True)
    version_script.unlink()
    incomplete.rename(library)


class NvmlStandin:
    """The library with a configuration of its own.

    Attributes:
        environment: processes with these variables load the library, and it reads this configuration.
    """

    def __init__(self, folder: Path, *lines: str, without: Iterable[str] = ()) -> None:
        self._configuration = folder / "nvml.txt"
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(build(without)),
            "NVIDIA_NVML_STANDIN": str(self._configuration),
        }
        self.write(*lines)

    def write(self, *lines: str) -> None:
        """Replace the whole configuration. Later calls of the library use it."""
        draft = self._configuration.with_suffix(".draft")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.rename(self._configuration)
