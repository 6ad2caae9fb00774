"""I6, I11 and I13: the event log tells each change of an instance's state once, in order."""

from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.core.instance.state import HOLDS_GPUS, TRANSITIONS
from mooring.db.tables import Event, Instance
from mooring_client.schemas.states import State

_CHANGE = "instance.state_changed"


def violations(session: Session) -> Iterator[str]:
    last: dict[str, tuple[str | None, int]] = {}
    changes = select(Event.instance_id, Event.data).where(Event.type == _CHANGE).order_by(Event.seq)
    for instance_id, data in session.execute(changes):
        state, version = last.get(instance_id or "", (None, 0))
        if data["from"] != state:
            yield f"I13: {instance_id} was {state}, and its next event says {data}"
        if data["version"] <= version:
            yield f"I6: the versions of {instance_id} go back: {data}"
        if state is not None and State(data["to"]) not in TRANSITIONS[State(state)]:
            yield f"I6: {instance_id} went from {state} to {data['to']}"
        last[instance_id or ""] = data["to"], data["version"]
    for row in session.scalars(select(Instance)):
        state, version = last.get(row.id, (None, 0))
        if state != row.state or version > row.version:
            last_event = f"{state} in version {version}"
            yield f"I13: {row.id} is {row.state} in version {row.version}, its last event: {last_event}"
        if (row.deleted_at is not None) != (row.state is State.DELETED):
            yield f"I11: {row.id} is {row.state}, and was deleted at {row.deleted_at}"
        if row.state in HOLDS_GPUS and row.node_id is None:
            yield f"I6: {row.id} is {row.state} on no node"
