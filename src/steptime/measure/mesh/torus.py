r"""Tori: rings along every axis, found by the slowest waves of the distance matrix.

On a torus a distance depends only on the hops along each axis, so the eigenvectors of the matrix are waves. The
longest wave of an axis of $a$ places puts every device on a circle, at one of $a$ equal angles. Where several axes
have nearly the same eigenvalue their waves come out mixed; then the quadratic forms $Q$ with $x_i^T Q x_i$ equal for
all devices tell the circles apart, since each circle has such a form and generic sums of them have the circles'
planes as eigenspaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import combinations, permutations

import numpy as np

from steptime.measure.mesh.groups import group_sums, row_sums
from steptime.measure.mesh.layout import Fit, Layout, fit
from steptime.num import Array, divisors
from steptime.registry import needed

#: Fewest devices of a torus that can be told from groups.
LEAST_DEVICES = 5
#: Larger tori are found in one pass; smaller ones are improved by reassignment.
MOST_REASSIGNED = 512
#: Cost of two hops over one hop below which an axis is no ring.
LEAST_GROWTH = 1.1
#: Misfit below which a torus is taken without looking at its waves one by one.
GOOD_MISFIT = 0.3
#: Misfit beyond which a large torus is dropped before all of its axes are found.
WORST_MISFIT = 0.6
#: Most tori whose links are fitted.
MOST_FITTED = 8
#: Devices, about, that are fitted on circles when there are many ways to choose the circles.
MOST_SAMPLED = 1024
#: Random sums of quadratic forms that are tried.
TRIES = 6


@dataclass(frozen=True, slots=True)
class _Axis:
    """Places of all devices along one axis, as found."""

    size: int
    place: Array
    misfit: float


@dataclass(frozen=True, slots=True)
class _Placement:
    """Places of all devices along every axis of a shape."""

    shape: tuple[int, ...]
    axes: tuple[_Axis, ...]

    @property
    def misfit(self) -> float:
        """Mean misfit of the axes, plus the share of devices without a place of their own."""
        return _misfit(self.axes) + 1.0 - len(np.unique(_ranks(self))) / len(self.axes[0].place)


def _ranks(found: _Placement) -> Array:
    """Place of every device as one number; devices may share one."""
    left = list(found.axes)
    rank = np.zeros(len(left[0].place), dtype=np.int64)
    stride = 1
    for size in found.shape:
        axis = next(a for a in left if a.size == size)
        left.remove(axis)
        rank += stride * axis.place
        stride *= size
    return rank


def shapes(devices: int, most_axes: int = 3) -> list[tuple[int, ...]]:
    """Shapes of tori: up to three axes of two or more places, the largest of at least four.

    >>> shapes(16)
    [(16,), (2, 8), (4, 4), (2, 2, 4)]
    """

    def factors(rest: int, least: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            if rest >= least:
                yield (rest,)
            return
        for first in divisors(rest):
            if first >= least and first**axes <= rest:
                for others in factors(rest // first, first, axes - 1):
                    yield (first, *others)

    return [shape for axes in range(1, most_axes + 1) for shape in factors(devices, 2, axes) if shape[-1] >= 4]


def best_torus(distances: Array, observed: float = 1.0) -> Fit | None:
    """The torus that explains the distances best; None if there is none."""
    count = len(distances)
    if count < LEAST_DEVICES:
        return None
    waves, tried = _Waves(distances), []
    for stages in _compositions(3):
        tried += [found for shape in shapes(count) if (found := _placement(shape, stages, waves)) is not None]
        tried.sort(key=lambda found: found.misfit)
        if stages == (3,) and tried and tried[0].misfit < GOOD_MISFIT:
            break
    best = None
    for found in tried[: MOST_FITTED if count <= MOST_REASSIGNED else 2]:
        layout = Layout(
            kind="torus",
            shape=found.shape,
            order=_placed(found),
            log_assignments=math.lgamma(count + 1) - _log_symmetries(found.shape),
        )
        fitted = fit(layout, distances, observed)
        if _is_torus(fitted) and (best is None or fitted.score > best.score):
            best = fitted
    return None if best is None else _reassigned(best, distances, observed)


def _placement(shape: tuple[int, ...], stages: Sequence[int], waves: _Waves) -> _Placement | None:
    """Places of the devices on a shape, with the axes found ``stages`` at a time; None if that finds none."""
    known: list[_Axis] = []
    rest = list(shape)
    for many in stages:
        if not rest:
            return None
        found = _axes(waves, known, rest, min(many, len(rest)))
        if found is None or (len(waves.distances) > MOST_REASSIGNED and _misfit(found) > WORST_MISFIT):
            return None
        known += found
        for axis in found:
            rest.remove(axis.size)
    return None if rest else _Placement(shape, tuple(known))


def _log_symmetries(shape: Sequence[int]) -> float:
    """Logarithm of the number of renamings that keep every distance."""
    turns = sum(math.log(2 * size if size > 2 else 2) for size in shape)
    return turns + sum(math.lgamma(list(shape).count(size) + 1) for size in set(shape))


def _is_torus(fitted: Fit) -> bool:
    """True if cost grows with hops along every axis that is long enough to show it."""
    stride = 1
    for size in fitted.layout.shape:
        if size >= 4 and fitted.means[2 * stride] - fitted.means[stride] < math.log(LEAST_GROWTH):
            return False
        stride *= size // 2 + 1
    return True


class _Waves:
    """Leading eigenvectors of minus the distances, each set computed once."""

    def __init__(self, distances: Array) -> None:
        self.distances = distances
        self.known: dict[tuple[bytes, ...], Array] = {}

    def leading(self, count: int, without: Sequence[_Axis]) -> Array:
        """The first ``count`` eigenvectors, after the part that the axes ``without`` explain is removed."""
        key = tuple(sorted(axis.place.tobytes() for axis in without))
        if key not in self.known:
            rest = _unexplained(self.distances, without) if without else self.distances
            self.known[key] = _leading(rest, min(6, len(rest) - 1))
        return self.known[key][:, :count]


def _leading(distances: Array, count: int) -> Array:
    """Eigenvectors of minus the centred distances with the largest eigenvalues, scaled to mean square one."""
    size = len(distances)
    means = distances.mean(axis=0)
    centred = means[:, None] + means[None] - distances - means.mean()
    centred -= np.abs(centred).mean()  # The constant vector goes to the far end of the spectrum.
    if size <= MOST_REASSIGNED or count >= size - 1:
        _, vectors = np.linalg.eigh(centred)
        vectors = vectors[:, ::-1][:, :count]
    else:
        start = np.random.default_rng(0).normal(size=size).astype(centred.dtype)
        eigsh = needed("scipy.sparse.linalg", "finding a mesh").eigsh
        values, vectors = eigsh(centred, k=count, which="LA", v0=start, tol=1e-3)
        vectors = vectors[:, np.argsort(-values)]
    out: Array = vectors * math.sqrt(size)
    return out


def _unexplained(distances: Array, axes: Sequence[_Axis]) -> Array:
    """Distances less their mean over all pairs with the same hops along the axes."""
    label, places = np.zeros(len(distances), dtype=np.int64), 1
    for axis in axes:
        label, places = label * axis.size + axis.place, places * axis.size
    used, label = np.unique(label, return_inverse=True)
    key, classes = np.zeros((len(used), len(used)), dtype=np.int64), 1
    for axis in reversed(axes):
        place, used = used % axis.size, used // axis.size
        apart = np.abs(place[:, None] - place[None])
        key += classes * np.minimum(apart, axis.size - apart)
        classes *= axis.size // 2 + 1
    held = np.bincount(label)
    sums = row_sums(group_sums(distances, label, len(held)).T[np.argsort(label, kind="stable")], held)
    links = held[:, None] * held[None] - np.diag(held)
    total = np.bincount(key.reshape(-1), weights=sums.reshape(-1), minlength=classes)
    count = np.bincount(key.reshape(-1), weights=links.reshape(-1), minlength=classes)
    means = (total / np.maximum(count, 1)).astype(distances.dtype)[key]
    out: Array = distances - means[label][:, label]
    np.fill_diagonal(out, 0.0)
    return out


def _compositions(count: int) -> list[tuple[int, ...]]:
    """Ways to write a number as an ordered sum.

    >>> _compositions(3)
    [(3,), (1, 2), (2, 1), (1, 1, 1)]
    """
    if count == 0:
        return [()]
    return sorted(((first, *rest) for first in range(1, count + 1) for rest in _compositions(count - first)), key=len)


def _axes(waves: _Waves, known: Sequence[_Axis], rest: Sequence[int], many: int) -> list[_Axis] | None:
    """The ``many`` axes out of the ``rest`` that fit the leading waves best."""
    step = max(1, len(waves.distances) // MOST_SAMPLED)
    best = None
    for sizes in sorted(set(combinations(rest, many))):
        dims = sum(2 if size > 2 else 1 for size in sizes)
        if dims >= len(waves.distances):
            continue
        for points in _unmixed(waves.leading(dims, known), sizes):
            found = cache(partial(_on_axis, points[::step]))  # assignments share their axes
            for columns in _assignments(sizes):
                misfit = _misfit([found(*each) for each in zip(columns, sizes, strict=True)])
                if best is None or misfit < best[0]:
                    best = misfit, points, columns, sizes
    if best is None:
        return None
    _, points, columns, sizes = best
    return [_on_axis(points, *each) for each in zip(columns, sizes, strict=True)]


def _misfit(axes: Sequence[_Axis]) -> float:
    return sum(axis.misfit for axis in axes) / len(axes)


@lru_cache(maxsize=64)
def _assignments(sizes: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Ways to give columns to axes: two to each ring, one to each axis of two places."""
    dims = [2 if size > 2 else 1 for size in sizes]
    out = set()
    for order in permutations(range(sum(dims))):
        starts = np.cumsum([0, *dims])
        out.add(tuple(tuple(sorted(order[a : a + n])) for a, n in zip(starts, dims, strict=False)))
    return sorted(out)


def _unmixed(points: Array, sizes: Sequence[int]) -> Iterator[Array]:
    """The points turned so that circles lie in coordinate planes."""
    dims = points.shape[1]
    yield points
    if len(sizes) == 1 and sizes[0] != 4:
        return
    rows, columns = np.triu_indices(dims)
    products = points[:, rows] * points[:, columns]
    products -= products.mean(axis=0)
    _, forms = np.linalg.eigh(products.T @ products)
    forms = forms[:, : sum(2 if size == 4 else 1 for size in sizes)].T
    random = np.random.default_rng(0)
    for weights in random.normal(size=(TRIES, len(forms))):
        form = np.zeros((dims, dims))
        form[rows, columns] = weights @ forms
        _, turn = np.linalg.eigh(form + form.T)
        yield points @ turn


def _on_axis(points: Array, columns: Sequence[int], size: int) -> _Axis:
    """Places along an axis from points on a circle (or on two ends) in some columns, and how badly they fit."""
    if size == 2:
        ends = points[:, columns[0]]
        place = (ends > 0).astype(np.int64)
        misfit = float(np.mean((np.abs(ends) - 1) ** 2))
    else:
        z = points[:, columns[0]] + 1j * points[:, columns[1]]
        radius = np.abs(z)
        unit = z / np.maximum(radius, 1e-12)
        phase = np.angle(np.mean(unit**size)) / size
        turns = (np.angle(unit) - phase) * size / (2 * math.pi)
        place = np.round(turns).astype(np.int64) % size
        misfit = float(np.mean((turns - np.round(turns)) ** 2) * 12 + np.var(radius) / np.mean(radius) ** 2)
    uneven = np.abs(np.bincount(place, minlength=size) - len(place) / size).sum() / len(place)
    return _Axis(size, place, misfit + float(uneven))


def _placed(found: _Placement) -> Array:
    """One device per place; devices that fell on one place are spread over the places left empty."""
    rank = _ranks(found)
    order = np.full(len(rank), -1)
    order[rank[::-1]] = np.arange(len(rank))[::-1]
    order[order < 0] = np.setdiff1d(np.arange(len(rank)), order)
    return order


def _reassigned(fitted: Fit, distances: Array, observed: float) -> Fit:
    """Puts every device on the place whose expected links are nearest to its own, as long as that helps."""
    if len(distances) > MOST_REASSIGNED:
        return fitted
    assign = needed("scipy.optimize", "finding a mesh").linear_sum_assignment
    for _ in range(8):
        order = fitted.layout.order
        expected = np.nan_to_num(fitted.means[fitted.layout.class_rows(0, len(order))])
        np.fill_diagonal(expected, 0.0)
        cost = np.square(expected).sum(axis=1)[None] - 2 * distances[:, order] @ expected.T
        _, place = assign(cost)
        trial = fit(replace(fitted.layout, order=np.argsort(place)), distances, observed)
        if trial.score <= fitted.score + 1e-9:
            break
        fitted = trial
    return fitted
