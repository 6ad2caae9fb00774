"""Volumes: their requests, where they are, who mounts them, and their end."""

from typing import Any

import pytest

from mooring.schemas.agent import ReportedVolume
from mooring_client.schemas.paths import forbidden_mount_path
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

NOWHERE = {"sandbox": "nowhere"}


def make(client: Client, name: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/volumes", json={"name": name, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == f"/v1/volumes/{answer.json()['id']}"
    return dict(answer.json())


def read(client: Client, volume: dict[str, Any]) -> dict[str, Any]:
    answer = client.get(f"/v1/volumes/{volume['id']}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def mount(volume: dict[str, Any], path: str = "/data", **fields: Any) -> list[dict[str, Any]]:
    return [{"volume": volume["name"], "path": path, **fields}]


def unique(sandbox: Sandbox, name: str = "data") -> str:
    return f"{name}-{sandbox.node.name}"


def reported(volume: dict[str, Any], **fields: Any) -> list[ReportedVolume]:
    return [ReportedVolume(volume_id=volume["id"], **fields)]


def test_a_new_volume_is_nowhere_and_has_the_default_size(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox), labels={"team": "a"})
    assert made["driver"] == "local" and made["size_mib"] == 10_240 and made["labels"] == {"team": "a"}
    assert made["node_id"] is None and made["used_mib"] is None and not made["size_enforced"]
    assert made["state"] == "available" and made["mounted_by"] == [] and made["copies"] == []
    assert read(sandbox.client, made) == made
    assert made in sandbox.client.items("/v1/volumes", name=made["name"])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"driver": "nfs"}, "nfs_incomplete"),
        ({"driver": "nfs", "options": {"server": "nas"}}, "nfs_incomplete"),
        ({"driver": "nfs", "options": {"server": "nas", "path": "/a"}, "size_mib": 5}, "size_of_nfs"),
        ({"driver": "nfs", "options": {"server": "nas,uid=0", "path": "/a"}}, "string_pattern_mismatch"),
        ({"driver": "nfs", "options": {"server": "nas", "path": "/a,suid"}}, "string_pattern_mismatch"),
        ({"driver": "nfs", "options": {"server": "nas", "path": "relative"}}, "string_pattern_mismatch"),
        ({"driver": "nfs", "options": {"server": "nas", "path": "/a", "o": "suid"}}, "unknown_field"),
        ({"driver": "local", "options": {"path": "/etc"}}, "options_not_allowed"),
        ({"driver": "cache", "node_selector": {"zone": "a"}}, "selector_not_allowed"),
        ({"driver": "host"}, "literal_error"),
        ({"size_mib": 0}, "greater_than_equal"),
        ({"host_path": "/etc"}, "unknown_field"),
    ],
)
def test_a_volume_of_anything_else_is_rejected(sandbox: Sandbox, fields: dict[str, Any], code: str) -> None:
    answer = sandbox.client.post("/v1/volumes", json={"name": unique(sandbox), **fields})
    codes = {each["code"] for each in problem(answer, 422)["errors"]}
    assert code in codes, codes


@pytest.mark.parametrize(
    "path",
    [
        "/", "/proc", "/proc/1", "/sys/fs", "/dev", "/dev/shm", "/.mooring", "/.mooring/bin", "/etc",
        "/etc/hosts", "/tmp/nvidia-mps", "/data/", "/data/../etc", "/a//b", "//data", "/./a", "/a\nb",
    ],
)  # fmt: skip
def test_a_volume_cannot_be_at_a_path_that_others_use(sandbox: Sandbox, path: str) -> None:
    made = make(sandbox.client, unique(sandbox))
    body = {"image": "mooring-test/busybox:1", "volumes": mount(made, path)}
    errors = problem(sandbox.client.post("/v1/instances", json=body), 422)["errors"]
    assert [each["code"] for each in errors] == ["volume_path_not_allowed"], errors
    assert forbidden_mount_path(path) is not None


@pytest.mark.parametrize("path", ["data", "../etc", "/a:ro", "", "/a\x00"])
def test_a_path_must_be_absolute_and_without_options(sandbox: Sandbox, path: str) -> None:
    made = make(sandbox.client, unique(sandbox))
    body = {"image": "mooring-test/busybox:1", "volumes": mount(made, path)}
    problem(sandbox.client.post("/v1/instances", json=body), 422)


@pytest.mark.parametrize("paths", [("/data", "/data"), ("/data", "/data/in"), ("/a/b/c", "/a")])
def test_volumes_do_not_overlap(sandbox: Sandbox, paths: tuple[str, str]) -> None:
    made = make(sandbox.client, unique(sandbox))
    volumes = [*mount(made, paths[0]), *mount(made, paths[1])]
    body = {"image": "mooring-test/busybox:1", "volumes": volumes}
    errors = problem(sandbox.client.post("/v1/instances", json=body), 422)["errors"]
    assert [each["code"] for each in errors] == ["volume_paths_overlap"]


def test_names_below_the_path_of_another_are_no_overlap(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    volumes = [*mount(made, "/data"), *mount(made, "/data-2", read_only=True)]
    assert sandbox.create(volumes=volumes)["volumes"] == [
        {"volume": made["name"], "path": "/data", "read_only": False},
        {"volume": made["name"], "path": "/data-2", "read_only": True},
    ]


def test_an_unknown_volume_is_named_with_its_place(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    volumes = [*mount(made, "/a"), {"volume": "nothing", "path": "/b"}]
    body = {"image": "mooring-test/busybox:1", "volumes": volumes}
    found = problem(sandbox.client.post("/v1/instances", json=body), 422, "unknown_volume")
    assert [each["pointer"] for each in found["errors"]] == ["/volumes/1/volume"]


def test_the_first_placement_binds_a_local_volume_and_its_node_gets_it(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox), size_mib=77)
    assignment = sandbox.placed(volumes=mount(made, read_only=True))
    (assigned,) = assignment.volumes
    assert (assigned.volume_id, assigned.driver, assigned.size_mib) == (made["id"], "local", 77)
    assert (assigned.path, assigned.read_only) == ("/data", True)
    bound = read(sandbox.client, made)
    assert bound["node_id"] == sandbox.node.id and bound["node_name"] == sandbox.node.name
    assert bound["version"] == made["version"] + 1
    (user,) = bound["mounted_by"]
    assert user["instance_id"] == assignment.instance_id and user["path"] == "/data" and user["read_only"]


def test_a_report_shows_how_full_a_volume_is(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    assignment = sandbox.placed(volumes=mount(made))
    running = observed(assignment, "running")
    sandbox.sync(running, volumes=reported(made, used_mib=12, size_enforced=True))
    shown = read(sandbox.client, made)
    assert shown["used_mib"] == 12 and shown["size_enforced"]
    sandbox.sync(running, volumes=reported(made, size_enforced=True))
    assert read(sandbox.client, made)["used_mib"] == 12, "a measurement that took too long changes nothing"


def test_a_node_cannot_report_a_volume_that_it_was_not_told_to_have(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    sandbox.sync(volumes=reported(made, used_mib=12, size_enforced=True))
    shown = read(sandbox.client, made)
    assert shown == made


def test_a_later_instance_must_go_where_the_data_is(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    sandbox.placed(volumes=mount(made))
    waiting = sandbox.client.create(volumes=mount(made), node_selector=NOWHERE)
    explained = sandbox.client.get(f"/v1/instances/{waiting['id']}/explain").json()
    codes = {each["code"] for each in explained["refusals"] if each["node_id"] != sandbox.node.id}
    assert codes <= {"selector_mismatch", "volume_elsewhere", "node_unreachable"}
    dry = sandbox.client.post(
        "/v1/instances",
        params={"dry_run": True},
        json={"image": "mooring-test/busybox:1", "volumes": mount(made)},
    ).json()
    assert dry["placeable"] and dry["node_id"] == sandbox.node.id


def test_many_concurrent_instances_share_one_node(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    ids = run_concurrently(8, lambda _: sandbox.create(volumes=mount(made), cpus=1, memory_mib=64)["id"])
    for each in ids:
        assert sandbox.client.wait(each, "scheduled")["node_id"] == sandbox.node.id
    assert len(read(sandbox.client, made)["mounted_by"]) == 8


def test_a_mounted_volume_cannot_be_deleted_and_the_error_names_its_users(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    instance = sandbox.client.create(volumes=mount(made), node_selector=NOWHERE)
    found = problem(sandbox.client.delete(f"/v1/volumes/{made['id']}"), 409, "volume_in_use")
    assert found["instances"] == [instance["name"]] and instance["name"] in found["detail"]
    sandbox.client.post(f"/v1/instances/{instance['id']}/stop", json={})
    problem(sandbox.client.delete(f"/v1/volumes/{made['id']}"), 409, "volume_in_use")
    sandbox.client.delete(f"/v1/instances/{instance['id']}")
    deleted = sandbox.client.delete(f"/v1/volumes/{made['id']}")
    assert deleted.status_code == 202 and deleted.json()["state"] == "deleting"
    problem(sandbox.client.get(f"/v1/volumes/{made['id']}"), 404)


def test_a_deleted_volume_is_shown_until_its_node_confirms(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    assignment = sandbox.placed(volumes=mount(made))
    sandbox.sync(observed(assignment, "running"), volumes=reported(made))
    sandbox.client.delete(f"/v1/instances/{assignment.instance_id}")
    sandbox.sync(volumes=reported(made))
    before = sandbox.node.generation
    assert sandbox.client.delete(f"/v1/volumes/{made['id']}").status_code == 202
    assert sandbox.client.delete(f"/v1/volumes/{made['id']}").status_code == 202, "a repetition"
    assert read(sandbox.client, made)["state"] == "deleting"
    assert made["id"] not in {each["id"] for each in sandbox.client.items("/v1/volumes", limit=200)}
    make(sandbox.client, made["name"])  # its name is free
    # A report that the node made before it heard of the deletion does not list it: that confirms nothing.
    answer = sandbox.sync(generation=before, volumes=[])
    assert answer.volume_removals == [made["id"]]
    assert read(sandbox.client, made)["state"] == "deleting"
    assert sandbox.sync(volumes=reported(made)).volume_removals == [made["id"]]
    assert sandbox.sync(volumes=None).volume_removals == [made["id"]], "an unknown list confirms nothing"
    assert sandbox.sync(volumes=[]).volume_removals == []
    problem(sandbox.client.get(f"/v1/volumes/{made['id']}"), 404)


def test_of_a_delete_and_a_create_one_wins(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))

    def create() -> int:
        body = {"image": "mooring-test/busybox:1", "volumes": mount(made), "node_selector": NOWHERE}
        return sandbox.client.post("/v1/instances", json=body).status_code

    def delete() -> int:
        return sandbox.client.delete(f"/v1/volumes/{made['id']}").status_code

    statuses = run_concurrently(8, lambda number: delete() if number % 2 else create())
    left = sandbox.client.get(f"/v1/volumes/{made['id']}")
    pending = sandbox.client.items("/v1/instances", state="pending", limit=200)
    users = [each["id"] for each in pending if each["volumes"] == mount(made, read_only=False)]
    assert left.status_code == (200 if users else 404), (statuses, users)


def test_two_volumes_on_two_nodes_cannot_be_mounted_together(sandbox: Sandbox) -> None:
    here = make(sandbox.client, unique(sandbox, "here"))
    sandbox.placed(volumes=mount(here))
    other = Sandbox(sandbox.service, sandbox.client)
    try:
        there = make(sandbox.client, unique(sandbox, "there"))
        other.placed(volumes=mount(there))
        volumes = [*mount(here, "/here"), *mount(there, "/there")]
        body = {"image": "mooring-test/busybox:1", "volumes": volumes}
        found = problem(sandbox.client.post("/v1/instances", json=body), 409, "volumes_apart")
        assert found["nodes"] == {here["name"]: sandbox.node.name, there["name"]: other.node.name}
    finally:
        other.close()


def test_labels_can_be_changed_and_the_size_until_a_node_has_the_volume(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    path = f"/v1/volumes/{made['id']}"
    problem(sandbox.client.patch(path, json={"labels": {}}, headers={"If-Match": '"9"'}), 412)
    changed = sandbox.client.patch(path, json={"labels": {"a": "b"}, "size_mib": 20_000}).json()
    assert changed["labels"] == {"a": "b"} and changed["size_mib"] == 20_000
    sandbox.placed(volumes=mount(made))
    problem(sandbox.client.patch(path, json={"size_mib": 20_001}), 409, "volume_size_fixed")
    assert sandbox.client.patch(path, json={"labels": {}}).status_code == 200


def test_applying_a_volume_creates_then_changes_then_leaves_it(sandbox: Sandbox) -> None:
    path, body = f"/v1/volumes/by-name/{unique(sandbox)}", {"size_mib": 500, "labels": {"a": "b"}}
    plan = sandbox.client.put(path, params={"dry_run": True}, json=body).json()
    assert plan == {"outcome": "created", "id": None, "changes": []}
    created = sandbox.client.put(path, json=body)
    assert created.status_code == 201 and created.headers["Mooring-Applied"] == "created"
    again = sandbox.client.put(path, json={**body, "driver": "local"})
    assert again.status_code == 200 and again.headers["Mooring-Applied"] == "unchanged"
    changed = sandbox.client.put(f"/v1/volumes/{created.json()['id']}", json={"size_mib": 600})
    assert changed.headers["Mooring-Applied"] == "changed" and changed.json()["labels"] == {}
    found = problem(sandbox.client.put(path, json={"driver": "cache"}), 409, "requires_replacement")
    assert found["pointers"] == ["/driver"]


def test_concurrent_applies_create_one_volume(sandbox: Sandbox) -> None:
    path = f"/v1/volumes/by-name/{unique(sandbox)}"
    statuses = run_concurrently(6, lambda _: sandbox.client.put(path, json={}).status_code)
    assert sorted(statuses) == [200] * 5 + [201]


def test_members_of_a_group_mount_no_local_volume(sandbox: Sandbox) -> None:
    local, cache = (
        make(sandbox.client, unique(sandbox, driver), driver=driver) for driver in ("local", "cache")
    )
    template = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": sandbox.node.name}}
    body = {"count": 2, "template": {**template, "volumes": mount(local)}}
    problem(sandbox.client.post("/v1/instance-groups", json=body), 422, "volume_not_for_groups")
    body = {"count": 2, "template": {**template, "volumes": mount(cache)}}
    group = sandbox.client.post("/v1/instance-groups", json=body).json()
    wait_until(lambda: len(sandbox.node.sync(instances=None).assignments) == 2)
    for assignment in sandbox.node.sync(instances=None, specs=None).assignments:
        assert [each.volume_id for each in assignment.volumes] == [cache["id"]]
    sandbox.client.delete(f"/v1/instance-groups/{group['id']}")


def test_an_nfs_volume_reaches_its_node_with_its_options(sandbox: Sandbox) -> None:
    options = {"server": "nas-1", "path": "/export/home", "version": "4.1", "hard": True}
    made = make(sandbox.client, unique(sandbox), driver="nfs", options=options)
    assert made["size_mib"] is None and made["options"] == options
    (assigned,) = sandbox.placed(volumes=mount(made)).volumes
    assert (assigned.server, assigned.exported_path) == ("nas-1", "/export/home")
    assert (assigned.version, assigned.hard) == ("4.1", True)
    assert read(sandbox.client, made)["node_id"] is None, "an nfs volume is bound to no node"


def test_a_node_may_empty_a_cache(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox), driver="cache")
    assignment = sandbox.placed(volumes=mount(made))
    running = observed(assignment, "running")
    sandbox.sync(running, volumes=reported(made, used_mib=9))
    assert [each["used_mib"] for each in read(sandbox.client, made)["copies"]] == [9]
    sandbox.sync(running, volumes=[])
    assert read(sandbox.client, made)["copies"] == []


def test_a_report_before_the_start_does_not_make_the_deletion_forget_the_node(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox), driver="cache")
    assignment = sandbox.placed(volumes=mount(made))
    sandbox.sync(volumes=[])  # the node has the assignment, and has not created the volume yet
    sandbox.sync(observed(assignment, "running"), volumes=reported(made))
    sandbox.client.delete(f"/v1/instances/{assignment.instance_id}")
    sandbox.sync(volumes=reported(made))
    assert sandbox.client.delete(f"/v1/volumes/{made['id']}").status_code == 202
    assert sandbox.sync(volumes=reported(made)).volume_removals == [made["id"]]
    assert read(sandbox.client, made)["state"] == "deleting"


def test_a_local_volume_keeps_its_node_although_the_node_has_not_created_it(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    sandbox.placed(volumes=mount(made))
    sandbox.sync(volumes=[])
    assert read(sandbox.client, made)["node_id"] == sandbox.node.id


def test_an_agent_of_an_earlier_release_gets_no_instance_with_a_volume(sandbox: Sandbox) -> None:
    sandbox.node.facts = sandbox.node.facts.model_copy(update={"mounts_volumes": False})
    sandbox.sync()
    made = make(sandbox.client, unique(sandbox))
    waiting = sandbox.create(volumes=mount(made))
    explained = sandbox.client.get(f"/v1/instances/{waiting['id']}/explain").json()
    refusals = [each for each in explained["refusals"] if each["node_id"] == sandbox.node.id]
    assert [each["code"] for each in refusals] == ["volumes_unsupported"]


def test_a_node_with_local_volumes_is_deleted_only_by_force(sandbox: Sandbox) -> None:
    made = make(sandbox.client, unique(sandbox))
    assignment = sandbox.placed(volumes=mount(made))
    sandbox.sync(observed(assignment, "exited", exit_code=0), volumes=reported(made))
    path = f"/v1/nodes/{sandbox.node.id}"
    found = problem(sandbox.client.delete(path), 409, "node_in_use")
    assert found["volumes"] == 1 and made["name"] in found["detail"]
    assert sandbox.client.delete(path, params={"force": True}).status_code == 204
    assert read(sandbox.client, made)["state"] == "unavailable"
    sandbox.client.post(f"/v1/instances/{assignment.instance_id}/start")

    def reason() -> str:
        return str((sandbox.client.instance(assignment.instance_id)["reason"] or {}).get("message"))

    wait_until(lambda: f"volume {made['name']} is on {sandbox.node.name}" in reason())
    sandbox.client.delete(f"/v1/instances/{assignment.instance_id}")
    assert sandbox.client.delete(f"/v1/volumes/{made['id']}").status_code == 202
    problem(sandbox.client.get(f"/v1/volumes/{made['id']}"), 404)
