"""The minimum versions of runc, containerd, Docker and NVIDIA's toolkit (R1).

`version_floors.toml` has the versions, the vulnerabilities that they fix, and the date of the last review.
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
    """The vulnerable ranges of one component: each from the first vulnerable to the first fixed version."""

    component: str
    vulnerable: tuple[tuple[Version, Version], ...]
    flaws: tuple[str, ...]
    remedy: str

    def passes(self, version: Version) -> bool:
        """Return whether the version is in none of the vulnerable ranges."""
        return not any(first <= version < fixed for first, fixed in self.vulnerable)

    @property
    def wanted(self) -> str:
        """The fixed versions for messages: `1.2.8, 1.3.3 or later`."""
        return f"{', '.join(dotted(fixed) for _first, fixed in self.vulnerable)} or later"


@cache
def floors() -> Mapping[str, Floor]:
    """Return all floors by component."""
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
    """Return the date of the last comparison with the published vulnerabilities."""
    day: date = _document()["reviewed"]
    return day


def engine_versions(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions that the engine states, by component, without those that are not numbers."""
    stated = {
        _COMPONENTS[item["Name"]]: str(item.get("Version") or "")
        for item in info.get("Components") or ()
        if isinstance(item, dict) and item.get("Name") in _COMPONENTS
    }
    return {component: version for component, version in stated.items() if parse(version)}


def parse(text: str) -> Version | None:
    """Return the first three numbers of a version, without a distribution's suffix (`1.1.5+ds1`)."""
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
