"""Report of fitted frameworks: every parameter with its doubt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steptime.errors import counted
from steptime.plan.framework import BUSY, PARAMETERS, SHARES
from steptime.plan.framework_file import NAME, PACKAGED
from steptime.report.text import console, grid, heading, number, percent, printable

if TYPE_CHECKING:
    from rich.console import Console

    from steptime.api.frameworks import FrameworkRecord

#: Parameters in the list of frameworks, with their heads.
LISTED: Final = {
    "matrix": "matrix", "attention": "attention", "vector": "vector", "tensor_links": "tp", "expert_links": "ep",
    "data_links": "dp", "data_exposed": "exposed", "step_s": "fixed s",
}  # fmt: skip
#: What each parameter is, in a few words.
MEANING: Final = {
    "matrix": "time of matrix products, in a step over alone",
    "narrow": "that of products below 16 bits over it", "attention": "likewise attention",
    "vector": "likewise operators bound by memory", "host_s": "host per operator, s",
    "router_s": "wait for the host at a router of experts, s",
    "captured_wait": "that in a graph of router and preprocessing over it",
    "tensor_links": "tp traffic, hidden or not, over free links", "context_links": "likewise cp",
    "expert_links": "likewise ep", "data_links": "gradient and weight traffic over free links",
    "data_exposed": "share of it that could hide but does not",
    "stage_links": "messages between stages over free links",
    "stage_s": "host per micro-batch and stage, s", "optimizer": "optimiser over one pass over its tensors",
    "step_s": "fixed time of a step, s", "growth": "growth per doubling of devices beyond 8",
}  # fmt: skip
#: What each habit is, in a few words.
HABITS: Final = {
    "gradient_dtype": "dtype in which gradients are summed and reduced", "context": "what context ranks exchange",
    "overlap": "traffic that runs behind computation", "kernel": "fused attention",
    "scattered_messages": "each tp rank sends its part of a message between stages",
    "exchange_once": "tokens cross to their experts once per domain", "single_ring": "ZeRO-3 leaves a node by one NIC",
    "root_unit": "ZeRO-3 has embedding and head in one unit",
    "copied_parameters": "FSDP copies each parameter out of what it gathers",
    "stops_early": "recomputing a layer ends with what backward reads",
    "fused_copies": "what fused attention copies to other layouts",
    "unfused_copies": "likewise where it is not fused",
    "triangular_softmax": "unfused causal softmax reads half of the scores",
    "asynchronous_tp": "tp traffic of gradients runs beside products",
    "one_pass_norms": "backward, a LayerNorm reads its input once",
    "complex_rope": "rotary embeddings multiply complex numbers, unfused",
    "fp8": "recipe that FP8 means without further words",
    "separate_kernels": "dropout and masks have kernels of their own",
    "selective": "what is recomputed where it is asked to do so selectively",
    "parts": "what a search recomputes beside whole layers", "expert_parts": "likewise of models with experts",
    "within_node": "nodes hold copies unless told otherwise (HSDP)",
    "zero": "ZeRO stage unless told otherwise", "zero_stages": "ZeRO stages that it has, without a pipeline",
    "axes": "axes beside dp that it has",
}  # fmt: skip
#: What a rule of overlap says, in a few words.
RULE_HEADS: Final = {
    "word": "hides with", "stream": "stream", "beside": "runs beside", "wants": "needs", "shares": "shares",
    "formula": "what shows",
}  # fmt: skip
WIDE: Final = 3
"""Frameworks beside each other."""


def print_frameworks(result: Mapping[str, Any], target: str) -> None:
    """Counts, bands, parameters of frameworks, factors of devices."""
    screen = console()
    screen.print(f"Fitted to {counted(result['used'], 'run')} of {counted(result['sources'], 'source')}; "
                 f"{counted(result['rows'], 'row')} given "
                 f"({result['runs'] - result['used']} support no claim or have no time)", soft_wrap=True)  # fmt: skip
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
    """How every command is made to read a file of frameworks.

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
    """A value with its standard deviation: in percent, as a factor where it is large, of a share absolute.

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
    """One line per framework: what dominates its overheads. Columns at the right go where names would be broken."""
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
    """What hides behind what, one paragraph per kind of traffic."""
    screen = console()
    screen.print("What hides behind computation; what is not here shows.")
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
    """How many columns from the left fit into a width with every cell on one line; one at least.

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
    """One framework with every parameter and its doubt."""
    screen = console()
    screen.print(printable(f"{record.name}: {record.title}" if record.title else record.name), style="bold")
    if record.runs is not None:
        screen.print(f"fitted to {counted(record.runs, 'run')}")
    screen.print(printable(f"source: {record.source}"))
    for note in record.notes:
        screen.print(printable(f"note: {note}"))
    screen.print()
    table = grid(("habit", "value", "meaning"), left=(0, 1, 2))
    for name, value in record.shown_habits.items():
        table.add_row(name, _habit(value), HABITS.get(name, ""))
    screen.print(table)
    screen.print()
    table = grid(("parameter", "value", "meaning"), left=(0, 2))
    for name, value in record.parameters.items():
        shown = _value(name, value=value, doubt=record.doubts[name]) if record.doubts else f"{value:.3g}"
        table.add_row(name, shown, MEANING.get(name, ""))
    screen.print(table)
