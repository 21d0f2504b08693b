"""``steptime calibrate fit``: fit time models to tables of measurements and write profiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import flag
from steptime.errors import FieldError, InputFileError, UserError, counted, did_you_mean, shorten
from steptime.registry import require
from steptime.store.files import one_writer, prepare_folder

if TYPE_CHECKING:
    from steptime.hardware.profiles import FabricProfile
    from steptime.hardware.records import Curve
    from steptime.measure.table import Table
    from steptime.num import Array
    from steptime_lab.calibrate.gemm import Truth
    from steptime_lab.calibrate.kernel_curves import Cell
    from steptime_lab.scoring.left_out import Fitted

FABRICS: Final = "fabrics"
"""Folder of fabric profiles inside that of device profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One curve to fit."""

    device: str
    rows: Array
    """Indices of the table's rows that the curve is fitted to."""
    fit: Callable[[], Curve]


def command(
    kernels: Annotated[Path | None, flag("--kernels", metavar="FILE", help="Table of measured kernels.")] = None,
    collectives: Annotated[
        Path | None, flag("--collectives", metavar="FILE", help="Table of measured collectives.")
    ] = None,
    out: Annotated[Path, flag("--out", metavar="DIR", help="Folder to write profiles to.")] = Path("profiles"),
    only: Annotated[str | None, flag("--only", metavar="FAMILY", help="Fit this family of kernels alone.")] = None,
    json: o.Json = False,
) -> None:
    """Fit time models to measurements and write one profile per device.

    Curves that the profiles of DIR hold already are replaced; others stay. Fabric profiles go to DIR/fabrics.
    Takes minutes; Ctrl-C keeps the devices that are done.
    """
    if kernels is None and collectives is None:
        raise UserError("nothing to fit", hint="give --kernels FILE, --collectives FILE, or both")
    require("scipy", "fitting")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small: threads only slow them down
    family = _family(only)
    tables = _tables(kernels, collectives)
    prepare_folder(out)
    if tables[1] is not None:
        prepare_folder(out / FABRICS)
    written, fabrics = dict[str, "list[Curve]"](), list["FabricProfile"]()
    from steptime_lab.scoring.left_out import Fitted

    fitted = Fitted.none(0 if tables[0] is None else tables[0].rows)
    try:
        with one_writer(out):
            if tables[0] is not None:
                _fit_kernels(tables[0], family, out, written, fitted)
            if tables[1] is not None:
                _fit_fabrics(tables[1], out, fabrics)
    except (KeyboardInterrupt, InputFileError):
        if written or fabrics:
            done = f"{counted(len(written), 'device')} and {counted(len(fabrics), 'fabric')} fitted"
            print(f"{done}; see {out}.", file=sys.stderr)
        raise
    left_out = _left_out(tables, family, fitted, fabrics)
    if not written and not fabrics:
        reasons = [f"{counted(n, 'row')}: {why}" for rows in left_out.values() for why, n in rows.items()]
        every = "every curve needs a known GPU and enough different shapes"
        raise UserError("no curve could be fitted", hint="\n  ".join([*reasons, every]))
    _report(written, fabrics, left_out, out, json)


def _family(only: str | None) -> str | None:
    from steptime_lab.calibrate.gemm import FAMILY
    from steptime_lab.calibrate.kernel_families import FAMILIES

    names = [FAMILY.name, *(f.name for f in FAMILIES)]
    if only is not None and only not in names:
        raise FieldError("", "--only", f"there is no family {shorten(only)!r}", hint=did_you_mean(only, names))
    return only


def _tables(kernels: Path | None, collectives: Path | None) -> tuple[Table | None, Table | None]:
    from steptime_lab.scoring.tables import KERNEL_COLUMNS, read_collectives, read_measurements

    return (
        None if kernels is None else _of_the_user(read_measurements(kernels, KERNEL_COLUMNS)),
        None if collectives is None else read_collectives(collectives, {}),
    )


def _of_the_user(table: Table) -> Table:
    """The table; where all its sources are unknown, its operators and dtypes get their usual names."""
    from steptime_lab.scoring.kernels import usual_names

    return table if _known_sources(table) else usual_names(table)


def _known_sources(table: Table) -> bool:
    """Whether any source of the table is known to the families."""
    from steptime_lab.scoring.kernels import KNOWN_SOURCE

    return any(KNOWN_SOURCE.match(name) for name in set(table.text("source")))


def _fit_kernels(table: Table, only: str | None, out: Path, written: dict[str, list[Curve]], fitted: Fitted) -> None:
    """Fit cells with enough shapes first; cells with few shapes then borrow from the curves of other devices."""
    from steptime.cli.output import Progress
    from steptime.hardware.profiles import saved_curves
    from steptime_lab.calibrate.gemm import gemm_curve
    from steptime_lab.calibrate.kernel_curves import borrowed

    cells = [cell for cell in _cells(table) if only in (None, cell.family.name)]
    sound = [Job(device=c.device.name, rows=c.rows, fit=partial(_alone, c)) for c in cells if c.enough]
    products = [Job(device=t.device.name, rows=t.rows, fit=partial(gemm_curve, t)) for t in _truths(table, only)]
    few = [cell for cell in cells if cell.some and not cell.enough]
    for device in {job.device for job in (*products, *sound)} | {cell.device.name for cell in few}:
        saved_curves(device, out)  # a file that is no profile is refused before the work
    with Progress("fitting kernels") as progress:
        total, first = len(sound) + len(products) + len(few), len(sound) + len(products)
        _run([*products, *sound], out, written, fitted, lambda n: progress(n, total))
        known = {device: list(curves) for device, curves in written.items()}
        near = [(cell, curve) for cell in few if (curve := borrowed(known, cell)) is not None]
        weak = [
            Job(device=cell.device.name, rows=cell.rows, fit=partial(_leaning, cell, curve)) for cell, curve in near
        ]
        _run(weak, out, written, fitted, lambda n: progress(first + n, total))


def _cells(table: Table) -> list[Cell]:
    """Cells of all families; a table of unknown sources keeps their names."""
    from steptime_lab.calibrate.kernel_families import all_cells

    sources = table.text("source")
    if _known_sources(table):
        return list(all_cells(table))
    cells = all_cells(_as_read(table))
    return [replace(c, source=", ".join(sorted(set(sources[c.rows]))) or "unnamed") for c in cells]


def _as_read(table: Table) -> Table:
    """The table as the families read it; a table of unknown sources is read like one of a plain framework."""
    from steptime_lab.scoring.kernels import standing_in

    return table if _known_sources(table) else standing_in(table, "neusight")


def _alone(cell: Cell) -> Curve:
    return cell.with_best_tile().curve()


def _leaning(cell: Cell, known: Curve) -> Curve:
    return cell.near(known).curve(folds=3)


def _truths(table: Table, only: str | None) -> list[Truth]:
    """Matrix products to fit: from trusted sources, or from all where the table has no trusted source."""
    from steptime_lab.calibrate.gemm import FAMILY, SOURCES, preferred, truths

    if only not in (None, FAMILY.name):
        return []
    found = list(truths(table))
    if not any(t.source.split("/")[0] in SOURCES for t in found):
        most = sorted(found, key=lambda t: len(t.measured_s))
        largest = {(t.device.name, t.dtype, t.timer): t for t in most}.values()
        chosen = preferred(replace(t, source=f"{SOURCES[0]}/{t.source}") for t in largest)
        return [replace(t, source=t.source.partition("/")[2] or "unnamed") for t in chosen]
    return preferred(found)


def _run(
    jobs: Sequence[Job], out: Path, written: dict[str, list[Curve]], fitted: Fitted, step: Callable[[int], None]
) -> None:
    """Fit device by device, and write the profile of each device after its last curve."""
    from steptime.hardware.profiles import save_curves

    ordered = sorted(jobs, key=lambda job: job.device)
    fresh: list[Curve] = []
    for i, job in enumerate(ordered):
        try:
            fresh.append(job.fit())
        except UserError as error:
            fitted.refused(job.rows, error)
        else:
            fitted.rows[job.rows] = True
        last = i + 1 == len(ordered) or ordered[i + 1].device != job.device
        if last and fresh:
            save_curves(job.device, fresh, out)
            written.setdefault(job.device, []).extend(fresh)
            fresh = []
        step(i + 1)


def _fit_fabrics(table: Table, out: Path, fabrics: list[FabricProfile]) -> None:
    """Fit machine by machine, write the profile of each, and print the machines that cannot be fitted."""
    from steptime.cli.output import Progress
    from steptime.hardware.profiles import save_fabric_profile
    from steptime.report.text import printable
    from steptime_lab.calibrate.collectives import calibrate, libraries, machine_rows, machines_of

    library, folder, machines = libraries(table), out / FABRICS, machines_of(table)
    refused: list[str] = []
    with Progress("fitting collectives") as progress:
        for i, machine in enumerate(machines):
            _, rows = machine_rows(machine, table, library)
            if len(rows.ranks):
                try:
                    profile = calibrate(machine, rows)
                except UserError as error:
                    refused.append(str(error))
                else:
                    save_fabric_profile(profile, folder)
                    fabrics.append(profile)
            progress(i + 1, len(machines))
    for text in refused:
        print(printable(f"Left out: {text}"), file=sys.stderr)


def _left_out(
    tables: tuple[Table | None, Table | None], only: str | None, fitted: Fitted, fabrics: list[FabricProfile]
) -> dict[str, dict[str, int]]:
    """Rows of both tables that nothing was fitted to, by reason."""
    from steptime_lab.scoring.left_out import collectives_left_out, kernels_left_out

    kernels, collectives = tables
    names = [fabric.name for fabric in fabrics]
    return {
        "kernels": {} if kernels is None else kernels_left_out(_as_read(kernels), fitted, only),
        "collectives": {} if collectives is None else collectives_left_out(collectives, names),
    }


def _report(
    written: dict[str, list[Curve]],
    fabrics: list[FabricProfile],
    left_out: dict[str, dict[str, int]],
    out: Path,
    as_json: bool,
) -> None:
    if as_json:
        from steptime.cli.output import document, print_json

        print_json(document(folder=str(out), profiles=written, fabrics=fabrics, left_out=left_out))
        return
    from steptime_lab.report.curves import print_curves

    print_curves(written, fabrics, left_out, out)
