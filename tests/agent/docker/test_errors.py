"""How errors of several releases of the engine are mapped and explained to users."""

import docker.errors
import pytest
import requests
import urllib3

from mooring.agent.docker.errors import EngineRefused, engine_call, pull_failure, start_failure
from mooring.agent.runtime import RuntimeUnavailable

RUNC = (
    "failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: "
)


@pytest.mark.parametrize(
    ("message", "code", "message_part"),
    [
        (RUNC + 'exec: "nosuch": executable file not found in $PATH: unknown', "command_not_found", "nosuch"),
        (RUNC + 'exec: "/x/y": stat /x/y: no such file or directory: unknown', "command_not_found", "/x/y"),
        ("exec nosuch failed: No such file or directory", "command_not_found", "nosuch"),
        (RUNC + 'exec: "/etc/plain": permission denied: unknown', "command_not_executable", "/etc/plain"),
        ("exec /etc/plain failed: Permission denied", "command_not_executable", "/etc/plain"),
        ("exec ./a.out failed: Exec format error", "command_not_executable", "cmd"),
        ("unable to find user bob: no matching entries in passwd file", "user_not_found", "bob"),
        ("unable to find group staff: no matching entries in group file", "user_not_found", "staff"),
        (
            'could not select device driver "nvidia" with capabilities: [[gpu]]',
            "gpu_runtime_missing",
            "toolkit",
        ),
        (
            "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=x",
            "gpu_runtime_missing",
            "toolkit",
        ),
        (
            RUNC + "nvidia-container-cli: device error: GPU-x: unknown device",
            "gpu_runtime_failed",
            "unknown device",
        ),
        (
            "driver failed programming: Bind for 0.0.0.0:1 failed: port is already allocated",
            "port_in_use",
            "port",
        ),
        ("listen tcp4 0.0.0.0:49153: bind: address already in use", "port_in_use", "port"),
        (
            "lstat /var/lib/docker/overlay2/83c6/merged/etc/plain/x: not a directory",
            "working_dir_unusable",
            "lstat /etc",
        ),
        ("No command specified", "command_missing", "command"),
        ("container init was OOM-killed (memory limit too low?)", "memory_too_small", "memory_mib"),
        ("write /x: no space left on device", "node_disk_full", "disk"),
        ("an unknown error", "start_failed", "an unknown error"),
    ],
)
def test_start_failures(message: str, code: str, message_part: str) -> None:
    reason = start_failure(message, ["cmd", "arg"])
    assert reason.code == code
    assert message_part in reason.message


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ("manifest for x:9 not found: manifest unknown: manifest unknown", 0, "image_not_found"),
        (
            "pull access denied for x, repository does not exist or may require 'docker login': "
            "denied: requested access to the resource is denied",
            404,
            "image_not_found",
        ),
        ("no matching manifest for linux/amd64 in the manifest list entries", 0, "image_not_found"),
        ("unauthorized: authentication required", 0, "image_access_denied"),
        ("Head https://r/v2/x: no basic auth credentials", 500, "image_access_denied"),
        ("whatever", 403, "image_access_denied"),
        ("toomanyrequests: You have reached your pull rate limit", 0, "image_pull_failed"),
        ("write /var/x: no space left on device", 0, "node_disk_full"),
    ],
)
def test_pull_failures(message: str, status: int, code: str) -> None:
    reason = pull_failure(message, "x:9", status)
    assert reason is not None
    assert reason.code == code
    assert "x:9" in reason.message


@pytest.mark.parametrize(
    "raised",
    [
        requests.exceptions.ConnectionError("refused"),
        requests.exceptions.ReadTimeout("silent"),
        requests.exceptions.ChunkedEncodingError("cut"),
        urllib3.exceptions.ProtocolError("cut"),
        docker.errors.DockerException("Error while fetching server API version"),
        ConnectionResetError(),
        BrokenPipeError(),
    ],
)
def test_after_other_exceptions_the_outcome_is_unknown(raised: Exception) -> None:
    with pytest.raises(RuntimeUnavailable) as caught, engine_call("list"):
        raise raised
    assert not isinstance(caught.value, EngineRefused)


@pytest.mark.parametrize(
    "message",
    ["context canceled", "grpc: the client connection is closing", "rpc error: code = Unavailable desc"],
)
def test_after_an_error_of_a_stopping_engine_the_outcome_is_unknown(message: str) -> None:
    with pytest.raises(RuntimeUnavailable) as caught, engine_call("start"):
        raise docker.errors.APIError("500", response(500), explanation=message)
    assert not isinstance(caught.value, EngineRefused)


def test_a_registry_that_is_too_slow_for_the_engine_is_no_sign_of_a_stopping_engine() -> None:
    message = 'Get "http://registry.example:5000/v2/": context deadline exceeded'
    with pytest.raises(EngineRefused), engine_call("stream"):
        raise docker.errors.APIError("500", response(500), explanation=message)


def test_an_engine_error_keeps_its_status_and_message() -> None:
    with pytest.raises(EngineRefused, match="No such container") as caught, engine_call("start"):
        raise docker.errors.NotFound("404", response(404), explanation="No such container: x")
    assert caught.value.status == 404


def test_long_messages_are_cut_and_paths_of_the_node_removed() -> None:
    reason = start_failure("x" * 5000, [])
    assert len(reason.message) < 600
    assert "overlay2" not in start_failure("bad /var/lib/docker/overlay2/ab12/merged/app", []).message


def response(status: int) -> requests.Response:
    made = requests.Response()
    made.status_code = status
    return made


@pytest.mark.parametrize(
    "message",
    [
        'error parsing HTTP 404 response body: invalid character: "canary"',
        "Get https://r/v2/: dial tcp 10.0.0.1:22: connect: connection refused canary",
        "unknown: canary",
        'Get "https://r/v2/": net/http: request canceled while waiting for connection (Client.Timeout)',
    ],
)
def test_all_unknown_answers_of_a_registry_have_the_same_effect(message: str) -> None:
    """Otherwise users could read from the node's network, and distinguish open ports from closed ones."""
    assert pull_failure(message, "r/x:1", 500) is None
