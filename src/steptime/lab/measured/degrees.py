"""Degrees, batch and micro-batch of a row, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from steptime.lab.measured.canonical import ScheduleName, Sharding
from steptime.lab.measured.read import TableRow
from steptime.lab.measured.reasons import Flag, Reason, RowProblem
from steptime.num import divisors

MOST_SEQUENCES: Final = 10**9
"""Largest batch that is believed; a larger number is none of sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many ranks each axis has; ``dp`` is what is left: gpus / (tp pp cp)."""

    tp: int
    pp: int
    cp: int
    dp: int
    vpp: int | None
    """Virtual stages per rank; None: not stated."""
    ep: int | None
    """Expert-parallel ranks; None: not stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences per step, and per micro-batch and replica where stated."""

    global_batch: int
    micro_batch: int | None


def degrees(row: TableRow, gpus: int, schedule: ScheduleName, flags: set[Flag]) -> Degrees | None:
    """The degrees of a row; None where neither tp nor pp is stated.

    Where the printed data-parallel degree differs from gpus / (tp pp cp) and that is whole, the latter is taken and
    flagged.

    Raises:
        RowProblem: tp pp cp does not divide the accelerators, or the experts' ranks do not.
    """
    tp, pp, cp, dp = (row.whole(name) for name in ("tp", "pp", "cp", "dp"))
    if tp is None and pp is None and cp is None:
        if dp != gpus:
            return None
    elif tp is None or pp is None:
        flags.add(Flag.DEGREES_ASSUMED)
    tp, pp, cp = tp or 1, pp or 1, cp or 1
    left, over = divmod(gpus, tp * pp * cp)
    if over or not left:
        raise RowProblem(Reason.DEGREES_CONTRADICT, f"tp {tp} x pp {pp} x cp {cp} on {gpus}")
    if dp is not None and dp != left:
        flags.add(Flag.DP_REDERIVED)
    ep = row.whole("ep")
    if ep is not None and (gpus // pp) % ep:
        raise RowProblem(Reason.DEGREES_CONTRADICT, f"ep {ep} on {gpus} / pp {pp}")
    vpp = row.whole("vpp")
    if schedule.name == "zb-v":  # both of its chunks together hold what one stage of ZB-H1 holds
        vpp = 1
    if vpp is None and (pp == 1 or schedule.name in ("1f1b", "zb-1p", "zb-2p", "gpipe", "dualpipe")):
        vpp = 1
    return Degrees(tp=tp, pp=pp, cp=cp, dp=left, vpp=vpp, ep=ep)


def batch(row: TableRow, found: Degrees | None, schedule: ScheduleName, flags: set[Flag]) -> Batch:
    """The batch of a row; without a printed one, micro-batch x replicas x accumulation.

    Raises:
        RowProblem: there is none, or it does not divide among the replicas.
    """
    micro = row.whole("micro_batch", MOST_SEQUENCES)
    total = row.whole("global_batch_sequences", MOST_SEQUENCES)
    if total is None and "global_batch_sequences" in row.unread:
        raise RowProblem(Reason.BAD_NUMBER, f"global_batch_sequences: {row.text('global_batch_sequences')!r}"[:120])
    if total is None and micro and found is not None and schedule.accumulation:
        total = micro * found.dp * schedule.accumulation
        flags.add(Flag.BATCH_DERIVED)
    if total is None:
        raise RowProblem(Reason.NO_BATCH)
    if found is None:
        return Batch(global_batch=total, micro_batch=micro)
    share, over = divmod(total, found.dp)
    if over or not share:
        raise RowProblem(Reason.BATCH_CONTRADICTS, f"batch {total} over dp {found.dp}")
    if micro is not None and share % micro:
        micro = max(d for d in divisors(share) if d <= micro)
        flags.add(Flag.MICRO_BATCH_REPLACED)
    return Batch(global_batch=total, micro_batch=micro)


def legal_micro_batches(share: int) -> list[int]:
    """Powers of two up to 8 that divide the sequences of one replica; at least one.

    >>> legal_micro_batches(12), legal_micro_batches(7)
    ([1, 2, 4], [1])
    """
    return [size for size in (1, 2, 4, 8) if share % size == 0] or [1]


def possible_degrees(gpus: int, global_batch: int, heads: int, layers: int, per_node: int) -> Iterator[Degrees]:
    """Degrees that a run without stated ones may have had: tensor ranks inside a node, and cp only where it must be."""
    for tp in (1, 2, 4, 8):
        if tp > min(per_node, gpus) or gpus % tp or heads % tp:
            continue
        for pp in (1, 2, 4, 8, 16):
            if (gpus // tp) % pp or layers % pp:
                continue
            replicas = gpus // (tp * pp)
            cp = next((c for c in (1, 2, 4, 8) if replicas % c == 0 and global_batch % (replicas // c) == 0), None)
            if cp is not None:
                yield Degrees(tp=tp, pp=pp, cp=cp, dp=replicas // cp, vpp=1 if pp == 1 else None, ep=None)


def sharded_degrees(gpus: int, global_batch: int, shard: Sharding | None) -> Degrees | None:
    """Plain (sharded) data parallelism, where the batch has a sequence for every device."""
    if global_batch % gpus or (shard is not None and shard.stages == (0,)):
        return None
    return Degrees(tp=1, pp=1, cp=1, dp=gpus, vpp=1, ep=None)
