"""The spec of an instance: what the user asks for."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mooring_client.schemas.gpus import mig_milli
from mooring_client.schemas.paths import forbidden_mount_path, is_kernel_path, is_within, normal_path
from mooring_client.schemas.text import (
    EnvName,
    EnvValue,
    ImageReference,
    LabelKey,
    LabelValue,
    LongText,
    Name,
    SecretName,
    Text,
)


class _SpecModel(BaseModel):
    # Requests with unknown fields are rejected. Readers of stored rows and of peers pass extra="ignore", so
    # that an older release can read what a newer one wrote.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


WHOLE_MILLI = 1000
DEFAULT_PRIORITY = 50
GpuModelName = Annotated[Text, Field(max_length=96)]


class GpuRequest(_SpecModel):
    """Whole GPUs of one model on one node, a share of one GPU, or MIG devices. Absent or `count` 0: none.

    With `share` or `mig_profile`, `count` defaults to 1.
    """

    count: Annotated[int, Field(ge=0, le=64, description="whole GPUs on one node, or MIG devices")] = 0
    model: Annotated[
        GpuModelName | Annotated[list[GpuModelName], Field(min_length=1, max_length=16)] | None,
        Field(
            description="words of the NVML name, in any case: `H100`, `RTX 4090`; a list: alternatives, the "
            "preferred one first; null: any model"
        ),
    ] = None
    min_memory_mib: Annotated[int | None, Field(ge=1, le=2**31, description="memory of each GPU")] = None
    min_compute_capability: Annotated[
        Text | None, Field(pattern=r"^[1-9][0-9]?\.[0-9]$", description="of each GPU, such as `8.0`")
    ] = None
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="fraction of one GPU's memory and SMs, a multiple of 0.001; other instances of the "
            "project can use the rest. An admin must enable `gpu_sharing` for the project",
        ),
    ] = None
    mig_profile: Annotated[
        Text | None,
        Field(
            max_length=32,
            pattern=r"^[0-9]+[cg][a-z0-9.+]*$",
            description="profile of existing MIG devices, such as `1g.10gb`",
        ),
    ] = None
    same_numa: Annotated[bool, Field(description="all GPUs on one NUMA node")] = False

    @model_validator(mode="before")
    @classmethod
    def _default_count(cls, given: object) -> object:
        if not isinstance(given, dict) or "count" in given:
            return given
        is_part = given.get("share") is not None or given.get("mig_profile") is not None
        return {**given, "count": 1} if is_part else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.share is not None and self.mig_profile is not None:
            raise PydanticCustomError("share_of_mig", "give share or mig_profile, not both")
        if self.share is not None and self.count != 1:
            raise PydanticCustomError("share_of_many", "a share is part of one GPU: omit count, or use 1")
        if self.share is not None and abs(self.share * 1000 - round(self.share * 1000)) > 1e-6:
            raise PydanticCustomError("share_too_fine", "share must be a multiple of 0.001, such as 0.125")
        return self

    @property
    def milli(self) -> int:
        """Thousandths of a GPU that each requested GPU, share or MIG device counts as."""
        if self.mig_profile is not None:
            return mig_milli(self.mig_profile)
        return WHOLE_MILLI if self.share is None else round(self.share * 1000)


# Who may use a port through the port proxy. private: a key, or a link that works once. token: anyone who has
# its signed link. public: everybody.
PortAuth = Literal["private", "token", "public"]


class Port(_SpecModel):
    """A container port: published on a free port of the node, or served by the port proxy."""

    container: Annotated[int, Field(ge=1, le=65535)]
    protocol: Literal["tcp", "udp"] = "tcp"
    expose: Annotated[
        Literal["node", "proxy"],
        Field(description="node: also on a free port of the node; proxy: only through the port proxy"),
    ] = "node"
    auth: Annotated[
        PortAuth,
        Field(
            description="who may use it through the proxy. private: a key, or a link that works once; token: "
            "anyone who has its signed link; public: everybody, if an admin has set `public_ports`"
        ),
    ] = "private"

    @model_validator(mode="after")
    def _proxy_is_http(self) -> Self:
        if self.protocol == "udp" and (self.expose == "proxy" or self.auth != "private"):
            raise PydanticCustomError("udp_proxied", "the proxy serves HTTP: a udp port needs expose `node`")
        return self


class VolumeMount(_SpecModel):
    """A volume of the project, and where the container has it."""

    volume: Annotated[
        Text, Field(max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$", description="its name or ID")
    ]
    path: Annotated[
        Text, Field(max_length=1024, pattern=r"^/[^\x00:]*$", description="absolute and normalized: `/data`")
    ]
    read_only: bool = False


class SecretReference(_SpecModel):
    """Takes the value from a secret of the project. Only the container sees the value (R17)."""

    secret: SecretName


# Security rule R7: `standard` is enough for apt, pip and sshd as root; `strict` has no capabilities.
SecurityProfile = Literal["standard", "strict"]

# Limit for env, command and entrypoint together, because every answer about an instance contains them.
MAX_TEXT_BYTES = 256 * 1024

RESERVED_ENV_NAMES = frozenset({"CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_AUDIT"})
RESERVED_ENV_PREFIXES = ("NVIDIA_", "CUDA_MPS_", "DOCKER_RESOURCE_", "MOORING_")


def is_reserved_env(name: str) -> bool:
    """Whether users may not set this variable (security rule R4): most of them select GPUs or shares."""
    return name in RESERVED_ENV_NAMES or name.startswith(RESERVED_ENV_PREFIXES)


class InstanceSpec(_SpecModel):
    """What the user asked for. Of the stored spec, a PATCH changes only `max_duration_s` and `priority`."""

    image: ImageReference
    command: Annotated[list[LongText] | None, Field(max_length=1024)] = None
    entrypoint: Annotated[list[LongText] | None, Field(max_length=64)] = None
    working_dir: Annotated[Text | None, Field(max_length=4096, pattern=r"^/[^\x00]*$")] = None
    user: Annotated[Text | None, Field(max_length=64, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*$")] = None
    env: Annotated[
        dict[EnvName, EnvValue | SecretReference],
        Field(max_length=512, description='a string, or `{"secret": "<name>"}`'),
    ] = {}
    tty: Annotated[bool, Field(description="run the command in a terminal")] = False
    stdin: Annotated[
        bool, Field(description="open the command's input, for clients that attach; otherwise it is empty")
    ] = False
    attach: Annotated[
        bool,
        Field(
            description="keep the first output for a client that attaches within 30 s of the start; implied "
            "by `tty` and `stdin`. After 1 MiB, the command waits for the client meanwhile"
        ),
    ] = False
    gpus: GpuRequest = GpuRequest()
    cpus: Annotated[
        float | None,
        Field(ge=0.01, le=4096, description="null: in proportion to its GPUs on the node; 1 without GPUs"),
    ] = None
    memory_mib: Annotated[
        int | None,
        Field(ge=6, le=2**31, description="null: in proportion to its GPUs on the node; 1024 without GPUs"),
    ] = None
    shm_mib: Annotated[
        int | None, Field(ge=1, le=2**31, description="shared memory; null: half of memory_mib")
    ] = None
    disk_mib: Annotated[
        int | None,
        Field(
            ge=64,
            le=2**31 - 1,
            description="space for the container's own files; the image does not count. null: 10240, less on "
            "small nodes. Enforced on nodes with `disk_enforced`",
        ),
    ] = None
    ports: Annotated[list[Port], Field(max_length=64, description="at most 8 on the node")] = []
    volumes: Annotated[
        list[VolumeMount],
        Field(max_length=16, description="of the project. A local volume decides the instance's node"),
    ] = []
    max_duration_s: Annotated[int | None, Field(ge=1, le=10 * 366 * 86_400)] = None
    restart: Literal["never", "on_failure", "always"] = "never"
    on_capacity: Literal["queue", "fail"] = "queue"
    on_node_loss: Annotated[
        Literal["keep", "replace"],
        Field(
            description="when its node has been silent for 300 s: wait for the node, or start another "
            "attempt on another node. The lost node stops the old attempt by itself before that"
        ),
    ] = "keep"
    priority: Annotated[
        int, Field(ge=0, le=100, description="higher is placed first; at most the project's `max_priority`")
    ] = DEFAULT_PRIORITY
    preemptible: Annotated[
        bool, Field(description="can be preempted for a higher priority or a project's guaranteed GPUs")
    ] = False
    on_preemption: Annotated[
        Literal["requeue", "stop"], Field(description="what happens after preemption")
    ] = "requeue"
    preemption_grace_s: Annotated[
        int, Field(ge=0, le=3600, description="time from SIGTERM to SIGKILL on preemption")
    ] = 30
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}

    @field_validator("env")
    @classmethod
    def _no_reserved_env(cls, env: dict[str, str | SecretReference]) -> dict[str, str | SecretReference]:
        if reserved := sorted(filter(is_reserved_env, env)):
            raise PydanticCustomError(
                "reserved_env",
                "env must not contain {names}, which only Mooring itself may set",
                {"names": ", ".join(reserved)},
            )
        return env

    @field_validator("ports")
    @classmethod
    def _no_port_twice(cls, ports: list[Port]) -> list[Port]:
        if len({(port.container, port.protocol) for port in ports}) < len(ports):
            raise PydanticCustomError("duplicate_port", "a port is listed twice")
        return ports

    @classmethod
    def from_row(cls, spec: dict[str, Any]) -> Self:
        """Read a stored spec; ignore fields that a newer release added."""
        return cls.model_validate(spec, extra="ignore", strict=False)


# Fields of the spec that a PATCH may change. The row repeats them as columns for the scheduling cycles.
CHANGEABLE_FIELDS = ("max_duration_s", "priority")


def not_supported_yet(field: str, hint: str) -> PydanticCustomError:
    """The error for a field that the API has, but this release does not implement."""
    return PydanticCustomError(
        "not_supported_yet", "{field} is not supported yet: {hint}", {"field": field, "hint": hint}
    )


def _require_no_reserved_labels(labels: dict[str, str]) -> dict[str, str]:
    """Reject labels beginning with `mooring.`, in which the agent keeps its own records (security rule R6).

    Raises:
        PydanticCustomError: code `reserved_label`.
    """
    if reserved := [key for key in labels if key.startswith("mooring.")]:
        raise PydanticCustomError(
            "reserved_label",
            "labels beginning with mooring. are reserved: {names}",
            {"names": ", ".join(reserved)},
        )
    return labels


InstanceLabels = Annotated[
    dict[LabelKey, LabelValue], Field(max_length=64), AfterValidator(_require_no_reserved_labels)
]


def _outside_of_kernel_paths(working_dir: str) -> str:
    if is_kernel_path(normal_path(working_dir)):
        raise PydanticCustomError(
            "working_dir_not_allowed", "working_dir must not be in /proc, /sys or /dev; choose another"
        )
    return working_dir


# The folder of a command in a request.
WorkingDir = Annotated[
    Text, Field(max_length=4096, pattern=r"^/[^\x00]*$"), AfterValidator(_outside_of_kernel_paths)
]


class InstanceTemplate(InstanceSpec):
    """A validated spec with labels: a create request without name and project."""

    labels: InstanceLabels = {}

    @field_validator("working_dir")
    @classmethod
    def _no_kernel_path(cls, working_dir: str | None) -> str | None:
        """Checked in requests only: a stored spec remains readable, and the node rejects such a path."""
        return None if working_dir is None else _outside_of_kernel_paths(working_dir)

    @field_validator("volumes")
    @classmethod
    def _usable_mount_paths(cls, volumes: list[VolumeMount]) -> list[VolumeMount]:
        """Checked in requests only, as `working_dir`."""
        paths = [mount.path for mount in volumes]
        for path in paths:
            if why := forbidden_mount_path(path):
                raise PydanticCustomError(
                    "volume_path_not_allowed",
                    "a volume cannot be at {path}: {why}",
                    {"path": path, "why": why},
                )
        for path in paths:
            if any(is_within(path, other) for other in paths if other != path) or paths.count(path) > 1:
                raise PydanticCustomError(
                    "volume_paths_overlap",
                    "two volumes overlap at {path}; no volume may be at or below the path of another",
                    {"path": path},
                )
        return volumes

    @model_validator(mode="after")
    def _not_too_large_and_supported(self) -> Self:
        if self._text_bytes() > MAX_TEXT_BYTES:
            raise PydanticCustomError(
                "spec_too_large",
                "env, command and entrypoint together exceed {most} bytes; put large data into the image, or "
                "download it",
                {"most": MAX_TEXT_BYTES},
            )
        return self

    def _text_bytes(self) -> int:
        texts = [*(self.command or ()), *(self.entrypoint or ()), *self.env]
        texts += [value for value in self.env.values() if isinstance(value, str)]
        return sum(len(text.encode()) for text in texts)

    def spec(self) -> dict[str, Any]:
        """The spec without labels, name and project, as stored in the instance's row."""
        return self.model_dump(mode="json", include=set(InstanceSpec.model_fields))


class InstanceRequest(InstanceTemplate):
    """The body of a create request: the spec, and fields that only the control plane reads."""

    name: Name | None = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None
