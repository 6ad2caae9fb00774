"""An image with JupyterLab: the environment of tests/jupyter and the Python that it was made with.

Its files have the same paths as on this machine, so that nothing in them must be changed.
"""

import subprocess
import tarfile
from pathlib import Path
from typing import Final

from tests.testbed.dockerd import DockerNode
from tests.testbed.images import COMMAND, add_file, busybox_layer, libraries
from tests.testbed.parts import skip

JUPYTER: Final = "mooring-test/jupyter:1"
ENVIRONMENT: Final = Path(__file__).parents[1] / "jupyter" / ".venv"
PYTHON: Final = str(ENVIRONMENT / "bin" / "python")
JUPYTER_LAB: Final = str(ENVIRONMENT / "bin" / "jupyter-lab")
# Of the standard library, for it is half of the image otherwise.
_UNUSED: Final = frozenset({
    "ensurepip", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tkinter", "turtledemo",
})  # fmt: skip
_PATHS: Final = "import sys, sysconfig; print(sys._base_executable, sysconfig.get_path('stdlib'))"


def require_jupyter() -> None:
    """Skip the test if JupyterLab is missing; under CI=true, fail it."""
    if not (ENVIRONMENT / ".installed").exists():
        skip("JupyterLab: not installed; run tests/testbed/install.sh")


def import_jupyter(node: DockerNode, folder: Path) -> str:
    """Import the image. Returns its reference.

    Args:
        folder: for a file of some 300 MB, which is removed.
    """
    repository, tag = JUPYTER.split(":")
    layer = folder / "jupyter.tar"
    _write_layer(layer)
    try:
        node.client.api.import_image_from_file(
            str(layer), repository=repository, tag=tag, changes=[COMMAND, "ENV HOME=/root"]
        )
    finally:
        layer.unlink()
    return JUPYTER


def _write_layer(layer: Path) -> None:
    layer.write_bytes(busybox_layer())
    printed = subprocess.run([PYTHON, "-c", _PATHS], capture_output=True, text=True, check=True)
    executable, standard = map(Path, printed.stdout.split())
    with tarfile.open(layer, "a") as archive:
        archive.add(ENVIRONMENT)
        archive.add(executable.resolve(), executable)
        for entry in standard.iterdir():
            if entry.name not in _UNUSED and not entry.name.startswith("config-"):
                archive.add(entry)
        modules = [*standard.glob("lib-dynload/*.so"), *ENVIRONMENT.glob("lib/**/*.so")]
        # Those of wheels are in their folders.
        for path in libraries(executable, *modules):
            if ENVIRONMENT not in Path(path).parents:
                add_file(archive, path.lstrip("/"), Path(path).read_bytes(), 0o755)
