"""Reports of catalogue records: a list, or one record with every number, its kind and its source.

Reports of fitted frameworks: every parameter with its doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steptime.errors import counted, shorten
from steptime.plan.framework import BUSY, PARAMETERS, SHARES
from steptime.plan.framework_file import NAME, PACKAGED
from steptime.report import text as t
from steptime.report.text import console, grid, heading, number, percent, printable
from steptime.units import format_si

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.api.frameworks import FrameworkRecord
    from steptime.hardware.records import Cluster, Device
    from steptime.model.spec import ModelSpec

#: Ending of a field's name -> formatter; the first match counts.
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
    """Print every number of a device."""
    _print_record(f"{device.name}: {device.title}", [("", device)])


def print_cluster(cluster: Cluster) -> None:
    """Print every number of a cluster, of its levels and of its device."""
    parts: list[tuple[str, Any]] = [("", cluster)]
    parts += [(f"levels.{level.name}.", level) for level in cluster.levels]
    parts += [] if cluster.topology is None else [("topology.", cluster.topology)]
    _print_record(f"{cluster.name}: {cluster.title}", [*parts, ("device.", cluster.device)])


def print_model(spec: ModelSpec, parameters: Mapping[str, float], active: float) -> None:
    """Print every dimension of a model, and its parameters."""
    from steptime.report.text import term_table

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
    """Print the values that an import assumed and the keys that it did not use."""
    out = t.console()
    for title, entries in (("assumed", assumed), ("not used", ignored)):
        if entries:
            table = t.grid((title, ""), left=(0, 1))
            for key, text in entries.items():
                table.add_row(*map(t.printable, (shorten(key, 40), text)))
            out.print()
            out.print(table)


def _print_record(title: str, parts: Sequence[tuple[str, Any]]) -> None:
    """Print every number with its kind and the index of its source, then the sources."""
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
    for note, place in notes.items():
        out.print(t.printable(f"[{place}] {note}"))


def _leaves(prefix: str, record: Any) -> Iterator[tuple[str, Any, Any]]:
    """Field path, value and source of every number and text of a record, without nested records."""
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


#: Parameter in the list of frameworks -> heading of its column.
LISTED: Final = {
    "matrix": "matrix",
    "attention": "attention",
    "vector": "vector",
    "tensor_links": "tp",
    "expert_links": "ep",
    "data_links": "dp",
    "data_exposed": "exposed",
    "step_s": "fixed s",
}
#: Parameter -> short description.
MEANING: Final = {
    "matrix": "time of matrix products, in a step over alone",
    "narrow": "that of products below 16 bits over it",
    "attention": "the same of attention",
    "vector": "the same of operators bound by memory",
    "host_s": "host per operator, s",
    "router_s": "wait for the host at a router of experts, s",
    "captured_wait": "that in a graph of router and preprocessing over it",
    "tensor_links": "tp traffic, overlapped or not, over free links",
    "context_links": "the same over cp",
    "expert_links": "the same over ep",
    "data_links": "gradient and weight traffic over free links",
    "data_exposed": "share of it that could overlap but does not",
    "stage_links": "messages between stages over free links",
    "stage_s": "host per micro-batch and stage, s",
    "optimizer": "optimiser over one pass over its tensors",
    "step_s": "fixed time of a step, s",
    "growth": "growth per doubling of devices beyond 8",
}
#: Habit -> short description.
HABITS: Final = {
    "gradient_dtype": "dtype in which gradients are summed and reduced",
    "context": "what context ranks exchange",
    "overlap": "traffic that runs behind computation",
    "kernel": "fused attention",
    "scattered_messages": "each tp rank sends its part of a message between stages",
    "exchange_once": "tokens cross to their experts once per domain",
    "single_ring": "ZeRO-3 leaves a node by one NIC",
    "root_unit": "ZeRO-3 has embedding and head in one unit",
    "copied_parameters": "FSDP copies each parameter out of what it gathers",
    "stops_early": "recomputing a layer ends with what backward reads",
    "fused_copies": "what fused attention copies to other layouts",
    "unfused_copies": "the same where it is not fused",
    "triangular_softmax": "unfused causal softmax reads half of the scores",
    "asynchronous_tp": "tp traffic of gradients overlaps with products",
    "one_pass_norms": "backward, a LayerNorm reads its input once",
    "complex_rope": "rotary embeddings multiply complex numbers, unfused",
    "fp8": "recipe that FP8 means without further words",
    "separate_kernels": "dropout and masks have kernels of their own",
    "selective": "what is recomputed where it is asked to do so selectively",
    "parts": "what a search recomputes other than whole layers",
    "expert_parts": "the same of models with experts",
    "plain_norms": "norms are operators on fp32 copies",
    "recompute": "what is recomputed unless told otherwise",
    "within_node": "nodes hold copies unless told otherwise (HSDP)",
    "zero": "ZeRO stage unless told otherwise",
    "zero_stages": "ZeRO stages that it has, without a pipeline",
    "axes": "axes other than dp that it has",
}
#: Field of an overlap rule -> heading.
RULE_HEADS: Final = {
    "word": "chosen by",
    "stream": "stream",
    "beside": "overlaps with",
    "wants": "needs",
    "shares": "shares",
    "formula": "exposed time",
}
WIDE: Final = 3
"""Largest number of frameworks side by side."""


def print_frameworks(result: Mapping[str, Any], target: str) -> None:
    """Print counts, bands, parameters of frameworks, factors of devices."""
    screen = console()
    screen.print(
        f"Fitted to {counted(result['used'], 'run')} of {counted(result['sources'], 'source')}; "
        f"{counted(result['rows'], 'row')} given "
        f"({result['runs'] - result['used']} support no claim or have no time)",
        soft_wrap=True,
    )
    heading(screen, "Parameters, with one standard deviation")
    columns = {"common": result["common"]}
    columns |= {f"{name} ({own['runs']})": own["parameters"] for name, own in result["frameworks"].items()}
    names = list(columns)
    for start in range(0, len(names), WIDE):
        _parameters(screen, {name: columns[name] for name in names[start : start + WIDE]})
    _devices(screen, result["devices"])
    _bands(screen, result["bands"])
    screen.print(printable(f"\nWritten to {target}{_use_of(Path(target))}"), soft_wrap=True)


def _use_of(target: Path) -> str:
    """Environment variable that makes every command read a file of frameworks.

    >>> _use_of(Path("ours/frameworks.toml"))
    '; STEPTIME_PATH=ours makes every command use it'
    >>> _use_of(Path("other.toml"))
    '; named frameworks.toml it is used from a folder of STEPTIME_PATH'
    """
    if target == PACKAGED:
        return ""
    if target.name != NAME:
        return f"; named {NAME} it is used from a folder of STEPTIME_PATH"
    return f"; STEPTIME_PATH={target.parent} makes every command use it"


def _parameters(screen: Console, columns: Mapping[str, Any]) -> None:
    table = grid(("", *map(printable, columns)))
    for name in PARAMETERS:
        table.add_row(name, *(_value(name, **own[name]) for own in columns.values()))
    screen.print(table)
    screen.print()


def _value(name: str, *, value: float, doubt: float) -> str:
    """A value with its standard deviation: in percent, as a factor if it is large, or absolute for a share.

    >>> _value("matrix", value=1.2, doubt=0.1), _value("data_exposed", value=0.5, doubt=0.4)
    ('1.2 ±11 %', '0.5 ±0.1')
    """
    if name in SHARES:
        return f"{value:.2g} ±{value * (1 - value) * doubt:.1g}"
    return f"{value:.3g} ±{math.expm1(doubt) * 100:.0f} %" if doubt < 1 else f"{value:.3g} x/÷{math.exp(doubt):.2g}"


def _habit(value: Any) -> str:
    """One habit in words.

    >>> _habit(None), _habit([]), _habit(["dp", "ep"]), _habit(False), _habit(0.6)
    ('as run', 'nothing', 'dp, ep', 'no', '0.6')
    """
    return "as run" if value is None else number(value) or "nothing"


def _devices(screen: Console, devices: Mapping[str, Any]) -> None:
    heading(screen, "Factors of devices")
    columns = (*BUSY, "doubt")
    table = grid(("", "runs", *columns))
    for name, own in devices.items():
        table.add_row(name, str(own["runs"]), *(f"{own[column]:.3f}" for column in columns))
    screen.print(table)


def _bands(screen: Console, bands: Mapping[str, Any]) -> None:
    heading(screen, "Bands, in standard deviations of the logarithm of time")
    for name, band in bands.items():
        text = "too few sources or runs for a band of their own; kept from the frameworks in use"
        if band["own"]:
            text = f"{percent(band['coverage90'])} of the runs of sources that it has not seen lie inside"
        word = "framework named" if name == "named" else "framework not named"
        screen.print(f"{word}: {band['low']:.2f} to {band['high']:+.2f}: {text}", soft_wrap=True)


def print_framework_list(records: Sequence[FrameworkRecord], fit: Mapping[str, Any]) -> None:
    """Print one line per framework with its main overheads; rightmost columns are dropped before names would wrap."""
    screen = console()
    heads = ("framework", "runs", *LISTED.values(), "gradients")
    rows = [_listed(record) for record in records]
    shown = fitting(heads, rows, screen.width)
    table = grid(heads[:shown], left=(0, len(heads) - 1))
    for row in rows:
        table.add_row(*row[:shown])
    screen.print(table)
    if shown < len(heads):
        left_out = ", ".join(heads[shown:])
        screen.print(f"\nnot shown at {screen.width} columns: {left_out} (name a framework, or --json)")
    screen.print(
        printable(f"\nfactors on times of the model; fitted to {counted(fit['rows'], 'run')}: {fit['source']}")
    )


def print_overlap_rules(rules: Sequence[dict[str, str]], notes: Sequence[str] = ()) -> None:
    """Print the overlap rules, one paragraph per kind of traffic."""
    screen = console()
    screen.print("What overlaps with computation; what is not here is exposed.")
    for note in notes:
        screen.print(printable(f"note: {note}"))
    for rule in rules:
        heading(screen, rule["traffic"])
        said = rule | {"word": f"--overlap {rule['word']}" if rule["word"] else ""}
        table = grid(("", ""), left=(0, 1))
        table.show_header = False
        for name, head in RULE_HEADS.items():
            if said[name]:
                table.add_row(head, said[name])
        screen.print(table)


def _listed(record: FrameworkRecord) -> list[str]:
    values = [f"{record.parameters[name]:.3g}" for name in LISTED]
    runs = "" if record.runs is None else str(record.runs)
    return [printable(record.name), runs, *values, record.habits.gradient_dtype or "as run"]


def fitting(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, gap: int = 2) -> int:
    """Number of columns from the left that fit into a width without wrapped cells; at least one.

    >>> fitting(("name", "runs"), [["megatron", "12"]], 14), fitting(("name", "runs"), [["megatron", "12"]], 13)
    (2, 1)
    """
    needed = -gap
    for count, column in enumerate(zip(heads, *rows, strict=True)):
        needed += gap + max(map(len, column))
        if needed > width:
            return max(count, 1)
    return len(heads)


def print_framework(record: FrameworkRecord) -> None:
    """Print one framework: habits and memory with their sources, defaults, every parameter with its doubt."""
    screen = console()
    screen.print(printable(f"{record.name}: {record.title}" if record.title else record.name), style="bold")
    if record.runs is not None:
        screen.print(f"fitted to {counted(record.runs, 'run')}")
    screen.print(printable(f"source: {record.source}"))
    for note in record.notes:
        screen.print(printable(f"note: {note}"))
    screen.print()
    sources = list(dict.fromkeys(record.sources.values()))
    notes = {name: f"[{sources.index(source) + 1}]" for name, source in record.sources.items()}
    table = grid(("habit", "value", "source", "meaning"), left=(0, 1, 2, 3))
    for name, value in record.shown_habits.items():
        table.add_row(name, _habit(value), notes.get(name, ""), HABITS.get(name, ""))
    screen.print(table)
    for head, values in (("memory", record.memory), ("default", record.defaults)):
        table = grid((head, "value", "source"), left=(0, 1, 2))
        for name, value in values.items():
            table.add_row(name, number(value), notes.get(name, ""))
        if values:
            screen.print()
            screen.print(table)
    screen.print()
    table = grid(("parameter", "value", "meaning"), left=(0, 2))
    for name, value in record.parameters.items():
        shown = _value(name, value=value, doubt=record.doubts[name]) if record.doubts else f"{value:.3g}"
        table.add_row(name, shown, MEANING.get(name, ""))
    screen.print(table)
    for place, (text, kind) in enumerate(sources, start=1):
        screen.print(printable(f"{'' if place > 1 else chr(10)}[{place}] {kind}: {text}"), soft_wrap=True)
