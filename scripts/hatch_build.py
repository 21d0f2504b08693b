"""Hook of the build: a wheel, and an editable installation, has the catalogue compiled (scripts/catalogue)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledCatalogue(BuildHookInterface):
    """Runs the script; without what checks fabrics, frameworks and models only the files are compiled."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before files are collected."""
        subprocess.run([sys.executable, str(Path(self.root) / "scripts" / "catalogue")], check=True)
        build_data["artifacts"].append("src/steptime/store/compiled.json")
