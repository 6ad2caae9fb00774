"""Why each pending request waits: one sentence per kind of request, and whether waiting can help."""

from dataclasses import replace

from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.explain import phrases
from mooring.scheduler.explain.summary import summarize
from mooring.scheduler.feasibility import filters, quotas
from mooring.scheduler.feasibility.node_groups import NodeGroups
from mooring.scheduler.feasibility.stages import Stage
from mooring.scheduler.gangs import gangs
from mooring.scheduler.gangs.room import most_members
from mooring.scheduler.model import Over, PlanTime, Request, Unplaced
from mooring.scheduler.packing import search
from mooring.scheduler.packing.search import Key
from mooring.scheduler.units import Unit

# If the members of a gang wait for different reasons, the first of these is reported.
_SEVERITY = ("no_nodes", "never_placeable", "quota", "waiting_for_capacity", "waiting_for_turn")


class Explanations:
    """Explains waiting units by the cluster state after the cycle; without the refusals per node."""

    def __init__(self, cluster: ClusterState, node_groups: NodeGroups, at: PlanTime) -> None:
        self._cluster = cluster
        self._node_groups = node_groups
        self._at = at
        self._known: dict[Key, Unplaced] = {}

    def of(self, unit: Unit) -> Unplaced:
        """Why the unit waits; the same for all of its members, so `instance_id` is empty."""
        cluster = self._cluster
        if unit.gang is None:
            return self._of_request(unit.first)
        if not gangs.is_complete(cluster, unit):
            existing = len(unit.members) + gangs.placed_members(cluster, unit)
            summary = f"{existing} of the group's {unit.gang.size} members are here; they start together"
            return Unplaced("", (), ever=True, summary=summary, code="waiting_for_members")
        alone = [self._of_request(member) for member in unit.members]
        if over := gangs.over_quota(unit):
            return Unplaced("", (), alone[0].ever, phrases.waits_for(over), over, code="quota")
        # A gang waits for its worst member's reason or, if each member fits alone, for room for all at once.
        worst = min(alone, key=lambda each: _SEVERITY.index(each.code))
        if worst.ever and (never := _never_together(cluster, unit)):
            worst = replace(worst, ever=False, summary=never, code="never_placeable")
        if worst.code == "waiting_for_turn":
            summary = f"there is no room for all {len(unit.members)} members of the group at once"
            worst = replace(worst, summary=summary, code="waiting_for_capacity")
        return worst

    def _of_request(self, request: Request) -> Unplaced:
        key = search.key(request)
        if key not in self._known:
            found = unplaced(self._cluster, self._node_groups, request, self._at)
            self._known[key] = replace(found, instance_id="")
        return self._known[key]


def _never_together(cluster: ClusterState, unit: Unit) -> str | None:
    """Why the members of a gang could never run at once, by the upper bound of `most_members`."""
    wanted, most = len(unit.members) + gangs.placed_members(cluster, unit), most_members(cluster, unit)
    if unit.gang is None or most is None or most >= wanted:
        return None
    where = "all nodes together" if unit.gang.network == "host" else "a node, or the nodes of one swarm,"
    return f"no room could ever be made for all {wanted} members of the group: {where} could host {most}"


def unplaced(cluster: ClusterState, node_groups: NodeGroups, request: Request, at: PlanTime) -> Unplaced:
    """Explain why no node can host the request, without the refusals per node."""
    survey = node_groups.now(request, at)
    if not len(survey):
        over = quotas.over_anywhere(request)
        summary = phrases.waits_for(over) if over else summarize(survey, request, at)
        code = "quota" if over else "no_nodes"
        return Unplaced(request.instance_id, (), ever=False, summary=summary, over=over, code=code)
    if_empty = node_groups.if_empty(request, at)
    ever = if_empty.last_stage == Stage.FITS
    if over := over_quota(cluster, node_groups, request, at):
        return Unplaced(request.instance_id, (), ever, phrases.waits_for(over), over, code="quota")
    if not ever:
        summary = f"no node could ever host this: {summarize(if_empty, request, at, free='')}"
        return Unplaced(request.instance_id, (), ever, summary, code="never_placeable")
    code = "waiting_for_turn" if survey.last_stage == Stage.FITS else "waiting_for_capacity"
    return Unplaced(request.instance_id, (), ever, summarize(survey, request, at), code=code)


def over_quota(cluster: ClusterState, node_groups: NodeGroups, request: Request, at: PlanTime) -> Over | None:
    """The quota that an unplaced request waits for: it forbids every node, or each node with room.

    A quota that forbids only full nodes is ignored: the request starts when another node has room.
    """
    if request.quota is None:
        return None
    return quotas.over_anywhere(request) or _over_where_it_fits(cluster, node_groups, request, at)


def _over_where_it_fits(
    cluster: ClusterState, node_groups: NodeGroups, request: Request, at: PlanTime
) -> Over | None:
    survey = node_groups.now(request, at)
    overs_of: dict[tuple[int, int], Over | None] = {}
    fitting = survey.left() if survey.last_stage == Stage.FITS else []
    for index in sorted(fitting, key=lambda index: cluster.node(index).id):
        group = int(survey.group[index]), int(cluster.kind_of[index])
        if group not in overs_of:
            overs_of[group] = filters.over_quota(cluster.node(index), request, at)
    # If the quota permits one of these nodes, something else keeps the request out.
    return next(iter(overs_of.values()), None) if all(overs_of.values()) else None
