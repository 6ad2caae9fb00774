"""A node: the facts that its agent reports, its state, and what instances may use of it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mooring.core.disk import DiskFacts
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.text import LabelKey, LabelValue, Text


class SwarmFacts(BaseModel):
    """The Docker Swarm of the node's daemon; only managers can create networks across nodes."""

    model_config = ConfigDict(frozen=True)

    cluster_id: Text
    manager: bool


class NodeFacts(BaseModel):
    """What an agent reports about its machine."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    hostname: Text
    address: Annotated[Text, Field(description="address of published ports")]
    cpus: Annotated[int, Field(ge=1, le=2**20)]
    memory_mib: Annotated[int, Field(ge=1, lt=2**31)]
    labels: dict[LabelKey, LabelValue] = {}
    agent_version: Text
    docker_version: Text | None = None
    driver_version: Text | None = None
    cuda_version: Text | None = None
    swarm: SwarmFacts | None = None
    disk: Annotated[DiskFacts | None, Field(description="null: not measured, or by an older agent")] = None
    mps: Annotated[bool, Field(description="the CUDA MPS daemon runs and enforces shares of GPUs")] = False
    grants: Annotated[
        bool,
        Field(description="its agent supports shares and MIG devices; older agents support whole GPUs only"),
    ] = False
    asks_for_secrets: Annotated[
        bool,
        Field(description="its agent requests secrets when it starts an instance"),
    ] = False
    asks_for_streams: Annotated[
        bool, Field(description="its agent requests streams with a separate call, not with its reports")
    ] = False
    fences_itself: Annotated[
        bool,
        Field(description="its agent stops instances with `on_node_loss: replace` if it has no contact"),
    ] = False
    mounts_volumes: Annotated[bool, Field(description="its agent supports volumes")] = False
    simulated_containers: bool = False
    simulated_gpus: bool = False
    overrides: Annotated[
        list[Text], Field(max_length=16, description="safety checks that its operator turned off")
    ] = []


def allocatable_memory_mib(memory_mib: int) -> int:
    """Memory for instances. The system and the agent keep 2 %, but at least 512 MiB, and at most half.

    If the memory limits of all instances added up to the whole memory, the kernel might kill sshd or dockerd.
    """
    return memory_mib - min(max(512, memory_mib // 50), memory_mib // 2)


def proportional(total: int, gpus: int, gpus_total: int) -> int:
    """The part of a node's CPUs or memory in proportion to a number of its GPUs, rounded down."""
    return total * gpus // gpus_total


def state_of(*, silent: bool, problem: bool, draining: bool, cordoned: bool) -> NodeState:
    """The worst state that applies: a cordoned node that stops reporting is unreachable."""
    if silent:
        return NodeState.UNREACHABLE
    if problem:
        return NodeState.NOT_READY
    if draining:
        return NodeState.DRAINING
    return NodeState.CORDONED if cordoned else NodeState.READY
