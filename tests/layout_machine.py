"""Devices with arrays that do what the steps of a route say, with what each of them has and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from steptime.sharding.moves import Layout

NEUTRAL = {"sum": 0.0, "max": -np.inf, "min": np.inf}
REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}
Coordinate = tuple[int, ...]
Arrays = dict[Coordinate, Any]
Block = tuple[slice, ...]


@dataclass(frozen=True)
class Devices:
    """A mesh of devices for tensors of one shape."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def all(self) -> list[Coordinate]:
        return list(product(*map(range, self.sizes)))

    def block(self, layout: Layout, device: Coordinate) -> Block:
        """Which part of the tensor a device has: the first axis divides first."""
        out = []
        for size, axes in zip(self.shape, layout.divided, strict=True):
            start = 0
            for axis in axes:
                assert size % self.sizes[axis] == 0
                size //= self.sizes[axis]
                start += size * device[axis]
            out.append(slice(start, start + size))
        return tuple(out)

    def groups(self, axes: Iterable[int]) -> Iterator[list[Coordinate]]:
        """Devices that differ along these axes only."""
        free = set(axes)
        found: dict[Any, list[Coordinate]] = {}
        for device in self.all():
            found.setdefault(tuple(c for a, c in enumerate(device) if a not in free), []).append(device)
        yield from found.values()

    # -- tensors ------------------------------------------------------------------------------------------------------

    def scatter(self, tensor: Any, layout: Layout, rng: np.random.Generator) -> Arrays:
        """The tensor in a layout; terms of reductions are random whole numbers, so that sums are exact."""
        terms = [axis for axis, term in enumerate(layout.terms) if term]
        out: Arrays = {}
        for group in self.groups(terms):
            out |= self._terms(tensor, layout, group, rng) if terms else {}
            for device in group if not terms else []:
                out[device] = tensor[self.block(layout, device)].copy()
        return self._alike(out, layout) if terms else out

    def _terms(self, tensor: Any, layout: Layout, group: list[Coordinate], rng: np.random.Generator) -> Arrays:
        kind = next(term for term in layout.terms if term)
        whole = tensor[self.block(layout, group[0])]
        if kind == "sum":
            parts = [rng.integers(-9, 9, whole.shape).astype(float) for _ in group[1:]]
            return dict(zip(group, [whole - sum(parts), *parts], strict=True))
        owner = rng.integers(0, len(group), whole.shape)
        away = rng.integers(1, 9, whole.shape) * (-1 if kind == "max" else 1)
        return {device: np.where(owner == n, whole, whole + away) for n, device in enumerate(group)}

    def _alike(self, arrays: Arrays, layout: Layout) -> Arrays:
        """Replicas have the same term."""
        whole = {axis for axis, placement in enumerate(layout.sharding) if placement.replicated}
        first = {d: tuple(0 if axis in whole else c for axis, c in enumerate(d)) for d in arrays}
        return {device: arrays[first[device]].copy() for device in arrays}

    def check(self, arrays: Arrays, tensor: Any, layout: Layout) -> None:
        """The devices have the tensor in that layout, exactly."""
        terms = [axis for axis, term in enumerate(layout.terms) if term]
        kind = next((term for term in layout.terms if term), "sum")
        for group in self.groups(terms):
            found = REDUCE[kind].reduce([arrays[device] for device in group])
            np.testing.assert_array_equal(found, tensor[self.block(layout, group[0])])
        alike = self._alike(arrays, layout)
        assert all(np.array_equal(alike[device], arrays[device]) for device in arrays)

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, kind: str, axes: Sequence[int], source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        """One step; every device sees the arrays of its group along the axes and no others."""
        out: Arrays = {}
        for group in self.groups(axes):
            out |= getattr(self, f"_{kind}")(group, source, target, {device: arrays[device] for device in group})
        return out

    def _within(self, inner: Block, outer: Block) -> Block:
        """A block in coordinates of one around it."""
        assert all(o.start <= i.start and i.stop <= o.stop for i, o in zip(inner, outer, strict=True)), (inner, outer)
        return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True))

    def _copy(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        return arrays

    def _slice(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        return {d: arrays[d][self._within(self.block(target, d), self.block(source, d))] for d in group}

    def _all_gather(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        out = {}
        for device in group:
            whole = self.block(target, device)
            result = np.full([s.stop - s.start for s in whole], np.nan)
            for other in group:
                at = self._within(self.block(source, other), whole)
                assert np.isnan(result[at]).all()
                result[at] = arrays[other]
            assert not np.isnan(result).any()
            out[device] = result
        return out

    def _all_reduce(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        kind = next(term for term in source.terms if term)
        assert len({str(self.block(source, device)) for device in group}) == 1
        total = REDUCE[kind].reduce(list(arrays.values()))
        return {device: total.copy() for device in group}

    def _reduce_scatter(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        total = self._all_reduce(group, source, target, arrays)
        parts = {str(self.block(target, device)) for device in group}
        assert len(parts) == len(group)
        return self._slice(group, source, target, total)

    def _all_to_all(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        """Each sends an equal part to each, itself among them."""
        out = {}
        for device in group:
            wanted = self.block(target, device)
            result = np.full([s.stop - s.start for s in wanted], np.nan)
            for other in group:
                has = self.block(source, other)
                common = tuple(
                    slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(has, wanted, strict=True)
                )
                assert np.prod([s.stop - s.start for s in common]) * len(group) == arrays[other].size
                result[self._within(common, wanted)] = arrays[other][self._within(common, has)]
            assert not np.isnan(result).any()
            out[device] = result
        return out

    def _permute(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        """Each sends all it has to one; which one follows from what the layouts say each has."""
        senders = sorted(group, key=lambda d: (str(self.block(source, d)), self._term(source, d), d))
        receivers = sorted(group, key=lambda d: (str(self.block(target, d)), self._term(target, d), d))
        for one, other in zip(senders, receivers, strict=True):
            assert self.block(source, one) == self.block(target, other)
        return {other: arrays[one] for one, other in zip(senders, receivers, strict=True)}

    def _term(self, layout: Layout, device: Coordinate) -> tuple[int, int]:
        """Number of the term that a device has."""
        number = 0
        for axis, term in enumerate(layout.terms):
            number = number * self.sizes[axis] + device[axis] if term else number
        return number, 0

    def _fill(self, group: Any, source: Layout, target: Layout, arrays: Arrays) -> Arrays:
        """Own pieces stay; the rest, and of replicas all but the first, becomes the neutral element."""
        kind = next(term for term in target.terms if term)
        out = {}
        for device in group:
            whole = self.block(target, device)
            out[device] = np.full([s.stop - s.start for s in whole], NEUTRAL[kind])
            new = zip(source.sharding, target.terms, device, strict=True)
            if all(at == 0 for placement, term, at in new if term and placement.replicated):
                out[device][self._within(self.block(source, device), whole)] = arrays[device]
        return out
