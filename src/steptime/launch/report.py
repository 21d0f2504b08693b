"""Report of an imported launch file."""

from __future__ import annotations

from steptime.errors import first_few
from steptime.launch.read import Imported
from steptime.launch.table import software_called
from steptime.report import text as t


def print_imported(found: Imported, where: str) -> None:
    """Print the place of the run, the kept options of the launch file, and the unknown ones."""
    out = t.console()
    software = software_called(found.software)
    t.heading(out, f"{where}: a run of {software.title}")
    kept = [name for name in found.kept if name not in found.unknown]
    rows = [
        ("kept, a run has no key for", kept),
        (f"unknown to {software.version}, kept", list(found.unknown)),
        ("note", list(found.notes)),
    ]
    for what, names in rows:
        if names:
            t.indented(out, f"{what}: {first_few(names, 12)}")
    t.indented(out, f"next: steptime estimate {where}")
