"""Models with several kinds of layers against `transformers`: parameters, and the products of one step.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/bench_layers.py [--write]

``--write`` also writes benchmarks/layers.md. 40 s of CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from models.layered import NARROW, counted
from models.layered_flops import PHASES, differences, module_flops, rows_flops, spec_of
from steptime.formats.huggingface import read_huggingface
from steptime.model import parameter_terms

ROOT = Path(__file__).parents[1]


def parameters(folder: Path) -> list[str]:
    """Parameters of every checkpoint both ways."""
    lines = ["| model | layers | formula | module |", "|---|--:|--:|--:|"]
    rows = json.loads((ROOT / "tests" / "data" / "layered_checkpoints.json").read_text(encoding="utf-8"))
    for name, row in rows.items():
        path = folder / "config.json"
        path.write_text(json.dumps(row["config"]), encoding="utf-8")
        spec = read_huggingface(path)[0]
        lines.append(f"| {name} | {spec.layers} | {int(parameter_terms(spec).total):,} | {counted(row['config']):,} |")
    return lines


def products(folder: Path) -> list[str]:
    """Matrix operations of one step of every family both ways, and what makes the difference."""
    lines = ["| family | phase | rows | module | what is left | named differences |", "|---|---|--:|--:|--:|---|"]
    for family in sorted(NARROW):
        spec = spec_of(family, folder)
        ours, theirs, more = rows_flops(spec), module_flops(family), differences(spec)
        for place, phase in enumerate(PHASES):
            named = {name: amounts[place] for name, amounts in more.items() if amounts[place]}
            left = theirs[phase] - ours[phase] - sum(named.values())
            words = "; ".join(f"{name} {amount / ours[phase]:+.1%}" for name, amount in named.items())
            lines.append(f"| {family} | {phase} | {ours[phase]:,.0f} | {theirs[phase]:,.0f} | {left:,.0f} | {words} |")
    return lines


def main() -> None:
    """Count all and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page")
    with tempfile.TemporaryDirectory() as name:
        counts, steps = parameters(Path(name)), products(Path(name))
    text = "\n".join([
        "# Models with several kinds of layers against transformers", "",
        "Command: `python benchmarks/bench_layers.py --write`", "",
        "## Parameters", "",
        "Of published configurations (`tests/data/layered_checkpoints.json`) and of the module on the meta device.", "",
        *counts, "",
        "## Matrix operations of a step", "",
        "Of narrow configurations (`tests/models/layered.py`), 2 sequences of 128 tokens. The modules run without the",
        "kernels that training has; what they compute in another way has a name (`tests/models/layered_flops.py`), in",
        "percent of all rows. What is left is 0: every product of the module is a row or has a name.", "",
        *steps, "",
    ])  # fmt: skip
    print(text)
    if parser.parse_args().write:
        (ROOT / "benchmarks" / "layers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
