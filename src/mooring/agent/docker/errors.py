"""Maps failures of the engine to two errors: it does not answer (outcome unknown), or it returned an error.

Docker's library raises four families of exceptions (docker, requests, urllib3, http.client), depending on
when the daemon dies. `engine_call` converts them. `start_failure` and `pull_failure` explain returned errors.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from mooring.agent.runtime import RuntimeUnavailable
from mooring_client.schemas.states import Reason

# A daemon that shuts down or has lost containerd answers 500 with one of these Go errors. Such an answer
# says nothing about the container.
_SHUTTING_DOWN = re.compile(
    r"context (canceled|deadline exceeded)|transport is closing|client connection is closing"
    r"|code = Unavailable|containerd\.sock|shutting down|error reading from server: EOF",
    re.IGNORECASE,
)
# The engine quotes its own request when a registry did not answer that in time.
_REGISTRY_SILENT = re.compile(r'\b(Get|Head|Post) "https?://.*deadline exceeded', re.IGNORECASE)
MAX_MESSAGE = 500


class EngineRefused(RuntimeUnavailable):
    """The engine returned an error. Callers that cannot interpret it treat the outcome as unknown.

    `status` is the HTTP status of the error; 0 if the engine sent none, as in the progress of a pull.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the container engine refused ({status}): {message}")
        self.status = status
        self.message = message


def refusal(status: int, message: str) -> RuntimeUnavailable:
    """The exception for an error of the engine, which may only say that the engine shuts down."""
    if _SHUTTING_DOWN.search(message) and not _REGISTRY_SILENT.search(message):
        return RuntimeUnavailable(f"the container engine is shutting down: {message}")
    return EngineRefused(status, message)


@contextmanager
def engine_call(call: str) -> Iterator[None]:
    """Convert any exception of Docker's library into one of two errors, whose message begins with `call`.

    Raises:
        EngineRefused: the engine answered with an error.
        RuntimeUnavailable: the answer is missing or incomplete; whether the call took effect is unknown.
    """
    try:
        yield
    except APIError as error:
        raise refusal(error.status_code or 0, str(error.explanation or error)) from error
    except (RequestException, HTTPError, HTTPException, DockerException, OSError) as error:
        raise RuntimeUnavailable(
            f"{call}: the container engine does not answer ({type(error).__name__}: {error})"
        ) from error


# Pattern, code, message; the first match wins. `{name}` is the user, group or program that the engine quoted,
# or else the program to run. `{engine}` is the engine's message, shortened.
_START_FAILURES = [
    (
        r"failed to mount local volume|error while mounting volume",
        "volume_mount_failed",
        "the node cannot mount a volume of this instance: {engine}",
    ),
    (
        r"could not select device driver|unresolvable CDI device|CDI device injection failed",
        "gpu_runtime_missing",
        "the node's Docker cannot provide GPUs; its operator must install nvidia-container-toolkit",
    ),
    (
        r"nvidia-container-cli|nvidia-container-runtime|nvidia-cdi-hook|libnvidia",
        "gpu_runtime_failed",
        "the NVIDIA container runtime failed on this node: {engine}",
    ),
    (
        r"port is already allocated|address already in use",
        "port_in_use",
        "no free port was found on the node for this instance; start the instance again",
    ),
    (
        r"unable to find (?:user|group) (?P<name>[^:\s]+)|no matching entries in (?:passwd|group) file",
        "user_not_found",
        "the image has no user or group {name}",
    ),
    (
        r"exec format error",
        "command_not_executable",
        "{name} was built for another kind of processor or is not a program",
    ),
    (
        r'exec: "(?P<name>[^"]*)": permission denied|exec (?P<name2>\S+) failed: Permission denied'
        r"|starting container process caused.*permission denied",
        "command_not_executable",
        "{name} is in the image, but the container has no permission to execute it",
    ),
    (
        r"chdir to cwd|cannot mkdir|working directory|: not a directory",
        "working_dir_unusable",
        "the working directory cannot be used: {engine}",
    ),
    (
        r'exec: "(?P<name>[^"]*)"|exec (?P<name2>\S+) failed: No such file|executable file not found',
        "command_not_found",
        "{name} was not found in the image",
    ),
    (
        r"no command specified",
        "command_missing",
        "the image has no command of its own; set `command`",
    ),
    (
        r"memory limit too low|minimum memory limit",
        "memory_too_small",
        "the memory limit is too low for the container to start; set a larger `memory_mib`",
    ),
    (
        # Docker 24 and later say "… have been fully subnetted", earlier releases "… among the defaults …".
        r"address pools? (?:among the defaults|have been fully subnetted)",
        "network_unavailable",
        "the node has no address range left for another project's network; its operator must add to "
        '"default-address-pools" in /etc/docker/daemon.json',
    ),
    (
        r"network \S+ not found",
        "network_unavailable",
        "the project's network was removed from the node meanwhile; start the instance again",
    ),
    (
        r"disk quota exceeded",
        "disk_too_small",
        "the disk limit is too low for the container to start; set a larger `disk_mib`",
    ),
    (
        r"--storage-opt is supported only|invalid storage option",
        "disk_limits_unavailable",
        "the node can no longer limit a container's disk; its operator must repair Docker's storage driver",
    ),
    (
        r"no space left on device",
        "node_disk_full",
        "the node's disk is full; start the instance again later, or on another node",
    ),
]


def start_failure(engine_message: str, command: list[str]) -> Reason:
    """Return the reason shown to users when the engine could not create or start the container."""
    for pattern, code, message in _START_FAILURES:
        if match := re.search(pattern, engine_message, re.IGNORECASE | re.DOTALL):
            quoted = match.groupdict()
            name = quoted.get("name") or quoted.get("name2") or (command[0] if command else "the command")
            return Reason(code=code, message=message.format(name=name, engine=_brief(engine_message)))
    return Reason(code="start_failed", message=f"the container did not start: {_brief(engine_message)}")


def pull_failure(
    engine_message: str, image: str, status: int = 0, *, credentials: bool = False
) -> Reason | None:
    """Return the reason shown to users when an image cannot be pulled; None: a later try may succeed.

    Args:
        status: as in `EngineRefused`.
        credentials: whether the project's credentials were sent to the registry.
    """
    if re.search(r"pull access denied|may require 'docker login'", engine_message):
        denial = "the project's credentials give no" if credentials else "the node has no"
        return Reason(
            code="image_not_found",
            message=f"{image} does not exist, or is private and {denial} access to it; check its name",
        )
    if is_denial(engine_message, status):
        why = (
            "the registry does not accept the project's credentials, or these give no access to the image"
            if credentials
            else "the registry requires credentials for this image"
        )
        return Reason(code="image_access_denied", message=f"{image} could not be pulled: {why}")
    if (missing := _why_missing(engine_message)) is not None:
        return Reason(code="image_not_found", message=f"{image} {missing}")
    if "no space left on device" in engine_message:
        return Reason(code="node_disk_full", message=f"the node's disk is too full to pull {image}")
    if "toomanyrequests" in engine_message:
        return image_pull_failed(image, "its registry limits how often the node may pull; try again later")
    return None


def _why_missing(engine_message: str) -> str | None:
    if "no matching manifest" in engine_message:
        return "is not built for this node's processor"
    if re.search(r"not found|manifest unknown|name unknown|does not exist", engine_message, re.I):
        return "does not exist; check its name and tag"
    return None


def image_pull_failed(image: str, why: str) -> Reason:
    return Reason(code="image_pull_failed", message=f"{image} could not be pulled: {why}")


def is_denial(engine_message: str, status: int) -> bool:
    """Return whether the registry answered and denied access."""
    denied = re.search(
        r"unauthorized|denied|forbidden|basic auth|authentication required", engine_message, re.I
    )
    return status in {401, 403} or denied is not None


def _brief(text: str) -> str:
    # Do not reveal where the node stores its containers.
    line = re.sub(r"/\S*/overlay2/\w+/merged", "", " ".join(text.split()))
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"
