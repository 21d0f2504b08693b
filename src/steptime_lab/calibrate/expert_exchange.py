"""Measured dispatches and combines of experts: reading of rows, fits, predictions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from steptime.cost.experts import Exchange, exchange_of, exchange_s, row_bytes
from steptime.errors import UserError
from steptime.hardware import load_device
from steptime.hardware.profiles import FabricProfile
from steptime.measure.residuals import errors_of
from steptime.measure.table import Table
from steptime.num import Array
from steptime_lab.calibrate.collective_machines import Columns

WAYS: Final = {"ep_dispatch": "dispatch", "ep_combine": "combine"}
LIBRARY: Final = "deepep-ll"
SOURCE: Final = "aiconfigurator_deepep_ll"
#: Device, its spelling in the table, datasheet link, domain.
DEVICES: Final = (
    ("h100-sxm", "H100-SXM5-80GB", 450e9, 8), ("h200-sxm", "H200-SXM-141GB", 450e9, 8),
    ("b200-sxm", "B200-SXM", 900e9, 8), ("b300-sxm", "B300-SXM", 900e9, 8), ("gb300", "GB300", 900e9, 72),
)  # fmt: skip
NIC_BPS: Final = 50e9
#: Experts of the published table, which does not state them: those of the model that it names.
DEFAULT_EXPERTS: Final = 256
FOLDS: Final = 4
SCALE: Final = 0.025
PRIOR: Final = 0.05
_WORDS: Final = {"tokens": r"(\d+) tokens", "hidden": r"hidden (\d+)", "topk": r"top-(\d+)$|top-(\d+)[,;]"}


@dataclass(frozen=True, slots=True)
class ExchangeRows(Columns):
    """Measured exchanges as arguments of `exchange_s`."""

    way: Array
    tokens: Array
    top_k: Array
    experts: Array
    row: Array
    ranks: Array
    inside: Array
    measured_s: Array


def is_exchange(table: Table) -> Array:
    """Rows of dispatches and combines."""
    return np.isin(table.text("collective"), tuple(WAYS))


def rows_of(table: Table) -> ExchangeRows:
    """Rows of a table; sizes that its notes do not state become NaN.

    The notes have ``tokens=128;hidden=7168;topk=8;experts=256;nodes=2``, or the same in words.
    """
    way = np.array([WAYS.get(name, "") for name in table.text("collective")], dtype=object)
    notes = table.text("notes")
    tokens, hidden, top_k = (np.array([_stated(n, key) for n in notes]) for key in ("tokens", "hidden", "topk"))
    experts = np.array([_stated(n, "experts", DEFAULT_EXPERTS) for n in notes])
    node, ranks = table.number("gpus_per_node"), table.number("n_gpus")
    ranks = np.where(np.isnan(ranks), node * np.array([_stated(n, "nodes", 1) for n in notes]), ranks)
    alone = np.array(["pure RDMA" in place for place in table.text("interconnect")], dtype=bool)
    row = np.where(way == "dispatch", row_bytes(hidden, eight_bit=True), row_bytes(hidden, eight_bit=False))
    inside = np.where(alone, 1.0, np.minimum(ranks, node))
    return ExchangeRows(way, tokens, top_k, experts, row, ranks, inside, table.number("time_us") * 1e-6)


def _stated(notes: str, key: str, default: float = np.nan) -> float:
    for pattern in (rf"\b{key}=(\d+)", _WORDS.get(key)):
        found = re.search(pattern, notes) if pattern else None
        if found:
            return float(next(g for g in found.groups() if g))
    return default


def usable(rows: ExchangeRows) -> Array:
    """Rows whose sizes are known."""
    good: Array = np.isfinite(rows.tokens * rows.row * rows.top_k * rows.ranks) & (rows.ranks > 1)
    return good


def predict(coefficients: Mapping[str, Any], processors: float, rows: ExchangeRows) -> Array:
    """Seconds of each row."""
    out = np.full(len(rows.way), np.nan)
    for way in WAYS.values():
        own = rows.way == way
        if own.any() and f"{way}_start_s" in coefficients:
            r = rows.take(own)
            one = exchange_of(coefficients, way)
            out[own] = exchange_s(way, r.tokens, r.top_k, r.experts, r.row, r.ranks, r.inside, processors, one)
    return out


def fit(rows: ExchangeRows, processors: float, link_Bps: float) -> dict[str, float]:
    """Coefficients that minimise the robust log error, with priors from the datasheet (see `collective_fit.fit`)."""
    out: dict[str, float] = {}
    for way in WAYS.values():
        own = rows.take(rows.way == way)
        spans = bool((own.ranks > own.inside).any())
        out |= {f"{way}_{name}": value for name, value in _fit_way(way, own, processors, link_Bps, spans).items()}
    return out


def _fit_way(way: str, rows: ExchangeRows, processors: float, link_Bps: float, spans: bool) -> dict[str, float]:
    from scipy.optimize import least_squares  # type: ignore[import-untyped,unused-ignore]

    start = _priors(link_Bps)
    names = [n for n in start if spans or n not in ("outer_start_s", "peer_s", "outer_Bps")]
    begin = np.log([start[n][0] for n in names])
    weight = PRIOR / np.array([start[n][1] for n in names])
    target = np.log(rows.measured_s)

    def residuals(x: Array) -> Array:
        one = Exchange(**{**{n: v for n, (v, _) in start.items()}, **dict(zip(names, np.exp(x), strict=True))})
        time = exchange_s(
            way, rows.tokens, rows.top_k, rows.experts, rows.row, rows.ranks, rows.inside, processors, one
        )
        return np.concatenate([np.log(time) - target, weight * (x - begin)])

    if not len(target):
        return {n: v for n, (v, _) in start.items()}
    low, high = begin - np.log(50), begin + np.log(50)
    low[names.index("blend")], high[names.index("blend")] = 0.0, np.log(8)
    found = least_squares(residuals, begin, bounds=(low, high), loss="soft_l1", f_scale=SCALE)
    values = dict(zip(names, (float(v) for v in np.exp(found.x)), strict=True))
    return {n: values.get(n, v) for n, (v, _) in start.items()}


def _priors(link_Bps: float) -> dict[str, tuple[float, float]]:
    """Value and spread (of the logarithm) of the coefficients before a fit."""
    return {
        "start_s": (10e-6, 0.4),
        "expert_s": (15e-9, 0.8),
        "Bps": (0.7 * link_Bps, 0.3),
        "message_s": (2e-6, 0.8),
        "message_Bps": (3e10, 0.8),
        "blend": (2.0, 0.5),
        "outer_start_s": (6e-6, 0.7),
        "peer_s": (1e-6, 0.8),
        "outer_Bps": (0.9 * NIC_BPS, 0.2),
    }


def device_rows(table: Table, gpu: str) -> ExchangeRows:
    """The rows that the profile of a device is fitted to."""
    part = table.take(is_exchange(table) & (table.text("gpu") == gpu) & (table.text("source") == SOURCE))
    rows = rows_of(part)
    return rows.take(usable(rows) & (rows.measured_s > 0))


def folds(rows: ExchangeRows) -> Array:
    """Fold of each row: one token count lies in one fold only."""
    place: Array = np.unique(rows.tokens, return_inverse=True)[1] % FOLDS
    return place


def cross_validated(rows: ExchangeRows, processors: float, link_Bps: float, fold: Array) -> Array:
    """Predictions of each row by a fit that did not see its fold."""
    out = np.full(len(rows.way), np.nan)
    for number in np.unique(fold):
        own = fold == number
        out[own] = predict(fit(rows.take(~own), processors, link_Bps), processors, rows.take(own))
    return out


def calibrate(device: str, link_Bps: float, domain: int, rows: ExchangeRows, held_out: Array) -> FabricProfile:
    """The profile of a device; errors and band from `held_out`, see `cross_validated`."""
    processors = processors_of(device)
    errors = errors_of(held_out, rows.measured_s)
    return FabricProfile(
        name=f"{device}-{LIBRARY}",
        device=device,
        library=LIBRARY,
        sources=(SOURCE,),
        link_Bps=link_Bps,
        nic_Bps=NIC_BPS if (rows.ranks > rows.inside).any() else 0.0,
        coefficients={"domain": domain, "processors": processors, **fit(rows, processors, link_Bps)},
        ranges={
            "tokens": (float(rows.tokens.min()), float(rows.tokens.max())),
            "ranks": (float(rows.ranks.min()), float(rows.ranks.max())),
            "experts": (float(rows.experts.min()), float(rows.experts.max())),
        },
        **asdict(errors),
        source=f"steptime calibration of {SOURCE}",
    )


def processors_of(device: str) -> float:
    """Multiprocessors of a device.

    Raises:
        UserError: the device is not in the catalogue.
    """
    return float(load_device(device).sm_count or 132)


def predict_exchanges(table: Table, profiles: Iterable[FabricProfile]) -> tuple[Array, Array, Array, Array, Array]:
    """Predicts a table of exchanges alone: seconds, 5th and 95th percentile, reason ("" if predicted), fitted or not.

    A device without a profile takes that of the device with the most similar number of multiprocessors.
    """
    known = [p for p in profiles if p.library == LIBRARY]
    rows = rows_of(table)
    good = usable(rows)
    seconds, low, high = (np.full(table.rows, np.nan) for _ in range(3))
    reason = np.where(good, "", "sizes of the exchange unknown").astype(object)
    many = np.array(["normal kernels" in place for place in table.text("interconnect")], dtype=bool)
    reason[many], good = "no formula for the kernels for many tokens", good & ~many
    fitted = np.zeros(table.rows, bool)
    for gpu in np.unique(table.text("gpu").astype(str)):
        own = good & (table.text("gpu") == gpu)
        profile = _nearest(gpu, known)
        if profile is None:
            reason[own] = "no profile of an exchange of experts"
            continue
        time = predict(profile.coefficients, float(profile.coefficients["processors"]), rows.take(own))  # type: ignore[arg-type]
        seconds[own], low[own], high[own] = time, time * profile.band[0], time * profile.band[1]
        fitted[own] = profile.device == _device(gpu)
    return seconds, low, high, reason, fitted


def _device(gpu: str) -> str:
    """Name in the catalogue of a spelling of the measurements."""
    named = {spelling: device for device, spelling, _, _ in DEVICES}
    return load_device(named.get(gpu, gpu)).name


def _nearest(gpu: str, known: list[FabricProfile]) -> FabricProfile | None:
    """The profile of the device, else of the one with the most similar number of multiprocessors."""
    try:
        device = load_device(_device(gpu))
    except UserError:
        return None
    count = float(device.sm_count or 132)
    return min(
        known,
        key=lambda p: (p.device != device.name, abs(float(p.coefficients["processors"]) - count), p.name),  # type: ignore[arg-type]
        default=None,
    )
