"""The keys of a gateway, which `mooring gateway-keys` changes while it runs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import asyncssh
from cryptography.fernet import InvalidToken
from starlette.concurrency import run_in_threadpool

from mooring.control import ssh_identity
from mooring.control.ssh_identity import GatewayKeyKind
from mooring.control.tenants.encryption import Encryptor
from mooring.core.errors import Unavailable
from mooring.db import failures
from mooring.db.session import Database

READ_EVERY_S: Final = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _DecryptedKeys:
    """What the database had.

    Attributes:
        encrypted: the encrypted keys, to see whether they have changed.
        host: the private host keys; the first is used.
        authorities: the public keys of the CAs that are trusted.
    """

    encrypted: tuple[bytes | None, ...]
    host: Sequence[asyncssh.SSHKey]
    authorities: Sequence[asyncssh.SSHKey]


class GatewayKeys:
    """The keys now. Raises InvalidToken: the encryption key is not the database's."""

    def __init__(self, database: Database, encryptor: Encryptor) -> None:
        self._database, self._encryptor = database, encryptor
        self._keys = self._read_all()

    @property
    def host(self) -> Sequence[asyncssh.SSHKey]:
        return self._keys.host

    @property
    def authorities(self) -> Sequence[asyncssh.SSHKey]:
        return self._keys.authorities

    def _read_all(self) -> _DecryptedKeys:
        with self._database.read() as session:
            return _DecryptedKeys(
                ssh_identity.encrypted_keys(session),
                [
                    asyncssh.import_private_key(key)
                    for key in ssh_identity.host_keys(session, self._encryptor)
                ],
                [
                    asyncssh.import_public_key(key)
                    for key in ssh_identity.public_keys(session, self._encryptor, GatewayKeyKind.CA)
                ],
            )

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Read them again every 2 s. Runs until it is cancelled."""
        is_logged = False
        while True:
            await asyncio.sleep(READ_EVERY_S)
            try:
                changed = await run_in_threadpool(self._changed)
            except (Unavailable, *failures.DATABASE_ERRORS):
                continue  # those of before
            except InvalidToken:
                if not is_logged:
                    log.warning(
                        "cannot decrypt the keys: restart this gateway with the server's encryption keys"
                    )
                is_logged = True
                continue
            if changed is not None:
                self._keys = changed
                on_change()

    def _changed(self) -> _DecryptedKeys | None:
        with self._database.read() as session:
            if ssh_identity.encrypted_keys(session) == self._keys.encrypted:
                return None
        return self._read_all()
