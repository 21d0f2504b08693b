"""``python -m steptime``: the command line."""

from __future__ import annotations

import gc
import sys
from typing import Final

ALLOCATIONS: Final = 50_000
"""Objects after which the collector looks for cycles: a command that ends soon makes few, and need not free them."""


def run() -> None:
    """Run ``steptime`` and exit; Ctrl-C while it is being loaded ends it as Ctrl-C does later."""
    gc.set_threshold(ALLOCATIONS, 20, 20)
    try:
        from steptime.cli.main import app, prepare_streams

        prepare_streams()
        app()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
