"""The history of measurements: one file for each processor and kernel, with the start and end of each run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from steptime.errors import UserError
from steptime.measure.host import Host
from steptime.store.journal import Record, content_key
from steptime_lab.hierarchy.tune.kernel import kernel_key
from steptime_lab.hierarchy.tune.model import Seen
from steptime_lab.hierarchy.tune.prior import predicted
from steptime_lab.hierarchy.tune.space import Core, Schedule, check_shape, space

Shape = tuple[int, int, int]
Row = tuple[str, Shape, Schedule, float]
"""Key of the run, product, schedule, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of a search; an interrupted search is resumed by an equal request."""

    shape: Shape
    trials: int = 16
    strategy: str = "model"
    seed: int = 0

    @property
    def options(self) -> str:
        """Options of the command other than the shape."""
        return f"--trials {self.trials} --strategy {self.strategy} --seed {self.seed}"

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Measurements known before a search."""

    seen: Sequence[Seen] = ()
    """Measurements of other products."""
    known: Mapping[Schedule, float] = field(default_factory=dict)
    """Seconds of schedules of this product, from earlier runs."""
    own: Mapping[Schedule, float] = field(default_factory=dict)
    """Seconds from the interrupted run that is resumed; they count as trials."""
    run: str = ""
    """Key of the resumed run; empty for a new one."""
    notes: tuple[str, ...] = ()

    @property
    def times(self) -> dict[Schedule, float]:
        """All measured seconds of this product."""
        return {**self.known, **self.own}


def header_of(name: str, core: Core, host: Host) -> dict[str, Any]:
    """Header of a history: the processor, caches and kernel that all its measurements share.

    Args:
        name: name of the processor whose caches are used, as the user gave it.
        core: the core with these caches.
        host: the processor that measures.
    """
    caches = [[level.size_bytes, level.ways, level.line_bytes] for level in core.processor.levels]
    vectors = [core.processor.vector_registers, core.processor.vector_bytes]
    own = {"cpu": host.cpu, "host": host.key, "kernel": kernel_key()}
    return {"of": "products", "processor": name, "caches": caches, "vectors": vectors, **own}


def file_of(folder: Path, header: Record, host: Host, fresh: bool) -> tuple[Path, Path | None]:
    """The history to use, and the earlier one that a fresh history replaces; the earlier file stays unchanged.

    The name has a key of the header, so that another processor or kernel has another file.

    Args:
        folder: folder of the histories; it exists.
        header: header from :func:`header_of`.
        host: the processor that measures.
        fresh: whether to start an empty history.
    """
    stem = f"history-{header['processor']}-{host.label}-{content_key(header)[:12]}"
    form = re.compile(re.escape(stem) + r"(?:\.([1-9][0-9]{0,8}))?\.jsonl")
    last = max((int(found[1] or 1) for path in folder.iterdir() if (found := form.fullmatch(path.name))), default=0)

    def named(number: int) -> Path:
        return folder / (f"{stem}.jsonl" if number == 1 else f"{stem}.{number}.jsonl")

    return named(last + 1 if fresh else max(last, 1)), named(last) if fresh and last else None


def past_of(records: Sequence[Record], request: Request, core: Core) -> Past:
    """Measurements of a product and of other products in a history.

    A run that began and did not end was interrupted: the latest one with an equal request is resumed. If the last run
    of the product was interrupted and had another request, a note says how to resume it. Other records that are no
    measurement of a schedule of the space are skipped and counted in a note.
    """
    begun = {record["key"]: found for record in records if (found := _request(record)) is not None}
    ended = [record["ended"] for record in records if "ended" in record]
    rows, strange = _rows([record for record in records if "run" not in record and "ended" not in record])
    run = next((key for key, each in reversed(begun.items()) if each == request and key not in ended), "")
    other = next((key for key, each in reversed(begun.items()) if each.shape == request.shape), "")
    notes = [f"{strange} records of the history are no measurements of this space: passed over"] if strange else []
    done = len({one for key, _, one, _ in rows if key == other})
    if done and other not in ended and begun[other] != request:
        rest = f"{done} of {begun[other].trials} measurements; {begun[other].options} goes on with it"
        notes.append(f"another run of this product was interrupted after {rest}")
    products = {shape for _, shape, _, _ in rows} - {request.shape}
    own = _fastest(row for row in rows if run and row[0] == run)
    if own:
        notes.append(f"goes on with an interrupted run: {len(own)} of {request.trials} trials were measured before")
    return Past(
        seen=[_seen(_fastest(row for row in rows if row[1] == shape), shape, core) for shape in sorted(products)],
        known=_fastest(row for row in rows if row[1] == request.shape and (not run or row[0] != run)),
        own=own,
        run=run,
        notes=tuple(notes),
    )


def _request(record: Record) -> Request | None:
    try:
        given = dict(record["run"])
        return Request(**given | {"shape": tuple(given["shape"])})
    except (KeyError, TypeError, ValueError):
        return None


def _rows(records: Sequence[Record]) -> tuple[list[Row], int]:
    """Measurements, and the number of records that are not measurements."""
    every, rows = frozenset(space()), []
    for record in records:
        try:
            m, n, k = record["shape"]
            check_shape((m, n, k))
            one, seconds = Schedule(**record["schedule"]), float(record["seconds"])
        except (KeyError, TypeError, ValueError, UserError):
            continue
        if one in every and 0 < seconds < math.inf:
            rows.append((str(record.get("of_run")), (m, n, k), one, seconds))
    return rows, len(records) - len(rows)


def _fastest(rows: Iterable[Row]) -> dict[Schedule, float]:
    times: dict[Schedule, float] = {}
    for _, _, one, seconds in rows:
        times[one] = min(times.get(one, math.inf), seconds)
    return times


def _seen(times: Mapping[Schedule, float], shape: Shape, core: Core) -> Seen:
    priced = predicted(shape, core, list(times))
    return Seen(features=priced.features, cycles=priced.cycles, seconds=np.array(list(times.values())))
