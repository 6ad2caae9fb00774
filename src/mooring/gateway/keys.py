"""The keys of a gateway, which `mooring gateway-keys` changes while it runs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import asyncssh
from cryptography.fernet import InvalidToken
from starlette.concurrency import run_in_threadpool

from mooring.control import gateway_keys
from mooring.control.instances import port_tokens
from mooring.control.instances.port_tokens import PortTokens
from mooring.control.tenants.encryption import Encryptor
from mooring.db import failures
from mooring.db.session import Database
from mooring_client.errors import Unavailable

READ_EVERY_S: Final = 2.0
_CANNOT_DECRYPT: Final = "cannot decrypt the present ones; restart it with the server's encryption keys"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _DecryptedKeys:
    """What the database had.

    Attributes:
        encrypted: the encrypted keys, to see whether they have changed.
        host: the private host keys; the first is used.
        authorities: the public keys of the CAs that are trusted.
        tokens: sign and verify links and cookies of the port proxy.
    """

    encrypted: tuple[bytes | None, ...]
    host: Sequence[asyncssh.SSHKey]
    authorities: Sequence[asyncssh.SSHKey]
    tokens: PortTokens


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

    @property
    def tokens(self) -> PortTokens:
        return self._keys.tokens

    def _read_all(self) -> _DecryptedKeys:
        with self._database.read() as session:
            return _DecryptedKeys(
                gateway_keys.encrypted_keys(session),
                [
                    asyncssh.import_private_key(key)
                    for key in gateway_keys.host_keys(session, self._encryptor)
                ],
                [
                    asyncssh.import_public_key(key)
                    for key in gateway_keys.public_ca_keys(session, self._encryptor)
                ],
                port_tokens.signer(session, self._encryptor),
            )

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Read them again every 2 s. Runs until it is cancelled."""
        logged: str | None = None
        while True:
            await asyncio.sleep(READ_EVERY_S)
            try:
                changed = await run_in_threadpool(self._changed)
            except failures.DATABASE_ERRORS:
                continue  # those of before
            except (InvalidToken, Unavailable) as error:
                problem = _CANNOT_DECRYPT if isinstance(error, InvalidToken) else error.message
                if problem != logged:
                    log.warning("the gateway goes on with the keys that it has: %s", problem)
                logged = problem
                continue
            logged = None
            if changed is not None:
                self._keys = changed
                on_change()

    def _changed(self) -> _DecryptedKeys | None:
        with self._database.read() as session:
            if gateway_keys.encrypted_keys(session) == self._keys.encrypted:
                return None
        return self._read_all()
