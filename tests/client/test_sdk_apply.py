"""The SDK applies resources, and says what that did."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mooring_client import AsyncMooring, Mooring
from mooring_client.errors import NotFound, PreconditionFailed, QuotaExceeded, RequiresReplacement
from mooring_client.schemas.projects import ProjectMember, Role
from tests.client.conftest import IMAGE
from tests.client.lossy import LossyProxy
from tests.service import ADMIN_KEY, Client, RunningService

SPEC: dict[str, Any] = {"gpus": 64, "ports": [80], "env": {"A": "1"}, "labels": {"a": "b"}}


@pytest.fixture
def project(admin: Client, mooring: Mooring) -> Iterator[str]:
    made = mooring.projects.apply("sdk-apply").resource
    yield made.id
    for group in mooring.instance_groups.list(project_id=made.id):
        mooring.instance_groups.delete(group.id)
    for instance in mooring.instances.list(project_id=made.id):
        mooring.instances.delete(instance.id)
    mooring.projects.delete(made.id)


def test_an_instance_is_applied_and_planned(mooring: Mooring) -> None:
    assert mooring.instances.plan("sdk", IMAGE, **SPEC).outcome == "created"
    created = mooring.instances.apply("sdk", IMAGE, **SPEC)
    assert (created.outcome, created.resource.name) == ("created", "sdk")
    assert mooring.instances.apply("sdk", IMAGE, **SPEC).outcome == "unchanged"
    plan = mooring.instances.plan("sdk", IMAGE, **SPEC, priority=7)
    assert [(each.pointer, each.before, each.after) for each in plan.changes] == [("/priority", "50", "7")]
    changed = mooring.instances.apply("sdk", IMAGE, **SPEC, priority=7)
    assert (changed.outcome, changed.resource.priority) == ("changed", 7)
    with pytest.raises(RequiresReplacement) as caught:
        mooring.instances.apply("sdk", IMAGE, **SPEC, command=["true"])
    assert caught.value.fields["pointers"] == ["/command"]
    with pytest.raises(PreconditionFailed):
        mooring.instances.apply("sdk", IMAGE, **SPEC, version=9999)


def test_an_instance_is_put_by_its_id(mooring: Mooring) -> None:
    made = mooring.instances.create(IMAGE, **SPEC)
    assert mooring.instances.put(made.id, IMAGE, **SPEC).outcome == "unchanged"
    renamed = mooring.instances.put(made.id, IMAGE, **SPEC, name="put-by-id")
    assert (renamed.outcome, renamed.resource.name) == ("changed", "put-by-id")


def test_a_group_is_applied_and_planned(mooring: Mooring, project: str) -> None:
    body: dict[str, Any] = {
        "count": 2, "template": {"image": IMAGE, "gpus": {"count": 64}}, "project_id": project,
    }  # fmt: skip
    assert mooring.instance_groups.plan("sdk", **body).outcome == "created"
    assert mooring.instance_groups.apply("sdk", **body).outcome == "created"
    assert mooring.instance_groups.apply("sdk", **body).outcome == "unchanged"
    plan = mooring.instance_groups.plan("sdk", **{**body, "count": 3})
    assert (plan.outcome, plan.changes[0].fixed) == ("requires_replacement", True)


def test_a_reservation_is_applied_and_planned(mooring: Mooring, project: str) -> None:
    start, end = (datetime.now(UTC) + timedelta(days=days) for days in (1, 2))
    body: dict[str, Any] = {"gpus": {"count": 1}, "from_at": start, "project_id": project}
    assert mooring.reservations.plan("sdk", **body, to_at=end).outcome == "created"
    made = mooring.reservations.apply("sdk", **body, to_at=end)
    assert made.outcome == "created"
    assert mooring.reservations.apply("sdk", **body, to_at=end).outcome == "unchanged"
    longer = mooring.reservations.apply("sdk", **body, to_at=end + timedelta(days=1))
    assert (longer.outcome, longer.resource.id) == ("changed", made.resource.id)


def test_a_project_is_applied_and_planned(mooring: Mooring, project: str) -> None:
    user = mooring.users.create("Ada", email="ada@sdk.example")
    members = [ProjectMember(email="ada@sdk.example", role=Role.OWNER)]
    assert mooring.projects.plan("sdk-apply", quotas={"gpus": 2}, members=members).outcome == "changed"
    applied = mooring.projects.apply("sdk-apply", quotas={"gpus": 2}, members=members)
    assert (applied.outcome, applied.resource.quotas.gpus) == ("changed", 2)
    assert [each.user_id for each in mooring.projects.members(project)] == [user.id]
    again = mooring.projects.apply(
        "sdk-apply", quotas={"gpus": 2}, members=[{"user_id": user.id, "role": "owner"}]
    )
    assert again.outcome == "unchanged"
    with pytest.raises(NotFound):
        mooring.projects.apply("sdk-apply", members=[{"email": "bob@sdk.example", "role": "owner"}])
    with pytest.raises(QuotaExceeded):
        mooring.instances.plan("too-big", IMAGE, gpus=3, project_id=project)


def test_two_applies_at_once_create_one(shared: RunningService, mooring: Mooring) -> None:
    async def applied() -> list[str]:
        async with AsyncMooring(shared.url, ADMIN_KEY) as client:
            both = (client.instances.apply("at-once", IMAGE, gpus=64) for _ in range(2))
            return sorted([each.outcome for each in await asyncio.gather(*both)])

    assert asyncio.run(applied()) == ["created", "unchanged"]
    assert len(list(mooring.instances.list(name="at-once"))) == 1


def test_a_lost_answer_is_made_up_for(shared: RunningService, mooring: Mooring) -> None:
    with LossyProxy(shared.url) as proxy, Mooring(proxy.url, ADMIN_KEY) as client:
        proxy.lose = 1
        assert client.instances.apply("lossy", IMAGE, gpus=64).outcome == "unchanged"  # the repetition's
    assert len(list(mooring.instances.list(name="lossy"))) == 1
