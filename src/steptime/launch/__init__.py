"""Launch files of training software: written from a run, and read into a run."""

from steptime.launch.job import Launch, launch_of, run_text
from steptime.launch.read import Imported, read_launch
from steptime.launch.table import SOFTWARE, Software, software_called
from steptime.launch.write import Exported, export_run

__all__ = [
    "SOFTWARE",
    "Exported",
    "Imported",
    "Launch",
    "Software",
    "export_run",
    "launch_of",
    "read_launch",
    "run_text",
    "software_called",
]
