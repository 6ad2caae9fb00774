"""Webhooks with the SDK, with `mooring webhooks`, and with `mooring apply`."""

import asyncio
from pathlib import Path

import pytest

from mooring_client import AsyncMooring, Mooring
from mooring_client.errors import NotFound, PreconditionFailed, WebhookUrlNotAllowed
from tests.client.command_line import CommandLine, Tenant
from tests.service import ADMIN_KEY, Client, RunningService
from tests.testbed.waiting import wait_until

# Names of this domain have no address, so nothing is sent.
URL = "https://receiver.invalid/hook"


@pytest.fixture
def sdk(shared: RunningService) -> Mooring:
    return Mooring(shared.url, ADMIN_KEY)


@pytest.fixture
def tenant(shared: RunningService, admin: Client, tmp_path: Path) -> Tenant:
    return Tenant(shared, admin, tmp_path)


def test_the_sdk_manages_webhooks(sdk: Mooring) -> None:
    with sdk as client:
        made = client.webhooks.create(URL, name="sdk", events=["instance.state_changed"])
        assert made.secret.startswith("whsec_")
        assert client.webhooks.get(made.id).model_dump() == made.model_dump(exclude={"secret"})
        assert [each.id for each in client.webhooks.list(name="sdk")] == [made.id]
        changed = client.webhooks.update(made.id, format="slack", enabled=True, version=1)
        assert (changed.format, changed.version) == ("slack", 2)
        with pytest.raises(PreconditionFailed):
            client.webhooks.update(made.id, format="standard", version=1)
        with pytest.raises(WebhookUrlNotAllowed):
            client.webhooks.update(made.id, url="https://127.0.0.1/")
        assert client.webhooks.rotate_secret(made.id).secret != made.secret
        sent = client.webhooks.test(made.id)
        assert [each.id for each in client.webhooks.deliveries(made.id)] == [sent.id]
        assert client.webhooks.replay(made.id, sent.id).status == "pending"
        client.webhooks.delete(made.id)
        with pytest.raises(NotFound):
            client.webhooks.get(made.id)


def test_the_sdk_applies_webhooks(sdk: Mooring) -> None:
    with sdk as client:
        assert client.webhooks.plan("applied", url=URL).outcome == "created"
        made = client.webhooks.apply("applied", url=URL)
        assert made.outcome == "created"
        assert client.webhooks.apply("applied", url=URL).outcome == "unchanged"
        plan = client.webhooks.plan("applied", url=f"{URL}2", format="slack")
        assert [(each.pointer, each.after) for each in plan.changes] == [
            ("/url", None),
            ("/format", '"slack"'),
        ]
        assert client.webhooks.apply("applied", url=f"{URL}2", format="slack").outcome == "changed"
        client.webhooks.delete(made.resource.id)


def test_the_asynchronous_client_has_the_same_methods(shared: RunningService) -> None:
    async def create_and_delete() -> str:
        async with AsyncMooring(shared.url, ADMIN_KEY) as client:
            made = await client.webhooks.create(URL)
            found = [each.id async for each in client.webhooks.list()]
            await client.webhooks.delete(made.id)
            return made.id if made.id in found else ""

    assert asyncio.run(create_and_delete()).startswith("whk_")


def test_the_command_manages_webhooks(tenant: Tenant) -> None:
    owner = tenant.owner
    added = owner(
        "webhooks", "add", URL, "--name", "chat", "--slack", "-e", "notices", "-e", "instance.gpu_fault"
    )
    assert added.out.startswith("whsec_")
    (listed,) = owner.json("webhooks", "ls")
    assert (listed["name"], listed["format"], listed["project_id"]) == ("chat", "slack", tenant.id)
    assert listed["events"] == ["notices", "instance.gpu_fault"]
    table = owner("webhooks", "ls").lines
    assert table[0].split() == ["NAME", "PROJECT", "STATE", "PENDING", "EVENTS", "URL"]
    assert table[1].split()[:3] == ["chat", tenant.name, "enabled"]
    assert owner.json("webhooks", "show", "chat") == listed
    assert "slack" in owner("webhooks", "show", "chat").out
    rotated = owner("webhooks", "rotate", "chat").out
    assert rotated.startswith("whsec_")
    assert rotated != added.out
    delivery = owner("webhooks", "test", "chat").out.strip()

    def failed() -> bool:
        (shown,) = owner("webhooks", "deliveries", "chat", "--status", "pending").lines[1:]
        return "name_not_resolved" in shown

    wait_until(failed)
    assert owner("webhooks", "deliveries", "chat", "--status", "failed").lines == []
    assert owner("webhooks", "replay", "chat", delivery).lines == [delivery]
    assert owner("webhooks", "rm", "chat", "--yes").lines == ["chat"]
    assert owner.json("webhooks", "ls") == []


def test_members_and_wrong_names(tenant: Tenant) -> None:
    tenant.member("webhooks", "ls", code=4)
    tenant.member("webhooks", "add", URL, code=4)
    tenant.owner("webhooks", "add", URL, "--all-projects", code=4)
    tenant.owner("webhooks", "add", "https://127.0.0.1/", code=1)
    tenant.owner("webhooks", "add", URL, "-e", "no.such", code=1)
    for words in (["show"], ["rotate"], ["test"], ["deliveries"], ["rm", "--yes"]):
        tenant.owner("webhooks", *words, "no-such", code=3)


def test_a_file_is_applied_again_without_a_change(shared: RunningService, tmp_path: Path) -> None:
    cli = CommandLine(shared.url, tmp_path)
    file = tmp_path / "webhooks.yaml"
    file.write_text(f"kind: webhook\nname: of-a-file\nurl: {URL}\nall_projects: true\n")
    for expected in ("created", "unchanged"):
        assert cli("apply", "-f", str(file)).lines == [f"webhook/of-a-file {expected}"]
    file.write_text(file.read_text() + "format: slack\n")
    assert "webhook/of-a-file would be changed" in cli("diff", "-f", str(file), code=1).out
    assert cli("apply", "-f", str(file)).lines == ["webhook/of-a-file changed"]
    assert cli("webhooks", "rm", "of-a-file", "--yes").lines == ["of-a-file"]
