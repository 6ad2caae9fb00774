"""`mooring secrets`, `projects` and `keys`: output, exit codes, questions, and that no secret is shown."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from pexpect import EOF

from mooring.core import ids
from mooring.db.tables import Secret
from mooring.db.types import new_id, now
from tests.client.command_line import CommandLine, Tenant
from tests.service import Client, RunningService

VALUE = "hf_a-value-that-nobody-may-see"


@pytest.fixture
def tenant(shared: RunningService, admin: Client, tmp_path: Path) -> Tenant:
    return Tenant(shared, admin, tmp_path)


@pytest.fixture
def cli(shared: RunningService, tmp_path: Path) -> CommandLine:
    """The command with an admin's key."""
    return CommandLine(shared.url, tmp_path)


# --- all of them


@pytest.fixture
def lists(tenant: Tenant) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Command -> what the API lists. There is one of each."""
    tenant.member("secrets", "set", "token", given=VALUE)
    with Client(tenant.service.url, tenant.owner.environment["MOORING_API_KEY"]) as owner:
        yield {
            "secrets ls": owner.items("/v1/secrets"),
            "projects ls": owner.items("/v1/projects"),
            "keys ls": owner.items("/v1/api-keys"),
            f"projects members ls {tenant.name}": owner.items(f"/v1/projects/{tenant.id}/members"),
        }


def _without_use(items: Any) -> list[dict[str, Any]]:
    """Without the time at which a key was last used, which changes with each command."""
    return [{field: value for field, value in item.items() if field != "last_used_at"} for item in items]


def test_lists_are_those_of_the_api(tenant: Tenant, lists: dict[str, list[dict[str, Any]]]) -> None:
    for command, items in lists.items():
        assert items
        words = command.split()
        assert _without_use(tenant.owner.json(*words)) == _without_use(items)
        assert tenant.owner(*words, "-o", "name").lines == [item["name"] for item in items]
        table = tenant.owner(*words).lines
        assert len(table) == 1 + len(items)
        assert table[0].split()[0] == "NAME"


def test_a_list_as_yaml_and_with_all_columns(tenant: Tenant) -> None:
    items = tenant.owner.json("projects", "ls")
    assert yaml.safe_load(tenant.owner("projects", "ls", "-o", "yaml").out) == items
    assert tenant.id in tenant.owner("projects", "ls", "-o", "wide").lines[1]


def test_a_list_has_all_pages(tenant: Tenant) -> None:
    names = {f"s-{number}" for number in range(205)}
    with tenant.service.plane.database.write() as session:
        for name in names:
            session.add(
                Secret(
                    id=new_id(ids.SECRET), project_id=tenant.id, name=name, sealed_value=b"", created_at=now()
                )
            )
    listed = tenant.member("secrets", "ls", "-o", "name").lines
    assert (len(listed), set(listed)) == (205, names)


@pytest.mark.parametrize(
    "command",
    [
        "secrets rm no-such --yes", "keys rm no-such --yes", "keys rm key_00000000000000000000000000 --yes",
        "projects show no-such", "projects rm no-such --yes", "projects members ls no-such",
        "projects quota set no-such --gpus 1", "projects set no-such --weight 2",
        "keys create --project no-such", "keys create --user no-such@example.org", "-p no-such secrets ls",
    ],
)  # fmt: skip
def test_what_does_not_exist_ends_with_3(cli: CommandLine, command: str) -> None:
    found = cli(*command.split(), code=3)
    assert found.out == ""
    assert found.err.startswith("mooring: ")


@pytest.mark.parametrize(
    "command",
    [
        "projects create another", "projects rm {project} --yes", "projects quota set {project} --gpus 1",
        "projects set {project} --weight 2", "projects members add {project} {owner}",
        "projects members rm {project} {owner} --yes", "keys create --role owner --service",
    ],
)  # fmt: skip
def test_a_member_may_not_manage_projects(tenant: Tenant, command: str) -> None:
    words = command.format(project=tenant.name, owner=tenant.owner_id).split()
    refused = tenant.member(*words, code=4)
    assert refused.out == ""
    assert "which your credentials do not have" in refused.err


def test_without_a_terminal_nothing_is_removed_without_yes(
    tenant: Tenant, cli: CommandLine, admin: Client
) -> None:
    tenant.member("secrets", "set", "token", given=VALUE)
    before = admin.items("/v1/api-keys", project_id=tenant.id)
    for words in (
        ("secrets", "rm", "token"),
        ("keys", "rm", before[0]["id"]),
        ("projects", "rm", tenant.name),
        ("projects", "members", "rm", tenant.name, tenant.owner_id),
    ):
        refused = cli("-p", tenant.name, *words, given="y\n", code=2)
        assert (refused.out, "add --yes" in refused.err) == ("", True)
    assert [each["name"] for each in admin.items("/v1/secrets", project_id=tenant.id)] == ["token"]
    assert admin.items("/v1/api-keys", project_id=tenant.id) == before
    assert admin.items(f"/v1/projects/{tenant.id}/members") != []


# --- secrets


def test_a_secret_is_set_from_stdin_and_replaced(tenant: Tenant) -> None:
    made = tenant.member("secrets", "set", "token", given=f"{VALUE}\n")
    assert (made.lines, "created" in made.err) == (["token"], True)
    assert tenant.secret("token") == VALUE
    replaced = tenant.member("secrets", "set", "token", given="line 1\nline 2\n\n")
    assert (replaced.lines, "replaced" in replaced.err) == (["token"], True)
    assert tenant.secret("token") == "line 1\nline 2\n"
    (listed,) = tenant.member.json("secrets", "ls")
    assert listed.keys() == {"id", "name", "project_id", "created_at"}
    tenant.member("secrets", "set", listed["id"], given="by its ID")
    assert tenant.secret("token") == "by its ID"
    for done in (made, replaced, tenant.member("secrets", "ls", "-o", "wide")):
        assert VALUE not in done.out + done.err


def test_a_secret_from_a_file_is_the_whole_file(tenant: Tenant, tmp_path: Path) -> None:
    file = tmp_path / "id_ed25519"
    file.write_text(f"{VALUE}\n")
    tenant.member("secrets", "set", "key", "--from-file", str(file))
    assert tenant.secret("key") == f"{VALUE}\n"
    missing = tenant.member("secrets", "set", "key", "--from-file", f"{file}.pub", code=2)
    assert "cannot read" in missing.err


def test_a_secret_is_typed_without_being_shown(tenant: Tenant) -> None:
    process = tenant.member.terminal("secrets", "set", "typed")
    process.expect_exact(b"value of typed: ")
    process.send(f"{VALUE}\r")
    process.expect(EOF)
    process.close()
    assert process.exitstatus == 0
    assert VALUE.encode() not in (process.before or b"")
    assert tenant.secret("typed") == VALUE


def test_a_secret_is_never_an_argument(tenant: Tenant) -> None:
    tenant.member("secrets", "set", "token", VALUE, code=2)
    help_text = tenant.member("secrets", "set", "--help").out
    assert "--value" not in help_text
    assert tenant.member("secrets", "ls", "-o", "name").lines == []


@pytest.mark.parametrize(
    ("value", "name", "code"),
    [
        (b"", "token", 2),
        (b"\n", "token", 2),
        (b"\xff" + VALUE.encode(), "token", 2),
        (VALUE.encode() * 10_000, "token", 2),
        (VALUE.encode() * 1100, "token", 1),
        (f"{VALUE}\0".encode(), "token", 1),
        (VALUE.encode(), "a/b", 1),
    ],
)
def test_a_value_that_is_refused_is_not_shown(tenant: Tenant, value: bytes, name: str, code: int) -> None:
    refused = tenant.member.run("secrets", "set", name, given=value)
    assert refused.returncode == code, refused.stderr
    assert refused.stdout == b""
    assert VALUE.encode() not in refused.stderr
    assert tenant.member("secrets", "ls", "-o", "name").lines == []


def test_a_value_is_not_shown_if_the_server_cannot_be_reached(tmp_path: Path) -> None:
    cli = CommandLine("http://127.0.0.1:1", tmp_path)
    failed = cli("secrets", "set", "token", given=VALUE, code=7)
    assert VALUE not in failed.out + failed.err
    assert "cannot be reached" in failed.err


def test_secrets_of_one_name_in_several_projects(tenant: Tenant, cli: CommandLine) -> None:
    name = f"shared-{tenant.name}"
    cli("secrets", "set", name, given="of default")
    cli("-p", tenant.name, "secrets", "set", name, given=VALUE)
    assert tenant.secret(name) == VALUE
    ambiguous = cli("secrets", "rm", name, "--yes", code=2)
    assert "mooring -p PROJECT" in ambiguous.err
    assert cli("-p", tenant.name, "secrets", "rm", name, "--yes").lines == [name]
    assert cli("-p", tenant.name, "secrets", "ls", "-o", "name").lines == []
    assert cli("secrets", "rm", name, "--yes").lines == [name]


# --- projects


def test_the_life_of_a_project(cli: CommandLine, admin: Client) -> None:
    name = f"life-{uuid4().hex[:8]}"
    made = cli.json("projects", "create", name, "--label", "team=vision")
    assert (made["name"], made["labels"]) == (name, {"team": "vision"})
    assert cli.json("projects", "show", name) == admin.get(f"/v1/projects/{made['id']}").json()
    assert "exists" in cli("projects", "create", name, code=1).err
    changes = [
        "--weight", "2.5", "--guaranteed-gpus", "4", "--max-priority", "50", "--gpu-sharing",
        "--allow-image", "pytorch/*", "--node-selector", "zone=a", "--security-profile", "strict",
    ]  # fmt: skip
    assert cli("projects", "set", name, *changes).lines == [name]
    found = admin.get(f"/v1/projects/{made['id']}").json()
    assert found == made | {
        "weight": 2.5, "guaranteed_gpus": 4, "max_priority": 50, "gpu_sharing": True,
        "allowed_images": ["pytorch/*"], "node_selector": {"zone": "a"}, "security_profile": "strict",
        "version": found["version"],
    }  # fmt: skip
    reset = ["--label", "none", "--node-selector", "none", "--max-priority", "none", "--no-gpu-sharing"]
    cli("projects", "set", name, *reset)
    found = admin.get(f"/v1/projects/{made['id']}").json()
    assert (found["labels"], found["node_selector"], found["max_priority"]) == ({}, {}, None)
    assert (found["gpu_sharing"], found["guaranteed_gpus"]) == (False, 4)
    cli("projects", "set", name, code=2)
    assert cli("projects", "rm", name, "--yes").lines == [name]
    assert admin.items("/v1/projects", name=name) == []


def test_a_quota_is_changed_alone(tenant: Tenant, cli: CommandLine, admin: Client) -> None:
    cli("projects", "quota", "set", tenant.name, "--gpus", "8", "--memory", "512g", "--gpus-of", "H100=4")
    shown = cli.json(
        "projects", "quota", "set", tenant.id, "--gpus-of", "A100=2", "--gpu-hours-per-day", "9.5"
    )
    assert shown == admin.get(f"/v1/projects/{tenant.id}").json()
    quotas = shown["quotas"]
    assert (quotas["gpus"], quotas["memory_mib"], quotas["gpu_hours_per_day"]) == (8, 524_288, 9.5)
    assert quotas["gpus_by_model"] == {"H100": 4, "A100": 2}
    table = cli("projects", "quota", "set", tenant.name, "--gpus", "none", "--gpus-of", "H100=none").lines
    rows = [line.split() for line in table]
    assert ["GPUs", "0", "none"] in rows
    assert ["GPUs", "A100", "0", "2"] in rows
    assert not any("H100" in row for row in rows)
    assert rows[-2:] == [["GPU-hours", "today", "0", "9.5"], ["GPU-hours", "this", "month", "0", "none"]]
    cli("projects", "quota", "set", tenant.name, "--gpus", "many", code=2)
    cli("projects", "quota", "set", tenant.name, code=2)


def test_a_project_is_shown_with_what_it_uses(tenant: Tenant, admin: Client) -> None:
    admin.patch(f"/v1/projects/{tenant.id}", json={"quotas": {"gpus": 64}})
    with Client(tenant.service.url, tenant.member.environment["MOORING_API_KEY"]) as client:
        client.create(gpus={"count": 3}, node_selector={"no": "node"})
    shown = tenant.member("projects", "show").lines
    assert shown[0].split() == ["name", tenant.name]
    assert ["GPUs", "3", "64"] in [line.split() for line in shown]
    assert tenant.member("projects", "show", "-o", "name").lines == [tenant.name]


def test_members_are_added_changed_and_removed(tenant: Tenant, admin: Client) -> None:
    address = f"ann@{tenant.name}.example"
    user = admin.post("/v1/users", json={"name": "Ann", "email": address}).json()
    assert tenant.owner("projects", "members", "add", tenant.name, address).lines == ["Ann"]
    changed = tenant.owner.json("projects", "members", "add", tenant.name, user["id"], "--role", "viewer")
    assert changed == next(
        each for each in admin.items(f"/v1/projects/{tenant.id}/members") if each["user_id"] == user["id"]
    )
    assert changed["role"] == "viewer"
    tenant.owner("projects", "members", "add", tenant.name, address, "--role", "king", code=2)
    unknown = tenant.owner("projects", "members", "add", tenant.name, "bob@example.org", code=3)
    assert "bob@example.org" in unknown.err
    assert tenant.owner("projects", "members", "rm", tenant.name, address.upper(), "--yes").lines == ["Ann"]
    tenant.owner("projects", "members", "rm", tenant.name, address, "--yes", code=3)
    assert tenant.owner("projects", "members", "ls", tenant.name, "-o", "name").lines == ["Olga"]


# --- keys


def test_a_key_is_printed_once_and_alone(tenant: Tenant) -> None:
    made = tenant.owner("keys", "create", "--name", "laptop", "--expires", "30d")
    (key,) = made.lines
    assert key not in made.err
    assert "laptop" in made.err
    assert tenant.name in made.err
    whoami = CommandLine(tenant.service.url, tenant.folder, key).json("whoami")
    assert (whoami["user"]["id"], whoami["role"]) == (tenant.owner_id, "member")
    expires = datetime.fromisoformat(whoami["key"]["expires_at"])
    assert timedelta(days=29) < expires - now() <= timedelta(days=30)
    assert key not in tenant.owner("keys", "ls", "-o", "json").out


def test_a_key_as_json_is_the_answer_of_the_api(tenant: Tenant, admin: Client) -> None:
    made = tenant.owner.json("keys", "create", "--name", "ci", "--service", "--scope", "instances:read")
    found = admin.get(f"/v1/api-keys/{made['id']}").json()
    assert made == {**found, "key": made["key"]}
    assert (made["user_id"], made["role"], made["scopes"]) == (None, None, ["instances:read"])


def test_an_admin_creates_the_key_of_a_member(tenant: Tenant, cli: CommandLine) -> None:
    address = f"{tenant.name}@example.org"
    of_member = ["--project", tenant.name, "--user", address, "--role", "viewer"]
    made = cli.json("keys", "create", *of_member)
    assert (made["project_id"], made["user_id"], made["role"]) == (tenant.id, tenant.owner_id, "viewer")
    assert "@" in made["name"]  # the login and the machine


def test_an_admins_key_belongs_to_no_project(tenant: Tenant, cli: CommandLine) -> None:
    made = cli.json("-p", tenant.name, "keys", "create", "--name", tenant.name, "--scope", "metrics:read")
    assert (made["project_id"], made["role"], made["scopes"]) == (None, None, ["metrics:read"])
    assert cli("keys", "rm", made["id"], "--yes").lines == [tenant.name]


@pytest.mark.parametrize(
    ("expires", "code"), [("soon", 2), ("99999999999d", 2), ("2020-01-01", 1), ("2999-01-01T00:00:00Z", 0)]
)
def test_an_expiry_is_a_duration_or_a_time(tenant: Tenant, expires: str, code: int) -> None:
    made = tenant.owner("keys", "create", "--expires", expires, code=code)
    assert bool(made.out) == (code == 0)


def test_keys_are_revoked_by_name_id_or_beginning(tenant: Tenant) -> None:
    made = [tenant.owner.json("keys", "create", "--name", f"n-{number}") for number in range(3)]
    twin = tenant.owner.json("keys", "create", "--name", "n-0")
    ambiguous = tenant.owner("keys", "rm", "n-0", "--yes", code=2)
    assert made[0]["id"] in ambiguous.err
    assert twin["id"] in ambiguous.err
    done = tenant.owner("keys", "rm", twin["id"], "n-1", f"{made[2]['prefix']}…", "--yes")
    assert done.lines == ["n-0", "n-1", "n-2"]
    CommandLine(tenant.service.url, tenant.folder, twin["key"])("whoami", code=4)
    CommandLine(tenant.service.url, tenant.folder, made[0]["key"])("whoami")


@pytest.mark.parametrize("reference", ["", "-", "…"])
def test_an_empty_reference_is_no_key(cli: CommandLine, reference: str) -> None:
    """The first admin's key has no beginning that is known, so this could match it."""
    assert "" in {key["prefix"] for key in cli.json("keys", "ls")}
    cli("keys", "rm", reference, "--yes", code=3)


def test_a_question_says_that_the_key_is_in_use(tenant: Tenant) -> None:
    own = tenant.owner.json("whoami")["key"]
    asked = tenant.owner("keys", "rm", own["id"], code=2)
    assert "You use one of them now" in asked.err


def test_a_name_cannot_forge_a_question(tenant: Tenant) -> None:
    made = tenant.owner.json("keys", "create", "--name", "\x1b[2K\rharmless")
    asked = tenant.owner("keys", "rm", made["id"], code=2)
    assert "\x1b" not in asked.err
    assert "harmless" in asked.err


@pytest.mark.parametrize("output", ["table", "wide", "name", "json", "yaml"])
def test_a_name_cannot_forge_what_a_terminal_shows(tenant: Tenant, output: str) -> None:
    tenant.owner("keys", "create", "--name", "a\x1b]0;title\x07\x1b[2Jkey\u202e\x9b2J")
    found = tenant.owner("keys", "ls", "-o", output).out
    assert not set("\x1b\x07\x9b\u202e") & set(found)
    if output in {"table", "wide", "name"}:
        assert "akey2J" in found
