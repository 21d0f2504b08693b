"""Frameworks fitted to a table of measured runs: parameters, doubts, bands, and the file that holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from steptime.errors import UserError, counted
from steptime.measure.runs.bands import (
    Band,
    Predicted,
    band_of,
    honest_coverage,
    left_out_both,
    packaged,
    slower_of,
    source_weights,
    to_toml,
    with_slowdown,
)
from steptime.measure.runs.fitting import PARAMETERS, Fitted
from steptime.measure.runs.predict import fit_to, usable
from steptime.measure.runs.reading import Reading
from steptime.measure.runs.samples import Modelled, Progress, modelled
from steptime.measure.runs.scoring import fit_key, read_any
from steptime.num import Array
from steptime.plan.framework import BUSY
from steptime.plan.framework_file import GENERIC

BAND_SOURCES: Final = 5
BAND_RUNS: Final = 50
"""Fewest sources and runs for bands of their own; with fewer, the bands of the frameworks in use are kept."""


FEW_RUNS: Final = 10
"""With fewer runs a fit says little more than its priors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkResult:
    """A fit and the runs that it rests on."""

    reading: Reading
    found: Modelled
    fitted: Fitted
    used: Array
    bands: tuple[Band, Band]
    """Bands with the framework named, and not named."""
    coverage: tuple[float | None, float | None]
    """Share of used runs inside the band that all other sources give; None where the bands are not of this fit."""
    toml: str

    def to_json(self) -> dict[str, Any]:
        """Counts, bands, and every parameter with its standard deviation (of the logarithm; of shares, the logit)."""
        frameworks, devices = self._counts("framework"), self._counts("device")
        return {
            "rows": self.reading.rows,
            "runs": len(self.found.runs),
            "used": int(self.used.sum()),
            "sources": len(set(_sources(self.found)[self.used])),
            "rounds": self.fitted.rounds,
            "refused": len(self.found.refused),
            "warnings": list(self.warnings),
            "bands": {
                name: {"low": b.low, "high": b.high, "coverage90": c, "own": c is not None}
                for name, b, c in zip(("named", "generic"), self.bands, self.coverage, strict=True)
            },
            "generic": {"slower": float(np.exp(self.fitted.slower))},
            "common": _parameters(self.fitted.common, self.fitted.common_doubt),
            "frameworks": {
                name: {
                    "runs": frameworks[name],
                    "parameters": _parameters(self.fitted.common + own, self.fitted.framework_doubts[name]),
                }
                for name, own in self.fitted.frameworks.items()
            },
            "devices": {
                name: {
                    "runs": devices[name],
                    "doubt": self.fitted.device_doubts[name],
                    **dict(zip(BUSY, np.exp(own).tolist(), strict=True)),
                }
                for name, own in self.fitted.devices.items()
            },
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about a doubtful fit: few runs, or few of the rows that were given."""
        used, rows = int(self.used.sum()), self.reading.rows
        if used >= FEW_RUNS and 2 * used >= rows:
            return ()
        few = f"; a fit to fewer than {FEW_RUNS} says little about a framework" if used < FEW_RUNS else ""
        why = "; steptime score FILE --out rows.csv says why not the others" if used < rows else ""
        return (f"{used} of {counted(rows, 'row')} could be used{few}{why}",)

    def _counts(self, column: str) -> Counter[str]:
        return Counter(str(name) for name in getattr(self.found.fit.runs, column)[self.used])


def _parameters(columns: Array, doubts: Array) -> dict[str, dict[str, float]]:
    return {
        p.name: {"value": float(p.outward(columns[i])), "doubt": float(doubts[i])} for i, p in enumerate(PARAMETERS)
    }


def fit_runs(paths: Sequence[Path], progress: Progress | None = None, *, source: str | None = None) -> FrameworkResult:
    """Fits frameworks to one or more tables and writes the text of their file.

    Args:
        paths: CSV, CSV.gz or Parquet with the columns of measured training runs.
        progress: called with runs evaluated or fits done, and all of them.
        source: source that the file states; by default the names of the tables.

    Raises:
        InputFileError: a file is not such a table.
        UserError: no run can be used for a fit.
    """
    tables = [read_any(path) for path in paths]
    reading = replace(
        tables[0],
        runs=tuple(run for table in tables for run in table.runs),
        skipped=tuple(row for table in tables for row in table.skipped),
    )
    names = ", ".join(fit_key(path.name) for path in paths)
    return fit_reading(reading, source or f"step times of training runs in {names}", progress)


def fit_reading(reading: Reading, source: str, progress: Progress | None = None) -> FrameworkResult:
    """Fits frameworks to runs that are already read; ``source`` is written to the file."""
    if not reading.runs:
        raise UserError("no row of the table can be read", hint="steptime score FILE lists the reasons")
    found = modelled(reading.runs, progress)
    used = usable(found)
    if not used.any():
        raise UserError("no run of the table supports a claim", hint="steptime score FILE --out rows.csv shows why")
    bands, coverage, slower = _bands(found, used, progress)
    fitted = replace(fit_to(found), slower=slower)
    runs = Counter(str(name) for name in found.fit.runs.framework[used])
    toml = to_toml(
        _named(fitted), named=bands[0], generic=bands[1], provenance=_provenance(found, used, source), runs=runs
    )
    return FrameworkResult(
        reading=reading, found=found, fitted=fitted, used=used, bands=bands, coverage=coverage, toml=toml
    )


def _named(fitted: Fitted) -> Fitted:
    """The fit without the framework of runs that name none: such runs get the common values."""
    return replace(
        fitted,
        frameworks={k: v for k, v in fitted.frameworks.items() if k != GENERIC},
        framework_doubts={k: v for k, v in fitted.framework_doubts.items() if k != GENERIC},
    )


def _sources(found: Modelled) -> Array:
    return np.array([run.source_key for run in found.runs], dtype=object)


def _provenance(found: Modelled, used: Array, source: str) -> dict[str, str | int | float]:
    keys = sorted({fit_key(key) for key in _sources(found)[used]})
    return {
        "source": source,
        "rows": int(used.sum()),
        "sources": len(keys),
        "keys": ", ".join(keys),
        "fitted": datetime.now(UTC).date().isoformat(),
    }


def _bands(
    found: Modelled, used: Array, progress: Progress | None
) -> tuple[tuple[Band, Band], tuple[float | None, float | None], float]:
    """Bands with the framework named and not, their coverage, and how much slower an unknown framework is."""
    sources = _sources(found)
    if len(set(sources[used])) < BAND_SOURCES or used.sum() < BAND_RUNS:
        fitted, bands = packaged()
        return bands, (None, None), fitted.slower
    both = left_out_both(found.fit, sources, used=used, progress=progress)
    (named, of_named), (generic, of_generic) = (
        _band(with_slowdown(each, both[1], sources, used), sources, used) for each in both
    )
    return (named, generic), (of_named, of_generic), slower_of(both[1], sources, used)


def _band(predicted: Predicted, sources: Array, used: Array) -> tuple[Band, float]:
    own, scaled = sources[used].astype(str), predicted.scaled[used]
    return band_of(scaled, source_weights(own)), float(honest_coverage(scaled, own).mean())
