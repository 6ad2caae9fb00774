"""Increments `nodes.revision`, by which caches of nodes (`control/scheduling/cache.py`) detect changes."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Node

_CHANGED = "mooring.changed_nodes"


def changed(session: Session, *node_ids: str | None) -> None:
    """Increment the revisions of nodes, after a change of anything that a `NodeView` shows.

    That is: allocations and their ends, GPUs and their health, facts, flags and reserved GPUs. The caller has
    locked the nodes.
    """
    for node_id in filter(None, node_ids):
        _remember(session, [node_id])
        # Written with the next flush, which most callers cause anyway.
        session.get_one(Node, node_id).revision = Node.revision + 1


def changed_many(session: Session, node_ids: Iterable[str]) -> None:
    """As `changed`, in one statement."""
    ids = sorted(set(node_ids))
    _remember(session, ids)
    _update(session, ids, revision=Node.revision + 1)


def notify_nodes(session: Session, node_ids: Iterable[str]) -> None:
    """As `changed_many`; also increments the generations, so that waiting calls of the agents return."""
    ids = sorted(set(node_ids))
    _remember(session, ids)
    _update(session, ids, revision=Node.revision + 1, generation=Node.generation + 1)
    notify(session, *map(Topic.node, ids))


def _update(session: Session, ids: Sequence[str], **values: Any) -> None:
    statement = update(Node).where(Node.id.in_(ids)).values(**values)
    session.execute(statement.execution_options(synchronize_session=False))


def _remember(session: Session, node_ids: Iterable[str]) -> None:
    session.info.setdefault(_CHANGED, set()).update(node_ids)


def changed_here(session: Session) -> frozenset[str]:
    """Nodes that this transaction has changed: no cache may store their new revisions before the commit."""
    return frozenset(session.info.get(_CHANGED, ()))
