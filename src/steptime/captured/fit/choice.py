"""Combinations of techniques, and their evaluated points."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from steptime.captured.fit.techniques import STACKS, TECHNIQUES, Change, Technique

#: Precision -> technique; fp32 needs none.
PRECISION_TECHNIQUES: Final[Mapping[str, str]] = {
    "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8-te": "fp8", "pure-bf16": "pure-bf16",
}  # fmt: skip
OPTIMIZER_TECHNIQUES: Final[Mapping[str, str]] = {
    "fused": "fused-optimizer", "8bit": "8bit-optimizer", "paged": "paged-optimizer", "offload": "offload-optimizer",
}  # fmt: skip
NOTHING: Final = "none"
ADAPTERS: Final = (16, "linear")
"""Default rank and targets of adapters."""
PEFT_TARGETS: Final[Mapping[str, str]] = {
    "linear": '"all-linear"', "attention": '["q_proj", "k_proj", "v_proj", "o_proj"]',
}  # fmt: skip
"""Targets -> setting of PEFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Choice of activations that are recomputed or kept in fewer bits."""

    key: str = NOTHING
    """Technique; ``none``: all activations are kept."""
    name: str = NOTHING
    values: tuple[tuple[str, str], ...] = ()
    """Values for the placeholders in the settings of the technique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of techniques."""

    precision: str = "fp32"
    optimizer: str = "default"
    """``default``, ``fused``, ``8bit``, ``paged`` or ``offload``."""
    batch: int
    micro_batch: int
    checkpoints: Checkpoints = Checkpoints()
    swapped: float = 0.0
    """Fraction of the activations above the least possible that is swapped to the host."""
    weights: str = "trained"
    """``trained``, ``lora`` (adapters on frozen weights), or ``qlora`` (on weights in 4 bits)."""
    adapters: tuple[int, str] = ADAPTERS
    """Rank and targets of adapters, if there are any."""

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimiser step."""
        return self.batch // self.micro_batch

    @property
    def keys(self) -> tuple[str, ...]:
        """Techniques of the combination, in the order of the guide."""
        found = {PRECISION_TECHNIQUES.get(self.precision), OPTIMIZER_TECHNIQUES.get(self.optimizer)}
        found |= {self.checkpoints.key, "accumulation" if self.accumulation > 1 else None}
        found |= {"swap" if self.swapped else None, "qlora" if self.weights == "qlora" else None}
        return tuple(key for key in TECHNIQUES if key in found)

    @property
    def changes(self) -> Change:
        """The strongest change of its techniques."""
        return strongest(TECHNIQUES[key] for key in self.keys)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Frameworks that have a setting for every technique of the combination."""
        named = [TECHNIQUES[key].settings for key in self.keys]
        return tuple(name for words, name in STACKS.items() if named and all(words in each for each in named))

    def settings(self, device_type: str) -> dict[str, dict[str, str]]:
        """Technique -> framework -> setting, for a device type of PyTorch (``cuda`` or ``cpu``)."""
        values: dict[str, int | str] = {"micro": self.micro_batch, "count": self.accumulation, "batch": self.batch}
        rank, targets = self.adapters
        values |= {"rank": rank, "targets": PEFT_TARGETS.get(targets, f'"{targets}"')}
        words = {**values, **dict(self.checkpoints.values), "device_type": device_type}
        out = {}
        for key in self.keys:
            out[key] = {name: setting.format(**words) for name, setting in TECHNIQUES[key].settings.items()}
        return out

    def as_record(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "precision": self.precision, "optimizer": self.optimizer, "micro_batch": self.micro_batch,
            "accumulation": self.accumulation, "checkpointing": self.checkpoints.name, "swapped": self.swapped,
            "weights": self.weights,
        }  # fmt: skip


@dataclass(kw_only=True)
class Batched:
    """Base of the engines: a batch that can be divided into micro-batches, and the allowed changes."""

    batch: int
    allow: Change = Change.ROUNDING
    """Strongest allowed change of the numerics."""
    is_host: bool = False
    """True if the device is the host itself, which has no other memory to offload to."""
    weights: str = "trained"
    """Weights of the job, as in :attr:`Choice.weights`."""
    adapters: tuple[int, str] = ADAPTERS
    """Rank and targets of adapters, as in :attr:`Choice.adapters`."""

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The batch, its successive halves as long as they are whole, and one sample."""
        out = [self.batch]
        while out[-1] % 2 == 0:
            out.append(out[-1] // 2)
        return tuple(out if out[-1] == 1 else [*out, 1])

    def plain_precisions(self, rates: Container[str]) -> tuple[str, ...]:
        """fp32, and the allowed narrower precisions of products for which there are ``rates``."""
        found = ["fp32"]
        if self.allow.rank >= Change.ROUNDING.rank:
            found += ["tf32"] if "tf32" in rates else []
            found += ["bf16"] if "bf16" in rates else ["fp16"] if "fp16" in rates else []
        return tuple(found)

    def plain(self, precision: str = "fp32", optimizer: str = "default") -> Choice:
        """The whole batch with a precision and an optimiser, without other techniques."""
        return Choice(
            precision=precision,
            optimizer=optimizer,
            batch=self.batch,
            micro_batch=self.batch,
            weights=self.weights,
            adapters=self.adapters,
        )


def strongest(techniques: Iterable[Technique]) -> Change:
    """The strongest change of some techniques."""
    return max((one.changes for one in techniques), key=lambda change: change.rank, default=Change.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination with its cost on the device."""

    choice: Choice
    step_s: float
    """Time of one optimiser step."""
    bracket_s: tuple[float, float]
    band_s: tuple[float, float] | None
    memory_bytes: float
    """Peak of live tensors."""
    reserved_bytes: float
    """Bytes that the caching allocator reserves for the live tensors."""
    device_bytes: float
    """Reserved bytes with the context of the driver, which have to fit."""
    fits: bool
    oom_probability: float
    basis: str
    """Source of the memory: ``capture``, ``simulation`` of the recorded chain, or ``estimate``."""
    proposed_bytes: float | None = None
    """Memory by the simulation before the capture."""
    phases_bytes: Mapping[str, float] = field(default_factory=dict)
    """Peaks of the passes and of the optimiser step."""
    framework: str | None = None
    """Framework whose habits were evaluated; None: the code of a captured module."""

    @property
    def sample_s(self) -> float:
        """Time per sample."""
        return self.step_s / self.choice.batch

    def as_record(self, device_type: str) -> dict[str, Any]:
        """Plain data, with the settings for that type of device."""
        low, high = self.bracket_s
        return {
            **self.choice.as_record(), "techniques": list(self.choice.keys), "changes": str(self.choice.changes),
            "step_time_s": self.step_s, "step_time_bracket_s": [low, high],
            "step_time_band_s": None if self.band_s is None else list(self.band_s), "time_per_sample_s": self.sample_s,
            "peak_memory_bytes": self.memory_bytes, "reserved_memory_bytes": self.reserved_bytes,
            "device_memory_bytes": self.device_bytes, "phase_memory_bytes": dict(self.phases_bytes),
            "fits": self.fits, "oom_probability": self.oom_probability, "basis": self.basis,
            "proposed_memory_bytes": self.proposed_bytes, "settings": self.choice.settings(device_type),
            "framework": self.framework,
        }  # fmt: skip


def front_of(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points that no other beats in both memory and time, fastest first; among equals that with fewest techniques."""
    out: list[Point] = []
    for one in sorted(points, key=lambda p: (p.step_s, p.memory_bytes, len(p.choice.keys), p.choice.changes.rank)):
        if not out or one.memory_bytes < out[-1].memory_bytes:
            out.append(one)
    return tuple(out)


def thinned(front: Iterable[Point], apart: float = 0.02) -> tuple[Point, ...]:
    """A front without points that save less than a fraction `apart` of the previous memory; the last point stays."""
    points = list(front)
    out: list[Point] = []
    for number, one in enumerate(points):
        last = number == len(points) - 1
        if not out or last or one.memory_bytes <= out[-1].memory_bytes * (1 - apart):
            if last and len(out) > 1 and one.memory_bytes > out[-1].memory_bytes * (1 - apart):
                out.pop()
            out.append(one)
    return tuple(out)
