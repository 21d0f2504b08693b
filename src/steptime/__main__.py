"""``python -m steptime``: the command line."""

from __future__ import annotations

from steptime.surface.cli.main import run

if __name__ == "__main__":
    run()
