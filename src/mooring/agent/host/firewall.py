"""Firewall rules that block containers from other projects, the node and cloud metadata (R10).

    FORWARD ─> DOCKER-USER ─> MOORING-FORWARD   other projects, link-local (cloud metadata), management,
                                                the underlay of groups' networks
    INPUT ──────────────────> MOORING-INPUT     the node itself, at any of its addresses

The rules match the name of the bridge that a packet comes from, so they do not change with the projects.
Replies are allowed: published ports work, also for clients that containers may not connect to.

On each node, the overlays of all groups share one bridge to the outside, the gateway.
"""

import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from mooring.agent.docker.create import BRIDGE_PREFIX
from mooring_client.schemas.states import Reason

Network = IPv4Network | IPv6Network

FORWARD_CHAIN: Final = "MOORING-FORWARD"
INPUT_CHAIN: Final = "MOORING-INPUT"
DOCKER_CHAIN: Final = "DOCKER-USER"
# Where clouds serve a machine's credentials. Link-local IPv6 addresses are not routed, so none is listed.
METADATA: Final[Mapping[str, str]] = {
    "169.254.0.0/16": "AWS, Google Cloud, Azure, Oracle, Tencent and most others",
    "168.63.129.16/32": "Azure's wire server",
    "100.100.100.200/32": "Alibaba Cloud",
    "192.0.0.192/32": "Oracle Cloud",
    "fd00:ec2::254/128": "AWS",
    "fd20:ce::254/128": "Google Cloud",
    "fd00:c1::a9fe:a9fe/128": "Oracle Cloud",
    "fd00:42::42/128": "Scaleway",
}
# Azure's name server has the same address as its metadata.
_NAME_SERVER: Final = "168.63.129.16/32"

# VXLAN has no authentication: a node accepts any packet to this port as one of the overlay.
VXLAN_PORT: Final = 4789

_BRIDGES: Final = f"{BRIDGE_PREFIX}+"
_REPLIES: Final = "-m conntrack --ctstate RELATED,ESTABLISHED --ctdir REPLY -j RETURN"
_NEIGHBOURS: Final = [
    f"-p ipv6-icmp -m icmp6 --icmpv6-type {kind} -j RETURN"
    for kind in ("neighbour-solicitation", "neighbour-advertisement")
]
_PROGRAMS: Final = {4: "iptables", 6: "ip6tables"}
# The kernel has two packet filters. Mooring must use the one that Docker uses.
_VARIANTS: Final = ("", "-nft", "-legacy")
_SYSTEM_PATH: Final = "/usr/sbin:/sbin:/usr/bin:/bin"
_TIMEOUT_S: Final = 10
_LOCK_WAIT_S: Final = "5"
_TRIES: Final = 2

log = logging.getLogger(__name__)


class FirewallUnavailable(Exception):
    """The rules cannot be set on this machine; the text has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class _RuleInput:
    management: frozenset[Network]
    gateways: tuple[str, ...]


def forward_rules(version: int, management: Iterable[Network], gateways: Collection[str] = ()) -> list[str]:
    """Return the iptables rules, without `-A`, for packets that this machine forwards from containers.

    Args:
        gateways: bridges that groups of different projects share, which must not connect to each other there.
    """
    blocked = [
        *(network for network in METADATA if ip_network(network).version == version),
        *(str(network) for network in management if network.version == version),
    ]
    dns = [f"-d {_NAME_SERVER} -p {name} -m {name} --dport 53 -j RETURN" for name in ("udp", "tcp")]
    bridges = (_BRIDGES, *gateways)
    sources = [f"-i {bridge}" for bridge in bridges]
    return [
        # Between two bridges. Traffic within a project's bridge is not routed.
        f"-i {_BRIDGES} -o {_BRIDGES} -m physdev ! --physdev-is-bridged -j DROP",
        *(f"-i {a} -o {b} -j DROP" for a in bridges for b in bridges if a in gateways or b in gateways),
        *(f"{source} -p udp -m udp --dport {VXLAN_PORT} -j DROP" for source in sources),
        *(f"{source} {_REPLIES}" for source in sources),
        *(f"{source} {rule}" for source in sources for rule in (dns if version == 4 else ())),
        *(f"{source} -d {network} -j DROP" for source in sources for network in blocked),
    ]


def input_rules(version: int, gateways: Collection[str] = ()) -> list[str]:
    """Return the rules for packets to this machine: only replies. Containers have their own name server."""
    allowed = [_REPLIES, *(_NEIGHBOURS if version == 6 else ())]
    return [f"-i {bridge} {rule}" for bridge in (_BRIDGES, *gateways) for rule in (*allowed, "-j DROP")]


def restore_script(
    version: int,
    listing: Sequence[str],
    management: Iterable[Network],
    gateways: Collection[str] = (),
) -> str:
    """Return the input of `iptables-restore --noflush`, which sets both chains and their jumps atomically.

    Args:
        listing: the current output of `iptables -S`; existing jumps are moved to the first position.
    """
    lines = ["*filter", f":{FORWARD_CHAIN} - [0:0]", f":{INPUT_CHAIN} - [0:0]"]
    lines += [f"-A {FORWARD_CHAIN} {rule}" for rule in forward_rules(version, management, gateways)]
    lines += [f"-A {INPUT_CHAIN} {rule}" for rule in input_rules(version, gateways)]
    for chain, target in _jumps(listing):
        lines += [f"-D {chain} -j {target}"] * listing.count(f"-A {chain} -j {target}")
        lines += [f"-I {chain} 1 -j {target}"]
    if _has_docker_chain(listing) and f"-A FORWARD -j {DOCKER_CHAIN}" not in listing:
        # Another program removed it; Docker adds it again only at its next start.
        lines += [f"-I FORWARD 1 -j {DOCKER_CHAIN}"]
    return "\n".join([*lines, "COMMIT", ""])


class Firewall:
    """The rules on one machine. Thread-safe.

    Args:
        management: returns further networks that containers must not reach.
        enter: the command prefix that enters Docker's network namespace, if it is not the agent's.
        program_path: the search path for iptables, by default PATH and the system's folders.
    """

    def __init__(
        self,
        management: Callable[[], Collection[Network]] = tuple,
        *,
        enter: Sequence[str] = (),
        program_path: str | None = None,
    ) -> None:
        self._management, self._enter, self._program_path = management, tuple(enter), program_path
        self._lock = threading.Lock()
        self._set: dict[int, tuple[_RuleInput, list[str]]] = {}  # per IP version: input, and listed rules

    def ensure_rules(self, bridges: Collection[str]) -> None:
        """Restore missing or changed rules. Raises FirewallUnavailable.

        Args:
            bridges: the bridges of Mooring's networks, and the gateway. Docker uses the packet filter whose
                rules name all of them.
        """
        with self._lock:
            variant = self._variant(bridges)
            gateways = tuple(sorted(bridge for bridge in bridges if not bridge.startswith(BRIDGE_PREFIX)))
            wanted = _RuleInput(frozenset(self._management()), gateways)
            for version in self.ip_versions():
                self._ensure(version, variant, wanted)

    def check(self, bridges: Collection[str] = ()) -> bool:
        """Return whether the rules are active. Raises FirewallUnavailable: they cannot be set."""
        variant = self._variant(bridges)
        listings = [self._listing(version, variant) for version in self.ip_versions()]
        return all(_is_jumped_to(listing) and _rules(listing) for listing in listings)

    @staticmethod
    def ip_versions() -> list[int]:
        """Return the IP versions that the kernel supports."""
        return [4, 6] if Path("/proc/net/if_inet6").exists() else [4]

    def listing(self, version: int, bridges: Collection[str]) -> list[str]:
        """Return the output of `iptables -S` for Docker's packet filter. Raises FirewallUnavailable."""
        return self._listing(version, self._variant(bridges))

    def restore(self, version: int, script: str, bridges: Collection[str]) -> None:
        """Apply `iptables-restore --noflush` to Docker's packet filter. Raises FirewallUnavailable."""
        self._restore(version, script, self._variant(bridges))

    def _ensure(self, version: int, variant: str, wanted: _RuleInput) -> None:
        for tries_left in reversed(range(_TRIES)):
            listing = self._listing(version, variant)
            if _is_jumped_to(listing) and self._set.get(version) == (wanted, _rules(listing)):
                return
            management = sorted(wanted.management, key=str)
            script = restore_script(version, listing, management, wanted.gateways)
            try:
                self._restore(version, script, variant)
            except FirewallUnavailable:
                if not tries_left:
                    raise
                continue  # another program changed a jump meanwhile
            self._set[version] = (wanted, _rules(self._listing(version, variant)))
            log.info("restored the rules of %s", _PROGRAMS[version])
            return

    def _variant(self, bridges: Collection[str]) -> str:
        """Return the suffix of the iptables program that has Docker's rules."""
        for variant in _VARIANTS:
            try:
                listing = self._listing(4, variant)
            except FirewallUnavailable:
                if not variant:  # the machine's default; the other two are often not installed
                    raise
                continue
            words = {word for line in listing for word in line.split()}
            if _has_docker_chain(listing) and words.issuperset(bridges):
                return variant
        raise FirewallUnavailable(
            "Docker's rules are not in this machine's iptables: run the agent in Docker's network namespace, "
            'remove "iptables": false and "firewall-backend": "nftables" from /etc/docker/daemon.json, and '
            "restart Docker if its rules were flushed"
        )

    def _restore(self, version: int, script: str, variant: str) -> None:
        self._run([f"{_PROGRAMS[version]}{variant}-restore", "-w", _LOCK_WAIT_S, "--noflush"], script)

    def _listing(self, version: int, variant: str) -> list[str]:
        return self._run([f"{_PROGRAMS[version]}{variant}", "-w", _LOCK_WAIT_S, "-S"]).splitlines()

    def _which(self, program: str) -> str | None:
        if path := self._program_path:
            return shutil.which(program, path=path)
        return shutil.which(program) or shutil.which(program, path=_SYSTEM_PATH)

    def _run(self, argv: list[str], stdin: str = "") -> str:
        program = self._which(argv[0])
        if program is None:
            raise FirewallUnavailable(f"{argv[0]} was not found: install the package iptables")
        try:
            done = subprocess.run(  # noqa: S603 - a fixed name, fixed arguments
                [*self._enter, program, *argv[1:]],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise FirewallUnavailable(f"cannot run {argv[0]}: {error}") from error
        if done.returncode:
            output = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            remedy = "run the agent as root (in a container: with NET_ADMIN, on the host's network)"
            raise FirewallUnavailable(f"{argv[0]} failed, {remedy}: {output[:200]}")
        return done.stdout


class Isolation:
    """Sets the rules. If that fails, logs a warning, and blocks all starts if isolation is required."""

    def __init__(self, firewall: Firewall, *, required: bool) -> None:
        self._firewall, self._required = firewall, required
        self._logged: str | None = None

    def problem(self, bridges: Collection[str]) -> Reason | None:
        """Restore missing rules. Return why nothing may start on this node; None: instances may."""
        why = None
        try:
            self._firewall.ensure_rules(bridges)
        except FirewallUnavailable as error:
            why = str(error)
        if why is not None and why != self._logged:
            log.warning("containers of this node can reach the node itself and cloud metadata: %s", why)
        self._logged = why
        if why is None or not self._required:
            return None
        return Reason(code="network_isolation_unavailable", message=f"{why}; see `mooring doctor`")


def management_addresses(
    given: Collection[Network] | None, server_url: str
) -> Callable[[], Collection[Network]]:
    """Return a function for the configured addresses, by default those of the control plane.

    The rules block all ports of these addresses, for example a database and sshd beside the control plane.
    A loopback address is omitted, since no container can reach it.
    """
    if given is not None:
        return lambda: given

    @cache  # does not cache a failed lookup, which raises
    def resolved(host: str) -> frozenset[Network]:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = {ip_address(str(answer[4][0]).split("%", maxsplit=1)[0]) for answer in answers}
        return frozenset(ip_network(address) for address in found if not address.is_loopback)

    def addresses() -> Collection[Network]:
        host = urlsplit(server_url).hostname
        try:
            return resolved(host) if host else frozenset()
        except OSError as error:
            log.warning("containers are not blocked from %s yet, it cannot be resolved: %s", host, error)
            return frozenset()

    return addresses


def _jumps(listing: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs: one of the machine's chains, and the chain of Mooring that it must jump to.

    Docker has its chain for IPv6 only if it makes IPv6 rules.
    """
    return [
        ("INPUT", INPUT_CHAIN),
        (DOCKER_CHAIN if _has_docker_chain(listing) else "FORWARD", FORWARD_CHAIN),
    ]


def _is_jumped_to(listing: Sequence[str]) -> bool:
    """Return whether the jumps are first in their chains: after an accepting rule they have no effect."""
    reached = not _has_docker_chain(listing) or f"-A FORWARD -j {DOCKER_CHAIN}" in listing
    return reached and all(
        next((line for line in listing if line.startswith(f"-A {chain} ")), "") == f"-A {chain} -j {target}"
        for chain, target in _jumps(listing)
    )


def _has_docker_chain(listing: Sequence[str]) -> bool:
    return f"-N {DOCKER_CHAIN}" in listing


def _rules(listing: Sequence[str]) -> list[str]:
    return [line for line in listing if line.startswith((f"-A {FORWARD_CHAIN} ", f"-A {INPUT_CHAIN} "))]
