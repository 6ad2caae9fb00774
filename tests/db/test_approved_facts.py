"""The upgrade to approved facts approves the present facts of all nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, create_engine, text

from mooring.db import migrate
from mooring.db.session import normalized
from tests.testbed.postgres import PostgresCluster

pytestmark = pytest.mark.both_databases

BEFORE = "0006"
FACTS: dict[str, Any] = {
    "hostname": "h", "address": "10.0.0.7", "cpus": 64, "memory_mib": 524_288, "labels": {"zone": "a"},
    "agent_version": "0.1.0", "simulated_containers": False, "simulated_gpus": False,
}  # fmt: skip


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'mooring.db'}"
        return
    cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
    created = cluster.create_database()
    yield created
    cluster.drop_database(created)


def _insert(engine: Engine, table: str, **values: Any) -> None:
    bound = {
        key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in values.items()
    }
    columns, parameters = ", ".join(f'"{key}"' for key in bound), ", ".join(f":{key}" for key in bound)
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({parameters})"), bound)


def _insert_node(engine: Engine, node_id: str, facts: dict[str, Any] | None) -> None:
    _insert(
        engine, "nodes", id=node_id, name=node_id, credential_hash=node_id, renewal_due=False, cordoned=False,
        draining=False, silent=False, facts=facts, samples=[], orphans=[], session=1, seq=1, generation=1,
        revision=1, heartbeats=1, version=1, created_at="2026-11-21 00:00:00",
    )  # fmt: skip


def test_the_upgrade_approves_the_facts_of_existing_nodes(url: str) -> None:
    engine = create_engine(normalized(url))
    command.upgrade(migrate.config(url), BEFORE)
    _insert_node(engine, "nod_1", FACTS)
    _insert_node(engine, "nod_2", None)
    _insert(
        engine, "gpus", uuid="GPU-1", node_id="nod_1", index=0, model="H100", memory_mib=81_559,
        facts={"compute_capability": "9.0", "mig_mode": "disabled"}, health="healthy", simulated=False,
        milli_held=0,
    )  # fmt: skip
    migrate.upgrade(url)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, approved FROM nodes")).all()
    engine.dispose()
    stored = {row.id: row.approved for row in rows}
    assert stored["nod_2"] is None
    approved = stored["nod_1"]
    if isinstance(approved, str):  # SQLite
        approved = json.loads(approved)
    gpus = approved.pop("gpus")
    assert gpus == {
        "GPU-1": {"model": "H100", "memory_mib": 81_559, "compute_capability": "9.0", "mig_capable": 1}
    }
    names = ("labels", "address", "cpus", "memory_mib", "simulated_containers", "simulated_gpus")
    assert approved == {"swarm": None, **{name: FACTS[name] for name in names}}
