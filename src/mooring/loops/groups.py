"""Lets instance groups react to changes of their members, and notifies swarm managers of changed networks."""

from collections.abc import Mapping

from mooring.control.instances import gangs, instance_groups
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.loops.loop import Loop


class Groups(Loop):
    """The topic `groups` is notified when the state of a member changes."""

    topics = (Topic.GROUPS,)
    interval_s = 5.0

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._networks: Mapping[str, frozenset[str]] = {}  # by swarm, as of the last notification

    def tick(self) -> None:
        with self.database.read() as session:
            unsettled = instance_groups.unsettled(session)
            overlays = gangs.overlays(session)
        names = {swarm: frozenset(each.name for each in overlays[swarm]) for swarm in overlays}
        self._notify_managers(names)
        self.each(unsettled, instance_groups.settle)

    def _notify_managers(self, networks: Mapping[str, frozenset[str]]) -> None:
        """Without this, members would wait for their network until the managers' next reports."""
        swarms = networks.keys() | self._networks.keys()
        changed = {swarm for swarm in swarms if networks.get(swarm) != self._networks.get(swarm)}
        if changed:
            with self.database.write() as session:
                gangs.notify_managers(session, changed)
        self._networks = networks
