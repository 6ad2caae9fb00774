"""R10 on the node: what containers may not reach, as rules of the kernel's packet filter.

    FORWARD ─> DOCKER-USER ─> MOORING-FORWARD   other projects, link-local (cloud metadata), management,
                                                the insides of groups' networks
    INPUT ──────────────────> MOORING-INPUT     the node itself, by whichever of its addresses

The rules go by the name of the bridge that a packet comes in through: they stay the same as projects come and
go. What somebody outside began is answered: published ports work, also for whom containers may not call.

Members of groups on an overlay leave a node by one bridge for all of them, which has a name of its own.
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
from mooring.core.instance.state import Reason

Network = IPv4Network | IPv6Network

FORWARD_CHAIN: Final = "MOORING-FORWARD"
INPUT_CHAIN: Final = "MOORING-INPUT"
DOCKER_CHAIN: Final = "DOCKER-USER"
# Where clouds tell a machine its credentials. Link-local IPv6 addresses are not routed, so none is listed.
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
# Azure's machines resolve names at the address that also gives out their certificates.
_NAME_SERVER: Final = "168.63.129.16/32"

# A node takes what comes to this port for a packet of the overlay that it says it is of, whoever sent it.
VXLAN_PORT: Final = 4789

_OURS: Final = f"{BRIDGE_PREFIX}+"
_ANSWERS: Final = "-m conntrack --ctstate RELATED,ESTABLISHED --ctdir REPLY -j RETURN"
_NEIGHBOURS: Final = [
    f"-p ipv6-icmp -m icmp6 --icmpv6-type {kind} -j RETURN"
    for kind in ("neighbour-solicitation", "neighbour-advertisement")
]
_PROGRAMS: Final = {4: "iptables", 6: "ip6tables"}
# Of the kernel's two packet filters, Docker and we must use the same one.
_VARIANTS: Final = ("", "-nft", "-legacy")
_MORE_PATH: Final = "/usr/sbin:/sbin:/usr/bin:/bin"
_TIMEOUT_S: Final = 10
_LOCK_WAIT_S: Final = "5"
_TRIES: Final = 2

log = logging.getLogger(__name__)


class FirewallUnavailable(Exception):
    """The rules cannot be made here; the text says why and what mends it."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the rules are made from."""

    management: frozenset[Network]
    gateways: tuple[str, ...]


def forward_rules(version: int, management: Iterable[Network], gateways: Collection[str] = ()) -> list[str]:
    """What containers may reach through this machine; one family's, in iptables' words without `-A`.

    Args:
        gateways: bridges that members of all projects' groups share; nobody is meant to meet there.
    """
    barred = [
        *(network for network in METADATA if ip_network(network).version == version),
        *(str(network) for network in management if network.version == version),
    ]
    names = [
        f"-d {_NAME_SERVER} -p {protocol} -m {protocol} --dport 53 -j RETURN" for protocol in ("udp", "tcp")
    ]
    sources = [f"-i {bridge}" for bridge in (_OURS, *gateways)]
    return [
        # Between two bridges. Members of one project meet on theirs, which is not routed.
        f"-i {_OURS} -o {_OURS} -m physdev ! --physdev-is-bridged -j DROP",
        *(
            f"-i {one} -o {other} -j DROP"
            for gateway in gateways
            for one, other in ((_OURS, gateway), (gateway, _OURS), *((gateway, each) for each in gateways))
        ),
        *(f"{source} -p udp -m udp --dport {VXLAN_PORT} -j DROP" for source in sources),
        *(f"{source} {_ANSWERS}" for source in sources),
        *(f"{source} {rule}" for source in sources for rule in (names if version == 4 else ())),
        *(f"{source} -d {network} -j DROP" for source in sources for network in barred),
    ]


def input_rules(version: int, gateways: Collection[str] = ()) -> list[str]:
    """What containers may reach of this machine: nothing. Docker's name server is inside theirs."""
    allowed = [_ANSWERS, *(_NEIGHBOURS if version == 6 else ())]
    return [f"-i {bridge} {rule}" for bridge in (_OURS, *gateways) for rule in (*allowed, "-j DROP")]


def restore_script(
    version: int,
    listing: Sequence[str],
    management: Iterable[Network],
    gateways: Collection[str] = (),
) -> str:
    """Input of `iptables-restore --noflush`, which sets both chains and the jumps to them at one stroke.

    Args:
        listing: what `iptables -S` says now; jumps that are there are moved to where they must be.
    """
    lines = ["*filter", f":{FORWARD_CHAIN} - [0:0]", f":{INPUT_CHAIN} - [0:0]"]
    lines += [f"-A {FORWARD_CHAIN} {rule}" for rule in forward_rules(version, management, gateways)]
    lines += [f"-A {INPUT_CHAIN} {rule}" for rule in input_rules(version, gateways)]
    for chain, target in _jumps(listing):
        lines += [f"-D {chain} -j {target}"] * listing.count(f"-A {chain} -j {target}")
        lines += [f"-I {chain} 1 -j {target}"]
    if _has_docker_chain(listing) and f"-A FORWARD -j {DOCKER_CHAIN}" not in listing:
        # Somebody flushed it; Docker would put it back at its next start.
        lines += [f"-I FORWARD 1 -j {DOCKER_CHAIN}"]
    return "\n".join([*lines, "COMMIT", ""])


class Firewall:
    """The rules on one machine. Every method may be called from any thread.

    Args:
        management: the addresses that containers must not reach.
        enter: what runs a program where Docker's rules are, if that is not here.
        program_path: where iptables is looked for, by default PATH and the system's folders.
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
        self._set: dict[int, tuple[_Wanted, list[str]]] = {}  # per family: asked for, and listed

    def stand(self, bridges: Collection[str]) -> None:
        """Make the rules where they are not as they should be: at the start, and after others' flushes.

        Args:
            bridges: of our networks, and of Docker's for all overlays. Docker's own rules name each; where
                they do not, those are not the rules that the containers' packets meet.

        Raises:
            FirewallUnavailable
        """
        with self._lock:
            variant = self._variant(bridges)
            gateways = tuple(sorted(bridge for bridge in bridges if not bridge.startswith(BRIDGE_PREFIX)))
            wanted = _Wanted(frozenset(self._management()), gateways)
            for version in _families():
                self._stand(version, variant, wanted)

    def check(self, bridges: Collection[str] = ()) -> bool:
        """Whether rules of ours are in force now; changes nothing.

        Raises:
            FirewallUnavailable: they cannot be made either.
        """
        variant = self._variant(bridges)
        listings = [self._listing(version, variant) for version in _families()]
        return all(_is_jumped_to(listing) and _rules(listing) for listing in listings)

    @staticmethod
    def families() -> list[int]:
        """The versions of IP that this machine speaks."""
        return _families()

    def listing(self, version: int, bridges: Collection[str]) -> list[str]:
        """What `iptables -S` says of the packet filter that Docker uses. Raises FirewallUnavailable."""
        return self._listing(version, self._variant(bridges))

    def restore(self, version: int, script: str, bridges: Collection[str]) -> None:
        """Feed `iptables-restore --noflush` of the same packet filter. Raises FirewallUnavailable."""
        program = f"{_PROGRAMS[version]}{self._variant(bridges)}-restore"
        self._run([program, "-w", _LOCK_WAIT_S, "--noflush"], script)

    def _stand(self, version: int, variant: str, wanted: _Wanted) -> None:
        for tries_left in reversed(range(_TRIES)):
            listing = self._listing(version, variant)
            if _is_jumped_to(listing) and self._set.get(version) == (wanted, _rules(listing)):
                return
            management = sorted(wanted.management, key=str)
            script = restore_script(version, listing, management, wanted.gateways)
            try:
                self._run([f"{_PROGRAMS[version]}{variant}-restore", "-w", _LOCK_WAIT_S, "--noflush"], script)
            except FirewallUnavailable:
                if not tries_left:
                    raise
                continue  # somebody else changed a jump between our look and our change
            self._set[version] = (wanted, _rules(self._listing(version, variant)))
            log.info("the rules of %s were made", _PROGRAMS[version])
            return

    def _variant(self, bridges: Collection[str]) -> str:
        """The iptables that Docker's rules are in."""
        for variant in _VARIANTS:
            try:
                listing = self._listing(4, variant)
            except FirewallUnavailable:
                if not variant:  # the one that this machine uses; of the others one is often not there
                    raise
                continue
            words = {word for line in listing for word in line.split()}
            if _has_docker_chain(listing) and words.issuperset(bridges):
                return variant
        raise FirewallUnavailable(
            "Docker's own rules are not in this machine's iptables: run the agent in the same network "
            'namespace as Docker, take "iptables": false and "firewall-backend": "nftables" out of '
            "/etc/docker/daemon.json, and restart Docker if its rules were flushed"
        )

    def _listing(self, version: int, variant: str) -> list[str]:
        return self._run([f"{_PROGRAMS[version]}{variant}", "-w", _LOCK_WAIT_S, "-S"]).splitlines()

    def _which(self, program: str) -> str | None:
        path = self._program_path
        return shutil.which(program, path=path) if path else shutil.which(program) or _system_program(program)

    def _run(self, argv: list[str], feed: str = "") -> str:
        program = self._which(argv[0])
        if program is None:
            raise FirewallUnavailable(f"{argv[0]} was not found: install the package iptables")
        try:
            done = subprocess.run(  # noqa: S603 - a fixed name, fixed arguments
                [*self._enter, program, *argv[1:]],
                input=feed,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise FirewallUnavailable(f"{argv[0]} does not run: {error}") from error
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise FirewallUnavailable(
                f"{argv[0]} failed, run the agent as root (in a container: with NET_ADMIN, on the host's "
                f"network): {said[:200]}"
            )
        return done.stdout


class Isolation:
    """What follows where the rules cannot be made: nothing may be started, or the log says so."""

    def __init__(self, firewall: Firewall, *, required: bool) -> None:
        self._firewall, self._required = firewall, required
        self._said: str | None = None

    def problem(self, bridges: Collection[str]) -> Reason | None:
        """Make the rules, if they are not there; why nothing may be started on this node without them."""
        try:
            self._firewall.stand(bridges)
        except FirewallUnavailable as error:
            why: str | None = str(error)
        else:
            why = None
        if why is not None and why != self._said:
            log.warning("containers of this node reach the node itself and cloud metadata: %s", why)
        self._said = why
        if why is None or not self._required:
            return None
        return Reason(code="network_isolation_unavailable", message=f"{why}; see `mooring doctor`")


def management_addresses(
    given: Collection[Network] | None, server_url: str
) -> Callable[[], Collection[Network]]:
    """What the operator named, else the control plane's addresses once its name can be resolved.

    All of its ports: beside the API there are its database and its sshd. Nothing for a control plane on
    loopback, which no container reaches.
    """
    if given is not None:
        return lambda: given

    @cache  # of an answer; a failure is tried again
    def resolved(host: str) -> frozenset[Network]:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = {ip_address(str(answer[4][0]).split("%", maxsplit=1)[0]) for answer in answers}
        return frozenset(ip_network(address) for address in found if not address.is_loopback)

    def addresses() -> Collection[Network]:
        host = urlsplit(server_url).hostname
        try:
            return resolved(host) if host else frozenset()
        except OSError as error:
            log.warning("containers are not kept from %s yet, it cannot be resolved: %s", host, error)
            return frozenset()

    return addresses


def _jumps(listing: Sequence[str]) -> list[tuple[str, str]]:
    """From which chain to which of ours; Docker has its chain in IPv6 only where it makes rules there."""
    return [
        ("INPUT", INPUT_CHAIN),
        (DOCKER_CHAIN if _has_docker_chain(listing) else "FORWARD", FORWARD_CHAIN),
    ]


def _is_jumped_to(listing: Sequence[str]) -> bool:
    """First in their chains: after a rule that accepts, ours would never be looked at."""
    reached = not _has_docker_chain(listing) or f"-A FORWARD -j {DOCKER_CHAIN}" in listing
    return reached and all(
        next((line for line in listing if line.startswith(f"-A {chain} ")), "") == f"-A {chain} -j {target}"
        for chain, target in _jumps(listing)
    )


def _has_docker_chain(listing: Sequence[str]) -> bool:
    return f"-N {DOCKER_CHAIN}" in listing


def _rules(listing: Sequence[str]) -> list[str]:
    return [line for line in listing if line.startswith((f"-A {FORWARD_CHAIN} ", f"-A {INPUT_CHAIN} "))]


def _families() -> list[int]:
    """A kernel without IPv6 has nothing to keep anybody from."""
    return [4, 6] if Path("/proc/net/if_inet6").exists() else [4]


def _system_program(program: str) -> str | None:
    return shutil.which(program, path=_MORE_PATH)
