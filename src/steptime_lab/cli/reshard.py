"""``steptime reshard``: the cheapest steps from one sharding of a tensor to another, with bytes and times."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, number, positional, row
from steptime.errors import UnknownNameError, UserError, shorten
from steptime.options import MAX_DEVICES

if TYPE_CHECKING:
    from steptime.captured.ops.placement import Sharding
    from steptime.sharding.mesh import Mesh
    from steptime.sharding.reshard import Route

MAX_DIMS: Final = 6
MAX_ELEMENTS: Final = 10**15


def command(
    source: Annotated[str, positional(metavar="SOURCE", help="Placement along each axis, as 'S(0) R'.")],
    target: Annotated[str, positional(metavar="TARGET", help="The sharding that is needed, as SOURCE.")],
    shape: Annotated[str, flag("--shape", metavar="8192x8192", help="Shape of the whole tensor.")],
    mesh: Annotated[str, flag("--mesh", metavar="data=2,model=4", help="Axes, the innermost last; or 2x4.")],
    cluster: Annotated[str, row("cluster")],
    dtype: Annotated[str, flag("--dtype", help="Element type.")] = "bf16",
    gpus: Annotated[
        int | None, number("--gpus", "N", "Devices of the job; default: those of the mesh.", 1, MAX_DEVICES)
    ] = None,
    json: o.Json = False,
) -> None:
    """The cheapest collectives from one sharding of a tensor to another.

    S(d) is sharded along dim d, R replicated, P a term of a sum; P(max) and others are terms of other reductions.
    Collectives are timed as in an estimate, copies inside a device by their bytes.
    """
    from steptime.hardware import load_cluster
    from steptime.model.spec import ELEMENT_BYTES
    from steptime.sharding.mesh import mesh_on, parse_axes
    from steptime.sharding.reshard import route

    sizes = parse_shape(shape)
    if dtype not in ELEMENT_BYTES:
        raise UnknownNameError("element type", dtype, ELEMENT_BYTES)
    axes = parse_axes(mesh)
    devices = mesh_on(load_cluster(cluster), axes, gpus)
    ends = parse_sharding(source), parse_sharding(target)
    found = route(sizes, ELEMENT_BYTES[dtype], *ends, devices)
    if json:
        from steptime.captured.ops.placement import text_of
        from steptime.cli.output import document, print_json

        given = {"cluster": cluster, "mesh": axes, "shape": sizes, "dtype": dtype}
        texts = dict(zip(("source", "target"), map(text_of, ends), strict=True))
        print_json(document(**given, **texts, **found.to_json(devices.names)))
        return
    print_route(found, devices, ends, f"{dtype} tensor of {'x'.join(map(str, sizes)) or 'no dims'}", cluster)


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape from sizes joined by ``x``.

    Raises:
        UserError: the text has another form, or the shape too many dims or elements.

    >>> parse_shape("8192x64")
    (8192, 64)
    """
    from math import prod

    if not re.fullmatch(r"[0-9]{1,16}(x[0-9]{1,16})*", text):
        raise UserError(f"--shape {shorten(text)!r} is no shape", hint="write sizes as 8192x8192")
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) > MAX_DIMS or prod(sizes) > MAX_ELEMENTS:
        raise UserError(
            f"--shape {shorten(text)} has {len(sizes)} dims and {prod(sizes):.3g} elements",
            hint=f"at most {MAX_DIMS} dims and {MAX_ELEMENTS:.0e} elements",
        )
    return sizes


def parse_sharding(text: str) -> Sharding:
    """A sharding from placements separated by blanks.

    Raises:
        UserError: a part is no placement.

    >>> len(parse_sharding("S(0) R"))
    2
    """
    from steptime.captured.ops.placement import placement_of

    return tuple(map(placement_of, text.split()))


def print_route(found: Route, mesh: Mesh, ends: tuple[Sharding, Sharding], what: str, cluster: str) -> None:
    """Write the report to standard output."""
    from steptime.captured.ops.placement import text_of
    from steptime.report import text as t
    from steptime.units import format_bytes

    out = t.console()
    head = f"{text_of(ends[0])} -> {text_of(ends[1])} of a {what} on mesh {mesh} of {cluster}"
    out.print(t.printable(f"{head}: {t.seconds(found.seconds)}"), style="bold")
    out.print()
    if not found.steps:
        out.print("Nothing to do.")
        return
    table = t.grid(("step", "axes", "size", "time", "then it lies as"), left=(0, 1, 4))
    for step in found.steps:
        numbers = format_bytes(step.size_bytes), t.seconds(step.seconds)
        table.add_row(step.kind, " ".join(step.axes), *numbers, step.target.text(mesh.names))
    out.print(table)
    calls = [f"{name} of {format_bytes(size)}" for name, size in found.communication()]
    t.indented(out, f"In PyTorch: {', '.join(calls) or 'no collective'}", by=0)
