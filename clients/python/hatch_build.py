"""Adds the protocol's stubs, which lie outside of this folder in the repository, to sdist and wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build; `version` is "editable" for an installation that refers to this folder."""
        stubs = Path(self.root, "../../protos/draftwood").resolve()
        if version != "editable" and stubs.is_dir():
            build_data["force_include"][str(stubs)] = "draftwood"
