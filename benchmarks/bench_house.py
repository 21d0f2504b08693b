"""How much of the house a reader walks through: modules and functions entered, frames down to a formula, lines by room.

python benchmarks/bench_house.py                  prints the table
python benchmarks/bench_house.py --write          also writes it to benchmarks/house.md
python benchmarks/bench_house.py --json           figures of this source alone, for comparing two checkouts
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import steptime
from machine import report

ROOT = Path(__file__).resolve().parents[1]
JOB = ("--gpus", "64", "--global-batch", "256")
FORMULA = "gemm_s"
ROW = (
    "model,seq_len,gpu,n_gpus,global_batch_sequences,tp,pp,dp,micro_batch,metric_step_time_s\n"
    "llama2-7b,4096,H100-SXM-80GB,8,64,1,1,8,1,2.3\n"
)
MODULE = """
import torch
def build(batch=2):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    return net, (torch.randn(batch, 64),)
"""
COMMANDS: Mapping[str, Sequence[str]] = {
    "estimate": ("estimate", "llama3-8b", "--cluster", "dgx-h100", *JOB),
    "plan": ("plan", "llama3-8b", "--cluster", "dgx-h100", *JOB),
    "profile": ("profile", "net.py:build", "--device", "h100-sxm"),
    "score": ("score", "row.csv"),
}
#: Figures of the source before its rooms were parted into a core and annexes (2026-11-24): modules and functions
#: entered, frames; modules and lines in all.
BEFORE: Mapping[str, tuple[int, int, int]] = {
    "estimate": (167, 1397, 23), "plan": (172, 1539, 22), "profile": (153, 992, 19), "score": (192, 1545, 27),
}  # fmt: skip
BEFORE_ALL = (513, 76_040)
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); import bench_house; bench_house.walk(sys.argv[2:])"


def walk(arguments: Sequence[str]) -> None:
    """Runs one command under a profiler and prints what it entered, as JSON."""
    from steptime.__main__ import run

    modules: set[str] = set()
    functions: set[tuple[str, int]] = set()
    depths: list[int] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or "/steptime/" not in code.co_filename or code.co_name == "<module>":
            return
        modules.add(code.co_filename)
        functions.add((code.co_filename, code.co_firstlineno))
        if code.co_name == FORMULA and not depths:
            depths.append(_ours(frame))

    sys.argv = ["steptime", *arguments]
    sys.setprofile(watch)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run()
    sys.setprofile(None)
    print(json.dumps({"modules": len(modules), "functions": len(functions), "frames": depths[0] if depths else None}))


def _ours(frame: FrameType | None) -> int:
    """Frames of our own on the stack, this one included."""
    count = 0
    while frame is not None:
        count += "/steptime/" in frame.f_code.co_filename
        frame = frame.f_back
    return count


def figures() -> dict[str, dict[str, int | None]]:
    """What each command enters in a fresh process."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(MODULE)
        Path(folder, "row.csv").write_text(ROW)
        for name, command in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(Path(__file__).parent), *command],
                cwd=folder, capture_output=True, text=True, check=True,
                env=os.environ | {"PYTHONPATH": str(Path(steptime.__file__).parents[1])},
            )  # fmt: skip
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def lines_by_room(source: Path) -> dict[str, tuple[int, int]]:
    """Modules and lines of each folder of the package."""
    rooms: dict[str, tuple[int, int]] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        room = parts[0] if len(parts) > 1 else "(floor 0)"
        modules, lines = rooms.get(room, (0, 0))
        rooms[room] = modules + 1, lines + path.read_text().count("\n")
    return rooms


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def main() -> None:
    source = Path(steptime.__file__).parent
    rooms, found = lines_by_room(source), figures()
    total = tuple(sum(column) for column in zip(*rooms.values(), strict=True))
    if "--json" in sys.argv:
        print(json.dumps({"total": total, "rooms": rooms, "entered": found}))
        return
    entered = []
    for name, each in found.items():
        modules, functions, frames = BEFORE[name]
        entered.append((name, each["modules"], modules, each["functions"], functions, each["frames"] or "-", frames))
    sizes = [(name, f"{n:,}", f"{lines:,}") for name, (n, lines) in [*rooms.items(), ("all", total)]]
    sizes.append(("all, before", *(f"{n:,}" for n in BEFORE_ALL)))
    text = "\n\n".join([
        table(entered, ("command", "modules entered", "before", "functions entered", "before",
                        f"frames down to `{FORMULA}`", "before")),
        table(sizes, ("room", "modules", "lines")),
    ])  # fmt: skip
    notes = (
        "Modules and functions of steptime that a command enters, in a fresh process; frames of steptime on the stack\n"
        f"when `{FORMULA}` is first called. Lines with comments and blank ones.\n"
    )
    report("house", "The house", text, notes)


if __name__ == "__main__":
    main()
