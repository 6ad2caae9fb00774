"""Schemas of instance groups."""

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.instances import Forecast, RefusalItem
from mooring_client.schemas.spec import (
    InstanceLabels,
    InstanceSpec,
    InstanceTemplate,
    SecretReference,
    not_supported_yet,
)
from mooring_client.schemas.states import DesiredState, Reason, State
from mooring_client.schemas.text import DNS_LABEL, Name, Text

# Bounded, because one scheduling cycle places all members in one transaction.
MAX_MEMBERS: Final = 64
# The group's name followed by a rank must still be a valid name.
LONGEST_NAME: Final = 60
# How often members are queued again after a failure before the group fails.
MAX_RESTARTS: Final = 10
OnMemberFailure = Literal["fail_group", "restart_member"]
NetworkMode = Literal["auto", "overlay", "host"]
UsedNetwork = Literal["bridge", "overlay", "host"]
# Variables that torchrun and similar launchers use; Mooring sets them for each member.
RENDEZVOUS_ENV: Final = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NODE_RANK"})


class GroupState(StrEnum):
    """The state of a group, derived from its members."""

    PENDING = "pending"  # all members wait
    STARTING = "starting"  # neither do all members wait, nor do all run
    RUNNING = "running"  # every member runs or has succeeded
    UNREACHABLE = "unreachable"  # the node of a member does not report
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"  # every member succeeded
    FAILED = "failed"


TORCHRUN = (
    "torchrun --nnodes=$WORLD_SIZE --node-rank=$NODE_RANK --nproc-per-node=gpu "
    "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py"
)


class GroupTemplate(InstanceTemplate):
    """What each member runs: the fields of an instance, without name and project."""

    @field_validator("env")
    @classmethod
    def _no_rendezvous_env(cls, env: dict[str, str | SecretReference]) -> dict[str, str | SecretReference]:
        if reserved := sorted(RENDEZVOUS_ENV & env.keys()):
            raise PydanticCustomError(
                "reserved_env",
                "env must not contain {names}, which only Mooring itself may set",
                {"names": ", ".join(reserved)},
            )
        return env

    @model_validator(mode="after")
    def _require_supported(self) -> Self:
        if self.on_node_loss == "replace":
            raise not_supported_yet(
                "on_node_loss=replace", "a group with a lost member fails: create it again"
            )
        return self


class GroupNetwork(Body):
    """How members on different nodes reach one another. Members on one node use a bridge network."""

    mode: Annotated[
        NetworkMode,
        Field(
            description="`overlay`: a network across the nodes of one Docker Swarm; `host`: the nodes' own "
            "network, if the project may use it; `auto`: overlay if available, otherwise host if allowed"
        ),
    ] = "auto"
    encrypted: Annotated[bool, Field(description="encrypt the overlay with IPsec, which is slower")] = False


class InstanceGroupCreate(Body):
    """Instances that are placed all together or not at all, and reach one another by name."""

    name: Annotated[
        Name | None,
        Field(
            max_length=LONGEST_NAME,
            pattern=DNS_LABEL,
            description="members are named `<name>-<rank>`; null: generated",
        ),
    ] = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None
    labels: Annotated[InstanceLabels, Field(description="added to the labels of its members")] = {}
    count: Annotated[int, Field(ge=1, le=MAX_MEMBERS)]
    template: GroupTemplate
    on_member_failure: Annotated[
        OnMemberFailure,
        Field(
            description="what to do when a member fails: stop the others, or queue the member again near "
            "the others, at most 10 times per start of the group"
        ),
    ] = "fail_group"
    network: GroupNetwork = GroupNetwork()
    master_port: Annotated[int, Field(ge=1, le=65535, description="port of rank 0, as MASTER_PORT")] = 29_500


class InstanceGroupApply(InstanceGroupCreate):
    """All that is requested of an instance group, as in a create. An omitted field has its default."""


class GroupMember(Answer):
    rank: int
    instance_id: str
    name: Annotated[str, Field(description="the member's name, also in the group's network")]
    state: State
    reason: Reason | None
    node_id: str | None
    node_name: str | None
    attempt: int
    exit_code: int | None


class GroupNetworkShown(Answer):
    mode: NetworkMode
    encrypted: bool
    used: Annotated[UsedNetwork | None, Field(description="bridge: all on one node; null: not placed")]


class GroupTemplateShown(InstanceSpec):
    """The spec of each member, as requested."""

    model_config = ConfigDict(extra="ignore", strict=False)

    labels: dict[str, str] = {}


class InstanceGroup(Answer):
    """An instance group with its members."""

    id: str
    name: str
    project_id: str
    labels: dict[str, str]
    count: int
    template: GroupTemplateShown
    on_member_failure: OnMemberFailure
    network: GroupNetworkShown
    master_port: int
    state: GroupState
    desired_state: DesiredState
    reason: Reason | None
    restarts: Annotated[int, Field(description="restarts of failed members since the last start")]
    queue_position: Annotated[int | None, Field(description="of its first pending member; null: none")]
    members: Annotated[list[GroupMember], Field(max_length=MAX_MEMBERS, description="by rank")]
    actions: list[str]
    version: Annotated[int, Field(description="rises with each change of the group or a member")]
    created_at: Timestamp


class InstanceGroupList(Answer):
    items: Annotated[list[InstanceGroup], Field(max_length=200)]
    next_cursor: str | None


class GroupExplanation(Forecast):
    """The forecast of the group's first pending member. `reason`: why the members cannot all be placed."""

    state: GroupState
    reason: Reason | None
    refusals: list[RefusalItem]
