"""Equal groups: partitions of devices into groups of one size with the smallest distances inside."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from steptime.num import Array
from steptime.registry import needed

#: Most partitions that are tried one by one.
MAX_ENUMERATED = 16_000
#: Most sweeps of exchanges.
MAX_SWEEPS = 40
#: Devices beyond which there are fewer sweeps, because the last exchanges decide nothing there.
MANY, FEW_SWEEPS = 256, 10
#: Devices beyond which only misplaced ones are exchanged, because averages over many are good.
LARGE = 1024


def log_partitions(devices: int, group: int) -> float:
    r"""Natural logarithm of the number of partitions of $m$ devices into groups of $g$.

    $$\ln \frac{m!}{(g!)^{m/g}\,(m/g)!}$$

    >>> round(math.exp(log_partitions(4, 2)))
    3
    """
    count = devices // group
    return math.lgamma(devices + 1) - count * math.lgamma(group + 1) - math.lgamma(count + 1)


def partition(distances: Array, blocks: Array, group: int, tree: Tree | None = None) -> Array:
    """Splits every block of devices into groups of one size.

    Args:
        distances: symmetric matrix, zero on the diagonal.
        blocks: devices of each block, one block per row.
        group: devices per group; divides the length of a row.
        tree: of the devices, if there is one block and the caller has it.

    Returns:
        devices by block, group and place: shape ``(blocks, row / group, group)``.
    """
    length = blocks.shape[1]
    if log_partitions(length, group) <= math.log(MAX_ENUMERATED):
        return _enumerated(distances, blocks, group)
    out = np.empty((len(blocks), length // group, group), dtype=np.int64)
    for i, block in enumerate(blocks):
        inner = distances if tree is not None else distances[np.ix_(block, block)]
        out[i] = block[_grown(inner, group, tree or Tree(inner))]
    return out


def _enumerated(distances: Array, blocks: Array, group: int) -> Array:
    """The best of all partitions, block by block."""
    table, inside = _all_partitions(blocks.shape[1], group)
    rows, columns = np.triu_indices(blocks.shape[1], 1)
    links = distances[blocks[:, rows], blocks[:, columns]]
    best = np.concatenate([np.argmin(part @ inside.T, axis=1) for part in np.array_split(links, 1 + len(links) // 64)])
    return np.take_along_axis(blocks[:, None, :], table[best].reshape(len(blocks), 1, -1), axis=2).reshape(
        len(blocks), -1, group
    )


@lru_cache(maxsize=64)
def _all_partitions(devices: int, group: int) -> tuple[Array, Array]:
    """Every partition as groups, and as a 0/1 matrix of the pairs that it keeps together."""
    from itertools import combinations

    found: list[list[tuple[int, ...]]] = []

    def extend(done: list[tuple[int, ...]], rest: tuple[int, ...]) -> None:
        if not rest:
            found.append(done)
            return
        for others in combinations(rest[1:], group - 1):
            members = (rest[0], *others)
            extend([*done, members], tuple(d for d in rest if d not in members))

    extend([], tuple(range(devices)))
    table = np.array(found, dtype=np.int64)
    label = np.empty((len(table), devices), dtype=np.int64)
    np.put_along_axis(label, table.reshape(len(table), -1), np.arange(devices)[None] // group, axis=1)
    rows, columns = np.triu_indices(devices, 1)
    return table, (label[:, rows] == label[:, columns]).astype(np.float64)


class Tree:
    """Average-linkage tree of a distance matrix; its children are listed by node."""

    def __init__(self, distances: Array) -> None:
        self.devices = len(distances)
        condensed = (
            needed("scipy.spatial.distance", "finding a mesh").squareform(distances, checks=False).astype(np.float64)
        )
        condensed -= condensed.min()
        merges = needed("scipy.cluster.hierarchy", "finding a mesh").linkage(condensed, "average")
        self.children = merges[:, :2].astype(np.int64)
        self.sizes = np.concatenate([np.ones(self.devices, dtype=np.int64), merges[:, 3].astype(np.int64)])

    def pieces(self, largest: int) -> list[Array]:
        """The largest subtrees of at most ``largest`` devices."""
        out: list[Array] = []
        stack = [len(self.sizes) - 1]
        while stack:
            node = stack.pop()
            if self.sizes[node] <= largest:
                out.append(self.leaves(node))
            else:
                stack.extend(self.children[node - self.devices])
        return out

    def leaves(self, node: int) -> Array:
        """Devices of a subtree."""
        found, stack = [], [int(node)]
        while stack:
            top = stack.pop()
            if top < self.devices:
                found.append(top)
            else:
                stack.extend(int(c) for c in self.children[top - self.devices])
        return np.array(found, dtype=np.int64)


def _grown(distances: Array, group: int, tree: Tree) -> Array:
    """Merges the nearest subtrees as long as they fit, fills the groups device by device, and exchanges devices."""
    count, pieces = len(distances) // group, tree.pieces(group)
    label = np.empty(len(distances), dtype=np.int64)
    for i, piece in enumerate(pieces):
        label[piece] = i
    label = _merged(group_sums(distances, label, len(pieces)), label, group)
    label = exchanged(distances, _filled(distances, label, group, count), count)
    return np.argsort(label, kind="stable").reshape(-1, group)


def group_sums(distances: Array, label: Array, count: int) -> Array:
    """Sum of the distances of each device to each group: shape ``(count, columns)``; no group may be empty."""
    order = np.argsort(label, kind="stable")
    return row_sums(distances[order], np.bincount(label, minlength=count))


def row_sums(rows: Array, sizes: Array) -> Array:
    """Sums of consecutive rows, ``sizes`` at a time. (NumPy's ``reduceat`` along rows is forty times slower.)"""
    if (sizes == sizes[0]).all():
        out: Array = rows.reshape(len(sizes), int(sizes[0]), rows.shape[1]).sum(axis=1)
        return out
    ends = np.cumsum(sizes)
    return np.stack([rows[end - size : end].sum(axis=0) for end, size in zip(ends, sizes, strict=True)])


def _merged(sums: Array, label: Array, group: int) -> Array:
    """Average linkage between pieces under a limit of size."""
    count = len(sums)
    order = np.argsort(label, kind="stable")
    size = np.bincount(label, minlength=count).astype(np.float64)
    total = row_sums(sums.T[order], np.bincount(label, minlength=count)).T.astype(np.float64)
    target = np.arange(count)

    def means(rows: Array) -> Array:
        allowed = (size[rows, None] + size[None] <= group) & (size[None] > 0) & (size[rows, None] > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(allowed, total[rows] / (size[rows, None] * size[None]), np.inf)
        out[np.arange(len(rows)), rows] = np.inf
        return out

    near = means(np.arange(count))
    best, value = near.argmin(axis=1), near.min(axis=1)
    del near
    while np.isfinite(value[a := int(value.argmin())]):
        b = int(best[a])
        total[a] += total[b]
        total[:, a] += total[:, b]
        size[a], size[b] = size[a] + size[b], 0
        target[target == b] = a
        value[b] = np.inf
        stale = np.flatnonzero(((best == a) | (best == b) | (np.arange(count) == a)) & np.isfinite(value))
        stale = np.union1d(stale, [a])
        fresh = means(stale)
        best[stale], value[stale] = fresh.argmin(axis=1), fresh.min(axis=1)
    out: Array = target[label]
    return out


def _filled(distances: Array, label: Array, group: int, count: int) -> Array:
    """Keeps the largest groups and gives the devices of the others to the nearest that has room."""
    names, label = np.unique(label, return_inverse=True)
    size = np.bincount(label)
    kept = np.argsort(-size, kind="stable")[:count]
    place = np.full(len(names), -1)
    place[kept] = np.arange(count)
    label = place[label]
    loose = np.flatnonzero(label < 0)
    if not len(loose):
        return label
    size = size[kept].astype(np.float64)
    seeded = np.flatnonzero(label >= 0)
    mean = group_sums(distances[np.ix_(seeded, loose)], label[seeded], count) / size[:, None]
    while len(loose):
        mean[size >= group] = np.inf
        to, which = np.unravel_index(int(mean.argmin()), mean.shape)
        label[loose[which]] = to
        size[to] += 1
        loose = np.delete(loose, which)
        mean = np.delete(mean, which, axis=1)
    return label


def exchanged(distances: Array, label: Array, count: int) -> Array:
    r"""Exchanges devices between groups as long as the distances inside become smaller.

    Exchanging $i$ of group $A$ and $j$ of group $B$ changes the sum inside by
    $S_{iB} + S_{jA} - S_{iA} - S_{jB} - 2 d_{ij}$ with $S_{iG} = \sum_{k \in G} d_{ik}$. A sweep takes the best
    exchange of every pair of groups that no better one has touched.
    """
    label = label.copy()
    near = group_sums(distances, label, count)
    for _ in range(MAX_SWEEPS if len(label) <= MANY else FEW_SWEEPS):
        some = np.arange(len(label)) if len(label) <= LARGE else _misplaced(near, label)
        if not 1 < len(some) <= LARGE or not _sweep(distances, near, label, some):
            break
    return label


def _misplaced(near: Array, label: Array) -> Array:
    """Devices that are nearer to another group than to their own; of many devices only these are exchanged."""
    group = len(label) / len(near)
    own = near[label, np.arange(len(label))] / max(group - 1, 1)
    out: Array = np.flatnonzero((near / group < own - 1e-6 * np.abs(own)).any(axis=0))
    return out


def _sweep(distances: Array, near: Array, label: Array, some: Array) -> bool:
    """Makes one sweep of exchanges among ``some`` devices and updates ``near`` and ``label``; true if it made any."""
    groups = label[some]
    own = near[groups, some]
    gain = near[np.ix_(groups, some)].T - own[:, None]
    gain = gain + gain.T
    gain -= 2 * distances[np.ix_(some, some)]
    gain[groups[:, None] == groups[None]] = np.inf
    partner, change = gain.argmin(axis=1), gain.min(axis=1)
    touched: set[int] = set()
    for i in np.argsort(change, kind="stable"):
        if change[i] >= -1e-9 * abs(own[i]) - 1e-12:
            break
        a, b = int(groups[i]), int(groups[partner[i]])
        if a not in touched and b not in touched:
            one, two = some[i], some[partner[i]]
            label[one], label[two] = b, a
            near[a] += distances[two] - distances[one]
            near[b] += distances[one] - distances[two]
            touched |= {a, b}
    return bool(touched)
