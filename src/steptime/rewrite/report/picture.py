"""A picture of a graph before and after as two columns: removed operators in red, added ones in green."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from steptime.captured.graph import Node
from steptime.captured.graph.program import SOURCES
from steptime.captured.ops import VIEWS
from steptime.rewrite.flow import FUSED, Flow
from steptime.rewrite.rewriting import Rewriting
from steptime.units import format_seconds

ROW, BOX, WIDTH, GAP, TOP = 26, 20, 380, 90, 70
MOST: Final = 120
"""Largest number of operators in a column."""
COLOURS: Final = {"same": "#e8e8e8", "gone": "#f4b6b0", "new": "#b7e1b5"}


@dataclass(frozen=True, slots=True)
class _Box:
    node: Node
    text: str
    kind: str
    times: int


def svg(found: Rewriting) -> str:
    """The picture as SVG text."""
    before, after = found.rewritten.before, found.rewritten.after
    kinds = [Counter(_kind(flow, node) for node in flow.order if _drawn(node)) for flow in (before, after)]
    columns = [_boxes(found, before, kinds[1], "gone"), _boxes(found, after, kinds[0], "new")]
    height = TOP + ROW * max(map(len, columns)) + 20
    width = 2 * WIDTH + 3 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    stages = list(found.stages.values())
    fused = found.stages.get("fused", stages[1])
    for number, (title, totals) in enumerate((("before", stages[0]), ("after", fused))):
        x = GAP + number * (WIDTH + GAP)
        line = f"{title}: {format_seconds(totals['step_time_s'])}, {totals['launches']:,.0f} launches"
        parts.append(f'<text x="{x}" y="26" font-size="15" font-weight="bold">{escape(line)}</text>')
        parts.append(f'<text x="{x}" y="46" fill="#555">{escape(f"{found.name} on {found.device.title}")}</text>')
        parts += _column(columns[number], x)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _boxes(found: Rewriting, flow: Flow, other: Counter[object], kind: str) -> list[_Box]:
    """Boxes of operators, of equal blocks only the first, up to :data:`MOST`."""
    whole = found.prices.sums(flow, flow.order).device_s or 1.0
    times = Counter(_template(flow, node) for node in flow.order if _drawn(node))
    first: set[tuple[object, ...]] = set()
    out: list[_Box] = []
    for node in flow.order:
        if not _drawn(node):
            continue
        key, block = _template(flow, node), _numbers(flow, node)
        drawn = (box.node for box in out if box.node is not node)
        if key in first and any(_template(flow, each) == key and _numbers(flow, each) != block for each in drawn):
            continue
        first.add(key)
        cost = found.prices.cost(flow, node)
        share = "" if cost is None else f"  {100 * cost.seconds / whole:.1f} %"
        shape = "x".join(map(str, node.outputs[0].shape)) if node.outputs else ""
        text = f"{_label(node)}  {shape}{share}"
        out.append(_Box(node, text, "same" if other[_kind(flow, node)] else kind, times[key]))
    return out[:MOST]


def _kind(flow: Flow, node: Node) -> object:
    """Key of equal operators in two graphs: module, operator, types and attributes."""
    return flow.place(node).module, node.op, node.outputs, tuple(value.type for value in node.inputs), node.attributes


def _drawn(node: Node) -> bool:
    return node.op not in SOURCES and not (node.op in VIEWS and node.inputs)


def _numbers(flow: Flow, node: Node) -> tuple[str, ...]:
    return tuple(part for part in flow.place(node).module.split(".") if part.isdigit())


def _template(flow: Flow, node: Node) -> tuple[object, ...]:
    return flow.block(node), node.op, node.outputs, flow.place(node).phase


def _label(node: Node) -> str:
    if node.op != FUSED:
        return node.op
    steps = node.attribute("steps")
    names = [str(step[0]) for step in steps if isinstance(step, tuple)] if isinstance(steps, tuple) else []
    return f"fused({' '.join(names[:5])}{' ...' if len(names) > 5 else ''})"


def _column(boxes: Sequence[_Box], x: int) -> list[str]:
    at = {box.node: number for number, box in enumerate(boxes)}
    parts: list[str] = []
    for number, box in enumerate(boxes):
        y = TOP + ROW * number
        for source in dict.fromkeys(_above(box.node)):
            if source in at and at[source] < number:
                parts.append(_edge(x, at[source], number))
        mark = f"  ({box.times}x)" if box.times > 1 else ""
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{BOX}" rx="3" fill="{COLOURS[box.kind]}"/>')
        parts.append(f'<text x="{x + 6}" y="{y + 14}">{escape(box.text + mark)}</text>')
    return parts


def _above(node: Node) -> list[Node]:
    """Operators that a node reads, through views."""
    out: list[Node] = []
    waiting = [value.node for value in node.inputs]
    while waiting:
        each = waiting.pop()
        if each.op in VIEWS and each.inputs:
            waiting.append(each.inputs[0].node)
        else:
            out.append(each)
    return out


def _edge(x: int, start: int, end: int) -> str:
    begin, stop = TOP + ROW * start + BOX, TOP + ROW * end
    if end == start + 1:
        middle = x + 20
        return f'<path d="M{middle} {begin} L{middle} {stop}" stroke="#888" fill="none"/>'
    reach = min(12 + 3 * (end - start), GAP - 10)
    y1, y2 = begin - BOX / 2, stop + BOX / 2
    curve = f"M{x} {y1} C{x - reach} {y1} {x - reach} {y2} {x} {y2}"
    return f'<path d="{curve}" stroke="#aaa" fill="none"/>'
