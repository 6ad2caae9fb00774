"""R10: one bridge network per project and node, created when needed, and removed when it has no container.

Instances of a project find each other by name, through Docker's name server. IPv6 is off. Members of a group
may be on the group's overlay, or on the network of their node, instead of the project's network.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

from mooring.agent.docker.client import Document, Engine, is_gone
from mooring.agent.docker.create import (
    CONTROL_PLANE,
    HOST_NETWORK,
    INSTANCE,
    PROJECT,
    attached_to,
    bridge_name,
    network_name,
)
from mooring.agent.docker.errors import EngineRefused, start_failure
from mooring.agent.docker.overlay import BRIDGE_OPTION, Overlays, waiting
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.instance.state import Reason
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment

_NO_RANGE_LEFT: Final = "network_unavailable"
_CONFLICTS: Final = {403, 409}  # the interface or the name exists
_APPEARS_WITHIN_S: Final = 5.0
_POLL_S: Final = 0.05

log = logging.getLogger(__name__)


# Applies the rules to these bridges. Returns why nothing may start if it cannot.
Isolate = Callable[[Collection[str]], Reason | None]


class Attachments:
    """The networks of containers, with their firewall rules. May be called from any thread.

    Args:
        swarm: returns the swarm of the engine.
        isolate: applies the firewall rules to bridges, or returns why it cannot.
    """

    def __init__(self, engine: Engine, swarm: Callable[[], SwarmFacts | None], isolate: Isolate) -> None:
        self.networks, self.overlays = Networks(engine), Overlays(engine)
        self._swarm, self._isolate = swarm, isolate
        # By this process: a reboot removes the rules, but not the networks.
        self._covered: frozenset[str] | None = None

    def guard(self, control_plane_id: str | None) -> Reason | None:
        """Apply the rules to all bridges. Return why nothing may start if that fails."""
        bridges = set() if control_plane_id is None else set(self.networks.bridges(control_plane_id))
        if self._swarm() is not None and (gateway := self.overlays.gateway()) is not None:
            bridges.add(gateway)
        reason = self._isolate(sorted(bridges))
        self._covered = frozenset(bridges) if reason is None else None
        return reason

    @contextmanager
    def of(self, assignment: Assignment, control_plane_id: str) -> Iterator[None]:
        """Create the network of a container, if this node has to, and apply the rules to it.

        Raises:
            StartRefused: the network cannot be created.
            RuntimeUnavailable: try again. If rules are missing, the next report of the node says why.
        """
        where = attached_to(assignment)
        if where == HOST_NETWORK:  # the rules do not apply to it
            yield
        elif where == network_name(assignment.project_id):
            with self.networks.held(assignment.project_id, control_plane_id) as is_new:
                if is_new or self._covered is None:
                    self._cover(control_plane_id)
                yield
        else:
            if self._swarm() is None:
                raise StartDelayed(waiting("its group's network needs this node's Docker to be in a swarm"))
            self.overlays.require_own(where, control_plane_id)
            if self.overlays.ensure_gateway() not in (self._covered or ()):
                self._cover(control_plane_id)
            yield

    def _cover(self, control_plane_id: str) -> None:
        if (reason := self.guard(control_plane_id)) is not None:
            raise RuntimeUnavailable(reason.message)


class Networks:
    """The networks of one control plane's projects on one engine. May be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changing = threading.Lock()  # while networks are created or removed
        self._counting = threading.Lock()
        self._held: Counter[str] = Counter()  # containers being created, by project

    @contextmanager
    def held(self, project_id: str, control_plane_id: str) -> Iterator[bool]:
        """Create the project's network if needed, and keep it while a container is created on it.

        Yields:
            Whether this call created it.

        Raises:
            StartRefused: it cannot be created.
            RuntimeUnavailable: the engine does not answer.
        """
        with self._counting:
            self._held[project_id] += 1
        try:
            with self._changing:
                is_new = self._ensure(project_id, control_plane_id)
            yield is_new
        finally:
            with self._counting:
                self._held[project_id] -= 1

    def bridges(self, control_plane_id: str) -> list[str]:
        """Return the interfaces of all project networks of this control plane."""
        return [network["Options"][BRIDGE_OPTION] for network in self._ours(control_plane_id)]

    def sweep(self, control_plane_id: str) -> None:
        """Remove networks whose project has no container, running or stopped.

        Does nothing while another thread creates a network: that may take long, and the caller must not wait.
        """
        if self._changing.acquire(blocking=False):
            try:
                self._sweep(control_plane_id)
            finally:
                self._changing.release()

    def _sweep(self, control_plane_id: str) -> None:
        networks = self._ours(control_plane_id)
        with self._counting:
            idle = [network for network in networks if not self._held[network["Labels"][PROJECT]]]
        if not idle:
            return
        # Listed after the count: a start that no longer counts has its container in this list.
        in_use = {container["Labels"].get(PROJECT) for container in self._engine.containers(INSTANCE)}
        for network in idle:
            if network["Labels"][PROJECT] not in in_use:
                self._remove(network)

    def _remove(self, network: Document) -> None:
        try:
            self._engine.remove_network(network["Id"])
        except EngineRefused as refusal:
            if not is_gone(refusal):  # a foreign container is attached
                log.warning("network %s is not removed: %s", network["Name"], refusal.message)
        else:
            log.info("removed network %s: the node has no instance of its project", network["Name"])

    def _ours(self, control_plane_id: str) -> list[Document]:
        networks = self._engine.networks(f"{CONTROL_PLANE}={control_plane_id}")
        return [
            network
            for network in networks
            if PROJECT in network["Labels"] and BRIDGE_OPTION in (network["Options"] or {})
        ]

    def _ensure(self, project_id: str, control_plane_id: str) -> bool:
        if self._exists(project_id, control_plane_id):
            return False
        config = _config(project_id, control_plane_id)
        try:
            self._engine.create_network(config)
        except EngineRefused as refusal:
            if start_failure(refusal.message, []).code == _NO_RANGE_LEFT:
                self._sweep(control_plane_id)
                self._create_again(config)
            elif refusal.status not in _CONFLICTS:
                raise _unavailable(f"Docker refused to make one: {refusal.message}") from refusal
            elif not self._appears(project_id, control_plane_id):
                raise  # the outcome is unknown: try again
        return True

    def _appears(self, project_id: str, control_plane_id: str) -> bool:
        """Wait for a network that another call is creating: its interface exists before its name does."""
        until = time.monotonic() + _APPEARS_WITHIN_S
        while not (there := self._exists(project_id, control_plane_id)) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return there

    def _create_again(self, config: Document) -> None:
        try:
            self._engine.create_network(config)
        except EngineRefused as refusal:
            raise StartRefused(start_failure(refusal.message, [])) from refusal

    def _exists(self, project_id: str, control_plane_id: str) -> bool:
        """Return whether the project's network exists.

        Raises:
            StartRefused: a foreign network has its name.
        """
        name = network_name(project_id)
        try:
            found = self._engine.network(name)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return False
            raise
        labels, options = found["Labels"] or {}, found["Options"] or {}
        bridge = bridge_name(project_id, control_plane_id)
        # The engine also finds a network by the beginning of its id.
        if found["Name"] != name:
            return False
        # Labels can be set by hand. The rules apply only to a network with this bridge.
        if labels.get(CONTROL_PLANE) != control_plane_id or options.get(BRIDGE_OPTION) != bridge:
            raise _unavailable(
                f"the name {name} is taken on the node, by a network that is not this control plane's"
            )
        return True


def _config(project_id: str, control_plane_id: str) -> Document:
    return {
        "Name": network_name(project_id),
        "CheckDuplicate": True,
        "Driver": "bridge",
        "Internal": False,
        "Attachable": False,
        "EnableIPv6": False,
        "Options": {BRIDGE_OPTION: bridge_name(project_id, control_plane_id)},
        "Labels": {CONTROL_PLANE: control_plane_id, PROJECT: project_id},
    }


def _unavailable(why: str) -> StartRefused:
    return StartRefused(
        Reason(code="network_unavailable", message=f"the node has no network for this project: {why}")
    )
