"""The NVML process, with a library that simulates all failures of the real one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.nvml_children import (
    GPU_FAULTS,
    NODE_FAULTS,
    SAMPLED,
    UNSUPPORTED,
    Ask,
    Standin,
    asked_once,
    asked_until,
    asking,
    gpus_of,
    nulls_of,
    samples_of,
)
from tests.testbed.nvml.standin import uuid_of

# By call: the facts of a GPU that are unknown if the call fails, with the values that they then have.
DEFAULTS: dict[str, dict[str, Any]] = {
    "nvmlDeviceGetName": {"model": "unknown"},
    "nvmlDeviceGetMinorNumber": {"minor_number": None},
    "nvmlDeviceGetPciInfo_v3": {"pci_bus_id": None},
    "nvmlDeviceGetMemoryAffinity": {"numa_node": None},
    "nvmlDeviceGetCudaComputeCapability": {"compute_capability": None},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w": None},
    "nvmlDeviceGetMigMode": {"mig_mode": None, "mig_devices": []},
    "nvmlDeviceGetNvLinkState": {"nvlink_peers": []},
    "nvmlDeviceGetTopologyCommonAncestor": {"topology": {}},
    "nvmlDeviceGetRemappedRows": {},
    "nvmlDeviceGetFieldValues": {"recovery_action": None},
    "nvmlDeviceGetNvLinkRemoteDeviceType": {},
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": {},
}
# The calls of each inventory: the remote ends of links are read once per process.
EVERY_TIME = {name for name in DEFAULTS if "NvLinkRemote" not in name}
# After a failure of these calls, the values of an earlier inventory are used.
REMEMBERED = {
    name
    for name, defaults in DEFAULTS.items()
    if not defaults.keys() & {"power_limit_w", "recovery_action", "topology", "nvlink_peers"}
}
INIT_FAULTS = NODE_FAULTS | {
    4: "no_permission",
    12: "library_not_found",
    13: "function_not_found",
    15: "gpu_lost",
    17: "operating_system",
    20: "out_of_memory",
    25: "nvml_error_25",
    999: "unknown",
}
LINKS = ("nvlink 0 0 1", "nvlink 0 1 1", "nvlink 1 0 0", "nvlink 1 1 0", "nvlink 1 2 2", "nvlink 2 0 1")


def _without_links(gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the facts without those about pairs of GPUs, which a failure of either GPU changes."""
    return {name: value for name, value in gpu.items() if name not in {"nvlink_peers", "topology"}}


# The inventory


def test_all_facts_of_a_gpu(standin: Standin) -> None:
    answer = asked_once(standin("gpus 3", *LINKS, "topology 30"), "inventory")
    assert answer["answer"]["driver_version"] == "580.95.05"
    assert answer["answer"]["cuda_version"] == "13.0"
    assert answer["answer"]["unreadable"] == []
    assert gpus_of(answer)[1] == {
        "uuid": uuid_of(1),
        "index": 1,
        "model": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "pci_bus_id": "00000000:21:00.0",
        "minor_number": 1,
        "numa_node": 0,
        "nvlink_peers": [{"uuid": uuid_of(0), "links": 2}, {"uuid": uuid_of(2), "links": 1}],
        "topology": {uuid_of(0): "hostbridge", uuid_of(2): "hostbridge"},
        "mig_mode": "disabled",
        "mig_devices": [],
        "compute_capability": "9.0",
        "power_limit_w": 700.0,
        "fault": None,
        "recovery_action": "none",
        "conditions": [],
    }


def test_gpus_behind_switches_have_the_smaller_link_count(standin: Standin) -> None:
    lanes = [
        f"nvlink {gpu} {link} switch" for gpu, count in ((0, 18), (1, 18), (2, 17)) for link in range(count)
    ]
    gpus = gpus_of(asked_once(standin("gpus 3", *lanes), "inventory"))
    assert gpus[0]["nvlink_peers"] == [{"uuid": uuid_of(1), "links": 18}, {"uuid": uuid_of(2), "links": 17}]


@pytest.mark.parametrize(("number", "version"), [(12080, "12.8"), (13000, "13.0"), (11070, "11.7")])
def test_the_cuda_version(standin: Standin, number: int, version: str) -> None:
    assert asked_once(standin("gpus 0", f"cuda {number}"), "inventory")["answer"]["cuda_version"] == version


@pytest.mark.parametrize("code", [*UNSUPPORTED, 4, 999])
def test_a_failed_call_changes_only_its_facts_of_its_gpu(standin: Standin, code: int) -> None:
    complete = gpus_of(asked_once(standin("gpus 3", *LINKS), "inventory"))
    for function, defaults in DEFAULTS.items():
        gpus = gpus_of(asked_once(standin("gpus 3", *LINKS, f"error {function} {code} 1"), "inventory"))
        expected = [complete[0], {**complete[1], **defaults}, complete[2]]
        assert [_without_links(gpu) for gpu in gpus] == [_without_links(gpu) for gpu in expected]
        assert {name: gpus[1][name] for name in defaults} == defaults


def test_unsupported_calls_of_a_gpu_are_not_repeated(standin: Standin) -> None:
    nvml = standin("gpus 2", "error nvmlDeviceGetMinorNumber 3 1")
    with asking(nvml) as ask:
        assert gpus_of(ask("inventory"))[1]["minor_number"] is None
        nvml.write("gpus 2", "set 0 minor 9")
        answer = asked_until(ask, "inventory", lambda it: gpus_of(it)[0]["minor_number"] == 9)
        assert gpus_of(answer)[1]["minor_number"] is None


@pytest.mark.parametrize("code", [3, 999])
def test_a_gpu_with_unknown_memory_size_is_unreadable(standin: Standin, code: int) -> None:
    calls = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")
    answer = asked_once(standin("gpus 2", *[f"error {call} {code} 1" for call in calls]), "inventory")
    assert [gpu["index"] for gpu in gpus_of(answer)] == [0]
    assert answer["answer"]["unreadable"] == [{"index": 1, "uuid": uuid_of(1), "code": "memory_unknown"}]


def test_a_known_fact_survives_a_single_failure(standin: Standin) -> None:
    nvml = standin("gpus 2")
    with asking(nvml) as ask:
        before = ask("inventory")
        for function in REMEMBERED:
            # The power limit of the other GPU shows when the error is in effect.
            nvml.write("gpus 2", f"error {function} 999 1", "set 0 limit_mw 1000")
            answer = asked_until(ask, "inventory", lambda it: gpus_of(it)[0]["power_limit_w"] == 1)
            assert gpus_of(answer)[1] == gpus_of(before)[1]
            nvml.write("gpus 2")
            asked_until(ask, "inventory", lambda it: it == before)


@pytest.mark.parametrize(("number", "code"), GPU_FAULTS.items())
def test_a_gpu_with_a_fault_is_reported_and_the_others_are_read(
    standin: Standin, number: int, code: str
) -> None:
    nvml = standin("gpus 3", *LINKS)
    with asking(nvml) as ask:
        before = ask("inventory")
        for function in EVERY_TIME - {"nvmlDeviceGetTopologyCommonAncestor"}:  # its error names no GPU
            nvml.write("gpus 3", *LINKS, f"error {function} {number} 1")
            answer = asked_until(ask, "inventory", lambda it: it["answer"]["unreadable"])
            assert answer["answer"]["unreadable"] == [{"index": 1, "uuid": uuid_of(1), "code": code}]
            assert [gpu["index"] for gpu in gpus_of(answer)] == [0, 2]
            nvml.write("gpus 3", *LINKS)
            asked_until(ask, "inventory", lambda it: it == before)


@pytest.mark.parametrize(("number", "code"), NODE_FAULTS.items())
@pytest.mark.parametrize("operation", ["inventory", "sample"])
def test_a_fault_of_the_node_is_reported(standin: Standin, number: int, code: str, operation: str) -> None:
    nvml = standin("gpus 2")
    functions = EVERY_TIME if operation == "inventory" else SAMPLED
    with asking(nvml) as ask:
        ask(operation)
        for function in functions:
            nvml.write("gpus 2", f"error {function} {number}")
            answer = asked_until(ask, operation, lambda it: it["error"])
            assert answer["error"]["code"] == code
            assert answer["error"]["message"].startswith("NVML")
            nvml.write("gpus 2")
            asked_until(ask, operation, lambda it: it["error"] is None)


@pytest.mark.parametrize(("number", "code"), INIT_FAULTS.items())
@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_an_error_at_the_start_of_nvml_is_one_of_the_node(
    standin: Standin, function: str, number: int, code: str
) -> None:
    answer = asked_once(standin("gpus 2", f"error {function} {number}"), "inventory")
    assert answer["answer"] is None
    assert answer["error"]["code"] == code


def test_a_missing_library_is_reported(standin: Standin, tmp_path: Path) -> None:
    nvml = standin("gpus 2")
    nvml.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    assert asked_once(nvml, "inventory")["error"]["code"] == "library_not_found"


@pytest.mark.parametrize("code", [2, 4, 8, 11, 15, 16, 28, 999])
@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
def test_a_gpu_that_does_not_open_does_not_hide_others(standin: Standin, function: str, code: int) -> None:
    with asking(standin("gpus 3", f"error {function} {code} 1")) as ask:
        answer = ask("inventory")
        assert [gpu["uuid"] for gpu in gpus_of(answer)] == [uuid_of(0), uuid_of(2)]
        assert [(gpu["index"], gpu["uuid"]) for gpu in answer["answer"]["unreadable"]] == [(1, None)]
        assert [sample["index"] for sample in samples_of(ask("sample"))] == [0, 2]


def test_names_need_not_be_utf8(standin: Standin) -> None:
    gpus = gpus_of(asked_once(standin("gpus 2", r"set 1 name NVIDIA \xff\xfeH100\xc3"), "inventory"))
    assert gpus[0]["model"] == "NVIDIA H100 80GB HBM3"
    assert gpus[1]["model"] == "NVIDIA ��H100�"


def test_a_bus_id_that_is_not_utf8_is_null(standin: Standin) -> None:
    assert gpus_of(asked_once(standin("gpus 1", r"set 0 pci 00\xff"), "inventory"))[0]["pci_bus_id"] is None


@pytest.mark.parametrize("uuid", [r"GPU-\xff\xfe", r"\x20", "GPU-a\\x0ab", "GPU-<script>"])
def test_a_gpu_with_an_odd_uuid_is_unreadable(standin: Standin, uuid: str) -> None:
    answer = asked_once(standin("gpus 2", f"set 0 uuid {uuid}"), "inventory")
    assert [gpu["uuid"] for gpu in gpus_of(answer)] == [uuid_of(1)]
    assert answer["answer"]["unreadable"] == [{"index": 0, "uuid": None, "code": "odd_uuid"}]


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("remap_failed 1", "row_remap_failed"),
        ("recovery 1", "reset_required"),
        ("recovery 2", "recovery_node_reboot"),
        ("recovery 3", "recovery_drain_p2p"),
        ("recovery 4", "recovery_drain_and_reset"),
        ("recovery 5", "recovery_imex_domain"),
        ("recovery 6", "recovery_bus_reset"),
        ("recovery 7", "recovery_system_reboot"),
        ("recovery 8", "recovery_action_8"),
        ("recovery 0", None),
    ],
)
def test_a_recovery_action_is_a_fault(standin: Standin, setting: str, fault: str | None) -> None:
    gpus = gpus_of(asked_once(standin("gpus 2", f"set 1 {setting}"), "inventory"))
    assert [gpu["fault"] for gpu in gpus] == [None, fault]


@pytest.mark.parametrize(
    ("setting", "conditions"),
    [("remap_pending 1", ["row_remap_pending"]), ("retiring 1", ["page_retirement_pending"])],
)
def test_pending_memory_repair_is_a_condition_and_not_a_fault(
    standin: Standin, setting: str, conditions: list[str]
) -> None:
    gpus = gpus_of(asked_once(standin("gpus 2", f"set 1 {setting}"), "inventory"))
    assert [(gpu["fault"], gpu["conditions"]) for gpu in gpus] == [(None, []), (None, conditions)]


def test_a_recovery_action_that_cannot_be_read_is_null(standin: Standin) -> None:
    nvml = standin("gpus 1", "error nvmlDeviceGetFieldValues 3")
    assert [gpu["recovery_action"] for gpu in gpus_of(asked_once(nvml, "inventory"))] == [None]


@pytest.mark.parametrize("numa", [0, 1, 63, 64, 200])
def test_the_numa_node(standin: Standin, numa: int) -> None:
    assert gpus_of(asked_once(standin("gpus 1", f"set 0 numa {numa}"), "inventory"))[0]["numa_node"] == numa


def test_an_unknown_numa_node_is_null(standin: Standin) -> None:
    assert gpus_of(asked_once(standin("gpus 1", "set 0 numa -1"), "inventory"))[0]["numa_node"] is None


# MIG

MIG = (
    "gpus 2",
    "set 0 mig 1",
    "slice 0 MIG-11111111-0000-4000-8000-000000000000 9728 NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "slice 0 MIG-22222222-0000-4000-8000-000000000000 40192 NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "error nvmlDeviceGetUtilizationRates 3 0",
)


def test_mig_devices_are_listed_and_the_utilization_of_their_gpu_is_null(standin: Standin) -> None:
    with asking(standin(*MIG)) as ask:
        gpus = gpus_of(ask("inventory"))
        assert [gpu["mig_mode"] for gpu in gpus] == ["enabled", "disabled"]
        assert gpus[0]["mig_devices"] == [
            {"uuid": "MIG-11111111-0000-4000-8000-000000000000", "profile": "1g.10gb", "memory_mib": 9728},
            {"uuid": "MIG-22222222-0000-4000-8000-000000000000", "profile": "3g.40gb", "memory_mib": 40192},
        ]
        assert [nulls_of(sample) for sample in samples_of(ask("sample"))] == [
            {"utilization_gpu_pct", "utilization_memory_pct"},
            set(),
        ]


def test_a_gpu_without_mig_has_a_null_mode(standin: Standin) -> None:
    assert gpus_of(asked_once(standin("gpus 1", "set 0 mig -1"), "inventory"))[0]["mig_mode"] is None


def test_unsupported_values_are_read_again_after_mig_is_disabled(standin: Standin) -> None:
    nvml = standin(*MIG)
    with asking(nvml) as ask:
        ask("inventory")
        assert samples_of(ask("sample"))[0]["utilization_gpu_pct"] is None
        nvml.write("gpus 2")
        asked_until(ask, "inventory", lambda it: gpus_of(it)[0]["mig_mode"] == "disabled")
        assert samples_of(ask("sample"))[0]["utilization_gpu_pct"] == 37


def test_the_mig_mode_survives_a_single_failure(standin: Standin) -> None:
    nvml = standin(*MIG)
    with asking(nvml) as ask:
        before = ask("inventory")
        nvml.write(*MIG, "error nvmlDeviceGetMigMode 999", "set 1 limit_mw 1000")
        answer = asked_until(ask, "inventory", lambda it: gpus_of(it)[1]["power_limit_w"] == 1)
        assert gpus_of(answer)[0] == gpus_of(before)[0]


# Events


def _events(ask: Ask, kinds: int) -> list[dict[str, Any]]:
    """Take samples until events of this many kinds have arrived. Return one per kind, with its total."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def are_all_found(answer: dict[str, Any]) -> bool:
        for event in answer["answer"]["events"]:
            kind = event["uuid"], event["code"], *event["mig_uuids"]
            event["count"] += found.get(kind, {"count": 0})["count"]
            found[kind] = event
        return len(found) >= kinds

    asked_until(ask, "sample", are_all_found)
    assert all(event[at].endswith("Z") for event in found.values() for at in ("first_at", "last_at"))
    return list(found.values())


def _event_codes(ask: Ask, kinds: int) -> list[tuple[str | None, str]]:
    return [(event["uuid"], event["code"]) for event in _events(ask, kinds)]


@pytest.mark.parametrize("xid", [13, 31, 48, 79, 94, 95, 119, 154])
def test_an_xid_is_delivered_once_with_its_gpu(standin: Standin, xid: int) -> None:
    nvml = standin("gpus 2")
    with asking(nvml) as ask:
        assert ask("sample")["answer"]["events"] == []
        nvml.write("gpus 2", f"xid 1 {xid}", f"xid -1 {xid}")
        assert _event_codes(ask, 2) == [(uuid_of(1), f"xid_{xid}"), (None, f"xid_{xid}")]
        assert ask("sample")["answer"]["events"] == []


@pytest.mark.parametrize(
    ("event_type", "code"),
    [
        (0x100, "mig_changed"),
        (0x200, "ecc_error_storm"),
        (0x400, "dram_retirement"),
        (0x800, "dram_retirement_failure"),
        (0x1000, "nonfatal_poison"),
        (0x2000, "fatal_poison"),
        (0x4000, "gpu_unavailable"),
        (0x8000, "recovery_action_changed"),
    ],
)
def test_supported_events_are_delivered(standin: Standin, event_type: int, code: str) -> None:
    only_xids = "set 0 events 8"  # GPU 0 supports only this type, whose events are XIDs
    nvml = standin("gpus 2", only_xids)
    with asking(nvml) as ask:
        ask("sample")
        nvml.write("gpus 2", only_xids, f"event 0 {event_type} 1", f"event 1 {event_type} 1", "xid 0 31")
        assert _event_codes(ask, 2) == [(uuid_of(1), code), (uuid_of(0), "xid_31")]


def test_many_application_faults_do_not_hide_hardware_events(standin: Standin) -> None:
    """Ten thousand faults arrive together: the hardware events before and after them are delivered."""
    flood = ["xid 0 79", *(f"xids {index} 31 1250" for index in range(8)), "xid 1 79"]
    nvml = standin("gpus 8")
    with asking(nvml) as ask:
        ask("sample")
        nvml.write("gpus 8", *flood)
        events = _events(ask, 10)
        counts = {(event["uuid"], event["code"]): event["count"] for event in events}
    assert counts[uuid_of(0), "xid_79"] == counts[uuid_of(1), "xid_79"] == 1
    assert [counts[uuid_of(index), "xid_31"] for index in range(8)] == [1250] * 8


def test_an_event_of_a_mig_device_names_it(standin: Standin) -> None:
    small, large = (f"MIG-{digit * 8}-0000-4000-8000-000000000000" for digit in "12")
    nvml = standin(*MIG)
    with asking(nvml) as ask:
        ask("inventory")
        nvml.write(*MIG, "xid 0 31 2 0", f"xid 0 43 1 {0xFFFFFFFF}", "xid 0 79", "xid 0 13 7 0")
        named = {event["code"]: event["mig_uuids"] for event in _events(ask, 4)}
    assert named == {"xid_31": [large], "xid_43": [small], "xid_79": [], "xid_13": []}


def test_the_xid_of_a_lost_gpu_has_its_uuid(standin: Standin) -> None:
    nvml = standin("gpus 2")
    with asking(nvml) as ask:
        ask("sample")
        nvml.write("gpus 2", "lost 1", "xid 1 79")
        assert _event_codes(ask, 1) == [(uuid_of(1), "xid_79")]


@pytest.mark.parametrize("call", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
@pytest.mark.parametrize("code", [3, 15, 999])
def test_a_gpu_without_events_does_not_block_events_of_others(standin: Standin, call: str, code: int) -> None:
    with asking(standin("gpus 3", f"error {call} {code} 1", "xid 0 48", "xid 1 48", "xid 2 79")) as ask:
        assert _event_codes(ask, 2) == [(uuid_of(0), "xid_48"), (uuid_of(2), "xid_79")]
        assert ask("sample")["answer"]["deaf"] is False


@pytest.mark.parametrize(
    "call", ["nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"]
)
@pytest.mark.parametrize("code", [3, 15, 999])
def test_samples_work_without_events(standin: Standin, call: str, code: int) -> None:
    answer = asked_once(standin("gpus 2", f"error {call} {code}"), "sample")
    assert not any(nulls_of(sample) for sample in samples_of(answer))
    assert answer["answer"]["deaf"] is False


@pytest.mark.parametrize("code", [15, 999])
def test_a_failed_wait_for_events_is_reported(standin: Standin, code: int) -> None:
    with asking(standin("gpus 1", f"error nvmlEventSetWait_v2 {code}")) as ask:
        assert samples_of(asked_until(ask, "sample", lambda it: it["answer"]["deaf"]))


# The process


def test_output_of_the_library_is_not_an_answer(standin: Standin) -> None:
    assert gpus_of(asked_once(standin("gpus 1", "print {}"), "inventory"))


def test_the_process_ends_with_its_standard_input(standin: Standin) -> None:
    command = ["-m", "mooring.agent.nvml.process"]
    ended = subprocess.run(
        [sys.executable, *command],
        input=b'{"op": "sample"}\n',
        capture_output=True,
        env=standin("gpus 8").environment,
        timeout=10,
        check=True,
    )
    assert ended.stdout.count(b"\n") == 1
    assert ended.stderr == b""


def test_the_process_uses_little_memory(standin: Standin) -> None:
    program = (
        "import mooring.agent.nvml.process, mooring.agent.nvml.session as nvml, re, sys;"
        "session = nvml.Nvml(); session.inventory(); session.sample();"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]);"
        "print({'logging', 'asyncio', 'pydantic', 'dataclasses', 'inspect'} & set(sys.modules))"
    )
    nvml = standin("gpus 8")
    output = subprocess.check_output([sys.executable, "-c", program], env=nvml.environment, text=True)
    peak_kib, heavy_modules = output.splitlines()
    assert int(peak_kib) < 25 * 1024
    assert heavy_modules == "set()"
