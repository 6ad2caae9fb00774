"""`nodes.revision` tells caches of nodes (`control/scheduling/cache.py`) that a node has changed."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Node

_CHANGED = "mooring.changed_nodes"


def changed(session: Session, *node_ids: str | None) -> None:
    """Something that the scheduler sees of these nodes is different once this transaction commits.

    Whatever a `NodeView` shows: what is held there and until when, cards and their health, facts, flags, what
    is reserved. The nodes should be locked already.
    """
    for node_id in filter(None, node_ids):
        _note(session, [node_id])
        # Part of the row's next flush, which mostly writes it anyway.
        session.get_one(Node, node_id).revision = Node.revision + 1


def changed_many(session: Session, node_ids: Iterable[str]) -> None:
    """As `changed`, in one statement."""
    ids = sorted(set(node_ids))
    _note(session, ids)
    _update(session, ids, revision=Node.revision + 1)


def told(session: Session, node_ids: Iterable[str]) -> None:
    """The same nodes also hear of something new that they should have (see `instances._tell`)."""
    ids = sorted(set(node_ids))
    _note(session, ids)
    _update(session, ids, revision=Node.revision + 1, generation=Node.generation + 1)
    notify(session, *map(Topic.node, ids))


def _update(session: Session, ids: Sequence[str], **values: Any) -> None:
    statement = update(Node).where(Node.id.in_(ids)).values(**values)
    session.execute(statement.execution_options(synchronize_session=False))


def _note(session: Session, node_ids: Iterable[str]) -> None:
    session.info.setdefault(_CHANGED, set()).update(node_ids)


def changed_here(session: Session) -> frozenset[str]:
    """What this transaction has changed: its numbers may yet be another's, if it is rolled back."""
    return frozenset(session.info.get(_CHANGED, ()))
