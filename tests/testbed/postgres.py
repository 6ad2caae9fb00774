"""A private PostgreSQL server on a loopback port."""

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import psutil
import psycopg
from psycopg import sql

from tests.testbed import filesystems, isolation, processes
from tests.testbed.parts import program
from tests.testbed.processes import Daemon, kill_all, processes_within
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace

# PostgreSQL refuses to run as root.
SYSTEM_USER = "postgres"
ROLE = "mooring"
PASSWORD = "testbed"
HOST = "127.0.0.1"
MAX_CONNECTIONS = 200


class PostgresCluster:
    """One server with its own data folder. It keeps its port and data across stop, kill and start.

    Without `durable`, nothing is flushed to the disk. This is faster, and data survives a killed server, but
    not a power failure.

    Attributes:
        data: its data folder, in a filesystem of its own of `disk_mib` if that is given.
    """

    def __init__(self, workspace: Workspace, *, durable: bool = True, disk_mib: int | None = None) -> None:
        self._workspace = workspace
        self._port = workspace.take_port()
        self._folder = workspace.folder(f"postgres-{self._port}")
        disk = self._folder / "disk" if disk_mib else self._folder
        if disk_mib:
            why = filesystems.mount("ext4", self._folder / "disk.img", disk_mib, disk)
            assert not why, why
            shutil.chown(disk, SYSTEM_USER, SYSTEM_USER)
        self.data = disk / "data"
        self._numbers = itertools.count(1)
        self._initialise()
        self.daemon = Daemon("postgres", self._server_argv(durable), self._folder)

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{ROLE}:{PASSWORD}@{HOST}:{self._port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """Create a database as a copy of `template` (a name or a URL without connections). Return its URL."""
        name = f"test_{next(self._numbers)}"
        # Copying files takes half of the CPU time of writing the copy to the log, the default.
        create = "CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy"
        self._execute(create, name, urlsplit(template).path.lstrip("/"))
        return self.url(name)

    def reject_connections(self, url: str) -> None:
        """End all connections to a database and reject new ones: PostgreSQL copies no database in use."""
        name = urlsplit(url).path.lstrip("/")
        self._execute("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false", name)
        with psycopg.connect(self.url(), autocommit=True) as connection:
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            connection.execute(end, [name])

    def drop_database(self, url: str) -> None:
        """Drop a database, with its open connections."""
        self._execute("DROP DATABASE {} WITH (FORCE)", urlsplit(url).path.lstrip("/"))

    def start(self) -> None:
        if not self.daemon.running:
            self.daemon.start(self._answers)

    def stop(self) -> None:
        """Shut down fast: clients are disconnected, committed work is kept."""
        self.daemon.stop(signal.SIGINT)

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL. The next start recovers from the log.

        A backend that outlived the server would still use its shared memory, and the next start would fail.
        """
        kill_all(self._pids)
        self.daemon.kill()

    def standbys(self) -> int:
        """How many standbys are connected."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            row = connection.execute("SELECT count(*) FROM pg_stat_replication").fetchone()
        assert row is not None
        return int(row[0])

    def replicate_synchronously(self) -> None:
        """Let commits wait until a standby has them."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            sync = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            wait_until(lambda: connection.execute(sync).fetchone() == (1,))

    def freeze(self) -> None:
        """Freeze the server: the kernel accepts connections, but nothing answers."""
        self._to_all(lambda pid: os.kill(pid, signal.SIGSTOP))  # at once, before any wait
        self._to_all(processes.freeze)

    def thaw(self) -> None:
        self._to_all(processes.thaw)

    def destroy(self) -> None:
        self.kill()
        isolation.unmount_within(self._folder)
        shutil.rmtree(self._folder)
        self._workspace.give_back_port(self._port)

    def _pids(self) -> list[int]:
        return processes_within(self._folder)

    def _to_all(self, act: Callable[[int], None]) -> None:
        """Signal the server first: frozen, it starts no new backend."""
        act(self.daemon.pid)
        for backend in psutil.Process(self.daemon.pid).children(recursive=True):
            with suppress(ProcessLookupError):
                act(backend.pid)

    def _initialise(self) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            # Otherwise, with a strict umask, PostgreSQL's user could not read them.
            for path in (self._folder, password):
                shutil.chown(path, SYSTEM_USER, SYSTEM_USER)
        options = ["--auth=scram-sha-256", f"--username={ROLE}", f"--pwfile={password}", "--no-sync"]
        argv = [program("initdb"), f"--pgdata={self.data}", "--encoding=UTF8", "--locale=C", *options]
        done = subprocess.run(_as_owner(argv), capture_output=True, text=True, check=False, cwd=self._folder)
        if done.returncode:
            raise RuntimeError(f"initdb: {done.stdout}{done.stderr}")

    def _server_argv(self, durable: bool) -> list[str]:
        flush = "on" if durable else "off"
        settings = {
            "listen_addresses": HOST,
            "port": str(self._port),
            "unix_socket_directories": "",
            "max_connections": str(MAX_CONNECTIONS),
            "fsync": flush,
            "full_page_writes": flush,
        }
        options = itertools.chain.from_iterable(("-c", f"{key}={value}") for key, value in settings.items())
        return _as_owner([program("postgres"), "-D", str(self.data), *options])

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


class PostgresStandby(PostgresCluster):
    """A copy of a running server that follows it, until it is promoted."""

    def __init__(self, workspace: Workspace, primary: PostgresCluster) -> None:
        self._primary = primary
        super().__init__(workspace, durable=False)

    def promote(self) -> None:
        """Make it the primary. Returns when it accepts writes."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    def detach(self) -> None:
        """Stop following the primary, as if the network between them failed."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: not self._primary.standbys())

    def _initialise(self) -> None:
        # `--write-recovery-conf` makes it a standby that connects as this command does.
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        argv = [
            program("pg_basebackup"),
            f"--pgdata={self.data}",
            f"--dbname={self._primary.url()}",
            *options,
        ]
        if os.geteuid() == 0:
            shutil.chown(self._folder, SYSTEM_USER, SYSTEM_USER)
        subprocess.run(_as_owner(argv), capture_output=True, text=True, check=True, cwd=self._folder)


def _as_owner(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` as PostgreSQL's user. `setpriv` executes it in its own process."""
    if os.geteuid() != 0:
        return list(argv)
    user = f"--reuid={SYSTEM_USER}"
    return [program("setpriv"), user, f"--regid={SYSTEM_USER}", "--init-groups", "--", *argv]
