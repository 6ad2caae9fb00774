"""User certificates that the service has signed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import asyncssh
from asyncssh.auth_keys import SSHAuthorizedKeys


class CertificateAuthority(SSHAuthorizedKeys):
    """Accepts certificates of one connection's client. asyncssh checks their signature, type and time.

    asyncssh tells `SSHServer` only who signed a certificate, but this object also its principals.

    Args:
        keys: the public keys of the CA.
        on_valid: called with the holder that a certificate names. The client may not have the key.
    """

    def __init__(self, keys: Sequence[asyncssh.SSHKey], on_valid: Callable[[str], None]) -> None:
        super().__init__()
        self._keys, self._on_valid = keys, on_valid

    def validate(
        self,
        key: asyncssh.SSHKey,
        client_host: str,
        client_addr: str,
        cert_principals: Sequence[str] | None = None,
        ca: bool = False,
    ) -> Mapping[str, Any] | None:
        """Return the options of an accepted certificate, or None. Public keys are checked elsewhere."""
        if not ca or key not in self._keys or cert_principals is None or len(cert_principals) != 1:
            return None
        self._on_valid(cert_principals[0])
        # The principal is a holder, and not the user name, which names the instance.
        return {"principals": set(cert_principals)}
