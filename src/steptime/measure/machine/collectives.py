"""Measures collectives over several processes of this machine, or over the ranks of a job that is already running.

Each process is a rank: gloo on a CPU, NCCL with one GPU each. The processes are started and watched here; what the
first rank reports goes into the journal at once, so that a rank that dies takes nothing with it that was measured.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.errors import UserError
from steptime.measure.machine.runner import Host, done_keys, is_sound
from steptime.measure.machine.torch_ops import summary
from steptime.num import divisors
from steptime.store.journal import Journal, Record, content_key

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point")
#: Seconds without a record after which the ranks are taken to hang.
SILENCE_S: Final = 180.0

#: Ranks wait for each other and so for every other program: only the fastest samples are free of such waits.
QUANTILE: Final = 0.1

Progress = Callable[[int, int], None]


class RankDiedError(UserError):
    """A rank ended before the measurement did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks as nodes x local ranks."""

    nodes: int
    local: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.local

    def groups(self) -> Iterator[tuple[str, int]]:
        """Every axis with every size of group that divides it; the whole world where there are two axes."""
        yield from (("local", size) for size in divisors(self.local) if size > 1)
        if self.nodes > 1:
            yield from (("node", size) for size in divisors(self.nodes) if size > 1)
            yield ("world", self.ranks)


def sizes_bytes(device: str, quick: bool) -> list[int]:
    """Sizes of the messages, spread evenly on a logarithmic scale."""
    low, high, count = (12, 23.5, 9) if device == "cpu" else (10, 30, 14)
    count = count if quick else 2 * count - 1
    return [int(2 ** (low + (high - low) * i / (count - 1))) // 64 * 64 for i in range(count)]


def visits(mesh: Mesh, sizes: Sequence[int], rounds: int, seed: int = 1) -> list[dict[str, Any]]:
    """Every visit: each round has all collectives, groups and sizes once, in an order of its own."""
    out = []
    for round_ in range(rounds):
        made = []
        for axis, ranks in mesh.groups():
            for kind in KINDS:
                if kind == "point_to_point" and ranks != 2:
                    continue
                for size in sizes:
                    task = {"kind": kind, "axis": axis, "shape": {"ranks": ranks, "bytes": size}}
                    about = {"of": "collective", "mesh": [mesh.nodes, mesh.local], "round": round_}
                    made.append({"key": content_key({**task, **about}), **about, **task})
        random.Random(f"{seed} {round_}").shuffle(made)
        out += made
    return out


def measure(
    host: Host,
    journal: Journal,
    mesh: Mesh,
    todo: Sequence[Mapping[str, Any]],
    visit_s: float,
    progress: Progress,
    limit_s: float = float("inf"),
) -> None:
    """Starts the ranks, makes the visits that the journal lacks, and ends the ranks.

    After ``limit_s`` the rounds after the first are cut short.

    Raises:
        RankDiedError: a rank ended early or all fell silent; what was measured is in the journal.
        InputFileError: the journal cannot be written any more.
    """
    done = done_keys(journal.records)
    missing = [visit for visit in todo if visit["key"] not in done]
    finished = len(todo) - len(missing)
    progress(finished, len(todo))
    if not missing:
        return
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="steptime-") as folder, _started(host, mesh, missing, visit_s, folder) as p:
        for record in _reports(p, Path(folder)):
            journal.append(record)
            finished += 1
            progress(finished, len(todo))
            if record["round"] and time.monotonic() - begin_s > limit_s:
                return


@contextmanager
def _started(
    host: Host, mesh: Mesh, todo: Sequence[Mapping[str, Any]], visit_s: float, folder: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the ranks, and ends all of them whatever happens."""
    work = {
        "device": host.device,
        "threads": host.threads,
        "store": f"{folder}/store",
        "visit_s": visit_s,
        "visits": list(todo),
    }
    path = Path(folder) / "work.json"
    path.write_text(json.dumps(work), encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(mesh.ranks):
            processes.append(_rank(rank, mesh, path, host.threads))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _rank(rank: int, mesh: Mesh, work: Path, threads: int) -> subprocess.Popen[bytes]:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": mesh.ranks,
        "LOCAL_RANK": rank % mesh.local,
        "LOCAL_WORLD_SIZE": mesh.local,
        "OMP_NUM_THREADS": threads,
    }
    environment = {**os.environ, **{name: str(value) for name, value in numbers.items()}}
    if sys.platform == "linux":  # all ranks are here; the name of the host may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (work.parent / f"rank{rank}.txt").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "steptime.measure.machine.ranks", str(work)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _reports(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> Iterator[Record]:
    """Records of the first rank as they come, until it is done.

    Raises:
        RankDiedError: a rank ended with an error, or nothing came for a long time.
    """
    pipe = processes[0].stdout
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    kept, heard_s, dead = b"", time.monotonic(), None
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ready = selector.select(timeout=0.2)
            data = os.read(pipe.fileno(), 2**16) if ready else None
            if data:
                heard_s = time.monotonic()
                *lines, kept = (kept + data).split(b"\n")
                yield from (json.loads(line) for line in lines)
                continue
            dead = next((i for i, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if dead is not None:
                raise _died(dead, processes, folder)
            if data == b"" and processes[0].poll() == 0:
                return
            if time.monotonic() - heard_s > SILENCE_S:
                raise RankDiedError(f"the {len(processes)} ranks have not reported anything for {SILENCE_S:g} s")


def _died(rank: int, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> RankDiedError:
    """The first rank that a signal ended, else the first with an error: the others fail because of it."""
    time.sleep(0.2)
    codes = {i: p.poll() for i, p in enumerate(processes)}
    rank = next((i for i, code in codes.items() if code is not None and code < 0), rank)
    code = codes[rank] or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    try:
        tail = (folder / f"rank{rank}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    except OSError:
        tail = []
    said = f": {tail[0][:200]}" if tail else ""
    return RankDiedError(f"rank {rank} of {len(processes)} {how}{said}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One collective of one size over one kind of group, all rounds together."""

    kind: str
    axis: str
    ranks: int
    size_bytes: int
    seconds: float


def results(records: Iterable[Record], mesh: Mesh) -> list[Timed]:
    """Measurements of this mesh in a journal; a visit that was made twice counts once, the later one."""
    latest: dict[tuple[str, str, int, int], dict[str, list[float]]] = {}
    for record in records:
        if record.get("of") != "collective" or not is_sound(record) or record["mesh"] != [mesh.nodes, mesh.local]:
            continue
        name = (record["kind"], record["axis"], record["shape"]["ranks"], record["shape"]["bytes"])
        latest.setdefault(name, {})[record["key"]] = record["seconds"]
    out = []
    for (kind, axis, ranks, size), made in latest.items():
        try:
            found = summary((second for seconds in made.values() for second in seconds), QUANTILE)
        except UserError:
            continue
        out.append(Timed(kind=kind, axis=axis, ranks=ranks, size_bytes=size, seconds=found.seconds))
    return out
