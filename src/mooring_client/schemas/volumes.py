"""Schemas of volumes: files that outlive the instances that mount them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.projects import Labels
from mooring_client.schemas.text import LabelKey, LabelValue, Name, Text

# local: a folder of one node. nfs: a folder of a file server, on any node. cache: a folder of each node that
# uses it, which the node may empty.
VolumeDriver = Literal["local", "nfs", "cache"]
VolumeState = Literal["available", "unavailable", "deleting"]

DEFAULT_SIZE_MIB = 10_240
VolumeSize = Annotated[int, Field(ge=1, le=2**31 - 1)]


class VolumeOptions(Body):
    """Where an NFS volume is. Other drivers have no options."""

    server: Annotated[
        Text | None,
        Field(
            max_length=253,
            pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?$",
            description="host name or address of the NFS server, as the nodes reach it",
        ),
    ] = None
    path: Annotated[
        Text | None,
        Field(
            max_length=1024,
            pattern=r"^/[A-Za-z0-9._/@+-]*$",
            description="the exported folder on the server",
        ),
    ] = None
    version: Annotated[
        Literal["3", "4", "4.0", "4.1", "4.2"] | None, Field(description="of the protocol; null: 4")
    ] = None
    hard: Annotated[
        bool | None,
        Field(
            description="programs wait for ever for a server that does not answer. null or false: their "
            "reads and writes fail after about a minute"
        ),
    ] = None


class VolumeFields(Body):
    """What can be requested of a volume."""

    labels: Labels = {}
    driver: Annotated[
        VolumeDriver,
        Field(
            description="local: on one node, where the first instance that mounts it is placed. nfs: on a "
            "file server; only admins create these. cache: on each node by itself, which may empty it"
        ),
    ] = "local"
    size_mib: Annotated[
        VolumeSize | None,
        Field(
            description="null: 10240; of nfs it must be null. It counts against the project's quota, and is "
            "enforced on nodes with `size_enforced`"
        ),
    ] = None
    options: Annotated[VolumeOptions, Field(description="of nfs: `server` and `path` are required")] = (
        VolumeOptions()
    )
    node_selector: Annotated[
        dict[LabelKey, LabelValue],
        Field(max_length=64, description="of local: labels that its node must have"),
    ] = {}

    @model_validator(mode="after")
    def _options_of_driver(self) -> Self:
        given = self.options.model_dump(exclude_none=True)
        if self.driver == "nfs" and not {"server", "path"} <= given.keys():
            raise PydanticCustomError("nfs_incomplete", "an nfs volume needs options.server and options.path")
        if self.driver == "nfs" and self.size_mib is not None:
            raise PydanticCustomError("size_of_nfs", "the file server limits the size of an nfs volume")
        if self.driver != "nfs" and given:
            raise PydanticCustomError(
                "options_not_allowed", "a volume of this driver has no options; only nfs has some"
            )
        if self.driver != "local" and self.node_selector:
            raise PydanticCustomError("selector_not_allowed", "only a local volume has a node_selector")
        return self

    @property
    def size(self) -> int | None:
        """In MiB, with the default; null: not limited by Mooring."""
        return None if self.driver == "nfs" else self.size_mib or DEFAULT_SIZE_MIB


class VolumeCreate(VolumeFields):
    """A new volume. Instances of its project mount it with `volumes` of their spec."""

    name: Name
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None


class VolumeApply(VolumeFields):
    """All that is requested of a volume, as in a create. An omitted field has its default."""

    name: Name | None = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None


class VolumePatch(Body):
    """The fields to change. Omitted fields stay unchanged."""

    # The defaults are never used: only the fields that were sent are read.
    labels: Labels = {}
    size_mib: Annotated[
        VolumeSize, Field(description="only while no node has the volume", default_factory=int)
    ]


class VolumeUser(Answer):
    """An instance that mounts the volume, or has mounted it and is not deleted yet."""

    instance_id: str
    instance_name: str
    state: str
    path: str
    read_only: bool


class VolumeCopy(Answer):
    """The volume on one node."""

    node_id: str
    node_name: str
    used_mib: Annotated[int | None, Field(description="null: not measured")]
    size_enforced: bool


class Volume(Answer):
    """A volume, where it is, and which instances mount it."""

    id: str
    name: str
    project_id: str
    labels: dict[str, str]
    driver: VolumeDriver
    size_mib: Annotated[int | None, Field(description="null: an nfs volume")]
    used_mib: Annotated[
        int | None, Field(description="as last measured by its node; of a cache the largest. null: unknown")
    ]
    size_enforced: Annotated[
        bool, Field(description="whether writes beyond `size_mib` fail: its nodes enforce the size")
    ]
    options: VolumeOptions
    node_selector: dict[str, str]
    node_id: Annotated[
        str | None, Field(description="the node that has a local volume; null: none yet, or another driver")
    ]
    node_name: str | None
    state: Annotated[
        VolumeState,
        Field(
            description="unavailable: its node does not answer, or was removed. deleting: its nodes have not "
            "confirmed yet that they removed it"
        ),
    ]
    copies: Annotated[list[VolumeCopy], Field(max_length=200, description="the first nodes that have it")]
    mounted_by: Annotated[list[VolumeUser], Field(max_length=200, description="the first such instances")]
    version: int
    created_at: Timestamp


class VolumeList(Answer):
    items: Annotated[list[Volume], Field(max_length=200)]
    next_cursor: str | None
