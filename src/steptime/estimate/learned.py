r"""A learned correction of operator times: the analytic time of an operator times a factor that depends on its sizes.

The factor is a small network over numbers that every operator has, whether it comes from a table of strategies or from
a captured module. It multiplies the time of a term and never replaces it: a report says by how much, term by term.
Corrections are fitted by :mod:`steptime_lab.learned`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from steptime.errors import InputFileError, UserError, shorten
from steptime.hardware.records import Device
from steptime.num import Array, Num
from steptime.store.files import is_file, read_bytes

MAX_BYTES: Final = 2**24
VERSION: Final = 1
LEAST: Final = 1e-9
"""Smallest value under a logarithm, which stands for zero."""
LIMIT: Final = 2.0
"""Largest absolute logarithm of a factor: beyond it an operator is unlike anything that was measured."""
SIZES: Final = ("rows", "columns", "depth", "loops", "steps", "result_bytes", "hidden", "channelwise", "winograd_taps")
"""Sizes of an operator that are features; sizes of products map to the first three."""
SAME: Final = {"m": "rows", "n": "columns", "k": "depth", "width": "columns", "queries": "columns", "keys": "depth"}
"""Size of another name -> feature that has its value."""
NUMBERS: Final = (
    "seconds",
    "matrix_flops",
    "vector_flops",
    "moved_bytes",
    "launches",
    "intensity",
    "share_of_peak",
    "share_of_bandwidth",
    "backward",
    *SIZES,
)

Issuer = Literal["forward", "backward", "optimizer", "inside"]
ISSUERS: Final[tuple[Issuer, ...]] = ("forward", "backward", "optimizer", "inside")
"""Issuers of a call: Python in one of the phases, or PyTorch itself from inside an operator that loops over tokens."""
MOST: Final = 1e6
"""Largest number that the file of a correction may hold."""
MOST_LAYERS: Final = 8
HOST_LIMIT: Final = 3.0
"""Largest logarithm of a factor on the time of the host."""
ANY: Final = ""
"""Key of :attr:`Correction.machines` with the mean of all devices, for those that were not measured."""
FOLDER: Final = Path(__file__).with_name("corrections")
"""Folder of the corrections that come with steptime."""
LEARNED: Final = "learned"
"""Name of the correction that comes with steptime for the kind of a device."""
ARRAYS: Final = ("centre", "spread", "low", "high", "offsets", "host")


def _log(value: Num, unit: float = 1.0) -> Num:
    out: Num = np.log10(np.maximum(value, 0.0) / unit + LEAST)
    return out


def described(
    shape: Mapping[str, Num],
    work: Mapping[str, Num],
    seconds: Num,
    *,
    backward: bool,
    peak_flops_per_s: float,
    memory_Bps: float,
) -> tuple[Num, ...]:
    r"""Features of an operator, in the order of :data:`NUMBERS`.

    $$x = \log_{10} v$$ for times (us), operations (M), bytes (KiB) and sizes $v$; a share is that of a rate of the
    device at which the analytic time runs.

    Args:
        shape: sizes by the argument names of its time model.
        work: ``matrix_flops``, ``vector_flops``, ``moved_bytes`` and, where known, ``launches``.
        seconds: its analytic time (s).
        backward: whether it is part of the backward pass.
        peak_flops_per_s: sustained rate of the matrix units (1/s).
        memory_Bps: sustained bandwidth of the memory (bytes/s).
    """
    matrix, vector, moved = work["matrix_flops"], work["vector_flops"], work["moved_bytes"]
    sizes: dict[str, Num] = dict.fromkeys(SIZES, 0.0)
    for name, value in shape.items():
        own = SAME.get(name, name)
        if own in sizes:
            sizes[own] = value
    time = seconds + 1e-12
    numbers: dict[str, Num] = {
        "seconds": _log(seconds, 1e-6),
        "matrix_flops": _log(matrix + 1.0, 1e6),
        "vector_flops": _log(vector + 1.0, 1e6),
        "moved_bytes": _log(moved + 1.0, 1024.0),
        "launches": _log(work.get("launches", 1.0) + 1.0),
        "intensity": _log((matrix + vector + 1.0) / (moved + 1.0)),
        "share_of_peak": _log(matrix / (time * peak_flops_per_s) + 1e-3),
        "share_of_bandwidth": _log(moved / (time * memory_Bps) + 1e-3),
        "backward": float(backward),
        **{name: _log(value + 1.0) for name, value in sizes.items()},
    }
    return tuple(numbers[name] for name in NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Factors on analytic times, as they were fitted."""

    name: str
    operators: tuple[str, ...]
    """Time models in the fit; any other one is corrected by its numbers alone, and a report says so."""
    centre: Array
    """Mean of each number, (features,)."""
    spread: Array
    """Standard deviation of each number, (features,)."""
    low: Array
    """Smallest value of each number in the fit, (features,)."""
    high: Array
    """Largest value of each number in the fit, (features,)."""
    layers: tuple[tuple[Array, Array], ...]
    """Weights (inputs, outputs) and biases (outputs,) of each layer; between layers ``tanh``."""
    offsets: Array
    """Summand of each known operator in the logarithm of its factor, (operators,)."""
    host: Array
    """Logarithm of the factor on the time of the host, by issuer (:data:`ISSUERS`), (issuers,)."""
    machines: Mapping[str, tuple[float, float]]
    """Device -> summands in the logarithms of factors on its times and on those of its host."""
    workspaces: Mapping[str, tuple[float, float]]
    """Operator of a captured module -> workspace of its kernel, as shares of the bytes that it reads and writes."""
    of_processor: bool
    """True if fitted on host processors, which issue their own work; False: on GPUs."""
    band: tuple[float, float]
    """Factors on a step between which nine of ten unseen graphs lay (conformal)."""
    error: float
    """Mean relative error on families of graphs outside the fit."""
    provenance: Mapping[str, Any]
    """Data of the fit, device, software, number of graphs, seed."""

    def knows(self, operator: str) -> bool:
        """True if the time model of an operator was in the fit."""
        return operator in self.operators

    def log_factor(self, operator: str, numbers: Sequence[Num]) -> Num:
        r"""Logarithm of the factor of an operator: measured over analytic time.

        $$\ln f = e^{-d}\, c \tanh\big((a + W_3 \tanh(W_2 \tanh(W_1 x + b_1) + b_2) + b_3) / c\big)$$

        with $a$ the operator's own offset, $c$ = :data:`LIMIT`, $x$ the numbers of :func:`described`, each clipped to
        the range of the fit and standardised, and a one-hot vector of the operator. $d$ is the distance to the range of
        the fit on the scale of the numbers, summed over them: far outside the factor goes to 1.
        """
        rows = np.stack([np.asarray(number, np.float64) for number in np.broadcast_arrays(*numbers)], axis=-1)
        within = np.clip(rows, self.low, self.high)
        known = np.exp(-abs(rows - within).sum(axis=-1))
        x = (within - self.centre) / self.spread
        own = np.array([float(name == operator) for name in self.operators])
        x = np.concatenate([x, np.broadcast_to(own, (*x.shape[:-1], len(own)))], axis=-1)
        for number, (weights, bias) in enumerate(self.layers, 1):
            x = x @ weights + bias
            if number < len(self.layers):
                x = np.tanh(x)
        out: Array = known * LIMIT * np.tanh((x[..., 0] + own @ self.offsets) / LIMIT)
        return out if out.ndim else float(out)

    def card(self, device: str) -> tuple[float, float]:
        """Summands of a device in the logarithms of factors on its times and on those of its host."""
        return self.machines.get(device, self.machines.get(ANY, (0.0, 0.0)))

    def factor(self, operator: str, numbers: Sequence[Num], device: str = ANY) -> Num:
        """The factor on the time of an operator (:meth:`log_factor`) on a device (:meth:`card`)."""
        found = np.exp(self.log_factor(operator, numbers) + self.card(device)[0])
        return found if isinstance(found, np.ndarray) else float(found)

    def to_json(self) -> dict[str, Any]:
        """Plain data with four digits per number; :func:`correction_from` reads it."""

        def plain(values: Array) -> Any:
            return np.array([float(f"{v:.4g}") for v in values.ravel()]).reshape(values.shape).tolist()

        return {
            "steptime_correction": VERSION,
            "name": self.name,
            "provenance": dict(self.provenance),
            "of_processor": self.of_processor,
            "error": round(self.error, 4),
            "band": [round(end, 4) for end in self.band],
            "numbers": list(NUMBERS),
            "operators": list(self.operators),
            **{name: plain(getattr(self, name)) for name in ARRAYS},
            "workspaces": {name: list(shares) for name, shares in self.workspaces.items()},
            "machines": {name: [round(part, 4) for part in card] for name, card in self.machines.items()},
            "layers": [[plain(weights), plain(bias)] for weights, bias in self.layers],
        }


def correction_from(data: Any, where: str) -> Correction:
    """The correction in the data that :meth:`Correction.to_json` writes.

    Raises:
        InputFileError: the data is no correction, or was fitted to other features.
    """
    if not isinstance(data, dict) or data.get("steptime_correction") != VERSION:
        raise InputFileError(where, "is not a learned correction", hint="steptime predict train writes one")
    if data.get("numbers") != list(NUMBERS):
        raise InputFileError(where, "was fitted by another version", hint="fit it again: steptime predict train")
    try:
        arrays = {n: np.array(data[n], np.float64) for n in ARRAYS}
        layers = tuple((np.array(w, np.float64), np.array(b, np.float64)) for w, b in data["layers"])
        made = Correction(
            name=str(data["name"]),
            operators=tuple(map(str, data["operators"])),
            layers=layers,
            of_processor=bool(data["of_processor"]),
            workspaces={str(n): (float(a), float(b)) for n, (a, b) in data["workspaces"].items()},
            machines={str(n): (float(a), float(b)) for n, (a, b) in data["machines"].items()},
            band=(float(data["band"][0]), float(data["band"][1])),
            error=float(data["error"]),
            provenance=dict(data["provenance"]),
            **arrays,
        )
        _check(made)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise InputFileError(where, f"is damaged: {error}", hint="fit it again: steptime predict train") from None
    return made


def _check(made: Correction) -> None:
    shapes = {"offsets": len(made.operators), "host": len(ISSUERS)}
    if any(getattr(made, name).shape != (shapes.get(name, len(NUMBERS)),) for name in ARRAYS):
        raise ValueError("a list of it has another length")
    size = len(NUMBERS) + len(made.operators)
    for weights, bias in made.layers:
        if weights.ndim != 2 or weights.shape[0] != size or bias.shape != weights.shape[1:]:
            raise ValueError("its layers do not fit together")
        size = weights.shape[1]
    if size != 1 or not 1 <= len(made.layers) <= MOST_LAYERS or len(set(made.operators)) != len(made.operators):
        raise ValueError("its layers or operators do not fit its features")
    pairs = [part for pair in (*made.machines.values(), *made.workspaces.values()) for part in pair]
    every = [
        *(getattr(made, name) for name in ARRAYS),
        *(part for layer in made.layers for part in layer),
        np.array(pairs),
    ]
    if not all((abs(part) < MOST).all() for part in every) or not (made.spread > 1e-9).all():
        raise ValueError("it has numbers that are too large or none")
    if (
        (made.low > made.high).any()
        or (abs(made.host) > HOST_LIMIT).any()
        or any(share < 0 for share in pairs[2 * len(made.machines) :])
    ):
        raise ValueError("its numbers are out of range")
    if not 0 < made.band[0] <= 1 <= made.band[1] < MOST or not 0 <= made.error < MOST:
        raise ValueError("its band or its error is out of range")


def read_correction(path: str | Path) -> Correction:
    """The correction in a file.

    Raises:
        InputFileError: the file is missing, unreadable or no correction.
    """
    try:
        data = json.loads(read_bytes(path, MAX_BYTES, "a learned correction"))
    except (ValueError, RecursionError):
        data = None
    return correction_from(data, str(path))


def correction_named(name: str, device: Device) -> Correction:
    """The correction in a file, or for the name ``learned`` the one that comes with steptime for the kind of device.

    Raises:
        UserError: the file does not exist, or steptime has none for that kind of device.
    """
    if name != LEARNED:
        if not is_file(name):
            raise UserError(
                f"--predictor {shorten(name)!r} is neither {LEARNED!r} nor a file",
                hint="steptime predict train writes one",
            )
        found = read_correction(name)
        if found.of_processor != device.is_host:
            kinds = ("processors", "GPUs") if found.of_processor else ("GPUs", "processors")
            raise UserError(
                f"--predictor {shorten(name)!r} was fitted on {kinds[0]}, and {device.name} is none of them",
                hint=f"--predictor {LEARNED} takes the one for {kinds[1]}",
            )
        return found
    return read_correction(FOLDER / ("processor.json" if device.is_host else "gpu.json"))
