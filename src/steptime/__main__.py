"""``python -m steptime``: the command line."""

from __future__ import annotations

import sys


def run() -> None:
    """Run ``steptime`` and exit; Ctrl-C while it is being loaded ends it as Ctrl-C does later."""
    try:
        from steptime.cli.main import app, prepare_streams

        prepare_streams()
        app()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
