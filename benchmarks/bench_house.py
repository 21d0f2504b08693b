"""How much of the house a reader walks through: functions entered, frames to a formula, records, circles, lines.

python benchmarks/bench_house.py                  prints the table
python benchmarks/bench_house.py --write          also writes it to benchmarks/house.md
python benchmarks/bench_house.py --json           figures of this source alone, for comparing two checkouts
python benchmarks/bench_house.py --before FILE    next to those figures of another checkout
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import steptime
from machine import report

SOURCE = Path(steptime.__file__).parent
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
    "rewrite": ("rewrite", "net.py:build", "--device", "h100-sxm"),
}
#: Rooms of what an estimate and a plan need.
CORE = (
    *("cli", "report", "api", "formats", "goodput", "search", "estimate", "plan", "schedule", "hardware", "model"),
    *("cost", "store", "(floor 0)"),
)
#: Options whose names mean nothing else, so that files that have the name are files that an option touches.
OPTIONS = ("recompute_every", "expert_capacity", "attention_dtype", "document_length", "gradient_dtype")
#: Operators of PyTorch: files that name one, as a text or an attribute, outside docstrings.
OPERATORS = ("native_layer_norm", "addmm", "convolution_backward")
#: Code that belongs to the function or file in which it stands; Python 3.12 gives comprehensions no frame of their own.
PARTS = frozenset(("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); import bench_house; bench_house.walk(sys.argv[2:])"


def walk(arguments: Sequence[str]) -> None:
    """Runs one command under a profiler and prints what it entered, as JSON."""
    from steptime.__main__ import run

    modules: set[str] = set()
    functions: set[tuple[str, int]] = set()
    depths: list[int] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not _ours(frame) or code.co_name in PARTS or not code.co_flags & CO_OPTIMIZED:
            return  # the body of a class is no function
        modules.add(code.co_filename)
        functions.add((code.co_filename, code.co_firstlineno))
        if code.co_name == FORMULA and not depths:
            depths.append(_frames(frame))

    sys.argv = ["steptime", *arguments]
    sys.setprofile(watch)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run()
    sys.setprofile(None)
    print(json.dumps({"modules": len(modules), "functions": len(functions), "frames": depths[0] if depths else None}))


def _ours(frame: FrameType) -> bool:
    """Whether it runs a file of the package; not what dataclasses and other generated code make in its name."""
    return frame.f_code.co_filename.startswith(f"{SOURCE}{os.sep}")


def _frames(frame: FrameType | None) -> int:
    """Frames of our own on the stack, this one included."""
    count = 0
    while frame is not None:
        count += _ours(frame)
        frame = frame.f_back
    return count


def entered() -> dict[str, dict[str, int | None]]:
    """What each command enters in a fresh process."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(MODULE)
        Path(folder, "row.csv").write_text(ROW)
        for name, command in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(Path(__file__).parent), *command],
                cwd=folder, capture_output=True, text=True, check=True,
                env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
            )  # fmt: skip
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def lines_by_room(files: Mapping[Path, str]) -> dict[str, tuple[int, int]]:
    """Modules and lines of each folder of the package."""
    rooms: dict[str, tuple[int, int]] = {}
    for path, text in files.items():
        parts = path.relative_to(SOURCE).parts
        room = parts[0] if len(parts) > 1 else "(floor 0)"
        modules, lines = rooms.get(room, (0, 0))
        rooms[room] = modules + 1, lines + text.count("\n")
    return rooms


def records(trees: Mapping[str, ast.Module]) -> int:
    """Dataclasses and named tuples."""
    return sum(
        any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        or any(ast.unparse(base) in ("NamedTuple", "TypedDict") for base in node.bases)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )


def imports(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Modules of the package that a module imports, inside functions too, but for types alone."""
    skipped = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield from [each for each in (name, node.module) if each in modules][:1]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def circles(trees: Mapping[str, ast.Module]) -> list[list[str]]:
    """Modules that reach each other by imports, the largest groups first (Tarjan)."""
    edges = {name: set(imports(tree, trees)) - {name} for name, tree in trees.items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in sorted(edges):
        if name not in number:
            visit(name)
    return sorted(found, key=len, reverse=True)


def names(tree: ast.Module, operator: str) -> bool:
    """Whether a module names an operator: in a text that is no docstring, or as an attribute."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == operator:
            return True
        text = node.value if isinstance(node, ast.Constant) and id(node) not in said else None
        if isinstance(text, str) and operator in re.findall(r"\w+", text):
            return True
    return False


def figures() -> dict[str, Any]:
    """All figures of the source that is imported."""
    files = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    trees = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(text)
        for path, text in files.items()
    }
    touched = [sum(bool(re.search(rf"\b{name}\b", text)) for text in files.values()) for name in OPTIONS]
    found = circles(trees)
    return {
        "lines of src": sum(text.count("\n") for text in files.values()), "modules": len(files),
        "records": records(trees), "circles": len(found),
        "modules in the largest circle": len(found[0]) if found else 0,
        "files that have an option's name, mean": round(sum(touched) / len(touched), 1),
        **{f"files that name `{name}`": sum(names(tree, name) for tree in trees.values()) for name in OPERATORS},
        "entered": entered(), "rooms": lines_by_room(files),
    }  # fmt: skip


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def main() -> None:
    now = figures()
    if "--json" in sys.argv:
        print(json.dumps(now))
        return
    before = json.loads(Path(sys.argv[sys.argv.index("--before") + 1]).read_text()) if "--before" in sys.argv else None
    both = [each for each in (before, now) if each is not None]
    head = ("before", "now") if before else ("now",)
    for each in both:
        each["lines of the core"] = sum(each["rooms"].get(room, (0, 0))[1] for room in CORE)
    whole = [(name, *(f"{each[name]:,}" for each in both)) for name in now if name not in ("entered", "rooms")]
    walked = [
        (name, *(each["entered"][name][what] or "-" for what in ("functions", "modules", "frames") for each in both))
        for name in COMMANDS
    ]
    rooms = sorted({room for each in both for room in each["rooms"]})
    sizes = [(room, *(f"{each['rooms'].get(room, (0, 0))[1]:,}" for each in both)) for room in rooms]
    columns = ("functions entered", "modules entered", f"frames down to `{FORMULA}`")
    text = "\n\n".join([
        table(whole, ("", *head)),
        table(walked, ("command", *(f"{column}, {when}" for column in columns for when in head))),
        table(sizes, ("lines of room", *head)),
    ])  # fmt: skip
    notes = (
        "Modules and functions of steptime that a command enters, in a fresh process; frames of steptime on the stack\n"
        f"when `{FORMULA}` is first called. Lines with comments and blank ones. Circles: groups of modules that reach\n"
        f"each other by imports, inside functions too. Options: {', '.join(OPTIONS)}.\n"
    )
    report("house", "The house", text, notes)


if __name__ == "__main__":
    main()
