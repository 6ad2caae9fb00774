"""R10: one bridge network per project and node, created when needed, and removed when it has no container.

Instances of a project find each other by name, through Docker's name server. IPv6 is off. Members of a group
may be on the group's overlay, or on the network of their node, instead of the project's network.
The firewall's rules isolate the bridges of projects, and the bridge that all overlays of a node share.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Final

from mooring.agent.docker.client import Document, Engine, find_network, is_gone
from mooring.agent.docker.create import (
    CONTROL_PLANE_LABEL,
    HOST_NETWORK,
    INSTANCE_LABEL,
    PROJECT_LABEL,
    bridge_name,
    network_name,
    network_of,
)
from mooring.agent.docker.errors import EngineRefused, start_failure
from mooring.agent.docker.overlay import BRIDGE_OPTION, Overlays, waiting_for_network
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.node import SwarmFacts
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason

_UNAVAILABLE: Final = "network_unavailable"
_CONFLICTS: Final = {403, 409}  # an interface or a network of this name exists
_APPEARS_WITHIN_S: Final = 5.0
_POLL_S: Final = 0.05

log = logging.getLogger(__name__)


@contextmanager
def alongside(task: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Run a task in a thread during the block, which ends after the task.

    Yields:
        A function that waits for the end of the task, and raises what the task raised.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            task()
        except BaseException as error:  # raised in the thread that waits
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="network", daemon=True).start()
    try:
        yield done.result
    finally:
        wait([done])


# Applies the firewall's rules to these bridges. Returns why nothing may start if it cannot.
Isolate = Callable[[Collection[str]], Reason | None]


class Attachments:
    """The networks of containers, with their firewall rules. May be called from any thread.

    Args:
        swarm: returns the swarm of the engine; None if it is in no swarm.
    """

    def __init__(self, engine: Engine, swarm: Callable[[], SwarmFacts | None], isolate: Isolate) -> None:
        self.networks, self.overlays = Networks(engine), Overlays(engine)
        self._swarm, self._isolate = swarm, isolate
        # The bridges that this process has isolated: a reboot removes the rules, but not the networks.
        self._isolated: frozenset[str] | None = None

    def isolate_all(self, control_plane_id: str | None) -> Reason | None:
        """Apply the rules to all bridges. Return why nothing may start if that fails."""
        bridges = set() if control_plane_id is None else set(self.networks.bridges(control_plane_id))
        if self._swarm() is not None and (gateway := self.overlays.gateway()) is not None:
            bridges.add(gateway)
        reason = self._isolate(sorted(bridges))
        self._isolated = frozenset(bridges) if reason is None else None
        return reason

    @contextmanager
    def prepared_for(self, assignment: Assignment, control_plane_id: str) -> Iterator[Callable[[], None]]:
        """Create the network of a container, except an overlay, and apply the rules to its bridge.

        This is done in another thread, while the caller creates the container, which needs its network at its
        start only.

        Yields:
            A function that waits until that is done. It raises what `_prepare` raises; the container must not
            start then.
        """
        project_id = assignment.project_id
        with (
            self.networks.held(project_id),
            alongside(partial(self._prepare, assignment, control_plane_id)) as ready,
        ):
            yield ready

    def _prepare(self, assignment: Assignment, control_plane_id: str) -> None:
        """
        Raises:
            StartRefused: the network cannot be created, or must not be used.
            StartDelayed: the container needs an overlay, and the engine is in no swarm.
            RuntimeUnavailable: the engine does not answer, or the rules cannot be applied.
        """
        network = network_of(assignment)
        if network == HOST_NETWORK:  # has no bridge
            return
        if network == network_name(assignment.project_id):
            is_new = self.networks.ensure(assignment.project_id, control_plane_id)
            if is_new or self._isolated is None:
                self._require_isolation(control_plane_id)
            return
        if self._swarm() is None:
            message = "the group's network needs this node's Docker to be in a swarm"
            raise StartDelayed(waiting_for_network(message))
        self.overlays.require_own(network, control_plane_id)
        if self.overlays.ensure_gateway() not in (self._isolated or ()):
            self._require_isolation(control_plane_id)

    def _require_isolation(self, control_plane_id: str) -> None:
        if (reason := self.isolate_all(control_plane_id)) is not None:
            raise RuntimeUnavailable(reason.message)


class Networks:
    """The networks of one control plane's projects on one engine. May be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changing = threading.Lock()  # while networks are created or removed
        self._counting = threading.Lock()
        self._held: Counter[str] = Counter()  # containers being created, by project

    @contextmanager
    def held(self, project_id: str) -> Iterator[None]:
        """Keep the project's network while a container is created on it."""
        with self._counting:
            self._held[project_id] += 1
        try:
            yield
        finally:
            with self._counting:
                self._held[project_id] -= 1

    def ensure(self, project_id: str, control_plane_id: str) -> bool:
        """Create the project's network if needed.

        Returns:
            Whether the network is new: created since the call began, by this agent or another program.

        Raises:
            StartRefused: the network cannot be created.
            RuntimeUnavailable: the engine does not answer.
        """
        with self._changing:
            return self._ensure(project_id, control_plane_id)

    def bridges(self, control_plane_id: str) -> list[str]:
        """Return the interfaces of all project networks of this control plane."""
        return [network["Options"][BRIDGE_OPTION] for network in self._ours(control_plane_id)]

    def sweep(self, control_plane_id: str) -> None:
        """Remove networks whose project has no container, running or stopped.

        Does nothing while another thread creates networks: that may take long, and the caller must not wait.
        """
        if self._changing.acquire(blocking=False):
            try:
                self._sweep(control_plane_id)
            finally:
                self._changing.release()

    def _sweep(self, control_plane_id: str) -> None:
        networks = self._ours(control_plane_id)
        with self._counting:
            idle = [network for network in networks if not self._held[network["Labels"][PROJECT_LABEL]]]
        if not idle:
            return
        # Listed after `_held` was read: a start that is no longer counted there has its container listed.
        containers = self._engine.containers(INSTANCE_LABEL)
        in_use = {container["Labels"].get(PROJECT_LABEL) for container in containers}
        for network in idle:
            if network["Labels"][PROJECT_LABEL] not in in_use:
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
        networks = self._engine.networks(f"{CONTROL_PLANE_LABEL}={control_plane_id}")
        return [
            network
            for network in networks
            if PROJECT_LABEL in network["Labels"] and BRIDGE_OPTION in (network["Options"] or {})
        ]

    def _ensure(self, project_id: str, control_plane_id: str) -> bool:
        if self._exists(project_id, control_plane_id):
            return False
        config = _config(project_id, control_plane_id)
        try:
            self._engine.create_network(config)
        except EngineRefused as refusal:
            if start_failure(refusal.message, []).code == _UNAVAILABLE:  # no address range is left
                self._sweep(control_plane_id)
                self._create_again(config)
            elif refusal.status not in _CONFLICTS:
                raise _unavailable(f"Docker refused to create it: {refusal.message}") from refusal
            elif not self._appears(project_id, control_plane_id):
                raise  # the outcome is unknown: the start is retried
        return True

    def _appears(self, project_id: str, control_plane_id: str) -> bool:
        """Wait for a network that another call is creating: its interface exists before its name does."""
        until = time.monotonic() + _APPEARS_WITHIN_S
        while not (exists := self._exists(project_id, control_plane_id)) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return exists

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
        if (found := find_network(self._engine, name)) is None:
            return False
        labels, options = found["Labels"] or {}, found["Options"] or {}
        bridge = bridge_name(project_id, control_plane_id)
        # Labels can be set by hand. The firewall's rules apply only to this bridge.
        if labels.get(CONTROL_PLANE_LABEL) != control_plane_id or options.get(BRIDGE_OPTION) != bridge:
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
        "Labels": {CONTROL_PLANE_LABEL: control_plane_id, PROJECT_LABEL: project_id},
    }


def _unavailable(why: str) -> StartRefused:
    message = f"the node has no network for this project: {why}"
    return StartRefused(Reason(code=_UNAVAILABLE, message=message))
