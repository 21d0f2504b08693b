"""``steptime predict``: commands that measure graphs, fit learned corrections and score predictors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from steptime.cli import options as o
from steptime.cli.parser import Entry, Group, flag, number, positional

if TYPE_CHECKING:
    from steptime.hardware.records import Device
    from steptime_lab.learned.data import Rows
    from steptime_lab.learned.measuring import Graph

Journal = Annotated[Path, positional(metavar="GRAPHS.jsonl", help="Measured graphs.")]
Machine = Annotated[
    str, flag("--device", metavar="MACHINE.toml", help="This machine: steptime calibrate machine wrote it.")
]


def measure(
    out: Annotated[Path, flag("--out", metavar="GRAPHS.jsonl", help="Journal to write.")] = Path("graphs.jsonl"),
    graphs: Annotated[int, number("--graphs", "N", "Graphs of whole networks.", 0, 100_000)] = 2000,
    singles: Annotated[int, number("--singles", "N", "Graphs of one operator.", 0, 100_000)] = 600,
    family: Annotated[
        list[str] | None, flag("--family", metavar="NAME", help="This family alone; once for each.")
    ] = None,
    fresh: Annotated[bool, flag("--fresh", help="Begin anew: what FILE holds is lost.")] = False,
    json: o.Json = False,
) -> None:
    """Measure random graphs of nine families: CPU time of their steps, and the peak of PyTorch's allocator.

    About half a second a graph. Ctrl-C loses nothing: the same command goes on.
    """
    from steptime.cli.output import Progress, document, print_json
    from steptime.registry import require
    from steptime_lab.learned.measuring import measure as run

    require("torch", "measuring graphs")
    with Progress("measuring") as progress:
        count = run(
            out,
            graphs=graphs,
            singles=singles,
            families=tuple(family) if family else None,
            resume=not fresh,
            told=progress,
        )
    if json:
        print_json(document(journal=str(out), records=count))
        return
    print(f"{count:,} measurements in {out}; steptime predict train {out} fits a correction to them.")


def train(
    journal: Journal,
    device: Machine,
    out: Annotated[Path, flag("--out", metavar="FILE.json", help="Correction to write.")] = Path("correction.json"),
    seed: Annotated[int, number("--seed", "N", "Seed of the first weights.", 0, 2**31 - 1)] = 0,
    json: o.Json = False,
) -> None:
    """Fit the factors, with every family left out once: that gives the error and the band.

    Takes a few minutes. The file serves as --predictor FILE in profile and estimate.
    """
    from steptime.registry import require

    require("torch", "measuring graphs")
    from steptime.cli.output import document, print_json
    from steptime.store.files import refuse_unwritable
    from steptime_lab.learned.additive import Options
    from steptime_lab.learned.memory import fitted_workspaces
    from steptime_lab.learned.train import noise_of, trained, written

    refuse_unwritable(out)
    _refuse_other(out)
    graphs, header, rows, machine = _read(journal, device)
    known = {"device": machine.name, "data": journal.name, **header, "noise": noise_of(graphs)}
    found = trained(rows, out.stem, known, unseen="families", options=Options(seed=seed), told=None if json else print)
    found = replace(found, workspaces=dict(fitted_workspaces(graphs).shares))
    written(found, out)
    if json:
        print_json(document(file=str(out), error=found.error, band=list(found.band), provenance=dict(found.provenance)))
        return
    low, high = found.band
    print(f"{out}: mean error {100 * found.error:.1f} % on families left out; 90 % within x{low:.2f} .. x{high:.2f}")


def score(
    journal: Journal,
    device: Machine,
    quick: Annotated[bool, flag("--quick", help="Without the predictor that takes minutes.")] = False,
    json: o.Json = False,
) -> None:
    """Errors of every predictor: graphs by chance, the largest left out, each family left out."""
    from steptime.registry import require

    require("torch", "measuring graphs")
    from steptime.cli.output import document, print_json
    from steptime_lab.learned.scores import PREDICTORS, SLOW, table
    from steptime_lab.learned.train import noise_of

    graphs, _, rows, _ = _read(journal, device)
    names = [name for name in PREDICTORS if not (quick and name in SLOW)]
    lines = table(graphs, rows, names, told=None if json else print)
    if json:
        print_json(document(noise=noise_of(graphs), scores=lines))


GROUP: Final = Group(
    "steptime predict",
    "Learned corrections of predicted times: measure graphs here, fit factors of operators, score predictors.",
    {
        "measure": Entry(measure, "Make random training graphs and measure them on this machine."),
        "train": Entry(train, "Fit a learned correction to measured graphs."),
        "score": Entry(score, "Errors of all predictors under the same splits."),
    },
)


def _refuse_other(out: Path) -> None:
    """Refuse to write over a file that is no correction."""
    from steptime.errors import InputFileError
    from steptime.estimate.learned import read_correction

    if out.exists():
        try:
            read_correction(out)
        except InputFileError:
            raise InputFileError(str(out), "is there and is no correction", hint="give another --out") from None


def _read(journal: Path, device: str) -> tuple[list[Graph], Mapping[str, Any], Rows, Device]:
    from steptime.captured.cost.timing import Timer
    from steptime.errors import UserError
    from steptime.hardware import device_within
    from steptime_lab.learned.data import rows_here
    from steptime_lab.learned.measuring import read_graphs

    machine = device_within(device)
    if not machine.is_host:
        raise UserError(
            f"{machine.name} is not the processor that measured the graphs",
            hint="give the file that steptime calibrate machine --device cpu wrote",
        )
    graphs, header = read_graphs(journal)
    return graphs, header, rows_here(graphs, Timer(device=machine)), machine
