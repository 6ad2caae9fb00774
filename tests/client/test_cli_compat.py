"""`mooring compat skypilot`: what it writes, whose files it leaves alone, and what its key may do."""

import csv
import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mooring_client.cli import skypilot_catalog
from mooring_client.schemas.skypilot import accelerator, gpu_type
from tests.client.command_line import Tenant
from tests.nodes import SimulatedNode
from tests.service import Client, RunningService

CONFIG = Path(".prime/config.json")
TYPES = Path(".sky/catalogs/v8/primeintellect/vms.csv")
COMMON = Path(".sky/catalogs/v8/common")


@pytest.fixture
def tenant(shared: RunningService, node: SimulatedNode, admin: Client, tmp_path: Path) -> Tenant:
    return Tenant(shared, admin, tmp_path)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


def _config(home: Path) -> dict[str, str]:
    return dict(json.loads((home / CONFIG).read_text()))


# --- names


@pytest.mark.parametrize(
    ("model", "memory_mib", "name", "pod_type"),
    [
        ("NVIDIA H100 80GB HBM3", 81_559, "H100", "H100_80GB"),
        ("NVIDIA H100 PCIe", 81_559, "H100", "H100_80GB"),
        ("NVIDIA H200", 143_771, "H200", "H200_140GB"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100", "A100_40GB"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80GB", "A100_80GB"),
        ("Tesla V100-SXM2-16GB", 16_384, "V100", "V100_16GB"),
        ("Tesla V100-SXM2-32GB", 32_768, "V100-32GB", "V100_32GB"),
        ("NVIDIA L40S", 46_068, "L40S", "L40S_45GB"),
        ("Tesla T4", 15_360, "T4", "T4_15GB"),
        ("NVIDIA GeForce RTX 4090", 24_564, "RTX4090", "RTX4090_24GB"),
        ("NVIDIA RTX A6000", 49_140, "RTXA6000", "RTXA6000_48GB"),
        ("NVIDIA RTX 6000 Ada Generation", 49_140, "RTX6000-Ada", "RTX6000-Ada_48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "RTXPRO6000", "RTXPRO6000_96GB"),
        ("NVIDIA PCIe", 1024, "NVIDIA-PCIe", "NVIDIA-PCIe_1GB"),
    ],
)
def test_gpus_have_skypilots_names(model: str, memory_mib: int, name: str, pod_type: str) -> None:
    assert accelerator(model, memory_mib) == name
    assert gpu_type(model, memory_mib) == pod_type


# --- the catalog


def _node(gpus: int, labels: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    gpu = {"model": "NVIDIA L4", "memory_mib": 23_034, "health": "healthy", "mig_mode": None}
    return {
        "cpus": 12 * max(1, gpus), "memory_mib": 65_536 * max(1, gpus), "labels": labels or {},
        "gpus": [gpu] * gpus, **fields,
    }  # fmt: skip


def _type(count: int, **fields: Any) -> dict[str, Any]:
    found = {
        "name": f"l4-x{count}", "gpu_model": "NVIDIA L4", "gpu_memory_mib": 23_034, "gpu_count": count,
        "mig_profile": None, "price_micros_per_hour": None,
    }  # fmt: skip
    return {**found, **fields}


def _catalog(types: list[dict[str, Any]], *nodes: dict[str, Any]) -> list[dict[str, str]]:
    texts = skypilot_catalog.catalog(types, nodes)
    return list(csv.DictReader(texts[skypilot_catalog.TYPES].splitlines()))


def test_a_node_has_all_counts_up_to_its_own() -> None:
    rows = _catalog(
        [_type(1), _type(2), _type(4), _type(8)], _node(4), _node(8, {"region": "b", "zone": "z2"})
    )
    found = {
        (row["Region"], row["AvailabilityZone"], row["AcceleratorCount"]) for row in rows if row["GpuInfo"]
    }
    assert found == {
        *(("lab", "z1", count) for count in ("1.0", "2.0", "4.0")),
        *(("b", "z2", count) for count in ("1.0", "2.0", "4.0", "8.0")),
    }


def test_a_type_has_its_share_of_the_node() -> None:
    (row,) = (row for row in _catalog([_type(2)], _node(4)) if row["GpuInfo"])
    assert row["InstanceType"] == "mooring__2xL4_22GB__24__121"
    assert (row["vCPUs"], row["MemoryGiB"], row["AcceleratorName"]) == ("24.0", "121.0", "L4")
    assert json.loads(row["GpuInfo"])["TotalGpuMemoryInMiB"] == 2 * 23_034
    assert row["UpstreamCloudId"]


def test_a_node_with_more_gpus_than_cpus() -> None:
    rows = [
        row for row in _catalog([_type(1), _type(4)], _node(4, cpus=2, memory_mib=8192)) if row["GpuInfo"]
    ]
    assert [(row["vCPUs"], row["MemoryGiB"]) for row in rows] == [("1.0", "1.0"), ("2.0", "7.0")]


def test_the_cheapest_type_is_the_smallest() -> None:
    """SkyPilot takes the cheapest that fits. Without this, a task without GPUs could get eight of them."""
    rows = _catalog([_type(1), _type(2)], _node(2))
    prices = [(float(row["Price"]), float(row["AcceleratorCount"] or 0), float(row["vCPUs"])) for row in rows]
    assert prices == sorted(prices)
    assert len({price for price, *_rest in prices}) == len(prices)
    assert rows[0]["InstanceType"] == "mooring__CPU_NODE__2__8"


def test_a_price_is_that_of_the_type() -> None:
    rows = _catalog([_type(1, price_micros_per_hour=2_500_000)], _node(1))
    assert [row["Price"] for row in rows if row["GpuInfo"]] == ["2.5"]


def test_what_cannot_be_launched_is_left_out() -> None:
    lost = [{"model": "NVIDIA L4", "memory_mib": 23_034, "health": "lost", "mig_mode": None}]
    divided = [{"model": "NVIDIA L4", "memory_mib": 23_034, "health": "healthy", "mig_mode": "enabled"}]
    mig = _type(1, mig_profile="1g.5gb")
    for nodes in (_node(1) | {"gpus": lost}, _node(1) | {"gpus": divided}):
        assert not any(row["GpuInfo"] for row in _catalog([_type(1), mig], nodes))


def test_a_node_without_gpus_and_one_that_is_too_small() -> None:
    assert [row["InstanceType"] for row in _catalog([], _node(0))] == [
        "mooring__CPU_NODE__2__8", "mooring__CPU_NODE__4__16", "mooring__CPU_NODE__8__32",
    ]  # fmt: skip
    small = _catalog([], _node(0, cpus=1, memory_mib=4096))
    assert [row["InstanceType"] for row in small] == ["mooring__CPU_NODE__1__3"]
    assert _catalog([], _node(0, cpus=None, memory_mib=None)) == []


def test_a_label_with_other_characters_is_no_region() -> None:
    rows = _catalog([], _node(0, {"region": 'x"\ny', "zone": "z-2"}))
    assert {(row["Region"], row["AvailabilityZone"]) for row in rows} == {("lab", "z-2")}


# --- the command


def test_it_writes_a_key_that_may_only_use_instances_of_the_project(tenant: Tenant, home: Path) -> None:
    done = tenant.owner("compat", "skypilot", "--folder", str(home), "--expires", "12h")
    files = [home / TYPES, home / COMMON / "accelerators.csv", home / COMMON / "metadata.csv", home / CONFIG]
    assert done.lines == [f"wrote {file}" for file in files]
    assert "sky check" in done.err
    config = _config(home)
    assert config["base_url"] == f"{tenant.service.url}/compat/prime"
    assert stat.S_IMODE((home / CONFIG).stat().st_mode) == 0o600
    assert config["api_key"] not in done.out + done.err
    with Client(tenant.service.url, config["api_key"]) as own:
        me = own.get("/v1/me").json()
    assert set(me["key"]["scopes"]) == {"instances:read", "instances:write", "instances:exec"}
    assert (me["key"]["project_id"], me["key"]["user_id"]) == (tenant.id, tenant.owner_id)
    left = datetime.fromisoformat(me["key"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(hours=11) < left <= timedelta(hours=12)


def test_it_writes_what_the_server_has(tenant: Tenant, home: Path) -> None:
    tenant.owner("compat", "skypilot", "--folder", str(home))
    gpus = {row["AcceleratorCount"] for row in _rows(home / TYPES) if row["AcceleratorName"] == "H100"}
    assert gpus == {"1.0", "2.0", "4.0", "8.0"}
    assert _rows(home / COMMON / "accelerators.csv") == [
        {"AcceleratorName": "H100", "Clouds": "PrimeIntellect"}
    ]
    assert _rows(home / COMMON / "metadata.csv") == [
        {"GPU": "H100", "MemoryGB": "80", "Manufacturer": "NVIDIA"}
    ]


def test_a_second_run_keeps_a_key_that_lasts_and_replaces_one_that_does_not(
    tenant: Tenant, home: Path
) -> None:
    options = ("compat", "skypilot", "--folder", str(home))
    tenant.owner(*options)
    first = _config(home)["api_key"]
    assert "kept the key" in tenant.owner(*options).err
    assert _config(home)["api_key"] == first
    with Client(tenant.service.url, first) as own:
        key_id = own.get("/v1/me").json()["key"]["id"]
    assert tenant.admin.delete(f"/v1/api-keys/{key_id}").status_code == 204
    tenant.owner(*options, "--expires", "1d")
    second = _config(home)["api_key"]
    tenant.owner(*options)
    assert len({first, second, _config(home)["api_key"]}) == 3


@pytest.mark.parametrize("name", [CONFIG, TYPES])
def test_a_file_of_another_program_is_left_alone(tenant: Tenant, home: Path, name: Path) -> None:
    """Nor is a key made for nothing."""
    (home / name).parent.mkdir(parents=True)
    (home / name).write_text("theirs")
    keys = len(tenant.owner.json("keys", "ls"))
    refused = tenant.owner("compat", "skypilot", "--folder", str(home), code=1)
    assert str(home / name) in refused.err
    assert "--force" in refused.err
    assert (home / name).read_text() == "theirs"
    assert len(tenant.owner.json("keys", "ls")) == keys
    tenant.owner("compat", "skypilot", "--folder", str(home), "--force")
    assert (home / name).read_text() != "theirs"


def test_a_file_that_was_changed_since_is_left_alone(tenant: Tenant, home: Path) -> None:
    tenant.owner("compat", "skypilot", "--folder", str(home))
    with (home / TYPES).open("a") as file:
        file.write("one more\n")
    tenant.owner("compat", "skypilot", "--folder", str(home), code=1)
    assert (home / TYPES).read_text().endswith("one more\n")


def test_the_lists_of_all_clouds_are_kept(tenant: Tenant, home: Path) -> None:
    """SkyPilot has downloaded them for its other clouds."""
    (home / COMMON).mkdir(parents=True)
    (home / COMMON / "accelerators.csv").write_text("AcceleratorName,Clouds\n")
    done = tenant.owner("compat", "skypilot", "--folder", str(home))
    assert f"kept {home / COMMON / 'accelerators.csv'}" in done.err
    assert (home / COMMON / "accelerators.csv").read_text() == "AcceleratorName,Clouds\n"
    assert (home / COMMON / "metadata.csv").exists()


def test_a_given_key_is_checked_and_used(tenant: Tenant, home: Path, tmp_path: Path) -> None:
    own = tenant.member.environment["MOORING_API_KEY"]
    options = ("compat", "skypilot", "--folder", str(home), "--key-from")
    tenant.owner(*options, "-", given=own)
    assert _config(home)["api_key"] == own
    (tmp_path / "key").write_text("mk_wrong-key-of-the-usual-length-0123456789\n")
    tenant.owner(*options, str(tmp_path / "key"), code=4)
    tenant.owner(*options, "-", given="\n", code=2)
    tenant.owner(*options, str(tmp_path / "none"), code=2)
    assert _config(home)["api_key"] == own
