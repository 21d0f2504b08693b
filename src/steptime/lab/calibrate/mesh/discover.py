"""From measured links to a mesh: nested groups, rails or a torus, whichever explains the links best."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from steptime.errors import first_few, shorten
from steptime.hardware.records import AxisKind, Mesh, MeshAxis
from steptime.lab.calibrate.mesh.faults import LEAST_FACTOR, LEAST_SIGMA, Faults, find_faults
from steptime.lab.calibrate.mesh.groups import LARGE, Tree, partition
from steptime.lab.calibrate.mesh.hierarchy import LEAST_EVIDENCE, Chain, find_chain, least_gap
from steptime.lab.calibrate.mesh.layout import Fit, Layout, expected, fit
from steptime.lab.calibrate.mesh.links import Links
from steptime.lab.calibrate.mesh.optional import scipy_module
from steptime.lab.calibrate.mesh.prepare import Prepared, prepare, refilled
from steptime.lab.calibrate.mesh.rails import with_rails
from steptime.lab.calibrate.mesh.regress import Speed, class_speeds
from steptime.lab.calibrate.mesh.torus import best_torus
from steptime.num import Array, divisors

#: Times that pairs without a measurement are filled in from the layout and the search is repeated.
REFILLS = 3
#: So few devices are always compared with a torus: what groups leave unexplained of it is too little to show.
ALWAYS_TORUS = 64
#: Share of the pairs that has to be measured; with fewer the confidence is one half at most.
LEAST_OBSERVED = 0.65
#: Devices per group up to which rails are looked for in a large mesh that nothing else explains.
MOST_PER_NODE = 16
#: Up to so many devices two kinds of links in one class are looked for: links of a class, smallest share of the rarer
#: kind, share of the variance that the kinds tell.
FEW_DEVICES = 64
LEAST_LINKS = 6
LEAST_OF_A_KIND = 0.1
TOLD_BY_KINDS = 0.95
#: Share of the links that may be broken before they are a pattern.
MOST_BROKEN = 0.25
#: Largest confidence that is told: no test of ours could show more.
MOST_CONFIDENT = 0.999
#: A device and its number, as most systems name them.
NUMBERED = re.compile(r"(.*?)(\d{1,9})")
#: One in so many numbers may be missing from a numbering.
MOST_SKIPPED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best layout, and the log odds of the nearest decision against it."""

    fitted: Fit
    faults: Faults
    margin: float
    structured: bool


def discover(links: Links) -> Mesh:
    """The mesh whose axes have the most similar links.

    Args:
        links: measured latency, bandwidth or time of messages between pairs of devices.

    Raises:
        UserError: too few devices, devices that no link joins, or SciPy is missing.
    """
    prepared = prepare(links)
    found = _search(prepared, links.names)
    for _ in range(REFILLS if prepared.missing.any() else 0):
        prepared = refilled(prepared, expected(found.fitted), found.faults.sigma)
        found = _search(prepared, links.names)
    return _mesh(links, prepared, found)


def _search(prepared: Prepared, names: Sequence[str]) -> _Found:
    """Nested groups, then rails between them; a torus and rails over other groups where these leave a pattern."""
    distances, observed = prepared.clipped, prepared.observed
    chain = find_chain(distances, np.arange(len(distances))[None])
    nested = fit(nested_layout(chain, len(distances)), distances, observed)
    margins = [*(e - LEAST_EVIDENCE for e in chain.evidence), *(LEAST_EVIDENCE - d for d in chain.doubts)]
    railed = with_rails(nested, distances, observed)
    if railed is not None:
        margins.append(railed.score - nested.score)
    found = _judged(prepared, railed or nested, min(margins, default=math.inf), names)
    if found.structured or len(distances) <= ALWAYS_TORUS:
        found = _better(prepared, found, best_torus(distances, observed), names)
    if found.structured or (railed is not None and len(distances) <= LARGE):
        found = _better(prepared, found, _railed_otherwise(distances, observed), names)
    return found


def _judged(prepared: Prepared, fitted: Fit, margin: float, names: Sequence[str]) -> _Found:
    faults = find_faults(prepared, fitted, names)
    pattern = structured(faults.rest) or two_kinds(fitted.layout, faults.rest, prepared.missing | faults.broken_mask)
    many = faults.unexplained > MOST_BROKEN
    return _Found(fitted=fitted, faults=faults, margin=margin, structured=pattern or many)


def _better(prepared: Prepared, found: _Found, other: Fit | None, names: Sequence[str]) -> _Found:
    """The one that explains more; the difference is the margin of a newcomer, and may lower that of what stands."""
    if other is None:
        return found
    margin = other.score - found.fitted.score
    if margin > 1e-6:
        return _judged(prepared, other, margin, names)
    if other.layout.shape == found.fitted.layout.shape:
        return found
    return replace(found, margin=min(found.margin, -margin))


def _railed_otherwise(distances: Array, observed: float) -> Fit | None:
    """The best rails over groups of any size: strong rails can hide the groups from a search for nested groups."""
    count = len(distances)
    sizes = [size for size in divisors(count)[1:-1] if count <= LARGE or size <= MOST_PER_NODE]
    if not sizes:
        return None
    tree = Tree(distances)

    def railed(chain: Chain) -> Fit | None:
        return with_rails(fit(nested_layout(chain, count), distances, observed), distances, observed)

    found = []
    for size in sizes:
        groups = partition(distances, np.arange(count)[None], size, tree)[0]
        one = railed(Chain(sizes=(size,), order=groups, evidence=(), doubts=()))
        if one is not None:
            found.append((one, groups))
    if not found:
        return None
    best, groups = max(found, key=lambda pair: pair[0].score)
    inner = find_chain(distances, groups)
    finer = railed(replace(inner, sizes=(*inner.sizes, groups.shape[1]))) if inner.sizes else None
    return finer if finer is not None and finer.score > best.score else best


def nested_layout(chain: Chain, devices: int) -> Layout:
    """Nested groups as a layout."""
    bounds = (1, *chain.sizes, devices)
    shape = tuple(outer // inner for inner, outer in pairwise(bounds))
    symmetries = 0.0
    for size in shape:
        symmetries = size * symmetries + math.lgamma(size + 1)
    return Layout(
        kind="nested", shape=shape, order=chain.order.reshape(-1), evidence=chain.evidence,
        log_assignments=math.lgamma(devices + 1) - symmetries,
    )  # fmt: skip


def structured(rest: Array) -> bool:
    r"""Whether more than noise is left.

    The largest eigenvalue of a symmetric matrix of noise with spread $\sigma$ is near $2 \sigma \sqrt{n}$ and
    strays by about $\sigma n^{-1/6}$ (Tracy and Widom 1994); what lies clearly above has a pattern.
    """
    count = len(rest)
    if count < 5:
        return False
    sigma = float(np.sqrt(np.square(rest, dtype=np.float64).sum() / (count * (count - 1))))
    if sigma < 1e-3:
        return False
    capped = np.clip(rest, -4 * sigma, 4 * sigma)
    if count <= 512:
        top = float(np.abs(np.linalg.eigvalsh(capped)[[0, -1]]).max())
    else:
        eigsh = scipy_module("scipy.sparse.linalg").eigsh
        start = np.random.default_rng(0).normal(size=count)
        top = float(np.abs(eigsh(capped, k=1, which="LM", v0=start, tol=1e-2, return_eigenvectors=False)).max())
    return bool(top > sigma * (2 * math.sqrt(count) + 5 * count ** (-1 / 6)))


def two_kinds(layout: Layout, rest: Array, skipped: Array) -> bool:
    """Whether links that should be alike are of two kinds: a tenth or more of a class is apart from the others.

    Their means are a factor of 1.5 apart or more, and tell 95 % of the variance. Of few devices, where eigenvalues
    (:func:`structured`) show nothing.
    """
    count = len(rest)
    if count > FEW_DEVICES:
        return False
    classes = layout.class_rows(0, count)
    used = np.triu(~skipped[layout.order][:, layout.order], 1)
    values = rest[layout.order][:, layout.order]
    return any(_bimodal(np.sort(values[used & (classes == each)])) for each in np.unique(classes[used]))


def _bimodal(values: Array) -> bool:
    """Whether sorted numbers fall into two kinds (:func:`two_kinds`)."""
    count = len(values)
    fewest = max(2, math.ceil(LEAST_OF_A_KIND * count))
    if count < LEAST_LINKS:
        return False
    low = np.arange(fewest, count - fewest + 1)
    sums = np.cumsum(values)
    gaps = (sums[-1] - sums[low - 1]) / (count - low) - sums[low - 1] / low
    between = gaps**2 * low * (count - low) / count**2
    best = int(np.argmax(between))
    return bool(gaps[best] > math.log(LEAST_FACTOR) and between[best] > TOLD_BY_KINDS * np.var(values))


def _mesh(links: Links, prepared: Prepared, found: _Found) -> Mesh:
    layout, faults = found.fitted.layout, found.faults
    axes = _axes(links, found)
    by_speed = _axis_order(layout, found.fitted)
    places = np.empty((len(layout.order), len(layout.shape)), dtype=np.int64)
    places[layout.order] = np.stack(np.unravel_index(np.arange(len(layout.order)), layout.shape, order="F"), axis=1)
    skipped = skipped_names(links.names)
    notes = (*_notes(prepared, found), *_holes(skipped))
    most = MOST_CONFIDENT if prepared.observed >= LEAST_OBSERVED and not skipped else 0.5
    confidence = min(most, 1 / (1 + math.exp(-min(found.margin, 50.0))))
    return Mesh(
        axes=tuple(axes[i] for i in by_speed), devices=links.names,
        coordinates=tuple(tuple(int(p) for p in row) for row in places[:, by_speed]),
        confidence=confidence * (0.5 if found.structured else 1.0), noise=found.faults.noise,
        broken_links=faults.broken, asymmetric_links=faults.asymmetric, slow_devices=faults.slow_devices,
        missing_pairs=int(prepared.missing.sum()) // 2, notes=notes,
    )  # fmt: skip


def _classes(layout: Layout) -> tuple[list[int], list[int | None]]:
    """Of each axis the class of its links, and the class to compare them with besides: off the rail, or two hops."""
    own: list[int] = []
    other: list[int | None] = []
    scale = 1
    for axis, size in enumerate(layout.shape):
        if layout.kind == "torus":
            own.append(scale)
            other.append(2 * scale if size >= 4 else None)
            scale *= size // 2 + 1
        elif layout.rail_axis is not None and axis >= layout.rail_axis:
            own.append(axis + len(layout.shape))
            other.append(axis)
        else:
            own.append(axis)
            other.append(None)
    return own, other


def _axis_order(layout: Layout, fitted: Fit) -> list[int]:
    """Axes from fast to slow; those of a torus whose links are alike stay in order of size."""
    own, _ = _classes(layout)
    cost = fitted.means[own]
    if layout.kind == "torus" and np.ptp(cost) < least_gap(fitted.sigma):
        return list(range(len(own)))
    return [int(i) for i in np.argsort(cost, kind="stable")]


def _axes(links: Links, found: _Found) -> list[MeshAxis]:
    """Speeds of every axis, in the order of the layout."""
    fitted, layout = found.fitted, found.fitted.layout
    own, other = _classes(layout)
    across = [c if c is not None and layout.kind == "rails" else None for c in other]
    wanted = [*own, *(c for c in across if c is not None)]
    speeds = class_speeds(links, layout, found.faults.broken_mask, wanted)
    crossing = iter(speeds[len(own) :])
    noise = max(found.faults.noise, LEAST_SIGMA)
    slower_than = {slower: axis for axis, slower in pairwise(_axis_order(layout, fitted))}
    out = []
    for axis, size in enumerate(layout.shape):
        base = own[slower_than[axis]] if axis in slower_than else None
        gap = None if base is None else float(fitted.means[own[axis]] - fitted.means[base])
        extra = other[axis]
        more = None if extra is None else math.exp(float(fitted.means[extra] - fitted.means[own[axis]]))
        cross = next(crossing) if across[axis] is not None else Speed()
        speed = speeds[axis]
        out.append(
            MeshAxis(
                size=size, kind=_kind(layout, axis), links=int(fitted.links[own[axis]]), latency_s=speed.latency_s,
                latency_error_s=speed.latency_error_s, Bps=speed.Bps, Bps_error=speed.Bps_error,
                step=None if gap is None else math.exp(gap),
                separation=None if gap is None else gap / noise,
                growth=more if layout.kind == "torus" else None, cross_latency_s=cross.latency_s,
                cross_Bps=cross.Bps, cross_step=more if layout.kind == "rails" else None,
            )
        )  # fmt: skip
    return out


def _kind(layout: Layout, axis: int) -> AxisKind:
    if layout.kind == "torus":
        return AxisKind.RING if layout.shape[axis] > 3 else AxisKind.SWITCH
    if layout.rail_axis is not None and axis >= layout.rail_axis:
        return AxisKind.RAIL
    return AxisKind.SWITCH


def skipped_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names that a numbering leaves out: devices of which nothing was measured, because a rank died, say.

    None if the names are not numbered, or if so many are missing that the numbers mean something else.

    >>> skipped_names(["gpu0", "gpu1", "gpu3", "gpu4", "gpu5", "gpu6", "gpu7", "gpu8"])
    ('gpu2',)
    """
    found = [NUMBERED.fullmatch(name) for name in names]
    if any(one is None for one in found) or len({one[1] for one in found if one}) > 1:
        return ()
    present = {int(one[2]) for one in found if one}
    low, high = min(present), max(present)
    if high - low + 1 - len(present) > max(1, len(names) // MOST_SKIPPED):
        return ()
    prefix = next(one[1] for one in found if one)
    return tuple(f"{prefix}{number}" for number in range(low, high) if number not in present)


def _holes(skipped: Sequence[str]) -> tuple[str, ...]:
    if not skipped:
        return ()
    missing = first_few([shorten(name, 40) for name in skipped], 3)
    return (f"the names skip {missing}: if it exists, it was not measured, and a mesh with a hole is not found",)


def _notes(prepared: Prepared, found: _Found) -> tuple[str, ...]:
    out = []
    if found.structured:
        out.append("the links have a pattern that no mesh of equal groups, rails or rings explains")
    if prepared.observed < 1:
        out.append(f"{1 - prepared.observed:.0%} of the pairs were not measured; the mesh stands in for them")
    if found.margin < 3:
        out.append("another shape explains the links nearly as well; measure more sizes or repeat")
    if found.faults.one_sided:
        out.append(f"most links are slower one way than the other, by a factor of {found.faults.one_sided:.1f}")
    if found.faults.unlisted:
        out.append(f"{found.faults.unlisted} more odd links are not listed")
    return tuple(out)
