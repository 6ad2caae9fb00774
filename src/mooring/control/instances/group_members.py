"""Members of instance groups: most operations are rejected for a single member and need the whole group."""

from sqlalchemy.orm import Session

from mooring.core.access import Access
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, InstanceGroup
from mooring_client.errors import MemberOfGroup
from mooring_client.schemas.states import DesiredState

# Allowed for a single member if the group restarts members and keeps running without it.
_SINGLE_MEMBER = frozenset({"start", "restart"})


def require_not_in_group(session: Session, operation: str, access: Access, row: Instance) -> None:
    """Reject an operation that must be done with the whole group, unless the service itself does it.

    Raises:
        MemberOfGroup: the instance is a member of a group, and the operation needs the whole group.
    """
    if row.group_id is None or access.action is None:
        return
    group = session.get_one(InstanceGroup, row.group_id)
    continues = group.on_member_failure == "restart_member" and group.desired_state is DesiredState.RUNNING
    if operation in _SINGLE_MEMBER and continues:
        return
    raise MemberOfGroup(
        f"cannot {operation} a single member of a group; "
        f"{operation} the group {group.name} ({group.id}) instead",
        group_id=group.id,
    )


def moved(session: Session) -> None:
    """Wake the groups loop: a member that ends may end the others, and one that is placed needs a network."""
    notify(session, Topic.GROUPS)
