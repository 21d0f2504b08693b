"""``steptime calibrate mesh``: from measured links to a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, positional
from steptime.errors import FieldError

if TYPE_CHECKING:
    from steptime.hardware.records import Mesh, MeshAxis, OddLink

#: Odd links and notes that the report lists; ``--json`` has all of them.
MOST_SHOWN = 10


def mesh(
    file: Annotated[Path, positional(metavar="FILE.csv", help="Measured links: one row per pair, or a matrix.")],
    unit: Annotated[str | None, flag("--unit", metavar="UNIT", help="Of a square matrix: us, GB/s, ...")] = None,
    out: Annotated[
        Path | None, flag("--out", metavar="CLUSTER.toml", help="Write a cluster file; needs --device.")
    ] = None,
    device: Annotated[
        str | None,
        flag(
            "--device", catalogue="device", metavar="DEVICE", help="What the devices are: catalogue name or TOML file."
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Find the mesh that devices form, from the latency and bandwidth measured between them.

    FILE has columns source, target, bytes, seconds; or source, target, latency_us, bandwidth_GB/s; or it is a square
    matrix of latencies or bandwidths with its unit in the top left cell. CLUSTER.toml serves as --cluster CLUSTER.toml
    in every other command.
    """
    from steptime.cli.output import document, print_json
    from steptime.measure.mesh import cluster_file, discover, read_links
    from steptime.report.text import printable

    if (out is None) != (device is None):
        missing, why = (
            ("--device", "measured links do not tell what they join") if out else ("--out", "nothing is written")
        )
        raise FieldError("", missing, f"missing; {why}", hint=f"give {missing}")
    if out is not None and device is not None:
        cluster_file.refuse(out, device)
    found = discover(read_links(file, unit))
    if out is not None and device is not None:
        cluster_file.write(out, found, device, str(file))
    if json:
        print_json(document(shape=found.shape, mesh=found))
        return
    _print(found)
    if out is not None:
        print(f"\nWritten to {printable(str(out))}; use it as --cluster {printable(str(out))}")


#: The main command looks a command's function up under this name.
command = mesh


def _print(found: Mesh) -> None:
    from steptime.report.text import printable

    shape = " x ".join(str(size) for size in found.shape)
    print(f"{len(found.devices)} devices: {shape} (axes from fast to slow), confidence {found.confidence:.1%}")
    print(f"Alike links differ by {found.noise:.1%} (standard deviation)\n")
    print(f"  {'axis':<6}{'size':>6}  {'kind':<8}{'latency':>12}{'bandwidth':>14}{'cost over axis before':>26}")
    for number, axis in enumerate(found.axes):
        print(_row(number, axis))
        if axis.cross_step is not None:
            print(f"        off the rail: {_speed(axis.cross_latency_s, axis.cross_Bps)}, x {axis.cross_step:.2f}")
        if axis.growth is not None:
            print(f"        two hops cost {axis.growth:.2f} times one")
    lines = [*_odd("broken", found.broken_links, "its kind"), *_odd("asymmetric", found.asymmetric_links, "back")]
    if found.slow_devices:
        lines.append(f"slow devices: {', '.join(found.slow_devices[:MOST_SHOWN])}")
    lines += [f"note: {note}" for note in found.notes]
    if lines:
        print("\n" + "\n".join(printable(line) for line in lines))


def _row(number: int, axis: MeshAxis) -> str:
    from steptime.units import format_seconds, format_si

    latency = "unknown" if axis.latency_s is None else format_seconds(axis.latency_s, 3)
    bandwidth = "unknown" if axis.Bps is None else format_si(axis.Bps, "B/s")
    step = "" if axis.step is None else f"x {axis.step:.2f} ({axis.separation or 0:.1f} sigma)"
    return f"  {number:<6}{axis.size:>6}  {axis.kind.value:<8}{latency:>12}{bandwidth:>14}{step:>26}"


def _speed(latency_s: float | None, Bps: float | None) -> str:
    from steptime.units import format_seconds, format_si

    known = [] if latency_s is None else [format_seconds(latency_s, 3)]
    return ", ".join(known + ([] if Bps is None else [format_si(Bps, "B/s")])) or "speed unknown"


def _odd(kind: str, links: tuple[OddLink, ...], than: str) -> list[str]:
    shown = [f"{kind} link: {a.source} to {a.target}, {a.factor:.2f} times {than}" for a in links[:MOST_SHOWN]]
    if len(links) > MOST_SHOWN:
        shown.append(f"{len(links) - MOST_SHOWN} more {kind} links (--json lists them)")
    return shown
