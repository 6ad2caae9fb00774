"""Schemas of projects, members and users."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.spec import SecurityProfile
from mooring_client.schemas.text import LabelKey, LabelValue, Name, Text

Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Amount = Annotated[int, Field(ge=0, le=2**31)]
Hours = Annotated[float, Field(ge=0, le=1e9)]
Email = Annotated[
    Text,
    Field(min_length=3, max_length=254, pattern=r"^[^@\s\x00-\x1f\x7f-\xa0]+@[^@\s\x00-\x1f\x7f-\xa0]+$"),
]
DisplayName = Annotated[Text, Field(min_length=1, max_length=128)]
ImagePattern = Annotated[
    Text,
    Field(
        min_length=1,
        max_length=512,
        pattern=r"^([a-z0-9.*-]+(:[0-9]{1,5})?/)?[a-z0-9._*-]+(/[a-z0-9._*-]+)*$",
        description="registry/repository without a tag; the default registry is docker.io. `*` matches any "
        "characters, in the repository also `/`; `*` alone matches all images",
    ),
]


class Role(StrEnum):
    VIEWER = "viewer"
    MEMBER = "member"
    OWNER = "owner"


class QuotaValues(Body):
    """Limits of a project; null: no limit. Pending instances count, except for GPU-hours."""

    gpus: Annotated[Amount | None, Field(description="number of GPUs")] = None
    gpus_by_model: Annotated[
        dict[Annotated[Text, Field(min_length=1, max_length=96)], Amount],
        Field(max_length=64, description="number of GPUs by words of the model name"),
    ] = {}
    instances: Annotated[Amount | None, Field(description="number of instances that have not ended")] = None
    cpus: Annotated[float | None, Field(ge=0, le=2**31)] = None
    memory_mib: Annotated[int | None, Field(ge=0, le=2**53)] = None
    disk_mib: Annotated[
        int | None,
        Field(ge=0, le=2**53, description="a pending instance without `disk_mib` counts as 10240"),
    ] = None
    volumes_mib: Annotated[
        int | None, Field(ge=0, le=2**53, description="sizes of its volumes together, mounted or not")
    ] = None
    gpu_hours_per_day: Annotated[Hours | None, Field(description="per UTC day; new starts then wait")] = None
    gpu_hours_per_month: Annotated[Hours | None, Field(description="per UTC month")] = None


class ProjectCreate(Body):
    name: Name
    labels: Labels = {}


class ProjectSettings(Body):
    """What can be changed of a project. The defaults are those of a new one."""

    labels: Labels = {}
    quotas: QuotaValues = QuotaValues()
    weight: Annotated[float, Field(gt=0, le=1000, description="relative weight in fair sharing")] = 1
    allowed_images: Annotated[
        list[ImagePattern] | None, Field(max_length=256, description="patterns of allowed images; null: all")
    ] = None
    security_profile: Annotated[SecurityProfile, Field(description="`strict`: no capabilities")] = "standard"
    max_priority: Annotated[int | None, Field(ge=0, le=100, description="null: no limit")] = None
    guaranteed_gpus: Annotated[
        Amount | None,
        Field(
            description="number of GPUs that the project can reclaim by preempting others; GPUs beyond this "
            "number are borrowed. null: 0. If no project has a guarantee, no GPU counts as borrowed"
        ),
    ] = None
    gpu_sharing: Annotated[bool, Field(description="its instances may share GPUs with one another")] = False
    host_network: Annotated[
        bool,
        Field(
            description="its instance groups may use the nodes' own network where there is no Docker Swarm; "
            "their containers then reach everything that the node reaches"
        ),
    ] = False
    node_selector: Annotated[
        dict[LabelKey, LabelValue],
        Field(max_length=64, description="labels that nodes of its instances must have"),
    ] = {}
    local_images: Annotated[
        bool,
        Field(description="its instances may run images that exist only on a node"),
    ] = False
    require_disk_limits: Annotated[bool, Field(description="use only nodes that enforce `disk_mib`")] = False
    public_ports: Annotated[
        bool, Field(description="ports of its instances may be public: everybody reaches them by their URL")
    ] = False


class ProjectPatch(ProjectSettings):
    """The fields to change: owners may change name and labels, admins all. `quotas` are merged by key."""

    # The defaults are never used: only the fields that were sent are read.
    name: Annotated[Name, Field(default_factory=str)]


class ProjectMember(Body):
    """A member of a project. The user is named by `user_id` or by `email`."""

    user_id: Annotated[Text | None, Field(max_length=64)] = None
    email: Email | None = None
    role: Annotated[Role, Field(strict=False)]

    @model_validator(mode="after")
    def _one_user(self) -> Self:
        if (self.user_id is None) == (self.email is None):
            raise PydanticCustomError("ambiguous_user", "give user_id or email, not both")
        return self


class ProjectApply(ProjectSettings):
    """All that is requested of a project: omitted fields have their defaults, omitted quotas no limit.

    Owners may change labels and members, admins all.
    """

    name: Name | None = None
    members: Annotated[
        list[ProjectMember] | None,
        Field(
            max_length=1000,
            description="all members: others are removed, and their API keys of the project are revoked. "
            "null: the members stay as they are",
        ),
    ] = None


class Usage(Answer):
    """Usage that counts against the quotas: allocated resources and those of pending instances."""

    gpus: float
    gpus_by_model: Annotated[dict[str, float], Field(description="by the keys of the quota")]
    instances: int
    cpus: float
    memory_mib: int
    disk_mib: int
    volumes_mib: int
    gpu_hours_today: Annotated[float, Field(description="since midnight UTC")]
    gpu_hours_this_month: Annotated[float, Field(description="in this UTC month")]


class Project(Answer):
    id: str
    name: str
    labels: dict[str, str]
    quotas: QuotaValues
    usage: Annotated[Usage | None, Field(description="null in lists")]
    weight: float
    allowed_images: list[str] | None
    security_profile: SecurityProfile
    max_priority: int | None
    guaranteed_gpus: int | None
    gpu_sharing: bool
    host_network: bool
    node_selector: dict[str, str]
    local_images: bool
    require_disk_limits: bool
    public_ports: bool
    version: int
    created_at: Timestamp


class ProjectList(Answer):
    items: list[Project]
    next_cursor: str | None


class MemberPut(Body):
    role: Annotated[Role, Field(strict=False)]


class Member(Answer):
    project_id: str
    user_id: str
    name: str
    email: str | None
    role: Role
    created_at: Timestamp


class MemberList(Answer):
    items: list[Member]
    next_cursor: str | None


class UserCreate(Body):
    name: DisplayName
    email: Email | None = None
    is_admin: bool = False


class UserPatch(Body):
    # The defaults are never used: only the fields that were sent are read.
    name: Annotated[DisplayName, Field(default_factory=str)]
    email: Email | None = None
    is_admin: bool = False


class User(Answer):
    id: str
    name: str
    email: str | None
    is_admin: Annotated[bool | None, Field(description="null: only admins see it")]
    sso: Annotated[bool, Field(description="whether the user signs on with OIDC")]
    version: int
    created_at: Timestamp


class UserList(Answer):
    items: list[User]
    next_cursor: str | None
