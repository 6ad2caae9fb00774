"""Schemas of instance groups."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mooring.core.group import (
    LONGEST_NAME,
    MAX_MEMBERS,
    RENDEZVOUS_ENV,
    GroupState,
    NetworkMode,
    OnMemberFailure,
    UsedNetwork,
)
from mooring.core.instance.spec import (
    InstanceLabels,
    InstanceSpec,
    InstanceTemplate,
    SecretReference,
    not_supported_yet,
)
from mooring.core.instance.state import DesiredState, Reason, State
from mooring.core.text import DNS_LABEL, Name, Text
from mooring.schemas.base import Answer, Body, Timestamp
from mooring.schemas.instances import Forecast, RefusalItem

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
