"""Parameters of models with several kinds of layers: ours and those of the `transformers` modules on the meta device.

PYTHONPATH=src:tests .venv/bin/python benchmarks/bench_layers.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from models.layered import counted
from steptime.formats.huggingface import read_huggingface
from steptime.model import parameter_terms

CHECKPOINTS = Path(__file__).parents[1] / "tests" / "data" / "layered_checkpoints.json"


def main() -> None:
    """Count all and print a table."""
    rows = json.loads(CHECKPOINTS.read_text(encoding="utf-8"))
    print(f"{'model':26} {'ours':>18} {'module':>18}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for name, row in rows.items():
            path.write_text(json.dumps(row["config"]), encoding="utf-8")
            ours, theirs = int(parameter_terms(read_huggingface(path)[0]).total), counted(row["config"])
            print(f"{name:26} {ours:>18,} {theirs:>18,} {'' if ours == theirs else 'DIFFERS'}")


if __name__ == "__main__":
    main()
