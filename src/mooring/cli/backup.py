"""`mooring db backup` and `mooring db restore`, for both databases."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from cryptography.fernet import InvalidToken
from pydantic import SecretStr
from sqlalchemy import create_engine, text

from mooring.cli.common import read_settings
from mooring.control.audit import signing_keys
from mooring.control.audit.signing_keys import AuditKeys
from mooring.control.tenants import encryption
from mooring.control.tenants.encryption import Encryptor
from mooring.db import postgresql_backup, sqlite_backup
from mooring.db.file_lock import file_of
from mooring.db.session import normalized
from mooring.settings import Settings

_REPORT_EVERY_S: Final = 5.0
_MIB: Final = 1024 * 1024
_AFTER_RESTORE: Final = """\
  Next         Start the server. API keys, users and nodes are as they were at the backup: revoke again
               what was revoked since. Nodes that have seen a newer state are not_ready
               (generation_regressed): nothing on them changes, and unknown containers are orphans.
               What to do then: docs/operating.md, "After a restore"."""


@dataclass(frozen=True, slots=True)
class _ServerKeys:
    """Keys that the database needs and a backup does not contain.

    Attributes:
        place: where they are: a setting or a file.
        present: the keys; empty if there are none, because only a server creates the file.
    """

    name: str
    place: str
    present: list[str]


def _server_keys(settings: Settings) -> tuple[_ServerKeys, _ServerKeys]:
    """Those for encryption, and those of the audit log."""

    def found(name: str, setting: str, configured: SecretStr | None, file: str) -> _ServerKeys:
        if configured is not None:
            return _ServerKeys(name, f"MOORING_{setting}", configured.get_secret_value().split(","))
        path = settings.data_dir.resolve() / file
        return _ServerKeys(name, str(path), path.read_text().split() if path.exists() else [])

    return (
        found("encryption key", "ENCRYPTION_KEYS", settings.encryption_keys, encryption.KEY_FILE),
        found("audit log's key", "AUDIT_KEYS", settings.audit_keys, signing_keys.KEY_FILE),
    )


def backup(file: Path) -> None:
    """Write the database to a file.

    Raises:
        DatabaseProblem, OSError, sqlite3.Error: no backup was made.
    """
    settings = read_settings(Settings)
    url = normalized(settings.migration_url)
    if (path := file_of(url)) is not None:
        sqlite_backup.backup(path, file, _Reporter("copied").report)
    else:
        postgresql_backup.backup(url, file, _Reporter("written").report)
    typer.echo(f"{file}: a backup of {file.stat().st_size / _MIB:.1f} MiB, checked")
    for label, keys in zip(("Not in it", ""), _server_keys(settings), strict=True):
        typer.echo(f"  {label:<12} the {keys.name}, {keys.place}")
    typer.echo("               Keep copies of both, apart from the backups.")


def restore(file: Path) -> None:
    """Replace the database with the backup in a file, and say what follows.

    Raises:
        DatabaseProblem, OSError, sqlite3.Error: nothing was restored, or it must be repeated.
    """
    settings = read_settings(Settings)
    url = normalized(settings.migration_url)
    if (path := file_of(url)) is not None:
        restored = sqlite_backup.restore(file, path, _Reporter("copied").report)
        typer.echo(f"{path} is restored from {file}, at revision {restored.revision}")
        if restored.replaced is not None:
            typer.echo(f"  Old files    {restored.replaced}")
    else:
        revision = postgresql_backup.restore(file, url, _Reporter("restored").report)
        typer.echo(f"the database {url.database} is restored from {file}, at revision {revision}")
        typer.echo(
            "  Roles        if servers use a role of their own: mooring db upgrade; mooring db grant ROLE"
        )
    for keys in _unfit_keys(settings):
        typer.echo(f"  WARNING      {keys.place} is not the {keys.name} of the backup: copy that key there,")
        typer.echo("               the server does not start without it")
    typer.echo(_AFTER_RESTORE)


def _unfit_keys(settings: Settings) -> Iterator[_ServerKeys]:
    """The keys of this server that are not those of the restored database."""
    engine = create_engine(normalized(settings.migration_url))
    try:
        with engine.connect() as connection:
            # All columns: a backup of an older release lacks some.
            row = connection.execute(text("SELECT * FROM control_plane")).mappings().one()
    finally:
        engine.dispose()
    encrypting, signing = _server_keys(settings)
    check, audit_key_id = row.get("key_check"), row.get("audit_key_id")
    if check is not None and not (encrypting.present and _decrypts(encrypting.present, bytes(check))):
        yield encrypting
    if audit_key_id is not None and not (signing.present and audit_key_id in AuditKeys(signing.present).ids):
        yield signing


def _decrypts(keys: list[str], check: bytes) -> bool:
    try:
        Encryptor(keys).decrypt(check)
    except InvalidToken:
        return False
    return True


class _Reporter:
    """Prints progress every few seconds."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._printed_at = time.monotonic()

    def report(self, done: int, total: int = 0) -> None:
        if time.monotonic() < self._printed_at + _REPORT_EVERY_S:
            return
        self._printed_at = time.monotonic()
        of_all = f" of {total / _MIB:.0f}" if total else ""
        typer.echo(f"{done / _MIB:.0f}{of_all} MiB {self._verb}", err=True)
