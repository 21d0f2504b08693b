"""A program: the calls of one step in the order in which they run, and the storages that they read and write.

The graph says what is computed; a program says when, by which module, in which phase, and in which memory. Views are
calls without new storage, in-place operators write into a storage that is there, recomputation is a node that is called
again. Frameworks free a storage when nothing refers to it any more; the program records when that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from steptime.captured.graph.node import Node

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")

Category = Literal["parameter", "buffer", "input", "gradient", "state", "activation", "temporary"]
"""What a storage holds: `activation` lives from the forward into the backward pass, `temporary` does not."""

BEFORE = -1
"""Birth of what exists before the step."""
OUTSIDE = "outside."
"""How the name begins of a storage that was there before the step and that nobody named: a constant, an empty cache."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory.

    `born` is the number of the call that allocates it (`BEFORE`: it was there), `freed` the number of the call during
    which the last reference went: it is still alive while that call runs, gone after it. None: alive at the end.
    """

    size_bytes: int
    born: int
    freed: int | None
    category: Category
    name: str = ""
    """Parameter, input or state that it holds; else empty."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator run: which node, when, where, on which storages."""

    node: Node
    phase: Phase
    module: str
    """Path of the module whose forward or backward it is; empty outside any module."""
    reads: tuple[int, ...]
    """Number of the storage of each input of the node."""
    writes: tuple[int, ...]
    """Number of the storage of each output of the node."""
    view: bool = False
    """Its output is another look at its input's storage: nothing is computed or moved."""
    inplace: bool = False
    """Its output is written over (one of) its inputs."""
    recomputed: bool = False
    """A forward operator that runs again in the backward pass."""
    scratch_bytes: int = 0
    """Memory that it needs while it runs and that no storage shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A weight of the module."""

    name: str
    storage: int
    elements: int
    size_bytes: int
    trained: bool
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One recorded step."""

    name: str
    calls: tuple[Call, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    """Path of each module -> name of its class."""
    source: str = ""
    """What it was recorded from, for provenance."""
    folded: tuple[str, ...] = ()
    """Runs of equal blocks that were recorded for a few of their members and unrolled."""
    unfolded: str = ""
    """Why equal blocks were recorded one by one, where they were."""
    batch: int | None = None
    """Samples of the step, where that is known."""
    assumed: tuple[str, ...] = ()
    """What was taken as true of numbers that are not known, each with the line that asks for it."""

    def __repr__(self) -> str:
        """One line for a prompt or a notebook."""
        return f"<Program {self.name}: {len(self.calls):,} calls, {self.parameter_count:,} parameters>"

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, shared ones once."""
        seen = {parameter.storage: parameter.elements for parameter in self.parameters}
        return sum(seen.values())
