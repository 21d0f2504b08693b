"""Pictures in docs/figures are what the commands on their page draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/figures"


@pytest.mark.slow
def test_pictures_of_the_pages_are_as_their_commands_draw_them() -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
