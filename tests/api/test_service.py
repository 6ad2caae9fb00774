"""Health, readiness and Prometheus metrics."""

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from mooring.server import Service, open_control_plane
from tests.api.auth.test_credentials import make_key
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for

pytestmark = pytest.mark.both_databases


def test_healthz_and_readyz_need_no_valid_key(shared: Client) -> None:
    with Client(str(shared.base_url), key="invalid") as unauthorized:
        assert unauthorized.get("/healthz").json() == {"status": "ok"}
        assert unauthorized.get("/readyz").json() == {"status": "ready"}


def test_a_database_that_is_not_migrated_is_not_ready(service: RunningService, client: Client) -> None:
    assert client.get("/readyz").status_code == 200  # the check at the start has ended
    with service.plane.database.write() as session:
        (version,) = session.execute(text("SELECT version_num FROM alembic_version")).one()
        session.execute(text("UPDATE alembic_version SET version_num = 'older'"))
    answer = client.get("/readyz")
    assert problem(answer, 503, "not_migrated")["retryable"] is True
    assert answer.headers["retry-after"]
    with service.plane.database.write() as session:
        session.execute(text("DELETE FROM alembic_version"))
    problem(client.get("/readyz"), 503, "not_migrated")
    with service.plane.database.write() as session:
        session.execute(text("INSERT INTO alembic_version VALUES (:version)"), {"version": version})
    assert client.get("/readyz").status_code == 200


def test_a_service_with_a_local_node_is_ready_after_its_first_report(
    database_url: str, tmp_path: Path
) -> None:
    plane = open_control_plane(settings_for(database_url, tmp_path / "data"))
    urls: list[str] = []
    started = threading.Event()

    def on_started(url: str) -> None:
        urls.append(url)
        started.set()

    made = Service(plane, awaited_nodes=1, on_started=on_started)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        assert started.wait(20)
        with Client(urls[0]) as client:
            problem(client.get("/readyz"), 503, "waiting_for_node")
            node = WireNode(client, "local")
            problem(client.get("/readyz"), 503, "waiting_for_node")
            node.sync()
            assert client.get("/readyz").status_code == 200
            node.close()
    finally:
        made.stop()
        thread.join(20)


SAMPLE: dict[str, Any] = {
    "index": 0,
    "sampled_at": "2026-11-21T08:00:00Z",
    "utilization_gpu_pct": 97,
    "utilization_memory_pct": 41,
    "memory_used_mib": 1000,
    "memory_total_mib": 81559,
    "power_w": 612.5,
    "temperature_c": 61,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 2619,
    "fan_pct": None,
    "energy_j": 12.5,
}


def _series(client: Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_gpu_metrics_have_the_names_of_dcgm_exporter(sandbox: Sandbox) -> None:
    uuid = sandbox.node.gpus[0].uuid
    assignment = sandbox.running(gpus={"count": 8})
    sandbox.sync(observed(assignment, "running"), samples=[{"uuid": uuid, **SAMPLE}])
    series = _series(sandbox.client)
    expected = {
        "DCGM_FI_DEV_GPU_UTIL": 97,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 41,
        "DCGM_FI_DEV_FB_USED": 1000,
        "DCGM_FI_DEV_FB_FREE": 80559,
        "DCGM_FI_DEV_POWER_USAGE": 612.5,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 2619,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 12_500,
    }
    labels = {
        "UUID": uuid,
        "gpu": "0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": sandbox.node.name,
        "instance_id": assignment.instance_id,
        "project": "default",
    }
    for name, value in expected.items():
        assert [point for point_labels, point in series[name] if point_labels == labels] == [value], name
    # A metric that the GPU does not support is absent, never 0.
    assert not any(
        point_labels["UUID"] == uuid for point_labels, _ in series.get("DCGM_FI_DEV_FAN_SPEED", [])
    )


def test_metrics_count_instances_nodes_and_gpus(client: Client, node: WireNode) -> None:
    client.wait(client.create(gpus={"count": 3})["id"], "scheduled")
    client.create(gpus={"count": 64})
    node.sync(instances=None, incidents=[{"id": "i", "uuid": node.gpus[7].uuid, "code": "x", "message": "x"}])
    series = {
        name: {next(iter(labels.values()), ""): value for labels, value in points}
        for name, points in _series(client).items()
        if name.startswith("mooring_")
    }
    assert series["mooring_instances"] == {"scheduled": 1, "pending": 1}
    assert series["mooring_nodes"] == {
        "ready": 1,
        "cordoned": 0,
        "draining": 0,
        "not_ready": 0,
        "unreachable": 0,
    }
    assert sum(series["mooring_gpus"].values()) == 8
    assert (series["mooring_gpus"]["held"], series["mooring_gpus"]["lost"]) == (3, 0)
    assert series["mooring_webhook_pending"] == {"": 0}


def test_metrics_need_a_key_with_the_scope(shared_service: RunningService, shared: Client) -> None:
    with Client(shared_service.url, key="invalid") as unauthorized:
        problem(unauthorized.get("/metrics"), 401, "unauthorized")
        del unauthorized.headers["Authorization"]
        problem(unauthorized.get("/metrics"), 401, "unauthorized")
    with Client(shared_service.url, key=make_key(shared_service, "metrics:read")) as reader:
        assert reader.get("/metrics").status_code == 200
    with Client(shared_service.url, key=make_key(shared_service, "instances:read")) as other:
        problem(other.get("/metrics"), 403, "forbidden")


def test_metrics_can_be_made_public(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(database_url, tmp_path / "data", metrics_public=True)
    with running(settings) as service, Client(service.url, key="invalid") as unauthorized:
        assert unauthorized.get("/metrics").status_code == 200
        problem(unauthorized.get("/v1/instances"), 401, "unauthorized")


@pytest.mark.parametrize("value", [0.1, 1e20])
def test_metrics_show_fractions_and_large_numbers_exactly(sandbox: Sandbox, value: float) -> None:
    sample = {"uuid": sandbox.node.gpus[0].uuid, **SAMPLE, "power_w": value}
    sandbox.sync(samples=[sample])
    points = [
        point
        for labels, point in _series(sandbox.client)["DCGM_FI_DEV_POWER_USAGE"]
        if labels["UUID"] == sample["uuid"]
    ]
    assert points == [value]
