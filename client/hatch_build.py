"""Selects the files of the wheel, which are outside of this folder.

`force-include` in pyproject.toml would also copy them into editable installs, which would hide later changes.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SourceHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["../src/mooring_client"] = "mooring_client"
