"""Public keys of SSH clients."""

import base64
import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa

from mooring_client.errors import InvalidPublicKey

# The types that start with "sk-" are of security keys (FIDO2).
SECURITY_KEY_TYPES: Final = ("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")
TYPES: Final = (
    "ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa",
    *SECURITY_KEY_TYPES,
)  # fmt: skip
MIN_RSA_BITS: Final = 2048
# For each, a text that only such a file has, and what to do.
_OTHER_FILES: Final = (
    (
        "PRIVATE KEY",
        "this is a private key, which must not leave your machine: make a new pair with ssh-keygen, and send "
        "the content of its .pub file",
    ),
    (
        "PuTTY-User-Key-File",
        "this is PuTTY's private key, which must not leave your machine: make a new pair with PuTTYgen, and "
        "send the text of its field 'Public key for pasting into OpenSSH'",
    ),
    (
        "BEGIN SSH2 PUBLIC KEY",
        "convert the file with ssh-keygen -i -f FILE, or copy PuTTYgen's field 'Public key for pasting into "
        "OpenSSH'",
    ),
)

AcceptedKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key.

    Attributes:
        text: its type and its base64, without a comment.
        fingerprint: as `ssh-keygen -l` shows it: `SHA256:` and base64 without padding.
        key: for signing a certificate; of a security key without its application.
    """

    text: str
    fingerprint: str
    key: AcceptedKey

    @property
    def is_security_key(self) -> bool:
        return self.text.startswith("sk-")


def parse(line: str) -> PublicKey:
    """Parse a line of a `.pub` file: type, base64 and an optional comment.

    Raises:
        InvalidPublicKey: it is no public key, or of a type or size that is not accepted.
    """
    for sign, advice in _OTHER_FILES:
        if sign in line:
            raise InvalidPublicKey(advice)
    kind, encoded = [*line.split(None, 2), "", ""][:2]
    if "\n" in line.strip() or kind not in TYPES:
        raise InvalidPublicKey(
            f"send one line of a .pub file, with a key of one of the types {', '.join(TYPES)}; "
            "ssh-keygen -t ed25519 makes one"
        )
    try:
        blob = base64.b64decode(encoded, validate=True)
        key = serialization.load_ssh_public_key(f"{kind} {encoded}".encode())
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidPublicKey("the key is damaged: copy the whole line of the .pub file") from None
    assert not isinstance(key, dsa.DSAPublicKey)  # not among `TYPES`
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS:
        raise InvalidPublicKey(f"an RSA key needs {MIN_RSA_BITS} bits, and this has {key.key_size}")
    return _described(kind, blob, key)


def _described(kind: str, blob: bytes, key: AcceptedKey) -> PublicKey:
    """Normalize: SSH clients send the shortest encoding of a key, whose hash is its fingerprint."""
    if kind not in SECURITY_KEY_TYPES:
        text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        blob = base64.b64decode(text.split()[1])
    return PublicKey(f"{kind} {base64.b64encode(blob).decode()}", fingerprint(blob), key)


def fingerprint(blob: bytes) -> str:
    """The fingerprint of a key in the format of SSH's messages (RFC 4253, section 6.6)."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
