"""Admins' rules for where a project's instances are placed: its node selector, and reserved nodes.

The scheduler plans by these rules; `capacity.Guard` and `instances.restart` check them against locked rows.
"""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.db.tables import Node, Project
from mooring_client.errors import NodeNotAllowed, NodeSelectorConflict


def selectors(session: Session, project_ids: Collection[str] | None = None) -> dict[str, Mapping[str, str]]:
    """The node selectors of the projects (None: of all projects) that have one, by project id."""
    query = select(Project.id, Project.node_selector).where(
        Project.node_selector.is_not(None), Project.deleted_at.is_(None)
    )
    if project_ids is not None:
        query = query.where(Project.id.in_(project_ids))
    return {project_id: selector for project_id, selector in session.execute(query) if selector}


def admits(node: Row[Any] | Node, project_id: str, selector: Mapping[str, str]) -> bool:
    """Whether the rules allow instances of the project on the node.

    Args:
        node: with `reserved_for` and `facts`.
        selector: the project's.
    """
    if node.reserved_for is not None and project_id not in node.reserved_for:
        return False
    labels = (node.facts or {}).get("labels", {})
    return all(labels.get(key) == value for key, value in selector.items())


def require_no_conflict(session: Session, project_id: str, selector: Mapping[str, str]) -> None:
    """Raises NodeSelectorConflict if a request's selector contradicts its project's.

    If the project's selector changes while the instance is pending, the project's value takes precedence.
    """
    required = session.get_one(Project, project_id).node_selector or {}
    for key, value in sorted(required.items()):
        if selector.get(key, value) != value:
            raise NodeSelectorConflict(
                f"instances of this project are placed on nodes with {key}={value}; leave {key} out of "
                "`node_selector`",
                key=key,
                required=value,
            )


def require_admitted(session: Session, node: Node, project_id: str) -> None:
    """Raises NodeNotAllowed if the rules do not allow instances of the project on the node."""
    if not admits(node, project_id, selectors(session, [project_id]).get(project_id, {})):
        raise NodeNotAllowed(
            f"{node.name} is no longer open to this project; stop the instance and start it to have it "
            "placed elsewhere",
        )
