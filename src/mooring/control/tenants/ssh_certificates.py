"""Short-lived OpenSSH user certificates, signed by the service.

Each acts as the credential that asked for it (`ssh_holders`). They are not stored: a certificate ends at its
expiry, and with its credential.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from secrets import randbits
from typing import Final

from cryptography.hazmat.primitives.serialization import SSHCertificateBuilder, SSHCertificateType
from sqlalchemy.orm import Session

from mooring.control import gateway_keys
from mooring.control.audit import audit_log
from mooring.control.tenants import ssh_holders
from mooring.control.tenants.encryption import Encryptor
from mooring.control.tenants.ssh_holders import Holder
from mooring.core import ssh_public_keys
from mooring.core.access import Access
from mooring.core.ssh_public_keys import PublicKey
from mooring.db.tables import ApiKey
from mooring.db.types import now
from mooring_client.errors import InvalidPublicKey

# The clock of a gateway may be this much behind.
_BEFORE: Final = timedelta(minutes=1)
# Without them, OpenSSH's own server would refuse a terminal or forwarding; the gateway does too.
_EXTENSIONS: Final = (b"permit-port-forwarding", b"permit-pty")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A signed certificate, as in a `-cert.pub` file."""

    text: str
    expires_at: datetime


def create(
    session: Session, access: Access, encryptor: Encryptor, public_key: str, ttl: timedelta
) -> Certificate:
    """Sign a certificate. It expires with the caller's API key, if that is earlier.

    Raises:
        InvalidPublicKey: as `ssh_public_keys.parse`, or the key is of a security key.
        NoMembership, Unauthorized: as `ssh_holders.locked`.
    """
    key = ssh_public_keys.parse(public_key)
    if key.is_security_key:
        raise InvalidPublicKey("a security key cannot be certified; register it with POST /v1/ssh-keys")
    holder = Holder.of_access(access, None)
    ssh_holders.locked(session, holder)
    own = session.get(ApiKey, holder.id)
    latest = [own.expires_at] if own is not None and own.expires_at is not None else []
    # A certificate has whole seconds.
    expires_at = min([now() + ttl, *latest]).replace(microsecond=0)
    certificate = Certificate(_signed(session, encryptor, key, holder, expires_at), expires_at)
    after = {"fingerprint": key.fingerprint, "expires_at": expires_at.isoformat()}
    audit_log.record(session, access, holder.id, holder.project_id, after=after)
    return certificate


def _signed(
    session: Session, encryptor: Encryptor, key: PublicKey, holder: Holder, expires_at: datetime
) -> str:
    builder = (
        SSHCertificateBuilder()
        .public_key(key.key)
        .type(SSHCertificateType.USER)
        .serial(randbits(64))
        .key_id(holder.text.encode())
        .valid_principals([holder.text.encode()])
        .valid_after((now() - _BEFORE).timestamp())
        .valid_before(expires_at.timestamp())
    )
    for extension in _EXTENSIONS:
        builder = builder.add_extension(extension, b"")
    return builder.sign(gateway_keys.ca_key(session, encryptor)).public_bytes().decode()
