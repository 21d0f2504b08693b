"""Results of a study read again: tables of points, plans, fronts and terms, by name or by SQL."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steptime.api.training import samples_in
from steptime.cost.training import DAY_S, HOUR_S, device_s, training_s
from steptime.errors import UnknownNameError, UserError, counted, shorten
from steptime.store.tables import TABLES as ENDINGS
from steptime.store.tables import connected, refuse_table
from steptime.study.evaluate import COLUMNS, REFUSED
from steptime.study.file import Case, Study
from steptime.study.hardware import PARAMETERS
from steptime.study.points import forget
from steptime.study.store import Store, json_rows, quoted, select_json

#: Table -> kind of its rows and the columns that it has of them.
_OF_PLANS: Final = tuple(COLUMNS)[tuple(COLUMNS).index("step_time_s") : tuple(COLUMNS).index("quantity")]
TABLES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "points": ("point", ("status", "message", "candidates", "feasible_candidates", "reasons")),
    "plans": ("plan", ("rank", *_OF_PLANS)),
    "front": ("front", ("rank", "step_time_s", "peak_memory_bytes", *_OF_PLANS[_OF_PLANS.index("strategy") :])),
    "terms": ("term", ("rank", "quantity", "path", "value")),
}
LABELS: Final[Mapping[str, str]] = {
    "point": "varchar",
    "grid": "varchar",
    "model": "varchar",
    "cluster": "varchar",
    "device": "varchar",
    "gpus": "bigint",
    "global_batch": "bigint",
    "seq_len": "bigint",
    "mode": "varchar",
    "asked_strategy": "varchar",
    "dtype": "varchar",
    "optimizer": "varchar",
    "framework": "varchar",
    "options": "varchar",
    **{parameter.column: "double" for parameter in PARAMETERS.values()},
    "training_samples": "double",
}
"""What tells a point from others, with its type in DuckDB."""
#: Amount of a whole run -> what it is of a time of a step.
_TRAINING: Final = {
    "training_days": "training_s({step}, training_samples, b) / " + repr(DAY_S),
    "gpu_hours": "device_s(training_s({step}, training_samples, b), gpus) / " + repr(HOUR_S),
    "gpu_days": "device_s(training_s({step}, training_samples, b), gpus) / " + repr(DAY_S),
}
_MEMORY: Final = "1GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a store has of a study."""

    study: Study
    store: Store
    at: Mapping[str, str]
    """Point -> the block that has its rows."""
    damaged: tuple[str, ...]
    """Blocks that are not read: their checksum is wrong, or they are gone."""

    @property
    def missing(self) -> int:
        """Points that the store has not."""
        return len({case.point.key for case in self.study.cases} - set(self.at))

    def rows(self, table: str = "plans") -> list[dict[str, Any]]:
        """Rows of one of the tables ``points``, ``plans``, ``front``, ``terms``, as plain data.

        Raises:
            UnknownNameError: the table is unknown.
        """
        return self.query(f"select * from {self._known(table)}")

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a query in SQL over the tables; it can change nothing and read no files.

        Raises:
            UserError: DuckDB refuses it; the message says why.
        """
        import duckdb

        with self._open() as connection:
            try:
                cursor = connection.execute(sql)
                if cursor is None:
                    raise UserError("the query is empty", hint="for example select * from plans limit 3")
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            except duckdb.Error as error:
                raise UserError(_refusal(error), hint=f"tables: {', '.join(TABLES)}") from None

    def export(self, path: str | os.PathLike[str], table: str = "plans") -> int:
        """Writes a table as CSV, CSV.gz or Parquet, by the ending; the number of its rows.

        Raises:
            UserError: the ending or the table is unknown, or the file cannot be written.
        """
        import duckdb

        target = os.fspath(path)
        ending = refuse_table(target)
        self._known(table)
        with self._open(locked=False) as connection:
            try:
                connection.execute(f"copy (select * from {table}) to {quoted(target)} (format {ENDINGS[ending]})")
            except duckdb.Error as error:
                raise UserError(f"{target}: {_refusal(error)}") from None
            number: int = connection.execute(f"select count(*) from {table}").fetchone()[0]
        return number

    def _known(self, table: str) -> str:
        if table not in TABLES:
            raise UnknownNameError("table of a study", table, TABLES)
        return table

    @contextmanager
    def _open(self, *, locked: bool = True) -> Iterator[Any]:
        """A connection with the tables; locked: no file is read or written any more."""
        with connected() as connection, tempfile.TemporaryDirectory(prefix="steptime-") as name:
            connection.execute(f"set memory_limit = '{_MEMORY}'")
            connection.execute(f"set temp_directory = {quoted(name)}")
            for formula in (training_s, device_s):
                numbers = ["DOUBLE"] * formula.__code__.co_argcount
                connection.create_function(formula.__name__, formula, numbers, "DOUBLE")
            self._load(connection, Path(name))
            if locked:
                connection.execute("set enable_external_access = false")
                connection.execute("set lock_configuration = true")
            yield connection

    def _load(self, connection: Any, folder: Path) -> None:
        json_rows([_labels(n, case) for n, case in enumerate(self.study.cases)], folder / "labels.json")
        json_rows([{"point": p, "file": str(self.store.path(c))} for p, c in self.at.items()], folder / "at.json")
        label_types = {"n": "bigint", **LABELS}
        connection.execute(f"create table labels as {select_json(folder / 'labels.json', label_types)}")
        where = {"point": "varchar", "file": "varchar"}
        connection.execute(f"create table places as {select_json(folder / 'at.json', where)}")
        files = sorted({str(self.store.path(checksum)) for checksum in self.at.values()})
        columns = ", ".join(COLUMNS)
        if files:
            source = "read_parquet(?, filename = true, file_row_number = true)"
            rows = f"select {columns}, file_row_number as place from {source}"
            select = f"{rows} r semi join places p on (r.point = p.point and r.filename = p.file)"
            connection.execute(f"create table found as {select}", [files])
        else:
            types = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
            connection.execute(f"create table found ({types}, place bigint)")
        for table, (kind, own) in TABLES.items():
            connection.execute(f"create table {table} as {_select(kind, own)}")
        for name in ("found", "places", "labels"):
            connection.execute(f"drop table {name}")


def _select(kind: str, own: Sequence[str]) -> str:
    """Query of the rows of one kind with the labels of their points, in the order of the study."""
    labels = [f"l.{name}" for name in LABELS if name != "point"]
    columns = ["l.point", *labels, *(f"f.{name}" for name in own)]
    if kind == "plan":
        steps = {"": "f.step_time_s", "_band_low": "f.step_time_band_low_s", "_band_high": "f.step_time_band_high_s"}
        for name, formula in _TRAINING.items():
            for which, step in steps.items():
                stem, _, unit = name.rpartition("_")
                sql = formula.format(step=step).replace(", b)", ", l.global_batch)").replace("gpus)", "l.gpus)")
                columns.append(f"{sql} as {stem}{which}_{unit}")
    return (
        f"select {', '.join(columns)} from labels l join found f on l.point = f.point where f.kind = '{kind}' "
        "order by l.n, f.place"
    )


def _labels(number: int, case: Case) -> dict[str, Any]:
    """One row for a point of a study: what tells it from the others."""
    labels = case.point.labels()
    further = {name: labels[name] for name in ("lora", "fix", "limit", "plan") if labels.get(name)}
    return {
        **{name: labels.get(name) for name in LABELS},
        "n": number,
        "point": case.point.key,
        "grid": case.grid,
        "options": json.dumps(further, sort_keys=True),
        "training_samples": _samples(case, labels["seq_len"]),
    }


def _samples(case: Case, seq_len: int) -> float | None:
    return samples_in(case.training, seq_len) if case.training else None


def results(study: Study, store: str | os.PathLike[str] | Store) -> Results:
    """What a store has of a study; blocks that are damaged are left out, and named.

    Raises:
        UserError: the store is missing or a journal is damaged.
    """
    kept = store if isinstance(store, Store) else Store(store)
    if not kept.folder.is_dir():
        raise UserError(f"{kept.folder}: there is no store", hint="steptime study run FILE makes one; or give --store")
    kept.refresh()
    forget()
    at, damaged = kept.found(list(dict.fromkeys(point.key for point in study.points)))
    return Results(study=study, store=kept, at=at, damaged=damaged)


def refused_points(store: Store, at: Mapping[str, str]) -> int:
    """Points that have a message in place of plans."""
    if not at:
        return 0
    with connected() as connection:
        files = sorted({str(store.path(checksum)) for checksum in at.values()})
        query = f"select distinct point from read_parquet(?) where kind = 'point' and status = '{REFUSED}'"
        return sum(row[0] in at for row in connection.execute(query, [files]).fetchall())


def _refusal(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"the query is refused: {shorten(lines[0], 300) if lines else type(error).__name__}"


def missing_text(found: Results) -> str | None:
    """A sentence on points that are not there; None where all are."""
    if not found.missing:
        return None
    why = f" ({counted(len(found.damaged), 'damaged block')})" if found.damaged else ""
    return f"{counted(found.missing, 'point')} of {len(found.study.cases)} not computed{why}: run the study (again)"
