"""Networks of instance groups that span nodes: Docker Swarm's attachable overlays.

    managers of the swarm    create the networks that the control plane lists, and remove the others
    every node               attaches members; a worker sees a network only after a manager has created it

Members reach other networks through `docker_gwbridge`, the bridge that all overlays of a node share.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from mooring.agent.decide.reconcile import overlay_changes
from mooring.agent.docker.client import Document, Engine, find_network, is_gone
from mooring.agent.docker.create import CONTROL_PLANE_LABEL, GROUP_LABEL, PROJECT_LABEL
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.runtime import Cancelled, Progress, RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import OverlayNetwork
from mooring_client.schemas.states import Reason

GATEWAY: Final = "docker_gwbridge"
BRIDGE_OPTION: Final = "com.docker.network.bridge.name"
_ICC_OPTION: Final = "com.docker.network.bridge.enable_icc"
# The errors of a manager, and of an engine outside a swarm, for a network that does not exist yet.
_NO_NETWORK: Final = re.compile(r"could not attach to network|network \S+ not found", re.IGNORECASE)
WAIT_S: Final = 10.0  # how long a start waits; after that, it is retried with a back-off
_POLL_S: Final = 0.25

log = logging.getLogger(__name__)


class Overlays:
    """The overlays of one control plane's groups, as one engine sees them. May be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def keep(self, wanted: Iterable[OverlayNetwork], control_plane_id: str) -> None:
        """Create missing networks, and remove unwanted ones that are not in use. For managers of the swarm.

        Raises:
            RuntimeUnavailable: some network could not be created; all were tried.
        """
        changes = overlay_changes(wanted, self._names(control_plane_id))
        missing = [overlay.name for overlay in changes.create if not self._create(overlay, control_plane_id)]
        for name in changes.remove:
            self._remove(name)
        if missing:
            raise RuntimeUnavailable(f"not created: {', '.join(missing)}")

    def require_own(self, name: str, control_plane_id: str) -> None:
        """Raises StartRefused: the engine has a foreign network of this name."""
        found = find_network(self._engine, name)
        if found is not None and not _is_ours(found, control_plane_id):
            message = f"the name {name} is taken on the node, by a network that is not this control plane's"
            raise StartRefused(Reason(code="network_unavailable", message=message))

    def gateway(self) -> str | None:
        """Return the interface of docker_gwbridge; None before it exists."""
        found = find_network(self._engine, GATEWAY)
        if found is None:
            return None
        return str((found["Options"] or {}).get(BRIDGE_OPTION) or f"br-{found['Id'][:12]}")

    def ensure_gateway(self) -> str:
        """Create docker_gwbridge if needed, with Docker's options, and return its interface.

        Raises:
            StartRefused: instances of different projects could reach each other on it.
        """
        if find_network(self._engine, GATEWAY) is None:
            self._create_gateway()
        found = self._engine.network(GATEWAY)
        if (found["Options"] or {}).get(_ICC_OPTION) != "false":
            message = (
                f"instances of all projects can reach each other on the node's {GATEWAY}; its operator must "
                f"create it with --opt {_ICC_OPTION}=false"
            )
            raise StartRefused(Reason(code="network_unavailable", message=message))
        return str(self.gateway())

    def _create_gateway(self) -> None:
        options = {
            BRIDGE_OPTION: GATEWAY,
            _ICC_OPTION: "false",
            "com.docker.network.bridge.enable_ip_masquerade": "true",
        }
        config = {"Name": GATEWAY, "CheckDuplicate": True, "Driver": "bridge", "Options": options}
        try:
            self._engine.create_network(config)
        except EngineRefused:
            if find_network(self._engine, GATEWAY) is None:
                raise

    def _names(self, control_plane_id: str) -> list[str]:
        listed = self._engine.networks(f"{CONTROL_PLANE_LABEL}={control_plane_id}")
        return [network["Name"] for network in listed if _is_ours(network, control_plane_id)]

    def _create(self, overlay: OverlayNetwork, control_plane_id: str) -> bool:
        """Return whether the network exists. Every manager of the swarm tries to create it; one succeeds."""
        try:
            self._engine.create_network(overlay_config(overlay, control_plane_id))
        except EngineRefused as refusal:
            found = find_network(self._engine, overlay.name)
            if found is None or not _is_ours(found, control_plane_id):
                log.warning("network %s cannot be created: %s", overlay.name, refusal.message)
                return False
        else:
            log.info("created network %s for group %s", overlay.name, overlay.group_id)
        return True

    def _remove(self, name: str) -> None:
        try:
            self._engine.remove_network(name)
        except EngineRefused as refusal:
            if not is_gone(refusal):  # in use on some node: retried later
                log.debug("network %s is not removed: %s", name, refusal.message)
        else:
            log.info("removed network %s: its group was deleted", name)


def overlay_config(overlay: OverlayNetwork, control_plane_id: str) -> Document:
    return {
        "Name": overlay.name,
        "CheckDuplicate": True,
        "Driver": "overlay",
        "Scope": "swarm",
        "Attachable": True,
        "Internal": False,
        "EnableIPv6": False,
        "Options": {"encrypted": ""} if overlay.encrypted else {},
        "Labels": {
            CONTROL_PLANE_LABEL: control_plane_id,
            GROUP_LABEL: overlay.group_id,
            PROJECT_LABEL: overlay.project_id,
        },
    }


def start_with_network(
    start: Callable[[], object], name: str, progress: Progress, cancelled: Cancelled, wait_s: float = WAIT_S
) -> None:
    """Start a container; retry while its network does not exist.

    Raises:
        StartDelayed: the network did not exist within `wait_s`, or until the start was cancelled.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            start()
        except EngineRefused as refusal:
            if not _NO_NETWORK.search(refusal.message):
                raise
        else:
            return
        message = f"the group's network {name} does not exist yet; a manager of the swarm creates it"
        reason = waiting_for_network(message)
        if cancelled() or time.monotonic() > until:
            raise StartDelayed(reason)
        progress(reason)
        time.sleep(_POLL_S)


def waiting_for_network(message: str) -> Reason:
    return Reason(code="waiting_for_network", message=message)


def is_in_swarm(info: Mapping[str, Any]) -> bool:
    """Return whether an engine is in a swarm, from its `docker info`."""
    return bool((info.get("Swarm") or {}).get("LocalNodeState") == "active")


def swarm_of(info: Mapping[str, Any]) -> SwarmFacts | None:
    """Return the swarm of an engine from its `docker info`; None if it is in no swarm or an unknown one."""
    if not is_in_swarm(info):
        return None
    swarm = info["Swarm"]
    # `docker info` has the id only on managers. On workers, the certificate's organization is the id.
    cluster_id = (swarm.get("Cluster") or {}).get("ID") or _organization(certificate_of(info))
    if cluster_id is None:
        return None
    return SwarmFacts(cluster_id=cluster_id, manager=bool(swarm.get("ControlAvailable")))


def certificate_of(info: Mapping[str, Any]) -> Path:
    """Return the path of the engine's certificate in its swarm."""
    return Path(str(info.get("DockerRootDir")), "swarm/certificates/swarm-node.crt")


def _organization(certificate: Path) -> str | None:
    try:
        subject = x509.load_pem_x509_certificate(certificate.read_bytes()).subject
        return str(subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        _warn_once(f"{type(error).__name__}: {error}")
        return None


@cache
def _warn_once(why: str) -> None:
    log.warning("the id of this node's swarm is unknown, so groups have no network that spans nodes: %s", why)


def _is_ours(network: Document, control_plane_id: str) -> bool:
    # The driver is not compared: a swarm sets it some time after it creates the network.
    labels = network["Labels"] or {}
    has_our_labels = labels.get(CONTROL_PLANE_LABEL) == control_plane_id and GROUP_LABEL in labels
    return network["Scope"] == "swarm" and has_our_labels
