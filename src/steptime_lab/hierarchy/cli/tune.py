"""``steptime tune``: the fastest tiles of a product on this machine, by a cost model and measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import Group, flag, number

GROUP: Final = Group("steptime tune", "Kernels tuned by a cost model: search space, planner, measurements, history.")
SHOWN: Final = 8


@GROUP.command()
def matmul(
    m: Annotated[int, flag("--m", metavar="M", help="Rows of the result.")] = 512,
    n: Annotated[int, flag("--n", metavar="N", help="Columns of the result.")] = 512,
    k: Annotated[int, flag("--k", metavar="K", help="Depth of the product.")] = 512,
    trials: Annotated[int, number("--trials", "N", "Schedules that are measured; 0: none.", 0, 1000)] = 16,
    strategy: Annotated[str, flag("--strategy", help="model, random or grid.")] = "model",
    processor: Annotated[str, flag("--processor", metavar="NAME", help="Caches, of steptime cache list.")] = "machine",
    folder: Annotated[str, flag("--folder", metavar="DIR", help="Kernels and history.")] = "steptime-tune",
    fresh: Annotated[bool, flag("--fresh", help="Start an empty history; the earlier one stays in its file.")] = False,
    seed: Annotated[
        int,
        number("--seed", "N", "Of random draws: random; of model, half of each batch before 8 measurements.", 0, 2**31),
    ] = 0,
    json: o.Json = False,
) -> None:
    """Tune a product in single precision on one thread: compile tiled kernels, check them, measure the promising ones.

    Ctrl-C keeps what was measured, but for the four schedules under way; the same command goes on and measures the
    rest of its trials. After a run that ended, it measures as many again.

    The model strategy draws half of each batch of four at random until there are 8 measurements to learn from, other
    products included; without scikit-learn it does so throughout.
    """
    from steptime_lab.hierarchy.tune.search import tune as search

    def report(text: str) -> None:
        print(text, file=sys.stderr)

    found = search(
        (m, n, k),
        name=processor,
        trials=trials,
        strategy=strategy,
        seed=seed,
        folder=Path(folder),
        fresh=fresh,
        progress=None if json else report,
    )
    if json:
        from steptime.cli.output import print_json

        print_json(found.to_json())
        return
    from steptime.report import text as t

    out = t.console()
    out.print(t.printable(f"{m} x {n} x {k} on {found.processor}, {found.strategy}"), style="bold")
    left = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items() if count)
    out.print(t.printable(f"{found.space} schedules; left out: {left or 'none'}"))
    table = t.grid(("schedule", "predicted", "measured", "GFLOP/s"), left=(0,))
    for each in found.ranked[:SHOWN]:
        timed = each.measured_s < float("inf")
        cells = (t.seconds(each.measured_s), f"{2e-9 * m * n * k / each.measured_s:.1f}") if timed else ("", "")
        table.add_row(each.schedule.text, t.seconds(each.predicted_s), *cells)
    out.print(table)
    moved = zip(("registers", "L1", "L2", "L3"), found.traffic_bytes, strict=False)
    out.print(t.printable("read by the best into " + ", ".join(f"{name} {t.memory(size)}" for name, size in moved)))
    if found.model_rows:
        out.print(t.printable(f"the cost model learned from {found.model_rows} measurements"))
    for note in found.notes:
        out.print(t.printable(note))
    if found.history:
        out.print(t.printable(f"history: {found.history}"))
