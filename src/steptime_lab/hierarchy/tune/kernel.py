"""The code generator and the clock: a schedule compiled by gcc, checked against NumPy, timed in CPU time."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from steptime.errors import InternalError, UserError
from steptime.measure.host import this_host
from steptime.num import Array
from steptime.store.files import unwritable
from steptime.store.journal import content_key
from steptime_lab.hierarchy.tune.space import WORD, Core, Schedule, block_columns

SOURCE: Final = Path(__file__).with_name("product.c")
FLAGS: Final = ("-O3", "-march=native", "-fPIC", "-shared")
COMPILE_S: Final = 120
"""Time limit of a compilation, in seconds."""
ROUNDS: Final = 3
"""Number of times that each schedule is timed; the schedules of a batch take turns."""
CUT: Final = 1.25
"""A schedule that is slower than the fastest by this factor in its first round is not timed again."""
SPARE: Final = 0.6
"""Share of the free memory that operands may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Operands of a product, its result by NumPy, and the compiled kernels of a folder."""

    shape: tuple[int, int, int]
    core: Core
    folder: Path
    a: Array
    b: Array
    expected: Array
    result: Array
    kernels: dict[tuple[int, int, str], Callable[..., None]] = field(default_factory=dict)
    work: list[Array] = field(default_factory=list)

    def runner(self, schedule: Schedule) -> Callable[[], None]:
        """A function that computes the product; its result has been checked against NumPy's.

        Raises:
            UserError: there is no gcc, or it fails.
            InternalError: the result is wrong.
        """
        key = (schedule.rows, schedule.vectors, schedule.packing)
        if key not in self.kernels:
            self.kernels[key] = loaded(compiled(schedule, self.core, self.folder))
        kernel, columns = self.kernels[key], block_columns(schedule, self.shape[1], self.core)
        work = self._room(schedule, columns)
        given = (
            *self.shape,
            *(x.ctypes.data for x in (self.a, self.b, self.result)),
            schedule.block_rows,
            columns,
            schedule.block_depth,
            work.ctypes.data,
        )

        def run() -> None:
            kernel(*given)

        self.result.fill(np.nan)
        run()
        if not np.allclose(self.result, self.expected, rtol=1e-4, atol=1e-4 * self.shape[2] ** 0.5):
            raise InternalError(f"{schedule.text}: the compiled product of {self.shape} is wrong")
        return run

    def _room(self, schedule: Schedule, columns: int) -> Array:
        width = schedule.vectors * self.core.lanes
        rows = -(-schedule.block_rows // schedule.rows) * schedule.rows
        words = schedule.block_depth * (columns + rows) + schedule.rows * width + 16
        if not self.work or len(self.work[-1]) < words:
            self.work.append(aligned(words))  # earlier runners keep their own arrays
        return self.work[-1]


def aligned(words: int) -> Array:
    """Zeros that start at a cache line."""
    room = np.zeros(words + 16, dtype=np.float32)
    return room[-(room.ctypes.data // WORD) % 16 :][:words]


def product_of(shape: tuple[int, int, int], core: Core, folder: Path, seed: int = 0) -> Product:
    """Random operands of a shape.

    Raises:
        UserError: the operands are too large for the free memory.
    """
    m, n, k = shape
    words, free = m * k + k * n + 3 * m * n, _free_bytes()
    if words * WORD > SPARE * free:
        raise UserError(
            f"{m} x {n} x {k}: {words * WORD / 2**30:.1f} GiB do not fit {free / 2**30:.1f} GiB that are free",
            hint="a smaller product; blocks of a large one are tuned as well by a part of it",
        )
    random = np.random.default_rng(seed)
    a, b, result = aligned(m * k).reshape(m, k), aligned(k * n).reshape(k, n), aligned(m * n).reshape(m, n)
    a[:], b[:] = random.random((m, k), dtype=np.float32) - 0.5, random.random((k, n), dtype=np.float32) - 0.5
    return Product(shape=shape, core=core, folder=folder, a=a, b=b, expected=a @ b, result=result)


def _free_bytes() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return float("inf")


def kernel_key() -> str:
    """Key of the source of the kernels and the flags of the compiler, on which measured times depend."""
    return content_key({"source": SOURCE.read_text(encoding="utf-8"), "flags": list(FLAGS)})


def library_of(schedule: Schedule, core: Core) -> tuple[str, list[str]]:
    """Name of the library of a register tile and packing on this processor, and the macros of its compilation."""
    defines = [
        f"-DROWS={schedule.rows}",
        f"-DVECTORS={schedule.vectors}",
        f"-DBYTES={core.processor.vector_bytes}",
        f"-DPACK_A={int(schedule.packing == 'both')}",
        f"-DPACK_B={int(schedule.packing != 'none')}",
    ]
    host = this_host()
    name = content_key({"kernel": kernel_key(), "defines": defines, "host": host.key})[:12]
    return f"product-{schedule.rows}x{schedule.vectors}-{schedule.packing}-{host.label}-{name}.so", defines


def private_folder() -> Path:
    """Folder of compiled kernels that only this user can write: ``steptime/kernels`` in the user's cache directory
    (``XDG_CACHE_HOME`` or ``~/.cache``); where it cannot be created or written, a temporary one of this process.

    A library is code that runs when it is loaded, so none is loaded from a folder that others may have written, such as
    the working directory.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (given if given.is_absolute() else Path.home() / ".cache") / "steptime" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _only_ours(folder):
            return folder
    except (OSError, RuntimeError):  # no home, a file in the way, a disk that is read-only
        pass
    own = tempfile.mkdtemp(prefix="steptime-kernels-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def _only_ours(path: Path) -> bool:
    """True for a file or folder, not a link, that belongs to this user and that nobody else may write."""
    found = path.lstat()
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def compiled(schedule: Schedule, core: Core, folder: Path) -> Path:
    """The library of a schedule's register tile and packing for this processor; compiled on first use.

    Raises:
        UserError: there is no gcc, gcc fails, or the folder cannot be written.
    """
    file, defines = library_of(schedule, core)
    target = folder / file
    if target.exists() and _only_ours(folder) and _only_ours(target):
        return target
    gcc = shutil.which("gcc")
    if gcc is None:
        raise UserError(
            "there is no gcc to compile kernels with", hint="install gcc, or --trials 0 for predictions alone"
        )
    part = target.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [gcc, *FLAGS, *defines, str(SOURCE), "-o", str(part)], capture_output=True, text=True, timeout=COMPILE_S
        )
        if done.returncode != 0:
            first = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
            raise UserError(f"gcc cannot compile the kernel: {first}", hint="gcc 9 or later, vectors of this machine")
        part.replace(target)
    except subprocess.TimeoutExpired:
        raise UserError(f"gcc took more than {COMPILE_S} s for one kernel") from None
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        with contextlib.suppress(OSError):  # of a compilation that failed or was interrupted
            part.unlink(missing_ok=True)
    return target


def loaded(path: Path) -> Callable[..., None]:
    """The function of a compiled library.

    Raises:
        UserError: it cannot be loaded.
    """
    try:
        function = ctypes.CDLL(str(path.resolve())).product
    except (OSError, AttributeError):
        raise UserError(f"{path}: is not a kernel of this machine", hint="delete it") from None
    size, pointer = ctypes.c_long, ctypes.c_void_p
    function.argtypes = [*[size] * 3, *[pointer] * 3, *[size] * 3, pointer]
    function.restype = None
    return function


def timed(runs: Sequence[Callable[[], None]], *, best_s: float, rounds: int = ROUNDS, cut: float = CUT) -> list[float]:
    """CPU seconds of each function on one thread: the fastest of some rounds, each run timed after an untimed one.

    The functions take turns. A function that is slow in its first round is not run in the others.

    Args:
        runs: the functions.
        best_s: time of the fastest known function; infinity where none is known.
        rounds: number of timings of each function.
        cut: a function is slow if it takes more than this multiple of the fastest time; infinity: none is.
    """
    times = [float("inf")] * len(runs)
    for _ in range(rounds):
        limit = cut * min(best_s, *times)
        for place, run in enumerate(runs):
            if times[place] <= limit or times[place] == float("inf"):
                run()
                begin = time.thread_time()
                run()
                times[place] = min(times[place], time.thread_time() - begin)
    return times
