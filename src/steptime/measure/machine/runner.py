"""Measures every operator in several rounds, journals each result, and identifies this machine."""

from __future__ import annotations

import math
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError
from steptime.estimate.measured import CONVOLVED
from steptime.measure import host
from steptime.measure.machine.torch_ops import (
    CpuTimer,
    CudaTimer,
    Pool,
    Timer,
    call_of,
    copies_of,
    room_bytes,
    summary,
)
from steptime.measure.machine.work import LAUNCHES, Task, cpu_tasks, extent_of, launches, tasks, work_of
from steptime.store.journal import Journal, Record, content_key

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
#: Limits of the memory of a container (control groups, second and first version); ``max`` or a huge number: none.
_LIMITS: Final = tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine and the software on it."""

    host: str
    processor: str
    cores: int
    memory_bytes: float
    """Memory of one device: of the GPU, or of the whole host."""
    cache_bytes: float
    """Size of the last cache before memory."""
    device: str
    """``cpu`` or ``cuda``."""
    gpus: int
    torch: str
    threads: int

    @property
    def title(self) -> str:
        """One line for people."""
        return f"{self.processor} in {self.host}"

    def header(self) -> dict[str, Any]:
        """Values that have to be equal for a journal to be resumed."""
        return asdict(self)


def this_host(torch: Any, threads: int, device: str | None = None) -> Host:
    """The machine that this process runs on.

    Args:
        torch: the module.
        threads: threads of one process on a CPU.
        device: ``"cpu"`` or ``"cuda"``; default: CUDA if there is a GPU.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    common: dict[str, Any] = {
        "host": platform.node() or "unknown",
        "cores": os.cpu_count() or 1,
        "torch": str(torch.__version__),
    }
    if chosen == "cuda":
        return Host(**common, **_gpu(torch), threads=threads)
    return Host(
        **common,
        processor=host.this_host().cpu,
        memory_bytes=_memory_bytes(),
        cache_bytes=_last_cache_bytes(),
        device="cpu",
        gpus=0,
        threads=threads,
    )


def _gpu(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "processor": str(properties.name),
        "memory_bytes": float(properties.total_memory),
        "cache_bytes": float(getattr(properties, "L2_cache_size", 0) or 4e7),
        "device": "cuda",
        "gpus": int(torch.cuda.device_count()),
    }


def _memory_bytes() -> float:
    """Memory of the host, or the limit of its container; 8 GB if the system does not tell."""
    try:
        sizes = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    except (ValueError, OSError, AttributeError):
        sizes = []
    for path in _LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdecimal() and int(text):
            sizes.append(float(text))
    return min(sizes, default=8e9)


def _last_cache_bytes() -> float:
    """Size of the largest cache of the first core; 32 MB if the system does not tell."""
    sizes = []
    for path in sorted(_CACHES.glob("index*/size")):
        try:
            found = re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if found:
            sizes.append(float(found.group(1)) * _UNITS.get(found.group(2), 1))
    return max(sizes, default=3.2e7)


Progress = Callable[[int, int], None]

#: A dtype slower than this share of the rate of fp32 is emulated: nobody trains in it, and it is slow to measure.
LEAST_RATE: Final = 0.3
#: Probes that have to be fast for a dtype to be measured in products, and those for convolutions.
PRODUCT: Final = {"matmul": {"m": 256, "n": 256, "k": 256}}
_IMAGES: Final = {"batch": 2, "channels_in": 32, "channels_out": 32, "side": 14, "kernel": 3, "stride": 1, "groups": 1}
CONVOLUTION: Final = dict.fromkeys(CONVOLVED, _IMAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Duration and repetition of a measurement."""

    quick: bool = False
    rounds: int = 5
    visit_s: float = 0.12
    """Time for the samples of one visit."""
    limit_s: float = float("inf")
    """After this time no further round is begun, and the one under way is cut short unless it is the first."""
    seed: int = 1

    @classmethod
    def of(cls, quick: bool) -> Settings:
        """The usual settings: ``--quick`` or thorough."""
        return cls(quick=True, rounds=3, visit_s=0.03, limit_s=90.0) if quick else cls()


@dataclass(frozen=True, slots=True)
class Bench:
    """Torch on one host, with a timer and operands."""

    torch: Any
    host: Host
    timer: Timer
    pool: Pool

    @classmethod
    def open(cls, torch: Any, host: Host) -> Bench:
        """Timer and operands for a host; sets the number of threads of torch."""
        if host.device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())  # see CudaTimer
            return cls(torch, host, CudaTimer(torch), Pool(torch, "cuda"))
        torch.set_num_threads(host.threads)
        return cls(torch, host, CpuTimer("thread" if host.threads == 1 else "wall"), Pool(torch, "cpu"))

    def samples_s(self, task: Task, visit_s: float) -> list[float]:
        """Seconds of one run of a task, several times over."""
        set_tf32(self.torch, task.dtype == "tf32")
        self.pool.reset()
        copies = copies_of(task, self.host.cache_bytes, room_bytes(self.host.memory_bytes))
        timer = self.timer
        if task.kind in LAUNCHES and isinstance(timer, CudaTimer):
            timer = replace(timer, graphs=False)
        return timer.samples_s(call_of(task, self.torch, self.pool, copies), visit_s)

    def dtypes(self, probes: Mapping[str, Mapping[str, int]] = PRODUCT) -> tuple[str, ...]:
        """Dtypes in which this machine computes every probe (shape by kind of operator) without emulation."""
        candidates = ("fp32", "tf32", "bf16", "fp16") if self.host.device == "cuda" else ("fp32", "bf16", "fp16")
        slower: dict[str, float] = {}
        for kind, shape in probes.items():
            seconds = {dtype: self._probe_s(Task(kind=kind, dtype=dtype, shape=shape)) for dtype in candidates}
            for dtype, found_s in seconds.items():
                slower[dtype] = max(slower.get(dtype, 0.0), found_s / seconds["fp32"])
        return tuple(dtype for dtype, times in slower.items() if times * LEAST_RATE <= 1)

    def _probe_s(self, task: Task) -> float:
        """Seconds of a probe; infinite where this build of torch lacks the operator."""
        try:
            return summary(self.samples_s(task, 0.02)).seconds
        except (RuntimeError, TypeError):
            return math.inf


def set_tf32(torch: Any, wanted: bool) -> None:
    """Allows or forbids TF32 in products and convolutions of fp32 numbers on CUDA."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if wanted else "highest")
        torch.backends.cudnn.allow_tf32 = wanted


def plan(bench: Bench, dtypes: tuple[str, ...], convolved: tuple[str, ...], settings: Settings) -> list[Task]:
    """Tasks to measure; ``convolved``: dtypes of convolutions."""
    host = bench.host
    extent = extent_of(host.device, settings.quick, host.memory_bytes, host.cache_bytes)
    alone = cpu_tasks(settings.quick, settings.seed) if host.device == "cpu" and host.threads == 1 else []
    return [*launches(), *tasks(extent, dtypes, convolved, seed=settings.seed), *alone]


def visit_key(task: Task, round_: int) -> str:
    """Key of one visit in the journal."""
    return f"{task.key}/{round_}"


def measure(bench: Bench, journal: Journal, todo: Sequence[Task], settings: Settings, progress: Progress) -> None:
    """Visits every task in every round, except those that the journal has.

    Raises:
        InputFileError: the journal cannot be written any more.
        KeyboardInterrupt: the user stopped it; everything that was measured is in the journal.
    """
    done = done_keys(journal.records)
    begin_s = time.monotonic()
    total = len(todo) * settings.rounds
    finished = 0
    for round_ in range(settings.rounds):
        order = list(todo)
        random.Random(f"{settings.seed} {round_}").shuffle(order)
        for task in order:
            if round_ and time.monotonic() - begin_s > settings.limit_s:
                return progress(total, total)
            key = visit_key(task, round_)
            if key not in done:
                journal.append(visit(bench, task, round_, settings.visit_s))
            finished += 1
            progress(finished, total)
    return None


def done_keys(records: Iterable[Record]) -> set[str]:
    """Keys that were measured; a visit that failed, or whose record is damaged, is made again."""
    return {record["key"] for record in records if is_sound(record)}


def is_sound(record: Record) -> bool:
    """True if a record is a visit as it was written: its key is that of its content, and it holds times."""
    seconds = record.get("seconds")
    numbers = isinstance(seconds, list) and all(isinstance(one, (int, float)) for one in seconds)
    if not numbers or "error" in record or record.get("of") not in ("operator", "collective"):
        return False
    try:
        if record["of"] == "collective":
            return bool(record["key"] == content_key({name: record[name] for name in COLLECTIVE}))
        task = task_of(record)
        work_of(task)  # an operator that this version does not know has none
        return bool(record["key"] == visit_key(task, record["round"]))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return False


COLLECTIVE: Final = ("of", "mesh", "round", "kind", "axis", "shape")
"""Fields that make the key of a visit of a collective."""


def visit(bench: Bench, task: Task, round_: int, visit_s: float) -> Record:
    """One visit of a task as a record; an operator that fails leaves the error in its place."""
    about = {
        "key": visit_key(task, round_),
        "of": "operator",
        "kind": task.kind,
        "dtype": task.dtype,
        "shape": dict(task.shape),
        "layout": task.layout,
        "round": round_,
        "clock": bench.timer.clock,
    }
    try:
        return {**about, "seconds": bench.samples_s(task, visit_s)}
    except (RuntimeError, TypeError) as error:  # out of memory or an unknown kernel must not end the others
        return {**about, "error": f"{type(error).__name__}: {error}"[:300]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One task, all rounds together."""

    task: Task
    seconds: float
    noise: float
    """Relative standard deviation of the rounds; NaN for a single round."""
    visits: int
    rejected: int


def task_of(record: Record) -> Task:
    """The task of a record."""
    shape: Mapping[str, int] = record["shape"]
    return Task(kind=record["kind"], dtype=record["dtype"], shape=shape, layout=record["layout"])


def results(records: Iterable[Record]) -> list[Measured]:
    """The measurements of a journal by task; a visit that was made twice counts once, the later one.

    Samples that are zero, negative or not finite are left out, and records that are damaged; a task of which none
    remains is left out.
    """
    visits: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.get("of") == "operator" and is_sound(record):
            visits.setdefault(task_of(record).key, {})[record["key"]] = record
    return [found for made in visits.values() if (found := _together(list(made.values()))) is not None]


def _together(made: Sequence[Record]) -> Measured | None:
    found = []
    for record in made:
        try:
            found.append(summary(record["seconds"]))
        except UserError:
            continue
    if not found:
        return None
    rounds_s = np.array([one.seconds for one in found])
    noise = float(rounds_s.std(ddof=1) / rounds_s.mean()) if len(rounds_s) > 1 else float("nan")
    return Measured(
        task=task_of(made[0]),
        seconds=float(np.quantile(rounds_s, 0.25)),
        noise=noise,
        visits=len(found),
        rejected=sum(one.rejected for one in found),
    )


def noise_of(measured: Sequence[Measured]) -> float:
    """Median over the tasks of the relative standard deviation between rounds; NaN if there was one round."""
    values = np.array([one.noise for one in measured])
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else float("nan")
