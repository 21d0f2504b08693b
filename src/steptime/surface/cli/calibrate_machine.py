"""``steptime calibrate machine``: measure this machine and write a cluster file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steptime.surface.cli import options as o

MAX_PROCESSES = 256


def machine(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds: under three minutes.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="PROFILE.toml", help="Cluster file to write.", show_default=True)
    ] = Path("machine.toml"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted calibration.")] = False,
    processes: Annotated[
        int | None,
        o.number("--processes", "N", "Ranks of collectives; default: one per GPU, none on a CPU.", 1, MAX_PROCESSES),
    ] = None,
    threads: Annotated[int, o.number("--threads", "N", "Cores of one process on a CPU.", 1, 1024)] = 1,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="Write the measured operators as CSV or Parquet too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot measured against predicted times.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Measure this machine: products, attention, memory, launches, collectives; fit its rates.

    PROFILE.toml serves as --cluster PROFILE.toml in every other command. Ctrl-C loses nothing; --resume goes on. On a
    GPU every GPU of the machine is a rank; under torchrun the ranks of the job are.
    """
    from steptime.calibrate.machine.cluster_file import curves_path, journal_path
    from steptime.calibrate.machine.session import Request, calibrate
    from steptime.surface.cli.output import document, print_json
    from steptime.surface.cli.progress import Progress
    from steptime.surface.report import calibration

    refuse_suffix(out)
    request = Request(out=out, quick=quick, resume=resume, processes=processes, threads=threads)
    try:
        with Progress("measuring") as progress:
            fitted = calibrate(request, progress)
    except KeyboardInterrupt:
        print(f"Measured so far is in {journal_path(out)}; --resume goes on.", file=sys.stderr)
        raise
    if fitted is None:  # a rank of a running job that only took part
        return
    if table is not None:
        write_table(table, fitted)
    residuals = calibration.residuals_of(fitted)
    if plot is not None:
        calibration.write_plot(plot, residuals)
    if json:
        files = {"profile": str(out), "curves": str(curves_path(out)), "journal": str(journal_path(out))}
        print_json(document(files=files, **calibration.as_document(fitted, residuals)))
    else:
        calibration.print_report(fitted, residuals, out)


def refuse_suffix(out: Path) -> None:
    """Raises UserError for a file that no command would take as a cluster."""
    from steptime.errors import FieldError

    if out.suffix != ".toml":
        raise FieldError("", "--out", f"{str(out)[:80]!r} does not end in .toml", hint="for example --out machine.toml")


def write_table(path: Path, fitted: Any) -> None:
    """The measured operators with the columns of a table of kernels."""
    from steptime.calibrate.machine.cluster_file import kernel_rows
    from steptime.store import write_table

    method = "cuda_graph_p25" if fitted.host.device == "cuda" else "cpu_thread_p25"
    write_table(path, list(kernel_rows(fitted.operators, fitted.host.processor, method)))


#: The group of calibrations looks the function up under this name too.
command = machine
