"""A node: the facts its agent reports, the state they add up to, and what of it can be given out."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mooring.core.disk import DiskFacts
from mooring.core.text import LabelKey, LabelValue, Text


class NodeState(StrEnum):
    READY = "ready"
    CORDONED = "cordoned"  # nothing new is placed
    DRAINING = "draining"  # nothing new is placed, and at the deadline what is left is stopped
    NOT_READY = "not_ready"  # its agent speaks, but something on it is broken: see `reason`
    UNREACHABLE = "unreachable"  # its agent has been silent for longer than `unreachable_after_s`


class SwarmFacts(BaseModel):
    """The Docker Swarm that a node's daemon is in; only managers can make networks that span nodes."""

    model_config = ConfigDict(frozen=True)

    cluster_id: Text
    manager: bool


class NodeFacts(BaseModel):
    """What an agent says about its machine."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    hostname: Text
    address: Annotated[Text, Field(description="where published ports are reached")]
    cpus: Annotated[int, Field(ge=1, le=2**20)]
    memory_mib: Annotated[int, Field(ge=1, lt=2**31)]
    labels: dict[LabelKey, LabelValue] = {}
    agent_version: Text
    docker_version: Text | None = None
    driver_version: Text | None = None
    cuda_version: Text | None = None
    swarm: SwarmFacts | None = None
    disk: Annotated[
        DiskFacts | None, Field(description="null: not measured, or the agent is of an earlier release")
    ] = None
    mps: Annotated[bool, Field(description="the CUDA MPS daemon runs and enforces shares of GPUs")] = False
    grants: Annotated[
        bool,
        Field(description="its agent reads the grants of assignments; an older one gives whole GPUs only"),
    ] = False
    asks_for_secrets: Annotated[
        bool,
        Field(description="its agent asks for secrets when it starts an instance"),
    ] = False
    asks_for_streams: Annotated[
        bool, Field(description="its agent asks for streams with a call of their own, not with its reports")
    ] = False
    simulated_containers: bool = False
    simulated_gpus: bool = False
    overrides: Annotated[
        list[Text], Field(max_length=16, description="safeguards that its operator has turned off")
    ] = []


def allocatable_memory_mib(memory_mib: int) -> int:
    """Memory that instances may have: all but 2 %, and at least 512 MiB, kept for the system and the agent.

    Every instance has a hard memory limit, so handing out the whole of it would let the kernel choose
    whom to kill, sshd and dockerd included.
    """
    return memory_mib - min(max(512, memory_mib // 50), memory_mib // 2)


def fair_share(total: int, gpus_asked: int, gpus_total: int) -> int:
    """The part of a node's CPUs or memory that goes with a number of its GPUs, rounded down."""
    return total * gpus_asked // gpus_total


def state_of(*, silent: bool, problem: bool, draining: bool, cordoned: bool) -> NodeState:
    """The one state shown, worst first: a cordoned node that falls silent is unreachable."""
    if silent:
        return NodeState.UNREACHABLE
    if problem:
        return NodeState.NOT_READY
    if draining:
        return NodeState.DRAINING
    return NodeState.CORDONED if cordoned else NodeState.READY
