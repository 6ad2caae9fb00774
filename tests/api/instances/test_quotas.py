"""Quotas of a project on resources and GPU hours, and its usage."""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from mooring.control.instances import placements
from mooring.control.scheduling import quotas
from mooring.db.signals import Topic
from mooring.db.tables import Allocation, Node
from mooring.scheduler.model import GpuAllocation, Placement
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

SMALL: dict[str, Any] = {"cpus": 1, "memory_mib": 64}
MORE_THAN_AVAILABLE = {"count": 60}
# A node has 64 CPUs and eight GPUs.
CPUS_PER_GPU = 8


class LimitedProject:
    """A project with quotas; its instances are placed on the sandbox's nodes."""

    def __init__(self, sandbox: Sandbox, name: str = "tenant", **limits: Any) -> None:
        self.sandbox = sandbox
        self.client = sandbox.client
        made = self.client.post("/v1/projects", json={"name": f"{name}-of-{sandbox.node.name}"})
        assert made.status_code == 201, made.text
        self.id: str = made.json()["id"]
        self.limit(**limits)

    def limit(self, **limits: Any) -> None:
        answer = self.client.patch(f"/v1/projects/{self.id}", json={"quotas": limits})
        assert answer.status_code == 200, answer.text

    def post_instance(self, path: str = "/v1/instances", **fields: Any) -> httpx.Response:
        body = {
            "image": "mooring-test/busybox:1",
            "project_id": self.id,
            "node_selector": {"sandbox": self.sandbox.node.name},
            **fields,
        }
        answer = self.client.post(path, json=body)
        if answer.status_code == 201:
            self.sandbox.created_ids.append(answer.json()["id"])
        return answer

    def create(self, gpus: int = 0, **fields: Any) -> str:
        answer = self.post_instance(gpus={"count": gpus}, **fields)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def placed(self, gpus: int = 0, **fields: Any) -> str:
        made = self.create(gpus, **fields)
        self.client.wait(made, "scheduled")
        return made

    def require_rejected(self, quota: str, limit: float, used: float, asked: float, **fields: Any) -> None:
        """Fails unless a create with these fields is rejected with these figures."""
        self.require_quota_exceeded(self.post_instance(**fields), quota, limit, used, asked)

    def require_quota_exceeded(
        self, answer: httpx.Response, quota: str, limit: float, used: float, asked: float
    ) -> None:
        document = problem(answer, 403, "quota_exceeded")
        assert [document[name] for name in ("quota", "limit", "used", "asked")] == [quota, limit, used, asked]
        assert quota in document["detail"]
        assert "ask an admin" in document["detail"]

    def require_waiting_for_quota(self, instance_id: str, *texts: str) -> None:
        """Fails unless the instance waits for a quota and its reason contains these texts."""

        def has_reason() -> bool:
            reason = self.reason(instance_id)
            return reason["code"] == "quota" and all(each in reason["message"] for each in texts)

        wait_until(has_reason)
        assert self.client.instance(instance_id)["state"] == "pending"

    def reason(self, instance_id: str) -> dict[str, Any]:
        return self.client.instance(instance_id)["reason"] or {"code": None}

    @property
    def usage(self) -> dict[str, Any]:
        answer = self.client.get(f"/v1/projects/{self.id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])

    def states(self) -> Counter[str]:
        return Counter(
            item["state"] for item in self.client.items("/v1/instances", project_id=self.id, limit=200)
        )


NewProject = Callable[..., LimitedProject]


@pytest.fixture
def new_project(sandbox: Sandbox) -> NewProject:
    return lambda **limits: LimitedProject(sandbox, **limits)


@pytest.fixture
def a10s(sandbox: Sandbox) -> Iterator[WireNode]:
    """A node with four A10, in addition to the sandbox's eight H100."""
    made = WireNode(sandbox.client, f"{sandbox.node.name}-a10", gpus=4, model="NVIDIA A10")
    made.facts = sandbox.node.facts
    made.sync()
    yield made
    sandbox.client.delete(f"/v1/nodes/{made.id}", params={"force": True})
    made.close()


OVER_LIMIT: list[tuple[str, dict[str, Any], dict[str, Any], float, float, float]] = [
    # quota, quotas, the body that is sent twice; limit, used and asked of the second answer
    ("gpus", {"gpus": 3}, {"gpus": {"count": 2}}, 3, 2, 2),
    ("gpus_by_model.H100", {"gpus_by_model": {"H100": 1}}, {"gpus": {"count": 1, "model": "h100"}}, 1, 1, 1),
    ("instances", {"instances": 1}, {}, 1, 1, 1),
    ("cpus", {"cpus": 2.5}, {"cpus": 1.5}, 2.5, 1.5, 1.5),
    ("cpus", {"cpus": 1.5}, {}, 1.5, 1, 1),
    ("memory_mib", {"memory_mib": 200}, {"memory_mib": 150}, 200, 150, 150),
    ("memory_mib", {"memory_mib": 2000}, {}, 2000, 1024, 1024),
]


@pytest.mark.parametrize(("quota", "limits", "body", "limit", "used", "asked"), OVER_LIMIT)
def test_a_request_over_a_quota_is_rejected_and_the_quota_named(
    new_project: NewProject,
    quota: str,
    limits: dict[str, Any],
    body: dict[str, Any],
    limit: float,
    used: float,
    asked: float,
) -> None:
    project = new_project(**limits)
    assert project.post_instance(**body).status_code == 201
    project.require_rejected(quota, limit, used, asked, **body)
    # A dry run and an immediate create get the same answer; none of the rejected requests leaves an instance.
    project.require_quota_exceeded(
        project.post_instance("/v1/instances?dry_run=true", **body), quota, limit, used, asked
    )
    project.require_rejected(quota, limit, used, asked, **body, on_capacity="fail")
    assert project.usage["instances"] == 1
    assert project.states().total() == 1


def test_a_quota_applies_to_one_project(new_project: NewProject, sandbox: Sandbox) -> None:
    project = new_project(instances=0, gpus=0)
    project.require_rejected("instances", 0, 0, 1)
    sandbox.create()


def test_a_gpu_quota_does_not_limit_instances_without_gpus(new_project: NewProject) -> None:
    project = new_project(gpus=0, gpus_by_model={"H100": 0})
    project.placed()
    project.require_rejected("gpus", 0, 0, 1, gpus={"count": 1})


def test_pending_instances_count_towards_quotas(new_project: NewProject) -> None:
    project = new_project(gpus=61, cpus=4)
    waiting = project.create(60, cpus=3)
    wait_until(lambda: project.reason(waiting)["code"] == "never_placeable")
    project.require_rejected("gpus", 61, 60, 2, gpus={"count": 2})
    project.require_rejected("cpus", 4, 3, 2, cpus=2)
    assert (project.usage["gpus"], project.usage["cpus"]) == (60, 3)


def test_64_concurrent_creates_get_exactly_the_quota(new_project: NewProject) -> None:
    project = new_project(gpus=8, gpus_by_model={"H100": 20}, cpus=1000)
    answers = run_concurrently(64, lambda _n: project.post_instance(gpus={"count": 1}, **SMALL))
    assert Counter(answer.status_code for answer in answers) == {201: 8, 403: 56}
    for answer in answers:
        if answer.status_code == 403:
            project.require_quota_exceeded(answer, "gpus", 8, 8, 1)
    assert project.usage["gpus"] == project.states().total() == 8


def test_64_concurrent_immediate_creates_get_exactly_the_quota(new_project: NewProject) -> None:
    project = new_project(cpus=5 * CPUS_PER_GPU)
    answers = run_concurrently(64, lambda _n: project.post_instance(gpus={"count": 1}, on_capacity="fail"))
    assert Counter(answer.status_code for answer in answers) == {201: 5, 403: 59}
    assert project.usage["cpus"] == 5 * CPUS_PER_GPU


def test_concurrent_starts_and_creates_get_exactly_the_quota(new_project: NewProject) -> None:
    project = new_project(instances=6)
    ended = [project.create(60) for _ in range(6)]
    for instance_id in ended:
        assert project.client.post(f"/v1/instances/{instance_id}/stop").status_code == 202
    assert project.usage["instances"] == 0

    def act(number: int) -> int:
        if number % 2:
            return project.client.post(f"/v1/instances/{ended[number // 2]}/start").status_code
        return project.post_instance(gpus=MORE_THAN_AVAILABLE).status_code

    statuses = Counter(run_concurrently(12, act))
    assert statuses[201] + statuses[202] == 6
    assert statuses[403] == 6
    assert project.usage["instances"] == project.states()["pending"] == 6


def test_an_end_frees_quota_and_a_start_uses_it(new_project: NewProject, sandbox: Sandbox) -> None:
    project = new_project(gpus=1, instances=1)
    first = project.placed(1)
    running = observed(sandbox.assignment(first), "running")
    sandbox.sync(running)
    project.require_rejected("gpus", 1, 1, 1, gpus={"count": 1})
    # A restart uses no more quota.
    assert project.client.post(f"/v1/instances/{first}/restart").status_code == 202
    running = observed(sandbox.assignment(first), "running")
    sandbox.sync(running)

    project.client.post(f"/v1/instances/{first}/stop")
    # The GPU counts until the node has confirmed the stop.
    project.require_rejected("gpus", 1, 1, 1, gpus={"count": 1})
    sandbox.sync(observed(sandbox.assignment(first), "exited", exit_code=0))
    assert project.usage["gpus"] == project.usage["instances"] == 0
    second = project.create(1)
    project.require_quota_exceeded(project.client.post(f"/v1/instances/{first}/start"), "gpus", 1, 1, 1)
    assert project.client.instance(first)["state"] == "stopped"

    project.client.delete(f"/v1/instances/{second}")
    sandbox.sync(instances=None)
    sandbox.sync()
    assert project.client.post(f"/v1/instances/{first}/start").status_code == 202
    # The state is checked before the quota.
    problem(project.client.post(f"/v1/instances/{first}/start"), 409, "invalid_transition")


def test_a_model_quota_counts_when_the_model_is_certain(new_project: NewProject, a10s: WireNode) -> None:
    project = new_project(gpus_by_model={"H100": 2, "NVIDIA A10": 3})
    # The quota of the first instance's model has room for one more GPU, so the second gets the other model.
    models = [
        device["model"]
        for made in (project.placed(2, **SMALL), project.placed(2, **SMALL))
        for device in project.client.instance(made)["devices"]
    ]
    assert Counter("H100" in model for model in models) == {True: 2, False: 2}
    assert project.usage["gpus_by_model"] == {"H100": 2, "NVIDIA A10": 2}
    project.require_rejected("gpus_by_model.H100", 2, 2, 1, gpus={"count": 1, "model": "H100"})
    waiting = project.create(2, **SMALL)
    project.require_waiting_for_quota(waiting, "gpus_by_model", "2 used", "2 asked")
    explained = project.client.get(f"/v1/instances/{waiting}/explain").json()
    assert explained["reason"]["code"] == "quota"
    assert {refusal["code"] for refusal in explained["refusals"] if refusal["node_id"] == a10s.id} == {
        "quota"
    }
    assert explained["would_fit"]["max_count_now"] == 1
    dry = project.post_instance("/v1/instances?dry_run=true", gpus={"count": 2}, **SMALL).json()
    assert dry["placeable"] is False
    assert "quota" in {refusal["code"] for refusal in dry["refusals"]}
    # "A10" alone does not imply the quota's "NVIDIA A10", so the create is rejected only at its placement.
    project.require_quota_exceeded(
        project.post_instance(gpus={"count": 2, "model": "A10"}, on_capacity="fail", **SMALL),
        "gpus_by_model.NVIDIA A10", 3, 2, 2,
    )  # fmt: skip
    project.limit(gpus_by_model={"H100": 2, "NVIDIA A10": 4})
    assert {d["model"] for d in project.client.wait(waiting, "scheduled")["devices"]} == {"NVIDIA A10"}


def test_default_cpus_count_from_placement(new_project: NewProject) -> None:
    project = new_project(cpus=2 * CPUS_PER_GPU)
    first = project.placed(2)
    waiting = project.create(1)
    project.require_waiting_for_quota(waiting, "quota cpus is 16: 16 used, 8 asked")
    (refusal,) = [
        refusal
        for refusal in project.client.get(f"/v1/instances/{waiting}/explain").json()["refusals"]
        if refusal["code"] == "quota"
    ]
    assert (refusal["wanted"], refusal["had"]) == ("8", "cpus: 0 of 16 left")
    assert project.usage["cpus"] == 16
    project.client.delete(f"/v1/instances/{first}")
    project.sandbox.sync(instances=None)
    project.sandbox.sync()
    project.client.wait(waiting, "scheduled")
    assert project.usage["cpus"] == 8


def test_default_memory_counts_from_placement(new_project: NewProject) -> None:
    project = new_project(memory_mib=100_000)
    project.placed(1)
    share = project.usage["memory_mib"]
    assert 60_000 < share < 65_536
    project.require_waiting_for_quota(project.create(1), "memory_mib")
    project.placed(1, memory_mib=100_000 - share)


def test_default_cpus_leave_room_for_admitted_instances(new_project: NewProject) -> None:
    project = new_project(cpus=CPUS_PER_GPU)
    admitted_first = project.create(60, cpus=1)
    waiting = project.create(1)
    project.require_waiting_for_quota(waiting, "1 used, 8 asked")
    project.client.delete(f"/v1/instances/{admitted_first}")
    project.client.wait(waiting, "scheduled")


def test_a_raised_quota_starts_pending_instances(new_project: NewProject) -> None:
    project = new_project(gpus=2, cpus=8)
    project.placed(1)
    waiting = project.create(1)
    project.require_waiting_for_quota(waiting)
    project.limit(cpus=None)
    project.client.wait(waiting, "scheduled", timeout_s=5)


def test_a_lowered_quota_stops_nothing_and_limits_further_starts(
    new_project: NewProject, sandbox: Sandbox
) -> None:
    project = new_project(gpus=16)
    running = [project.placed(4, **SMALL) for _ in range(2)]
    waiting = [project.create(2, **SMALL) for _ in range(2)]
    wait_until(lambda: project.reason(waiting[1])["code"] == "waiting_for_capacity")
    project.limit(gpus=6)
    project.require_rejected("gpus", 6, 12, 1, gpus={"count": 1})
    project.require_waiting_for_quota(waiting[0], "quota gpus is 6: 8 used, 2 asked")
    assert project.states() == {"scheduled": 2, "pending": 2}
    project.client.delete(f"/v1/instances/{running[0]}")
    sandbox.sync(instances=None)
    sandbox.sync(observed(sandbox.assignment(running[1]), "running"))
    # Four GPUs are in use: one of the two pending instances is admitted, up to the limit.
    project.client.wait(waiting[0], "scheduled")
    project.require_waiting_for_quota(waiting[1], "6 used, 2 asked")


def test_a_placement_over_the_quota_is_not_written(new_project: NewProject, sandbox: Sandbox) -> None:
    """A placement may be outdated when it is written. The quota has room for one of these two only."""
    project = new_project(cpus=CPUS_PER_GPU)
    sandbox.client.post(f"/v1/nodes/{sandbox.node.id}/cordon")
    waiting = [project.create(1) for _ in range(2)]
    wait_until(lambda: project.reason(waiting[1])["code"] == "waiting_for_capacity")
    decided = [
        Placement(instance_id, sandbox.node.id, (GpuAllocation(sandbox.node.gpus[index].uuid),), 8000, 64)
        for index, instance_id in enumerate(waiting)
    ]
    with sandbox.service.plane.database.write() as session:
        node = session.get_one(Node, sandbox.node.id)
        node.cordoned = False
        assert placements.assign(session, decided) == waiting[:1]
        assert placements.assign(session, decided[1:]) == []
        node.cordoned = True


NOON = datetime(2020, 5, 31, 12, tzinfo=UTC)
MIDNIGHT = datetime(2020, 6, 1, tzinfo=UTC)


class Ledger:
    """A project with recorded past GPU use, and a clock that the test sets."""

    def __init__(self, project: LimitedProject, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.current_time = NOON
        monkeypatch.setattr(quotas, "now", lambda: self.current_time)
        self.ended = project.create(60)
        project.client.post(f"/v1/instances/{self.ended}/stop")

    def record_use(self, from_at: datetime, to_at: datetime, milli: int = 1000) -> None:
        with self.project.sandbox.service.plane.database.write() as session:
            session.add(
                Allocation(
                    gpu_uuid=self.project.sandbox.node.gpus[0].uuid, instance_id=self.ended,
                    project_id=self.project.id, attempt=1, milli=milli, from_at=from_at, to_at=to_at,
                )
            )  # fmt: skip

    @property
    def hours(self) -> tuple[float, float]:
        """The GPU hours of today and of this month."""
        usage = self.project.usage
        return usage["gpu_hours_today"], usage["gpu_hours_this_month"]

    def set_time(self, current_time: datetime) -> None:
        """Set the time and start a scheduling cycle."""
        self.current_time = current_time
        self.project.sandbox.service.plane.database.signals.fire({Topic.SCHEDULE})


def test_gpu_hours_count_within_the_day_and_the_month(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(new_project(), monkeypatch)
    assert ledger.hours == (0, 0)
    ledger.record_use(NOON - timedelta(minutes=90), NOON - timedelta(minutes=60))
    # The first hour of this use is on the day before.
    ledger.record_use(NOON - timedelta(hours=13), NOON - timedelta(hours=11))
    ledger.record_use(NOON - timedelta(days=40), NOON - timedelta(days=29))
    ledger.record_use(NOON - timedelta(days=60), NOON - timedelta(days=50))
    # A use in the future, recorded with a clock that is ahead, does not count.
    ledger.record_use(NOON + timedelta(hours=1), NOON + timedelta(hours=2))
    ledger.record_use(NOON - timedelta(milliseconds=3600), NOON)
    ledger.record_use(NOON - timedelta(hours=4), NOON, milli=250)  # a quarter of a GPU
    in_may = (NOON - timedelta(days=29) - datetime(2020, 5, 1, tzinfo=UTC)) / timedelta(hours=1)
    assert ledger.hours == pytest.approx((2.501, 3.501 + in_may), abs=1e-5)
    ledger.current_time = MIDNIGHT
    assert ledger.hours == (0, 0)


def test_a_gpu_in_use_counts_until_now(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(new_project(), monkeypatch)
    running = ledger.project.placed(2)
    with ledger.project.sandbox.service.plane.database.write() as session:
        session.execute(
            text("UPDATE allocations SET from_at = :at WHERE instance_id = :id"),
            {"at": "2020-05-30 22:00:00.000000", "id": running},
        )
    assert ledger.hours == (24, 28)
    assert ledger.project.usage["gpus"] == 2


@pytest.mark.parametrize(
    ("quota", "resets_at"),
    [("gpu_hours_per_day", MIDNIGHT - timedelta(days=1)), ("gpu_hours_per_month", MIDNIGHT)],
    ids=["day", "month"],
)
def test_without_gpu_hours_instances_wait_until_the_next_window(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch, quota: str, resets_at: datetime
) -> None:
    project = new_project(**{quota: 2})
    ledger = Ledger(project, monkeypatch)
    ledger.current_time = resets_at - timedelta(hours=3)
    ledger.record_use(
        ledger.current_time - timedelta(hours=3), ledger.current_time - timedelta(hours=1, seconds=1)
    )
    placed = project.placed(1)
    ledger.record_use(ledger.current_time - timedelta(hours=1), ledger.current_time)

    waiting = project.create(1)
    project.require_waiting_for_quota(
        waiting, f"quota {quota} is 2: 3 used; it starts from {resets_at:%Y-%m-%dT%H:%M:%S}.000Z on"
    )
    project.placed()  # without GPUs
    refused = problem(project.post_instance(gpus={"count": 1}, on_capacity="fail"), 403, "quota_exceeded")
    assert (refused["quota"], refused["limit"], refused["asked"]) == (quota, 2, None)
    assert refused["used"] == pytest.approx(3, abs=0.01)
    assert refused["resets_at"] == f"{resets_at:%Y-%m-%dT%H:%M:%S}.000Z"
    assert project.post_instance("/v1/instances?dry_run=true", gpus={"count": 1}).json()["placeable"] is False
    explained = project.client.get(f"/v1/instances/{waiting}/explain").json()
    assert "quota" in {refusal["code"] for refusal in explained["refusals"]}
    assert project.client.instance(placed)["state"] == "scheduled"

    ledger.set_time(resets_at - timedelta(seconds=1))
    second = project.create(1)
    project.require_waiting_for_quota(second)
    assert project.client.instance(waiting)["state"] == "pending"
    ledger.set_time(resets_at)
    project.client.wait(waiting, "scheduled")
    project.client.wait(second, "scheduled")


def test_raised_gpu_hours_start_pending_instances(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(new_project(gpu_hours_per_day=0, gpu_hours_per_month=0), monkeypatch)
    waiting = ledger.project.create(1)
    ledger.project.require_waiting_for_quota(waiting, "gpu_hours_per_month is 0: 0 used")
    ledger.project.limit(gpu_hours_per_day=1, gpu_hours_per_month=None)
    ledger.project.client.wait(waiting, "scheduled", timeout_s=5)


def test_usage_is_shown_for_a_single_project_and_not_in_lists(new_project: NewProject) -> None:
    project = new_project(gpus_by_model={"H100": 4})
    project.placed(2, cpus=1.5, memory_mib=100)
    project.create(60)
    project.create()
    project.client.post(f"/v1/instances/{project.create()}/stop")
    usage = project.usage
    assert usage.pop("gpu_hours_today") < 1
    assert usage.pop("gpu_hours_this_month") < 1
    assert usage == {
        "gpus": 62, "gpus_by_model": {"H100": 2}, "instances": 3, "cpus": 2.5, "memory_mib": 1124,
        "disk_mib": 3 * 10_240, "volumes_mib": 0,
    }  # fmt: skip
    (listed,) = project.client.items("/v1/projects", name=f"tenant-of-{project.sandbox.node.name}")
    assert listed["usage"] is None
