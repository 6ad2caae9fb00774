"""Which registries a project may use: those on the public internet, and those that an admin lists.

A node's Docker daemon pulls as root from the host's network, so a user who names a registry chooses where the
daemon connects. Internal addresses and names are rejected unless an admin lists them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from mooring.core.images import DOCKER_HUB, registry_host

Address = IPv4Address | IPv6Address

# Names that only internal resolvers know (RFC 6761, 6762, 8375; ICANN for `internal`).
_INTERNAL: Final = frozenset({
    "localhost", "local", "internal", "localdomain", "home.arpa", "lan", "intranet", "corp", "home",
    "private",
})  # fmt: skip
# A public address that the hypervisor answers: Azure's WireServer.
_METADATA: Final = frozenset({ip_address("168.63.129.16")})
_NAT64: Final = ip_network("64:ff9b::/96")
# Not public, although `is_global` of some Python releases differs. 192.0.0.0/24 has Oracle Cloud's metadata.
_NOT_PUBLIC: Final = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15", "240.0.0.0/4",
            "64:ff9b:1::/48", "100::/64", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10",
        ),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RegistryRules:
    """Which registries outside the public internet are allowed.

    Attributes:
        listed: the admin's list of `host`, `host:port` or `*.domain`.
        loopback_project: the project that may use registries on loopback; null: none.
    """

    listed: tuple[str, ...] = ()
    loopback_project: str | None = None

    def allows(self, registry: str, project_id: str) -> bool:
        """Whether a project may use this registry, `host[:port]`."""
        return not is_internal(registry) or self.lists(registry, project_id)

    def lists(self, registry: str, project_id: str) -> bool:
        """Whether the registry may have any address: listed by an admin, or on the project's loopback."""
        host = host_of(registry)
        if project_id == self.loopback_project and is_loopback(host):
            return True
        return any(_matches(pattern, registry.lower(), host) for pattern in self.listed)


def host_of(registry: str) -> str:
    """The host without port, brackets and the final dot of an absolute name."""
    text = registry.lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_internal(registry: str) -> bool:
    """Whether this name or address is not on the public internet.

    A public name may still resolve to an internal address: the node checks that before a pull.
    """
    if registry_host(registry) == DOCKER_HUB:
        return False
    host = host_of(registry)
    if (address := parse_address(host)) is not None:
        return not is_public(address)
    labels = host.split(".")
    if len(labels) < 2 or "" in labels or _is_number(labels[-1]):
        return True  # relative to the search domain, or not a name
    return labels[-1] in _INTERNAL or ".".join(labels[-2:]) in _INTERNAL


def parse_address(host: str) -> Address | None:
    """Parse an address as resolvers do, IPv4 also in short, octal and hexadecimal forms; null: a name."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        pass
    return _as_inet_aton(host.split("."))


def _as_inet_aton(labels: Sequence[str]) -> IPv4Address | None:
    """`127.1`, `0x7f.1`, `017700000001`, `2130706433`: the last number fills the remaining bytes."""
    numbers = [number for label in labels if (number := _number(label)) is not None]
    if len(numbers) < len(labels) or len(numbers) > 4:
        return None
    *first, last = numbers
    if any(number > 255 for number in first) or last >= 256 ** (4 - len(first)):
        return None
    return IPv4Address(int.from_bytes([*first, 0, 0, 0, 0][:4]) | last)


def _number(label: str) -> int | None:
    if not label.isascii() or "_" in label:
        return None
    base = 16 if label.startswith("0x") else 8 if label.startswith("0") else 10
    digits = label.removeprefix("0x") if base == 16 else label
    if not digits or not all(character in "0123456789abcdef" for character in digits):
        return None
    try:
        return int(digits, base)
    except ValueError:
        return None


def _is_number(label: str) -> bool:
    """Whether a label is a number. No top-level domain is."""
    return label.isdigit() or _number(label) is not None


def is_public(address: Address) -> bool:
    """Whether the address, and each IPv4 address embedded in it, is on the public internet."""
    if address in _METADATA or address.is_multicast or not address.is_global:
        return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return all(map(is_public, _embedded(address)))


def _embedded(address: Address) -> Iterable[IPv4Address]:
    """IPv4 addresses that a packet to this IPv6 address may reach."""
    if isinstance(address, IPv4Address):
        return []
    if address in _NAT64:
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    teredo = address.teredo or ()
    return [each for each in (address.ipv4_mapped, address.sixtofour, *teredo) if each is not None]


def is_loopback(host: str) -> bool:
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


def parse_listed(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list; raise ValueError for an entry that is not a host."""
    listed = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for part in listed:
        if any(character in part for character in "/@ ") or "*" in part.removeprefix("*."):
            raise ValueError(f"{part} is not a registry: write host, host:port or *.domain")
    return listed


def _matches(pattern: str, registry: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in {registry, host} and bool(host)


def internal_addresses(addresses: Collection[Address]) -> list[Address]:
    """The addresses that are not on the public internet."""
    return [address for address in addresses if not is_public(address)]
