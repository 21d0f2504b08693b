"""Texts of numbers, plans and terms in reports.

Terms are an indented tree with shares; small ones are folded into one line.
Names of operators and modules are shortened to fit into a plot or a column.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from steptime.errors import shorten
from steptime.options import OPTIONS
from steptime.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from steptime.estimate.result import Estimate

GIB: Final = 2.0**30
MIB: Final = 2.0**20
#: Degrees in the order of reports; degrees of 1 are left out, except dp and micro_batch.
DEGREES: Final = ("tp", "tp2", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch")
SHORT: Final = {"micro_batch": "mbs"}
ALWAYS: Final = ("dp", "micro_batch")
#: Source of a band -> description; a report names the dominating ones, at most as many as the number below.
BAND_WORDS: Final = {
    "matrix": "matrix products",
    "attention": "attention",
    "vector": "memory-bound operators",
    "host_s": "host launches",
    "router_s": "waits at routers",
    "captured_wait": "routers in graphs",
    "tensor_links": "tensor traffic",
    "context_links": "context traffic",
    "expert_links": "expert traffic",
    "data_links": "gradient traffic",
    "data_exposed": "gradient overlap",
    "stage_links": "stage messages",
    "stage_s": "stage overhead",
    "optimizer": "optimiser",
    "step_s": "fixed time",
    "growth": "scale",
    "device": "device",
    "noise": "noise of runs",
    "settings": "unknown settings",
}
SHOWN_SHARES: Final = 3
WIDEST: Final = 1e7
"""Percent from which a column shows an exponent."""


def console() -> Console:
    """The console on standard output: no markup in texts, plain if it is no terminal."""
    from rich.console import Console

    class Report(Console):
        def on_broken_pipe(self) -> None:
            """Raise the error again, which the entry point turns into its exit code; the library would exit with 1."""
            raise

    return Report(file=sys.stdout or io.StringIO(), markup=False, emoji=False, highlight=False)


def printable(text: str) -> str:
    """The text without control characters, which could manipulate a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def share(part: float, whole: float) -> str:
    """A part in percent of the whole; empty if the whole is zero.

    >>> share(1.0, 8.0)
    '12.5 %'
    """
    return percent(part / whole) if whole and math.isfinite(part / whole) else ""


def percent(fraction: float) -> str:
    """A fraction in percent.

    >>> percent(0.4567)
    '45.7 %'
    """
    return f"{_rounded(fraction * 100)} %" if math.isfinite(fraction) else "unknown"


def change(fraction: float) -> str:
    """A relative change in percent, with its sign; zero has none.

    >>> change(-0.25), change(-0.0001)
    ('-25.0 %', '0.0 %')
    """
    rounded = round(fraction * 100, 1) if math.isfinite(fraction) else math.nan
    return f"{_rounded(rounded, '+')} %" if rounded else "0.0 %"


def _rounded(value: float, sign: str = "") -> str:
    """A number with one decimal; with an exponent if it is too wide for a column.

    >>> _rounded(12.34), _rounded(-1.5e28, "+")
    ('12.3', '-1.5e+28')
    """
    return format(value, f"{sign}.1f" if abs(value) < WIDEST else f"{sign}.1e")


def memory_unit(values_bytes: Iterable[float]) -> tuple[str, float]:
    """Unit of a column of sizes, and its bytes: GiB, or MiB if all values are below 1 GiB.

    >>> memory_unit([80 * 2**30, 2**20]), memory_unit([3 * 2**20])
    (('GiB', 1073741824.0), ('MiB', 1048576.0))
    """
    return ("GiB", GIB) if max(values_bytes, default=GIB) >= GIB else ("MiB", MIB)


def seconds(value_s: float) -> str:
    """Time in the unit a person would use."""
    return format_seconds(value_s) if math.isfinite(value_s) else "unknown"


def memory(value_bytes: float) -> str:
    """Bytes in binary units."""
    return format_bytes(value_bytes) if math.isfinite(value_bytes) else "unknown"


def count(value: float) -> str:
    """A count with thousands separators.

    >>> count(16384)
    '16,384'
    """
    return f"{value:,.0f}" if math.isfinite(value) else "unknown"


def big(value: float) -> str:
    """A number of parameters with a suffix (B: 10^9).

    >>> big(176.2e9), big(999.9e6), big(512)
    ('176.2 B', '999.9 M', '512')
    """
    for symbol, scale in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{symbol}"
    return f"{value:.4g}"


def number(value: Any) -> str:
    """Any value of a record, short; whole numbers in full."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or (math.isfinite(value) and value == int(value))
        return f"{int(value)}" if whole and abs(value) < 1e6 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(number(item) for item in value)
    return shorten(printable(str(value)), 200)


def plan_label(plan: Mapping[str, Any]) -> str:
    """A plan in one line: degrees, choices, and after the bar the ranks of each axis inside a fast domain.

    >>> plan_label({"strategy": "1d", "tp": 8, "pp": 64, "dp": 4, "micro_batch": 1, "placement": {"tp": 8, "dp": 1}})
    '1d tp8 pp64 dp4 mbs1 | domain tp8'
    """
    if plan.get("mesh"):
        return printable(f"{plan['strategy']} mesh {mesh_words(plan)}")
    words = [str(plan["strategy"])] if plan.get("strategy") else []
    for name in DEGREES:
        value = plan.get(name)
        if value is not None and (value != 1 or name in ALWAYS):
            words.append(_degree(name, value))
    words += [f"{OPTIONS[name].label} {option_text(plan, name)}" for name in unusual_options(plan)]
    words += [f"idle {number(idle)}"] if (idle := plan.get("idle_devices", 0)) else []
    words += unusual(plan)
    placed = [_degree(axis, ranks) for axis, ranks in ranks_inside(plan).items()]
    return printable(" ".join([*words, *(["| domain", *placed] if placed else [])]))


def ranks_inside(plan: Mapping[str, Any]) -> dict[str, int]:
    """Ranks inside a fast domain of each axis with more than one there; empty for shardings, which have a mesh."""
    placement = None if plan.get("mesh") else plan.get("placement")
    inside = placement.items() if isinstance(placement, Mapping) else ()
    return {axis: ranks for axis, ranks in inside if ranks != 1}


def unusual_options(plan: Mapping[str, Any]) -> list[str]:
    """Names of the options with values other than the defaults, for the short form of a plan."""
    shown = [name for name, row in OPTIONS.items() if row.label is not None]
    return [name for name in shown if option_text(plan, name) != option_text({}, name)]


def option_text(plan: Mapping[str, Any], name: str) -> str:
    """The value of an option of a plan, by default the usual one, as text.

    >>> option_text({"overlap": ["dp", "pp"]}, "overlap"), option_text({}, "zero")
    ('dp+pp', '1')
    """
    value = plan.get(name, OPTIONS[name].usual)
    return ("+".join(value) if isinstance(value, (list, tuple)) else number(value)) or "none"


def unusual(plan: Mapping[str, Any]) -> list[str]:
    """Texts of choices other than defaults, if they apply to the degrees of the plan."""
    out = ["sp off"] if plan.get("tp", 1) != 1 and not plan.get("sp", 1) else []
    schedule, context = plan.get("schedule", "1f1b"), plan.get("context", "all_gather")
    out += [str(schedule)] if schedule not in ("1f1b", "interleaved") else []
    return out + ([str(context)] if plan.get("cp", 1) != 1 and context != "all_gather" else [])


def mesh_words(plan: Mapping[str, Any]) -> str:
    """Axes of the mesh of a choice of shardings.

    >>> mesh_words({"mesh": {"data": 2, "model": 8}})
    'data=2 x model=8'
    """
    return " x ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())


SHARDED_SHOWN: Final = 3
"""Largest number of named parameters that are sharded."""


def sharded_words(plan: Mapping[str, Any]) -> list[str]:
    """Text on the sharded parameters of a choice of shardings; empty for other plans.

    >>> sharded_words({"shardings": {"a": "R", "b": "S(0)"}}), sharded_words({})
    (['1 of 2 parameters divided: b S(0)'], [])
    """
    every = plan.get("shardings", {})
    divided = [f"{name} {where}" for name, where in every.items() if "S" in where]
    if not every:
        return []
    more = f", and {len(divided) - SHARDED_SHOWN} more" if len(divided) > SHARDED_SHOWN else ""
    named = f": {', '.join(divided[:SHARDED_SHOWN])}{more}" if divided else ""
    return [f"{len(divided)} of {len(every)} parameters divided{named}"]


def lora_label(lora: Mapping[str, Any]) -> str:
    """Short description of adapters.

    >>> lora_label({"rank": 16, "targets": "linear", "qlora": True})
    'QLoRA rank 16 (linear)'
    """
    kind = f"{'Q' if lora.get('qlora') else ''}{'D' if lora.get('dora') else 'L'}oRA"
    return f"{kind} rank {number(lora.get('rank'))} ({number(lora.get('targets'))})"


def trained_label(work: Mapping[str, Any]) -> str:
    """Parameters of the adapters, and their share of all.

    >>> trained_label({"trained_parameters": 8_192_000, "parameters": 70_561_898_496})
    '8,192,000 of 70,561,898,496 parameters (0.012 %)'
    """
    trained, whole = work["trained_parameters"], work["parameters"]
    return f"{trained:,} of {whole:,} parameters ({100 * trained / whole:.2g} %)"


def band_text(e: Estimate) -> str:
    """The band of an estimate and what dominates it, in one line.

    90 %: nine of ten measured steps lie inside.
    """
    if e.step_time_band_s is None:
        return printable(e.provenance.band)
    low, high = e.step_time_band_s
    words = f"90 %: {seconds(low)} .. {seconds(high)}"
    named = [BAND_WORDS.get(name, name) for name in list(e.band_shares)[:SHOWN_SHARES]]
    return printable(f"{words}; most of it from: {', '.join(named)}" if named else words)


def _degree(name: str, value: Any) -> str:
    """Name and value joined; with ``=`` if the name ends in a digit (``tp2=4``)."""
    word = SHORT.get(name, name)
    return f"{word}{'=' if word[-1].isdigit() else ''}{number(value)}"


def days(value: float) -> str:
    """Days with two decimals; a short run with three digits.

    >>> days(97.9627), days(0.0123456)
    ('97.96', '0.0123')
    """
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def main_loss(time: Mapping[str, float]) -> str:
    """The largest group after computation, with its share of the step."""
    groups: dict[str, float] = {}
    for path, value in time.items():
        head = path.split("/")[0]
        groups[head] = groups.get(head, 0.0) + value
    total = sum(groups.values())
    losses = {name: value for name, value in groups.items() if "compute" not in name and value > 0}
    if not losses or not total:
        return "none"
    name = max(losses, key=lambda key: losses[key])
    return f"{name} {share(losses[name], total)}"


def grid(columns: Sequence[str], *, left: Sequence[int] = (0,)) -> Table:
    """An unframed table; columns are right-aligned, except those in ``left``, which may fold."""
    table = _grid_class()(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        if i in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


@cache
def _grid_class() -> type[Table]:
    """Table class that joins fitting cells to lines itself: the library's layout takes longer than an estimate."""
    from rich.cells import cell_len
    from rich.segment import Segment
    from rich.table import Table

    class Grid(Table):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            """The lines of the table; folded by the library if they do not fit."""
            sides = ["right" if column.justify == "right" else "left" for column in self.columns]
            columns = [[column.header, *column.cells] for column in self.columns]
            lines = side_by_side(columns, sides, options.max_width, cell_len) if self.show_header else None
            if lines is None:
                yield from super().__rich_console__(console, options)
                return
            for row, line in enumerate(lines):
                yield Segment(f"{line}\n") if row else Segment(line, console.get_style("table.header"))
                if not row:
                    yield Segment.line()

    return Grid


def side_by_side(
    columns: Sequence[Sequence[Any]], sides: Sequence[str], room: int, width_of: Callable[[str], int] = len
) -> list[str] | None:
    """Rows of a table as lines, columns two blanks apart; None: they do not fit, or a cell is no single line of text.

    Args:
        columns: cells of each column, the same number in each.
        sides: alignment of each column, ``left`` or ``right``.
        room: width of the longest line that fits.
        width_of: width of a text in characters.

    >>> side_by_side([["a", "long"], ["x", "10.5"]], ["left", "right"], 80)
    ['a        x', 'long  10.5']
    """
    if not all(isinstance(cell, str) and cell.isprintable() for cells in columns for cell in cells):
        return None
    most = [max(map(width_of, cells)) for cells in columns]
    if not all(most) or sum(most) + 2 * (len(most) - 1) > room:
        return None
    padded = []
    for cells, side, wide in zip(columns, sides, most, strict=True):
        cells = [cell.rstrip() for cell in cells] if side == "right" else cells
        blanks = [" " * (wide - width_of(cell)) for cell in cells]
        pairs = (blanks, cells) if side == "right" else (cells, blanks)
        padded.append([before + after for before, after in zip(*pairs, strict=True)])
    return ["  ".join(row) for row in zip(*padded, strict=True)]


def heading(out: Console, text: str) -> None:
    """A blank line and a heading."""
    out.print()
    out.print(text, style="bold")


def indented(out: Console, text: str, by: int = 4) -> None:
    """Print a text with its folded lines indented like its first."""
    from rich.padding import Padding
    from rich.text import Text

    out.print(Padding(Text(printable(text)), (0, 0, 0, by), expand=False))


def note_on(plan: Mapping[str, Any]) -> str:
    """Note that a reader needs before using a plan; empty: none.

    >>> note_on({"strategy": "1d"})
    ''
    """
    if plan.get("strategy") != "2d":
        return ""
    return (
        "note: 2d is SUMMA, which no common framework implements; --strategy 1d or --strategy context ranks "
        "what Megatron-LM runs"
    )


#: Share of the total below which terms or modules are folded by default.
FOLD: Final = 0.005


@dataclass(slots=True)
class _Node:
    value: float = 0.0
    children: dict[str, _Node] = field(default_factory=dict)


def term_table(terms: Mapping[str, float], unit: Callable[[float], str], *, title: str, show_all: bool) -> Table:
    """Table of a term tree: name (indented), value, share of the total; largest first within a parent.

    Args:
        terms: path to value.
        unit: formatter of a value.
        title: heading of the first column.
        show_all: show small terms too.
    """
    root = _tree(terms)
    table = grid((title, "", "share"))
    fold_below = 0.0 if show_all else FOLD * abs(root.value)
    for depth, name, value in _rows(root, 0, fold_below):
        table.add_row("  " * depth + printable(name), unit(value), share(value, root.value))
    table.add_row("total", unit(root.value), share(root.value, root.value))
    return table


def _tree(terms: Mapping[str, float]) -> _Node:
    root = _Node()
    for path, value in terms.items():
        node = root
        node.value += value
        for part in path.split("/"):
            node = node.children.setdefault(part, _Node())
            node.value += value
    return root


def _rows(node: _Node, depth: int, fold_below: float) -> Iterator[tuple[int, str, float]]:
    children = sorted(node.children.items(), key=lambda item: -abs(item[1].value))
    small = [(n, c) for n, c in children if abs(c.value) < fold_below or (not c.value and fold_below)]
    folded = len(small) > 1
    for name, child in children[: len(children) - len(small)] if folded else children:
        while len(child.children) == 1:
            (part, child), *_ = child.children.items()
            name = f"{name}/{part}"
        yield depth, name, child.value
        if abs(child.value) >= fold_below:
            yield from _rows(child, depth + 1, fold_below)
    if folded and (depth == 0 or len(small) < len(children)):
        yield depth, f"({len(small)} smaller)", sum(child.value for _, child in small)


LEAST = 12


def short_operator(name: str, room: int = 40) -> str:
    """The shortened name of an operator; if it is still too long, words before the last one are dropped.

    >>> short_operator("_scaled_dot_product_flash_attention_for_cpu_backward")
    'sdpa_flash_backward'
    >>> short_operator("fused_attention")
    'fused_attention'
    >>> short_operator("max_pool2d_with_indices_backward", 24)
    'max_pool2d.._backward'
    """
    short = name.replace("_for_cpu", "")
    if "_scaled_dot_product_" in short:
        short = short.replace("_scaled_dot_product_", "sdpa_").replace("_attention", "")
    if len(short) <= max(room, LEAST):
        return short
    head, _, last = short.rpartition("_")
    words = head.split("_")
    while len(words) > 1 and len("_".join(words)) + len(last) + 3 > room:
        words.pop()
    return _cut(f"{'_'.join(words)}.._{last}", room)


def short_path(path: str, room: int) -> str:
    """The path of a module; if it is too long, its first names are dropped.

    >>> short_path("model.language_model.layers.*.self_attn.q_proj", 18)
    '..self_attn.q_proj'
    """
    if len(path) <= max(room, LEAST):
        return path
    words = path.split(".")
    while len(words) > 1 and len(".".join(words)) + 2 > room:
        words.pop(0)
    return _cut(f"..{'.'.join(words)}", room)


def _cut(text: str, room: int) -> str:
    room = max(room, LEAST)
    return text if len(text) <= room else f"{text[: room - 2]}.."
