"""Creating instances: accepted and rejected fields, defaults and names."""

from typing import Any

import pytest

from mooring_client.schemas.instances import InstanceCreate
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client

IMAGE = "mooring-test/busybox:1"


def test_every_field_of_the_request_is_returned(sandbox: Sandbox) -> None:
    assert sandbox.client.post("/v1/volumes", json={"name": "full-data"}).status_code == 201
    body = {
        "name": "full",
        "project_id": sandbox.service.plane.identity.default_project_id,
        "image": "registry.example:5000/team/tool:1.2@sha256:" + "a" * 64,
        "command": ["python", "-c", "print('ä\\n😀')"],
        "entrypoint": ["/bin/sh"],
        "working_dir": "/work",
        "user": "1000:1000",
        "env": {"A": "", "B": "x\ny"},
        "tty": True,
        "stdin": True,
        "attach": True,
        "gpus": {
            "count": 64,
            "model": ["H100", "A100"],
            "min_memory_mib": 40000,
            "min_compute_capability": "8.0",
            "share": None,
            "mig_profile": None,
            "same_numa": True,
        },
        "cpus": 0.5,
        "memory_mib": 65536,
        "disk_mib": 20480,
        "shm_mib": 8192,
        "ports": [{"container": 8888, "protocol": "tcp", "expose": "proxy", "auth": "token"}],
        "volumes": [{"volume": "full-data", "path": "/data", "read_only": True}],
        "labels": {"team": "vision", "a.b/c": "1"},
        "max_duration_s": 86400,
        "restart": "on_failure",
        "on_capacity": "queue",
        "on_node_loss": "keep",
        "priority": 60,
        "preemptible": True,
        "on_preemption": "stop",
        "preemption_grace_s": 5,
        "node_selector": {"sandbox": sandbox.node.name},
    }
    answer = sandbox.client.post("/v1/instances", json=body)
    assert answer.status_code == 201, answer.text
    shown = answer.json()
    assert body.keys() == InstanceCreate.model_fields.keys()
    assert {key: shown[key] for key in body} == body
    assert answer.headers["location"] == f"/v1/instances/{shown['id']}"
    assert answer.headers["etag"] == '"1"'
    assert (shown["state"], shown["desired_state"], shown["attempt"], shown["generation"]) == (
        "pending",
        "running",
        0,
        1,
    )
    assert shown["created_at"].endswith("Z")
    assert len(shown["created_at"]) == len("2026-11-21T08:00:00.123Z")
    read = sandbox.client.instance(shown["id"])
    changed_by_scheduler = {"reason": None, "version": 1, "queue_position": None}
    assert {**read, **changed_by_scheduler} == {**shown, **changed_by_scheduler}


def test_only_an_image_is_required(shared: Client) -> None:
    made = shared.create()
    assert made["gpus"] == {
        "count": 0,
        "model": None,
        "min_memory_mib": None,
        "min_compute_capability": None,
        "share": None,
        "mig_profile": None,
        "same_numa": False,
    }
    assert (made["devices"], made["labels"], made["env"], made["restart"]) == ([], {}, {}, "never")


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"priority": 101}, "validation_failed", "/priority"),
        ({"gpus": {"count": 2, "share": 0.5}}, "validation_failed", "/gpus"),
        ({"gpus": {"share": 0.1234}}, "validation_failed", "/gpus"),
        ({"gpus": {"share": 0}}, "validation_failed", "/gpus/share"),
        ({"gpus": {"share": 0.5, "mig_profile": "1g.10gb"}}, "validation_failed", "/gpus"),
        ({"gpus": {"mig_profile": "; rm"}}, "validation_failed", "/gpus/mig_profile"),
        ({"gpus": {"count": 1, "model": 5}}, "validation_failed", "/gpus/model"),
        ({"gpus": {"count": 1, "model": ["H100", 5]}}, "validation_failed", "/gpus/model"),
        ({"gpus": {"count": 1, "model": []}}, "validation_failed", "/gpus/model"),
        (
            {"gpus": {"count": 1, "min_compute_capability": "9"}},
            "validation_failed",
            "/gpus/min_compute_capability",
        ),
        ({"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "reserved_env", "/env"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "reserved_env", "/env"),
        ({"env": {"LD_PRELOAD": "/x.so"}}, "reserved_env", "/env"),
        ({"env": {"LD_AUDIT": "/x.so"}}, "reserved_env", "/env"),
        ({"env": {"DOCKER_RESOURCE_GPU": "x"}}, "reserved_env", "/env"),
        ({"env": {"MOORING_TOKEN": "x"}}, "reserved_env", "/env"),
        ({"labels": {"mooring.gpus": "GPU-1"}}, "reserved_label", "/labels"),
        ({"privileged": True}, "validation_failed", "/privileged"),
        ({"binds": ["/:/host"]}, "validation_failed", "/binds"),
        ({"state": "running"}, "validation_failed", "/state"),
        ({"gpus": {"count": 1, "uuids": ["GPU-1"]}}, "validation_failed", "/gpus/uuids"),
        ({"gpus": {"count": -1}}, "validation_failed", "/gpus/count"),
        ({"gpus": {"count": 65}}, "validation_failed", "/gpus/count"),
        ({"gpus": {"count": 1.0}}, "validation_failed", "/gpus/count"),
        ({"gpus": {"count": True}}, "validation_failed", "/gpus/count"),
        ({"gpus": {"count": 2**70}}, "validation_failed", "/gpus/count"),
        ({"gpus": []}, "validation_failed", "/gpus"),
        ({"image": ""}, "validation_failed", "/image"),
        ({"image": "team/UPPER"}, "validation_failed", "/image"),
        ({"image": "a b"}, "validation_failed", "/image"),
        ({"image": "a\n"}, "validation_failed", "/image"),
        ({"image": "a" * 513}, "validation_failed", "/image"),
        ({"name": "-a"}, "validation_failed", "/name"),
        ({"name": "a\n"}, "validation_failed", "/name"),
        ({"name": 1}, "validation_failed", "/name"),
        ({"command": "python"}, "validation_failed", "/command"),
        ({"command": ["x"] * 1025}, "validation_failed", "/command"),
        ({"command": ["x" * 32_769]}, "validation_failed", "/command/0"),
        ({"working_dir": "relative"}, "validation_failed", "/working_dir"),
        ({"working_dir": "//proc/self/fd/8"}, "validation_failed", "/working_dir"),
        ({"user": "root; rm"}, "validation_failed", "/user"),
        ({"env": {"1A": "x"}}, "validation_failed", "/env/1A"),
        ({"env": {"A=B": "x"}}, "validation_failed", "/env/A=B"),
        ({"env": {"A": 1}}, "validation_failed", "/env/A"),
        ({"env": {f"A{n}": "" for n in range(513)}}, "validation_failed", "/env"),
        ({"cpus": 0}, "validation_failed", "/cpus"),
        ({"cpus": -1}, "validation_failed", "/cpus"),
        ({"memory_mib": 5}, "validation_failed", "/memory_mib"),
        ({"memory_mib": 2**70}, "validation_failed", "/memory_mib"),
        ({"ports": [{"container": 0}]}, "validation_failed", "/ports/0/container"),
        ({"ports": [{"container": 80}, {"container": 80}]}, "validation_failed", "/ports"),
        (
            {"ports": [{"container": 80, "protocol": "udp", "expose": "proxy"}]},
            "validation_failed",
            "/ports/0",
        ),
        ({"ports": [{"container": 80, "auth": "none"}]}, "validation_failed", "/ports/0/auth"),
        ({"ports": [{"container": 80, "host": 80}]}, "validation_failed", "/ports/0/host"),
        ({"labels": {"k": "v" * 256}}, "validation_failed", "/labels/k"),
        ({"labels": {"k~/x": 1}}, "validation_failed", "/labels/k~0~1x"),
        ({"max_duration_s": 0}, "validation_failed", "/max_duration_s"),
        ({"restart": "unless-stopped"}, "validation_failed", "/restart"),
        ({"on_capacity": "later"}, "validation_failed", "/on_capacity"),
    ],
)
def test_an_invalid_field_is_rejected_and_named(
    shared: Client, fields: dict[str, Any], code: str, pointer: str
) -> None:
    document = problem(shared.post("/v1/instances", json={"image": IMAGE, **fields}), 422, code)
    assert any(error["pointer"].startswith(pointer) for error in document["errors"]), document["errors"]
    assert document["retryable"] is False


def test_cpus_and_memory_default_to_the_proportion_of_the_nodes_gpus(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(gpus={"count": 2})
    # Two of the eight GPUs; 2 % of the node's memory is never allocated.
    assert (assignment.cpus, assignment.memory_mib) == (16, 524_288 * 98 // 100 * 2 // 8)
    shown = sandbox.client.instance(assignment.instance_id)
    assert shown["granted"] == {
        "cpus": 16,
        "memory_mib": assignment.memory_mib,
        "disk_mib": 10 * 1024,
        "isolation": "exclusive",
        "link_score": 1.0,
        "borrowed": False,
    }
    assert (shown["cpus"], shown["memory_mib"]) == (None, None)
    exact = sandbox.placed(cpus=0.25, memory_mib=64)
    assert (exact.cpus, exact.memory_mib) == (0.25, 64)


def test_names_are_generated_from_the_image(shared: Client) -> None:
    answer = shared.post("/v1/instances", json={"image": "reg.example:5000/team/my_tool:1"})
    assert answer.json()["name"].startswith("my-tool-")
    names = {shared.create()["name"] for _ in range(20)}
    assert len(names) == 20


def test_a_name_is_in_use_until_its_instance_is_deleted(sandbox: Sandbox) -> None:
    first = sandbox.placed(name="only")
    taken = sandbox.client.post("/v1/instances", json={"image": IMAGE, "name": "only"})
    assert problem(taken, 409, "name_taken")["name"] == "only"
    sandbox.client.delete(f"/v1/instances/{first.instance_id}")
    problem(sandbox.client.post("/v1/instances", json={"image": IMAGE, "name": "only"}), 409, "name_taken")
    sandbox.sync()
    assert sandbox.create(name="only")["id"] != first.instance_id


def test_an_instance_publishes_at_most_eight_ports(shared: Client) -> None:
    ports = [{"container": 8000 + number} for number in range(9)]
    problem(shared.post("/v1/instances", json={"image": "i", "ports": ports}), 422, "too_many_ports")
    assert shared.post("/v1/instances", json={"image": "i", "ports": ports[:8]}).status_code == 201


def test_one_of_many_concurrent_creates_with_one_name_succeeds(shared: Client) -> None:
    answers = run_concurrently(
        16, lambda _number: shared.post("/v1/instances", json={"image": IMAGE, "name": "raced"})
    )
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 15
    for answer in answers:
        if answer.status_code == 409:
            problem(answer, 409, "name_taken")
    assert len(shared.items("/v1/instances", name="raced")) == 1


def test_an_unknown_project_is_404_and_the_default_project_may_be_named(shared: Client) -> None:
    default = shared.create()["project_id"]
    assert shared.create(project_id=default)["project_id"] == default
    for query in ("", "?dry_run=true"):
        unknown = shared.post(f"/v1/instances{query}", json={"image": IMAGE, "project_id": "prj_none"})
        problem(unknown, 404, "not_found")
