"""``python -m steptime``: the command line."""

from __future__ import annotations

import gc
import sys
from typing import Final

ALLOCATIONS: Final = 200_000
"""Objects after which the collector looks for cycles: more than a plan makes, which ends before any must be freed."""
COUNTED: Final = frozenset({"duckdb", "highspy", "matplotlib", "onnx", "scipy", "sklearn", "torch"})
"""Libraries that may report unfreed objects at exit, or whose work is long compared with the exit."""


def run() -> None:
    """Run ``steptime`` and exit; Ctrl-C while it is being loaded ends it as Ctrl-C does later.

    Objects alive at the end are frozen, so that the interpreter does not look for cycles in them at exit, unless a
    library of :data:`COUNTED` was loaded.
    """
    gc.set_threshold(ALLOCATIONS, 20, 20)
    try:
        from steptime.cli.main import main, prepare_streams

        prepare_streams()
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    finally:
        if COUNTED.isdisjoint(sys.modules):
            gc.freeze()


if __name__ == "__main__":
    run()
