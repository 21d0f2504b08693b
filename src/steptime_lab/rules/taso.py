"""TASO's substitutions as rules, with the shapes that its matcher accepts.

A convolution is grouped if the input has a multiple of the weight's channels; TASO only checks divisibility. A split is
the inverse of the latest concatenation along its axis: it becomes two slices with the sizes of the concatenation.
Source: Jia et al., TASO, SOSP 2019 (the decoded file names it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from steptime.errors import InputFileError, UserError
from steptime.schema import Each, Field, Row, Table, anything, checked, letters, text
from steptime.store.files import read_text
from steptime_lab.rules.rule import Rule, unified
from steptime_lab.rules.sizes import Condition, Size, equal, size
from steptime_lab.rules.terms import Shape, Term, Variable, shape_of, term, variable

RELU: Final = 2
MAX_FILE_BYTES: Final = 2**22

_NAME: Final = text(pattern=r"in\d{1,3}|op\d{1,3}\.\d", called="a free input, as in0, or an output, as op0.1")


def _whole(**rows: Row) -> Table:
    """A table in which all keys are required."""
    return Table(rows=rows, required=rows)


_SIDE: Final = Each(
    row=_whole(op=letters(20), inputs=Each(row=_NAME), attributes=Table(named=Field(low=-99, high=99, whole=True))),
    most=9,
    called="a list of up to 9 operators",
)
_RULE: Final = _whole(
    rule=Field(low=0, high=10**9, whole=True),
    source=_SIDE,
    target=_SIDE,
    outputs=Each(row=_whole(source=_NAME, target=_NAME), least=1),
)
_FILE: Final = Table(rows={"rules": Each(row=_RULE)}, named=anything, required=("rules",))


def read(path: Path) -> list[Rule]:
    """Read all rules of a decoded file.

    Raises:
        InputFileError: it cannot be read, or has another form.
    """
    given = read_text(path, MAX_FILE_BYTES, "a file of substitutions")
    try:
        rows = checked(json.loads(given), _FILE, "")["rules"]
    except (ValueError, RecursionError, UserError) as error:
        raise InputFileError(str(path), f"is no file of TASO's substitutions: {error}") from None
    try:
        return [rule_of(row) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise InputFileError(str(path), f"is no file of TASO's substitutions: {type(error).__name__} {error}") from None


def rule_of(row: Mapping[str, Any]) -> Rule:
    """One substitution as a rule with unified sizes."""
    build = _Builder(row)
    sources, targets = (
        tuple(build.output(side, each[side]) for each in row["outputs"]) for side in ("source", "target")
    )
    variables = tuple(Variable(name=name, dims=dims) for name, dims in sorted(build.variables.items()))
    used = {name for each in (*sources, *targets) for name in each.variables()}
    rule = Rule(
        name=f"taso-{row['rule']}",
        variables=tuple(v for v in variables if v.name in used),
        sources=sources,
        targets=targets,
        where=tuple(build.where),
        origin="TASO",
    )
    out = unified(rule)
    if out is None:
        raise UserError(f"{rule.name}: the shapes of both sides do not fit together")
    return out


class _Builder:
    """Builder of the terms of both sides of a substitution; operators determine the ranks of their inputs."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.where: list[Condition] = []
        self.known: dict[tuple[str, str], Term] = {}
        self.splits: dict[tuple[str, str], list[Term]] = {}
        ranks = dict(_ranks(row))
        self.variables: dict[str, Shape] = {
            name: tuple(size(f"{name}_{i}") for i in range(ranks.get(name, 2))) for name in _inputs(row)
        }
        self.table = {name: Variable(name=name, dims=dims) for name, dims in self.variables.items()}

    def output(self, side: str, name: str) -> Term:
        """The term of an output, such as ``op2.0``, or of an input."""
        if name.startswith("in"):
            return variable(name)
        if (side, name) not in self.known:
            number, _, port = name.removeprefix("op").partition(".")
            self.known[side, name] = self._made(side, self.row[side][int(number)], int(port))
        return self.known[side, name]

    def _made(self, side: str, op: Mapping[str, Any], port: int) -> Term:
        given, attributes = op["op"], op["attributes"]
        children = tuple(self.output(side, each) for each in op["inputs"])
        if given == "concat":
            return term("concat", children, (attributes["axis"] - attributes["num_dims"],))
        if given == "split":
            return self._part(children[0], attributes["axis"], port)
        if given == "conv2d":
            return self._conv(children, attributes)
        return term(given, children)

    def _shape(self, of: Term) -> Shape:
        return shape_of(of, self.table, {}, [])

    def _part(self, whole: Term, axis: int, port: int) -> Term:
        rank = len(self._shape(whole))
        parts = list(_parts(whole, axis - rank, self))
        start = parts[0] if port else size(0)
        return term("slice", (whole,), (axis - rank, start, start + parts[port]))

    def _conv(self, children: tuple[Term, ...], attributes: Mapping[str, Any]) -> Term:
        x, w = map(self._shape, children)
        kernel = (attributes["kernel_h"], attributes["kernel_w"])
        self.where += [equal(dim, k) for dim, k in zip(w[2:], kernel, strict=True)]
        if attributes["stride_h"] != attributes["stride_w"]:
            raise UserError("a convolution with two strides")
        pad = (kernel[0] - 1) // 2 if attributes["pad"] == 0 else 0
        out = term("conv", children, (attributes["stride_h"], pad, 1, x[1] // w[1]))
        return term("relu", (out,)) if attributes["activation"] == RELU else out


def _parts(whole: Term, axis: int, build: _Builder) -> Iterator[Size]:
    """Sizes of the parts of the latest concatenation along an axis, below operators that keep the axis."""
    at: Term = whole
    while at.op != "concat" or at.attributes[0].number != axis:
        at, axis = _below(at, axis)
    for child in at.children:
        yield build._shape(child)[axis]


def _below(at: Term, axis: int) -> tuple[Term, int]:
    """The argument and its axis from which an axis of an operator's result comes."""
    if at.op == "conv" and axis == -3:
        return at.children[1], -4
    if at.op == "matmul" and axis == -1:
        return at.children[1], -1
    if not at.children:
        raise UserError("a split of what is no concatenation")
    return at.children[0], axis


def _inputs(row: Mapping[str, Any]) -> Iterator[str]:
    for side in ("source", "target"):
        for op in row[side]:
            yield from (each for each in op["inputs"] if each.startswith("in"))
    yield from (each[s] for each in row["outputs"] for s in ("source", "target") if each[s].startswith("in"))


def _ranks(row: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Ranks of inputs, propagated through operators that keep the rank."""
    ranks: dict[tuple[str, str], int] = {}
    for _ in range(8):
        for side in ("source", "target"):
            for number, op in enumerate(row[side]):
                _spread(ranks, side, number, op)
        for each in row["outputs"]:
            keys = [_key(s, each[s]) for s in ("source", "target")]
            found = [ranks[key] for key in keys if key in ranks]
            ranks.update(dict.fromkeys(keys, found[0]) if found else {})
    yield from ((name, rank) for (_, name), rank in ranks.items() if name.startswith("in"))


def _key(side: str, name: str) -> tuple[str, str]:
    return ("" if name.startswith("in") else side, name)


def _spread(ranks: dict[tuple[str, str], int], side: str, number: int, op: Mapping[str, Any]) -> None:
    ends: Sequence[str] = [*op["inputs"], *(f"op{number}.{port}" for port in range(2))]
    keys = [_key(side, name) for name in ends]
    fixed = {"concat": op["attributes"].get("num_dims"), "conv2d": 4, "matmul": 2}.get(op["op"])
    found = [fixed] if fixed else [ranks[key] for key in keys if key in ranks]
    ranks.update(dict.fromkeys(keys, found[0]) if found else {})
