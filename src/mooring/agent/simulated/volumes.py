"""Volumes of a simulated engine: they exist, and contain nothing."""

import threading
from collections.abc import Callable, Collection, Sequence

from mooring.agent.runtime import RuntimeUnavailable
from mooring.schemas.agent import AssignedVolume, ReportedVolume


class SimulatedVolumes:
    """The volumes of one node, with enforced sizes. Thread-safe.

    Args:
        in_use: the ids of the volumes of all containers, ended ones included.
    """

    def __init__(self, in_use: Callable[[], Collection[str]]) -> None:
        self._in_use = in_use
        self._lock = threading.Lock()
        self._known: dict[str, ReportedVolume] = {}

    def known(self) -> Sequence[ReportedVolume]:
        with self._lock:
            return [self._known[key] for key in sorted(self._known)]

    def ensure(self, volumes: Sequence[AssignedVolume]) -> None:
        with self._lock:
            for volume in volumes:
                of_nfs = volume.driver == "nfs"
                self._known.setdefault(
                    volume.volume_id,
                    ReportedVolume(
                        volume_id=volume.volume_id,
                        used_mib=None if of_nfs else 0,
                        size_enforced=not of_nfs,
                    ),
                )

    def remove(self, volume_ids: Collection[str]) -> None:
        """Raises RuntimeUnavailable: a container has one of them."""
        used = self._in_use()
        for volume_id in volume_ids:
            if volume_id in used:
                raise RuntimeUnavailable(f"volume {volume_id} is in use")
            with self._lock:
                self._known.pop(volume_id, None)
