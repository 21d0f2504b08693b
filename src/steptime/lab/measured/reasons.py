"""Why a row cannot be used, and what was assumed or doubted about a row that can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """Why a row gives no :class:`~steptime.lab.measured.run.MeasuredRun`; one per row, the first that applies."""

    DUPLICATE = "the same line stands earlier in the file"
    NO_DEVICE = "the accelerator is not named"
    UNKNOWN_DEVICE = "the accelerator is not in the catalogue"
    AMBIGUOUS_DEVICE = "the accelerator is one of several"
    NO_GPUS = "the number of accelerators is not stated"
    UNSUPPORTED_ARCHITECTURE = "not a transformer of equal blocks"
    NO_ARCHITECTURE = "neither a known model nor layers, hidden and heads"
    MODEL_FILE = "the file of the model cannot be used"
    BAD_ARCHITECTURE = "the shape contradicts itself"
    NO_SEQUENCE = "the sequence length is not stated"
    NO_BATCH = "the global batch is not stated"
    BAD_NUMBER = "a number that is needed cannot be read"
    DEGREES_CONTRADICT = "the degrees do not multiply to the accelerators"
    BATCH_CONTRADICTS = "the batch does not divide among the replicas"
    BAD_MEASUREMENT = "a measurement is no positive number with a known unit"
    NO_MEASUREMENT = "no time, rate or memory is given"
    NO_STAGES = "fewer than two pipeline stages, or their micro-batches are not stated"
    MORE_STAGES = "more pipeline stages than layers"
    NO_OUTCOME = "the outcome is neither that it ran nor that it ran out of memory"
    INTERNAL = "not understood"


class Flag(StrEnum):
    """What was assumed or is doubtful; rows with one of :data:`NO_CLAIM` count but support no claim."""

    DEVICE_ASSUMED = "variant of the accelerator assumed"
    ARCHITECTURE_GUESSED = "shape guessed from the number of parameters"
    LAYERS_DERIVED = "layers derived from the number of parameters"
    HEADS_ASSUMED = "heads assumed"
    FFN_ASSUMED = "width of the MLP assumed"
    VOCAB_ASSUMED = "vocabulary assumed"
    DTYPE_ASSUMED = "dtype not stated"
    DTYPE_UNREAD = "spelling of the dtype unknown"
    TEXT_UNREAD = "spelling of a setting unknown"
    CELL_UNREAD = "a number that is not needed cannot be read"
    DEGREES_ASSUMED = "degrees not stated"
    DP_REDERIVED = "printed data-parallel degree does not fit; derived anew"
    MICRO_BATCH_REPLACED = "printed micro-batch does not divide the batch; the largest that does"
    BATCH_DERIVED = "global batch derived from micro-batch, replicas and accumulation"
    NODE_ASSUMED = "accelerators per node assumed"
    TIME_INCONSISTENT = "printed time and rate differ by more than 2 %"
    TIME_UNITS = "printed time and rate differ a hundredfold or more: a wrong unit?"
    TIME_IMPLAUSIBLE = "faster than the peak of the accelerators"
    FLOPS_UNDEFINED = "time from a rate whose FLOPs are not defined"
    MEMORY_UNREAD = "printed memory is no positive number with a known unit"
    STAGES_ABOVE_LAYERS = "more pipeline stages than layers"
    MEMORY_ABOVE_DEVICE = "memory above that of the device"
    MEMORY_UNIT_ASSUMED = "GB or GiB not stated; GiB taken"
    OUTLIER = "marked as an outlier in the table"
    LOW_TRUST = "the source or its reader doubts the number"
    FROM_MEMORY = "figures partly from memory"
    ROW_ID_REPEATED = "another row has the same row_id"
    SCRIPT = "settings from the script behind the source"
    COMPUTED = "times of equal runs lie on one exact line: computed, not measured"


NO_CLAIM: Final = frozenset(
    {
        Flag.ARCHITECTURE_GUESSED, Flag.TIME_INCONSISTENT, Flag.TIME_UNITS, Flag.TIME_IMPLAUSIBLE, Flag.FLOPS_UNDEFINED,
        Flag.OUTLIER, Flag.LOW_TRUST, Flag.FROM_MEMORY, Flag.DP_REDERIVED,
    }
)  # fmt: skip
"""Flags of rows that are read and scored, but that no claim of accuracy should rest on."""
DOUBTS: Final = NO_CLAIM | {
    Flag.COMPUTED, Flag.MEMORY_UNREAD, Flag.CELL_UNREAD, Flag.TEXT_UNREAD, Flag.DTYPE_UNREAD, Flag.MEMORY_ABOVE_DEVICE,
    Flag.STAGES_ABOVE_LAYERS,
}  # fmt: skip
"""Flags that a report lists: its reader can do something about them."""


class RowProblem(Exception):
    """Raised while a row is read; never leaves the package."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail[:200]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that is not used."""

    line: int
    """Line of the file on which the row begins; in a Parquet file its number, from 1."""
    row_id: str
    source_key: str
    reason: Reason
    detail: str
    """What was found, for example the spelling that is unknown."""
    measured: bool
    """A step time, or a number that gives one, is printed, and so are batch and shape: it should be readable."""


def reason_counts(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many rows each reason costs, the most frequent first."""
    return dict(Counter(str(row.reason) for row in skipped).most_common())
