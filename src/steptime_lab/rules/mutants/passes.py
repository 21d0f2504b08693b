"""Mutants as passes, lowered and priced with their corrections.

They are not default passes, because nearly all of them lose on CPUs. ``--mutants``, ``--only`` and the searches use
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from steptime.captured.graph import Node, Value
from steptime.captured.ops import making
from steptime.errors import UserError
from steptime.rewrite.scene import Match, Pass, Scene, is_op, shape_text
from steptime_lab.rules.lowering import Lowering
from steptime_lab.rules.mutants.chain import both, chains, geometry
from steptime_lab.rules.mutants.correct import (
    BOXES,
    EXACT,
    HALO_ROWS,
    ZERO_ROWS,
    Corrected,
    corrected,
    corrected_product,
    corrected_spread,
)
from steptime_lab.rules.mutants.programs import Convolution
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.terms import variable

SOURCE: Final = "Wang et al., PET, OSDI 2021"


@dataclass(frozen=True, slots=True)
class Site:
    """A node as an instance of a program: values and numbers for the program's names."""

    values: Mapping[str, Value]
    sizes: Mapping[str, int]


def convolution_site(node: Node, groups: int) -> Site:
    """Values and sizes of a convolution."""
    x, w, b = (node.input(name) for name in ("input", "weight", "bias"))
    assert x is not None and w is not None
    values = {"x": x, "w": w} | ({} if b is None else {"b": b})
    (n, channels, h, v), filters = x.type.shape, w.type.shape[0]
    return Site(values, {"n": n, "c": channels // groups, "h": h, "v": v, "o": filters // groups})


def holds(rule: Rule, sizes: Mapping[str, int]) -> bool:
    """True if the conditions of a rule hold for sizes."""
    return all(each.holds(dict(sizes)) for each in rule.needs())


Accept = Callable[[Corrected], bool]


def _of_convolutions(accept: Accept, *, boxes: bool = False, images: int = 1) -> Callable[[Scene], Iterator[Match]]:
    """Finder of convolutions of at least ``images`` images with an accepted replacement."""

    def find(scene: Scene) -> Iterator[Match]:
        for node in scene.each("convolution"):
            given = geometry(node) if node.inputs[0].type.shape[0] >= images else None
            found = () if given is None else _chosen(given, accept, boxes)
            if not found or given is None:
                continue
            site = convolution_site(node, given.groups)
            each = next((c for c in found if holds(c.rule, site.sizes)), None)
            if each is not None:
                yield _match(scene, node, each, site)

    return find


def _chosen(given: Convolution, accept: Accept, boxes: bool) -> tuple[Corrected, ...]:
    """Accepted replacements for a geometry; no boxes of kernels that are not square, whose borders take minutes."""
    boxes = boxes and given.kernel[0] == given.kernel[1]
    try:
        return tuple(each for each in corrected(given, boxes=boxes) if accept(each))
    except UserError:  # No small sizes satisfy the operators of this geometry.
        return ()


def _match(scene: Scene, node: Node, each: Corrected, site: Site) -> Match:
    values = {variable(name): value for name, value in site.values.items()}
    made = Lowering(scene, values, site.sizes, copies=True).value(each.rule.targets[0])
    how = "" if each.correction == EXACT else f", {each.correction}"
    what = f"{shape_text(*(v.type for v in node.inputs[:2]))}: {each.path}{how}"
    return Match(root=node, replace={node.value(): made}, what=what)


def _spreads(scene: Scene) -> Iterator[Match]:
    """Transposed convolutions with a stride equal to their kernel."""
    for node in scene.each("convolution"):
        x, w, b = (node.input(name) for name in ("input", "weight", "bias"))
        if not node.attribute("transposed") or x is None or w is None or x.type.rank != 4 or both(node, "groups") != 1:
            continue
        kernel, zero = set(w.type.shape[2:]), {both(node, "padding"), both(node, "output_padding")}
        if kernel != {both(node, "stride")} or zero != {0} or both(node, "dilation") != 1:
            continue
        found = corrected_spread(kernel.pop(), bias=b is not None)
        (n, c, h, v), o = x.type.shape, w.type.shape[1]
        values = {"x": x, "w": w} | ({} if b is None else {"b": b})
        for each in found:
            yield _match(scene, node, each, Site(values, {"n": n, "c": c, "h": h, "v": v, "o": o}))


def _joined_products(scene: Scene) -> Iterator[Match]:
    """Products of a batch of matrices with one expanded matrix become one product of all rows."""
    for node in scene.each("bmm"):
        x, w = node.inputs
        if not is_op(w, "expand") or w.node.inputs[0].type.elements * x.type.shape[0] != w.type.elements:
            continue
        flat = making.reshape(scene.nodes, w.node.inputs[0], w.type.shape[1:])
        (b, m, k), p = x.type.shape, w.type.shape[2]
        for each in corrected_product(batched=False):
            if each.path == "rows, product, batch":
                yield _match(scene, node, each, Site({"x": x, "w": flat}, {"b": b, "m": m, "k": k, "p": p}))


def _row(name: str, matches: str, condition: str, makes: str, find: Callable[[Scene], Iterator[Match]]) -> Pass:
    return Pass(
        name=name,
        matches=matches,
        condition="; ".join(filter(None, (condition, "stride one, both dims alike"))),
        makes=makes,
        source=SOURCE,
        find=find,
        modes=("inference",),
        reorders=True,
        mutates=True,
    )


def _path(*paths: str) -> Accept:
    return lambda each: each.path in paths and each.correction == EXACT


MUTANT_PASSES: Final = (
    _row(
        "dilated chain: space to batch",
        "dilated convolutions one after the other, with element-wise functions between",
        "one dilation, padding and size of image; a multiple of the dilation; nothing else reads what is between",
        "pixels of equal phase as images of their own, once for all; dense convolutions",
        chains,
    ),
    _row(
        "dilated conv: space to batch",
        "a dilated convolution",
        "padding a multiple of the dilation",
        "zero rows up to a multiple, pixels of equal phase as images, a dense convolution, the way back",
        _of_convolutions(lambda each: "dense convolution" in each.path and each.correction == EXACT),
    ),
    _row(
        "batch to rows",
        "a convolution of several images",
        "",
        "all images below each other with zero rows between, one convolution, the way back",
        _of_convolutions(lambda each: each.path.startswith("N2H") and each.correction in (ZERO_ROWS, EXACT), images=2),
    ),
    _row(
        "batch to columns",
        "a convolution of several images",
        "",
        "all images next to each other with zero columns between, one convolution, the way back",
        _of_convolutions(lambda each: each.path.startswith("N2W") and each.correction in (ZERO_ROWS, EXACT), images=2),
    ),
    _row(
        "rows to batch",
        "a convolution",
        "padding that keeps the size of the image",
        "blocks of rows with the rows of their neighbours as images, one convolution, the way back",
        _of_convolutions(lambda each: each.correction == HALO_ROWS),
    ),
    _row(
        "batch to rows, boxes again",
        "a convolution of several images",
        "images higher than the window, which is square",
        "all images below each other, one convolution, and the convolution again where windows met two images",
        _of_convolutions(lambda each: each.path.startswith("N2H") and each.correction == BOXES, boxes=True, images=2),
    ),
    _row(
        "1x1 conv: product",
        "a 1x1 convolution",
        "",
        "filters times channels x pixels, for each image",
        _of_convolutions(_path("product")),
    ),
    _row(
        "1x1 conv: product of rows",
        "a 1x1 convolution",
        "",
        "pixels x channels times filters, all images at once",
        _of_convolutions(_path("product of rows")),
    ),
    _row(
        "conv: product of patches",
        "a convolution",
        "",
        "the pixels under each place of the window written out, and a product",
        _of_convolutions(_path("product of patches")),
    ),
    _row(
        "transposed conv: product",
        "a transposed convolution",
        "stride equal to the kernel, no padding, no groups",
        "a product at every pixel, channels to space",
        _spreads,
    ),
    _row(
        "batched product of one matrix",
        "a batch of matrices times one expanded matrix",
        "",
        "one product of all rows",
        _joined_products,
    ),
)
"""Mutants as passes for any search."""


def mutants(_given: str = "") -> tuple[Pass, ...]:
    """The mutants as a set of moves."""
    return MUTANT_PASSES
