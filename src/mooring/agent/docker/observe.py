"""Reads the state of Mooring's containers from the engine, and inspects only those that changed.

The devices of a container come from the agent's record of it (container_records.py), never from labels, which
its image could have set. A container that cannot be interpreted does not fail the node: it is listed as
recorded, or without a record as an orphan.
"""

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mooring.agent.decide.reconcile import ENDED, key_of
from mooring.agent.decide.snapshot import Key
from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.container_records import ContainerRecord, ContainerRecords, TooManyContainersError
from mooring.agent.docker.create import CONTROL_PLANE_LABEL, INSTANCE_LABEL, spec_hash
from mooring.agent.docker.derive import ParentOf, derive_record, has_our_name, is_ours
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.redaction import SecretRedactor
from mooring.agent.runtime import Container, RuntimeUnavailable, StartRefused
from mooring.schemas.agent import Assignment, Endpoint
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.text import printable

_NEVER = "0001-01-01T00:00:00Z"  # Go's zero time
# If a container is restarted by hand between two lists, its ports change but the lists are equal.
_MAX_AGE_S = 60.0
MAX_ORPHANS: Final = 1000
_LONGEST_ORPHAN_TEXT: Final = 255

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Inspection:
    listed_state: tuple[str, str]  # what the list showed then
    container: Container | None  # None: an orphan
    read_at: float


class Observer:
    """Lists containers, from one thread at a time; other methods may be called from any thread.

    Args:
        parent_of: UUID of a MIG device -> that of its GPU, if the driver reports it.
    """

    def __init__(
        self,
        engine: Engine,
        address: str,
        records: ContainerRecords,
        parent_of: ParentOf = lambda _uuid: None,
        *,
        simulated_gpus: bool = False,
    ) -> None:
        self._engine, self._address, self._records = engine, address, records
        self._parent_of, self._simulated = parent_of, simulated_gpus
        self._inspections: dict[str, _Inspection] = {}
        self._changed: set[str] = set()
        self._expected: Mapping[Key, Assignment] = {}
        self._unrecorded: dict[str, Key] = {}  # containers with a derived record, which is incomplete

    def containers(self, control_plane_id: str | None) -> tuple[list[Container], list[Orphan]]:
        """Return the containers of this control plane, and as orphans other containers with Mooring's labels.

        Raises:
            RuntimeUnavailable: the engine returned no list. That does not mean that there are no containers.
        """
        ours: list[Container] = []
        orphans: list[Orphan] = []
        recorded = self._records.ids()  # before the list, which lacks containers that are recorded after it
        listed = self._engine.containers(INSTANCE_LABEL)
        for entry in listed:
            found = self._observe(entry, control_plane_id)
            if isinstance(found, Container):
                ours.append(found)
            elif found is not None:
                orphans.append(found)
        present = {entry["Id"] for entry in listed}
        for gone in (self._inspections.keys() | self._changed | self._unrecorded.keys()) - present:
            self.forget(gone)
            self._changed.discard(gone)
            self._unrecorded.pop(gone, None)
        self._records.forget(recorded - present)
        return ours, orphans[:MAX_ORPHANS]

    def read(self, container_id: str, control_plane_id: str | None) -> Container | None:
        """Return the present state of a container; None if it was removed, or is foreign."""
        try:
            inspected = self._engine.container(container_id)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise
        return self.interpret(inspected, control_plane_id)

    def interpret(self, inspected: Document, control_plane_id: str | None) -> Container | None:
        """Return the container of an "inspect" answer; None if it is foreign.

        If the answer cannot be interpreted, return the container as it was recorded; None without a record.
        """
        try:
            record = self._find_record(inspected, control_plane_id)
            return container_of(inspected, record, self._address) if record else None
        except Exception:
            # Invalid data of one image must not hide the other containers.
            log.exception("container %s cannot be interpreted", inspected["Id"])
            return self._as_recorded(inspected["Id"], inspected["State"]["Status"], control_plane_id)

    def record_of(self, inspected: Document) -> ContainerRecord | None:
        return self._records.get(inspected["Id"])

    def remember(self, container_id: str, record: ContainerRecord) -> None:
        """Save a record. Raises OSError or TooManyContainersError if it could not be saved."""
        self._records.remember(container_id, record)
        self.forget(container_id)

    def expect(self, assignments: Iterable[Assignment]) -> None:
        """Set the node's assignments, which complete derived records."""
        self._expected = {key_of(assignment): assignment for assignment in assignments}
        for container_id, key in list(self._unrecorded.items()):
            if key in self._expected:
                self.forget(container_id)

    def running_on(self, gpu_uuid: str) -> list[Container]:
        """Return the containers with this GPU or MIG device that were running in the last list."""
        seen = [each.container for each in list(self._inspections.values()) if each.container]
        return [one for one in seen if one.status == "running" and gpu_uuid in one.gpu_uuids]

    def forget(self, container_id: str) -> None:
        """Read the container again in the next list, even if its entry is unchanged."""
        self._inspections.pop(container_id, None)

    def mark_changed(self, container_id: str) -> None:
        """As `forget`, but also effective if a list in progress has just read the container.

        The engine's event of an end comes up to 100 ms before the list shows the end; "inspect" waits for it.
        """
        self._changed.add(container_id)

    def _observe(self, entry: Document, control_plane_id: str | None) -> Container | Orphan | None:
        """Return the container or orphan of a list's entry; None if it was removed meanwhile."""
        try:
            if not self._may_be_ours(entry, control_plane_id):
                return _orphan(entry)
            return self._read_if_changed(entry, control_plane_id)
        except EngineRefused as refusal:
            log.warning("container %s cannot be inspected: %s", entry["Id"], refusal)
            return self._as_listed(entry, control_plane_id) or _orphan(entry)
        except RuntimeUnavailable:
            self._engine.ping()  # raises unless only this container is the problem
            if (listed := self._as_listed(entry, control_plane_id)) is None:
                raise
            log.warning("container %s cannot be inspected: no answer", entry["Id"])
            return listed

    def _may_be_ours(self, entry: Document, control_plane_id: str | None) -> bool:
        if self._recorded(entry["Id"], control_plane_id) is not None:
            return True
        labels = entry["Labels"] or {}
        names = entry["Names"] or ()
        return is_ours(labels, control_plane_id) and any(has_our_name(labels, name) for name in names)

    def _read_if_changed(self, entry: Document, control_plane_id: str | None) -> Container | Orphan | None:
        container_id, listed_state = entry["Id"], _listed_state(entry)
        if container_id in self._changed:
            self._changed.discard(container_id)  # before the read: a later change adds it again
            self.forget(container_id)
        last = self._inspections.get(container_id)
        if not last or last.listed_state != listed_state or time.monotonic() - last.read_at >= _MAX_AGE_S:
            try:
                inspected = self._engine.container(container_id)
            except EngineRefused as refusal:
                if refusal.status == 404:
                    return None
                raise
            last = _Inspection(listed_state, self.interpret(inspected, control_plane_id), time.monotonic())
            self._inspections[container_id] = last
        return last.container or _orphan(entry)

    def _recorded(self, container_id: str, control_plane_id: str | None) -> ContainerRecord | None:
        record = self._records.get(container_id)
        return record if record is not None and record.control_plane_id == control_plane_id else None

    def _as_recorded(self, container_id: str, status: str, control_plane_id: str | None) -> Container | None:
        """Return the container as recorded: it keeps its devices even if it cannot be read."""
        if (record := self._recorded(container_id, control_plane_id)) is None:
            return None
        return container_of({"Id": container_id, "State": {"Status": status}}, record, self._address)

    def _as_listed(self, entry: Document, control_plane_id: str | None) -> Container | None:
        """Return a container that cannot be inspected, as recorded, with its state in the list."""
        status = entry["State"]
        if (container := self._as_recorded(entry["Id"], status, control_plane_id)) is None:
            return None
        match = re.match(r"\w+ \((-?\d+)\)", entry.get("Status") or "")
        return replace(container, exit_code=int(match[1]) if match and status in ENDED else None)

    def _find_record(self, inspected: Document, control_plane_id: str | None) -> ContainerRecord | None:
        """Return the container's record, derived if there is none; None if the container is foreign."""
        container_id = inspected["Id"]
        if (record := self._recorded(container_id, control_plane_id)) is not None:
            return record
        found = derive_record(inspected, control_plane_id, self._parent_of, simulated_gpus=self._simulated)
        if found is None:
            return None
        key = found.instance_id, found.attempt
        assignment = self._expected.get(key)
        if assignment is None or not _is_made_for(assignment, found):
            self._unrecorded[container_id] = key
            return found
        return self._completed(container_id, assignment, found)

    def _completed(
        self, container_id: str, assignment: Assignment, found: ContainerRecord
    ) -> ContainerRecord:
        """Save and return the complete record of a container, from its assignment."""
        record = ContainerRecord.of(assignment, found.image_digest, found.control_plane_id)
        self._unrecorded.pop(container_id, None)
        try:
            self._records.remember(container_id, record)
        except (OSError, TooManyContainersError):
            log.exception("the record of container %s cannot be saved", container_id)
        else:
            log.info("container %s of %s/%s is recorded", container_id, *key_of(assignment))
        return record


def _is_made_for(assignment: Assignment, found: ContainerRecord) -> bool:
    try:
        return spec_hash(assignment) == found.spec
    except StartRefused:  # the assignment has an invalid network
        return False


def container_of(inspected: Document, record: ContainerRecord, address: str) -> Container:
    """Return the container of an "inspect" answer, with the devices of its record."""
    state = inspected["State"]
    ended = state["Status"] in ENDED
    return Container(
        instance_id=record.instance_id,
        attempt=record.attempt,
        container_id=inspected["Id"],
        status=state["Status"],
        gpu_uuids=record.gpu_uuids,
        parent_gpus=record.cards,
        share=record.held_share,
        project_id=record.project_id,
        replaced_on_loss=record.replaced_on_loss,
        exit_code=state.get("ExitCode") if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        error=_error_of(inspected, record),
        started_at=_time(state.get("StartedAt")),
        finished_at=_time(state.get("FinishedAt")) if ended else None,
        image_digest=record.image_digest,
        endpoints=(
            _endpoints((inspected.get("NetworkSettings") or {}).get("Ports") or {}, address)
            or tuple(
                Endpoint(container=port.port, protocol=port.protocol, host=address, port=port.port)
                for port in record.host_ports
            )
        ),
    )


def _error_of(inspected: Document, record: ContainerRecord) -> str | None:
    if not (error := inspected["State"].get("Error")):
        return None
    return printable(SecretRedactor.of_container(inspected, record.secret_env).mask(error))


def _listed_state(entry: Document) -> tuple[str, str]:
    """Return the state, and of `Status` ("Exited (1) 2 minutes ago") what does not change with time."""
    code = re.match(r"\w+ \(-?\d+\)", entry.get("Status") or "")
    return entry["State"], code.group() if code else ""


def _endpoints(ports: Mapping[str, Any], address: str) -> tuple[Endpoint, ...]:
    """Return the published ports; ports that only the image exposes have no bindings."""
    found = []
    for name, bindings in sorted(ports.items()):
        number, _, protocol = name.partition("/")
        # The engine also publishes on IPv6, on another port; the IPv4 port is enough.
        bound = [binding for binding in bindings or [] if ":" not in binding.get("HostIp", "")] or bindings
        if bound and protocol in {"tcp", "udp"}:
            port = int(bound[0]["HostPort"])
            found.append(Endpoint(container=int(number), protocol=protocol, host=address, port=port))
    return tuple(found)


def _orphan(entry: Document) -> Orphan:
    """Return the orphan of a list's entry, whose labels and name are untrusted text."""
    labels = entry["Labels"] or {}
    name = (entry["Names"] or [entry["Id"]])[0].lstrip("/")
    control_plane_id = labels.get(CONTROL_PLANE_LABEL)
    return Orphan(
        container_id=entry["Id"],
        name=_shown(name),
        instance_id=_shown(labels.get(INSTANCE_LABEL, "")),
        control_plane_id=None if control_plane_id is None else _shown(control_plane_id),
    )


def _shown(text: str) -> str:
    return printable(text)[:_LONGEST_ORPHAN_TEXT]


def _time(text: str | None) -> str | None:
    return None if text == _NEVER else text
