"""Concurrent transactions on PostgreSQL, which allows several writers."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import text

from mooring.control import locks, revisions
from mooring.control.scheduling import reservations
from mooring.core.access import SYSTEM
from mooring.db.session import Database
from mooring.db.tables import Instance, Project
from mooring.db.types import now
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def database(service: RunningService) -> Iterator[Database]:
    yield service.plane.database


def _waits_for_a_lock(database: Database) -> bool:
    with database.read() as session:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return bool(session.scalar(query))


def test_a_restart_waits_for_a_reservation_in_progress(
    service: RunningService, client: Client, database: Database, node: WireNode
) -> None:
    course = client.post("/v1/projects", json={"name": "course"}).json()["id"]
    placed = client.wait(client.create(gpus={"count": 8}, max_duration_s=600)["id"], "scheduled")
    with database.write() as session:
        row = session.get_one(Instance, placed["id"])
        row.scheduled_at = now() - timedelta(seconds=500)  # it ends in 100 s
        revisions.changed(session, row.node_id)
    restarted: list[httpx.Response] = []
    path = f"/v1/instances/{placed['id']}/restart"
    thread = threading.Thread(target=lambda: restarted.append(client.post(path)))
    with database.write() as session:
        locks.placing(session)
        thread.start()
        wait_until(lambda: _waits_for_a_lock(database) or restarted)
        begins = now() + timedelta(seconds=200)
        ends = begins + timedelta(hours=1)
        project = session.get_one(Project, course)
        reservations.create(
            session, SYSTEM, service.service.scheduler_cache, project, "course", {"count": 8}, begins, ends,
        )  # fmt: skip
    thread.join(20)
    problem(restarted[0], 409, "gpu_reserved")
