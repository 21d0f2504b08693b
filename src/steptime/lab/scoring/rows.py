"""Rows of a scored table: those without a prediction, counted, and all of them written in the order of the table."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.store.files import write_whole

REFUSED: Final = "no plausible setting of the run can be modelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A row without a prediction."""

    line: int
    row_id: str = ""
    source_key: str = ""
    reason: str
    detail: str

    @property
    def place(self) -> str:
        """Where it is, and what is wrong there.

        >>> Missing(line=5, reason="no time", detail="n_gpus: 'eight'").place
        "line 5: n_gpus: 'eight'"
        """
        return f"line {self.line}: {self.detail}" if self.detail else f"line {self.line}"


def counted(missing: Sequence[Missing]) -> dict[str, Any]:
    """Number of rows by reason, the most frequent first, and the first row of each.

    >>> rows = [Missing(line=n, reason=why, detail="") for n, why in ((2, "no time"), (3, "no GPU"), (4, "no GPU"))]
    >>> counted(rows)["skipped"], counted(rows)["skipped_first"]
    ({'no GPU': 2, 'no time': 1}, {'no GPU': 'line 3', 'no time': 'line 2'})
    """
    found = Counter(row.reason for row in missing).most_common()
    first = {row.reason: row.place for row in reversed(missing)}
    return {"skipped": dict(found), "skipped_first": {reason: first[reason] for reason, _ in found}}


def write_table(
    path: Path, columns: Sequence[str], scored: Iterable[tuple[int, Mapping[str, object]]], missing: Iterable[Missing]
) -> None:
    """Writes rows in the order of the table.

    Args:
        path: CSV file.
        columns: its header.
        scored: line of the table -> cells of a row with a prediction; a line may have several.
        missing: rows without one.

    Raises:
        InputFileError: it cannot be written.
    """
    lines = [*scored]
    lines += [
        (m.line, {"line": m.line, "row_id": m.row_id, "source_key": m.source_key, "skipped": m.reason,
                  "detail": m.detail}) for m in missing
    ]  # fmt: skip
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells for _, cells in sorted(lines, key=lambda pair: pair[0]))
    write_whole(path, out.getvalue())
