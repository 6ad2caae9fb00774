"""I2, I3 and I13: what clients asked for, what they were told, and what the database has."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.db.tables import AuditEntry, Instance, InstanceRecord


@dataclass
class Acknowledged:
    """The history of the clients of a run.

    Attributes:
        creates: the ids in successful responses, by the unique name in the request; several if a repetition
            with the same Idempotency-Key got another one.
        deletes: ids of instances whose delete was acknowledged.
        unknown: names of requests without a response so far: each may have made an instance.
        lost: ids of instances that a restore of an older database has removed.
    """

    creates: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    deletes: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


def violations(session: Session, history: Acknowledged) -> Iterator[str]:
    rows = {row.id: row for row in session.scalars(select(Instance))}
    purged = set(session.scalars(select(InstanceRecord.id)))
    names = Counter(row.name for row in rows.values())
    for name, ids in history.creates.items():
        if len(ids) > 1 or names[name] > 1:
            yield f"I3: the request {name} made {max(len(ids), names[name])} instances: {sorted(ids)}"
        for instance in ids - history.deletes - history.lost:
            if instance not in rows or rows[instance].deleted_at is not None:
                yield f"I2: {instance} ({name}) was acknowledged, and does not exist"
    for instance in history.deletes & rows.keys():
        if rows[instance].desired_state != "deleted":
            desired = rows[instance].desired_state
            yield f"I11: the delete of {instance} was acknowledged, and its desired state is {desired}"
    asked = history.creates.keys() | history.unknown
    for row in rows.values():
        if row.group_id is None and row.name not in asked:
            yield f"I3: nobody asked for {row.name}"
    yield from _audit(session, set(rows), purged)


def _audit(session: Session, present: set[str], purged: set[str]) -> Iterator[str]:
    query = select(AuditEntry.target_id).where(AuditEntry.action == "instance.create")
    created = Counter(session.scalars(query))
    members = set(session.scalars(select(Instance.id).where(Instance.group_id.is_not(None))))
    for instance in present - members:
        if created[instance] != 1:
            yield f"I13: {instance} has {created[instance]} audit rows of its create"
    for target in created.keys() - present - purged:
        yield f"I13: the audit log has a create of {target}, which does not exist"
