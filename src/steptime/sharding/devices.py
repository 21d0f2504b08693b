"""Pieces of tensors on the devices of a mesh, and the collectives that bring them to other layouts. Needs PyTorch.

Which part of a whole tensor a device has follows from its coordinates; what a collective sends to each member of a
group is where the part of one device meets the part of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist

from steptime.captured.ops.placement import Reduction
from steptime.errors import UserError
from steptime.sharding.moves import Layout
from steptime.sharding.script import Move

Coordinates = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""Of each dim where a part begins, and its size."""
NEUTRAL: Final[Mapping[Reduction, float]] = {
    "sum": 0.0,
    "avg": 0.0,
    "max": float("-inf"),
    "min": float("inf"),
    "product": 1.0,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a device has of a tensor."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    layout: Layout


def box_of(layout: Layout, shape: Sequence[int], sizes: Sequence[int], at: Coordinates) -> Box:
    """The part of a tensor that the device with some coordinates has."""
    out = []
    for size, axes in zip(shape, layout.divided, strict=True):
        index, count = 0, 1
        for axis in axes:
            index, count = index * sizes[axis] + at[axis], count * sizes[axis]
        out.append((index * (size // count), size // count))
    return tuple(out)


def part(tensor: torch.Tensor, own: Box, wanted: Box) -> torch.Tensor:
    """The wanted part of the whole, from a tensor that has the part `own` of it."""
    for dim, ((start, size), (begin, length)) in enumerate(zip(own, wanted, strict=True)):
        if (start, size) != (begin, length):
            tensor = tensor.narrow(dim, begin - start, length)
    return tensor


def _meeting(a: Box, b: Box) -> Box:
    starts = [max(x, y) for (x, _), (y, _) in zip(a, b, strict=True)]
    ends = [min(x + n, y + m) for (x, n), (y, m) in zip(a, b, strict=True)]
    return tuple((start, end - start) for start, end in zip(starts, ends, strict=True))


class Devices:
    """A mesh as one of its processes sees it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        if not dist.is_initialized() or dist.get_world_size() != prod(sizes):
            raise UserError(
                f"the plan is of {prod(sizes)} processes",
                hint="start one for each device, and torch.distributed in them",
            )
        self.sizes = tuple(sizes)
        every = list(product(*map(range, self.sizes)))
        self.at = every[dist.get_rank()]
        rank_of = {at: rank for rank, at in enumerate(every)}
        self._groups: dict[tuple[int, ...], tuple[Any, list[Coordinates]]] = {}
        numbers = range(len(self.sizes))
        for along in chain.from_iterable(combinations(numbers, count) for count in range(1, len(numbers) + 1)):
            for fixed in dict.fromkeys(_outside(at, along) for at in every):
                members = [at for at in every if _outside(at, along) == fixed]
                group = dist.new_group([rank_of[at] for at in members])
                if self.at in members:
                    self._groups[along] = group, members

    def members(self, axes: tuple[int, ...]) -> list[Coordinates]:
        """Coordinates of the devices that this one meets along some axes, itself among them."""
        return self._groups[axes][1]

    def collective(self, name: str, axes: tuple[int, ...], tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """One functional collective."""
        operator = getattr(torch.ops._c10d_functional, name)
        result = operator(tensor, *arguments, self._groups[axes][0].group_name)
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(result)
        return waited

    def summed(self, axes: tuple[int, ...], tensor: torch.Tensor, reduction: Reduction = "sum") -> torch.Tensor:
        """All-reduce."""
        if not axes:
            return tensor
        made = self.collective("all_reduce", axes, tensor.contiguous(), "sum" if reduction == "avg" else reduction)
        return made / len(self.members(axes)) if reduction == "avg" else made

    def box(self, piece: Piece) -> Box:
        """The part that this device has."""
        return box_of(piece.layout, piece.shape, self.sizes, self.at)

    def cut(self, whole: torch.Tensor, layout: Layout) -> Piece:
        """This device's piece of a tensor that it has whole; of terms the first device has all."""
        shape = tuple(whole.shape)
        own = tuple((0, size) for size in shape)
        local = part(whole, own, box_of(layout, shape, self.sizes, self.at))
        axes = tuple(axis for axis, term in enumerate(layout.terms) if term)
        term = next((term for term in layout.terms if term), None)
        return Piece(_as_term(local, term, axes, self) if term else local, shape, layout)

    def moved(self, piece: Piece, move: Move) -> Piece:
        """The piece after one step."""
        return replace(piece, local=MOVES[move.kind](self, piece, move), layout=move.target)

    def whole(self, piece: Piece) -> torch.Tensor:
        """All of a tensor, brought together in no planned way."""
        local, layout = piece.local, piece.layout
        for term in dict.fromkeys(term for term in layout.terms if term):
            local = self.summed(tuple(axis for axis, each in enumerate(layout.terms) if each == term), local, term)
        axes = tuple(sorted(axis for axes in layout.divided for axis in axes))
        if not axes:
            return local
        layout = Layout(layout.divided, (None,) * len(self.sizes))
        to = Layout(((),) * len(piece.shape), layout.terms)
        return _all_gather(self, Piece(local, piece.shape, layout), Move("all_gather", axes, layout, to, piece.shape))


def _outside(at: Coordinates, axes: tuple[int, ...]) -> Coordinates:
    return tuple(place for axis, place in enumerate(at) if axis not in axes)


def _boxes(devices: Devices, layout: Layout, move: Move) -> list[Box]:
    return [box_of(layout, move.shape, devices.sizes, at) for at in devices.members(move.axes)]


def _mine(devices: Devices, layout: Layout, move: Move) -> Box:
    return box_of(layout, move.shape, devices.sizes, devices.at)


def _joined(
    devices: Devices, move: Move, flat: Iterable[torch.Tensor], boxes: Iterable[Box], like: torch.Tensor
) -> torch.Tensor:
    """The target piece from flat parts of it."""
    target = _mine(devices, move.target, move)
    out = like.new_empty([size for _, size in target])
    for each, box in zip(flat, boxes, strict=True):
        part(out, target, box).copy_(each.view([size for _, size in box]))
    return out


def _all_gather(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    members = len(devices.members(move.axes))
    made = devices.collective("all_gather_into_tensor", move.axes, piece.local.contiguous().view(-1), members)
    return _joined(devices, move, made.chunk(members), _boxes(devices, move.source, move), piece.local)


def _reduce_scatter(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    source, boxes = _mine(devices, move.source, move), _boxes(devices, move.target, move)
    flat = torch.cat([part(piece.local, source, box).reshape(-1) for box in boxes])
    term = _term(move.source)
    made = devices.collective(
        "reduce_scatter_tensor", move.axes, flat, "sum" if term == "avg" else term, len(boxes)
    ).view([size for _, size in _mine(devices, move.target, move)])
    return made / len(boxes) if term == "avg" else made


def _all_reduce(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    return devices.summed(move.axes, piece.local, _term(move.source))


def _all_to_all(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    source, target = (_mine(devices, layout, move) for layout in (move.source, move.target))
    sent = [part(piece.local, source, _meeting(source, box)) for box in _boxes(devices, move.target, move)]
    received = [_meeting(box, target) for box in _boxes(devices, move.source, move)]
    counts = [prod(size for _, size in box) for box in received]
    flat = torch.cat([each.reshape(-1) for each in sent])
    made = devices.collective("all_to_all_single", move.axes, flat, counts, [each.numel() for each in sent])
    return _joined(devices, move, torch.split(made, counts), received, piece.local)


def _permute(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    """Every device sends all that it has to the one that has the same part and the same term afterwards."""
    members = devices.members(move.axes)
    own = members.index(devices.at)

    def roles(layout: Layout) -> list[int]:
        keys = [(box_of(layout, move.shape, devices.sizes, at), _term_of(layout, devices.sizes, at)) for at in members]
        return sorted(range(len(members)), key=lambda n: (keys[n], n))

    pairs = dict(zip(roles(move.source), roles(move.target), strict=True))
    count = piece.local.numel()
    sent = [count if pairs[own] == n else 0 for n in range(len(members))]
    received = [count if pairs[n] == own else 0 for n in range(len(members))]
    made = devices.collective("all_to_all_single", move.axes, piece.local.contiguous().view(-1), received, sent)
    return made.view([size for _, size in _mine(devices, move.target, move)])


def _term_of(layout: Layout, sizes: Sequence[int], at: Coordinates) -> int:
    """Number of the term that a device has."""
    number = 0
    for axis, term in enumerate(layout.terms):
        number = number * sizes[axis] + at[axis] if term else number
    return number


def _slice(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    return part(piece.local, *(_mine(devices, layout, move) for layout in (move.source, move.target)))


def _fill(devices: Devices, piece: Piece, move: Move) -> torch.Tensor:
    """Terms of the others are neutral; of a replicated tensor the first device has the term."""
    term = _term(move.target)
    source, target = (_mine(devices, layout, move) for layout in (move.source, move.target))
    out = piece.local.new_full([size for _, size in target], NEUTRAL[term])
    part(out, target, source).copy_(piece.local)
    divided = {axis for axes in move.source.divided for axis in axes}
    same = tuple(axis for axis in move.axes if axis not in divided)
    parted = prod(devices.sizes[axis] for axis in move.axes if axis in divided) if term == "avg" else 1
    return _as_term(out * parted if parted > 1 else out, term, same, devices)


def _as_term(local: torch.Tensor, term: Reduction, axes: tuple[int, ...], devices: Devices) -> torch.Tensor:
    if term in ("avg", "max", "min"):  # of equal numbers these are the number itself
        return local
    return local if not any(devices.at[axis] for axis in axes) else torch.full_like(local, NEUTRAL[term])


def _term(layout: Layout) -> Reduction:
    return next(term for term in layout.terms if term)


MOVES: Final[Mapping[str, Callable[[Devices, Piece, Move], torch.Tensor]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "slice": _slice,
    "fill": _fill,
}
"""Kind of step -> what this device does in it."""
