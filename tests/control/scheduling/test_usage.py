"""Recent usage of projects: sampled, halved with each half-life, and its effect on the queue."""

from datetime import UTC, datetime, timedelta
from math import inf

import pytest

from mooring.control.scheduling import usage
from mooring.core.policy import Policy
from mooring.db.session import Database
from mooring.db.tables import ProjectUsage
from mooring.db.types import now
from mooring.scheduler.model import GpuAllocation, NodeView, ResourceUsage, Running
from mooring_client.schemas.nodes import NodeState
from tests.nodes import WireNode
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

HALF_LIFE_S = 3600.0
NOON = datetime(2030, 5, 31, 12, tzinfo=UTC)


class Samples:
    """Takes samples of the allocations of one project, at times that the test sets."""

    def __init__(self, database: Database, project_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._database = database
        self._project_id = project_id
        self._now = NOON
        monkeypatch.setattr(usage, "now", lambda: self._now)

    def after(
        self, seconds: float, *, gpus: int, since: datetime = NOON, within_s: float = inf
    ) -> ResourceUsage:
        self._now += timedelta(seconds=seconds)
        running = Running(
            instance_id="ins_1",
            project_id=self._project_id,
            allocations=tuple(GpuAllocation(f"GPU-{number}") for number in range(gpus)),
            cpu_milli=2000,
            memory_mib=100,
            priority=50,
            preemptible=False,
            since=since.timestamp(),
            ends_at=None,
        )
        node = NodeView(
            "nod_1", "n", NodeState.READY, {}, 8000, 1000, 0, 0, (), running=(running,) if gpus else ()
        )
        with self._database.write() as session:
            usage.add_sample(session, [node], Policy(usage_half_life_s=HALF_LIFE_S), within_s)
        return self.used

    @property
    def used(self) -> ResourceUsage:
        with self._database.read() as session:
            return usage.projects(session, Policy(usage_half_life_s=HALF_LIFE_S))[self._project_id].used


@pytest.fixture
def samples(service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch) -> Samples:
    project_id = client.post("/v1/projects", json={"name": "user"}).json()["id"]
    return Samples(service.plane.database, project_id, monkeypatch)


def test_allocations_count_for_the_time_since_the_last_sample(samples: Samples) -> None:
    samples.after(usage.INTERVAL_S, gpus=2)
    used = samples.after(30, gpus=4)
    left = 0.5 ** (30 / HALF_LIFE_S)
    assert used.gpu_s == pytest.approx(2 * usage.INTERVAL_S * left + 4 * 30)
    assert used.cpu_s == pytest.approx(2 * usage.INTERVAL_S * left + 2 * 30)
    assert used.memory_mib_s == pytest.approx(100 * usage.INTERVAL_S * left + 100 * 30)


def test_usage_halves_with_each_half_life(samples: Samples) -> None:
    used = samples.after(usage.INTERVAL_S, gpus=2).gpu_s
    assert samples.after(HALF_LIFE_S, gpus=0).gpu_s == pytest.approx(used / 2)
    assert samples.after(2 * HALF_LIFE_S, gpus=0).gpu_s == pytest.approx(used / 8)


def test_an_instance_that_starts_between_samples_counts_from_its_start(samples: Samples) -> None:
    samples.after(usage.INTERVAL_S, gpus=1)
    before = samples.after(86_400, gpus=0).gpu_s
    began = NOON + timedelta(days=1, seconds=500)
    assert samples.after(1000, gpus=1, since=began).gpu_s - before < 1000
    assert samples.used.gpu_s == pytest.approx(510, abs=1)


def test_a_clock_jump_adds_no_more_than_the_given_time(samples: Samples) -> None:
    ten_years, step_s = timedelta(days=3653).total_seconds(), usage.INTERVAL_S
    first = samples.after(ten_years, gpus=8, within_s=step_s)
    assert first.gpu_s == pytest.approx(8 * step_s)
    assert samples.after(ten_years, gpus=8, within_s=step_s).gpu_s == pytest.approx(8 * step_s)
    back = samples.after(-ten_years, gpus=8, within_s=step_s).gpu_s
    assert samples.after(step_s, gpus=8, within_s=step_s).gpu_s == pytest.approx(back + 8 * step_s, rel=0.01)


def test_a_project_with_much_recent_usage_comes_later_in_the_queue(
    service: RunningService, client: Client, node: WireNode
) -> None:
    heavy, light = (
        client.post("/v1/projects", json={"name": name}).json()["id"] for name in ("heavy", "light")
    )
    with service.plane.database.write() as session:
        used = ProjectUsage(project_id=heavy, gpu_s=8 * HALF_LIFE_S, cpu_s=0, memory_mib_s=0, as_of=now())
        session.add(used)
    early = client.create(gpus={"count": 9}, project_id=heavy, cpus=1, memory_mib=64)  # the node has 8
    late = client.create(gpus={"count": 9}, project_id=light, cpus=1, memory_mib=64)
    wait_until(lambda: client.instance(late["id"])["queue_position"] == 1)
    wait_until(lambda: client.instance(early["id"])["queue_position"] == 2)
