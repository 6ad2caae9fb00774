"""Where an admin lets a project's instances be placed: its node selector, and nodes reserved for others.

The scheduler plans by these rules; `capacity.Guard` and a restart in place check them against locked rows.
"""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.core.errors import Conflict, Forbidden
from mooring.db.tables import Node, Project


def selectors(session: Session, project_ids: Collection[str] | None = None) -> dict[str, Mapping[str, str]]:
    """By project id, of those that have a node selector. Args: project_ids: null: all."""
    query = select(Project.id, Project.node_selector).where(
        Project.node_selector.is_not(None), Project.deleted_at.is_(None)
    )
    if project_ids is not None:
        query = query.where(Project.id.in_(project_ids))
    return {project_id: selector for project_id, selector in session.execute(query) if selector}


def admits(node: Row[Any] | Node, project_id: str, selector: Mapping[str, str]) -> bool:
    """Whether an admin lets instances of the project be placed on the node.

    Args:
        node: with `reserved_for` and `facts`.
        selector: of the project.
    """
    if node.reserved_for is not None and project_id not in node.reserved_for:
        return False
    labels = (node.facts or {}).get("labels", {})
    return all(labels.get(key) == value for key, value in selector.items())


def require_no_conflict(session: Session, project_id: str, selector: Mapping[str, str]) -> None:
    """Raises Forbidden, code `node_selector_conflict`: a request asks for another value than its project.

    A project's selector may change later, while the instance waits: then the project's value wins.
    """
    required = session.get_one(Project, project_id).node_selector or {}
    for key, value in sorted(required.items()):
        if selector.get(key, value) != value:
            raise Forbidden(
                f"instances of this project are placed on nodes with {key}={value}; leave {key} out of "
                "`node_selector`",
                code="node_selector_conflict",
                key=key,
                required=value,
            )


def require_admitted(session: Session, node: Node, project_id: str) -> None:
    """Raises Conflict, code `node_not_allowed`: an instance may not start anew where it is."""
    if not admits(node, project_id, selectors(session, [project_id]).get(project_id, {})):
        raise Conflict(
            f"{node.name} is no longer open to this project; stop the instance and start it to have it "
            "placed elsewhere",
            code="node_not_allowed",
        )
