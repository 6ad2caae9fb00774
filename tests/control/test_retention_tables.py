"""Every table is purged or has a bound; what clients of gateways leave is purged."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from mooring.control import retention
from mooring.db.tables import Base, DockerContainer, Event, IdempotencyKey, PortLink, SshKey, Stream
from mooring.db.types import now
from tests.retention import purge
from tests.service import Client, RunningService

LONG_AGO = timedelta(days=31)

# What limits the tables without a sweep.
BOUNDED = {
    "control_plane": "one row", "webhook_progress": "one row", "webhooks": "row_limits",
    "nodes": "the operator's machines", "gpus": "the operator's machines",
    "gpu_conditions": "one for each kind of a GPU", "gpu_incidents": "gpu_health.delete_expired",
    "members": "row_limits", "registries": "row_limits", "secrets": "row_limits",
    "idempotency_usage": "one for each caller with stored answers", "project_storage": "one for each project",
    "instance_volumes": "16 for each instance, and deleted with it",
    "node_volumes": "one for each volume and node, until the node has removed it",
    # Kept by design.
    "allocations": "the ledger", "instance_records": "the ledger",
    "audit_log": "the audit log", "audit_links": "the audit log", "audit_heads": "one a minute",
}  # fmt: skip


@pytest.mark.both_databases
def test_keys_links_and_containers_of_no_use_are_purged(service: RunningService, client: Client) -> None:
    ended = client.create()["id"]
    client.delete(f"/v1/instances/{ended}")
    live, project = client.create()["id"], client.get("/v1/projects").json()["items"][0]["id"]
    me = client.get("/v1/me").json()["key"]["id"]
    with service.plane.database.write() as session:
        for name, expires_at in (("ended", now() - LONG_AGO), ("recent", now()), ("lasting", None)):
            session.add(
                SshKey(
                    id=f"ssh_{name}", name=name, public_key="k", fingerprint=name, api_key_id=me,
                    created_at=now(), expires_at=expires_at,
                )
            )  # fmt: skip
        for name, ago in (("ended", timedelta(hours=1)), ("recent", timedelta(minutes=1))):
            session.add(PortLink(id=f"lnk_{name}", instance_id=live, expires_at=now() - ago))
        for name, instance, ago in (
            ("live", live, LONG_AGO), ("new", None, timedelta(hours=1)),
            ("unused", None, LONG_AGO), ("ended", ended, timedelta(0)),
        ):  # fmt: skip
            session.add(
                DockerContainer(
                    id=name, project_id=project, caller_id=me, name=name, config={}, request={},
                    auto_remove=False, instance_id=instance, created_at=now() - ago,
                )
            )  # fmt: skip
    purge(service)
    with service.plane.database.read() as session:
        assert set(session.scalars(select(SshKey.id))) == {"ssh_recent", "ssh_lasting"}
        assert set(session.scalars(select(PortLink.id))) == {"lnk_recent"}
        assert set(session.scalars(select(DockerContainer.id))) == {"live", "new"}


def test_every_table_is_purged_or_has_a_bound() -> None:
    """A new table must get a sweep, or a line in `BOUNDED` that says what limits it."""
    purged = {
        found.__tablename__
        for found in vars(retention).values()
        if isinstance(found, type) and issubclass(found, Base)
    } | {Event.__tablename__, IdempotencyKey.__tablename__, Stream.__tablename__}
    assert {table.name for table in Base.metadata.sorted_tables} == purged | set(BOUNDED)
