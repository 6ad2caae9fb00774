"""R10: one bridge network per project and node, made when first needed, removed when nothing is left on it.

Members of a project find one another by the instance's name, in Docker's own name server. IPv6 stays off.
Those of a group may be on its overlay, or on their node's own network, in place of their project's.
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
_CONFLICTS: Final = {403, 409}  # its interface exists, or its name
_APPEARS_WITHIN_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.05

log = logging.getLogger(__name__)


# The bridges that must be covered -> why nothing may be started without the rules.
Isolate = Callable[[Collection[str]], Reason | None]


class Attachments:
    """Where containers are attached, with the rules around it. May be called from any thread.

    Args:
        swarm: the swarm that the engine is in.
        isolate: makes the rules around these bridges, or says why it cannot.
    """

    def __init__(self, engine: Engine, swarm: Callable[[], SwarmFacts | None], isolate: Isolate) -> None:
        self.networks, self.overlays = Networks(engine), Overlays(engine)
        self._swarm, self._isolate = swarm, isolate
        # Yet, in this process: rules do not outlive a reboot, networks do.
        self._covered: frozenset[str] | None = None

    def guard(self, control_plane_id: str | None) -> Reason | None:
        """Why nothing may be started here: containers cannot be kept from what they must not reach."""
        bridges = set() if control_plane_id is None else set(self.networks.bridges(control_plane_id))
        if self._swarm() is not None and (gateway := self.overlays.gateway()) is not None:
            bridges.add(gateway)
        reason = self._isolate(sorted(bridges))
        self._covered = frozenset(bridges) if reason is None else None
        return reason

    @contextmanager
    def of(self, assignment: Assignment, control_plane_id: str) -> Iterator[None]:
        """The network of this container, as far as it is this node's to make, with the rules around it.

        Raises:
            StartRefused: it cannot be had.
            RuntimeUnavailable: to be tried again; if for want of rules, the next look at the node says why.
        """
        where = attached_to(assignment)
        if where == HOST_NETWORK:  # no rule of ours holds there
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
        self._changing = threading.Lock()  # of networks at the engine
        self._counting = threading.Lock()
        self._held: Counter[str] = Counter()  # by project: containers just being made

    @contextmanager
    def held(self, project_id: str, control_plane_id: str) -> Iterator[bool]:
        """The project's network, which is there, and stays, while a container is made on it.

        Yields:
            Whether it was made just now.

        Raises:
            StartRefused: it cannot be made.
            RuntimeUnavailable
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
        """The kernel's names of all networks of ours."""
        return [network["Options"][BRIDGE_OPTION] for network in self._ours(control_plane_id)]

    def sweep(self, control_plane_id: str) -> None:
        """Remove networks that no container is left for, stopped ones included: they may start again.

        Not while another thread makes one: the engine may hang, and who sweeps has better things to do.
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
        # Listed last: a start that has released its network by then has its container in the list.
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
            log.info("removed network %s: no instance of its project is left here", network["Name"])

    def _ours(self, control_plane_id: str) -> list[Document]:
        networks = self._engine.networks(f"{CONTROL_PLANE}={control_plane_id}")
        return [
            network
            for network in networks
            if PROJECT in network["Labels"] and BRIDGE_OPTION in (network["Options"] or {})
        ]

    def _ensure(self, project_id: str, control_plane_id: str) -> bool:
        if self._is_there(project_id, control_plane_id):
            return False
        config = _config(project_id, control_plane_id)
        try:
            self._engine.create_network(config)
        except EngineRefused as refusal:
            if start_failure(refusal.message, []).code == _NO_RANGE_LEFT:
                self._sweep(control_plane_id)
                self._create_at_last(config)
            elif refusal.status not in _CONFLICTS:
                raise _unavailable(f"Docker refused to make one: {refusal.message}") from refusal
            elif not self._appears(project_id, control_plane_id):
                raise  # unknown, to be tried again
        return True

    def _appears(self, project_id: str, control_plane_id: str) -> bool:
        """Another agent, or a call of ours that timed out, makes it: the interface comes before the name."""
        until = time.monotonic() + _APPEARS_WITHIN_S
        while not (there := self._is_there(project_id, control_plane_id)) and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
        return there

    def _create_at_last(self, config: Document) -> None:
        try:
            self._engine.create_network(config)
        except EngineRefused as refusal:
            raise StartRefused(start_failure(refusal.message, [])) from refusal

    def _is_there(self, project_id: str, control_plane_id: str) -> bool:
        """
        Raises:
            StartRefused: something else has its name.
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
        # Labels can be written by hand; without this bridge our rules would not hold on it.
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
