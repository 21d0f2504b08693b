"""Records of the catalogue: a list of them, or one with every number, its kind and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptime.errors import shorten
from steptime.report import text as t
from steptime.units import format_si

if TYPE_CHECKING:
    from steptime.hardware.records import Cluster, Device
    from steptime.model.spec import ModelSpec

#: How a field is written, by how its name ends; the first that fits.
_UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_flops_per_s", lambda value: format_si(value, "FLOP/s", 4)),
    ("_Bps", lambda value: format_si(value, "B/s", 4)),
    ("_bytes", t.memory),
    ("_Hz", lambda value: format_si(value, "Hz", 4)),
    ("_W", lambda value: format_si(value, "W", 4)),
    ("_s", t.seconds),
)


def print_devices(devices: Sequence[Device]) -> None:
    """One line per device."""
    table = t.grid(("device", "bf16 or fp16", "memory", "bandwidth", "title"), left=(0, 4))
    for device in devices:
        peak = device.matrix_flops_per_s.get("bf16") or device.matrix_flops_per_s.get("fp16")
        table.add_row(
            t.printable(device.name),
            "" if peak is None else format_si(peak, "FLOP/s"),
            t.memory(device.memory_bytes),
            format_si(device.memory_Bps, "B/s"),
            t.printable(device.title),
        )
    t.console().print(table)


def print_clusters(clusters: Sequence[Cluster]) -> None:
    """One line per cluster."""
    table = t.grid(("cluster", "device", "fast domain", "title"), left=(0, 1, 3))
    for cluster in clusters:
        inner = cluster.levels[0].devices
        size = "unlimited" if inner is None else str(inner)
        table.add_row(*map(t.printable, (cluster.name, cluster.device.name, size, cluster.title)))
    t.console().print(table)


def print_models(models: Sequence[tuple[ModelSpec, float]]) -> None:
    """One line per model, with its number of parameters."""
    table = t.grid(("model", "family", "parameters", "layers", "hidden", "heads", "sequence"), left=(0, 1))
    for spec, parameters in models:
        widths = (str(spec.layers), str(spec.hidden), str(spec.heads), str(spec.seq_len))
        table.add_row(t.printable(spec.name), t.printable(spec.family), t.big(parameters), *widths)
    t.console().print(table)


def print_device(device: Device) -> None:
    """Every number of a device."""
    _print_record(f"{device.name}: {device.title}", [("", device)])


def print_cluster(cluster: Cluster) -> None:
    """Every number of a cluster, of its levels and of its device."""
    parts: list[tuple[str, Any]] = [("", cluster)]
    parts += [(f"levels.{level.name}.", level) for level in cluster.levels]
    _print_record(f"{cluster.name}: {cluster.title}", [*parts, ("device.", cluster.device)])


def print_model(spec: ModelSpec, parameters: Mapping[str, float], active: float) -> None:
    """Every dimension of a model, and its parameters."""
    from steptime.report.tree import term_table

    out = t.console()
    out.print(t.printable(f"{spec.name} ({spec.family})"), style="bold")
    out.print(t.printable(f"source: {spec.source}"))
    table = t.grid(("field", "value"))
    for name, value, _ in _leaves("", spec):
        if name not in ("name", "family", "source"):
            table.add_row(t.printable(name), _written(name, value))
    out.print(table)
    out.print()
    out.print(term_table(parameters, t.big, title="parameters", show_all=True))
    out.print(f"active per token: {t.big(active)}")


def print_import(assumed: Mapping[str, str], ignored: Mapping[str, str]) -> None:
    """What a file does not say and was assumed, and what it says and was not used."""
    out = t.console()
    for title, entries in (("assumed", assumed), ("not used", ignored)):
        if entries:
            table = t.grid((title, ""), left=(0, 1))
            for key, text in entries.items():
                table.add_row(*map(t.printable, (shorten(key, 40), text)))
            out.print()
            out.print(table)


def _print_record(title: str, parts: Sequence[tuple[str, Any]]) -> None:
    """Every number with the kind and the number of its source; the sources follow."""
    out = t.console()
    out.print(t.printable(title), style="bold")
    table = t.grid(("field", "value", "kind", "source"), left=(0, 2, 3))
    notes: dict[str, int] = {}
    for prefix, record in parts:
        for name, value, source in _leaves(prefix, record):
            kind = note = ""
            if source is not None:
                kind, note = str(source.kind), f"[{notes.setdefault(source.text, len(notes) + 1)}]"
            table.add_row(t.printable(name), _written(name, value), kind, note)
    out.print(table)
    out.print()
    for text, number in notes.items():
        out.print(t.printable(f"[{number}] {text}"))


def _leaves(prefix: str, record: Any) -> Iterator[tuple[str, Any, Any]]:
    """Field path, value and source of every number and text of a record, nested records aside."""
    sources = getattr(record, "sources", {})
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        if name in ("sources", "catalogue") or value is None or (prefix and name in ("name", "title")):
            continue
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield f"{prefix}{name}.{key}", item, sources.get(f"{name}.{key}", sources.get(name))
        elif hasattr(value, "__dataclass_fields__") and not hasattr(value, "sources"):
            yield from _leaves(f"{prefix}{name}.", value)
        elif not hasattr(value, "__dataclass_fields__") and not isinstance(value, tuple):
            yield f"{prefix}{name}", value, sources.get(name)


def _written(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        parts = name.split(".")
        for part in reversed(parts):
            for ending, unit in _UNITS:
                if part.endswith(ending):
                    return unit(value)
    return t.number(value)
