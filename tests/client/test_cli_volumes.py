"""`mooring volumes`, and `mooring run -v`."""

from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from tests.client.command_line import CommandLine, Tenant
from tests.service import Client, RunningService


@pytest.fixture
def tenant(shared: RunningService, admin: Client, tmp_path: Path) -> Tenant:
    return Tenant(shared, admin, tmp_path)


def test_a_volume_from_its_creation_to_its_end(tenant: Tenant) -> None:
    cli, name = tenant.member, f"data-{uuid4().hex[:6]}"
    assert cli("volumes", "create", name, "--size", "2g", "-l", "a=b").lines == [name]
    shown = cli.json("volumes", "show", name)
    assert (shown["size_mib"], shown["labels"], shown["driver"]) == (2048, {"a": "b"}, "local")
    assert [each["id"] for each in cli.json("volumes", "ls")] == [shown["id"]]
    assert cli("volumes", "ls").lines[1].split()[:2] == [name, "local"]
    assert cli("volumes", "rm", name, "--yes").lines == [name]
    assert cli.json("volumes", "ls") == []


def test_run_mounts_volumes(tenant: Tenant) -> None:
    cli = tenant.member
    cli("volumes", "create", "data")
    options = ["-v", "data:/data", "--volume", "data:/other:ro", "--node-selector", "zone=nowhere"]
    made = cli("run", "-d", *options, "mooring-test/busybox:1").lines[0]
    instance = next(each for each in cli.json("ps", "-a") if each["id"] == made)
    assert instance["volumes"] == [
        {"volume": "data", "path": "/data", "read_only": False},
        {"volume": "data", "path": "/other", "read_only": True},
    ]
    refused = cli("volumes", "rm", "data", "--yes", code=1)
    assert instance["name"] in refused.err and "volume_in_use" in refused.err


@pytest.mark.parametrize("text", ["data", "data:", ":/data", "data:/a:rx", "/etc:/etc", "./x:/x", "~/x:/x"])
def test_other_mounts_are_usage_errors(tenant: Tenant, text: str) -> None:
    cli: CommandLine = tenant.member
    assert "--volume" in cli("run", "-d", "-v", text, "mooring-test/busybox:1", code=2).err


def test_apply_creates_a_volume_before_the_instance_that_mounts_it(tenant: Tenant) -> None:
    instance = {
        "kind": "instance", "name": "web", "image": "mooring-test/busybox:1",
        "node_selector": {"zone": "nowhere"}, "volumes": [{"volume": "kept", "path": "/data"}],
    }  # fmt: skip
    volume = {"kind": "volume", "name": "kept", "size_mib": 100}
    text = yaml.safe_dump_all([instance, volume])
    first = tenant.member("apply", "-f", "-", given=text).out
    assert "volume/kept" in first and "instance/web" in first
    assert tenant.member("apply", "-f", "-", given=text).out.count("unchanged") == 2
    assert tenant.member("diff", "-f", "-", given=text).out == ""
