"""From measured links to a mesh: nested groups, rails or a torus, whichever explains the links best."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from steptime.errors import first_few, shorten
from steptime.hardware.records import AxisKind, Mesh, MeshAxis, OddLink
from steptime.measure.mesh.groups import LARGE, Tree, partition
from steptime.measure.mesh.layout import (
    LEAST_EVIDENCE,
    Chain,
    Fit,
    Layout,
    class_medians,
    expected,
    find_chain,
    fit,
    least_gap,
    residual,
    with_rails,
)
from steptime.measure.mesh.links import Links, Prepared, noise_threshold, prepare, refilled
from steptime.measure.mesh.torus import best_torus
from steptime.num import Array, divisors
from steptime.registry import needed

#: A link is odd only if it is slower by more than this, however quiet the others are.
LEAST_FACTOR = 1.5
#: Smallest spread of the links of a class that is assumed.
LEAST_SIGMA = 0.02
#: Standard deviation of normal numbers over the median of their magnitudes.
SPREAD = 1.4826
#: Odd links that are listed; the rest are counted.
MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Links and devices that do not fit the mesh."""

    broken: tuple[OddLink, ...]
    asymmetric: tuple[OddLink, ...]
    slow_devices: tuple[str, ...]
    broken_mask: Array
    """Pairs that are broken, of the whole matrix."""
    rest: Array
    """Log cost that the mesh leaves unexplained; zero for pairs that are broken or missing."""
    sigma: float
    """Robust spread of links about the mean of their kind; at least `LEAST_SIGMA`."""
    noise: float
    """Root mean square of ``rest`` over pairs that are neither broken nor missing."""
    unlisted: int
    one_sided: float | None
    """Usual factor between the directions of a pair, where most differ."""
    unexplained: float
    """Share of the pairs that are broken, without those of the device that has most of them."""


def find_faults(prepared: Prepared, fitted: Fit, names: Sequence[str]) -> Faults:
    """Compares every link with its class, and with its opposite direction.

    A link is broken if both directions are slower than the median of its class by more than
    $\\max(5, \\sqrt{2 \\ln n} + 1)$ times the robust spread (1.48 median absolute deviations) and by a factor of at
    least 1.5; asymmetric if the two directions differ by as much in terms of their own spread. Where most pairs differ
    by that factor from one direction to the other, all that do are asymmetric.
    """
    count = len(names)
    limit = noise_threshold(count * (count - 1) // 2)
    both = np.nan_to_num(prepared.both_ways)
    rest = residual(replace(fitted, means=class_medians(fitted, both, prepared.missing)), both)
    rest[prepared.missing] = 0.0
    difference = prepared.one_way - prepared.one_way.T
    np.nan_to_num(difference, copy=False)
    least = math.log(LEAST_FACTOR)
    sigma = _spread(rest)
    slow = rest - np.abs(difference) / 2 > max(limit * sigma, least)
    usual = _spread(difference)
    most = usual > SPREAD * least
    uneven = difference > (least if most else max(limit * usual, least))
    broken = _listed(np.triu(slow, 1), rest, names)
    asymmetric = _listed(uneven, difference, names)
    slow_of = slow.sum(axis=1)
    worst_hit = np.flatnonzero(slow_of > max(2, (count - 1) / 2))
    rest[slow] = 0.0
    left = count * (count - 1) - int(slow_of.sum()) - int(prepared.missing.sum())
    noise = math.sqrt(float(np.square(rest, dtype=np.float64).sum()) / max(left, 1))
    unlisted = int(slow_of.sum()) // 2 + int(uneven.sum()) - len(broken) - len(asymmetric)
    return Faults(
        broken=broken,
        asymmetric=asymmetric,
        slow_devices=tuple(names[int(i)] for i in worst_hit),
        broken_mask=slow,
        rest=rest,
        sigma=sigma,
        noise=noise,
        unlisted=unlisted,
        one_sided=math.exp(usual / SPREAD) if most else None,
        unexplained=float(slow_of.sum() - 2 * slow_of.max()) / max((count - 1) * (count - 2), 1),
    )


def _spread(values: Array) -> float:
    """Robust standard deviation of the entries off the diagonal."""
    step = max(1, len(values) // 1024)
    some = values[::step]
    some = some[some != 0]
    return max(LEAST_SIGMA, SPREAD * float(np.median(np.abs(some))) if len(some) else 0.0)


def _listed(mask: Array, excess: Array, names: Sequence[str]) -> tuple[OddLink, ...]:
    rows, columns = np.nonzero(mask)
    worst = np.argsort(-excess[rows, columns], kind="stable")[:MOST_LISTED]
    ends = [(int(rows[i]), int(columns[i])) for i in worst]
    return tuple(OddLink(source=names[a], target=names[b], factor=math.exp(float(excess[a, b]))) for a, b in ends)


#: A single message size gives the latency up to the first of these sizes, the bandwidth from the second on.
SMALL_BYTES = 4096.0
LARGE_BYTES = 2.0**20
#: Relative standard error beyond which a number is not reported.
WORST_ERROR = 0.5
#: Devices whose links are sampled, about.
MOST_ROWS = 512
#: Log error up to which the loss is quadratic.
LOSS_SCALE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Latency and bandwidth with their standard errors; None where the measurements do not determine it."""

    latency_s: float | None = None
    latency_error_s: float | None = None
    Bps: float | None = None
    Bps_error: float | None = None


def class_speeds(links: Links, layout: Layout, skipped: Array, wanted: Sequence[int]) -> list[Speed]:
    """Latency and bandwidth of some classes of links.

    Args:
        links: what was measured.
        layout: devices on places.
        skipped: pairs that do not count (broken ones), in the order of the devices.
        wanted: classes.
    """
    step = max(1, links.devices // MOST_ROWS)
    places = np.arange(0, links.devices, step)
    classes = np.concatenate([layout.class_rows(int(p), int(p) + 1) for p in places])
    rows = layout.order[places]
    classes[skipped[rows][:, layout.order]] = -1
    classes[np.arange(len(places)), places] = -1
    picked = [classes == number for number in wanted]
    found: list[list[tuple[str, float, Array]]] = [[] for _ in wanted]
    for quantity in links.quantities:
        values = quantity.values[rows][:, layout.order]
        for mask, samples in zip(picked, found, strict=True):
            logs = np.log(values[mask])
            samples.append((quantity.kind, quantity.size_bytes or 0.0, logs[np.isfinite(logs)]))
    return [speed(samples) for samples in found]


def speed(samples: Sequence[tuple[str, float, Array]]) -> Speed:
    """Latency and bandwidth of the links of one class, from logarithms of their measurements.

    Args:
        samples: of each quantity its kind (``seconds``, ``latency``, ``bandwidth``), the bytes of the message (of
            ``seconds``), and the logarithms.
    """
    samples = [sample for sample in samples if len(sample[2])]
    latencies = [_centre(logs) for kind, _, logs in samples if kind == "latency"]
    bandwidths = [_centre(logs) for kind, _, logs in samples if kind == "bandwidth"]
    times = sorted((size, *_centre(logs)) for kind, size, logs in samples if kind == "seconds")
    if len(times) == 1:
        size, seconds, error = times[0]
        if size <= SMALL_BYTES:
            latencies.append((seconds, error))
        elif size >= LARGE_BYTES:
            bandwidths.append((size / seconds, error))
    out = _regressed(np.array(times)) if len(times) > 1 else Speed()
    if latencies:
        value, error = latencies[0]
        out = Speed(latency_s=value, latency_error_s=value * error, Bps=out.Bps, Bps_error=out.Bps_error)
    if bandwidths:
        value, error = bandwidths[0]
        out = Speed(latency_s=out.latency_s, latency_error_s=out.latency_error_s, Bps=value, Bps_error=value * error)
    return out


def _centre(logs: Array) -> tuple[float, float]:
    r"""Median of the values, and its relative standard error $1.25\,\sigma / \sqrt{n}$ with a robust $\sigma$."""
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    return math.exp(middle), 1.25 * spread / math.sqrt(len(logs))


def _regressed(times: Array) -> Speed:
    """Robust fit of the median times in log space; rows of bytes, seconds, relative error of the seconds."""
    size, seconds, error = times.T
    scale = np.log(seconds)
    slope = max((seconds[-1] - seconds[0]) / (size[-1] - size[0]), seconds[-1] / size[-1] * 1e-3)

    def misfit(x: Array) -> Array:
        out: Array = np.log(np.exp(x[0]) + size * np.exp(x[1])) - scale
        return out

    start = np.array([math.log(max(seconds[0] - slope * size[0], seconds[0] * 1e-3)), math.log(slope)])
    found = needed("scipy.optimize", "finding a mesh").least_squares(misfit, start, loss="soft_l1", f_scale=LOSS_SCALE)
    share = np.exp(found.x[0]) / (np.exp(found.x[0]) + size * np.exp(found.x[1]))
    lever = np.stack([share, 1 - share], axis=1)
    spread = np.maximum(error, np.abs(misfit(found.x)))
    errors = np.sqrt(np.diag(np.linalg.pinv(lever.T @ (lever / np.maximum(spread, 1e-6)[:, None] ** 2), rcond=1e-14)))
    latency_s, Bps = math.exp(found.x[0]), math.exp(-found.x[1])
    known = [e < WORST_ERROR and weight > 0.01 for e, weight in zip(errors, lever.max(axis=0), strict=True)]
    return Speed(
        latency_s=latency_s if known[0] else None,
        latency_error_s=float(errors[0]) * latency_s if known[0] else None,
        Bps=Bps if known[1] else None,
        Bps_error=float(errors[1]) * Bps if known[1] else None,
    )


#: Rounds in which pairs without a measurement are filled in from the layout and the search is repeated.
REFILLS = 3
#: Up to this number of devices a torus is always tried: what groups leave unexplained of it is too little to show.
ALWAYS_TORUS = 64
#: Share of the pairs that has to be measured; with fewer the confidence is one half at most.
LEAST_OBSERVED = 0.65
#: Devices per group up to which rails are looked for in a large mesh that nothing else explains.
MOST_PER_NODE = 16
#: Most devices for which two kinds of links in one class are sought.
FEW_DEVICES = 64
#: Fewest links of such a class, smallest share of the rarer kind, share of the variance that the kinds explain.
LEAST_LINKS = 6
LEAST_OF_A_KIND = 0.1
EXPLAINED_BY_KINDS = 0.95
#: Share of the links that may be broken before they are a pattern.
MOST_BROKEN = 0.25
#: Largest confidence that is reported: no test of ours could show more.
MOST_CONFIDENT = 0.999
#: A device and its number, as most systems name them.
NUMBERED = re.compile(r"(.*?)(\d{1,9})")
#: One in this many numbers may be missing from a numbering.
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
        found = _better(prepared, found, _other_rails(distances, observed), names)
    return found


def _judged(prepared: Prepared, fitted: Fit, margin: float, names: Sequence[str]) -> _Found:
    faults = find_faults(prepared, fitted, names)
    pattern = structured(faults.rest) or two_kinds(fitted.layout, faults.rest, prepared.missing | faults.broken_mask)
    many = faults.unexplained > MOST_BROKEN
    return _Found(fitted=fitted, faults=faults, margin=margin, structured=pattern or many)


def _better(prepared: Prepared, found: _Found, other: Fit | None, names: Sequence[str]) -> _Found:
    """The better of two fits; the difference of scores is the margin of a new best, and at most that of an old one."""
    if other is None:
        return found
    margin = other.score - found.fitted.score
    if margin > 1e-6:
        return _judged(prepared, other, margin, names)
    if other.layout.shape == found.fitted.layout.shape:
        return found
    return replace(found, margin=min(found.margin, -margin))


def _other_rails(distances: Array, observed: float) -> Fit | None:
    """The best rails over groups of any size: strong rails can mislead a search for nested groups."""
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
        kind="nested",
        shape=shape,
        order=chain.order.reshape(-1),
        evidence=chain.evidence,
        log_assignments=math.lgamma(devices + 1) - symmetries,
    )


def structured(rest: Array) -> bool:
    r"""True if the residual has a pattern and is not noise alone.

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
        eigsh = needed("scipy.sparse.linalg", "finding a mesh").eigsh
        start = np.random.default_rng(0).normal(size=count)
        top = float(np.abs(eigsh(capped, k=1, which="LM", v0=start, tol=1e-2, return_eigenvectors=False)).max())
    return bool(top > sigma * (2 * math.sqrt(count) + 5 * count ** (-1 / 6)))


def two_kinds(layout: Layout, rest: Array, skipped: Array) -> bool:
    """True if links of one class are of two kinds: a tenth or more of them is apart from the others.

    The means of the kinds differ by a factor of 1.5 or more and explain 95 % of the variance. Only a few devices are
    tested so, since eigenvalues (:func:`structured`) show nothing there.
    """
    count = len(rest)
    if count > FEW_DEVICES:
        return False
    classes = layout.class_rows(0, count)
    used = np.triu(~skipped[layout.order][:, layout.order], 1)
    values = rest[layout.order][:, layout.order]
    return any(_bimodal(np.sort(values[used & (classes == each)])) for each in np.unique(classes[used]))


def _bimodal(values: Array) -> bool:
    """True if sorted numbers fall into two kinds (:func:`two_kinds`)."""
    count = len(values)
    fewest = max(2, math.ceil(LEAST_OF_A_KIND * count))
    if count < LEAST_LINKS:
        return False
    low = np.arange(fewest, count - fewest + 1)
    sums = np.cumsum(values)
    gaps = (sums[-1] - sums[low - 1]) / (count - low) - sums[low - 1] / low
    between = gaps**2 * low * (count - low) / count**2
    best = int(np.argmax(between))
    return bool(gaps[best] > math.log(LEAST_FACTOR) and between[best] > EXPLAINED_BY_KINDS * np.var(values))


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
        axes=tuple(axes[i] for i in by_speed),
        devices=links.names,
        coordinates=tuple(tuple(int(p) for p in row) for row in places[:, by_speed]),
        confidence=confidence * (0.5 if found.structured else 1.0),
        noise=found.faults.noise,
        broken_links=faults.broken,
        asymmetric_links=faults.asymmetric,
        slow_devices=faults.slow_devices,
        missing_pairs=int(prepared.missing.sum()) // 2,
        notes=notes,
    )


def _classes(layout: Layout) -> tuple[list[int], list[int | None]]:
    """For each axis the class of its links, and another class to compare them with: off the rail, or two hops."""
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
                size=size,
                kind=_kind(layout, axis),
                links=int(fitted.links[own[axis]]),
                latency_s=speed.latency_s,
                latency_error_s=speed.latency_error_s,
                Bps=speed.Bps,
                Bps_error=speed.Bps_error,
                step=None if gap is None else math.exp(gap),
                separation=None if gap is None else gap / noise,
                growth=more if layout.kind == "torus" else None,
                cross_latency_s=cross.latency_s,
                cross_Bps=cross.Bps,
                cross_step=more if layout.kind == "rails" else None,
            )
        )
    return out


def _kind(layout: Layout, axis: int) -> AxisKind:
    if layout.kind == "torus":
        return AxisKind.RING if layout.shape[axis] > 3 else AxisKind.SWITCH
    if layout.rail_axis is not None and axis >= layout.rail_axis:
        return AxisKind.RAIL
    return AxisKind.SWITCH


def skipped_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names that a numbering leaves out: devices without a measurement, for example because a rank died.

    Empty if the names are not numbered, or if too many are missing: then the numbers mean something else.

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
