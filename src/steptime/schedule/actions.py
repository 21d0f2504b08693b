"""A schedule as data: every action of every rank, in the order in which the rank starts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from steptime.num import Array


class Kind(IntEnum):
    """What an action does; the names of passes are those of PyTorch's pipelining schedules."""

    FORWARD = 0
    """F: forward pass of a stage."""
    BACKWARD = 1
    """B: whole backward pass: gradients of inputs and of weights."""
    INPUT_GRADIENT = 2
    """I: the part of the backward pass that the stage before waits for."""
    WEIGHT_GRADIENT = 3
    """W: the part of the backward pass that no stage waits for."""
    SEND_FORWARD = 4
    RECEIVE_FORWARD = 5
    SEND_BACKWARD = 6
    RECEIVE_BACKWARD = 7
    UNSHARD = 8
    """All-gather of the weights of a stage."""
    RESHARD = 9
    """Gathered weights of a stage are freed."""
    REDUCE = 10
    """Gradients of the weights of a stage are summed over replicas."""
    UPDATE = 11
    """The optimiser changes the weights of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTable:
    """Actions of a step in columns of the same length, rank by rank, each rank's in the order in which it starts them.

    No two actions have the same (kind, stage, micro-batch, slice). What an action waits for follows from what it is: a
    forward pass waits for that of the stage before, a backward pass for that of the stage after and for its own
    forward pass, a pass of another rank's result for the message that carries it.
    """

    ranks: int
    stages: int
    micro_batches: int
    slices: int
    """Pieces of a sequence that pass a stage one after another (TeraPipe); 1: whole sequences."""
    rank: Array
    """Rank that does the action, 0 to `ranks` - 1. A stage may be on two ranks (bidirectional pipelines)."""
    kind: Array
    """:class:`Kind` of the action."""
    stage: Array
    """Part of the model that the action is of, 0 (holds the embedding) to `stages` - 1 (holds the loss)."""
    micro_batch: Array
    """Micro-batch, 0 to `micro_batches` - 1; -1: of none (UNSHARD, RESHARD, REDUCE, UPDATE)."""
    slice: Array
    """Piece of the sequence, 0 to `slices` - 1."""
    together: Array
    """Actions of a rank with the same number, which follow each other, run beside each other; -1: alone."""
