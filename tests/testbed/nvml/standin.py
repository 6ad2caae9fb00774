"""A simulated NVML library, for tests of the real pynvml without a GPU.

`standin.c` lists what its configuration can say; the file may be rewritten while a process uses it.
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
    """Return the folder of libnvidia-ml.so.1, compiled once per source. `without`: symbols to omit."""
    lacking = sorted(without)
    source = b"".join((HERE / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(source + repr(lacking).encode()).hexdigest()[:16]
    library = BUILDS / digest / "libnvidia-ml.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(library, lacking)
    return library.parent


def _compile(library: Path, lacking: list[str]) -> None:
    """Compile under a temporary name: several test runs may build at once."""
    half_done = library.with_suffix(f".{os.getpid()}")
    symbols = library.with_suffix(f".{os.getpid()}.map")
    hidden = "".join(f"{name}; " for name in lacking)
    symbols.write_text(f"{{ global: *; local: {hidden}}};\n" if lacking else "{ global: *; };\n")
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-Wl,--version-script={symbols}"]
    subprocess.run(["gcc", *options, "-o", half_done, HERE / "standin.c", "-lpthread"], check=True)
    symbols.unlink()
    half_done.rename(library)


class NvmlStandin:
    """One configured library. Processes with `environment` use it; `write` changes it at runtime."""

    def __init__(self, folder: Path, *lines: str, without: Iterable[str] = ()) -> None:
        self._configuration = folder / "nvml.txt"
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(build(without)),
            "NVIDIA_NVML_STANDIN": str(self._configuration),
        }
        self.write(*lines)

    def write(self, *lines: str) -> None:
        """Replace the whole configuration. It takes effect within 2 ms."""
        draft = self._configuration.with_suffix(".draft")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.rename(self._configuration)
