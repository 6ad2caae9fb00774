"""Finds the volume of the toolbox for new containers, among those that `mooring toolbox` has made."""

import logging
from collections.abc import Mapping
from typing import Final

from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.toolbox_mount import COMPLETE, FILES, LABEL, Toolbox

BUILT_LABEL: Final = "mooring.toolbox.built"  # seconds since 1970
PREFIX: Final = "mooring-toolbox-"
# Volumes can be neither renamed nor labelled later, so another, empty volume says that one is complete.
COMPLETE_SUFFIX: Final = "-complete"

log = logging.getLogger(__name__)


def current_toolbox(engine: Engine) -> Toolbox | None:
    """Return the toolbox for new containers: the newest complete one; None without any.

    An engine that cannot list its volumes still starts containers, without a toolbox.

    Raises:
        RuntimeUnavailable: the engine does not answer.
    """
    try:
        volumes = {str(volume["Name"]): volume for volume in engine.volumes(LABEL)}
    except EngineRefused as refusal:
        log.warning("instances start without a toolbox: %s", refusal)
        return None
    complete = [
        (_built_at(_labels(volume)), Toolbox(files, str(volumes[files]["Mountpoint"])))
        for name, volume in volumes.items()
        if _labels(volume).get(LABEL) == COMPLETE
        and (files := name.removesuffix(COMPLETE_SUFFIX)) in volumes
        and _labels(volumes[files]).get(LABEL) == FILES
    ]
    return max(complete)[1] if complete else None


def has_files(engine: Engine, volume: str) -> bool:
    """Return whether the volume of a toolbox exists, and `mooring toolbox` made it."""
    try:
        return _labels(engine.volume(volume)).get(LABEL) == FILES
    except EngineRefused as refusal:
        if refusal.status == 404:
            return False
        raise


def _labels(volume: Document) -> Mapping[str, str]:
    return volume.get("Labels") or {}


def _built_at(labels: Mapping[str, str]) -> int:
    text = labels.get(BUILT_LABEL, "")
    return int(text) if text.isdecimal() else 0
