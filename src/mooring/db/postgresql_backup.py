"""PostgreSQL: a backup by pg_dump, and a restore by pg_restore and psql in one transaction.

These programs have no time limit: a backup of a large database may take hours.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL

from mooring.db import migrate, restored_events, serving
from mooring.db.operator_errors import DatabaseInUse, DatabaseProblem, UnfitBackup
from mooring.db.postgresql import libpq_parameters
from mooring.db.tables import Base

# Called with the bytes written so far, at least every REPORT_S seconds.
Progress = Callable[[int], None]
REPORT_S: Final = 1.0
_CHUNK: Final = 1 << 18
_LOCK_TIMEOUT_S: Final = 15
_SECRETS: Final = ("password", "sslpassword")
_VERSION: Final = re.compile(rb"(\d+)(?:\.\d+)*")
_REVISION: Final = re.compile(rb"^COPY public\.alembic_version .*\n(\w+)\n\\\.$", re.MULTILINE)
_PLANE: Final = re.compile(rb" TABLE public control_plane ")

_TABLES: Final = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
_FUNCTIONS: Final = """
    SELECT DISTINCT proc.proname FROM pg_trigger
    JOIN pg_class ON pg_class.oid = tgrelid JOIN pg_proc proc ON proc.oid = tgfoid
    WHERE NOT tgisinternal AND relnamespace = 'public'::regnamespace
        AND proc.pronamespace = 'public'::regnamespace
    ORDER BY proname
"""


def backup(url: URL, target: Path, progress: Progress) -> None:
    """Write one consistent state of the database to a file. Servers may write meanwhile.

    The file appears under its name only when it is complete, readable and on the disk.

    Raises:
        DatabaseProblem: pg_dump is missing, too old or failed, or the database cannot be reached.
        OSError: cannot write the file.
    """
    _require_version(url)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        argv = [_program("pg_dump"), "--format=custom", f"--file={part}", *_connect_to(url)]
        with _started(argv, url) as dump:
            while not _ends_within(dump, REPORT_S):
                progress(part.stat().st_size)
        with _started([_program("pg_restore"), "--file=/dev/null", str(part)], url) as check:
            check.wait()
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(target.parent)


def restore(source: Path, url: URL, progress: Progress) -> str:
    """Replace Mooring's tables with those of the backup, all or nothing. Returns the backup's revision.

    Args:
        url: with the role that owns the tables.

    Raises:
        UnfitBackup: the file is damaged, is no backup of Mooring, or is of a newer release.
        DatabaseInUse: a server uses the database.
        DatabaseProblem: the database has tables of another program, or a program is missing or failed.
    """
    if not source.is_file():
        raise UnfitBackup(f"there is no file {source}")
    revision = _checked_revision(source, url)
    try:
        with psycopg.connect(
            **libpq_parameters(url) | {"connect_timeout": 10, "autocommit": True}
        ) as locking:
            _require_no_server(locking)
            _replace(source, url, _removal(locking), progress)
            # The end of the connection releases it too, but a little later: a server may start at once.
            locking.execute(f"SELECT pg_advisory_unlock({serving.KEY})")
    except psycopg.OperationalError as error:
        raise DatabaseProblem(f"cannot reach the database: {error}") from None
    return revision


def _require_version(url: URL) -> None:
    """Raises DatabaseProblem: pg_dump is older than the server, so it would refuse."""
    try:
        with psycopg.connect(**libpq_parameters(url) | {"connect_timeout": 10}) as connection:
            server = connection.info.server_version // 10_000
    except psycopg.OperationalError as error:
        raise DatabaseProblem(f"cannot reach the database: {error}") from None
    argv = [_program("pg_dump"), "--version"]
    printed = subprocess.run(argv, capture_output=True, check=True).stdout  # noqa: S603 - fixed arguments
    found = _VERSION.search(printed)
    if found is None or int(found[1]) < server:
        raise DatabaseProblem(
            f"pg_dump is too old ({printed.decode().strip()}) for a server of version {server}: install "
            f"postgresql-client-{server} or a later one"
        )


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise DatabaseProblem(
            f"{name} is not installed: install PostgreSQL's client programs (postgresql-client)"
        )
    return found


def _connect_to(url: URL) -> list[str]:
    """The option with the connection. Any user of the machine can read arguments, so it has no password."""
    parameters = {key: value for key, value in libpq_parameters(url).items() if key not in _SECRETS}
    return [f"--dbname={make_conninfo(**parameters)}"]


def _environment(url: URL) -> Mapping[str, str]:
    password = libpq_parameters(url).get("password")
    return {**os.environ, **({"PGPASSWORD": str(password)} if password else {})}


@contextmanager
def _started(argv: list[str], url: URL, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program. Kills it if the block raises.

    Raises:
        DatabaseProblem: it failed; with what it wrote to its standard error.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603 - a fixed name from the PATH
            argv, env=_environment(url), stderr=errors, **pipes
        )
        try:
            yield process
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):
                    pipe.close()
        if status:
            raise DatabaseProblem(f"{Path(argv[0]).name} failed with status {status}: {_tail(errors)}")


def _tail(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 1000))
    return " ".join(errors.read().decode(errors="replace").split())


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _checked_revision(source: Path, url: URL) -> str:
    """The revision in a backup. Raises UnfitBackup."""
    options: dict[str, list[str]] = {
        "list": ["--list"],
        "revision": ["--data-only", "--table=alembic_version", "--file=-"],
    }
    printed: dict[str, bytes] = {}
    for name, arguments in options.items():
        argv = [_program("pg_restore"), *arguments, str(source)]
        try:
            with _started(argv, url, stdout=subprocess.PIPE) as listing:
                assert listing.stdout is not None
                printed[name] = listing.stdout.read()
        except DatabaseProblem as problem:
            raise UnfitBackup(f"{source} cannot be read: {problem}") from None
    found = _REVISION.search(printed["revision"])
    if found is None or not _PLANE.search(printed["list"]):
        raise UnfitBackup(f"{source} is no backup of a database of Mooring")
    revision = found[1].decode()
    if revision not in migrate.known():
        raise UnfitBackup(f"{source} has the revision {revision} of a newer release; install that release")
    return revision


def _require_no_server(locking: psycopg.Connection[Any]) -> None:
    """Take the lock that keeps servers out until the connection ends. Raises DatabaseInUse."""
    row = locking.execute(f"SELECT pg_try_advisory_lock({serving.KEY})").fetchone()
    assert row is not None
    if not row[0]:
        raise DatabaseInUse("the database is in use: stop all servers first")


def _removal(connection: psycopg.Connection[Any]) -> str:
    """The statements that remove Mooring's present tables. Raises DatabaseProblem: there are others."""
    tables = {str(row[0]) for row in connection.execute(_TABLES)}
    unknown = sorted(tables - {*Base.metadata.tables, "alembic_version"})
    if unknown:
        raise DatabaseProblem(
            f"the database has tables that this release does not know ({', '.join(unknown)}): restore into "
            "an empty database"
        )
    functions = [str(row[0]) for row in connection.execute(_FUNCTIONS)]
    statements = [_drop("DROP TABLE {};", sorted(tables)), _drop("DROP FUNCTION {};", functions)]
    return "\n".join(each.as_string(connection) for each in statements if each is not None)


def _drop(statement: LiteralString, names: list[str]) -> sql.Composed | None:
    listed = sql.SQL(", ").join(sql.Identifier("public", name) for name in names)
    return sql.SQL(statement).format(listed) if names else None


def _replace(source: Path, url: URL, removal: str, progress: Progress) -> None:
    """Run the removal and the backup's script in one transaction, which any error rolls back."""
    psql = [
        _program("psql"),
        "--no-psqlrc",
        "--quiet",
        "--set=ON_ERROR_STOP=1",
        "--file=-",
        *_connect_to(url),
    ]
    argv = [_program("pg_restore"), "--no-owner", "--no-privileges", "--no-comments", "--file=-", str(source)]
    begin = (
        f"BEGIN; SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s';\n"
        f"SELECT pg_advisory_xact_lock(hashtext('mooring.migrations')) \\g /dev/null\n{removal}\n"
    )
    with _started(psql, url, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as target:
        assert target.stdin is not None
        # psql ends at the first error; its own message is the one to show.
        with suppress(BrokenPipeError):
            target.stdin.write(begin.encode())
            with _started(argv, url, stdout=subprocess.PIPE) as script:
                assert script.stdout is not None
                _pump(script.stdout, target.stdin, progress)
            # Not before pg_restore has succeeded: its output may have ended early.
            target.stdin.write(
                f"\n{restored_events.postgresql_statement()} \\g /dev/null\nCOMMIT;\n".encode()
            )
            target.stdin.flush()


def _pump(source: IO[bytes], target: IO[bytes], progress: Progress) -> None:
    copied = 0
    while chunk := source.read(_CHUNK):
        target.write(chunk)
        copied += len(chunk)
        progress(copied)


def _sync_folder(folder: Path) -> None:
    """Wait until a new name in a folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
