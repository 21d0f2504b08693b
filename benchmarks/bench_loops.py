"""The inner loop of a search, a step composed for each candidate, in blocks of NumPy and compiled into one loop.

The arithmetic is recorded from the formula itself (`steptime.estimate.step.compose`) while it costs a block of a real
search: operations on arrays in their order, without what the time of the step does not need. They are then run as they
are, in buffers that stay in the cache, and as one loop over the candidates in C and by Numba.

    python benchmarks/bench_loops.py            prints the tables
    python benchmarks/bench_loops.py --write    also writes them to benchmarks/loops.md
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import ctypes  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import cached_property, partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, TypeAlias  # noqa: E402
from unittest import mock  # noqa: E402

import numba  # noqa: E402
import numpy as np  # noqa: E402

from machine import every_candidate_costed, report  # noqa: E402
from steptime.api import plan  # noqa: E402
from steptime.estimate.step import compose  # noqa: E402
from steptime.records import changed, leaves, rows  # noqa: E402
from steptime.search import ranking  # noqa: E402

JOBS = (("llama3.1-70b", 512, 1024), ("deepseek-v3", 256, 512))
BLOCKS = (1 << 9, 1 << 11, 1 << 13, 1 << 14, 1 << 16)
CANDIDATES, RUNS = 1 << 17, 7
#: Operation of NumPy -> the same on numbers, in Python and in C.
FORMS = {
    "add": ("{0} + {1}",) * 2, "subtract": ("{0} - {1}",) * 2, "multiply": ("{0} * {1}",) * 2,
    "divide": ("{0} / {1}",) * 2, "maximum": ("max({0}, {1})", "({0} > {1} ? {0} : {1})"),
    "minimum": ("min({0}, {1})", "({0} < {1} ? {0} : {1})"), "greater": ("{0} > {1}",) * 2,
    "greater_equal": ("{0} >= {1}",) * 2, "less": ("{0} < {1}",) * 2, "less_equal": ("{0} <= {1}",) * 2,
    "bitwise_and": ("{0} and {1}", "{0} && {1}"), "where": ("({1} if {0} else {2})", "({0} ? {1} : {2})"),
}  # fmt: skip


Loop: TypeAlias = Callable[[Sequence[np.ndarray]], np.ndarray]


class Recorded(np.ndarray):
    """An array that notes what is done with it."""

    operations: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []  # noqa: RUF012 - of the one recording

    def _note(self, operation: Callable[..., Any], given: Sequence[Any]) -> Any:
        made = operation(*(each.view(np.ndarray) if isinstance(each, Recorded) else each for each in given))
        if not isinstance(made, np.ndarray):
            return made  # whether any or all of a column has something: the same for each block of a job
        out = made.view(Recorded)
        self.operations.append((operation, tuple(given), out))
        return out

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce":
            return ufunc.reduce(self.view(np.ndarray))
        assert method == "__call__" and not options, (ufunc, method, options)
        return self._note(ufunc, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._note(func, args)


@dataclass(frozen=True)
class Tape:
    """Operations that make one column of others."""

    inputs: list[np.ndarray]
    operations: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    """Each makes the next value after the inputs; arguments are numbers or ("at", place)."""

    @cached_property
    def over(self) -> list[list[int]]:
        """Places that no operation after each reads."""
        last = {
            each[1]: n
            for n, (_, arguments) in enumerate(self.operations)
            for each in arguments
            if isinstance(each, tuple)
        }
        return [[at for at, n in last.items() if n == here] for here in range(len(self.operations))]


def taped(inputs: Any, passes: Any, framework: Any) -> Tape:
    """What makes the time of the step of what it is composed of."""
    Recorded.operations.clear()
    given = {"inputs": inputs, "passes": passes}
    columns: list[Any] = []

    def recorded(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            columns.append(leaf.view(Recorded))
            return columns[-1]
        return leaf

    made = changed(given, recorded)
    total = compose(made["inputs"], made["passes"], framework).total_s
    needed, kept = {id(total)}, []
    for operation, arguments, out in reversed(Recorded.operations):
        if id(out) in needed:
            kept.append((operation, arguments, out))
            needed |= {id(each) for each in arguments if isinstance(each, Recorded)}
    used = [column for column in columns if id(column) in needed]
    place = {id(each): at for at, each in enumerate([*used, *(out for _, _, out in reversed(kept))])}
    return Tape(
        inputs=[column.view(np.ndarray) for column in used],
        operations=[
            (operation, tuple(("at", place[id(each)]) if isinstance(each, Recorded) else each for each in arguments))
            for operation, arguments, _ in reversed(kept)
        ],
    )  # fmt: skip


def replayed(tape: Tape, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The operations one after another; what none reads any more is dropped."""
    values: list[Any] = list(inputs)
    for (operation, arguments), over in zip(tape.operations, tape.over, strict=True):
        values.append(operation(*(values[each[1]] if isinstance(each, tuple) else each for each in arguments)))
        for at in over:
            values[at] = None
    out: np.ndarray = values[-1]
    return out


def written(tape: Tape, language: int, name: Callable[[int], str]) -> Iterator[str]:
    """The operations on numbers, a line each, in Python (0) or C (1)."""
    count = len(tape.inputs)
    for at, (operation, arguments) in enumerate(tape.operations):
        given = [name(each[1]) if isinstance(each, tuple) else repr(float(each)) for each in arguments]
        yield f"v{count + at} = {FORMS[operation.__name__][language].format(*given)}"


def by_numba(tape: Tape) -> Loop:
    """One loop, compiled by Numba."""
    count = len(tape.inputs)
    body = "\n        ".join(written(tape, 0, lambda at: f"a{at}[i]" if at < count else f"v{at}"))
    names = ", ".join(f"a{at}" for at in range(count))
    last = count + len(tape.operations) - 1
    text = f"def loop({names}, out):\n    for i in range(len(out)):\n        {body}\n        out[i] = v{last}\n"
    space: dict[str, Any] = {}
    exec(text, space)
    loop = numba.njit(space["loop"], error_model="numpy")

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        out = np.empty(len(inputs[0]))
        loop(*inputs, out)
        return out

    return run


def by_compiler(tape: Tape, folder: str) -> Loop:
    """One loop, compiled by the C compiler."""
    count = len(tape.inputs)
    lines = "\n".join(
        f"double {line};" for line in written(tape, 1, lambda at: f"a[{at}][i]" if at < count else f"v{at}")
    )
    last = count + len(tape.operations) - 1
    source, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
    source.write_text(
        "#include <math.h>\nvoid loop(const double *restrict const *restrict a, double *restrict out, long n) {\n"
        f"for (long i = 0; i < n; i++) {{\n{lines}\nout[i] = v{last};\n}}\n}}\n"
    )
    options = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
    subprocess.run(["gcc", *options, "-o", library, source, "-lm"], check=True)
    loop = ctypes.CDLL(str(library)).loop

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        out = np.empty(len(inputs[0]))
        places = (ctypes.c_void_p * count)(*(each.ctypes.data for each in inputs))
        loop(places, ctypes.c_void_p(out.ctypes.data), ctypes.c_long(len(out)))
        return out

    return run


def cpu_ns(work: Callable[[], object]) -> float:
    """CPU nanoseconds a candidate, the least of some runs."""
    times = []
    for _ in range(RUNS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e9 * min(times) / CANDIDATES


def blocks_of(model: str, gpus: int, batch: int) -> tuple[Any, Any, Any]:
    """Arguments of the formula for the largest block of a search that costs every candidate."""
    found: list[Any] = []

    def noted(*given: Any) -> Any:
        found.append(given)
        return compose(*given)

    with mock.patch.object(ranking, "compose", noted), every_candidate_costed():
        plan(model, "dgx-h100", gpus=gpus, global_batch=batch)
    out: tuple[Any, Any, Any] = max(found, key=lambda given: np.size(given[0].micro_batches))
    return out


def table() -> Iterator[str]:
    """A row a way to run the loop."""
    yield "| model | loop | ns a candidate | compiled in, s | candidates that pay for it |"
    yield "|---|---|---:|---:|---:|"
    for model, gpus, batch in JOBS:
        inputs, passes, framework = blocks_of(model, gpus, batch)
        count = max(np.size(leaf) for leaf in leaves({"inputs": inputs}))
        given = rows({"inputs": inputs, "passes": passes}, np.arange(CANDIDATES) % count)
        tape = taped(given["inputs"], given["passes"], framework)
        least = np.inf
        for block in BLOCKS:
            formula_ns, again_ns = in_blocks(tape, given, framework, block)
            least = min(least, formula_ns)
            yield f"| {model} | the formula on blocks of {block:,} | {formula_ns:.0f} | | |"
            yield f"| {model} | its {len(tape.operations)} operations on blocks of {block:,} | {again_ns:.0f} | | |"
        whole = np.asarray(compose(given["inputs"], given["passes"], framework).total_s)
        with tempfile.TemporaryDirectory() as folder:
            for name, make in (("Numba", by_numba), ("the C compiler", partial(by_compiler, folder=folder))):
                one_ns, compiled_s = compiled(tape, make, whole)
                pays = compiled_s / (least - one_ns) * 1e9
                yield f"| {model} | one loop by {name} | {one_ns:.0f} | {compiled_s:.1f} | {pays / 1e6:.1f} million |"


def in_blocks(tape: Tape, given: Any, framework: Any, block: int) -> tuple[float, float]:
    """Nanoseconds a candidate of the formula and of its operations."""
    parts = [rows(given, np.arange(start, start + block)) for start in range(0, CANDIDATES, block)]
    cut = [[column[start : start + block] for column in tape.inputs] for start in range(0, CANDIDATES, block)]
    formula_ns = cpu_ns(lambda: [compose(p["inputs"], p["passes"], framework).total_s for p in parts])
    return formula_ns, cpu_ns(lambda: [replayed(tape, part) for part in cut])


def compiled(tape: Tape, make: Callable[[Tape], Loop], whole: np.ndarray) -> tuple[float, float]:
    """Nanoseconds a candidate of a compiled loop, and the seconds of compiling it; ``whole``: what it has to find."""
    columns = [column.astype(np.float64) for column in tape.inputs]
    started = time.perf_counter()
    run = make(tape)
    found = run(columns)
    compiled_s = time.perf_counter() - started
    assert np.allclose(found, whole, rtol=1e-12)
    return cpu_ns(lambda: run(columns)), compiled_s


NOTES = f"""\
CPU nanoseconds, one thread, the least of {RUNS} runs over {CANDIDATES:,} candidates; wall seconds of compiling. Each
loop finds the step times of the formula (relative difference at most 1e-12). The last column: candidates after which
the loop has saved what compiling it took, against the formula on its best blocks. A search in one of the first rows of
`warm.md` costs about 10,000 of a million candidates, as bounds rule the others out, and its blocks have up to
{ranking.BLOCK:,} candidates: it stays with NumPy.

"""


if __name__ == "__main__":
    report("loops", "The inner loop of a search", "\n".join(table()), NOTES)
