"""Fits the parameters of frameworks to measured runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from steptime.estimate.evaluate import Evaluation, Works, passes_of
from steptime.estimate.kernels import profile_of
from steptime.estimate.step import compose
from steptime.estimate.step_inputs import StepInputs
from steptime.estimate.work import PHASES, PhaseWork, phase_work, stacked
from steptime.hardware.library import architecture_of, device_names
from steptime.num import Array
from steptime.plan.framework import BUSY, Framework, Habits, from_fitted_scale, to_fitted_scale, widening
from steptime.plan.framework_file import GENERIC, SLOWED, habits_of, is_slowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One field of :class:`~steptime.plan.framework.Framework`, fitted on a scale without limits."""

    name: str
    prior: float
    """Value that is believed before any run is seen."""
    doubt: float
    """Standard deviation of the prior on the fitted scale."""
    spread: float
    """Standard deviation of frameworks around their common value on the fitted scale."""

    def inward(self, value: float) -> float:
        """From the field to the fitted scale."""
        return to_fitted_scale(self.name, value)

    def outward(self, fitted: Array) -> Array:
        """From the fitted scale to the field."""
        out: Any = from_fitted_scale(self.name, fitted)
        return np.asarray(out)


PARAMETERS: Sequence[Parameter] = (
    Parameter(name="matrix", prior=1.1, doubt=0.3, spread=0.2),
    Parameter(name="narrow", prior=1.0, doubt=0.2, spread=0.15),
    Parameter(name="attention", prior=1.1, doubt=0.4, spread=0.3),
    Parameter(name="vector", prior=1.3, doubt=0.5, spread=0.25),
    Parameter(name="host_s", prior=4e-5, doubt=0.7, spread=0.60),
    Parameter(name="router_s", prior=5e-4, doubt=1.0, spread=0.60),
    Parameter(name="captured_wait", prior=0.4, doubt=0.5, spread=0.25),
    Parameter(name="tensor_links", prior=1.1, doubt=0.5, spread=0.6),
    Parameter(name="context_links", prior=1.0, doubt=0.5, spread=0.7),
    Parameter(name="expert_links", prior=1.0, doubt=0.5, spread=0.7),
    Parameter(name="data_links", prior=1.15, doubt=1.0, spread=0.6),
    Parameter(name="data_exposed", prior=0.3, doubt=1.0, spread=1.6),
    Parameter(name="stage_links", prior=1.05, doubt=1.0, spread=0.6),
    Parameter(name="stage_s", prior=2e-4, doubt=1.0, spread=0.60),
    Parameter(name="optimizer", prior=1.3, doubt=0.5, spread=0.30),
    Parameter(name="step_s", prior=0.01, doubt=1.0, spread=0.60),
    Parameter(name="growth", prior=0.01, doubt=0.7, spread=0.40),
)
"""The order of the columns of a fit."""
DEVICE_SPREAD = 0.12
"""Standard deviation of the logarithm of a device's own factor."""
UNMEASURED_SPREAD = 0.25
"""Standard deviation of this logarithm for a device whose matrix products have no curve, only a share of the peak."""


OWN_SPREAD = 0.05
"""Standard deviation between the factors of devices of one design, beyond their datasheets; assumed."""


def device_spread(device: str) -> float:
    """Prior standard deviation of the logarithm of a device's own factors.

    >>> device_spread("h100-sxm"), device_spread("gaudi2")
    (0.12, 0.25)
    """
    profile = profile_of(device)
    known = profile is not None and any(curve.family == "gemm" for curve in profile.curves)
    return DEVICE_SPREAD if known else UNMEASURED_SPREAD


def line_of(device: str) -> str | None:
    """Design that a device shares with others; generations of one line (``cdna3``, ``cdna4``) count as one.

    >>> line_of("h200-sxm") == line_of("h100-sxm"), line_of("mi355x"), line_of("tpu-v6e")
    (True, 'cdna', None)
    """
    architecture = architecture_of(device)
    return None if architecture is None else architecture.rstrip("0123456789")


def with_relatives(devices: Iterable[str]) -> list[str]:
    """Devices, and those of the catalogue that share a design with one of them, which a fit then informs too."""
    lines = {line_of(device) for device in devices} - {None}
    return sorted({*map(str, devices), *(name for name in device_names() if line_of(name) in lines)})


def device_covariance(devices: Sequence[str]) -> Array:
    r"""Prior covariance of the logarithms of the factors of devices.

    $$\Sigma_{ij} = \begin{cases} s_i^2 & i = j \\ \min(s_i, s_j)^2 - u^2 & \text{same design} \\ 0 &
      \text{else} \end{cases}$$

    where $s_i$ is :func:`device_spread` and $u$ = :data:`OWN_SPREAD` the spread within a design.

    Source: definition of a two-level normal prior.

    >>> device_covariance(["a100-sxm-80gb", "h100-sxm", "h200-sxm"]).round(4).tolist()
    [[0.0144, 0.0, 0.0], [0.0, 0.0144, 0.0119], [0.0, 0.0119, 0.0144]]
    """
    spread, lines = np.array([device_spread(d) for d in devices]), [line_of(d) for d in devices]
    same = np.array([[a is not None and a == b for b in lines] for a in lines])
    shared = np.minimum(spread[:, None], spread[None]) ** 2 - OWN_SPREAD**2
    return np.where(np.eye(len(devices), dtype=bool), spread**2, np.where(same, shared, 0.0))


def framework_of(fitted: Array, name: str) -> Framework:
    """Framework of one row, or of many rows at once, of fitted values.

    Args:
        fitted: (..., number of parameters) on the fitted scale.
        name: name of the framework.
    """
    values: Mapping[str, Any] = {p.name: p.outward(fitted[..., i]) for i, p in enumerate(PARAMETERS)}
    if fitted.ndim == 1:
        values = {n: float(v) for n, v in values.items()}
    return Framework(name=name, **values)


NOISE = 0.15
"""Spread of runs around a good model (logarithm of time)."""
SOURCE = 0.12
"""Spread of whole sources around a good model of their framework: builds, containers, data, clocks."""
EXPERTS = 0.15
"""Spread of runs around models with experts, whose balance and kernels no source states: assumed."""
OUTLIER = 0.15
"""Residual from which a run counts less (pseudo-Huber)."""
APART = 1.5
"""Distance of a framework's value from the common one, in spreads, from which its pull weakens (pseudo-Huber)."""
FULL_COUNT = 20
"""Weight of a source in runs, at most: one with a thousand rows does not stand for all others."""
SMALL_STEP = 1e-4
"""Step of the numerical slopes, on the fitted scale."""
LARGEST_MOVE = 0.5
"""Largest move of a value in one round, on the fitted scale."""
FEW = 2000
"""Largest number of samples whose slopes by all parameters are computed at once: their columns fit the cache."""
DONE = 1e-3
"""Largest move of a round after which the fit ends."""
ROUNDS = 30
"""Largest number of rounds of a fit."""
FULL_STEPS = 8
"""Rounds with whole steps; later ones take half of them, so that a pair of points cannot alternate."""
SLOWED_COLUMNS = [i for i, parameter in enumerate(PARAMETERS) if parameter.name in SLOWED]
BUSY_COLUMNS = [i for i, parameter in enumerate(PARAMETERS) if parameter.name in BUSY]


def noise() -> float:
    """Standard deviation of the logarithm of the time of a run of a new source, when all parameters are known."""
    return float(np.hypot(NOISE, SOURCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One plausible setting of one run, evaluated under the ideal framework."""

    run: int
    weight: float
    works: Works
    inputs: StepInputs
    of_device: Collection[str] = BUSY
    """Parameters that the factors of its device multiply (:func:`steptime.estimate.kernels.of_device`)."""

    @staticmethod
    def of(
        run: int,
        weight: float,
        evaluation: Evaluation,
        *,
        attention: float = 1.0,
        vector: float = 1.0,
        of_device: Collection[str] = BUSY,
    ) -> Sample:
        """The sample of an evaluation.

        Args:
            run: position of the run.
            weight: share of belief in this setting of it.
            evaluation: the setting, evaluated.
            attention: time of its fused attention kernel over that of the newest.
            vector: time of its operators bound by memory over the usual one of its framework.
            of_device: parameters that the factors of its device multiply.
        """

        def own(work: PhaseWork) -> PhaseWork:
            return replace(work, attention_s=work.attention_s * attention, vector_s=work.vector_s * vector)

        # all samples have the same phases, so that their records stack
        works = {
            part: {phase: own(phase_work(each, phase)) for phase in PHASES} for part, each in evaluation.works.items()
        }
        return Sample(run=run, weight=weight, works=works, inputs=evaluation.inputs, of_device=of_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measured runs, column by column."""

    measured_s: Array
    source: Array
    framework: Array
    device: Array
    experts: Array
    """True if the model has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Values on the fitted scale, each with its standard deviation."""

    common: Array
    """(parameters)"""
    frameworks: dict[str, Array]
    """Framework -> its values less the common ones."""
    devices: dict[str, Array]
    """Logarithm of the factor of each device on each of :data:`BUSY`."""
    common_doubt: Array
    """Standard deviations for an unknown framework: of the common values and of frameworks around them together."""
    framework_doubts: dict[str, Array]
    """Framework -> standard deviations of its values."""
    device_doubts: dict[str, float]
    rounds: int
    device_sources: Mapping[str, float] = field(default_factory=dict)
    """Sources that have measured each device."""
    slower: float = 0.0
    """Logarithm of the factor by which an unknown framework is slower than the common values."""

    def known(self, framework: str | None) -> bool:
        """True if runs of a framework were fitted; runs of software without a name do not count."""
        return framework in self.frameworks and framework != GENERIC

    def columns(self, framework: str | None, device: str) -> Array:
        """Values for a run; an unknown device adds nothing, and so does a framework without runs.

        Software that no fit has seen is :attr:`slower`, as in an estimate of it.
        """
        row: Array = self.common + (self.frameworks[framework or ""] if self.known(framework) else 0.0)
        unseen = framework is None or habits_of(framework) == Habits() or is_slowed(framework, self.frameworks)
        if unseen and not self.known(framework):
            row[SLOWED_COLUMNS] += self.slower
        row[BUSY_COLUMNS] += self.devices.get(device, np.zeros(len(BUSY)))
        return row

    def doubts(self, framework: str | None, device: str) -> tuple[Array, float]:
        """Standard deviations of a run's parameters, and of its device's factor."""
        return (
            self.framework_doubts[framework or ""] if self.known(framework) else self.common_doubt,
            self.device_doubts.get(device, DEVICE_SPREAD),
        )


@dataclass
class FrameworkFit:
    """All samples as one stacked evaluation."""

    samples: Sequence[Sample]
    runs: Runs
    works: Works = field(init=False)
    inputs: StepInputs = field(init=False)

    def __post_init__(self) -> None:
        """Stacks the samples."""
        self.works = stacked([s.works for s in self.samples])
        self.inputs = stacked([s.inputs for s in self.samples])
        self.run = np.array([s.run for s in self.samples])
        self.weight = np.array([s.weight for s in self.samples])
        self.log_measured = np.log(self.runs.measured_s)
        self.count = len(self.runs.measured_s)
        self.names = sorted(set(self.runs.framework))
        self.device_names = with_relatives(set(self.runs.device))
        self.of_framework = np.searchsorted(self.names, self.runs.framework)[self.run]
        self.of_device = np.searchsorted(self.device_names, self.runs.device)[self.run]
        self.factored = np.array([[float(name in s.of_device) for name in BUSY] for s in self.samples])

    def _samples_log_s(self, columns: Array) -> Array:
        framework = framework_of(columns, "many")
        step = compose(self.inputs, passes_of(self.works, framework), framework)
        logs: Array = np.log(step.total_s)
        return logs

    def _by_run(self, values: Array) -> Array:
        total: Array = np.bincount(self.run, weights=self.weight * values, minlength=self.count)
        return total

    def log_s(self, fitted: Fitted, *, named: bool = True) -> Array:
        """Logarithm of the predicted time of every run; ``named``: each with its framework's own parameters."""
        known = [self.runs.framework[r] if named else None for r in range(self.count)]
        return self._by_run(self._samples_log_s(self._sample_columns(fitted, known)))

    def _sample_columns(self, fitted: Fitted, frameworks: Sequence[str | None]) -> Array:
        """Values of each sample (samples, parameters) where ``frameworks`` names the framework of each run."""
        devices = self.runs.device
        rows = np.array([fitted.columns(frameworks[r], devices[r]) for r in range(self.count)])
        nothing = np.zeros(len(BUSY))
        factors = np.array([fitted.devices.get(devices[r], nothing) for r in range(self.count)])
        columns: Array = rows[self.run]
        columns[:, BUSY_COLUMNS] -= factors[self.run] * (1.0 - self.factored)
        return columns

    def _unpacked(self, theta: Array) -> tuple[Array, Array, Array]:
        n, f = len(PARAMETERS), len(self.names)
        devices = theta[n + n * f :].reshape(len(self.device_names), len(BUSY))
        return theta[:n], theta[n : n + n * f].reshape(f, n), devices

    def _columns(self, theta: Array) -> Array:
        common, frameworks, devices = self._unpacked(theta)
        columns: Array = common[None] + frameworks[self.of_framework]
        columns[:, BUSY_COLUMNS] += devices[self.of_device] * self.factored
        return columns

    def _slopes(self, columns: Array, base: Array) -> Array:
        """Derivative of every sample's ln(time) by each of its own parameters, all at once where samples are few."""
        steps = SMALL_STEP * np.eye(len(PARAMETERS))
        if len(columns) <= FEW:
            moved = self._samples_log_s(columns + steps[:, None])
        else:
            moved = np.stack([self._samples_log_s(columns + step) for step in steps])
        slopes: Array = ((moved - base) / SMALL_STEP).T
        return slopes

    def _jacobian(self, slopes: Array, size: int) -> Array:
        n, f = len(PARAMETERS), len(self.names)
        jacobian = np.zeros((self.count, size))
        for i, parameter in enumerate(PARAMETERS):
            each = self.weight * slopes[:, i]
            jacobian[:, i] = np.bincount(self.run, weights=each, minlength=self.count)
            np.add.at(jacobian, (self.run, n + self.of_framework * n + i), each)
            if parameter.name in BUSY:
                k = BUSY.index(parameter.name)
                place = n + n * f + self.of_device * len(BUSY) + k
                np.add.at(jacobian, (self.run, place), each * self.factored[:, k])
        return jacobian

    def _run_weights(self, used: Array) -> Array:
        _, of, counts = np.unique(self.runs.source[used], return_inverse=True, return_counts=True)
        weights = np.zeros(self.count)
        weights[used] = np.minimum(1.0, FULL_COUNT / counts[of]) / NOISE**2
        return weights

    @property
    def values(self) -> int:
        """Values that a fit finds: common ones, what each framework adds, factors of devices."""
        return len(PARAMETERS) * (1 + len(self.names)) + len(BUSY) * len(self.device_names)

    def _trust(self, theta: Array) -> Array:
        """Prior precision of all values; of frameworks the weight that the loss of :meth:`fit` has at ``theta``."""
        spread = np.tile([p.spread for p in PARAMETERS], len(self.names))
        _, added, _ = self._unpacked(theta)
        far = added.ravel() / (APART * spread)
        own = np.concatenate([[p.doubt**-2.0 for p in PARAMETERS], spread**-2.0 / np.sqrt(1 + far**2)])
        devices = np.kron(np.linalg.inv(device_covariance(self.device_names)), np.eye(len(BUSY)))
        out = np.zeros((len(own) + len(devices),) * 2)
        out[: len(own), : len(own)], out[len(own) :, len(own) :] = np.diag(own), devices
        return out

    def fit(self, used: Array) -> Fitted:
        r"""Most probable values for the runs that are ``used`` (boolean), by damped Gauss-Newton steps.

        $$\hat\theta = \arg\min_\theta \sum_r 2 w_r\, d^2 \Big(\sqrt{1 + (e_r / d)^2} - 1\Big)
            + (\theta - \theta_0)^\top \Lambda\, (\theta - \theta_0)
            + \sum_{f, p} 2 c^2 \Big(\sqrt{1 + (\delta_{fp} / (c\, s_p))^2} - 1\Big)$$

        where $e_r$ is the logarithm of predicted over measured time of run $r$, $w_r$ its weight ($1/\sigma^2$ with
        $\sigma$ = :data:`NOISE`, less where its source has more than :data:`FULL_COUNT` runs), $d$ = :data:`OUTLIER`,
        $\theta_0$ and $\Lambda$ are the prior mean and precision of the common values and of devices ($\Lambda$ is 0
        for frameworks), $\delta_{fp}$ is what framework $f$ adds to the common value of parameter $p$, $s_p$ the spread
        of that over frameworks, and $c$ = :data:`APART`: a framework that is far from all others is of another kind,
        and says less about one that nobody has measured.

        Source: Gauss-Newton with weights of the pseudo-Huber loss (Charbonnier et al., IEEE TIP 1997).
        """
        n = len(PARAMETERS)
        belief = np.array([p.inward(p.prior) for p in PARAMETERS])
        centre = np.concatenate([belief, np.zeros(self.values - n)])
        theta, weights, rounds = centre.copy(), self._run_weights(used), 0
        while rounds < ROUNDS:
            rounds += 1
            trust = self._trust(theta)
            columns = self._columns(theta)
            base = self._samples_log_s(columns)
            residual = self._by_run(base) - self.log_measured
            trusted = weights / np.sqrt(1 + (residual / OUTLIER) ** 2)
            jacobian = self._jacobian(self._slopes(columns, base), len(theta))
            curvature = (jacobian * trusted[:, None]).T @ jacobian + trust
            gradient = (jacobian * trusted[:, None]).T @ residual + trust @ (theta - centre)
            move = np.clip(np.linalg.solve(curvature, gradient), -LARGEST_MOVE, LARGEST_MOVE)
            theta = theta - (move if rounds <= FULL_STEPS else move / 2)
            if np.abs(move).max() < DONE:
                break
        fitted = self._fitted(theta, np.linalg.inv(curvature), rounds)
        seen = {str(name) for name in self.runs.framework[used]}
        return replace(
            fitted,
            device_sources=self._sources(used),
            frameworks={name: own for name, own in fitted.frameworks.items() if name in seen},
        )

    def _sources(self, used: Array) -> dict[str, float]:
        pairs = set(zip(self.runs.device[used], self.runs.source[used], strict=True))
        return {name: float(sum(device == name for device, _ in pairs)) for name in self.device_names}

    def _fitted(self, theta: Array, covariance: Array, rounds: int) -> Fitted:
        n, f = len(PARAMETERS), len(self.names)
        common, frameworks, devices = self._unpacked(theta)
        variance = np.diag(covariance)
        own = np.arange(n)
        doubts = {}
        for k, name in enumerate(self.names):
            at = n + n * k + own
            doubts[name] = np.sqrt(variance[:n] + variance[at] + 2 * covariance[own, at])
        of_devices = variance[n + n * f :].reshape(len(self.device_names), len(BUSY)).mean(axis=1)
        return Fitted(
            common=common,
            frameworks=dict(zip(self.names, frameworks, strict=True)),
            devices=dict(zip(self.device_names, devices, strict=True)),
            common_doubt=np.sqrt(variance[:n] + np.array([p.spread for p in PARAMETERS]) ** 2),
            framework_doubts=doubts,
            device_doubts=dict(zip(self.device_names, np.sqrt(of_devices).tolist(), strict=True)),
            rounds=rounds,
        )

    def deviations(self, fitted: Fitted, *, named: bool = True) -> Array:
        """Standard deviation of the logarithm of every run's predicted time, from all doubts together.

        The sum is that of :func:`steptime.estimate.band.band_of`, with slopes in place of differences. Settings that a
        run leaves open add the spread of the predictions over them. A device that few sources have measured has a
        larger deviation (:func:`steptime.plan.framework.widening`).
        """
        known = [self.runs.framework[r] if named else None for r in range(self.count)]
        devices = self.runs.device
        rows = self._sample_columns(fitted, known)
        pairs = [fitted.doubts(known[r], devices[r]) for r in range(self.count)]
        base = self._samples_log_s(rows)
        slopes = self._slopes(rows, base)
        by_run = np.stack([self._by_run(slopes[:, i]) for i in range(len(PARAMETERS))], axis=1)
        of_device = by_run[:, BUSY_COLUMNS].sum(axis=1) * np.array([device for _, device in pairs])
        mean = self._by_run(base)
        settings = self._by_run((base - mean[self.run]) ** 2)
        variance = ((by_run * np.array([own for own, _ in pairs])) ** 2).sum(axis=1) + of_device**2 + settings
        scarce = np.array([widening(fitted.device_sources.get(device, 0.0)) for device in devices])
        out: Array = scarce * np.sqrt(variance + noise() ** 2 + self.runs.experts * EXPERTS**2)
        return out
