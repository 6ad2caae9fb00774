"""What follows for instance groups from their members: failures, ends, and the networks between nodes."""

from collections.abc import Mapping

from mooring.control.instances import gangs, instance_groups
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.loops.loop import Loop


class Groups(Loop):
    """`groups` fires when something became of a member."""

    topics = (Topic.GROUPS,)
    interval_s = 5.0

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._networks: Mapping[str, frozenset[str]] = {}  # by swarm, as its managers were last told

    def tick(self) -> None:
        with self.database.read() as session:
            unsettled = instance_groups.unsettled(session)
            overlays = gangs.overlays(session)
        self._tell_managers({swarm: frozenset(each.name for each in of) for swarm, of in overlays.items()})
        self.each(unsettled, instance_groups.settle)

    def _tell_managers(self, networks: Mapping[str, frozenset[str]]) -> None:
        """Managers hear of it at their next report in any case; members wait for the network until then."""
        swarms = networks.keys() | self._networks.keys()
        changed = {swarm for swarm in swarms if networks.get(swarm) != self._networks.get(swarm)}
        if changed:
            with self.database.write() as session:
                gangs.tell_managers(session, changed)
        self._networks = networks
