"""The resources of one test run: a folder, a subnet, a port range and a prefix for names."""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.testbed import isolation
from tests.testbed.processes import kill_all, processes_within

# Not below /tmp, which is often a tmpfs: overlay2 needs a real filesystem. Not below the repository: its path
# may be too long for a Unix socket's address (107 bytes), and PostgreSQL's own user must be able to reach it.
BASE = Path("/var/tmp") / f"mooring-testbed-{os.geteuid()}"
SLOTS = range(1, 200)
FIRST_PORT = 18000
PORTS_PER_SLOT = 64
FIRST_NODE_HOST = 10
LAST_NODE_HOST = 250


class Workspace:
    """A numbered slot, which a file lock reserves for this process.

    The kernel releases the lock when the process dies. A folder without a lock belongs to a killed run, and
    the next run removes it. A pid could not replace the lock, since pids are reused.
    """

    def __init__(self) -> None:
        BASE.mkdir(mode=0o755, exist_ok=True)
        self.slot, self._lock = _claim()
        self.prefix = f"mtb{self.slot}"
        self.root = _folder_of(self.slot)
        self.root.mkdir(mode=0o755)
        first_port = FIRST_PORT + self.slot * PORTS_PER_SLOT
        self._free_ports = list(range(first_port, first_port + PORTS_PER_SLOT))
        self._free_hosts = list(range(FIRST_NODE_HOST, LAST_NODE_HOST))

    @property
    def subnet(self) -> str:
        return f"10.213.{self.slot}.0/24"

    @property
    def root_address(self) -> str:
        """The address of this process in the nodes' network."""
        return f"10.213.{self.slot}.1"

    def node_address(self, host: int) -> str:
        return f"10.213.{self.slot}.{host}"

    def take_host(self) -> int:
        """Reserve a host number of the subnet for one node, until `give_back_host`."""
        return self._free_hosts.pop(0)

    def give_back_host(self, host: int) -> None:
        self._free_hosts.append(host)

    def take_port(self) -> int:
        """Reserve a port of this slot, until `give_back_port`.

        The port is below the kernel's ephemeral range, so it is still free when a daemon is restarted.
        """
        port = next(port for port in self._free_ports if _is_free(port))
        self._free_ports.remove(port)
        return port

    def give_back_port(self, port: int) -> None:
        self._free_ports.append(port)

    def folder(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(mode=0o755)
        return folder

    def release(self) -> None:
        """Remove all that was created in this slot, and release it."""
        _clear(self.slot)
        self._lock.close()


def _claim() -> tuple[int, IO[str]]:
    """Remove the remains of killed runs in all slots, then lock the first free slot."""
    for slot in _slots_in_use():
        lock = _try_lock(slot)
        if lock is not None:
            _clear(slot)
            lock.close()
    for slot in SLOTS:
        lock = _try_lock(slot)
        if lock is not None:
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            return slot, lock
    raise RuntimeError(f"all slots in {BASE} are taken")


def _slots_in_use() -> Iterator[int]:
    for folder in BASE.iterdir():
        if folder.is_dir() and folder.name.isdigit():
            yield int(folder.name)


def _try_lock(slot: int) -> IO[str] | None:
    lock = (BASE / f"{slot}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _folder_of(slot: int) -> Path:
    return BASE / str(slot)


def _clear(slot: int) -> None:
    folder = _folder_of(slot)
    if os.geteuid() == 0:
        isolation.clear_all(f"mtb{slot}", folder)
    kill_all(lambda: processes_within(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
