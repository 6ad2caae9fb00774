"""Secrets that are shown once: how they look, and the hash that is kept instead (security rules R19, R20)."""

import hashlib
import hmac

# All secrets carry 256 bits of randomness or are an operator's own key of 32 characters or more, so a
# plain SHA-256 cannot be searched backwards; slow hashes are for passwords that people choose.


def hashed(secret: str) -> str:
    """The form in which a secret is stored and looked up."""
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, stored_hash: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hashed(secret), stored_hash)
