"""Pods as SkyPilot asks for them, as instances, and the errors that SkyPilot understands."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from mooring.api.compat.prime_pods import PrimePod, request_of
from mooring.api.routes import compat_prime
from mooring.scheduler.model import NodeView
from mooring_client.schemas.nodes import NodeState
from tests.api.compat.conftest import IMAGE
from tests.problems import problem
from tests.service import Client, running, settings_for
from tests.tenancy.facade import PREFIX, pod_body
from tests.testbed.waiting import wait_until

GPUS: dict[str, Any] = {"gpuType": "H100_80GB", "gpuCount": 2, "vcpus": 16, "memory": 128}
STATUSES = {"PROVISIONING", "PENDING", "ACTIVE", "STOPPED", "ERROR", "DELETING", "TERMINATED"}


def _create(sky: Client, name: str = "sky-c-1-head", **pod: Any) -> dict[str, Any]:
    answer = sky.post(f"{PREFIX}/pods", json=pod_body(name, **pod))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _pod(sky: Client, pod_id: str) -> dict[str, Any]:
    return dict(sky.get(f"{PREFIX}/pods/{pod_id}").json())


def _refused(answer: httpx.Response) -> str:
    detail = problem(answer, 409, "insufficient_capacity")["detail"]
    assert detail.startswith("insufficient capacity: ")
    return str(detail)


def test_a_pod_is_an_instance_with_what_was_asked_for(sky: Client) -> None:
    pod = _create(sky, **GPUS, diskSize=100)
    assert (pod["name"], pod["status"], pod["providerType"]) == ("sky-c-1-head", "PROVISIONING", "mooring")
    instance = sky.instance(pod["id"])
    assert instance["name"] == "sky-c-1-head"
    assert instance["labels"] == {"prime/pod": "sky-c-1-head"}
    assert (instance["image"], instance["entrypoint"], instance["command"]) == (
        IMAGE,
        ["sleep"],
        ["infinity"],
    )
    assert (instance["cpus"], instance["memory_mib"], instance["disk_mib"]) == (16, 131_072, 102_400)
    assert instance["gpus"]["count"] == 2
    assert instance["gpus"]["model"] == ["NVIDIA H100 80GB HBM3"]
    assert (instance["on_capacity"], instance["on_preemption"]) == ("fail", "stop")


def test_a_running_pod_has_the_address_of_the_ssh_gateway(sky: Client) -> None:
    pod = _create(sky, **GPUS)
    assert (pod["ip"], pod["sshConnection"]) == (None, None)
    sky.wait(pod["id"], "running")
    shown = _pod(sky, pod["id"])
    assert shown["status"] == "ACTIVE"
    assert shown["ip"] == "gpus.example.com"
    assert shown["sshConnection"] == f"{pod['id']}@gpus.example.com -p 2222"
    assert (shown["gpuName"], shown["gpuCount"]) == ("H100_80GB", 2)
    (listed,) = sky.get(f"{PREFIX}/pods").json()["data"]
    assert listed == shown


@pytest.mark.parametrize("gpu_type", ["H100_80GB", "H100", "h100_80gb"])
def test_a_gpu_type_is_found_by_its_names(sky: Client, gpu_type: str) -> None:
    pod = _create(sky, **{**GPUS, "gpuType": gpu_type})
    assert len(sky.wait(pod["id"], "running")["devices"]) == 2


def test_a_pod_without_gpus(sky: Client) -> None:
    pod = _create(sky)
    assert sky.instance(pod["id"])["gpus"]["count"] == 0
    assert pod["gpuName"] == "CPU_NODE"


def test_what_does_not_fit_is_refused_at_once_in_words_of_skypilot(sky: Client) -> None:
    """Nothing is left behind: SkyPilot waits without limit for a pod that is being provisioned."""
    assert "gpu-1 insufficient_gpus: " in _refused(
        sky.post(f"{PREFIX}/pods", json=pod_body(**{**GPUS, "gpuCount": 8}))
    )
    unknown = sky.post(f"{PREFIX}/pods", json=pod_body(**{**GPUS, "gpuType": "B200_180GB"}))
    assert "there are: H100_80GB" in _refused(unknown)
    elsewhere = sky.post(f"{PREFIX}/pods", json=pod_body(**GPUS, country="paris"))
    assert "on_capacity" not in _refused(elsewhere)
    assert sky.get(f"{PREFIX}/pods").json()["data"] == []


def test_a_region_is_a_label_of_nodes(sky: Client) -> None:
    pod = _create(sky, country="berlin")
    assert sky.instance(pod["id"])["node_selector"] == {"region": "berlin"}


def test_skypilots_own_disk_size_is_at_most_the_fair_share(sky: Client) -> None:
    """A node with GPUs of its own must not be full because nobody chose a size."""
    disk = sky.items("/v1/nodes")[0]["disk_allocatable_mib"]
    with_gpus = sky.instance(_create(sky, **{**GPUS, "gpuCount": 1})["id"])
    assert with_gpus["disk_mib"] == min(256 * 1024, disk // 4)
    cpu_only = sky.instance(_create(sky, "c", vcpus=1)["id"])
    assert cpu_only["disk_mib"] == disk // 96 < 256 * 1024


def test_a_quota_is_named_in_words_of_skypilot(sky: Client) -> None:
    project = sky.post("/v1/projects", json={"name": "small"}).json()["id"]
    sky.patch(f"/v1/projects/{project}", json={"quotas": {"gpus": 1}})
    body = pod_body(project_id=project, **GPUS)
    detail = problem(sky.post(f"{PREFIX}/pods", json=body), 403, "quota_exceeded")["detail"]
    assert detail.startswith("quota exceeded: ")


def test_several_pods_may_have_one_name(sky: Client) -> None:
    """SkyPilot makes another head of a cluster whose head has failed."""
    first, second = _create(sky), _create(sky)
    assert [first["name"], second["name"]] == ["sky-c-1-head"] * 2
    names = [sky.instance(pod["id"])["name"] for pod in (first, second)]
    assert names[0] == "sky-c-1-head"
    assert names[1].startswith("sky-c-1-head-")


@pytest.mark.parametrize("name", ["Sky_C.1 head", f"c-{'x' * 120}-head", "-".join("a" * 60)])
def test_a_name_that_no_instance_can_have(sky: Client, name: str) -> None:
    pod = _create(sky, name)
    assert pod["name"] == name
    assert len(sky.instance(pod["id"])["name"]) <= 63


def test_a_list_has_a_limited_number_of_pods(sky: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat_prime, "MOST_PODS", 1)
    made = [_create(sky, f"sky-many-{number}-head") for number in range(2)]
    assert [each["id"] for each in sky.get(f"{PREFIX}/pods").json()["data"]] == [made[1]["id"]]


def test_a_deleted_pod_is_answered_with_a_body_and_then_gone(sky: Client) -> None:
    pod = _create(sky, **GPUS)
    sky.wait(pod["id"], "running")
    deleted = sky.delete(f"{PREFIX}/pods/{pod['id']}")
    assert (deleted.status_code, deleted.json()["status"]) == (200, "DELETING")
    wait_until(lambda: sky.get(f"{PREFIX}/pods").json()["data"] == [])
    problem(sky.get(f"{PREFIX}/pods/{pod['id']}"), 404, "not_found")
    problem(sky.delete(f"{PREFIX}/pods/{pod['id']}"), 404, "not_found")


def test_the_statuses_of_a_stopped_pod(sky: Client) -> None:
    pod = _create(sky)
    sky.wait(pod["id"], "running")
    assert sky.post(f"/v1/instances/{pod['id']}/stop").status_code == 202
    seen = []

    def stopped() -> bool:
        seen.append(_pod(sky, pod["id"])["status"])
        return bool(seen[-1] == "STOPPED")

    wait_until(stopped)
    assert set(seen) <= {"DELETING", "STOPPED"} <= STATUSES


def test_a_repeated_request_with_an_idempotency_key_makes_one_pod(sky: Client) -> None:
    answers = [
        sky.post(f"{PREFIX}/pods", json=pod_body(), headers={"Idempotency-Key": "once"}) for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "x" * 201), ("name", "a\x00"), ("gpuCount", 0), ("gpuCount", 65), ("vcpus", 0),
     ("vcpus", 10**9), ("memory", -1), ("diskSize", 2**40), ("country", "x" * 256), ("gpuType", "x" * 129)],
)  # fmt: skip
def test_values_have_limits(sky: Client, field: str, value: object) -> None:
    answer = sky.post(f"{PREFIX}/pods", json=pod_body() | {"pod": pod_body()["pod"] | {field: value}})
    assert answer.status_code in {400, 422}
    assert isinstance(answer.json()["detail"], str)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"x"', b"{", b'{"pod": NaN}', b'{"pod": []}', b'{"pod": ' * 500, b"\xff",
        b'{"pod": {"name": "\\ud800", "gpuType": "CPU_NODE"}}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_the_clients_error(sky: Client, body: bytes) -> None:
    for path in ("pods", "ssh_keys"):
        answer = sky.post(f"{PREFIX}/{path}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in {400, 422}, answer.text
        assert isinstance(answer.json()["detail"], str)


def test_a_wrong_key_is_answered_with_403(sky: Client) -> None:
    """SkyPilot's check takes every other status for a key that is right."""
    sky.headers["Authorization"] = "Bearer mk_wrong-key-of-the-usual-length-0123456789"
    problem(sky.get(f"{PREFIX}/pods"), 403, "forbidden")
    problem(sky.get("/v1/instances"), 401, "unauthorized")
    sky.headers["Authorization"] = "Bearer an-admin-key-of-the-tests-0123456789"


@pytest.mark.parametrize(
    ("settings", "code", "named"),
    [
        ({"ssh_port": 8722}, "skypilot_off", "MOORING_SKYPILOT_IMAGE"),
        ({"ssh_port": 0, "skypilot_image": IMAGE}, "ssh_off", "MOORING_SSH_PORT"),
    ],
)
def test_a_service_that_is_not_set_up_says_what_to_set(
    tmp_path: Path, settings: dict[str, Any], code: str, named: str
) -> None:
    with (
        running(settings_for(f"sqlite:///{tmp_path / 'm.db'}", tmp_path, **settings)) as service,
        service.client as client,
    ):
        answer = client.post(f"{PREFIX}/pods", json=pod_body())
        assert named in problem(answer, 409, code)["detail"]
        assert client.get(f"{PREFIX}/pods").json()["data"] == []


def test_a_share_of_a_small_disk_is_what_an_instance_can_ask_for() -> None:
    """Less would be refused as invalid, although nobody chose it."""
    node = NodeView(
        id="nod_1", name="n", state=NodeState.READY, labels={}, cpu_milli=96_000, memory_mib=1, gpus=(),
        cpu_milli_free=0, memory_mib_free=0, disk_mib=5120,
    )  # fmt: skip
    pod = PrimePod.model_validate(pod_body(vcpus=1)["pod"])
    assert request_of(pod, IMAGE, (), (node,)).disk_mib == 64
