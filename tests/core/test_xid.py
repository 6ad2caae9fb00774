"""The classification of every code of NVIDIA's catalogue, and of unknown codes."""

from collections import Counter

import pytest

from mooring.core.xid import classify, classify_xid
from mooring.core.xid_catalogue import CATALOGUE, DATE, LAST, rows
from mooring_client.schemas.gpus import Action, Severity

APPLICATION = sorted(
    code
    for code, entry in CATALOGUE.items()
    if entry.immediate in {"RESTART_APP", "IGNORE", "WORKFLOW_XID_45"}
)
REPAIR = {"RESET_GPU": Action.RESET, "RESTART_BM": Action.REBOOT, "RESTART_VM": Action.REBOOT}
MUST_QUARANTINE = sorted(code for code, entry in CATALOGUE.items() if entry.immediate in REPAIR)
UNDECIDED_ACTIONS = {
    "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR", "CONTACT_SUPPORT", "UPDATE_SWFW",
    "CHECK_UVM", "",
}  # fmt: skip
UNDECIDED = sorted(code for code, entry in CATALOGUE.items() if entry.immediate in UNDECIDED_ACTIONS)
# From NVIDIA's page, independently of the catalogue.
COPIED_BY_HAND = {
    "RESTART_APP": [
        8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, *range(82, 87), 88, 89, 94,
        *range(96, 106), *range(126, 136), 139,
    ],
    "IGNORE": [
        14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161,
    ],
    "RESET_GPU": [46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158],
    "RESTART_BM": [79],
    "RESTART_VM": [151],
}  # fmt: skip


def test_the_groups_of_codes_cover_the_catalogue_except_54_and_154() -> None:
    assert sorted([*APPLICATION, *MUST_QUARANTINE, *UNDECIDED, 54, 154]) == sorted(CATALOGUE)
    assert len(APPLICATION) > 60


def test_the_catalogue_has_every_code_once_and_a_date() -> None:
    assert Counter(code for code, _entry in rows()) == Counter(range(1, LAST + 1))
    assert LAST == 172
    assert DATE == "2025-10-29"


@pytest.mark.parametrize("immediate", COPIED_BY_HAND)
def test_the_catalogue_has_the_actions_of_nvidias_page(immediate: str) -> None:
    assert [code for code, entry in sorted(CATALOGUE.items()) if entry.immediate == immediate] == (
        COPIED_BY_HAND[immediate]
    )


@pytest.mark.parametrize("recovery_action", [None, "none", "reset_required"])
def test_every_code_has_a_description(recovery_action: str | None) -> None:
    for code in CATALOGUE:
        assert classify_xid(code, recovery_action).description


@pytest.mark.parametrize("code", APPLICATION)
@pytest.mark.parametrize("recovery_action", [None, "none", "reset_required"])
def test_application_errors_never_quarantine(code: int, recovery_action: str | None) -> None:
    """The recovery action is reported as another fault, which quarantines the GPU."""
    assert not classify_xid(code, recovery_action).quarantines


@pytest.mark.parametrize("code", MUST_QUARANTINE)
@pytest.mark.parametrize("recovery_action", [None, "none", "reset_required"])
def test_errors_that_need_a_reset_or_reboot_always_quarantine(code: int, recovery_action: str | None) -> None:
    fault = classify_xid(code, recovery_action)
    assert (fault.quarantines, fault.action) == (True, REPAIR[CATALOGUE[code].immediate])


@pytest.mark.parametrize("code", [*UNDECIDED, 173, 4711, 10**9])
def test_the_recovery_action_decides_where_the_catalogue_does_not(code: int) -> None:
    for recovery_action in (None, "reset_required"):
        assert classify_xid(code, recovery_action).quarantines
    assert classify_xid(code, "none").severity is Severity.WARN


@pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 68, 69, 80, 94])
def test_application_errors_notify_the_instance(code: int) -> None:
    assert classify_xid(code, None).notify_instance


@pytest.mark.parametrize(
    ("code", "severity", "action"),
    [
        ("gpu_lost", "fatal", "reboot"),
        ("reset_required", "fatal", "reset"),
        ("recovery_node_reboot", "fatal", "reboot"),
        ("recovery_drain_p2p", "fatal", "reset"),
        ("recovery_drain_and_reset", "fatal", "reset"),
        ("recovery_imex_domain", "fatal", "service"),
        ("recovery_bus_reset", "fatal", "reset"),
        ("recovery_system_reboot", "fatal", "reboot"),
        ("recovery_action_8", "fatal", "service"),
        ("row_remap_failed", "fatal", "service"),
        ("row_remap_pending", "warn", "reset"),
        ("page_retirement_pending", "warn", "reset"),
        ("gpu_unavailable", "fatal", "reset"),
        ("fatal_poison", "fatal", "reset"),
        ("nonfatal_poison", "info", "restart_app"),
        ("dram_retirement", "info", "none"),
        ("dram_retirement_failure", "fatal", "reset"),
        ("ecc_error_storm", "warn", "none"),
        ("xid_92", "warn", "none"),
        ("xid_154", "info", "none"),
        ("xid_54", "fatal", "service"),
        ("gpu_not_released", "fatal", "reset"),
        ("xid_", "fatal", "service"),
        ("xid_31x", "fatal", "service"),
        ("of a later release", "fatal", "service"),
    ],
)
def test_reported_codes_are_classified(code: str, severity: str, action: str) -> None:
    fault = classify(code, None)
    assert (str(fault.severity), str(fault.action)) == (severity, action)
