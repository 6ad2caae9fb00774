"""The server that a client talks to, and the API key: from arguments, the environment, or a context.

Contexts are in `~/.config/mooring/config.toml` (or below `XDG_CONFIG_HOME`), which only its owner can read:

    current = "lab"

    [contexts.lab]
    url = "https://mooring.example"
    api_key = "..."
    project = "vision"
"""

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from mooring_client.failures import NoApiKey, NotConfigured

DEFAULT_URL: Final = "http://127.0.0.1:8700"
_LOGIN: Final = "run `mooring login`, or set MOORING_URL and MOORING_API_KEY"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go, and with which key.

    Attributes:
        project: the project of commands that name none; None: the key's own, or the default project.
    """

    url: str
    api_key: str
    project: str | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, project={self.project!r})"

    @property
    def websocket_url(self) -> str:
        return f"ws{self.url.removeprefix('http')}"

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine. No proxy is used then: it would see the key in clear."""
        return _is_loopback(urlsplit(self.url).hostname or "")


@dataclass(frozen=True, slots=True)
class Config:
    """The content of the configuration file."""

    current: str | None
    contexts: Mapping[str, Mapping[str, Any]] = field(repr=False)  # it has the keys


def config_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The path of the configuration file."""
    if folder := environment.get("XDG_CONFIG_HOME"):
        return Path(folder) / "mooring" / "config.toml"
    return Path(environment.get("HOME") or Path.home()) / ".config" / "mooring" / "config.toml"


def read_config(file: Path) -> Config:
    """Read the configuration file; absent: no contexts.

    Raises:
        NotConfigured: it cannot be read, or has another form.
    """
    try:
        found = tomllib.loads(file.read_text())
    except FileNotFoundError:
        return Config(None, {})
    except (OSError, ValueError) as error:
        raise NotConfigured(f"cannot read {file}: {error}") from None
    current, contexts = found.get("current"), found.get("contexts", {})
    if not isinstance(contexts, dict) or not all(isinstance(each, dict) for each in contexts.values()):
        raise NotConfigured(f"{file} must have its contexts as [contexts.NAME] with url and api_key")
    return Config(current if isinstance(current, str) else None, contexts)


def resolve(
    url: str | None = None,
    api_key: str | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Endpoint:
    """Find the endpoint: in the arguments, a named context, the environment, or the current context.

    The key of a context is sent only to the URL of that context.

    Raises:
        NoApiKey: there is no key, or it has characters that no key has.
        NotConfigured: there is no such context, or the URL is not allowed.
    """
    named = context or environment.get("MOORING_CONTEXT")
    if named and url:
        raise NotConfigured(f"give a URL or the context {named!r}, not both")
    given_url = url or (None if named else environment.get("MOORING_URL"))
    given_key = api_key or (None if named else environment.get("MOORING_API_KEY"))
    stored = {} if given_url else _context(named, environment)
    found_url, found_key = given_url or stored.get("url") or DEFAULT_URL, given_key or stored.get("api_key")
    if not found_key:
        raise NoApiKey(f"there is no API key for {found_url}: {_LOGIN}")
    insecure = environment.get("MOORING_INSECURE_HTTP", "").lower() in {"1", "true", "yes"}
    project = environment.get("MOORING_PROJECT") or stored.get("project")
    return Endpoint(checked_url(str(found_url), insecure=insecure), _checked_key(str(found_key)), project)


def _context(named: str | None, environment: Mapping[str, str]) -> Mapping[str, Any]:
    """The content of the named or current context; empty: there is none."""
    config = read_config(config_file(environment))
    wanted = named or config.current
    if wanted is None:
        return {}
    if wanted not in config.contexts:
        known = ", ".join(sorted(config.contexts)) or "none"
        raise NotConfigured(f"there is no context {wanted!r} (known: {known}); add it with `mooring login`")
    return config.contexts[wanted]


def _checked_key(key: str) -> str:
    """The key without the white space around it, such as the newline at the end of a file.

    Raises:
        NoApiKey: no key has such characters. The message does not show them: they may be of a key.
    """
    stripped = key.strip()
    if not stripped or not all("!" <= each <= "~" for each in stripped):
        raise NoApiKey("the API key is empty, or has spaces or characters beyond ASCII; copy it again")
    return stripped


def checked_url(url: str, *, insecure: bool = False) -> str:
    """The URL without a final slash.

    Raises:
        NotConfigured: it is no HTTP URL, or would send the key unencrypted over a network.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _port = parts.port
    except ValueError as error:
        raise NotConfigured(f"{url!r} is not a URL: {error}") from None
    if (
        parts.scheme not in {"http", "https"}
        or not host
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
    ):
        raise NotConfigured(f"{url!r} is not a URL of a server: write https://host[:port]")
    if parts.scheme == "http" and not insecure and not _is_loopback(host):
        raise NotConfigured(
            f"{url} would send your API key unencrypted; use https://, or set MOORING_INSECURE_HTTP=true "
            "in a network that you trust"
        )
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
