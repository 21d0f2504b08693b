"""A small table of published runs, drawn from a large one by a rule that looks at no prediction."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from steptime.measure.runs.read import TableRow
from steptime.measure.runs.reading import runs_of
from steptime.measure.runs.run import MeasuredRun, source_key
from steptime.num import evenly_spread

MOST_OF_A_SOURCE: Final = 24
COLUMNS: Final = (
    "row_id",
    "source_key",
    "source",
    "framework",
    "workload",
    "model",
    "n_params",
    "layers",
    "hidden",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "seq_len",
    "moe_experts",
    "moe_topk",
    "gated_mlp",
    "tied_embeddings",
    "gpu",
    "n_gpus",
    "gpus_per_node",
    "internode",
    "dtype",
    "global_batch_sequences",
    "micro_batch",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "zero_stage_or_fsdp",
    "sequence_parallel",
    "recompute",
    "offload",
    "attention_impl",
    "schedule",
    "metric_step_time_s",
    "metric_tokens_per_s_per_gpu",
    "metric_tflops_per_gpu",
    "tflops_definition",
    "metric_mfu",
    "metric_peak_mem_gb",
    "mem_definition",
    "mem_unit",
    "notes",
)


def published_rows(rows: Sequence[TableRow], most: int = MOST_OF_A_SOURCE) -> list[dict[str, str]]:
    """Rows that can be read, support claims and have a citation: of each source at most ``most``, evenly spread.

    Remarks (``notes``) are kept only where the row cannot be read the same without them.

    Args:
        rows: of the large table, in its order.
        most: rows of a source.
    """
    found: dict[str, list[TableRow]] = defaultdict(list)
    sound = {run.line for run in runs_of(list(rows)).runs if run.supports_claim and run.source}
    for row in rows:
        if row.line in sound:
            found[source_key(row)].append(row)
    return [_short(row) for own in found.values() for row in evenly_spread(own, most)]


def _short(row: TableRow) -> dict[str, str]:
    cells = {name: row.text(name) for name in COLUMNS} | {"source": citation(row.text("source")), "notes": ""}
    return cells if _same(row.cells, cells) else cells | {"notes": row.text("notes")}


def _same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two rows are the same run but for remarks and citation."""
    runs = [_bare(runs_of([TableRow(1, cells)]).runs) for cells in (one, other)]
    return runs[0] == runs[1]


def _bare(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    return [replace(run, source="", notes="", provenance="") for run in runs]


def citation(source: str) -> str:
    """What a source is, without trailing remarks on how it was read.

    >>> citation("NSDI24 Fig 9 (bar labels; full text, file id 1)")
    'NSDI24 Fig 9 (bar labels)'
    """
    bare = re.sub(r"[;,]?\s*(?:full text,?\s*)?\b[a-z]+ ids? \d[\d +,]*", "", source)
    return re.sub(r"\s*\(\s*\)", "", bare).strip()


def published_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """The table as text."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
