"""Graphs measured on this machine: thread CPU time of a step and peak of the allocator, in a journal that resumes.

The machine may be shared, so that wall time says little: the clock is the CPU time of the calling thread, which runs
the backward pass too, and the time of a graph is the first quartile of its steps. Families take turns. Some graphs are
measured a second time at the end, so that the journal has the noise of the measurements.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import InputFileError, UserError, shorten
from steptime.store.journal import Journal, read_journal
from steptime_lab.learned.sketch import Sketch, sketch, sketch_from

GRAPHS: Final = 2000
"""Graphs of whole networks in a full data set."""
SINGLES: Final = 600
"""Graphs of one operator in a full data set."""
RETESTED: Final = 9
"""One graph in `RETESTED` is measured a second time."""
BUDGET_S, LEAST, MOST = 0.25, 6, 24
"""CPU time budget for the steps of a graph, and the fewest and the most steps."""
QUARTILE: Final = 0.25
LARGEST: Final = 1e15
"""Largest number that a journal may hold."""
TWICE: Final = "#2"
"""Suffix of the key of a second measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One measured graph."""

    key: str
    family: str
    seconds: float
    """CPU time of one thread, first quartile of the steps."""
    again_s: float | None
    """CPU time of the second measurement; None where there was none."""
    allocated_bytes: int
    """Peak of the allocator, including memory in use before the step."""
    sketch: Sketch


def keys(graphs: int, singles: int, families: tuple[str, ...], single: str) -> Iterator[str]:
    """Keys of all cases in the order of measurement: families in turn, then second measurements."""
    from steptime_lab.learned.graphs import FAMILIES

    chosen = [name for name in FAMILIES if name in families]
    each = -(-graphs // len(chosen)) if chosen else 0
    rounds = max(each, singles)
    every = [*((name, each) for name in chosen), *([(single, singles)] if single in families else [])]
    first = [f"{name}:{n}" for n in range(rounds) for name, count in every if n < count]
    yield from first
    yield from (f"{key}{TWICE}" for key in first if not int(key.partition(":")[2]) % RETESTED)


def measure(
    path: Path,
    *,
    graphs: int = GRAPHS,
    singles: int = SINGLES,
    families: tuple[str, ...] | None = None,
    resume: bool = True,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Measure graphs into a journal; returns the number of records that it then has.

    Args:
        path: the journal.
        graphs: number of graphs of whole networks, over all families.
        singles: number of graphs of one operator.
        families: names of :data:`steptime_lab.learned.graphs.ALL`; None: all.
        resume: continue the journal; else start an empty one.
        told: called with the number of graphs done and the number of all.

    Raises:
        UserError: a family is unknown, or the journal belongs to another machine or another version of PyTorch.
    """
    import torch

    from steptime_lab.learned.graphs import ALL, SINGLE

    for name in families or ():
        if name not in ALL:
            raise UserError(f"no family of graphs is called {name!r}", hint=f"one of {', '.join(ALL)}")
    wanted = list(keys(graphs, singles, families or tuple(ALL), SINGLE))
    torch.set_num_threads(1)
    with Journal(path, header(), resume=resume) as journal:
        known = journal.keys
        for number, key in enumerate(wanted):
            if key not in known:
                journal.append(measured(key))
            told(number + 1, len(wanted))
        return len(journal.records)


def header() -> dict[str, Any]:
    """Header of a journal: processor, version of PyTorch and threads of the measurements."""
    import torch

    from steptime.measure.machine.runner import this_host

    host = this_host(torch, 1, "cpu")
    return {"of": "graphs", "processor": host.processor, "cores": host.cores, "torch": host.torch, "threads": 1}


def measured(key: str) -> dict[str, Any]:
    """The record of a case: its time; of a first measurement also its peak and its sketch."""
    from steptime.captured.record import capture
    from steptime.captured.record.training import LOSSES, OPTIMIZERS
    from steptime_lab.learned.graphs import case

    family, _, rest = key.partition(":")
    made = case(family, int(rest.removesuffix(TWICE)))
    trained = list(made.module.parameters())
    optimizer = OPTIMIZERS[made.optimizer](trained) if trained else None

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        output = made.module(*made.inputs)  # stays alive during the backward pass, as in most training loops
        LOSSES[made.loss](output).backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()

    times = samples_s(step)
    record: dict[str, Any] = {
        "key": key,
        "family": family,
        "seconds": float(np.quantile(times, QUARTILE)),
        "steps": len(times),
    }
    if key.endswith(TWICE):
        return record
    for given in (*trained, *made.inputs):
        given.grad = None
    record["static_bytes"] = stored_bytes([*made.module.buffers(), *trained, *made.inputs, *states_of(optimizer)])
    record["grown_bytes"] = grown_bytes(step)
    program = capture(
        made.module,
        made.inputs,
        loss=made.loss,
        optimizer=made.optimizer if trained else None,
        target="cpu",
        name=made.key,
        fold=False,
    )
    return {**record, "sketch": sketch(program).to_json()}


def stored_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the storages of tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def states_of(optimizer: Any) -> list[Any]:
    """Tensors of the state of an optimiser."""
    kept = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in kept if hasattr(value, "untyped_storage")]


def samples_s(step: Callable[[], None]) -> list[float]:
    """CPU time of the calling thread for each of several steps, after two warm-up steps."""
    for _ in range(2):
        begin = time.thread_time()
        step()
    once_s = time.thread_time() - begin
    out = []
    for _ in range(max(LEAST, min(MOST, int(BUDGET_S / max(once_s, 1e-6))))):
        begin = time.thread_time()
        step()
        out.append(time.thread_time() - begin)
    return out


def grown_bytes(step: Callable[[], None]) -> int:
    """Peak of the memory that a step allocates, above the memory allocated before it."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    with _silent(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return int(max(itertools.accumulate(changes, initial=0)))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence standard error of native code: PyTorch's profiler prints when it starts and stops."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def read_graphs(path: Path) -> tuple[list[Graph], Mapping[str, Any]]:
    """The graphs of a journal, and its header.

    Raises:
        InputFileError: there is no journal, it is one of something else, or a record is damaged.
        UserError: it holds no graph.
    """
    stored = read_journal(path)
    if stored.header.get("of") != "graphs":
        raise InputFileError(
            str(path), "is no journal of graphs", hint="steptime predict measure --out FILE writes one"
        )
    again, found = dict[str, float](), list[Graph]()
    for record in stored.records:
        key = record["key"]
        try:
            if key.endswith(TWICE):
                again[key.removesuffix(TWICE)] = positive(record["seconds"])
            else:
                found.append(_graph(record))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            problem = f"the record {shorten(key)} is damaged: {shorten(str(error) or type(error).__name__)}"
            raise InputFileError(str(path), problem, hint="delete its line, or measure again with --fresh") from None
    if not found:
        raise UserError(
            f"{path} holds no measured graph", hint="steptime predict measure --out FILE.jsonl measures some"
        )
    whole = [replace(graph, again_s=again.get(graph.key)) for graph in found]
    return whole, {name: value for name, value in stored.header.items() if name not in ("journal", "of")}


def _graph(record: Mapping[str, Any]) -> Graph:
    drawn = sketch_from(record["sketch"])
    static = record.get("static_bytes", drawn.static_bytes)
    return Graph(
        key=record["key"],
        family=str(record["family"]),
        seconds=positive(record["seconds"]),
        again_s=None,
        allocated_bytes=int(positive(static + record["grown_bytes"])),
        sketch=drawn,
    )


def positive(value: Any) -> float:
    """A number above 0 and below :data:`LARGEST`.

    Raises:
        ValueError, TypeError, OverflowError: `value` is something else.
    """
    number = float(value)
    if isinstance(value, (str, bool)) or not 0 < number < LARGEST:
        raise ValueError(f"{value!r} is no positive number")
    return number
