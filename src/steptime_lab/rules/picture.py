"""Pictures of rules: trees for a terminal, and both graphs side by side as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import zip_longest
from typing import Final

from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.terms import VARIABLE, Term

BOX: Final = (128, 30)
GAP: Final = (16, 34)
MARGIN: Final = 14


def label(given: Term, rule: Rule) -> str:
    """Label of a term: a variable with its dims, or an operator with its attributes."""
    if given.op == VARIABLE:
        return str(rule.table[given.name])
    attributes = f"[{', '.join(map(str, given.attributes))}]" if given.attributes else ""
    return f"{given.op}{attributes}"


def tree(given: Term, rule: Rule) -> list[str]:
    """A term as lines of a tree."""
    lines = [label(given, rule)]
    for number, child in enumerate(given.children):
        end = number == len(given.children) - 1
        head, *more = tree(child, rule)
        lines.append(("└─ " if end else "├─ ") + head)
        lines += [("   " if end else "│  ") + line for line in more]
    return lines


def drawn(rule: Rule, width: int = 80) -> str:
    """Text of both sides next to each other, or one below the other if they are too wide."""
    sides = [[line for term in side for line in tree(term, rule)] for side in (rule.sources, rule.targets)]
    left = max(map(len, sides[0])) + 4
    if left + max(map(len, sides[1])) + 3 > width:
        return "\n".join([*sides[0], "becomes", *sides[1]])
    middle = max(len(sides[0]), len(sides[1])) // 2
    rows = zip_longest(*sides, fillvalue="")
    return "\n".join(
        f"{a:<{left}}{'=> ' if number == middle else '   '}{b}".rstrip() for number, (a, b) in enumerate(rows)
    )


def tex(given: Term) -> str:
    r"""A term as LaTeX.

    >>> from steptime_lab.rules.terms import parsed
    >>> tex(parsed("matmul(x, relu(y))"))
    '{x} {\\operatorname{relu}({y})}'
    """
    if given.op == VARIABLE:
        return given.name
    out = OPERATORS[given.op].tex
    for number, child in enumerate(given.children):
        out = out.replace(f"{{{number}}}", f"{{{tex(child)}}}")
    for number, attribute in enumerate(given.attributes):
        out = out.replace(f"{{a{number}}}", f"{{{attribute}}}")
    return out.replace("{*}", ", ".join(map(tex, given.children)))


def svg(rule: Rule) -> str:
    """SVG of both graphs side by side, inputs above and outputs below; shared terms of outputs are one box."""
    parts, left, height = [], MARGIN, 0
    for title, side in (("source", rule.sources), ("target", rule.targets)):
        boxes, wide, high = _placed(side)
        parts.append(f'<text x="{left}" y="{MARGIN + 4}" class="t">{title}</text>')
        parts += _side(boxes, rule, left, side)
        left, height = left + wide + 3 * MARGIN, max(height, high)
    size = f'width="{left}" height="{height + 3 * MARGIN}"'
    style = (
        "text{font:12px sans-serif;fill:#222}.t{font-weight:bold}rect{fill:#eef3fa;stroke:#456}"
        ".v{fill:#fff7e0}path{stroke:#456;fill:none}"
    )
    title = f"<title>{escape(rule.name)}: {escape(rule.equation())}</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{title}<style>{style}</style>{"".join(parts)}</svg>\n'


def _placed(side: Sequence[Term]) -> tuple[dict[Term, tuple[int, int]], int, int]:
    """Position of every box (one row per depth below the inputs), width and height."""
    depths: dict[Term, int] = {}
    for term in side:
        _depth(term, depths)
    rows: dict[int, list[Term]] = {}
    for term, depth in depths.items():
        rows.setdefault(depth, []).append(term)
    wide = max(map(len, rows.values())) * (BOX[0] + GAP[0])
    boxes = {}
    for depth, terms in rows.items():
        start = (wide - len(terms) * (BOX[0] + GAP[0])) // 2
        for number, term in enumerate(terms):
            boxes[term] = (start + number * (BOX[0] + GAP[0]), 2 * MARGIN + depth * (BOX[1] + GAP[1]))
    return boxes, wide, 2 * MARGIN + (max(rows) + 1) * (BOX[1] + GAP[1])


def _depth(given: Term, depths: dict[Term, int]) -> int:
    if given not in depths:
        depths[given] = max((_depth(child, depths) + 1 for child in given.children), default=0)
    return depths[given]


def _side(boxes: dict[Term, tuple[int, int]], rule: Rule, left: int, outputs: Sequence[Term]) -> Iterator[str]:
    for term, (x, y) in boxes.items():
        for child in term.children:
            a, b = boxes[child]
            start, end = (left + a + BOX[0] // 2, b + BOX[1]), (left + x + BOX[0] // 2, y)
            bend = f"{start[0]} {start[1] + GAP[1] // 2} {end[0]} {end[1] - GAP[1] // 2}"
            yield f'<path d="M{start[0]} {start[1]}C{bend} {end[0]} {end[1]}"/>'
    for term, (x, y) in boxes.items():
        kind = ' class="v"' if term.op == VARIABLE else ""
        bold = ' class="t"' if term in outputs else ""
        text = escape(label(term, rule))
        fit = f' textLength="{BOX[0] - 8}" lengthAdjust="spacingAndGlyphs"' if len(text) > 20 else ""
        yield f'<rect x="{left + x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="4"{kind}/>'
        yield f'<text x="{left + x + 4}" y="{y + 20}"{bold}{fit}>{text}</text>'
