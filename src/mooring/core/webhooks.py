"""Webhooks without network and database: targets, signatures, times of attempts, and which events match.

The format is that of Standard Webhooks (https://www.standardwebhooks.com).
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final
from urllib.parse import urlsplit

from mooring.core.registry_hosts import Address, is_public, parse_address

NOTICES: Final = "notices"
PING: Final = "webhook.ping"
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - a prefix, not a secret
SECRET_BYTES: Final = 32
MAX_BODY_BYTES: Final = 20_000

# Seconds before each attempt, from the failure of the one before it: 76 hours in all.
SCHEDULE: Final[Sequence[float]] = (
    0, 5, 300, 1800, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600,
)  # fmt: skip
# The longest `Retry-After` that is honoured.
LONGEST_RETRY_AFTER_S: Final = 24 * 3600.0
# A pause is up to this fraction longer, so that receivers which failed together are not called together.
JITTER: Final = 0.2

_NOTICE_STATES: Final = frozenset({"stopped", "succeeded", "failed", "unreachable"})
_NOTICE_TYPES: Final = frozenset({"node.lost", "project.quota_nearly_used", "instance.expiring"})

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where a webhook's requests go.

    Attributes:
        host: the name or address, without brackets.
        path: with the query, percent-encoded as in the URL.
    """

    secure: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}"


def mail_address(url: str) -> str | None:
    """The address of a `mailto:` URL, in lower case; None: another URL."""
    return url[len("mailto:") :].lower() if url.lower().startswith("mailto:") else None


def parse_target(url: str) -> HttpTarget:
    """Raises ValueError, with a message for users: not a URL that can be called."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("it must be an https URL with a host")
    if "@" in parts.netloc or "#" in url:
        raise ValueError("it must have neither credentials nor a fragment")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("its port must be a number from 1 to 65535") from None
    if port == 0:
        raise ValueError("its port must be a number from 1 to 65535")
    secure = parts.scheme == "https"
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    return HttpTarget(secure, parts.hostname.rstrip("."), port or (443 if secure else 80), path)


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Which addresses webhooks may reach: public ones with https, and the networks that an admin lists."""

    listed: tuple[Network, ...] = ()

    def lists(self, address: Address) -> bool:
        return any(address in network for network in self.listed)

    def allows(self, address: Address, *, secure: bool) -> bool:
        """Whether a request may be sent to this address; without TLS only within the listed networks."""
        return self.lists(address) or (secure and is_public(address))

    def require(self, target: HttpTarget) -> None:
        """Check what is known without resolving the host's name, which is done before each request.

        Raises:
            ValueError: with a message for users.
        """
        address = parse_address(target.host)
        if address is not None and not self.allows(address, secure=target.secure):
            raise ValueError("its address is not allowed: it must be public, with https")
        if not target.secure and not self.listed:
            raise ValueError("it must begin with https://")


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse a comma-separated list. Raises ValueError: an entry is no network."""
    return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())


def shown_url(url: str) -> str:
    """A URL for logs and the audit log: receivers of chats authenticate callers by its path."""
    if mail_address(url) is not None:
        return url
    return f"{parse_target(url).origin}/…"


def new_secret(random: bytes) -> str:
    """A secret from 32 random bytes, as `standardwebhooks` and its like read it."""
    return SECRET_PREFIX + base64.b64encode(random).decode()


def signature(secrets: Iterable[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The header webhook-signature: one signature for each secret.

    Args:
        timestamp: of the attempt, in seconds since 1970.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    keys = (base64.b64decode(secret.removeprefix(SECRET_PREFIX)) for secret in secrets)
    digests = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def pause_s(
    schedule: Sequence[float], attempts: int, retry_after_s: float | None, jitter: float
) -> float | None:
    """Seconds until the next attempt; None: there is none.

    Args:
        attempts: how many were made.
        retry_after_s: what the receiver asked for.
        jitter: a random number from 0 to 1.
    """
    if attempts >= len(schedule):
        return None
    asked_s = min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
    return max(schedule[attempts], asked_s) * (1 + JITTER * jitter)


def body_of(kind: str, timestamp: str | None, data: Mapping[str, Any]) -> bytes:
    """The body of a delivery. If it would be too large, `data` has the ids only, and `truncated`."""
    body = _json({"type": kind, "timestamp": timestamp, "data": data})
    if len(body) <= MAX_BODY_BYTES:
        return body
    ids = {name: value for name, value in data.items() if name.endswith(("_id", "_uuid", "version"))}
    return _json({"type": kind, "timestamp": timestamp, "data": {**ids, "truncated": True}})


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def slack_body(text: str) -> bytes:
    """A message for the incoming webhooks of Slack and Mattermost. The text mentions nobody."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Mattermost notifies everybody for @all, and Slack for <!channel>.
    escaped = escaped.replace("@", "@\u200b")
    block = {"type": "section", "text": {"type": "mrkdwn", "text": escaped[:3000]}}
    return _json({"text": escaped, "blocks": [block]})


def order_key(instance_id: str | None, kind: str, data: Mapping[str, Any]) -> str:
    """What an event is about. Events about one thing are delivered in their order."""
    if instance_id is not None:
        return instance_id
    names = ("volume_id", "group_id", "gpu_uuid", "node_id")
    return next((str(data[name]) for name in names if data.get(name)), kind)


def is_wanted(events: Collection[str], kind: str, data: Mapping[str, Any]) -> bool:
    """Whether a webhook with these `events` gets an event."""
    return kind in events or (NOTICES in events and _is_notice(kind, data))


def _is_notice(kind: str, data: Mapping[str, Any]) -> bool:
    if kind == "instance.state_changed":
        return data.get("to") in _NOTICE_STATES
    if kind == "gpu.health_changed":
        return data.get("to") in {"quarantined", "lost"}
    if kind == "node.state_changed":
        return data.get("state") == "unreachable"
    return kind in _NOTICE_TYPES
