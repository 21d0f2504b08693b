"""A schedule as data: every action of every rank, in the order in which the rank starts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from steptime.num import Array, Num


class Kind(IntEnum):
    """Kind of an action; passes have the names of PyTorch's pipelining schedules."""

    FORWARD = 0
    """F: forward pass of a stage."""
    BACKWARD = 1
    """B: whole backward pass: gradients of inputs and of weights."""
    INPUT_GRADIENT = 2
    """I: the part of the backward pass that the stage before waits for."""
    WEIGHT_GRADIENT = 3
    """W: the part of the backward pass that no stage waits for."""
    SEND_FORWARD = 4
    """Output of a stage, sent to the rank of the next stage; `stage` is the one that sends."""
    RECEIVE_FORWARD = 5
    """Output of the stage before; `stage` is the one that receives."""
    SEND_BACKWARD = 6
    """Gradient of the input of a stage, sent to the rank of the stage before; `stage` is the one that sends."""
    RECEIVE_BACKWARD = 7
    """Gradient of the output of a stage; `stage` is the one that receives."""
    UNSHARD = 8
    """All-gather of the weights of a stage."""
    RESHARD = 9
    """Gathered weights of a stage are freed."""
    REDUCE = 10
    """Gradients of the weights of a stage are summed over replicas."""
    UPDATE = 11
    """The optimiser changes the weights of a stage."""
    OFFLOAD = 12
    """Kept activations of the forward pass of a stage are copied to the memory of the host."""
    RELOAD = 13
    """Offloaded activations are copied back; the backward pass waits for them."""


PASSES: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""Kinds that compute."""
MESSAGES: Final = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
"""Kinds that move activations or their gradients between two ranks."""
COPIES: Final = (Kind.OFFLOAD, Kind.RELOAD)
"""Kinds that move activations between a rank and its host."""
LETTERS: Final = (
    "F",
    "B",
    "I",
    "W",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "UPDATE",
    "OFFLOAD",
    "RELOAD",
)
"""Name of each :class:`Kind` in PyTorch's notation; PyTorch has no UPDATE, OFFLOAD and RELOAD."""
COMPUTE, DATA, TO_HOST, FROM_HOST = range(4)
"""Streams of a rank. Copies to the host and back have one each, because PCI Express carries both ways at once."""
STREAMS: Final = 4
STREAM: Final = np.array([COMPUTE] * 8 + [DATA] * 3 + [COMPUTE, TO_HOST, FROM_HOST])
"""Stream of each :class:`Kind`; messages are on it where they do not overlap, else on links between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTable:
    """Actions of a step in columns of the same length, rank by rank, each rank's in the order in which it starts them.

    No two passes have the same (kind, stage, micro-batch, slice), no two messages and no two copies; a stage whose
    ranks are two (bidirectional pipelines) has each micro-batch on one of them. What an action waits for follows from
    its kind: a forward pass waits for that of the stage before, a backward pass for that of the stage after and for its
    own forward pass, a pass that needs the result of another rank for the message with it. A weight-gradient pass waits
    for its input-gradient pass. A table may lack messages (:func:`steptime.simulation.messages.with_messages` adds
    them): then a pass waits for the pass of the other rank itself. A copy to the host or back starts once the pass
    before it in the table has ended; if a micro-batch has copies (:func:`steptime.simulation.messages.with_copies`),
    its backward pass waits for the copy back.
    """

    ranks: int
    stages: int
    micro_batches: int
    slices: int = 1
    """Pieces of a sequence that pass a stage one after another (TeraPipe); 1: whole sequences. Forward, a slice comes
    after all slices before it, backward after all slices behind it."""
    rank: Array
    """Rank that does the action, 0 to `ranks` - 1. A stage may be on two ranks (bidirectional pipelines)."""
    kind: Array
    """:class:`Kind` of the action."""
    stage: Array
    """Part of the model that the action is of, 0 (holds the embedding) to `stages` - 1 (holds the loss)."""
    micro_batch: Array
    """Micro-batch, 0 to `micro_batches` - 1; -1: none (UNSHARD, RESHARD; REDUCE and UPDATE at the end of a step).

    An UPDATE within a step, of a schedule that does not wait for all ranks, has the last micro-batch whose gradients
    it applies."""
    slice: Array
    """Piece of the sequence, 0 to `slices` - 1."""
    together: Array
    """Actions of a rank with the same number, 0 or more, which follow each other, run at the same time: all of them
    start once each of them can, and none waits for another of them; -1: alone."""

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def starts(self) -> Array:
        """Row at which the actions of each rank start, and the number of rows: `ranks` + 1 numbers."""
        found: Array = np.searchsorted(self.rank, np.arange(self.ranks + 1))
        return found

    def taken(self, rows: Array) -> ActionTable:
        """The table of some rows, given by number or by mask."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def named(self, row: int) -> str:
        """An action in PyTorch's notation: stage, kind, micro-batch; of several slices the slice after a dot."""
        number = int(self.micro_batch[row])
        text = f"{int(self.stage[row])}{LETTERS[int(self.kind[row])]}{number if number >= 0 else ''}"
        return f"{text}.{int(self.slice[row])}" if self.slices > 1 and number >= 0 else text

    def of_rank(self, rank: int) -> list[str]:
        """Actions of a rank in their order, in PyTorch's notation.

        >>> passes = Passes(kind=Kind.FORWARD, rank=0, stage=0, micro_batch=np.arange(2), turn=np.arange(2))
        >>> arranged([passes], ranks=1, stages=1, micro_batches=2).of_rank(0)
        ['0F0', '0F1']
        """
        first, end = self.starts[rank : rank + 2]
        return [self.named(row) for row in range(first, end)]

    @property
    def identity(self) -> Array:
        """Identity of each action (:meth:`number`)."""
        return np.asarray(self.number(self.kind, self.stage, self.micro_batch, self.slice))

    def number(self, kind: Num, stage: Num, micro_batch: Num, slice_: Num) -> Num:
        """Identity of an action: a number from 0 to `numbers` - 1 that no other pass or message has."""
        return ((kind * self.stages + stage) * (self.micro_batches + 1) + micro_batch + 1) * self.slices + slice_

    @property
    def numbers(self) -> int:
        """Number of identities (:meth:`number`)."""
        return len(Kind) * self.stages * (self.micro_batches + 1) * self.slices

    @property
    def singles(self) -> Array:
        """True for each action that occurs once per micro-batch: passes, messages, copies."""
        found: Array = (self.kind <= MESSAGES[-1]) | (self.kind >= COPIES[0])
        return found


COLUMNS: Final = ("rank", "kind", "stage", "micro_batch", "slice", "together")
"""Columns of an :class:`ActionTable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Actions before they are put in order: numbers or arrays, which are broadcast against each other."""

    kind: Num
    rank: Num
    stage: Num
    micro_batch: Num
    turn: Num
    """Whole number by which a rank orders its actions: smaller ones start first, equal ones in the order of rows."""
    slice: Num = 0
    together: Num = -1


def arranged(passes: Sequence[Passes], *, ranks: int, stages: int, micro_batches: int, slices: int = 1) -> ActionTable:
    """The table of passes, each rank's in the order of their turns."""
    names = (*COLUMNS, "turn")
    rows = [
        [np.asarray(column).ravel() for column in np.broadcast_arrays(*(getattr(each, name) for name in names))]
        for each in passes
    ]
    columns = {name: np.concatenate([row[i] for row in rows]).astype(np.int64) for i, name in enumerate(names)}
    turn = columns.pop("turn")
    turn -= turn.min(initial=0)
    order = np.argsort(columns["rank"] * (turn.max(initial=0) + 1) + turn, kind="stable")
    return ActionTable(
        ranks=ranks,
        stages=stages,
        micro_batches=micro_batches,
        slices=slices,
        **{name: column[order] for name, column in columns.items()},
    )
