"""What a node and the control plane say to each other (`/agent/v1`), whole truths in both directions."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from mooring.core.gpu import GpuFacts, Sample
from mooring.core.instance.report import Phase
from mooring.core.instance.spec import InstanceSpec, SecurityProfile
from mooring.core.instance.state import Reason
from mooring.core.node import NodeFacts
from mooring.core.text import EnvName, EnvValue, GpuUuid, Name, Text, printable
from mooring.schemas.agent_streams import StreamRequest
from mooring.schemas.base import Json
from mooring.schemas.peer import Peer

JOIN_EXAMPLE: Json = {"token": "mj_…", "node_name": "gpu-7", "hostname": "gpu-7.example"}
SYNC_EXAMPLE: Json = {
    "session": 1,
    "seq": 42,
    "generation": 7,
    "wait_s": 5,
    "facts": {
        "hostname": "gpu-7.example",
        "address": "10.0.0.7",
        "cpus": 192,
        "memory_mib": 2063937,
        "agent_version": "0.1.0",
    },
    "gpus": [{"uuid": "GPU-7f3c", "index": 0, "model": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}],
    "instances": [{"instance_id": "ins_01k…", "attempt": 1, "phase": "running", "container_id": "4f3c…"}],
}


# What the columns hold: 64 bits for what counts up, 32 for the rest.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Small = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class JoinRequest(Peer):
    """`POST /agent/v1/join`, without credentials: the token is the credential, and works once."""

    model_config = ConfigDict(json_schema_extra={"examples": [JOIN_EXAMPLE]})

    token: Text
    node_name: Annotated[Name | None, Field(description="a name fixed in the token wins")] = None
    hostname: Text


class JoinAnswer(Peer):
    """The node's own credential, shown this once; it reaches `/agent/v1` and this node's data only."""

    node_id: Text
    node_name: Text
    credential: Text
    control_plane_id: Text


class SessionAnswer(Peer):
    """`POST /agent/v1/session`: a number higher than every earlier agent of this node was given.

    A request with a lower number is answered 409 `stale_session`.
    """

    session: int
    control_plane_id: Text
    node_id: Text


class CredentialAnswer(Peer):
    """`POST /agent/v1/credential`: good at once; the one before ends with the first use of this one."""

    credential: Text


class Endpoint(Peer):
    container: Small
    protocol: Literal["tcp", "udp"]
    host: Text
    port: Small


# Users read these. What cannot be true is left out: a refusal would silence the whole node.


def _container_id(told: str | None) -> str | None:
    return told if told and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", told) else None


def _digest(told: str | None) -> str | None:
    return told if told and re.fullmatch(r"sha256:[0-9a-f]{64}", told) else None


def _exit_code(told: int | None) -> int | None:
    return told if told is None or 0 <= told <= 255 else 255


class ObservedInstance(Peer):
    """One attempt of an instance as the node sees it. `absent` is never sent: silence says it."""

    instance_id: Text
    attempt: Count
    phase: Phase
    reason: Reason | None = None
    container_id: Annotated[Text | None, AfterValidator(_container_id)] = None
    exit_code: Annotated[Small | None, AfterValidator(_exit_code)] = None
    started_at: Text | None = None
    finished_at: Text | None = None
    image_digest: Annotated[Text | None, AfterValidator(_digest)] = None
    endpoints: Annotated[list[Endpoint], Field(max_length=1024)] = []


class Orphan(Peer):
    """A container with Mooring's labels that the answer neither assigned nor told to remove."""

    container_id: Text
    name: Text
    instance_id: Text
    control_plane_id: Text | None


class Incident(Peer):
    """Something that happened to one GPU. Repeated until a sync is answered."""

    id: Text
    uuid: GpuUuid
    code: Annotated[Text, AfterValidator(printable), Field(description="core/xid.py says what it means")]
    message: Annotated[
        Text,
        AfterValidator(printable),
        Field(description="for admins, and the project whose instance had the GPU"),
    ]
    count: Annotated[int, Field(ge=1, lt=2**31)] = 1
    at: Annotated[Text | None, Field(description="the last of them, by the node's clock")] = None
    mig_uuids: Annotated[
        list[Text], Field(max_length=16, description="the MIG devices that it is of; none: the whole GPU")
    ] = []
    instance_id: Annotated[Text | None, Field(description="whose attempt it is about")] = None


class SyncRequest(Peer):
    """Everything the node has. Null means unknown, never empty."""

    model_config = ConfigDict(json_schema_extra={"examples": [SYNC_EXAMPLE]})

    # Nodes raise it at each start only; the room above keeps the next start's number in the column.
    session: Annotated[int, Field(ge=0, lt=2**30)]
    seq: Annotated[Count, Field(description="rises within a session; a late, older report is not applied")]
    generation: Annotated[
        Count,
        Field(description="of the desired state this report was made under; 0: none heard in this session"),
    ]
    wait_s: Annotated[
        float, Field(ge=0, le=60, description="hold the answer this long if there is no news")
    ] = 0
    brief: Annotated[
        bool,
        Field(description="leave out of the answer what the node should have, if that has this `generation`"),
    ] = False
    facts: NodeFacts
    problem: Reason | None = None
    gpus: Annotated[list[GpuFacts], Field(max_length=256)] | None
    samples: Annotated[list[Sample], Field(max_length=256)] = []
    instances: Annotated[list[ObservedInstance], Field(max_length=10_000)] | None
    specs: Annotated[
        dict[Text, Annotated[Text, Field(max_length=64)]] | None,
        Field(
            max_length=10_000,
            description="instance -> `spec_version` of the spec that the agent has; null: it keeps none, and "
            "hears each spec with every answer",
        ),
    ] = None
    orphans: Annotated[list[Orphan], Field(max_length=10_000)] = []
    incidents: Annotated[list[Incident], Field(max_length=1000)] = []
    faults: Annotated[
        list[Incident],
        Field(max_length=1000, description="what takes no GPU out of use: application faults, warnings"),
    ] = []


class RegistryAuth(Peer):
    """Credentials for one pull; never written down by the node (security rule R16)."""

    server: Annotated[Text, Field(description="the registry's host[:port], as in the image's reference")]
    username: Text
    password: Annotated[Text, Field(repr=False)]


class GpuGrant(Peer):
    """What an instance has of one card: all of it, thousandths of it, or one MIG device on it."""

    gpu_uuid: GpuUuid
    milli: Annotated[int, Field(ge=1, le=1000)]
    mig_uuid: Text | None = None
    memory_mib: Annotated[int, Field(description="what it may use there")]


class GroupMembership(Peer):
    """What a member of an instance group is told of the others."""

    group_id: Text
    rank: int
    count: int
    hostname: Annotated[Text, Field(description="its name in the group's network: `train-0`")]
    network: Annotated[
        Literal["bridge", "overlay", "host"],
        Field(description="bridge: all members are on this node; overlay: a network that spans nodes"),
    ]
    overlay_name: Text | None = None
    env: dict[EnvName, EnvValue] = {}


class OverlayNetwork(Peer):
    """A network that spans the nodes of a Docker Swarm; made by those nodes that manage the swarm."""

    name: Text
    group_id: Text
    project_id: Text
    encrypted: bool


class KnownAssignment(Peer):
    """One attempt of an instance that should exist on the node, less its spec: the agent has that."""

    instance_id: Text
    attempt: int
    name: Text
    project_id: Text
    generation: int
    spec_version: Annotated[
        Text, Field(description="names the spec; the agent says in `specs` of its report which it has")
    ] = ""
    want: Literal["running", "stopped"]
    may_start: Annotated[
        bool, Field(description="false once this attempt has run: then an absent container is a loss")
    ]
    stop_timeout_s: int
    gpu_uuids: Annotated[list[GpuUuid], Field(description="the cards of `grants`")]
    grants: list[GpuGrant] = []
    isolation: Literal["exclusive", "mig", "mps", "shared"] | None = None
    group: GroupMembership | None = None
    cpus: float
    memory_mib: int
    disk_mib: Annotated[
        int | None, Field(ge=1, description="null: placed by an earlier release, without a limit")
    ] = None
    image_digest: Annotated[
        Text | None, Field(description="what the image resolved to at its first start; this runs (R15)")
    ] = None
    security_profile: SecurityProfile = "standard"
    local_images: Annotated[
        bool,
        Field(
            description="the project may run what exists only on the node, and what a tag names there; "
            "otherwise a registry has to say that it may have the image"
        ),
    ] = False


class StartSecretsRequest(Peer):
    """`POST /agent/v1/instances/{id}/start-secrets`: asked at the moment of an attempt's pull and start."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"session": 1, "attempt": 1}]})

    session: Annotated[int, Field(ge=0, lt=2**30)]
    attempt: Annotated[int, Field(ge=0, lt=2**31)]


class StartSecrets(Peer):
    """What one attempt is started with; the node keeps it in memory only."""

    secrets: Annotated[
        dict[EnvName, EnvValue],
        Field(repr=False, description="the values of those variables of spec.env that name a secret"),
    ] = {}
    registry: RegistryAuth | None = None


class Assignment(KnownAssignment):
    """One attempt of an instance that should exist on the node."""

    spec: InstanceSpec
    asks_for_secrets: Annotated[
        bool, Field(description="it starts with secrets or a registry's credentials: ask for them then")
    ] = False
    # Filled in by the agent. An agent of this release also takes them from a control plane of the one before.
    secrets: Annotated[
        dict[EnvName, EnvValue],
        Field(repr=False, description="the values of those variables of spec.env that name a secret"),
    ] = {}
    registry: RegistryAuth | None = None
    registry_listed: Annotated[
        bool,
        Field(
            description="an admin names the image's registry, so that it may be at any address; otherwise on "
            "the public internet only"
        ),
    ] = False


class Removal(Peer):
    """An attempt of which nothing should be left: stopped in its time, then removed."""

    instance_id: Text
    attempt: int
    stop_timeout_s: int


class SyncAnswer(Peer):
    """Everything the node should have, and what users ask of it right now."""

    control_plane_id: Text
    node_id: Text
    generation: int
    report_interval_s: float
    renew_credential: Annotated[
        bool, Field(description="an admin asks the node to take a new credential")
    ] = False
    brief: Annotated[
        bool,
        Field(description="says nothing of what the node should have: the report asked for that"),
    ] = False
    assignments: list[Assignment] = []
    unchanged: Annotated[
        list[KnownAssignment],
        Field(description="as `assignments`, of which the report says that the agent has the spec"),
    ] = []
    removals: list[Removal] = []
    streams: Annotated[
        list[StreamRequest],
        Field(description="none if `asks_for_streams` in the node's facts: see `/agent/v1/stream-requests`"),
    ] = []
    overlays: Annotated[
        list[OverlayNetwork],
        Field(description="to a swarm's managers: all that should exist there of this control plane"),
    ] = []
