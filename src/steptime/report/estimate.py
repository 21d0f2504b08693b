"""Reports of estimates: one estimate, the ledger of a model without a machine, and the difference of two estimates.

The report of one estimate has a headline, the terms of time and memory, changes of the step time, the sources, and,
if the plan may run out of memory on real devices, the probability and advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steptime.api.request import device_noun
from steptime.errors import counted
from steptime.estimate.memory_definitions import LIKELY_FITS
from steptime.estimate.result import Estimate
from steptime.plan.framework_file import habits_of
from steptime.plan.job import sample_noun
from steptime.plan.plans import MEANING, MEMORY
from steptime.report import text as t
from steptime.report.text import term_table
from steptime.units import format_si

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RECOMPUTED: Final = 0.75
"""Largest share of layer activations that full recomputation saves: inputs and one whole layer remain."""
GATHERED: Final = 0.97
"""Largest share of the other ranks' weights that ZeRO-3 saves: gathered layers remain for a while."""
EVEN: Final = 0.5
"""Probability of running out of memory above which a plan likely does."""
HELD: Final = ("weights", "gradients", "optimizer", "activations")
WORTH: Final = 0.05
"""Least share of the peak that one of several options has to save to be named, unless it completes the rest."""


def chance(e: Estimate) -> str | None:
    """Probability of running out of memory in percent; None: a reproduced paper's model has none."""
    return t.percent(e.oom_probability) if e.memory_by_definition else None


def chance_line(e: Estimate) -> str | None:
    """Probability of running out of memory and its basis, the memory in use on the device; None: there is none."""
    value = chance(e)
    if value is None:
        return None
    return f"{value} to run out ({t.memory(e.memory_by_definition['device'])} with {' and '.join(_holders(e))})"


def _holders(e: Estimate) -> list[str]:
    """Holders of memory beyond live tensors: the allocator and, if there is one, the driver."""
    by = e.memory_by_definition
    return ["allocator", "driver"] if by["device"] > by["reserved"] else ["allocator"]


def warning(e: Estimate, *, searched: bool = False) -> str | None:
    """One line on a feasible plan that may nevertheless run out of memory; None for other plans.

    Args:
        e: the plan.
        searched: name the options of a search.
    """
    risk = _risk(e)
    return None if risk is None else f"{risk}; try {' or '.join(_remedies(e, searched))}"


def _risk(e: Estimate) -> str | None:
    if not e.feasible or not e.memory_by_definition or e.oom_probability <= LIKELY_FITS:
        return None
    more = e.memory_by_definition["device"] - e.peak_memory_bytes
    holders = _holders(e)
    who = f"{' and '.join(f'the {one}' for one in holders)} {'need' if len(holders) > 1 else 'needs'}"
    how = "likely runs" if e.oom_probability > EVEN else "may run"
    return f"warning: {how} out of memory on real devices ({chance(e)}): {who} {t.memory(more)} more than live tensors"


def advice(plans: Sequence[Estimate], likely: Estimate | None) -> str | None:
    """Advice if the first of ranked plans may run out of memory: the fastest plan that likely does not.

    Args:
        plans: the shown plans.
        likely: the fastest plan of the whole space that likely does not run out; None: there is none.
    """
    first = plans[0]
    if likely is None:
        risk = warning(first, searched=True)
        return None if risk is None else f"{risk}; no plan of this space likely fits"
    risk = _risk(first)
    if risk is None:
        return None
    shown = [rank for rank, e in enumerate(plans, 1) if e.plan == likely.plan]
    which = f"plan {shown[0]}" if shown else t.plan_label(likely.plan)
    change = t.change((likely.step_time_s - first.step_time_s) / first.step_time_s)
    return (
        f"{risk}; the fastest that likely fits is {which}: {t.seconds(likely.step_time_s)} ({change}), "
        f"P(oom) {chance(likely)} (--limit 'oom_probability<={LIKELY_FITS:g}')"
    )


def failings(e: Estimate) -> list[str]:
    """One line on each reason why a plan is not feasible; with advice for memory."""
    return [
        _short(e) if name == MEMORY else f"not feasible: {name}: {MEANING.get(name, '')}".rstrip(": ")
        for name in e.reasons
    ]


def shortfall(name: str, peak_bytes: float, capacity_bytes: float, where: str = "") -> str:
    """One reason why a job of several estimates is not feasible.

    Args:
        name: name of the reason.
        peak_bytes: peak memory of the job on a device.
        capacity_bytes: memory of a device.
        where: parts of the job that have the reason.

    >>> shortfall("memory", 2.0**34, 2.0**33)
    'does not fit: 16 GiB of 8 GiB'
    >>> shortfall("batch", 0.0, 0.0, "update").partition(":")[0]
    'breaks batch (update)'
    """
    if name == MEMORY:
        return f"does not fit: {t.memory(peak_bytes)} of {t.memory(capacity_bytes)}"
    return f"breaks {name}{f' ({where})' if where else ''}: {MEANING.get(name, '')}".rstrip(": ")


def _short(e: Estimate) -> str:
    shortage_bytes = e.peak_memory_bytes - e.memory_capacity_bytes
    return f"not feasible: it needs {t.memory(shortage_bytes)} more than a device has; try {_enough(e, shortage_bytes)}"


def _enough(e: Estimate, shortage_bytes: float) -> str:
    """Options that may save enough bytes: a single one, or else the fewest together, host memory last."""
    saved = _savings(e)
    alone = [option for option, size in saved.items() if size >= shortage_bytes]
    if alone:
        return " or ".join(alone)
    together: list[str] = []
    for option in sorted(saved, key=lambda one: (one.startswith("--offload"), -saved[one])):
        worth = saved[option] * _left(e, option, together)
        if shortage_bytes > 0 and worth >= min(shortage_bytes, WORTH * e.peak_memory_bytes):
            together.append(option)
            shortage_bytes -= worth
    return " and ".join(together if shortage_bytes <= 0 else [_more_ranks(e), *together])


def _left(e: Estimate, option: str, before: Sequence[str]) -> float:
    """Share of an option's own savings that remains after the options before it."""
    if option.startswith("--micro-batch") and "--recompute full" in before:
        return 1 - RECOMPUTED
    if option.startswith("--offload") and "--zero 3" in before and not e.plan.get("zero", 1):
        return 1 / _sharing(e)
    return 1.0


def _savings(e: Estimate) -> dict[str, float]:
    """Option that the plan does not use yet -> bytes that it saves, approximately."""
    if not e.memory_by_definition:
        return {}
    plan, held = e.plan, dict.fromkeys(HELD, 0.0) | e.memory.rollup(1)
    stage, micro_batch, offload = plan.get("zero", 1), plan.get("micro_batch", 1), plan.get("offload", ())
    out = {}
    if plan.get("recompute", "none") != "full":
        ends = e.memory.rollup(2).get("activations/ends", 0.0)
        out["--recompute full"] = RECOMPUTED * (held["activations"] - ends)
    if micro_batch > 1:
        out[f"--micro-batch {micro_batch // 2}"] = held["activations"] / 2
    if _takes_zero_3(e) and _sharing(e) > 1:
        whole = held["weights"] + (stage < 2) * held["gradients"] + (stage < 1) * held["optimizer"]
        out["--zero 3"] = GATHERED * whole * (1 - 1 / _sharing(e))
    if stage and _sharing(e) < _copies(e):
        shared = held["optimizer"] + (stage > 1) * held["gradients"] + (stage > 2) * held["weights"]
        out["--shard 0"] = shared * (1 - _sharing(e) / _copies(e))
    if "optimizer" not in offload and "driver" in _holders(e):
        out[f"--offload {','.join(['optimizer', *offload])}"] = held["optimizer"]
    return out


def _sharing(e: Estimate) -> int:
    """Number of ranks over which ZeRO shards the states."""
    shard: int = e.plan.get("shard", 0)
    return min(shard, _copies(e)) if shard else _copies(e)


def _copies(e: Estimate) -> int:
    """Number of ranks that have the same weights."""
    ranks: int = e.plan.get("dp", 1) * e.plan.get("cp", 1)
    return ranks


def _takes_zero_3(e: Estimate) -> bool:
    """True if the plan does not have ZeRO-3, and its framework does."""
    has = 3 in habits_of(e.provenance.framework).zero_stages
    return has and e.plan.get("zero", 1) < 3 and e.plan.get("pp", 1) == 1


def _remedies(e: Estimate, searched: bool) -> list[str]:
    """Options that need less memory and that the plan does not use yet."""
    plan, micro_batch = e.plan, e.plan.get("micro_batch", 1)
    out = []
    if plan.get("recompute", "none") != "full":
        out.append("--fix recompute=full" if searched else "--recompute full")
    if _takes_zero_3(e) and plan.get("dp", 1) > 1:
        out.append("--fix zero=3" if searched else "--zero 3")
    if plan.get("zero", 1) and _sharing(e) < _copies(e):
        out.append("--fix shard=0" if searched else "--shard 0")
    if micro_batch > 1:
        out.append(f"--limit 'micro_batch<={micro_batch // 2}'" if searched else f"--micro-batch {micro_batch // 2}")
    return out or ["more devices" if searched else _more_ranks(e)]


def _more_ranks(e: Estimate) -> str:
    """Advice on more ranks to split the model over, for axes that the framework has; empty for one device."""
    if e.workload.get("gpus") == 1:
        return "more devices (--gpus 2 or more) or a device with more memory"
    axes = [axis for axis in ("tp", "pp") if axis in habits_of(e.provenance.framework).axes]
    return f"more ranks of {' or '.join(axes)}" if axes else "a framework that has tp or pp"


#: Most constants of the weakest kind to show by default.
SHOWN_CONSTANTS = 8


def print_estimate(estimate: Estimate, *, show_all: bool = False, explain: bool = False) -> None:
    """Write the report to standard output; with ``explain``, the computation of each term instead of the tree."""
    out = t.console()
    print_headline(out, estimate)
    if explain:
        from steptime.report.explain import print_details

        print_details(out, estimate.details)
        return
    print_terms(out, estimate, show_all=show_all)
    if (changes := change_table(estimate)) is not None:
        out.print()
        out.print(changes)
    _print_provenance(out, estimate, show_all=show_all)


def print_headline(out: Console, e: Estimate) -> None:
    """Print step time, its figures and memory, one line each."""
    job = e.workload
    words = [e.provenance.model, f"on {e.provenance.cluster}"]
    words += [counted(job["gpus"], _noun(e), t.count(job["gpus"]))] if "gpus" in job else []
    sizes = ("global_batch", "seq_len") if _has_tokens(job) else ("global_batch",)
    words += [f"{key.replace('_', ' ')} {t.count(job[key])}" for key in sizes if key in job]
    words += [t.number(job[key]) for key in ("dtype", "optimizer") if key in job]
    words += [t.lora_label(job["lora"])] if "lora" in job else []
    out.print(t.printable(", ".join([*words, f"mode {e.provenance.mode}"])), style="bold")
    out.print(f"plan: {t.plan_label(e.plan)}")
    if t.note_on(e.plan):
        out.print(t.note_on(e.plan))
    out.print()
    for name, value in _headline_rows(e):
        out.print(f"{name:<16}{value}", soft_wrap=False)
    print_notes(out, e)
    for line in (*failings(e), warning(e)):
        if line:
            out.print(t.printable(line))
    if e.run:
        from steptime.report.run import print_run

        print_run(out, e)


def print_notes(out: Console, e: Estimate) -> None:
    """Print the notes of an estimate, one line each."""
    for note in e.notes:
        out.print(t.printable(f"note: {note}"))


def _noun(e: Estimate) -> str:
    return device_noun(e.provenance.device, e.provenance.is_gpu)


def _has_tokens(job: Mapping[str, Any]) -> bool:
    return sample_noun(job.get("seq_len", 0)) != "sample"


def _headline_rows(e: Estimate) -> list[tuple[str, str]]:
    low, high = e.step_time_bracket_s
    fits = "yes" if e.feasible else "no: " + (", ".join(e.reasons) or "see the memory below")
    chance = chance_line(e)
    counted_as = "tokens" if _has_tokens(e.workload) else "samples"
    return [
        ("framework", t.printable(e.provenance.framework)),
        *([("trained", t.trained_label(e.workload))] if "trained_parameters" in e.workload else []),
        ("step time", t.seconds(e.step_time_s)),
        ("bracket", f"{t.seconds(low)} (all overlapped) to {t.seconds(high)} (nothing overlapped)"),
        ("band", t.band_text(e)),
        ("MFU, HFU", f"{t.percent(e.mfu)}, {t.percent(e.hfu)}"),
        (f"{counted_as}/s/{_noun(e)}", t.count(e.tokens_per_s_per_gpu)),
        *([("training", training_line(e))] if e.training else []),
        ("model FLOPs", f"{format_si(e.model_flops, 'FLOP')} per step"),
        ("peak memory", memory_line(e)),
        *([] if chance is None else [("P(oom)", chance)]),
        ("feasible", t.printable(fits)),
        ("bottleneck", t.printable(e.bottleneck)),
    ]


def training_line(e: Estimate) -> str:
    """Line on the whole run: days with their band, and device hours."""
    run, band = e.training, e.training["training_band_days"]
    spread = f" ({t.days(band[0])} .. {t.days(band[1])})" if band else ""
    length = f"{t.big(run['tokens'])} tokens" if "tokens" in run else f"{t.big(run['samples'])} samples"
    hours, device_days = f"{t.count(run['gpu_hours'])} {_noun(e)}-hours", f"{t.count(run['gpu_days'])} {_noun(e)}-days"
    return f"{t.days(run['training_days'])} days{spread}, {hours} ({device_days}), {length}"


def memory_line(e: Estimate) -> str:
    """Line with peak memory, capacity, and the share."""
    used = f"{t.memory(e.peak_memory_bytes)} of {t.memory(e.memory_capacity_bytes)}"
    return f"{used} ({t.share(e.peak_memory_bytes, e.memory_capacity_bytes)})"


def print_terms(out: Console, e: Estimate, *, show_all: bool) -> None:
    """Print the terms of time, overlapped time and memory."""
    out.print()
    out.print(term_table(e.time, t.seconds, title="time, exposed, per step", show_all=show_all))
    out.print()
    out.print(term_table(e.memory, t.memory, title="memory of the fullest device", show_all=show_all))
    overlap = e.overlapped.without_zeros()
    if overlap:
        out.print()
        out.print(term_table(overlap, t.seconds, title="overlapped (hidden, not in the step time)", show_all=show_all))


def change_table(e: Estimate) -> Table | None:
    """Table of changes of the step time, the largest first; None: none is known."""
    known = {name: value for name, value in e.what_if.items() if math.isfinite(value)}
    if not known:
        return None
    table = t.grid(("what would change it", "step", "change"))
    for name, value in sorted(known.items(), key=lambda item: item[1]):
        change = (value - e.step_time_s) / e.step_time_s if e.step_time_s else math.nan
        table.add_row(t.printable(name.replace("_", " ")), t.seconds(value), t.change(change))
    return table


def _print_provenance(out: Console, e: Estimate, *, show_all: bool) -> None:
    p = e.provenance
    t.heading(out, t.printable(f"weakest constants: {p.weakest_kind} (steptime {p.steptime_version})"))
    out.print(t.printable(f"model: {p.model_source}; device: {p.device}"))
    chosen = [(n, c) for n, c in p.constants.items() if show_all or c.get("kind") == p.weakest_kind]
    shown = chosen if show_all else chosen[:SHOWN_CONSTANTS]
    notes: dict[str, int] = {}
    table = t.grid(("constant", "value", "kind", "source"), left=(0, 2, 3))
    for name, constant in shown:
        note = notes.setdefault(str(constant.get("source", "")), len(notes) + 1)
        kind = t.printable(str(constant.get("kind", "")))
        table.add_row(t.printable(name), t.number(constant.get("value", "")), kind, f"[{note}]")
    if shown:
        out.print(table)
    for source, note in notes.items():
        out.print(t.printable(f"[{note}] {source}"))
    if len(p.constants) > len(shown):
        out.print(f"{len(p.constants) - len(shown)} more constants with --all")
    for assumption in p.assumptions:
        out.print(t.printable(f"assumed: {assumption}"))


def print_ledger(ledger: Any) -> None:
    """Write the ledger to standard output."""
    out = t.console()
    out.print(t.printable(f"{ledger.name} ({ledger.family})"), style="bold")
    out.print(t.printable(f"source: {ledger.source}"))
    parts = (
        ("parameters", ledger.parameters, t.big),
        (f"FLOPs, forward, one {ledger.sample}", ledger.flops, lambda value: format_si(value, "FLOP")),
        ("bytes of the states", ledger.bytes, t.memory),
    )
    for title, terms, unit in parts:
        out.print()
        out.print(term_table(terms, unit, title=title, show_all=False))
    _print_training(out, ledger)
    for note in ledger.notes:
        out.print(t.printable(f"note: {note}"))


def _print_training(out: Console, ledger: Any) -> None:
    """Print the ledger of training: activations, ZeRO stages, recomputation."""
    t.heading(out, f"activations of {counted(ledger.samples, ledger.sample, t.count(ledger.samples))}, on one device")
    kept = (
        ("input of one layer", "layer_input"),
        ("inputs of all layers (full recomputation)", "layer_inputs"),
        ("all that is kept (no recomputation)", "kept"),
    )
    table = t.grid(("", "bytes"))
    for words, name in kept:
        table.add_row(words, t.memory(ledger.activations[name]))
    out.print(table)
    t.heading(out, "states of a rank by ZeRO stage, and what it sends in a step")
    counts = sorted({row.ranks for row in ledger.zero})
    table = t.grid(("ZeRO", *(counted(n, "rank", t.count(n)) for n in counts), "sent"))
    for stage in sorted({row.stage for row in ledger.zero}):
        rows = [row for row in ledger.zero if row.stage == stage]
        table.add_row(f"{stage}", *(t.memory(row.total_bytes) for row in rows), t.memory(rows[-1].sent_bytes))
    out.print(table)
    t.heading(out, "FLOPs of a step over those of its forward pass")
    table = t.grid(("recomputed", "model", "hardware", "MFU / HFU"))
    model = ledger.recomputation["none"]
    for name, hardware in ledger.recomputation.items():
        table.add_row(name, f"{model:.3f}", f"{hardware:.3f}", f"{model / hardware:.3f}")
    out.print(table)


SHOWN_TERMS: Final = 15
DASH: Final = "-"
#: Relative difference between sums of the same times in different orders.
ROUNDING: Final = 1e-12
#: Entries of a plan's record that follow from the degrees.
_FOLLOWS: Final = ("stage_layers", "fullest_stage", "fullest_phase", "domains", "micro_batches")
#: Ending of a headline figure's name -> formatter; the first match counts.
_UNITS: Final[tuple[tuple[str, Callable[[float], str]], ...]] = (
    ("per_s_per_gpu", t.count),
    ("samples_per_s", t.number),
    ("_flops", t.number),
    ("mfu", t.percent),
    ("hfu", t.percent),
    ("_bytes", t.memory),
    ("_s", t.seconds),
)


def print_difference(difference: Any, a: str, b: str, *, show_all: bool = False) -> None:
    """Write the comparison to standard output; ``a`` and ``b`` are the names of the two sides."""
    out = t.console()
    out.print(t.printable(f"A: {a}"))
    out.print(t.printable(f"B: {b}"))
    _print_plan(out, difference.plan)
    out.print()
    table = t.grid(("headline", "A", "B", "B - A", "B / A"))
    for name, pair in difference.headline.items():
        _add(table, name, pair, _unit(name))
    out.print(table)
    _print_changes(out, "time", difference.time, t.seconds, show_all=show_all)
    _print_changes(out, "memory", difference.memory, t.memory, show_all=show_all)


def _print_plan(out: Console, plan: Mapping[str, Sequence[Any]]) -> None:
    changed = {key: pair for key, pair in plan.items() if pair[0] != pair[1] and key not in _FOLLOWS}
    out.print()
    if not changed:
        out.print("job and plan are equal")
        return
    table = t.grid(("plan", "A", "B"), left=(0, 1, 2))
    for key, (left, right) in changed.items():
        table.add_row(t.printable(key), *("absent" if value is None else _cell(value) for value in (left, right)))
    out.print(table)


def _cell(value: Any, unit: Callable[[float], str] = t.number) -> str:
    """Text of a value without a difference: two numbers are a range, names a set, a missing value a dash."""
    if isinstance(value, (list, tuple)):
        if all(isinstance(each, str) for each in value):
            return "+".join(value) or "none"
        return " to ".join(_cell(each, unit) for each in value)
    if value is None or value != value:
        return DASH
    return unit(value) if _is_number(value) else t.number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _print_changes(
    out: Console, title: str, terms: Mapping[str, Sequence[Any]], unit: Callable[[float], str], *, show_all: bool
) -> None:
    """Terms by absolute difference, largest first."""
    changes = {path: (_value(pair[0]), _value(pair[1])) for path, pair in terms.items()}
    moved = [(path, pair) for path, pair in changes.items() if _change(*pair) and not all(map(math.isnan, pair))]
    moved.sort(key=lambda item: _order(item[1][1] - item[1][0]))
    out.print()
    if not moved:
        out.print(f"no term of {title} differs")
        return
    shown = moved if show_all else moved[:SHOWN_TERMS]
    table = t.grid((title, "A", "B", "B - A", "B / A"))
    for path, pair in shown:
        _add(table, path, pair, unit)
    out.print(table)
    if len(moved) > len(shown):
        out.print(f"{len(moved) - len(shown)} smaller differences with --all")


def _change(left: float, right: float) -> float:
    """Difference right - left; 0 if they differ by rounding only."""
    return 0.0 if math.isclose(left, right, rel_tol=ROUNDING) else right - left


def _order(difference: float) -> float:
    """Sort key: unknown differences first, then the largest."""
    return -math.inf if math.isnan(difference) else -abs(difference)


def _value(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _unit(name: str) -> Callable[[float], str]:
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), t.number)


def _add(table: Any, name: str, pair: Sequence[Any], unit: Callable[[float], str]) -> None:
    left, right = pair
    if not (_is_number(left) and _is_number(right)):
        table.add_row(t.printable(name), _cell(left, unit), _cell(right, unit), "", "")
        return
    delta = _change(left, right)
    sign = "+" if delta > 0 else ""
    ratio = f"{right / left:.3f}" if left and math.isfinite(right / left) else ""
    shown = f"{delta * 100:.1f} points" if unit is t.percent else unit(delta)
    table.add_row(t.printable(name), unit(left), unit(right), sign + shown, ratio)
