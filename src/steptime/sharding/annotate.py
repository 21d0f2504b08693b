"""Annotations: shardings that a user gives for tensors of a captured module, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from steptime.captured.graph import TensorType
from steptime.captured.ops.placement import Placement, R, Sharding, divides, placement_of, text_of
from steptime.errors import UnknownNameError, UserError, counted, first_few, shorten
from steptime.sharding.build import Built
from steptime.sharding.flow import Flow, Look, root_of
from steptime.sharding.options import strategies

EQUAL: Final = "they are one tensor, or of equal blocks, which have the same shardings"
Pins = Mapping[int, tuple[int, ...]]
"""Item -> the options that it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A sharding for every tensor whose name a pattern matches."""

    pattern: str
    sharding: Sharding

    def __str__(self) -> str:
        return f"{self.pattern}={text_of(self.sharding)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A tensor that has a name: a parameter, a buffer, an input, or the result of a module."""

    item: int
    output: int
    looks: tuple[Look, ...]
    """Views from the output of the item to the tensor."""
    type: TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """The sharding that an annotation gives to one output of an item."""

    name: str
    annotation: Annotation
    item: int
    output: int
    sharding: Sharding
    """Sharding of the output before any view is applied."""


def annotation_of(text: str) -> Annotation:
    """Parse an annotation: a pattern of names, then a placement for each axis of the mesh.

    Raises:
        UserError: the text has another form.

    >>> str(annotation_of("blocks.*.mlp.0.weight = R S(0)"))
    'blocks.*.mlp.0.weight=R S(0)'
    """
    pattern, equals, sharding = (part.strip() for part in text.partition("="))
    if not (pattern and equals and sharding):
        raise UserError(f"{shorten(text)!r} is no annotation", hint='write "blocks.*.mlp.0.weight=R S(0)"')
    try:
        return Annotation(pattern=pattern, sharding=tuple(map(placement_of, sharding.split())))
    except UserError as error:
        raise UserError(f"annotation {shorten(text)}: {error}") from None


def named_tensors(flow: Flow) -> dict[str, Named]:
    """Tensors that can be annotated, by name; the name of a module means its result in the forward pass.

    Where a parameter and a module have the same name, it means the parameter.
    """
    out = _results(flow)
    for number, item in enumerate(flow.items):
        if item.kind == "source" and item.node.op in ("input", "buffer"):
            out[item.name] = Named(item=number, output=0, looks=(), type=item.node.outputs[0])
    for name, number in flow.of_parameter.items():
        out[name] = Named(item=number, output=0, looks=(), type=flow.items[number].node.outputs[0])
    return out


def _results(flow: Flow) -> dict[str, Named]:
    writer: dict[int, int] = {}
    out = {}
    for number, call in enumerate(flow.program.calls):
        if call.phase != "forward" or not call.writes:
            continue
        if number in flow.of_call:
            writer.update(dict.fromkeys(call.writes, number))
        maker = flow.of_call.get(writer.get(call.writes[0], -1))
        path = call.module
        while path and maker is not None:
            value = call.node.value(0)
            root, looks = root_of(value)
            out[path] = Named(item=maker, output=root.index, looks=looks, type=value.type)
            path = path.rpartition(".")[0]
    return out


def matching(named: Mapping[str, Named], pattern: str) -> list[str]:
    """Names that match a pattern, in the order of the module.

    Raises:
        UnknownNameError: none does.
    """
    found = [name for name in named if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        raise UnknownNameError("parameter, input or module", pattern, named)
    return found


def resolved(built: Built, annotations: Sequence[Annotation]) -> tuple[Annotated, ...]:
    """The shardings that annotations give to outputs of items, one for each output.

    Raises:
        UserError: a pattern matches nothing, a sharding does not fit its tensor, or two annotations contradict.
    """
    named, found = named_tensors(built.flow), dict[tuple[int, int], Annotated]()
    for annotation in annotations:
        for name in matching(named, annotation.pattern):
            tensor = named[name]
            _check(built, name, tensor, annotation)
            sharding = _before_views(tensor, annotation.sharding, built.mesh.sizes, f"{annotation}: {name}")
            one = Annotated(name=name, annotation=annotation, item=tensor.item, output=tensor.output, sharding=sharding)
            other = found.setdefault((tensor.item, tensor.output), one)
            if other.sharding != sharding:
                same = f"tensor {name}" if other.name == name else f"tensors {other.name} and {name}"
                raise UserError(
                    f"annotations {other.annotation} and {annotation} contradict each other for {same}",
                    hint="a tensor has one sharding" if other.name == name else EQUAL,
                )
    return tuple(found.values())


def _check(built: Built, name: str, tensor: Named, annotation: Annotation) -> None:
    mesh, sharding, shape = built.mesh, annotation.sharding, tensor.type.shape
    text = "x".join(map(str, shape)) or "a single element"
    if len(sharding) != len(mesh.sizes):
        raise UserError(
            f"annotation {annotation} has {counted(len(sharding), 'placement')}, {mesh} has {len(mesh.sizes)} axes",
            hint="give one placement for each axis, the outermost first",
        )
    beyond = next((each for each in sharding if each.dim is not None and each.dim >= len(shape)), None)
    if beyond is not None:
        raise UserError(
            f"annotation {annotation}: {name} is {text}, it has no dim {beyond.dim}",
            hint=f"dims are 0 to {len(shape) - 1}" if shape else "it can only be R",
        )
    if not divides(shape, sharding, mesh.sizes):
        raise UserError(
            f"annotation {annotation}: {name} is {text}, which mesh {mesh} does not divide",
            hint="where S(d) stands, no piece of dim d may be more than 1/8 above an equal one",
        )


def _before_views(tensor: Named, sharding: Sharding, sizes: Sequence[int], where: str) -> Sharding:
    """The sharding of an item's output that becomes the given sharding after the views."""
    for look in reversed(tensor.looks):
        found = [each.inputs[0] for each in strategies(look.node, sizes) if each.outputs[look.output] == sharding]
        if not found:
            raise UserError(
                f"annotation {where}: {text_of(sharding)} is no sharding of what {look.node.op} sees as "
                f"{'x'.join(map(str, look.node.outputs[look.output].shape))}",
                hint="its pieces lie in strides there; annotate another dim, or the parameters of the module",
            )
        sharding = found[0]
    return sharding


def agrees(given: Placement, made: Placement) -> bool:
    """True if a placement keeps an annotation; partial sums count as replicated, because readers add them up."""
    return given == made or (given == R and made.partial)


def pins_of(built: Built, annotated: Sequence[Annotated]) -> dict[int, tuple[int, ...]]:
    """Options that keep all annotations, for each annotated item.

    Raises:
        UserError: an item has none.
    """
    out: dict[int, tuple[int, ...]] = {}
    for each in annotated:
        ways = built.ways[each.item]
        left = out.get(each.item, tuple(range(len(ways))))
        kept = tuple(n for n in left if all(map(agrees, each.sharding, ways[n].outputs[each.output])))
        if not kept:
            known = sorted({text_of(ways[n].outputs[each.output]) for n in left})
            raise UserError(
                f"annotation {each.annotation}: {built.flow.items[each.item].name} cannot give "
                f"{text_of(each.sharding)}",
                hint=f"it gives {first_few(known, 12)}",
            )
        out[each.item] = kept
    return out


_PARTS = re.compile(r"[;\n]")


def annotations_of(texts: Sequence[str]) -> tuple[Annotation, ...]:
    """All annotations of some texts; a text has one, or several separated by semicolons.

    >>> len(annotations_of(["a=S(0) R; b=R R", "c=R S(1)"]))
    3
    """
    return tuple(annotation_of(part) for text in texts for part in _PARTS.split(text.strip("; \n")))
