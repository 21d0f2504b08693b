"""``steptime study``: run a study file, show its results, query them in SQL, export them as a table."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import Group, flag, number, positional
from steptime.errors import UserError, counted

if TYPE_CHECKING:
    from steptime.study.file import Study
    from steptime.study.tables import Results

STORE: Final = "study-store"
GROUP: Final = Group("steptime study", "Many jobs from one file: sweeps that resume where they stopped.")
File = Annotated[str, positional(metavar="STUDY.toml", help="The study: what is crossed, and what is kept.")]
StoreOption = Annotated[
    str,
    flag("--store", metavar="DIR", envvar="STEPTIME_STORE", help="Folder of results; several studies share it."),
]
Table = Annotated[str, flag("--table", metavar="NAME", help="points, plans, front or terms.")]


class Executor(StrEnum):
    """Executor that computes the points."""

    LOCAL = "local"
    RAY = "ray"
    DASK = "dask"
    MPI = "mpi"


@GROUP.command()
def run(
    file: File,
    store: StoreOption = STORE,
    executor: Annotated[Executor, flag("--executor", help="Processes here, or of Ray, Dask or MPI.")] = Executor.LOCAL,
    workers: Annotated[int | None, number("--workers", "N", "Processes; default: the processors.", 1, 100_000)] = None,
    yes: Annotated[bool, flag("--yes", help="Do not ask before a study of more than 10,000 points.")] = False,
    json: o.Json = False,
) -> None:
    """Compute what the store lacks of a study.

    What is computed is on disk at once: a run that was interrupted at any moment goes on when it is started again.
    """
    from steptime.cli.output import Progress, document, print_json
    from steptime.study.file import read_study
    from steptime.study.running import run as run_study

    found = read_study(file)
    _ask(found, yes)
    with Progress("points") as progress:
        outcome = run_study(found, store, executor=executor.value, workers=workers, progress=progress)
    if json:
        print_json(document(**outcome.to_json()))
        return
    print(
        f"{counted(outcome.points, 'point', f'{outcome.points:,}')}: {outcome.computed:,} computed, {outcome.found:,} "
        f"in {store} already"
    )
    if outcome.refused:
        print(f"{counted(outcome.refused, 'point')} refused: steptime study show {file} --table points says why")
    if outcome.damaged:
        print(f"{counted(len(outcome.damaged), 'point')} damaged, computed again: {', '.join(outcome.damaged)}")
    if outcome.lost_workers:
        print(f"workers were lost {counted(outcome.lost_workers, 'time')}, their points computed again")


def _ask(found: Study, yes: bool) -> None:
    """Ask before many points are computed.

    Raises:
        UserError: standard input is no terminal.
        KeyboardInterrupt: the answer is no.
    """
    import sys

    from steptime.study.file import ASK_ABOVE

    if yes or len(found.cases) <= ASK_ABOVE:
        return
    many = f"{len(found.cases):,} points, more than {ASK_ABOVE:,}"
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError(f"the study has {many}", hint="give --yes to compute them all")
    print(f"The study has {many}. Compute them? [y/N]: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt


@GROUP.command()
def show(file: File, store: StoreOption = STORE, table: Table = "plans", json: o.Json = False) -> None:
    """Show the best plans of a study, or another of its tables."""
    found = _results(file, store)
    rows = found.rows(table)
    if json:
        _print(found, table=table, rows=rows)
        return
    from steptime.study.show import print_plans, print_table

    (print_plans if table == "plans" else print_table)(found, rows)


@GROUP.command()
def query(
    file: File,
    sql: Annotated[str, positional(metavar="SQL", help="A query of DuckDB over points, plans, front, terms.")],
    store: StoreOption = STORE,
    json: o.Json = False,
) -> None:
    """Ask the results of a study in SQL; nothing can be changed by it."""
    found = _results(file, store)
    rows = found.query(sql)
    if json:
        _print(found, rows=rows)
        return
    from steptime.study.show import print_rows

    print_rows(found, rows)


@GROUP.command()
def export(
    file: File,
    out: Annotated[str, flag("--out", "-o", metavar="FILE", help="CSV, CSV.gz or Parquet, by its ending.")],
    store: StoreOption = STORE,
    table: Table = "plans",
) -> None:
    """Write a table of a study's results."""
    found = _results(file, store)
    number = found.export(out, table)
    print(f"{out}: {counted(number, 'row', f'{number:,}')}")
    _print_missing(found)


def _results(file: str, store: str) -> Results:
    from steptime.study.file import read_study
    from steptime.study.tables import results

    return results(read_study(file), store)


def _print(found: Results, **content: Any) -> None:
    from steptime.cli.output import document, print_json

    print_json(document(missing=found.missing, damaged=list(found.damaged), **content))


def _print_missing(found: Results) -> None:
    from steptime.study.tables import missing_text

    text = missing_text(found)
    if text:
        print(text)
