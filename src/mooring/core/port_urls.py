"""How ports of instances are addressed through the port proxy.

With a domain: `https://<port>-<name>-<project>.<domain>/`, or `<port>-ins-<the rest of the id>` where that is
too long for a DNS label. Without one: `http://<proxy>/p/<instance id>/<port>/`.
"""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from mooring.core import ids

_MAX_LABEL: Final = 63
_LABEL: Final = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9-]+)")
_ULID: Final = "[0-9a-hjkmnp-tv-z]{26}"
_ID: Final = re.compile(rf"{ids.INSTANCE}-({_ULID})")
_PATH: Final = re.compile(rf"/p/({ids.INSTANCE}_{_ULID})/([1-9][0-9]{{0,4}})(/.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PortAddress:
    """What a URL names.

    Attributes:
        instance_id: null: the instance has one of `names`.
        names: (instance, project): names contain hyphens too, so several may be meant.
    """

    port: int
    instance_id: str | None
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PortUrls:
    """The addresses of one service.

    Attributes:
        domain: empty: paths.
        base: the URL of the proxy, without a path.
    """

    domain: str
    base: str

    @property
    def scheme(self) -> str:
        return urlsplit(self.base).scheme

    def url(self, port: int, instance_id: str, name: str, project: str) -> str:
        """The URL of a port, with a final slash."""
        if not self.domain:
            return f"{self.base}{path_prefix(instance_id, port)}"
        parts = urlsplit(self.base)
        suffix = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{label(port, instance_id, name, project)}.{self.domain}{suffix}/"

    def in_host(self, host: str) -> PortAddress | None:
        """The port that a Host header names; None: it is not a name below the domain."""
        name = host.partition(":")[0].lower().removesuffix(".")
        first, dot, domain = name.partition(".")
        return parsed_label(first) if dot and domain == self.domain else None


def path_prefix(instance_id: str, port: int) -> str:
    return f"/p/{instance_id}/{port}/"


def in_path(path: str) -> tuple[PortAddress, str] | None:
    """The port that a path names, and the path for the program; empty: the final slash is missing."""
    found = _PATH.fullmatch(path)
    if found is None or int(found[2]) > 65_535:
        return None
    return PortAddress(int(found[2]), found[1]), found[3] or ""


def label(port: int, instance_id: str, name: str, project: str) -> str:
    named = f"{port}-{name}-{project}"
    return named if len(named) <= _MAX_LABEL else f"{port}-{instance_id.replace('_', '-')}"


def parsed_label(text: str) -> PortAddress | None:
    """Read `<port>-<name>-<project>` or `<port>-ins-…`. Text that looks like an id is always one."""
    found = _LABEL.fullmatch(text)
    if found is None or len(text) > _MAX_LABEL or int(found[1]) > 65_535:
        return None
    port, rest = int(found[1]), found[2]
    if by_id := _ID.fullmatch(rest):
        return PortAddress(port, f"{ids.INSTANCE}_{by_id[1]}")
    parts = rest.split("-")
    splits = (("-".join(parts[:at]), "-".join(parts[at:])) for at in range(1, len(parts)))
    names = tuple((name, project) for name, project in splits if name and project)
    return PortAddress(port, None, names) if names else None
