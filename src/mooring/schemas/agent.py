"""What a node and the control plane say to each other (`/agent/v1`), whole truths in both directions."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mooring.core.gpu import GpuFacts, Sample
from mooring.core.instance import InstanceSpec, Phase, Reason, SecurityProfile
from mooring.core.node import NodeFacts
from mooring.core.text import EnvName, EnvValue, GpuUuid, LongText, Name, Text
from mooring.schemas.base import Json

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


class Peer(BaseModel):
    """A message between releases: fields the reader does not know are ignored."""

    # What is wrong with a message is told without the message: it may carry secrets.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


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


class ObservedInstance(Peer):
    """One attempt of an instance as the node sees it. `absent` is never sent: silence says it."""

    instance_id: Text
    attempt: Count
    phase: Phase
    reason: Reason | None = None
    container_id: Text | None = None
    exit_code: Small | None = None
    started_at: Text | None = None
    finished_at: Text | None = None
    image_digest: Text | None = None
    endpoints: Annotated[list[Endpoint], Field(max_length=1024)] = []


class Orphan(Peer):
    """A container with Mooring's labels that the answer neither assigned nor told to remove."""

    container_id: Text
    name: Text
    instance_id: Text
    control_plane_id: Text | None


class Incident(Peer):
    """Something that takes one GPU out of use until it is cleared. Repeated until a sync is answered."""

    id: Text
    uuid: GpuUuid
    code: Text
    message: Text


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
    facts: NodeFacts
    problem: Reason | None = None
    gpus: Annotated[list[GpuFacts], Field(max_length=256)] | None
    samples: Annotated[list[Sample], Field(max_length=256)] = []
    instances: Annotated[list[ObservedInstance], Field(max_length=10_000)] | None
    orphans: Annotated[list[Orphan], Field(max_length=10_000)] = []
    incidents: Annotated[list[Incident], Field(max_length=1000)] = []


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


class Assignment(Peer):
    """One attempt of an instance that should exist on the node."""

    instance_id: Text
    attempt: int
    name: Text
    project_id: Text
    generation: int
    want: Literal["running", "stopped"]
    may_start: Annotated[
        bool, Field(description="false once this attempt has run: then an absent container is a loss")
    ]
    stop_timeout_s: int
    spec: InstanceSpec
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
    # Both only for as long as the attempt may still be started.
    secrets: Annotated[
        dict[EnvName, EnvValue],
        Field(repr=False, description="the values of those variables of spec.env that name a secret"),
    ] = {}
    registry: RegistryAuth | None = None


class Removal(Peer):
    """An attempt of which nothing should be left: stopped in its time, then removed."""

    instance_id: Text
    attempt: int
    stop_timeout_s: int


class LogsRequest(Peer):
    tail: int | None
    since: Text | None
    follow: bool


class ExecRequest(Peer):
    command: list[LongText]
    timeout_s: int
    max_output_bytes: int


class StreamRequest(Peer):
    """Bytes that a user waits for: the node dials `url` (null: where it syncs) and sends frames."""

    id: Text
    instance_id: Text
    attempt: int
    url: Text | None
    logs: LogsRequest | None = None
    exec: ExecRequest | None = None


class StreamError(Peer):
    code: str
    message: str


class StreamFrame(Peer):
    """One line of the body of `POST /agent/v1/streams/{id}` (newline-delimited JSON).

    A frame with nothing set only says that the node is still there; one with `end`, `exit_code` or
    `error` is the last.
    """

    stream: Literal["stdout", "stderr"] | None = None
    at: str | None = None
    text: str | None = None
    truncated: bool = False
    exit_code: int | None = None
    end: bool = False
    error: StreamError | None = None

    @property
    def is_last(self) -> bool:
        return self.end or self.error is not None or self.exit_code is not None


class SyncAnswer(Peer):
    """Everything the node should have, and what users ask of it right now."""

    control_plane_id: Text
    node_id: Text
    generation: int
    report_interval_s: float
    renew_credential: Annotated[
        bool, Field(description="an admin asks the node to take a new credential")
    ] = False
    assignments: list[Assignment] = []
    removals: list[Removal] = []
    streams: list[StreamRequest] = []
    overlays: Annotated[
        list[OverlayNetwork],
        Field(description="to a swarm's managers: all that should exist there of this control plane"),
    ] = []
