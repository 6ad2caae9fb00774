"""A record of each container that the agent created, in one file.

    <data directory>/containers.json    {"<container id>": {"instance_id": …, "gpu_uuids": […], …}, …}

Labels would not do: Docker merges the labels of an image into those of its containers, so the author of an
image could forge them. An entry is on disk before its container starts. The file is replaced as a whole, and
entries of containers that no longer exist are removed. If the file is damaged, the records are derived again
(`derive.py`), and completed from the control plane's next answer.
"""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mooring.agent.decide.device_claims import Share, devices_of
from mooring.agent.docker.create import HOST_NETWORK, network_of, spec_hash
from mooring.agent.sync.identity import StateDirectory
from mooring.schemas.agent import Assignment
from mooring_client.schemas.spec import SecretReference

FILE: Final = "containers.json"
MAX_RECORDS: Final = 4096
_MAX_FILE_BYTES: Final = 256 * 2**20

log = logging.getLogger(__name__)


class TooManyContainersError(Exception):
    """The file of records is full."""


class _FileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ShareRecord(_FileModel):
    isolation: Literal["mps", "shared"]
    milli: int
    memory_mib: int


class HostPort(_FileModel):
    """A port of the node that a container on the node's network listens on."""

    port: Annotated[int, Field(ge=1, le=65_535)]
    protocol: Literal["tcp", "udp"]


class ContainerRecord(_FileModel):
    """What the agent knows of a container that it created."""

    control_plane_id: str
    instance_id: str
    attempt: int
    project_id: str
    spec: str  # its hash
    image_digest: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()  # the GPUs of the MIG devices in `gpu_uuids`
    share: ShareRecord | None = None
    group_id: str | None = None
    host_ports: tuple[HostPort, ...] = ()
    secret_env: tuple[str, ...] | None = ()  # names of secret variables; None: unknown, all count as secret
    replaced_on_loss: bool = False

    @classmethod
    def of(cls, assignment: Assignment, image_digest: str | None, control_plane_id: str) -> Self:
        devices, env, group = devices_of(assignment), assignment.spec.env, assignment.group
        share = devices.share
        on_host = network_of(assignment) == HOST_NETWORK
        host_ports = [port for port in assignment.spec.ports if on_host and port.expose == "node"]
        secret_env = (name for name, value in env.items() if isinstance(value, SecretReference))
        return cls(
            control_plane_id=control_plane_id,
            instance_id=assignment.instance_id,
            attempt=assignment.attempt,
            project_id=assignment.project_id,
            spec=spec_hash(assignment),
            image_digest=image_digest,
            gpu_uuids=devices.gpu_uuids,
            cards=devices.parent_gpus,
            share=ShareRecord(isolation=share.isolation, milli=share.milli, memory_mib=share.memory_mib)
            if share
            else None,
            group_id=group.group_id if group else None,
            host_ports=tuple(HostPort(port=port.container, protocol=port.protocol) for port in host_ports),
            secret_env=tuple(sorted(secret_env)),
            replaced_on_loss=assignment.spec.on_node_loss == "replace",
        )

    @property
    def held_share(self) -> Share | None:
        if self.share is None:
            return None
        return Share(self.share.isolation, self.share.milli, self.share.memory_mib, self.project_id)


class ContainerRecords:
    """The records of one node, saved with `save`. Thread-safe."""

    def __init__(self, saved: bytes | None = None, save: Callable[[bytes], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._save = save
        self._records = _parsed(saved) if saved is not None else {}

    @classmethod
    def of_node(cls, state: StateDirectory) -> Self:
        return cls(state.read(FILE), lambda content: state.write(FILE, content))

    def get(self, container_id: str) -> ContainerRecord | None:
        with self._lock:
            return self._records.get(container_id)

    def ids(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._records)

    def remember(self, container_id: str, record: ContainerRecord) -> None:
        """Save a record. It is on disk when this returns.

        Raises:
            TooManyContainersError: the file is full.
            OSError: the file cannot be written. The record is not kept in memory either.
        """
        with self._lock:
            before = self._records.get(container_id)
            if before == record:
                return
            if before is None and len(self._records) >= MAX_RECORDS:
                raise TooManyContainersError
            self._replace({**self._records, container_id: record})

    def forget(self, container_ids: Collection[str]) -> None:
        """Delete the records of removed containers. After a failed write, the next call deletes them."""
        with self._lock:
            kept = {each: record for each, record in self._records.items() if each not in container_ids}
            if len(kept) == len(self._records):
                return
            try:
                self._replace(kept)
            except OSError:
                log.exception("records of removed containers cannot be deleted")

    def _replace(self, records: dict[str, ContainerRecord]) -> None:
        content = {
            container_id: record.model_dump(mode="json", exclude_defaults=True)
            for container_id, record in sorted(records.items())
        }
        self._save(json.dumps(content).encode())
        self._records = records


def _parsed(saved: bytes) -> dict[str, ContainerRecord]:
    """Return the valid entries. The others are derived again, like those of a lost file."""
    try:
        content = json.loads(saved) if len(saved) <= _MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return _valid(content)
    log.error("%s is damaged: the node's containers are recognized by their configuration", FILE)
    return {}


def _valid(content: Mapping[str, Any]) -> dict[str, ContainerRecord]:
    found: dict[str, ContainerRecord] = {}
    for container_id, entry in list(content.items())[:MAX_RECORDS]:
        try:
            found[container_id] = ContainerRecord.model_validate(entry)
        except ValidationError:
            log.exception("%s: the entry of container %s is damaged", FILE, container_id)
    return found
