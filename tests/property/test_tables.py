"""Tables whose cells are joined to lines, against the library's own layout of the same cells."""

from __future__ import annotations

import io
import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from steptime.report.text import grid

WORDS = st.text(st.sampled_from(" abcdef019.,%-[]:é×µ模\n\t"), max_size=12) | st.just(
    "a much longer text, which may fold"
)
TABLES = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(WORDS, min_size=n, max_size=n),
        st.lists(st.lists(WORDS, min_size=n, max_size=n), max_size=5),
        st.sets(st.integers(0, n - 1)),
    )
)


def printed(table: Any, width: int, terminal: bool) -> str:
    out = io.StringIO()
    options = {"markup": False, "emoji": False, "highlight": False, "force_terminal": terminal}
    Console(file=out, width=width, color_system="standard" if terminal else None, **options).print(table)
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


@given(TABLES, st.integers(4, 90), st.booleans())
@example((["", "step", "change"], [["", "1.5 s", "-3.0 %"], ["name ", "10 s ", " 2 %"]], {0}), 80, False)
def test_a_table_is_printed_as_the_library_lays_it_out(
    table: tuple[list[str], list[list[str]], set[int]], width: int, terminal: bool
) -> None:
    heads, rows, left = table
    ours, theirs = grid(heads, left=tuple(left)), Table(box=None, pad_edge=False)
    for i, name in enumerate(heads):
        setting = {"overflow": "fold"} if i in left else {"justify": "right", "no_wrap": True}
        theirs.add_column(name, **setting)  # type: ignore[arg-type]
    for row in rows:
        ours.add_row(*row)
        theirs.add_row(*row)
    assert printed(ours, width, terminal) == printed(theirs, width, terminal)


def test_nested_tables_are_measured_and_folded_as_those_of_the_library() -> None:
    for width in (30, 60, 120):
        found = []
        for kind in (grid, lambda heads: grid_of_the_library(heads)):
            both = Table.grid(padding=(0, 4, 0, 0))
            first, second = kind(("where the time goes", "", "share")), kind(("what would change it", "step"))
            first.add_row("compute", "19.56 s", "75.8 %")
            second.add_row("matrix rate x2", "16.8 s")
            both.add_row(first, second)
            found.append(printed(both, width, False))
        assert found[0] == found[1]


def grid_of_the_library(heads: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(heads):
        setting = {"justify": "right", "no_wrap": True} if i else {"overflow": "fold"}
        table.add_column(name, **setting)  # type: ignore[arg-type]
    return table
