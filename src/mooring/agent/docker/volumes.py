"""The volumes of one engine: creates and removes them, and reports which there are and how full they are.

    a start ──> ensure ──> the engine          a removal of the control plane ──> remove ──> the engine
                  └──────> what is known <───────────────────────────────────────────┘
    every listing of facts ──> refresh, measure_soon ──> what is known ──> the next report

A report lists what is known: a volume is in it from before its creation until after its removal. So the
control plane never takes one for gone that the node still has.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from mooring.agent.disk.folder_size import folder_mib
from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.volume_mounts import (
    DRIVER_LABEL,
    VOLUME_LABEL,
    volume_config,
    volume_labels,
    volume_name,
)
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed, StartRefused
from mooring.agent.sync.workers import Workers
from mooring.schemas.agent import AssignedVolume, Assignment, ReportedVolume
from mooring_client.schemas.states import Reason

MEASURE_EVERY_S: Final = 300.0
_CONTROL_PLANE_LABEL: Final = "mooring.control_plane"

log = logging.getLogger(__name__)


class DockerVolumes:
    """Thread-safe.

    Args:
        measure: MiB in a folder; None: it takes too long, or cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        measure: Callable[[str], int | None] = folder_mib,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._measure, self._clock = engine, measure, clock
        self._engine_lock = threading.Lock()  # of changes of volumes, and of lists of them
        self._lock = threading.Lock()  # of everything below
        self._known: dict[str, ReportedVolume] | None = None
        self._documents: dict[str, Document] = {}
        self._used_at: dict[str, float] = {}  # of caches, when a container was last created with it
        self._enforces_sizes = True  # until the engine has rejected a size
        self._workers = Workers("volumes", 1)
        self._is_measuring = False
        self._measured_at: float | None = None

    def known(self) -> Sequence[ReportedVolume] | None:
        """The volumes of this control plane, by id; None: not read yet. Never waits for the engine."""
        with self._lock:
            return None if self._known is None else [self._known[key] for key in sorted(self._known)]

    def refresh(self, control_plane_id: str) -> None:
        """List the engine's volumes. Raises RuntimeUnavailable."""
        with self._engine_lock:
            try:
                listed = self._engine.volumes(VOLUME_LABEL)
            except EngineRefused as refusal:
                log.warning("cannot list volumes: %s", refusal)
                return
            found = {
                labels[VOLUME_LABEL]: document
                for document in listed
                if (labels := _labels(document)).get(_CONTROL_PLANE_LABEL) == control_plane_id
                and document["Name"] == volume_name(labels[VOLUME_LABEL])
            }
            with self._lock:
                before = self._known or {}
                self._documents = found
                self._known = {key: _reported(key, each, before.get(key)) for key, each in found.items()}

    def ensure(self, assignment: Assignment, control_plane_id: str) -> None:
        """Create the volumes of an assignment that the engine does not have.

        Raises:
            StartRefused: a volume of that name is not Mooring's, or the engine cannot create it.
            RuntimeUnavailable: the engine does not answer.
        """
        for volume in assignment.volumes:
            with self._engine_lock:
                self._ensure(volume, control_plane_id)

    def _ensure(self, volume: AssignedVolume, control_plane_id: str) -> None:
        volume_id = volume.volume_id
        with self._lock:
            self._used_at[volume_id] = self._clock()
            if self._known is not None and volume_id not in self._known:
                # Before the engine's answer, which may be lost.
                self._known[volume_id] = ReportedVolume(volume_id=volume_id)
        document = self._find(volume_id) or self._create(volume, control_plane_id)
        if _labels(document) != volume_labels(volume, control_plane_id):
            message = f"the node has a volume named {document['Name']} that is not this volume"
            raise StartRefused(Reason(code="volume_name_taken", message=message))
        with self._lock:
            self._documents[volume_id] = document
            if self._known is not None:
                self._known[volume_id] = _reported(volume_id, document, self._known.get(volume_id))

    def _find(self, volume_id: str) -> Document | None:
        try:
            return self._engine.volume(volume_name(volume_id))
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise _not_created(refusal) from refusal

    def _create(self, volume: AssignedVolume, control_plane_id: str) -> Document:
        sized = self._enforces_sizes and volume.driver != "nfs"
        try:
            if sized and not self._create_sized(volume, control_plane_id):
                sized = False
            if not sized:
                self._engine.create_volume(volume_config(volume, control_plane_id, sized=False))
            # Read it: if another program has just made one of this name, that one was the answer.
            return self._engine.volume(volume_name(volume.volume_id))
        except EngineRefused as refusal:
            raise _not_created(refusal) from refusal

    def _create_sized(self, volume: AssignedVolume, control_plane_id: str) -> bool:
        """Create it with its size. False: the engine's file system has no project quotas."""
        try:
            self._engine.create_volume(volume_config(volume, control_plane_id, sized=True))
        except EngineRefused as refusal:
            if "quota" not in refusal.message:
                raise
            log.info("this engine does not limit the sizes of volumes: %s", refusal.message)
            self._enforces_sizes = False
            return False
        return True

    def require_ours(self, assignment: Assignment, control_plane_id: str) -> None:
        """Check the volumes that a container was just created with.

        Raises:
            RuntimeUnavailable: another program has replaced one meanwhile.
        """
        for volume in assignment.volumes:
            found = self._find(volume.volume_id)
            if found is None or _labels(found) != volume_labels(volume, control_plane_id):
                raise RuntimeUnavailable(f"volume {volume.volume_id} was removed during a start")

    def remove(self, volume_ids: Collection[str], control_plane_id: str) -> None:
        """Remove volumes with their files, where the engine has them.

        Raises:
            RuntimeUnavailable: the engine does not answer, or a container still has one: call it again.
        """
        for volume_id in volume_ids:
            with self._engine_lock:
                document = self._find_to_remove(volume_id, control_plane_id)
                if document is not None:
                    self._remove(volume_id)
                self._forget(volume_id)

    def _find_to_remove(self, volume_id: str, control_plane_id: str) -> Document | None:
        """None: there is none, or it is another program's, which stays."""
        document = self._find(volume_id)
        labels = _labels(document or {})
        is_ours = labels.get(VOLUME_LABEL) == volume_id
        return document if is_ours and labels.get(_CONTROL_PLANE_LABEL) == control_plane_id else None

    def _remove(self, volume_id: str) -> None:
        try:
            self._engine.remove_volume(volume_name(volume_id))
        except EngineRefused as refusal:
            if refusal.status != 404:
                raise RuntimeUnavailable(f"volume {volume_id} is not removed yet: {refusal}") from refusal
        log.info("removed volume %s", volume_id)

    def _forget(self, volume_id: str) -> None:
        with self._lock:
            for by_id in (self._known, self._documents, self._used_at):
                if by_id is not None:
                    by_id.pop(volume_id, None)

    # --- sizes and caches

    def tend_soon(self, control_plane_id: str, *, low_on_space: bool) -> None:
        """Measure the volumes in a separate thread, at most every MEASURE_EVERY_S.

        Args:
            low_on_space: also remove the cache that has been unused for the longest time. If that is not
                enough, the next call removes another one.
        """
        with self._lock:
            is_due = self._measured_at is None or self._clock() - self._measured_at >= MEASURE_EVERY_S
            if self._is_measuring or not (is_due or low_on_space):
                return
            self._is_measuring = True
        self._workers.submit(lambda: self._tend(control_plane_id, measure=is_due, evict=low_on_space))

    def _tend(self, control_plane_id: str, *, measure: bool, evict: bool) -> None:
        try:
            if evict:
                self.evict_one(control_plane_id)
            if measure:
                self.measure_all()
        except (RuntimeUnavailable, StartRefused) as error:
            log.warning("cannot tend the volumes: %s", error)
        finally:
            with self._lock:
                self._is_measuring = False
                if measure:
                    self._measured_at = self._clock()

    def measure_all(self) -> None:
        """Measure how full the volumes are. A folder of a file server is not read: it might never answer."""
        with self._lock:
            documents = dict(self._documents)
        for volume_id, document in documents.items():
            if _labels(document).get(DRIVER_LABEL) == "nfs":
                continue
            used_mib = self._measure(str(document["Mountpoint"]))
            with self._lock:
                if self._known is not None and (known := self._known.get(volume_id)) is not None:
                    self._known[volume_id] = known.model_copy(update={"used_mib": used_mib})

    def evict_one(self, control_plane_id: str) -> None:
        """Remove the cache that has been unused for the longest time, and that no container has."""
        with self._lock:
            caches = [key for key, each in self._documents.items() if _labels(each)[DRIVER_LABEL] == "cache"]
            oldest_first = sorted(caches, key=lambda key: (self._used_at.get(key, 0.0), key))
        for volume_id in oldest_first:
            try:
                self.remove([volume_id], control_plane_id)
            except RuntimeUnavailable as error:
                log.info("kept cache %s: %s", volume_id, error)
            else:
                log.warning("the disk is low: emptied cache %s", volume_id)
                return


def mount_delayed(assignment: Assignment) -> StartDelayed | None:
    """The error for a start that took too long, if a file server may be the reason; otherwise None."""
    servers = sorted({each.server or "" for each in assignment.volumes if each.driver == "nfs"})
    if not servers:
        return None
    message = f"the node waits for the file server {', '.join(servers)} of a volume, which does not answer"
    reason = Reason(code="volume_not_answering", message=message)
    return StartDelayed(reason, refusal=reason)


def _not_created(refusal: EngineRefused) -> StartRefused:
    message = f"the node cannot create a volume of this instance: {refusal.message}"
    return StartRefused(Reason(code="volume_mount_failed", message=message))


def _labels(document: Document) -> Mapping[str, str]:
    return document.get("Labels") or {}


def _reported(volume_id: str, document: Document, before: ReportedVolume | None) -> ReportedVolume:
    return ReportedVolume(
        volume_id=volume_id,
        used_mib=before.used_mib if before else None,
        size_enforced="size" in (document.get("Options") or {}),
    )
