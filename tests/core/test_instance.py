"""The states of an instance, their transitions by reports, and the validation of specs."""

from itertools import product

import pytest
from pydantic import ValidationError

from mooring.core.instance.state import (
    ENDED,
    HOLDS_GPUS,
    TRANSITIONS,
    Phase,
    actions,
    after_report,
)
from mooring_client.schemas.spec import InstanceRequest, InstanceSpec, is_reserved_env
from mooring_client.schemas.states import DesiredState, State

RUN, STOP, DELETE = DesiredState.RUNNING, DesiredState.STOPPED, DesiredState.DELETED

# Desired state, phase, exit code, whether the attempt ran before -> the next state, from every present state.
REPORTS = [
    (RUN, Phase.STARTING, None, False, State.STARTING),
    (RUN, Phase.STARTING, None, True, State.STARTING),
    (RUN, Phase.RUNNING, None, False, State.RUNNING),
    (RUN, Phase.RUNNING, None, True, State.RUNNING),
    (RUN, Phase.EXITED, 0, True, State.SUCCEEDED),
    (RUN, Phase.EXITED, 0, False, State.SUCCEEDED),
    (RUN, Phase.EXITED, 1, True, State.FAILED),
    (RUN, Phase.EXITED, None, True, State.FAILED),
    (RUN, Phase.REFUSED, None, False, State.FAILED),
    (RUN, Phase.ABSENT, None, True, State.FAILED),
    (STOP, Phase.STARTING, None, False, State.STOPPING),
    (STOP, Phase.RUNNING, None, True, State.STOPPING),
    (STOP, Phase.EXITED, 143, True, State.STOPPED),
    (STOP, Phase.REFUSED, None, False, State.STOPPED),
    (STOP, Phase.ABSENT, None, True, State.STOPPED),
    (STOP, Phase.ABSENT, None, False, State.STOPPED),
    (DELETE, Phase.STARTING, None, False, State.STOPPING),
    (DELETE, Phase.RUNNING, None, True, State.STOPPING),
    (DELETE, Phase.EXITED, 0, True, State.STOPPING),  # a container remains
    (DELETE, Phase.REFUSED, None, False, State.DELETED),
    (DELETE, Phase.ABSENT, None, True, State.DELETED),
    (DELETE, Phase.ABSENT, None, False, State.DELETED),
]


@pytest.mark.parametrize("state", sorted(HOLDS_GPUS))
@pytest.mark.parametrize(("desired", "phase", "exit_code", "began", "leads_to"), REPORTS)
def test_a_report_sets_the_state(
    state: State, desired: DesiredState, phase: Phase, exit_code: int | None, began: bool, leads_to: State
) -> None:
    assert after_report(state, desired, phase, exit_code, began) is leads_to


@pytest.mark.parametrize("state", sorted(HOLDS_GPUS - {State.UNREACHABLE}))
def test_a_missing_container_before_the_start_changes_nothing(state: State) -> None:
    assert after_report(state, RUN, Phase.ABSENT, None, began=False) is state


def test_a_missing_container_on_a_node_that_reports_again() -> None:
    assert after_report(State.UNREACHABLE, RUN, Phase.ABSENT, None, began=False) is State.STARTING


def test_every_report_causes_an_allowed_transition() -> None:
    """In the combinations that occur: a stop or delete makes an instance `stopping` unless unreachable."""
    stopping = {State.STOPPING, State.UNREACHABLE}
    for state, desired, phase, code, began in product(
        HOLDS_GPUS, DesiredState, Phase, (None, 0, 1), (True, False)
    ):
        if desired is not RUN and state not in stopping:
            continue
        if desired is RUN and state is State.STOPPING:
            continue
        to = after_report(state, desired, phase, code, began)
        assert to is state or to in TRANSITIONS[state], (state, desired, phase, code, began, to)


def test_the_sets_of_states_are_consistent() -> None:
    assert set(TRANSITIONS) == set(State)
    assert HOLDS_GPUS.isdisjoint(ENDED)
    assert set(State) - HOLDS_GPUS - ENDED == {State.PENDING, State.DELETED}
    assert TRANSITIONS[State.DELETED] == frozenset()
    for state in HOLDS_GPUS:
        assert State.PENDING not in TRANSITIONS[state]  # an instance with GPUs must end to release them
    for state in State:
        assert state is State.DELETED or State.DELETED in TRANSITIONS[state]
        assert state not in TRANSITIONS[state]


def test_actions_list_the_allowed_operations() -> None:
    assert actions(State.DELETED) == []
    for state in State:
        if state is not State.DELETED:
            assert "delete" in actions(state)
            assert ("start" in actions(state)) == (state in ENDED)
            assert ("stop" in actions(state)) == (state not in ENDED)


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("NVIDIA_VISIBLE_DEVICES", True),
        ("NVIDIA_X", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("LD_PRELOAD", True),
        ("LD_AUDIT", True),
        ("DOCKER_RESOURCE_X", True),
        ("MOORING_X", True),
        ("CUDA_LAUNCH_BLOCKING", False),
        ("LD_LIBRARY_PATH", False),
        ("MY_NVIDIA_X", False),
        ("nvidia_visible_devices", False),
        ("PATH", False),
    ],
)
def test_variables_that_select_gpus_or_preload_libraries_are_reserved(name: str, reserved: bool) -> None:
    assert is_reserved_env(name) is reserved


def test_unknown_fields_of_a_stored_spec_are_ignored() -> None:
    request = InstanceRequest(image="busybox:1", name="x", labels={"a": "b"})
    spec = request.spec()
    assert spec.keys().isdisjoint({"name", "labels", "project_id"})
    newer = {**spec, "hologram": True, "gpus": {**spec["gpus"], "flavour": "x"}}
    assert InstanceSpec.from_row(newer) == InstanceSpec.from_row(spec)
    assert InstanceSpec.from_row(spec).model_dump(mode="json") == spec


@pytest.mark.parametrize(
    "image",
    [
        "busybox",
        "busybox:1",
        "library/busybox",
        "ghcr.io/a/b-c_d.e:v1",
        "localhost:5000/x",
        "a@sha256:" + "0" * 64,
        "a:b@sha256:" + "0" * 64,
        "a__b/c--d",
        "UPPER.example/x",
    ],
)
def test_valid_image_names_are_accepted(image: str) -> None:
    assert InstanceRequest(image=image).image == image


@pytest.mark.parametrize(
    "image",
    [
        "",
        " a",
        "a ",
        "a:",
        "a:b:c",
        "a@sha256:0",
        "a//b",
        "/a",
        "a/",
        "-a",
        "a:-b",
        "a\nb",
        "a\x00",
        "é",
        "a" * 513,
        "http://a/b",
        "a;rm",
        "$(id)",
        "--privileged",
    ],
)
def test_invalid_image_names_are_rejected(image: str) -> None:
    with pytest.raises(ValidationError):
        InstanceRequest(image=image)


@pytest.mark.parametrize(
    "path", ["/proc/self/fd/8", "/proc", "//proc", "/sys/fs/cgroup", "/dev/", "/a/../proc", "/./dev/shm"]
)
def test_kernel_file_systems_are_rejected_as_working_directories(path: str) -> None:
    with pytest.raises(ValidationError, match="must not be in /proc, /sys or /dev"):
        InstanceRequest.model_validate({"image": "a", "working_dir": path})
    # A stored spec of an earlier release is readable; the node rejects it.
    assert InstanceSpec.from_row({"image": "a", "working_dir": path}).working_dir == path


@pytest.mark.parametrize("path", ["/", "/processes", "/app/proc", "/device", "/a/../b"])
def test_other_working_directories_are_accepted(path: str) -> None:
    assert InstanceRequest.model_validate({"image": "a", "working_dir": path}).working_dir == path
