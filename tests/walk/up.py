"""`mooring up` with simulated nodes, as from a shell."""

import re
from pathlib import Path

import httpx

from tests.walk.product import Program, clean_environment


class Up(Program):
    """`mooring up` in a data directory. `printed` returns the output since the last start."""

    def __init__(self, folder: Path, port: int, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.url = f"http://127.0.0.1:{port}"
        settings = {"MOORING_DATA_DIR": str(folder / "data"), "MOORING_PORT": str(port)}
        settings |= {"MOORING_SSH_PORT": "0", "MOORING_PROXY_PORT": "0"}
        super().__init__(["up"], clean_environment() | settings | environment, folder / "up.log")

    def start(self) -> None:
        self.log.unlink(missing_ok=True)
        super().start()
        self._wait_until(lambda: self._is_ready() and "curl" in self.printed(), 60)

    def _is_ready(self) -> bool:
        assert self.running, self.tail()
        try:
            return httpx.get(f"{self.url}/readyz", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def key(self) -> str:
        found = re.search(r"Admin key +(\S+)", self.printed())
        assert found is not None, self.printed()
        return found[1]

    @property
    def curl(self) -> str:
        """The curl command in the output."""
        found = re.search(r"^ *curl .*?(?<!\\)$", self.printed(), re.MULTILINE | re.DOTALL)
        assert found is not None, self.printed()
        return found[0]
