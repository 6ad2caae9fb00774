"""The agent's settings, read once from the environment (`MOORING_*`)."""

import re
import socket
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mooring.agent.gpus.mps import PIPE_DIRECTORY
from mooring.agent.images.policy import MAX_IMAGE_MIB
from mooring.agent.images.pull_pace import PullTimeouts
from mooring.core.simulation import SimulatedFleet, parse_fleets
from mooring_client.schemas.text import LabelKey, LabelValue, Name

LABELS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[LabelKey, LabelValue])


class AgentSettings(BaseSettings):
    """See docs/operating.md."""

    model_config = SettingsConfigDict(
        env_prefix="MOORING_", frozen=True, env_ignore_empty=True, extra="ignore"
    )

    server_url: Annotated[str, Field(description="the control plane's URL; https unless on this machine")] = (
        "http://127.0.0.1:8700"
    )
    join_token: Annotated[SecretStr | None, Field(description="needed only for the first start")] = None
    node_name: Annotated[Name | None, Field(description="null: the host's name")] = None
    node_address: Annotated[
        str | None,
        Field(description="where users reach published ports; null: the address on the route to the server"),
    ] = None
    node_labels: Annotated[dict[str, str], NoDecode, Field(description="such as zone=a,rack=3")] = {}
    data_dir: Annotated[Path, Field(description="the agent keeps its state in <data_dir>/agent")] = Path(
        ".mooring"
    )
    simulate: Annotated[
        tuple[SimulatedFleet, ...],
        NoDecode,
        Field(description="simulate these nodes instead of using this machine: 2x8xH100,1x1xL4"),
    ] = ()
    allow_unsafe_toolkit: Annotated[
        bool, Field(description="start GPU containers despite a container toolkit with vulnerabilities")
    ] = False
    allow_unsafe_versions: Annotated[
        bool, Field(description="start containers despite a runc, containerd or Docker with vulnerabilities")
    ] = False
    insecure_http: Annotated[
        bool, Field(description="send the node's credential unencrypted to another machine")
    ] = False
    network_isolation: Annotated[
        Literal["required", "best_effort"],
        Field(description="if containers cannot be isolated from this machine: start none, or only warn"),
    ] = "required"
    management_addresses: Annotated[
        tuple[IPv4Network | IPv6Network, ...] | None,
        NoDecode,
        Field(description="closed to containers: 10.0.0.0/24,fd12::/16 or none; null: the control plane"),
    ] = None
    runtime: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="Docker's name of the container runtime: runc, or a stronger one (runsc, kata-…)",
        ),
    ] = "runc"
    mps_pipe_directory: Annotated[
        Path,
        Field(
            description="pipe directory of the CUDA MPS daemon, which enforces shares of GPUs; with {gpu} in "
            "the path, each GPU has a daemon of its own"
        ),
    ] = PIPE_DIRECTORY
    pull_stall_timeout_s: Annotated[
        float, Field(ge=10, le=3600, description="a pull that moves less than 1 MiB in this time fails")
    ] = 120.0
    pull_timeout_s: Annotated[
        float, Field(ge=60, description="how long a pull may take, not counting the time in its queue")
    ] = 3600.0
    disk_reserved_mib: Annotated[
        int | None,
        Field(ge=0, le=2**40, description="space that instances cannot get; null: a fifth, up to 200 GiB"),
    ] = None
    disk_low_mib: Annotated[
        int | None,
        Field(ge=0, le=2**40, description="with less free nothing is placed or pulled; null: about 5 %"),
    ] = None
    max_image_mib: Annotated[
        int, Field(ge=1, le=2**40, description="largest image, compressed and unpacked")
    ] = MAX_IMAGE_MIB
    image_unused_hours: Annotated[
        float, Field(gt=0, le=1e6, description="remove pulled images after this time unused")
    ] = 7 * 24
    image_gc_high_pct: Annotated[
        int, Field(ge=1, le=100, description="disk use at which unused images are removed")
    ] = 85
    image_gc_low_pct: Annotated[int, Field(ge=0, le=99, description="disk use at which that stops")] = 75
    image_keep: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(description="images that are never removed: docker.io/pytorch/*,ghcr.io/acme/*"),
    ] = ()
    sample_interval_s: Annotated[float, Field(gt=0, le=60, description="interval of GPU samples")] = 1.0

    @field_validator("node_labels", mode="before")
    @classmethod
    def _pairs(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        pairs = [part.strip().partition("=") for part in given.split(",") if part.strip()]
        if bad := [key for key, equals, _ in pairs if not (key and equals)]:
            raise ValueError(f"{bad[0]!r} is not key=value; write zone=a,rack=3")
        return {key: value for key, _, value in pairs}

    @field_validator("node_labels")
    @classmethod
    def _valid_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        try:
            return LABELS.validate_python(labels)
        except ValidationError as error:
            raise ValueError(f"not a valid label: {error.errors()[0]['loc'][0]}") from error

    @field_validator("simulate", mode="before")
    @classmethod
    def _fleets(cls, given: object) -> object:
        return parse_fleets(given) if isinstance(given, str) else given

    @field_validator("management_addresses", mode="before")
    @classmethod
    def _networks(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        words = [] if given.strip() == "none" else [word.strip() for word in given.split(",") if word.strip()]
        try:
            return tuple(ip_network(word) for word in words)
        except ValueError as error:
            raise ValueError(f"{error}; write 10.0.0.0/24,192.0.2.7 or none") from error

    @field_validator("image_keep", mode="before")
    @classmethod
    def _patterns(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        return tuple(word.strip() for word in given.split(",") if word.strip())

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.image_gc_low_pct >= self.image_gc_high_pct:
            raise ValueError("MOORING_IMAGE_GC_LOW_PCT must be below MOORING_IMAGE_GC_HIGH_PCT")
        return self

    @field_validator("mps_pipe_directory")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("must be an absolute path: it is mounted at the same path in containers")
        return path

    @field_validator("runtime")
    @classmethod
    def _not_nvidia(cls, runtime: str) -> str:
        if runtime.startswith("nvidia"):
            raise ValueError("must not be an nvidia runtime: that gives a container the GPUs its image names")
        return runtime

    @property
    def resolved_node_name(self) -> str:
        return self.node_name or dns_label(socket.gethostname())

    @property
    def overrides(self) -> tuple[str, ...]:
        """The safeguards that are turned off; the control plane records them in its audit log (R1)."""
        off = {
            "allow_unsafe_toolkit": self.allow_unsafe_toolkit,
            "allow_unsafe_versions": self.allow_unsafe_versions,
            "insecure_http": self.insecure_http,
            "network_isolation=best_effort": self.network_isolation == "best_effort",
        }
        return tuple(name for name, is_off in off.items() if is_off)

    @property
    def pull_timeouts(self) -> PullTimeouts:
        return PullTimeouts(self.pull_stall_timeout_s, self.pull_timeout_s)

    @property
    def state_dir(self) -> Path:
        return self.data_dir / "agent"


def dns_label(hostname: str) -> str:
    """The first part of a hostname, with characters that node names cannot have replaced by `-`."""
    label = re.sub(r"[^a-z0-9-]+", "-", hostname.split(".", maxsplit=1)[0].lower())[:63].strip("-")
    return label or "node"
