"""Members of instance groups, as the verbs on instances see them: their group decides over them."""

from sqlalchemy.orm import Session

from mooring.core.access import Access
from mooring.core.errors import MemberOfGroup
from mooring.core.instance.state import DesiredState
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, InstanceGroup

# What a restarted member can do again by itself, where the group goes on without it.
_ALONE = frozenset({"start", "restart"})


def require_not_in_group(session: Session, verb: str, access: Access, row: Instance) -> None:
    """Let pass what may be done with one instance alone, and what the service does by itself.

    Raises:
        MemberOfGroup: it is a member of a group, to which this must be done as a whole.
    """
    if row.group_id is None or access.action is None:
        return
    group = session.get_one(InstanceGroup, row.group_id)
    goes_on = group.on_member_failure == "restart_member" and group.desired_state is DesiredState.RUNNING
    if verb in _ALONE and goes_on:
        return
    raise MemberOfGroup(
        f"cannot {verb} a single member of a group; {verb} the group {group.name} ({group.id}) instead",
        group_id=group.id,
    )


def moved(session: Session) -> None:
    """Have the groups looked at: the end of one member concerns the others, its placement their network."""
    notify(session, Topic.GROUPS)
