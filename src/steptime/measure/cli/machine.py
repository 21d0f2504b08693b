"""``steptime calibrate machine``: measure this machine and write a cluster file."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from steptime.cli import options as o
from steptime.cli.parser import flag, number
from steptime.measure.machine import MAX_PROCESSES

if TYPE_CHECKING:
    from steptime.measure.machine.comparison import Comparison
    from steptime.measure.machine.profile import Fitted
    from steptime.measure.machine.session import Request


class Device(StrEnum):
    """Devices that can be measured."""

    CPU = "cpu"
    CUDA = "cuda"


def machine(
    quick: Annotated[bool, flag("--quick", help="Fewer shapes and rounds: under three minutes.")] = False,
    out: Annotated[Path, flag("--out", metavar="PROFILE.toml", help="Cluster file to write.")] = Path("machine.toml"),
    resume: Annotated[bool, flag("--resume", help="Go on with an interrupted calibration.")] = False,
    device: Annotated[
        Device | None, flag("--device", help="What to measure; default: the GPU if torch sees one.")
    ] = None,
    processes: Annotated[
        int | None,
        number("--processes", "N", "Ranks of collectives; default: one per GPU, none on a CPU.", 1, MAX_PROCESSES),
    ] = None,
    threads: Annotated[int, number("--threads", "N", "Cores of one process on a CPU.", 1, 1024)] = 1,
    compare_to: Annotated[
        str | None,
        flag("--compare-to", metavar="DEVICE", help="Residuals against the public profile of a device, or auto."),
    ] = None,
    table: Annotated[
        Path | None, flag("--table", metavar="FILE", help="Write the measured operators as CSV or Parquet too.")
    ] = None,
    plot: Annotated[
        Path | None, flag("--plot", metavar="FILE.png", help="Plot measured against predicted times.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Measure this machine: products, convolutions, attention, memory, launches, collectives; fit its rates.

    PROFILE.toml serves as --cluster PROFILE.toml in every other command. Ctrl-C loses nothing; --resume goes on. On a
    GPU every GPU of the machine is a rank; under torchrun the ranks of the job are.
    """
    from steptime.measure.machine.session import Request

    refuse_suffix(out)
    request = Request(
        out=out,
        quick=quick,
        resume=resume,
        processes=processes,
        threads=threads,
        device=None if device is None else device.value,
    )
    refuse_outputs(table, plot)
    compare_to = None if compare_to is None else compared(compare_to, request)
    fitted = measured(request)
    if fitted is not None:  # None: a rank of a running job that only took part
        report(fitted, out, compare_to, table, plot, json)


def measured(request: Request) -> Fitted | None:
    """Calibrates with a progress bar."""
    from steptime.cli.output import Progress
    from steptime.measure.machine.cluster_file import journal_path
    from steptime.measure.machine.session import calibrate

    path = journal_path(request.out)
    before = 0 if request.resume else _records(path)
    try:
        with Progress("measuring") as progress:
            return calibrate(request, progress)
    except KeyboardInterrupt:
        found = _records(path)
        print(
            f"Measured so far is in {path}; --resume goes on." if found not in (0, before) else "Nothing was measured.",
            file=sys.stderr,
        )
        raise


def _records(path: Path) -> int:
    """Measurements in a journal; 0 where there is none."""
    from steptime.errors import InputFileError
    from steptime.store.journal import read_journal

    try:
        return sum("of" in record for record in read_journal(path).records)
    except InputFileError:
        return 0


def report(
    fitted: Fitted, out: Path, compare_to: str | None, table: Path | None, plot: Path | None, json: bool
) -> None:
    """Writes the tables that were asked for, and prints."""
    from steptime.cli.output import document, print_json
    from steptime.measure.machine.cluster_file import curves_path, journal_path
    from steptime.measure.report import calibration

    if table is not None:
        write_table(table, fitted)
    residuals = calibration.residuals_of(fitted)
    if plot is not None:
        calibration.write_plot(plot, residuals)
    found = None if compare_to is None else comparison_of(fitted, compare_to, out)
    if json:
        files = {"profile": str(out), "curves": str(curves_path(out)), "journal": str(journal_path(out))}
        more = {} if found is None else {"public": {"device": found.device, **found.score}}
        print_json(document(files=files, **calibration.as_document(fitted, residuals), **more))
        return
    calibration.print_report(fitted, residuals, out)
    if found is not None:
        print_comparison(found, out)


def compared(given: str, request: Request) -> str:
    """The device to compare with, found before anything is measured.

    Raises:
        UserError: nothing is published about it, or its table cannot be written.
    """
    from steptime.measure.machine.comparison import AUTO, public_device, residuals_path
    from steptime.store.files import refuse_unwritable

    refuse_unwritable(residuals_path(request.out))
    if given != AUTO:
        return public_device(given)
    from steptime.measure.machine.session import host_of
    from steptime.registry import needed

    return public_device(AUTO, host_of(needed("torch", "measuring a machine"), request).processor)


def comparison_of(fitted: Fitted, compare_to: str, out: Path) -> Comparison:
    """The residuals against a public profile, written next to the profile."""
    from steptime.measure.machine.comparison import compare, residuals_path, write_residuals

    found = compare(fitted, compare_to, method_of(fitted))
    write_residuals(found, residuals_path(out))
    return found


def print_comparison(found: Comparison, out: Path) -> None:
    """Errors of the public profile, by operator."""
    from steptime.measure.machine.comparison import residuals_path
    from steptime.measure.report.score import print_score

    print(f"\nThe public profile of {found.device} against these measurements")
    print_score(found.score)
    print(f"\nEvery operator, by the public and by this profile: {residuals_path(out)}")


def refuse_suffix(out: Path) -> None:
    """Refuses (UserError) a file that no command would take as a cluster."""
    from steptime.errors import FieldError

    if out.suffix != ".toml":
        raise FieldError("", "--out", f"{str(out)[:80]!r} does not end in .toml", hint="for example --out machine.toml")


def refuse_outputs(table: Path | None, plot: Path | None) -> None:
    """Refuses (UserError) further files that cannot be written, before anything is measured.

    The other ranks of a running job write nothing.
    """
    from steptime.report.figure import refuse_plot
    from steptime.store.tables import refuse_table

    if os.environ.get("RANK", "0") != "0":
        return
    if table is not None:
        refuse_table(table)
    if plot is not None:
        refuse_plot(plot)


def write_table(path: Path, fitted: Fitted) -> None:
    """Writes the measured operators with the columns of a table of kernels."""
    from steptime.measure.machine.cluster_file import kernel_rows
    from steptime.store.tables import write_table

    write_table(path, list(kernel_rows(fitted.operators, fitted.host.processor, method_of(fitted))))


def method_of(fitted: Fitted) -> str:
    """Timing method in the words of tables of kernels."""
    return "cuda_graph_p25" if fitted.host.device == "cuda" else "cpu_thread_p25"


#: The group of calibrations looks the function up under this name too.
command = machine
