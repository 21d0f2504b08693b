"""Cost of every combination for a model given by its dimensions: the estimate of a job on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from steptime.captured.fit.choice import PRECISION_TECHNIQUES, Batched, Checkpoints, Choice, Point
from steptime.captured.fit.techniques import TECHNIQUES, Change
from steptime.estimate.evaluate import evaluate
from steptime.estimate.memory_definitions import communicators, exceeding, memory_by_definition, memory_constants
from steptime.estimate.single import Setting, estimate_plan
from steptime.num import Array
from steptime.plan.framework_file import habits_of
from steptime.plan.plans import Plans
from steptime.plan.recompute import recompute_code
from steptime.plan.strategies import Strategy

#: Checkpoints -> parts that are recomputed, and n of "in every n-th layer".
RECOMPUTE: Final = {
    Checkpoints(): ("none", 1),
    Checkpoints(key="selective", name="selective: norms and activation functions"): ("norm+activation", 1),
    Checkpoints(key="selective", name="selective: the MLP's first half too"): ("norm+activation+mlp", 1),
    Checkpoints(key="every", name="every 2nd block", values=(("k", "2"),)): ("full", 2),
    Checkpoints(key="every", name="every 4th block", values=(("k", "4"),)): ("full", 4),
    Checkpoints(key="all", name="all blocks"): ("full", 1),
}
OFFLOADS: Final = {"offload": "optimizer"}
ADAPTED: Final = ("bf16", "fp16")
"""Narrow precisions for products with 4-bit weights: the weights are widened to 16 bits before each product
(bitsandbytes, `Linear4bit` with `bnb_4bit_compute_dtype`), so that neither fp8 nor TF32 products are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Key of a job: everything but the micro-batch and the recomputation."""

    precision: str
    optimizer: str
    swapped: bool
    weights: str
    framework: str | None = None
    """Framework; None: the requested one, else one that supports the format of the weights."""


@dataclass(kw_only=True)
class Estimated(Batched):
    """Engine that evaluates combinations with estimates."""

    make: Callable[[Kind], Setting]
    """Function that returns the job of a kind on one device."""
    strategy: Strategy
    matrix_dtypes: frozenset[str]
    """Element types that the device's matrix units have."""
    of_matrices: bool = False
    """True if the optimiser updates whole matrices, which no software does in 8 bits or on the host."""
    _settings: dict[Kind, Setting] = field(default_factory=dict)
    _points_by_kind: dict[Kind, dict[Choice, Point]] = field(default_factory=dict)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that the device has rates for and that are allowed."""
        found = self.plain_precisions(self.matrix_dtypes)
        if self.weights == "qlora":
            return tuple(one for one in found if one in ("fp32", *ADAPTED))
        return (*found, "fp8-te") if self.allow is Change.TRAINING and "fp8" in self.matrix_dtypes else found

    @property
    def left_out(self) -> tuple[str, ...]:
        """Notes on allowed techniques that cannot be combined, with the reason."""
        apart = [TECHNIQUES[PRECISION_TECHNIQUES[one]].title for one in self.precisions[1:] if one not in ADAPTED]
        if self.allow is not Change.TRAINING or not apart:
            return ()
        return (
            f"{TECHNIQUES['qlora'].title} are not combined with {' or '.join(apart)}: such weights are widened to 16 "
            "bits, in which their products run",
        )

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Allowed values of ``optimizer``; the default is fused already."""
        if self.of_matrices:
            return ("default",)
        narrow = ("8bit",) if self.allow.rank >= Change.ROUNDING.rank else ()
        return ("default", *narrow, *(() if self.is_host or self.weights != "trained" else OFFLOADS))

    def kinds(self) -> Iterator[Kind]:
        """Jobs that are weighed."""
        for precision in self.precisions:
            for optimizer in self.optimizers:
                for swapped in (False,) if self.is_host else (False, True):
                    yield Kind(precision=precision, optimizer=optimizer, swapped=swapped, weights=self.weights)
        if self.allow is Change.TRAINING and self.weights != "qlora":
            states = [one for one in self.optimizers if one not in OFFLOADS]
            for precision in (one for one in self.precisions if one in ADAPTED):
                for optimizer in states:
                    for swapped in (False,) if self.is_host else (False, True):
                        yield Kind(precision=precision, optimizer=optimizer, swapped=swapped, weights="qlora")

    def choices(self) -> Iterator[Choice]:
        """Every combination that is weighed."""
        for kind in dict.fromkeys(self.kinds()):
            yield from self._points_of(kind)

    def proposed(self, choice: Choice) -> Point:
        """Cost of one combination; all combinations of its kind are evaluated at once."""
        return self._points_of(_kind(choice))[choice]

    def verified(self, choice: Choice, proposed: Point | None = None) -> Point:
        """Cost of one combination with band and bracket."""
        return self.under(choice)

    def under(self, choice: Choice, framework: str | None = None) -> Point:
        """Estimate of a combination under a framework; None: the framework of the search."""
        kind = replace(_kind(choice), framework=framework)
        part, every = RECOMPUTE[choice.checkpoints]
        setting = self._setting(kind)
        plans = Plans(
            micro_batch=choice.micro_batch,
            recompute=recompute_code(part),
            recompute_every=every,
            zero=habits_of(setting.job.framework.name).zero_with(1),
        )
        estimate = estimate_plan(setting, self.strategy, plans, what_ifs=False)
        by = estimate.memory_by_definition
        return Point(
            choice=choice,
            step_s=estimate.step_time_s,
            bracket_s=estimate.step_time_bracket_s,
            band_s=estimate.step_time_band_s,
            memory_bytes=estimate.peak_memory_bytes,
            reserved_bytes=by["reserved"],
            device_bytes=by["device"],
            fits=by["device"] <= estimate.memory_capacity_bytes,
            oom_probability=estimate.oom_probability,
            basis="estimate",
            phases_bytes={str(estimate.plan["fullest_phase"]): estimate.peak_memory_bytes},
            framework=setting.job.framework.name,
        )

    def _setting(self, kind: Kind) -> Setting:
        if kind not in self._settings:
            self._settings[kind] = self.make(kind)
        return self._settings[kind]

    def _points_of(self, kind: Kind) -> dict[Choice, Point]:
        if kind not in self._points_by_kind:
            self._points_by_kind[kind] = self._evaluated(kind)
        return self._points_by_kind[kind]

    def _evaluated(self, kind: Kind) -> dict[Choice, Point]:
        """Points of all micro-batches and recomputations of a kind."""
        setting = self._setting(kind)
        rows = [(micro, one) for micro in self.micro_batches for one in RECOMPUTE]
        columns = {
            "micro_batch": [float(micro) for micro, _ in rows],
            "recompute": [float(recompute_code(RECOMPUTE[one][0])) for _, one in rows],
            "recompute_every": [float(RECOMPUTE[one][1]) for _, one in rows],
        }
        zero = habits_of(setting.job.framework.name).zero_with(1)
        plans = Plans(**{name: np.array(values) for name, values in columns.items()}, zero=zero)
        e = evaluate(setting.method, self.strategy, setting.job, setting.machine, plans)
        times = _column(e.step_time_s, len(rows))
        memory = {name: _column(value, len(rows)) for name, value in memory_by_definition(e).items()}
        capacity, name = e.machine.memory_bytes, setting.job.memory.name
        constants = memory_constants(is_host=e.machine.is_host)
        deviation = constants.spread("device", name)
        needed = _column(constants.needed(e.peak_bytes, communicators(e.plans), name), len(rows))
        out = {}
        for i, (micro, one) in enumerate(rows):
            choice = Choice(
                precision=kind.precision, optimizer=kind.optimizer, batch=self.batch, micro_batch=micro,
                checkpoints=one, swapped=float(kind.swapped), weights=kind.weights, adapters=self.adapters,
            )  # fmt: skip
            time_s, device = float(times[i]), float(memory["device"][i])
            out[choice] = Point(
                choice=choice, step_s=time_s, bracket_s=(time_s, time_s), band_s=None,
                memory_bytes=float(memory["allocated"][i]), reserved_bytes=float(memory["reserved"][i]),
                device_bytes=device, fits=device <= capacity, basis="estimate",
                oom_probability=exceeding(float(needed[i]), capacity, deviation), framework=setting.job.framework.name,
            )  # fmt: skip
        return out


def _kind(choice: Choice) -> Kind:
    return Kind(
        precision=choice.precision, optimizer=choice.optimizer, swapped=bool(choice.swapped), weights=choice.weights
    )


def _column(value: object, rows: int) -> Array:
    return np.broadcast_to(np.asarray(value, np.float64), (rows,))
