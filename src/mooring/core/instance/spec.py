"""The spec of an instance: what its user asks for."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mooring.core.gpu import mig_milli
from mooring.core.paths import is_kernel_path, normal_path
from mooring.core.text import (
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


class _Asked(BaseModel):
    # Users' unknown fields are refused here; readers of rows and peers pass extra="ignore" instead, so an
    # older release reads what a newer one wrote.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


WHOLE_MILLI = 1000
DEFAULT_PRIORITY = 50
ModelWords = Annotated[Text, Field(max_length=96)]


class GpuRequest(_Asked):
    """GPUs of one model on one node, a share of one GPU, or MIG devices; absent or count 0 means none.

    A share or a MIG profile without a count means one of them.
    """

    count: Annotated[int, Field(ge=0, le=64, description="whole GPUs, all on one node, or MIG devices")] = 0
    model: Annotated[
        ModelWords | Annotated[list[ModelWords], Field(min_length=1, max_length=16)] | None,
        Field(
            description="words of the NVML name, any case: `H100`, `RTX 4090`; several: any of them, the "
            "first that has room; null: any"
        ),
    ] = None
    min_memory_mib: Annotated[int | None, Field(ge=1, le=2**31, description="of each GPU")] = None
    min_compute_capability: Annotated[
        Text | None, Field(pattern=r"^[1-9][0-9]?\.[0-9]$", description="of each GPU, as `8.0`")
    ] = None
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="of one GPU's memory and SMs, in thousandths; other instances of the project may "
            "have the rest. Off unless an admin sets the project's gpu_sharing",
        ),
    ] = None
    mig_profile: Annotated[
        Text | None,
        Field(
            max_length=32,
            pattern=r"^[0-9]+[cg][a-z0-9.+]*$",
            description="of existing MIG devices: `1g.10gb`",
        ),
    ] = None
    same_numa: Annotated[bool, Field(description="all GPUs on one NUMA node")] = False

    @model_validator(mode="before")
    @classmethod
    def _one_of_them(cls, asked: object) -> object:
        """`{"share": 0.5}` asks for one GPU."""
        if not isinstance(asked, dict) or "count" in asked:
            return asked
        part = asked.get("share") is not None or asked.get("mig_profile") is not None
        return {**asked, "count": 1} if part else asked

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.share is not None and self.mig_profile is not None:
            raise PydanticCustomError("share_of_mig", "give share or mig_profile, not both")
        if self.share is not None and self.count != 1:
            raise PydanticCustomError("share_of_many", "a share is of one GPU: leave count out, or give 1")
        if self.share is not None and abs(self.share * 1000 - round(self.share * 1000)) > 1e-6:
            raise PydanticCustomError("share_too_fine", "a share is given in thousandths: 0.125, not 0.1255")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The models to choose from, the preferred first; empty: any."""
        if self.model is None:
            return ()
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)

    @property
    def milli(self) -> int:
        """Thousandths of each card; of a MIG device, what it counts as."""
        if self.mig_profile is not None:
            return mig_milli(self.mig_profile)
        return WHOLE_MILLI if self.share is None else round(self.share * 1000)


class Port(_Asked):
    """A port of the container, published on a free port of the node (see `endpoints`)."""

    container: Annotated[int, Field(ge=1, le=65535)]
    protocol: Literal["tcp", "udp"] = "tcp"


class SecretReference(_Asked):
    """The value of a variable that only its container sees: a secret of the project, by name (R17)."""

    secret: SecretName


# R7: `standard` is enough for apt, pip and sshd as root; `strict` has no capability at all.
SecurityProfile = Literal["standard", "strict"]

# Of env, command and entrypoint together: they are shown with every instance and sent with every report.
MOST_TEXT_BYTES = 256 * 1024

RESERVED_ENV_NAMES = frozenset({"CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_AUDIT"})
RESERVED_ENV_PREFIXES = ("NVIDIA_", "CUDA_MPS_", "DOCKER_RESOURCE_", "MOORING_")


def is_reserved_env(name: str) -> bool:
    """Whether the agent alone sets this variable (security rule R4): most of them choose or fake GPUs."""
    return name in RESERVED_ENV_NAMES or name.startswith(RESERVED_ENV_PREFIXES)


class InstanceSpec(_Asked):
    """What the user asked for: never edited, stored as it came, and the whole input of scheduler and node."""

    image: ImageReference
    command: Annotated[list[LongText] | None, Field(max_length=1024)] = None
    entrypoint: Annotated[list[LongText] | None, Field(max_length=64)] = None
    working_dir: Annotated[Text | None, Field(max_length=4096, pattern=r"^/[^\x00]*$")] = None
    user: Annotated[Text | None, Field(max_length=64, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*$")] = None
    env: Annotated[
        dict[EnvName, EnvValue | SecretReference],
        Field(max_length=512, description='a value, or `{"secret": "<name>"}`'),
    ] = {}
    gpus: GpuRequest = GpuRequest()
    cpus: Annotated[
        float | None,
        Field(ge=0.01, le=4096, description="null: the share of the node that goes with its GPUs, else 1"),
    ] = None
    memory_mib: Annotated[
        int | None,
        Field(ge=6, le=2**31, description="null: the share that goes with its GPUs, else 1024"),
    ] = None
    shm_mib: Annotated[int | None, Field(ge=1, le=2**31, description="null: half of the memory")] = None
    disk_mib: Annotated[
        int | None,
        Field(
            ge=64,
            le=2**31 - 1,
            description="what it may write to its filesystem, beside its image; null: 10240, on small nodes "
            "less. Enforced where the node says `disk_enforced`",
        ),
    ] = None
    ports: Annotated[list[Port], Field(max_length=64, description="8 at most")] = []
    max_duration_s: Annotated[int | None, Field(ge=1, le=10 * 366 * 86_400)] = None
    restart: Literal["never", "on_failure", "always"] = "never"
    on_capacity: Literal["queue", "fail"] = "queue"
    on_node_loss: Literal["keep", "replace"] = "keep"
    priority: Annotated[
        int, Field(ge=0, le=100, description="higher ones are placed first; see the project's max_priority")
    ] = DEFAULT_PRIORITY
    preemptible: Annotated[
        bool, Field(description="may be stopped for one of higher priority or for a project's guarantee")
    ] = False
    on_preemption: Annotated[
        Literal["requeue", "stop"], Field(description="what follows when it had to give way")
    ] = "requeue"
    preemption_grace_s: Annotated[
        int, Field(ge=0, le=3600, description="between SIGTERM and SIGKILL when it has to give way")
    ] = 30
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}

    @field_validator("env")
    @classmethod
    def _no_reserved_env(cls, env: dict[str, str | SecretReference]) -> dict[str, str | SecretReference]:
        if reserved := sorted(filter(is_reserved_env, env)):
            raise PydanticCustomError(
                "reserved_env",
                "{names} is set by Mooring itself and cannot be given; remove it from env",
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
        """Read a stored spec; fields that a newer release wrote are ignored."""
        return cls.model_validate(spec, extra="ignore", strict=False)


def not_supported_yet(field: str, hint: str) -> PydanticCustomError:
    """The refusal of a field that is part of the contract but would be ignored today."""
    return PydanticCustomError(
        "not_supported_yet", "{field} is not supported yet: {hint}", {"field": field, "hint": hint}
    )


class InstanceTemplate(InstanceSpec):
    """What is asked for of an instance but its name and its project: a spec that is let in, and labels."""

    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}

    @field_validator("labels")
    @classmethod
    def _no_reserved_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        return require_no_reserved_labels(labels)

    @field_validator("working_dir")
    @classmethod
    def _no_kernel_path(cls, working_dir: str | None) -> str | None:
        """Of requests only: a stored spec is read as it is, and its node refuses it."""
        if working_dir is not None and is_kernel_path(normal_path(working_dir)):
            raise PydanticCustomError(
                "working_dir_not_allowed", "working_dir must not be in /proc, /sys or /dev; choose another"
            )
        return working_dir

    @model_validator(mode="after")
    def _only_what_works(self) -> Self:
        if self._texts_bytes() > MOST_TEXT_BYTES:
            raise PydanticCustomError(
                "spec_too_large",
                "env, command and entrypoint are more than {most} bytes together; put large things into the "
                "image, or fetch them",
                {"most": MOST_TEXT_BYTES},
            )
        if self.on_node_loss == "replace":
            raise not_supported_yet("on_node_loss=replace", "use keep, and start it again yourself")
        return self

    def _texts_bytes(self) -> int:
        texts = [*(self.command or ()), *(self.entrypoint or ()), *self.env]
        texts += [value for value in self.env.values() if isinstance(value, str)]
        return sum(len(text.encode()) for text in texts)

    def spec(self) -> dict[str, Any]:
        """The spec alone, as stored in the instance's row."""
        return self.model_dump(mode="json", include=set(InstanceSpec.model_fields))


class InstanceRequest(InstanceTemplate):
    """The body of a create: the spec plus what only the control plane reads."""

    name: Name | None = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your own project")] = None


def require_no_reserved_labels(labels: dict[str, str]) -> dict[str, str]:
    """Labels that begin with `mooring.` are the agent's memory on the container (security rule R6).

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
