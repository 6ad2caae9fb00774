"""Hashes of secrets that are shown once; only the hash is stored (security rules R19, R20)."""

import hashlib
import hmac

# All secrets have 256 random bits, or are an operator's key of at least 32 characters, so a plain SHA-256
# cannot be reversed by search. Slow hashes are for passwords that people choose.


def hashed(secret: str) -> str:
    """The form in which a secret is stored and looked up."""
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, stored_hash: str) -> bool:
    """Whether the secret has the stored hash, compared in constant time."""
    return hmac.compare_digest(hashed(secret), stored_hash)
