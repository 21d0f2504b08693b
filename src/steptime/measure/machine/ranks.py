"""One rank of a measurement of collectives; ``python -m`` runs it, or ``torchrun`` does.

The first rank prints one JSON record per line. All ranks make the same visits in the same order and agree on repeats.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

#: A rank that waits longer than this for the others gives up.
PATIENCE_S: Final = 60.0

Emit = Callable[[Mapping[str, Any]], None]


def groups_of(axis: str, size: int, world: int, local: int) -> list[list[int]]:
    """Disjoint groups of ``size`` ranks that cover the world, along one axis of the mesh (nodes x local ranks).

    ``local``: neighbours within a node; ``node``: ranks of the same place in different nodes; ``world``: everybody.

    >>> groups_of("local", 2, 4, 4), groups_of("node", 2, 4, 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    if axis == "node":
        nodes = world // local
        return [
            [node * local + place for node in range(first, first + size)]
            for place in range(local)
            for first in range(0, nodes, size)
        ]
    return [list(range(first, first + size)) for first in range(0, world, size)]


class Rank:
    """This process in the job."""

    def __init__(self, torch: Any, device: str, local: int) -> None:
        dist = torch.distributed
        self.torch, self.dist, self.device = torch, dist, device
        self.rank, self.world, self.local = dist.get_rank(), dist.get_world_size(), local
        self._groups: dict[tuple[str, int], tuple[Any, list[int]]] = {}

    def group(self, axis: str, size: int) -> tuple[Any, list[int]]:
        """The group of this rank and its members; every rank makes all groups, in the same order."""
        if (axis, size) not in self._groups:
            mine: tuple[Any, list[int]] | None = None
            for members in groups_of(axis, size, self.world, self.local):
                made = self.dist.new_group(members, timeout=timedelta(seconds=PATIENCE_S))
                if self.rank in members:
                    mine = (made, members)
            assert mine is not None
            self._groups[axis, size] = mine
        return self._groups[axis, size]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, element by element."""
        tensor = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(tensor, op=self.dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def settle(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def samples_s(self, call: Callable[[], object], visit_s: float) -> list[float]:
        """Seconds of one collective, of the slowest rank, several times over; calls follow each other at once."""
        for _ in range(2):
            call()
        once_s = max(self.largest([self._time_s(call, 1)])[0], 1e-7)
        calls = 2 * max(1, min(25, round(0.002 / once_s)))
        count = max(4, min(11, int(visit_s / (once_s * calls))))
        return self.largest([self._time_s(call, calls) for _ in range(count)])

    def _time_s(self, call: Callable[[], object], calls: int) -> float:
        self.settle()
        self.dist.barrier()
        self.settle()  # on a GPU the barrier itself may only be queued
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self.settle()
        return (time.perf_counter() - begin) / calls


def call_of(rank: Rank, kind: str, axis: str, ranks: int, size_bytes: int) -> Callable[[], object]:
    """The collective as a call; sizes as nccl-tests counts them.

    That is the buffer of an all-reduce or broadcast, the whole output of an all-gather, the whole input of a
    reduce-scatter, what one rank sends in an all-to-all, and the message between two ranks.
    """
    torch, dist = rank.torch, rank.dist
    group, members = rank.group(axis, ranks)
    count = max(1, size_bytes // 4 // ranks) * ranks
    whole = torch.zeros(count, device=rank.device)
    part = torch.zeros(count // ranks, device=rank.device)
    other = torch.zeros_like(whole) if kind == "all_to_all" else whole
    # newer names first; the older ones warn
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if kind == "point_to_point":
        return _one_way(rank, whole, members, group)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, members[0], group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[kind]


def _one_way(rank: Rank, message: Any, members: list[int], group: Any) -> Callable[[], object]:
    """One message; every other call sends it back, so that two calls are a round trip."""
    turns = itertools.cycle((0, 1))

    def call() -> None:
        turn = next(turns)
        if rank.rank == members[turn]:
            rank.dist.send(message, members[1 - turn], group=group)
        else:
            rank.dist.recv(message, members[turn], group=group)

    return call


def visit_all(rank: Rank, visits: Sequence[Mapping[str, Any]], visit_s: float, emit: Emit) -> None:
    """Makes every visit; a kind of collective that the backend lacks is reported once and left out."""
    missing: set[str] = set()
    for visit in visits:
        kind, shape = visit["kind"], visit["shape"]
        if kind in missing:
            continue
        try:
            call = call_of(rank, kind, visit["axis"], shape["ranks"], shape["bytes"])
            seconds = rank.samples_s(call, visit_s)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            if "not support" not in str(error).lower() and not isinstance(error, NotImplementedError):
                raise  # another rank is gone: this one has nobody to go on with
            missing.add(kind)
            emit({**visit, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        emit({**visit, "seconds": seconds})


def join(torch: Any, device: str, threads: int, store: str | None) -> Rank:
    """Joins the job that the environment describes (RANK, WORLD_SIZE, LOCAL_WORLD_SIZE)."""
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    torch.set_num_threads(threads)
    patience = timedelta(seconds=PATIENCE_S)
    backend = "nccl" if device == "cuda" else "gloo"
    where = {} if store is None else {"init_method": f"file://{store}", "rank": number, "world_size": world}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", number % local)))
    torch.distributed.init_process_group(backend, timeout=patience, **where)
    return Rank(torch, device, local)


def _end_with_parent() -> None:
    """Ends this rank when its parent ends, which closes standard input; otherwise it would wait for ever."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """One rank: reads the work from the file named by the first argument."""
    import torch

    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        work = json.load(file)
    _end_with_parent()
    rank = join(torch, work["device"], work["threads"], work["store"])

    def emit(record: Mapping[str, Any]) -> None:
        if rank.rank == 0:
            print(json.dumps(record), flush=True)

    visit_all(rank, work["visits"], work["visit_s"], emit)
    rank.dist.barrier()
    rank.dist.destroy_process_group()


if __name__ == "__main__":
    main()
