"""What the benchmarks share: the machine in words, and the small file that keeps a result."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch


def machine() -> str:
    """Processor, cores, system, interpreter."""
    from steptime.measure.host import this_host

    return f"{this_host().cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def every_candidate_costed() -> AbstractContextManager[object]:
    """Searches without bounds: they cost every candidate that fits."""
    import numpy as np

    return patch("steptime.search.ranking.least_step_s", lambda inputs, framework, table, shape: np.zeros(shape.shape))


def report(name: str, title: str, table: str, notes: str) -> None:
    """Print a result; with ``--write`` keep it as Markdown beside the benchmark."""
    import numpy

    text = (
        f"# {title}\n\n{table}\n\n{notes}\n"
        f"Machine: {machine()}, NumPy {numpy.__version__}. Date: {datetime.now(UTC):%Y-%m-%d}.\n"
        f"Command: `python benchmarks/bench_{name}.py --write`\n"
    )
    print(text)
    if "--write" in sys.argv[1:]:
        Path(__file__).with_name(f"{name}.md").write_text(text)
