"""Parameters of a cluster that a study sweeps, as values or factors, and their places in a cluster file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from steptime.errors import FieldError, UserError
from steptime.hardware import load_cluster
from steptime.hardware.library import changed_cluster
from steptime.hardware.load import DEVICE, LEVEL, RATE, RATES
from steptime.hardware.records import Cluster
from steptime.schema import Field, value_of

_SUFFIX: Final = {"bytes": "B", "Bps": "B/s", "flops_per_s": "FLOP/s", "s": "s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a cluster."""

    column: str
    """Name in results, with the unit."""
    field: Field
    """Field of a cluster file: notation and range."""
    now: Callable[[Cluster], float | None]
    """Current value in SI units; None: the cluster has none."""
    tables: Callable[[Cluster, float], dict[str, Any]]
    """Tables of a cluster file that multiply the parameter by a factor."""


def written(value: float, field: Field) -> Any:
    """A number in SI units in the notation of a cluster file.

    >>> written(8e10, DEVICE["memory"]), written(8.0, LEVEL["devices"])
    ('80000000000.0 B', 8)
    """
    if field.dimension is not None:
        return f"{value!r} {_SUFFIX[field.dimension]}"
    return round(value) if field.whole else value


def _of_device(key: str) -> Parameter:
    field = DEVICE[key]
    return Parameter(
        column=field.record,
        field=field,
        now=lambda cluster: getattr(cluster.device, field.record),
        tables=lambda cluster, factor: {
            "device": {key: written(getattr(cluster.device, field.record) * factor, field)}
        },
    )


def _rate(table: str) -> Parameter:
    """Parameter for a table of rates: one factor for all dtypes; its value is the rate of bf16, or else the first."""
    name = RATES[table][0]

    def now(cluster: Cluster) -> float | None:
        rates: Mapping[str, float] = getattr(cluster.device, name)
        return rates.get("bf16", next(iter(rates.values()), None))

    def tables(cluster: Cluster, factor: float) -> dict[str, Any]:
        rates = getattr(cluster.device, name)
        return {"device": {table: {dtype: written(rate * factor, RATE) for dtype, rate in rates.items()}}}

    return Parameter(column=name, field=RATE, now=now, tables=tables)


def _of_levels(key: str, prefix: str, levels: slice) -> Parameter:
    field = LEVEL[key]

    def now(cluster: Cluster) -> float | None:
        return next((getattr(level, field.record) for level in cluster.levels[levels]), None)

    def tables(cluster: Cluster, factor: float) -> dict[str, Any]:
        return {
            "levels": {
                level.name: {key: written(getattr(level, field.record) * factor, field)}
                for level in cluster.levels[levels]
            }
        }

    return Parameter(column=f"{prefix}_{field.record}", field=field, now=now, tables=tables)


_FAST, _BEYOND = slice(0, 1), slice(1, None)
#: Name in a study -> parameter. Rates of all dtypes, and all levels beyond the fast domain, change by one factor.
PARAMETERS: Final[Mapping[str, Parameter]] = {
    "matrix_flops": _rate("matrix"),
    "vector_flops": _rate("vector"),
    "memory": _of_device("memory"),
    "memory_bandwidth": _of_device("memory_bandwidth"),
    "kernel_latency": _of_device("kernel_latency"),
    "nvlink_domain": _of_levels("devices", "nvlink", _FAST),
    "nvlink_bandwidth": _of_levels("bandwidth", "nvlink", _FAST),
    "nvlink_latency": _of_levels("latency", "nvlink", _FAST),
    "nic_bandwidth": _of_levels("bandwidth", "nic", _BEYOND),
    "nic_latency": _of_levels("latency", "nic", _BEYOND),
}
FACTOR: Final = "factor"


def si_value(name: str, given: Any) -> float:
    """Value of a parameter in SI units, from a study's notation.

    Raises:
        UserError: it has no unit, or is out of range.
    """
    return float(value_of(given, PARAMETERS[name].field))


def cluster_with(base: str, changes: Mapping[str, Mapping[str, float]], where: str = "hardware") -> Cluster:
    """A cluster with the changes of one point.

    Args:
        base: catalogue name or path.
        changes: parameter -> ``{"value": SI}`` or ``{"factor": number}``.
        where: place that errors name.

    Raises:
        UserError: the cluster does not have the number, or a changed number is out of range.

    >>> cluster_with("dgx-h100", {"memory": {"factor": 2.0}}).device.memory_bytes / 2**20
    163118.0
    >>> cluster_with("published-b200-nvs8", {"nvlink_domain": {"value": 64.0}}).fast_domain
    64
    """
    return unchanged_cluster(base, json.dumps(changes, sort_keys=True), where)


@lru_cache(maxsize=4096)
def unchanged_cluster(base: str, changes: str, where: str) -> Cluster:
    """Cached :func:`cluster_with`, with changes as JSON; cleared by :func:`steptime.study.points.forget`."""
    cluster = load_cluster(base)
    merged: dict[str, Any] = {}
    for name, change in json.loads(changes).items():
        parameter, factor = PARAMETERS[name], change.get(FACTOR)
        now = parameter.now(cluster)
        if not now:
            raise FieldError(where, f"hardware.{name}", f"{cluster.name} does not say it")
        _merge(merged, parameter.tables(cluster, change["value"] / now if factor is None else factor))
        if factor is None:  # exactly what was given, not what division and multiplication make of it
            _merge(merged, _exact(parameter, cluster, change["value"]))
    if not merged:
        return cluster
    try:
        return changed_cluster(base, merged, where)
    except FieldError as error:
        raise UserError(f"{where}: hardware of {cluster.name}: {error.field}: {error.problem}") from None


def _exact(parameter: Parameter, cluster: Cluster, value: float) -> dict[str, Any]:
    """The tables of a parameter with exactly the given value, in the place that the value names."""
    tables = parameter.tables(cluster, 1.0)
    if "levels" in tables:
        level, table = next(iter(tables["levels"].items()))
        return {"levels": {level: dict.fromkeys(table, written(value, parameter.field))}}
    (key, table), *_ = tables["device"].items()
    if not isinstance(table, dict):
        return {"device": {key: written(value, parameter.field)}}
    dtype = "bf16" if "bf16" in table else next(iter(table))
    rates = getattr(cluster.device, parameter.column)
    return {"device": {key: {d: written(value, RATE) for d in table if rates[d] == rates[dtype]}}}


def _merge(into: dict[str, Any], tables: Mapping[str, Any]) -> None:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def columns_of(cluster: Cluster) -> dict[str, float | None]:
    """Every parameter of a cluster, by its column in results."""
    return {parameter.column: parameter.now(cluster) for parameter in PARAMETERS.values()}
