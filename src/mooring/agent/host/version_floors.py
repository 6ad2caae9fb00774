"""The versions of runc, containerd, Docker and NVIDIA's toolkit with which a node is refused (R1).

`version_floors.toml` has the versions, the flaws that they fix, and the date of the last review.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any

Version = tuple[int, int, int]

TOOLKIT = "nvidia-container-toolkit"
RUNC = "runc"
CONTAINERD = "containerd"
DOCKER = "docker"

# What the engine's `GET /version` calls its components.
_COMPONENTS = {"Engine": DOCKER, "containerd": CONTAINERD, "runc": RUNC}


@dataclass(frozen=True, slots=True)
class Floor:
    """The versions of one component with known flaws: from the first with them to the first without."""

    component: str
    vulnerable: tuple[tuple[Version, Version], ...]
    flaws: tuple[str, ...]
    remedy: str

    def passes(self, version: Version) -> bool:
        """Whether the version is in none of the vulnerable ranges."""
        return not any(first <= version < fixed for first, fixed in self.vulnerable)

    @property
    def wanted(self) -> str:
        """For messages: `1.2.8, 1.3.3 or later`."""
        return f"{', '.join(dotted(fixed) for _first, fixed in self.vulnerable)} or later"


@cache
def floors() -> Mapping[str, Floor]:
    """All floors by component."""
    return {
        name: Floor(
            component=name,
            vulnerable=tuple((_required(first), _required(fixed)) for first, fixed in entry["vulnerable"]),
            flaws=tuple(entry["flaws"]),
            remedy=entry["remedy"],
        )
        for name, entry in _document().items()
        if isinstance(entry, dict)
    }


def reviewed() -> date:
    """The day on which the floors were last compared with the published flaws."""
    day: date = _document()["reviewed"]
    return day


def engine_versions(info: Mapping[str, Any]) -> dict[str, str]:
    """Versions by component from what the engine says of itself; those that it does not state are absent."""
    stated = {
        _COMPONENTS[item["Name"]]: str(item.get("Version") or "")
        for item in info.get("Components") or ()
        if isinstance(item, dict) and item.get("Name") in _COMPONENTS
    }
    return {component: version for component, version in stated.items() if parse(version)}


def parse(text: str) -> Version | None:
    """The first three numbers of a version; what distributions append (`1.1.5+ds1`) is left out."""
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", text.strip())
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _required(text: str) -> Version:
    version = parse(text)
    if version is None:
        raise ValueError(f"{text!r} is not a version")
    return version


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(files("mooring.agent.host").joinpath("version_floors.toml").read_text())
