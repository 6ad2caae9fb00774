"""Blocks the Docker daemon itself from cloud metadata, with firewall rules for its control group.

    OUTPUT ─> MOORING-DAEMON   rejects TCP to metadata addresses, from sockets of the daemon's control group

The daemon connects to any address in an image's name, a registry's redirect or its token realm, as root and
from the host's network, where the rules for containers do not apply. Matching all of root's packets would
also block the cloud's own agents. DNS stays open: some clouds serve it at the same addresses.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Final

from mooring.agent.host.firewall import METADATA, Firewall, FirewallUnavailable

CHAIN: Final = "MOORING-DAEMON"
_DAEMON: Final = "dockerd"
_UNIFIED: Final = "0::"

log = logging.getLogger(__name__)


def rules(version: int, groups: Collection[str]) -> list[str]:
    """iptables rules without `-A`. They reject with a TCP reset, so that a pull fails at once."""
    return [
        f"-d {network} -p tcp -m tcp ! --dport 53 -m cgroup --path {group} -j REJECT --reject-with tcp-reset"
        for group in sorted(groups)
        for network in METADATA
        if ip_network(network).version == version
    ]


def daemon_groups(proc: Path = Path("/proc"), namespace: str | None = None) -> set[str]:
    """Control groups (v2) of the Docker daemons in this network namespace, without the leading slash.

    A daemon in the root group is omitted: such rules would affect the whole machine.
    """
    here = namespace or _namespace(proc / "self")
    found = (_group(process) for process in _daemons(proc) if _namespace(process) == here)
    return {group for group in found if group}


def _daemons(proc: Path) -> Iterator[Path]:
    for process in proc.glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == _DAEMON:
                yield process
        except OSError:
            continue  # it has ended


def _namespace(process: Path) -> str | None:
    try:
        return str((process / "ns" / "net").readlink())
    except OSError:
        return None


def _group(process: Path) -> str:
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return ""
    path = next((line.removeprefix(_UNIFIED) for line in lines if line.startswith(_UNIFIED)), "/")
    # In a control group namespace, the paths of groups outside it begin with "..".
    return "/".join(part for part in path.split("/") if part not in {"", ".."})


class DaemonGuard:
    """Maintains the rules on one machine, and logs each new problem once.

    Args:
        namespace: the daemon's network namespace, as in `/proc/PID/ns/net`; None: the agent's own.
        every_s: the interval between checks of the rules.
    """

    def __init__(self, firewall: Firewall, namespace: str | None = None, every_s: float = 30.0) -> None:
        self._firewall, self._namespace, self._every_s = firewall, namespace, every_s
        self._lock = threading.Lock()
        self._due_at = 0.0
        self._set: dict[int, tuple[list[str], list[str]]] = {}  # per IP version: rules wanted, rules listed
        self._logged: str | None = None

    def ensure_rules(self, bridges: Collection[str] = ()) -> None:
        """Restore missing rules. Never raises: containers do not depend on them."""
        with self._lock:
            if time.monotonic() < self._due_at:
                return
            self._due_at = time.monotonic() + self._every_s
            self._check(bridges)

    def _check(self, bridges: Collection[str]) -> None:
        try:
            why = self._problem(bridges)
        except FirewallUnavailable as error:
            why = str(error)
        if why is not None and why != self._logged:
            log.warning("the Docker daemon of this node can reach cloud metadata: %s", why)
        self._logged = why

    def _problem(self, bridges: Collection[str]) -> str | None:
        groups = daemon_groups(namespace=self._namespace)
        if not groups:
            return "found no daemon with a control group of its own (cgroup v2, as the agent sees it)"
        for version in self._firewall.ip_versions():
            self._restore(version, rules(version, groups), bridges)
        return None

    def _restore(self, version: int, wanted: list[str], bridges: Collection[str]) -> None:
        listing = self._firewall.listing(version, bridges)
        if _is_first(listing) and self._set.get(version) == (wanted, _rules(listing)):
            return
        jump = f"OUTPUT -j {CHAIN}"
        script = ["*filter", f":{CHAIN} - [0:0]", *(f"-A {CHAIN} {rule}" for rule in wanted)]
        script += [f"-D {jump}"] * listing.count(f"-A {jump}")
        script += [f"-I OUTPUT 1 -j {CHAIN}", "COMMIT", ""]
        self._firewall.restore(version, "\n".join(script), bridges)
        self._set[version] = (wanted, _rules(self._firewall.listing(version, bridges)))


def _is_first(listing: Sequence[str]) -> bool:
    first = next((line for line in listing if line.startswith("-A OUTPUT ")), "")
    return first == f"-A OUTPUT -j {CHAIN}"


def _rules(listing: Sequence[str]) -> list[str]:
    return [line for line in listing if line.startswith(f"-A {CHAIN} ")]
