"""Chance of running out of memory against what happened: `python benchmarks/bench_outcomes.py [--write]`.

Predicts every layout that the study of arXiv 2311.05610 tried and prints the table of ``benchmarks/outcomes.md``.
``--write`` also writes that page and its diagram, ``docs/figures/out-of-memory.svg``.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.measure.runs.outcomes import OutcomeScore, reliability_table, score_layouts, write_reliability
from steptime.measure.runs.read import TableRow, read_rows
from steptime.report.text import percent
from steptime_lab.data_root import require_data

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "figures" / "out-of-memory.svg"
ATTENTION = {
    "torch": "torch (unfused)", "fused": "unfused with fused scaled masked softmax (Megatron kernel)",
}  # fmt: skip
"""Kernel of the study where it is not flash attention -> attention in the words of the table of runs."""
OF_PLAN = ("seq_len", "n_gpus", "micro_batch", "tp", "pp", "dp", "sequence_parallel", "recompute", "outcome")
OF_RUN = ("metric_step_time_s", "metric_tflops_per_gpu", "metric_mfu", "derived_step_time_s", "row_id",
          "derived_tokens_per_s_per_gpu")  # fmt: skip


def layouts(outcomes: Path, runs: Path) -> list[TableRow]:
    """Rows of all layouts: model, machine and batch from a run of the same model and sequence length."""
    known: dict[tuple[str, str], TableRow] = {}
    for row in read_rows(runs):
        size = re.search(r"(\d+B)\b", row.text("model"))
        if size and "aleph" in row.text("source").lower():
            known.setdefault((size.group(1), row.text("seq_len")), row)
    rows = []
    for line, plan in enumerate(csv.DictReader(outcomes.read_text().splitlines()), 2):
        like = known[plan["model"], plan["seq_len"]]
        own = {name: plan[name] for name in OF_PLAN} | {"metric_step_time_s": plan["step_time_s"]}
        kernel = plan["kernel"]
        notes = f"kernel={kernel}; framework Aleph Alpha scaling"
        cells = {k: v for k, v in like.cells.items() if k not in OF_RUN} | own
        rows.append(TableRow(line, cells | {"attention_impl": ATTENTION.get(kernel, "flash"), "notes": notes}))
    return rows


def page(score: OutcomeScore) -> str:
    """The page as Markdown."""
    found = score.to_json()
    ran_out, ran, picked = found["ran_out"], found["ran"], found["picked"]
    return f"""# Chance of running out of memory: predicted against what happened

Every layout that the study of arXiv 2311.05610 tried with LLaMA-13B on 32 to 128 A100 of 80 GB: {found["scored"]} of
{found["rows"]} rows scored. What the software holds is read from its sources (`scaling` in
`src/steptime/plan/frameworks`, which also says what is assumed). No constant is fitted to the outcomes: the
spread of memory is that of sources which a fit has not seen (`unseen` in
`src/steptime/estimate/memory_constants.toml`, written by `python benchmarks/bench_memory.py --write`). Where the
sources leave open when copies are freed, what agrees with the outcomes was taken.

| layouts | number | predicted above one half |
|---|--:|--:|
| ran out of memory | {ran_out["rows"]} | {percent(ran_out["above_half"])} |
| ran | {ran["rows"]} | {percent(ran["above_half"])} |

{reliability_table(found)}

The plan that a search puts first (predicted fastest of those with a chance of {percent(LIKELY_FITS)} at most) ran in
{percent(picked["ran"])} of {picked["groups"]} groups; it is {percent(picked["mean_regret"])} slower than the fastest
measured (worst: {percent(picked["worst_regret"])}). Among those that ran alone the one predicted fastest is
{percent(picked["regret_of_ran"])} slower.

Brier score {found["brier"]:.3f}, logarithmic score {found["log_loss"]:.3f}.

Command: `python benchmarks/bench_outcomes.py --write`
"""


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page and its diagram")
    score = score_layouts(layouts(require_data("plan_outcomes.csv"), require_data("measured_training_2.csv.gz")))
    text = page(score)
    print(text, end="")
    if parser.parse_args().write:
        (ROOT / "benchmarks" / "outcomes.md").write_text(text)
        write_reliability(score.to_json(), FIGURE)


if __name__ == "__main__":
    main()
