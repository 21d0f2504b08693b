"""Settings that the scripts behind published results state, where the tables of those results leave them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from steptime.lab.measured.read import TableRow
from steptime.lab.measured.tables import framework_of, table

MEANT = ("framework", "fill", "instead")
"""Keys of an entry that are no condition on a column."""


def with_recipe(row: TableRow) -> TableRow:
    """The row with cells from the recipes that hold for it, the first that has a cell counting.

    A recipe holds where its framework is the row's, and each of its patterns is found in the row's column. It fills
    empty cells, and takes the place of those that the scripts contradict or narrow down.

    >>> row = TableRow(1, {"source_key": "mlperf", "model": "Llama2-70B LoRA (MLPerf)", "gpu": "MI300X"})
    >>> with_recipe(row).text("recompute"), with_recipe(TableRow(1, {"model": "GPT-3"})).text("recompute")
    ('full, every 4th layer', '')
    """
    filled: dict[str, str] = {}
    framework = framework_of(row)
    for recipe in table("recipes")["recipe"]:
        if _holds(recipe, row, framework):
            missing = {column: text for column, text in recipe.get("fill", {}).items() if not row.text(column)}
            filled = {**recipe.get("instead", {}), **missing, **filled}
    return replace(row, cells={**row.cells, **filled}) if filled else row


def _holds(recipe: Mapping[str, Any], row: TableRow, framework: str) -> bool:
    if recipe.get("framework", framework) != framework:
        return False
    conditions = ((column, pattern) for column, pattern in recipe.items() if column not in MEANT)
    return all(re.search(pattern, row.text(column), re.IGNORECASE) for column, pattern in conditions)
