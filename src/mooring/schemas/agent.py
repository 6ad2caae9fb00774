"""Messages between nodes and the control plane (`/agent/v1`): complete states in both directions."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mooring.core.gpu import GpuFacts
from mooring.core.instance.state import Phase
from mooring.core.node import NodeFacts
from mooring.schemas.agent_streams import StreamRequest
from mooring.schemas.peer import Peer
from mooring_client.schemas.gpus import LONGEST_LIST, Sample
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.spec import InstanceSpec, SecurityProfile
from mooring_client.schemas.states import Reason
from mooring_client.schemas.text import (
    LONGEST_TEXT,
    EnvName,
    EnvValue,
    GpuUuid,
    Name,
    Text,
    printable,
)

# The sizes of the database columns: 64 bits for counters, 32 for the rest.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Small = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class JoinRequest(Peer):
    """The body of `POST /agent/v1/join`. Its token works once and is the only credential.

    A repeated request with the same `credential_hash` gets the same node, so a lost answer costs nothing.
    """

    token: Text
    node_name: Annotated[Name | None, Field(description="ignored if the token fixes a name")] = None
    hostname: Text
    credential_hash: Annotated[
        Text | None,
        Field(
            pattern="^[0-9a-f]{64}$",
            description="SHA-256 of the credential that the node has made for itself; null: from an earlier "
            "release, which gets one in the answer",
        ),
    ] = None


class JoinAnswer(Peer):
    """The new node. Its credential gives access only to `/agent/v1` and this node's data."""

    node_id: Text
    node_name: Text
    credential: Annotated[Text, Field(description="empty if the request has a `credential_hash`")]
    control_plane_id: Text


class SessionAnswer(Peer):
    """The session number of a newly started agent, higher than all earlier ones of the node.

    Requests with a lower number are answered 409 `stale_session`.
    """

    session: int
    control_plane_id: Text
    node_id: Text


class CredentialAnswer(Peer):
    """A new credential. It is valid at once. The previous one is valid until the new one is used."""

    credential: Text
    node_id: Annotated[Text | None, Field(description="null: from an earlier release")] = None


class Endpoint(Peer):
    container: Small
    protocol: Literal["tcp", "udp"]
    host: Text
    port: Small


# Validators of fields that users see: they replace invalid values, so that the node's report is not rejected.


def _container_id(value: str | None) -> str | None:
    return value if value and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", value) else None


def _digest(value: str | None) -> str | None:
    return value if value and re.fullmatch(r"sha256:[0-9a-f]{64}", value) else None


def _exit_code(value: int | None) -> int | None:
    return value if value is None or 0 <= value <= 255 else 255


def _limited(value: object) -> object:
    """Limit the texts of a reason like all others: `Reason` itself takes longer ones, and shortens them."""
    texts = [value.get("code"), value.get("message")] if isinstance(value, dict) else []
    if any(isinstance(text, str) and (len(text) > LONGEST_TEXT or "\x00" in text) for text in texts):
        raise ValueError(f"`code` and `message` have at most {LONGEST_TEXT} characters, and no NUL")
    return value


ReportedReason = Annotated[Reason, BeforeValidator(_limited)]


class ObservedInstance(Peer):
    """One attempt of an instance as the node sees it. Absent attempts are not listed."""

    instance_id: Text
    attempt: Count
    phase: Phase
    reason: ReportedReason | None = None
    container_id: Annotated[Text | None, AfterValidator(_container_id)] = None
    exit_code: Annotated[Small | None, AfterValidator(_exit_code)] = None
    started_at: Text | None = None
    finished_at: Text | None = None
    image_digest: Annotated[Text | None, AfterValidator(_digest)] = None
    endpoints: Annotated[list[Endpoint], Field(max_length=1024)] = []


class Incident(Peer):
    """An incident of one GPU. The agent sends it again until a sync with it is answered."""

    id: Text
    uuid: GpuUuid
    code: Annotated[Text, AfterValidator(printable), Field(description="an incident code of docs/errors.md")]
    message: Annotated[Text, AfterValidator(printable), Field(description="for admins and the GPU's project")]
    count: Annotated[int, Field(ge=1, lt=2**31)] = 1
    at: Annotated[Text | None, Field(description="time of the last occurrence, by the node's clock")] = None
    mig_uuids: Annotated[
        list[Text], Field(max_length=16, description="the affected MIG devices; empty: the whole GPU")
    ] = []
    instance_id: Annotated[Text | None, Field(description="the instance that the incident concerns")] = None


class ReportedVolume(Peer):
    """A volume of this control plane that the node has."""

    volume_id: Text
    used_mib: Annotated[Count | None, Field(description="null: not measured")] = None
    size_enforced: Annotated[bool, Field(description="writes beyond its size fail")] = False


class SyncRequest(Peer):
    """The complete state of a node. Null means unknown, not empty."""

    # Below the column's limit, so that the next session number fits.
    session: Annotated[int, Field(ge=0, lt=2**30)]
    seq: Annotated[
        Count,
        Field(description="rises within a session; one not newer than the last applied report is ignored"),
    ]
    generation: Annotated[
        Count,
        Field(description="generation of the last answer that the agent applied; 0: none in this session"),
    ]
    wait_s: Annotated[float, Field(ge=0, le=60, description="seconds to wait for a change")] = 0
    brief: Annotated[
        bool,
        Field(description="omit the desired state from the answer if its generation is still `generation`"),
    ] = False
    facts: NodeFacts
    problem: ReportedReason | None = None
    gpus: Annotated[list[GpuFacts], Field(max_length=256)] | None
    samples: Annotated[list[Sample], Field(max_length=256)] = []
    instances: Annotated[list[ObservedInstance], Field(max_length=LONGEST_LIST)] | None
    specs: Annotated[
        dict[Text, Annotated[Text, Field(max_length=64)]] | None,
        Field(
            max_length=LONGEST_LIST,
            description="`spec_version` of each spec that the agent has; null: send all specs each time",
        ),
    ] = None
    orphans: Annotated[list[Orphan], Field(max_length=LONGEST_LIST)] = []
    incidents: Annotated[list[Incident], Field(max_length=1000)] = []
    faults: Annotated[
        list[Incident],
        Field(max_length=1000, description="incidents that leave the GPU in use, such as application faults"),
    ] = []
    volumes: Annotated[
        list[ReportedVolume] | None,
        Field(max_length=LONGEST_LIST, description="null: an earlier release, or not read yet"),
    ] = None


class Heartbeat(Peer):
    """The body of `POST /agent/v1/heartbeat`: the agent's last report is still true, except its samples."""

    session: Annotated[int, Field(ge=0, lt=2**30)]
    seq: Annotated[Count, Field(description="of that report")]
    generation: Annotated[Count, Field(description="of that report")]
    revision: Annotated[Count, Field(description="as in the answer to that report")]
    wait_s: Annotated[float, Field(ge=0, le=60, description="seconds to wait for a change")] = 0
    samples: Annotated[list[Sample], Field(max_length=256)] = []


class HeartbeatAnswer(Peer):
    """Confirms that the heartbeat is stored, or asks for a report."""

    control_plane_id: Text
    node_id: Text
    report_interval_s: float
    self_fence_s: Annotated[float | None, Field(description="as in the answer to a report")]
    report_wanted: Annotated[
        bool,
        Field(description="the desired state, or what is stored of the node, has changed: send a report"),
    ]


class RegistryAuth(Peer):
    """Credentials for one pull. The node does not store them (security rule R16)."""

    server: Annotated[Text, Field(description="the registry's host[:port], as in the image reference")]
    username: Text
    password: Annotated[Text, Field(repr=False)]


class GpuGrant(Peer):
    """What an instance has of one GPU: all of it, thousandths of it, or one MIG device."""

    gpu_uuid: GpuUuid
    milli: Annotated[int, Field(ge=1, le=1000)]
    mig_uuid: Text | None = None
    memory_mib: Annotated[int, Field(description="GPU memory that the instance may use")]


# Where a member of a group finds its hostfile: the default of DeepSpeed.
HOSTFILE: Final = "/job/hostfile"


class GroupMembership(Peer):
    """What a member of an instance group knows about its group."""

    group_id: Text
    rank: int
    count: int
    hostname: Annotated[Text, Field(description="the member's name in the group's network: `train-0`")]
    network: Annotated[
        Literal["bridge", "overlay", "host"],
        Field(description="bridge: all members are on this node; overlay: the network spans nodes"),
    ]
    overlay_name: Text | None = None
    env: dict[EnvName, EnvValue] = {}
    hostfile: Annotated[
        Text, Field(description=f"the content of `{HOSTFILE}`: a line `HOST slots=N` for each member")
    ] = ""


class OverlayNetwork(Peer):
    """A network that spans the nodes of a Docker Swarm. The swarm's managers create it."""

    name: Text
    group_id: Text
    project_id: Text
    encrypted: bool


class AssignedVolume(Peer):
    """A volume that an instance mounts. The node creates it if it has none of this ID."""

    volume_id: Text
    project_id: Text
    driver: Literal["local", "nfs", "cache"]
    size_mib: int | None = None
    path: Annotated[Text, Field(description="in the container")]
    read_only: bool = False
    server: Annotated[Text | None, Field(description="of nfs")] = None
    exported_path: Annotated[Text | None, Field(description="of nfs")] = None
    version: Annotated[Text | None, Field(description="of nfs; null: 4")] = None
    hard: Annotated[bool, Field(description="of nfs: wait for ever for the server")] = False


class KnownAssignment(Peer):
    """An attempt that should exist on the node, without the spec, which the agent already has."""

    instance_id: Text
    attempt: int
    name: Text
    project_id: Text
    generation: int
    spec_version: Annotated[Text, Field(description="identifies the spec, as in `specs`")] = ""
    want: Literal["running", "stopped"]
    may_start: Annotated[bool, Field(description="false once it has run: then, absent means lost")]
    stop_timeout_s: int
    gpu_uuids: Annotated[list[GpuUuid], Field(description="the GPUs of `grants`")]
    grants: list[GpuGrant] = []
    isolation: Literal["exclusive", "mig", "mps", "shared"] | None = None
    group: GroupMembership | None = None
    volumes: list[AssignedVolume] = []
    cpus: float
    memory_mib: int
    disk_mib: Annotated[int | None, Field(ge=1, description="null: no limit (earlier release)")] = None
    image_digest: Annotated[
        Text | None, Field(description="the image's digest at the first start, for all attempts (rule R15)")
    ] = None
    security_profile: SecurityProfile = "standard"
    local_images: Annotated[
        bool,
        Field(
            description="the project may run images that exist only on the node; otherwise the registry must "
            "confirm that the project may pull the image"
        ),
    ] = False


class StartSecretsRequest(Peer):
    """The body of `POST /agent/v1/instances/{id}/start-secrets`, sent before an attempt is started."""

    session: Annotated[int, Field(ge=0, lt=2**30)]
    attempt: Annotated[int, Field(ge=0, lt=2**31)]


class StartSecrets(Peer):
    """The secrets of one attempt. The node keeps them in memory only."""

    secrets: Annotated[
        dict[EnvName, EnvValue],
        Field(repr=False, description="values of the variables in spec.env that name a secret"),
    ] = {}
    registry: RegistryAuth | None = None
    node_id: Annotated[Text | None, Field(description="null: from an earlier release")] = None


class Assignment(KnownAssignment):
    """One attempt of an instance that should exist on the node."""

    spec: InstanceSpec
    asks_for_secrets: Annotated[
        bool, Field(description="the agent must request secrets or registry credentials for the start")
    ] = False
    # The agent adds these two from `StartSecrets`. A control plane of the previous release sends them.
    secrets: Annotated[
        dict[EnvName, EnvValue],
        Field(repr=False, description="values of the variables in spec.env that name a secret"),
    ] = {}
    registry: RegistryAuth | None = None
    registry_listed: Annotated[
        bool,
        Field(
            description="an admin allows the image's registry, which may then have any address; otherwise it "
            "must be on the public internet"
        ),
    ] = False


class Removal(Peer):
    """An attempt that the node must stop and remove."""

    instance_id: Text
    attempt: int
    stop_timeout_s: int


class SyncAnswer(Peer):
    """The desired state of a node, and the streams that users have requested."""

    control_plane_id: Text
    node_id: Text
    generation: int
    report_interval_s: float
    self_fence_s: Annotated[
        float | None,
        Field(description="stop instances with `on_node_loss: replace` after this time without an answer"),
    ] = None
    renew_credential: Annotated[bool, Field(description="an admin has requested a new credential")] = False
    brief: Annotated[bool, Field(description="omits the desired state, as requested")] = False
    revision: Annotated[
        int | None, Field(description="for heartbeats that refer to this report; null: none may")
    ] = None
    assignments: list[Assignment] = []
    unchanged: Annotated[list[KnownAssignment], Field(description="assignments with a spec in `specs`")] = []
    removals: list[Removal] = []
    streams: Annotated[
        list[StreamRequest],
        Field(description="empty if the node has `asks_for_streams`: see `/agent/v1/stream-requests`"),
    ] = []
    overlays: Annotated[
        list[OverlayNetwork],
        Field(description="for swarm managers: all networks of this control plane that should exist"),
    ] = []
    volume_removals: Annotated[
        list[Text], Field(description="IDs of deleted volumes, which the node removes if it has them")
    ] = []
