"""Results of a study as tables of points, plans, fronts and terms, by name or by SQL."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steptime.cost.training import DAY_S, HOUR_S, device_s, training_s
from steptime.errors import UnknownNameError, UserError, counted, shorten
from steptime.goodput.training import samples_in
from steptime.num import Num
from steptime.store.tables import connected, filled, write_table
from steptime.study.evaluate import COLUMNS
from steptime.study.file import Case, Study
from steptime.study.hardware import PARAMETERS
from steptime.study.points import forget
from steptime.study.store import Store

#: Table -> kind of its rows, and their columns.
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
"""Label of a point -> its SQL type."""
_TRAINING: Final[Mapping[str, Callable[[Num, Num], Num]]] = {
    "training_days": lambda run_s, gpus: run_s / DAY_S,
    "gpu_hours": lambda run_s, gpus: device_s(run_s, gpus) / HOUR_S,
    "gpu_days": lambda run_s, gpus: device_s(run_s, gpus) / DAY_S,
}
"""Amount of a whole run -> function of the run's time (s) and its devices."""
_MEMORY: Final = "1GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of a study in a store."""

    study: Study
    store: Store
    have: frozenset[str]
    """Points with rows in the store."""
    damaged: tuple[str, ...]
    """Points whose rows are damaged."""

    @property
    def missing(self) -> int:
        """Number of points missing in the store."""
        return len({case.point.key for case in self.study.cases} - self.have)

    def rows(self, table: str = "plans") -> list[dict[str, Any]]:
        """Rows of one of the tables ``points``, ``plans``, ``front``, ``terms``, in the order of the study.

        Raises:
            UnknownNameError: the table is unknown.
        """
        kind, own = self._known(table)
        found = dict(self.store.read(self.have))
        out = []
        for case in self.study.cases:
            rows = [row for row in found.get(case.point.key) or () if row["kind"] == kind]
            labels = _labels(case) if rows else {}
            for row in rows:
                further = _trained(labels, row) if kind == "plan" else {}
                out.append(labels | {name: _cell(row.get(name), COLUMNS[name]) for name in own} | further)
        return out

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a query in DuckDB's SQL over the tables; a query can neither change anything nor read files.

        Raises:
            UserError: DuckDB is missing, or refuses the query; the message says why.
        """

        def failed(why: str) -> UserError:
            return UserError(f"the query is refused: {shorten(why, 300)}", hint=f"tables: {', '.join(TABLES)}")

        with connected("a query in SQL", failed) as connection:
            connection.execute(f"set memory_limit = '{_MEMORY}'")
            for table in TABLES:
                if table in sql.lower():
                    filled(connection, table, self.rows(table), self._types(table))
            connection.execute("set enable_external_access = false")
            connection.execute("set lock_configuration = true")
            cursor = connection.execute(sql)
            if cursor is None:
                raise UserError("the query is empty", hint="for example select * from plans limit 3")
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def export(self, path: str | os.PathLike[str], table: str = "plans") -> int:
        """Write a table as CSV, CSV.gz or Parquet, by the ending; returns the number of rows.

        Raises:
            UserError: the ending or the table is unknown, DuckDB, which writes Parquet, is missing, or the file cannot
                be written.
        """
        rows = self.rows(table)
        write_table(path, rows, self._types(table))
        return len(rows)

    def _known(self, table: str) -> tuple[str, tuple[str, ...]]:
        if table not in TABLES:
            raise UnknownNameError("table of a study", table, TABLES)
        return TABLES[table]

    def _types(self, table: str) -> dict[str, str]:
        """Column of a table -> its SQL type."""
        kind, own = self._known(table)
        trained = [name for each in _TRAINING for name in _three(each)] if kind == "plan" else []
        return {**LABELS, **{name: COLUMNS[name] for name in own}, **dict.fromkeys(trained, "double")}


def _three(name: str) -> tuple[str, str, str]:
    """Columns of an amount and of the two ends of its band.

    >>> _three("training_days")
    ('training_days', 'training_band_low_days', 'training_band_high_days')
    """
    stem, _, unit = name.rpartition("_")
    return name, f"{stem}_band_low_{unit}", f"{stem}_band_high_{unit}"


def _trained(labels: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Num | None]:
    """Amounts of a whole run from the step time of a plan; None without a band, or without a run in the study."""
    samples, batch, gpus = labels["training_samples"], labels["global_batch"], labels["gpus"]
    steps = [row.get(name) for name in ("step_time_s", "step_time_band_low_s", "step_time_band_high_s")]
    whole = [None if samples is None or batch is None or s is None else training_s(s, samples, batch) for s in steps]
    return {
        column: None if run_s is None else amount(run_s, gpus)
        for name, amount in _TRAINING.items()
        for column, run_s in zip(_three(name), whole, strict=True)
    }


def _cell(value: Any, kind: str) -> Any:
    return float(value) if kind == "double" and value is not None else value


def _labels(case: Case) -> dict[str, Any]:
    """Labels of a point of a study."""
    labels = case.point.labels()
    further = {name: labels[name] for name in ("lora", "fix", "limit", "plan") if labels.get(name)}
    labels |= {
        "point": case.point.key,
        "grid": case.grid,
        "options": json.dumps(further, sort_keys=True),
        "training_samples": samples_in(case.training, labels["seq_len"]) if case.training else None,
    }
    return {name: _cell(labels.get(name), kind) for name, kind in LABELS.items()}


def results(study: Study, store: str | os.PathLike[str] | Store) -> Results:
    """Results of a study in a store; damaged points are left out, and named.

    Raises:
        UserError: the store is missing or cannot be read.
    """
    kept = store if isinstance(store, Store) else Store(store)
    if not kept.folder.is_dir():
        raise UserError(f"{kept.folder}: there is no store", hint="steptime study run FILE makes one; or give --store")
    forget()
    whole = {key: rows is not None for key, rows in kept.read({point.key for point in study.points})}
    damaged = tuple(sorted(key for key, found in whole.items() if not found))
    return Results(study=study, store=kept, have=frozenset(whole) - {*damaged}, damaged=damaged)


def missing_text(found: Results) -> str | None:
    """A sentence on missing points; None if there are none."""
    if not found.missing:
        return None
    why = f" ({len(found.damaged)} damaged)" if found.damaged else ""
    return f"{counted(found.missing, 'point')} of {len(found.study.cases)} not computed{why}: run the study (again)"
