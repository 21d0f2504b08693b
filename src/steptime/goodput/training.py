"""Length of the whole training run, in tokens, samples or epochs, and its time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steptime.cost.training import DAY_S, HOUR_S, device_s, training_s
from steptime.errors import FieldError, UnknownNameError, shorten, shown
from steptime.estimate.result import Estimate
from steptime.num import Num
from steptime.options import number
from steptime.plan.job import Job

if TYPE_CHECKING:
    from steptime.search.planner import PlanResult

LENGTHS: Final = ("tokens", "samples", "epochs")
"""Units of the length of a run; a run has one of them."""
DATASETS: Final = ("dataset_tokens", "dataset_samples")
"""Sizes of a data set; ``epochs`` needs one of them."""
KEYS: Final = (*LENGTHS, *DATASETS)
MOST: Final = 1e24
_SCALE: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
_AMOUNT: Final = re.compile(r"\s*(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d{1,3})?\s*([kmbgtp]?)\s*", re.IGNORECASE)


def amount(field: str, value: Any) -> float:
    """An amount above zero, as a number or as a text such as ``1T`` (10^12), ``300B`` (10^9) or ``350k``.

    Raises:
        FieldError: it is no amount.

    >>> amount("tokens", "1T"), amount("tokens", "1.5e9"), amount("samples", 350_000)
    (1000000000000.0, 1500000000.0, 350000.0)
    """
    given = value
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value) if len(value) < 60 else None
        if match is None:
            problem = f"{shorten(value)!r} is not an amount"
            raise FieldError("", field, problem, hint="for example 300B, 1T, 350k, 1.5e9")
        given = float(match[1].replace("_", "") + (match[2] or "")) * _SCALE[match[3].lower()]
    return number(field, given, 1e-6, MOST, "an amount above zero")


def check_training(given: Any) -> dict[str, float]:
    """The length of a run, each value as a number; empty if not given.

    Args:
        given: one of :data:`LENGTHS`, with ``epochs`` one of :data:`DATASETS`; or None.

    Raises:
        FieldError: it is no table, or a value is no amount, is missing, or contradicts another.
        UnknownNameError: a key is unknown.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise FieldError("", "training", f"{shown(given)} is not a table such as {{'tokens': '1T'}}")
    for key in given:
        if key not in KEYS:
            raise UnknownNameError("key of training", str(key), KEYS)
    out = {key: amount(key, value) for key, value in given.items() if value is not None}
    lengths, sizes = ([key for key in keys if key in out] for keys in (LENGTHS, DATASETS))
    if len(lengths) > 1:
        raise FieldError("", lengths[1], f"{lengths[0]} says already how long the run is", hint="give one of them")
    if sizes and lengths != ["epochs"]:
        raise FieldError("", sizes[0], "means nothing without epochs", hint="give --epochs, or drop it")
    if "epochs" in out and len(sizes) != 1:
        hint = "give --dataset-tokens or --dataset-samples"
        raise FieldError(
            "", "epochs", f"the size of the data set is {'given twice' if sizes else 'missing'}", hint=hint
        )
    return out


def samples_of(length: Mapping[str, float], job: Job) -> float:
    """Samples of a run, repeated ones included.

    Args:
        length: result of :func:`check_training`, not empty.
        job: the job, which has the tokens of a sample.

    Raises:
        FieldError: the run is given in tokens, and samples of the job have none.
    """
    key = next(key for key in length if key != "epochs")
    if "tokens" in key and job.sample == "sample":
        raise FieldError("", key, f"{job.model.name} has no tokens", hint=f"give {key.replace('tokens', 'samples')}")
    return samples_in(length, job.seq_len)


def check_length(length: Mapping[str, float], job: Job) -> None:
    """Refuse a length of a run that the job cannot have, before the estimate.

    Raises:
        FieldError: the run is given in tokens, and samples of the job have none.
    """
    if length:
        samples_of(length, job)


def samples_in(length: Mapping[str, float], seq_len: int) -> float:
    """Samples of a run, repeated ones included; ``seq_len``: tokens of a sample.

    >>> samples_in({"epochs": 2.0, "dataset_tokens": 1000.0}, 10), samples_in({"samples": 7.0}, 10)
    (200.0, 7.0)
    """
    key = next(key for key in length if key != "epochs")
    return length[key] / (seq_len if "tokens" in key else 1) * length.get("epochs", 1.0)


def training_record(length: Mapping[str, float], job: Job, step_s: float, band_s: Any) -> dict[str, Any]:
    """Time of a whole run; its band is the band of the step, as all steps are alike.

    Args:
        length: result of :func:`check_training`, not empty.
        job: the job.
        step_s: time of a step (s).
        band_s: its 5th and 95th percentile (s), or None.
    """
    samples = samples_of(length, job)
    times = [training_s(t, samples, job.global_batch) for t in (step_s, *(band_s or ()))]
    out: dict[str, Any] = {**length, "samples": samples, "steps": samples / job.global_batch}
    if job.sample != "sample":
        out["tokens"] = samples * job.seq_len
    for name, unit, values in amounts(times, job.gpus):
        out[f"{name}_{unit}"] = values[0]
        out[f"{name}_band_{unit}"] = [*values[1:]] if band_s else None
    return out


def amounts(times_s: list[Num], gpus: Num) -> list[tuple[str, str, list[Num]]]:
    """Name, unit and values of each amount in the report of a run.

    >>> [(name, unit, values[0]) for name, unit, values in amounts([172800.0], 2)]
    [('training', 's', 172800.0), ('training', 'days', 2.0), ('gpu', 'hours', 96.0), ('gpu', 'days', 4.0)]
    """
    device = [device_s(t, gpus) for t in times_s]
    return [
        ("training", "s", times_s),
        ("training", "days", [t / DAY_S for t in times_s]),
        ("gpu", "hours", [t / HOUR_S for t in device]),
        ("gpu", "days", [t / DAY_S for t in device]),
    ]


def trained(e: Estimate, length: Mapping[str, float], job: Job) -> Estimate:
    """The estimate with the time of the whole run; unchanged without a length."""
    return replace(e, training=training_record(length, job, e.step_time_s, e.step_time_band_s)) if length else e


def all_trained(found: PlanResult, length: Mapping[str, float], job: Job) -> PlanResult:
    """The result of a search with the time of the whole run under each plan that fits; unchanged without a length."""
    if not length:
        return found
    likely = None if found.likely_to_fit is None else trained(found.likely_to_fit, length, job)
    plans = tuple(trained(e, length, job) for e in found.plans)
    risky = tuple(replace(each, estimate=trained(each.estimate, length, job)) for each in found.risky)
    return replace(found, plans=plans, likely_to_fit=likely, risky=risky)
