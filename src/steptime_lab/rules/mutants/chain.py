"""Chains of dilated convolutions as one space to batch, dense convolutions, and one batch to space.

An element-wise function commutes with moving pixels, and space to batch is the inverse of batch to space if the image
size is a multiple of the dilation. The two therefore cancel between the convolutions of a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.rewrite.retype import POINTWISE
from steptime.rewrite.scene import Match, Scene, shape_text
from steptime_lab.rules.domains import FUNCTIONS
from steptime_lab.rules.lowering import Lowering
from steptime_lab.rules.mutants.moves import ordered, shaped
from steptime_lab.rules.mutants.programs import Convolution
from steptime_lab.rules.rule import LEAST_ASSIGNMENTS, Certificate, Rule
from steptime_lab.rules.sizes import Size, size
from steptime_lab.rules.terms import Term, Variable, term, variable
from steptime_lab.rules.verify_exact import proved_exactly
from steptime_lab.rules.verify_random import Counterexample, fuzzed

LEAST: Final = 2
"""Least number of convolutions of a chain."""
UNARY: Final = POINTWISE & (set(FUNCTIONS) - {"recip"})
"""Unary functions that may separate two convolutions."""


def geometry(node: Node) -> Convolution | None:
    """The geometry of a two-dimensional convolution; None: no program has it."""
    x, w = node.input("input"), node.input("weight")
    plain = x is not None and w is not None and x.type.rank == 4 and not node.attribute("transposed")
    if not plain or w is None or both(node, "stride") != 1:
        return None
    pad, dilation = both(node, "padding"), both(node, "dilation")
    if pad is None or dilation is None:
        return None
    high, wide = w.type.shape[2:]
    groups = int(str(node.attribute("groups", 1)))
    return Convolution(
        kernel=(high, wide), pad=pad, dilation=dilation, groups=groups, bias=node.input("bias") is not None
    )


def both(node: Node, name: str) -> int | None:
    """The value of an attribute that is equal along both dims; None: it differs."""
    given = node.attribute(name)
    numbers = {int(str(each)) for each in given} if isinstance(given, tuple) else {int(str(given))}
    return numbers.pop() if len(numbers) == 1 else None


def chains(scene: Scene) -> Iterator[Match]:
    """The longest chains of a graph."""
    in_chains: set[Node] = set()
    for first in scene.each("convolution"):
        given = geometry(first)
        if first in in_chains or given is None or given.dilation < 2 or given.groups > 1:
            continue
        d, x = given.dilation, first.inputs[0]
        same = given.halo == (2 * given.pad, 2 * given.pad) and given.pad % d == 0
        if not same or x.type.shape[2] % d or x.type.shape[3] % d:
            continue
        found: list[tuple[Node, str]] = [(first, "")]
        while (after := _next(scene, found[-1][0].value())) is not None:
            node, function = after
            other = geometry(node)
            if other is None or replace(other, bias=given.bias) != given:
                break
            found[-1] = (found[-1][0], function)
            found.append((node, ""))
        in_chains |= {node for node, _ in found}
        if len(found) >= LEAST and (made := _made(scene, found, given.kernel[0], given.pad, d)) is not None:
            yield made


def _next(scene: Scene, value: Value) -> tuple[Node, str] | None:
    """The convolution that is the only reader of a value, and the function in between; None: there is none."""
    function = ""
    while scene.only_use(value):
        (reader, *_) = scene.flow.users[value]
        if reader.op == "convolution":
            return (reader, function) if reader.inputs[0] == value else None
        if reader.op not in UNARY or len(reader.inputs) != 1 or function or reader.outputs[0] != value.type:
            return None
        function, value = reader.op, reader.value()
    return None


def _made(scene: Scene, found: list[tuple[Node, str]], kernel: int, pad: int, d: int) -> Match | None:
    functions = tuple(function for _, function in found)
    biased = tuple(node.input("bias") is not None for node, _ in found)
    rule = chain_rule(functions, biased, kernel, pad, d)
    if not rule.certificate.exact:
        return None
    x = found[0][0].inputs[0]
    n, c, h, v = x.type.shape
    values, sizes = {"x": x}, {"n": n, "c0": c, "h": h // d, "v": v // d}
    for number, (node, _) in enumerate(found, 1):
        values[f"w{number}"], sizes[f"c{number}"] = node.inputs[1], node.outputs[0].shape[1]
        bias = node.input("bias")
        if bias is not None:
            values[f"b{number}"] = bias
    made = Lowering(scene, {variable(name): value for name, value in values.items()}, sizes, copies=True).value(
        rule.targets[0]
    )
    last = found[-1][0]
    what = f"{len(found)} of dilation {d}, {shape_text(x.type, last.outputs[0])}"
    return Match(root=found[0][0], replace={last.value(): made}, what=what)


@lru_cache(maxsize=64)
def chain_rule(functions: tuple[str, ...], biased: tuple[bool, ...], kernel: int, pad: int, d: int) -> Rule:
    """The rule of a chain with its certificate; polynomials are compared for its first two convolutions."""
    rule = _rule(functions, biased, kernel, pad, d)
    random = fuzzed(rule)
    if isinstance(random, Counterexample) or random < LEAST_ASSIGNMENTS:
        return rule
    exact = proved_exactly(_rule((*functions[:1], ""), biased[:2], kernel, pad, d)) or 0
    return replace(rule, certificate=Certificate(random=random, exact=exact))


def _rule(functions: tuple[str, ...], biased: tuple[bool, ...], kernel: int, pad: int, d: int) -> Rule:
    names = [size(f"c{number}") for number in range(len(functions) + 1)]
    n, high, wide = size("n"), size("h") * d, size("v") * d
    variables = [Variable(name="x", dims=(n, names[0], high, wide))]
    for number, has_bias in enumerate(biased, 1):
        dims = (names[number], names[number - 1], size(kernel), size(kernel))
        variables.append(Variable(name=f"w{number}", dims=dims, kind="weight"))
        if has_bias:
            variables.append(Variable(name=f"b{number}", dims=(names[number], size(1), size(1)), kind="weight"))

    def along(x: Term, attributes: tuple[int, ...]) -> Term:
        def step(now: Term, number: int) -> Term:
            made = term("conv", (now, variable(f"w{number}")), attributes)
            made = term("add", (made, variable(f"b{number}"))) if biased[number - 1] else made
            return term(functions[number - 1], (made,)) if functions[number - 1] else made

        return reduce(step, range(1, len(functions) + 1), x)

    batch = along(phases(variable("x"), (n, names[0], size("h"), size("v")), d), (1, pad // d, 1, 1))
    target = images(batch, (n, names[-1], size("h"), size("v")), d)
    source = along(variable("x"), (1, pad, d, 1))
    return Rule(name=f"chain of {len(functions)}", variables=tuple(variables), sources=(source,), targets=(target,))


def phases(x: Term, part: tuple[Size, ...], d: int) -> Term:
    """Space to batch: pixels of equal phase become images; ``part`` is the shape of one phase of each image."""
    n, c, h, v = part
    return shaped(ordered(shaped(x, n, c, h, d, v, d), 3, 5, 0, 1, 2, 4), n * d * d, c, h, v)


def images(x: Term, part: tuple[Size, ...], d: int) -> Term:
    """Batch to space, the inverse of :func:`phases`."""
    n, c, h, v = part
    return shaped(ordered(shaped(x, d, d, n, c, h, v), 2, 3, 4, 0, 5, 1), n, c, h * d, v * d)
