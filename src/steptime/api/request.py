"""Conversion of a user's plan into columns, with errors that show the arithmetic.

Nouns for the devices of a job in reports.
Checks of single values: whole numbers, numbers, texts, names, switches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from steptime.errors import FieldError, PlanError, UnknownNameError, UserError, counted, shorten, shown
from steptime.hardware.library import load_cluster, load_device
from steptime.hardware.records import Cluster
from steptime.num import round_up
from steptime.options import (
    AXES,
    CHANCE,
    CHOICES,
    COLUMNS,
    COUNTS,
    KEYS,
    OPTIONS,
    SEARCHED,
    SHOWN,
    Count,
    Flag,
    OneOf,
    Ratio,
    SomeOf,
    Switch,
    number,
)
from steptime.plan.job import GRAPH_PARTS, GRAPHS
from steptime.plan.placements import order_of
from steptime.plan.plans import ATTENTION_RECOMPUTE, FULL_RECOMPUTE
from steptime.plan.recompute import recompute_code, recompute_text
from steptime.plan.space import OPERATORS, Constraint
from steptime.schedule import SCHEDULES
from steptime.search.modes import Mode

NameOrPath: TypeAlias = "str | os.PathLike[str]"
"""A name of a catalogue, or a path as text or as ``pathlib.Path``."""
MAX_COUNT = 10**9
"""Largest accepted dim, degree, depth or count."""
SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False}


def whole(field: str, value: Any, low: int, high: int) -> int:
    """A whole number within bounds.

    Raises:
        FieldError: the value is no whole number within the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise FieldError("", field, f"{shown(value)} must be a whole number from {low} to {high}")
    return int(value)


def text(field: str, value: Any) -> str:
    """A text.

    Raises:
        FieldError: the value is no string.
    """
    if not isinstance(value, str):
        raise FieldError("", field, f"{shown(value)} is not a text")
    return value


def table(field: str, value: Any) -> dict[str, Any]:
    """A table of settings; None is an empty one.

    Raises:
        UserError: the value is no mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{field} is a table such as {{'tp': 8}}, not {shown(value)}")
    return dict(value or {})


def name_or_path(field: str, value: Any, otherwise: str = "") -> str:
    """A name, or a path as text or as ``pathlib.Path``; ``otherwise``: hint for any other value.

    Raises:
        FieldError: it is neither.

    >>> from pathlib import PurePosixPath
    >>> name_or_path("cluster", "dgx-h100"), name_or_path("cluster", PurePosixPath("ours/cluster.toml"))
    ('dgx-h100', 'ours/cluster.toml')
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise FieldError("", field, f"{shown(value)} is neither a name nor a path", hint=otherwise or None)
    return given


def choice(field: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some names.

    Raises:
        FieldError: it is no text.
        UnknownNameError: it is not among the names.
    """
    if not isinstance(value, str):
        raise FieldError("", field, f"{shown(value)} is not one of {', '.join(allowed)}")
    if value not in allowed:
        raise UnknownNameError(field, value, allowed)
    return value


def switch(field: str, value: Any) -> bool:
    """A truth value: a boolean, 0 or 1, ``on`` or ``off``.

    Raises:
        FieldError: the value is no truth value.

    >>> switch("sp", "off"), switch("sp", 1)
    (False, True)
    """
    if isinstance(value, str) and value.lower() in SWITCH:
        return SWITCH[value.lower()]
    if isinstance(value, (bool, Integral)) and int(value) in (0, 1):
        return bool(value)
    raise FieldError("", field, f"{shown(value)} is neither on nor off")


def some_of(field: str, value: Any, allowed: Sequence[str]) -> frozenset[str]:
    """A subset of some names, from ``"dp,pp"``, ``"none"`` or a list.

    Raises:
        UserError: something else.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise FieldError("", field, f"{shown(value)} is not a list of {', '.join(allowed)}, or none")
    names = [n.strip() if isinstance(n, str) else n for n in names]
    if names in (["none"], [""], []):
        return frozenset()
    return frozenset(choice(field, name, allowed) for name in names)


def device_noun(device: str, is_gpu: bool | None = None) -> str:
    """``GPU``, or ``device`` if it is not known to be a GPU; ``is_gpu`` None: taken from the catalogue.

    >>> device_noun("h100-sxm"), device_noun("tpu-v5p"), device_noun("my own", True), device_noun("my own")
    ('GPU', 'device', 'GPU', 'device')
    """
    try:
        return _noun(load_device(device).is_gpu if is_gpu is None else is_gpu)
    except UserError:
        return "device"


def cluster_given(cluster: NameOrPath | Cluster) -> Cluster:
    """A cluster by name or file, or as a record.

    Raises:
        UserError: the name is unknown, or the file is wrong.
    """
    return cluster if isinstance(cluster, Cluster) else load_cluster(name_or_path("cluster", cluster))


def cluster_noun(cluster: NameOrPath | Cluster) -> str:
    """``GPU`` or ``device`` for the devices of a cluster (:func:`device_noun`); ``GPU`` if the cluster is unknown.

    >>> cluster_noun("dgx-h100"), cluster_noun("tpu-v5p-pod"), cluster_noun("my own")
    ('GPU', 'device', 'GPU')
    """
    try:
        return _noun(cluster_given(cluster).device.is_gpu)
    except UserError:
        return "GPU"


def _noun(is_gpu: bool) -> str:
    return "GPU" if is_gpu else "device"


MAX_DIGITS = 30
_CHANCE = re.compile(rf"\s*{CHANCE}\b")
DERIVED = ("strategy", "micro_batches", "stage_layers", "fullest_stage", "fullest_phase", "domains", "idle_devices")
"""Derived entries of a plan's record; they are ignored, so that a record may be given as a plan."""


def checked_plan(plan: Mapping[str, Any], mode: Mode, framework: str = "") -> dict[str, Any]:
    """The plan's values, checked singly, against the mode and against each other; ``sp`` becomes a number,
    ``recompute`` a code in the framework's sense, and an absent ``vpp`` follows from the schedule.

    Raises:
        UserError: a key is unknown; a value is wrong, not modelled by the mode, or contradicts another.
    """
    given = {key: value for key, value in plan.items() if key not in DERIVED and value is not None}
    out = {key: _checked(key, value, framework) for key, value in given.items()}
    check_mode(out, mode)
    _check_schedule(out)
    if "expert_load" in out and out.get("expert_imbalance", 1.0) != 1.0:
        raise PlanError("expert_load and expert_imbalance say the same thing", hint="give one of them")
    if out.get("recompute_every", 1) > 1 and not out.get("recompute", 0) & FULL_RECOMPUTE:
        raise PlanError(
            f"recompute_every {out['recompute_every']} counts layers that are recomputed in full",
            hint="give --recompute full, or drop it",
        )
    return out


def _checked(key: str, value: Any, framework: str = "") -> Any:
    if key == "placement":
        return _placement(value)
    if key == "order":
        given = text(key, value)
        return given if given == SEARCHED else "-".join(order_of(given))
    if key not in KEYS:
        raise _unknown("key of a plan", key, (*KEYS, "placement", "order"))
    if key == "schedule":
        return value if isinstance(value, str) and value in SCHEDULES else choice(key, value, tuple(SCHEDULES))
    if key == "graphs":
        return graphs_of(value)
    if key == "recompute":
        return recompute_of(value, framework)
    match OPTIONS[key].takes:
        case Count(low, high):
            return whole(key, value, low, high)
        case Ratio(low, high, meaning):
            return number(key, value, low, high, meaning)
        case OneOf(names):
            return choice(key, value, names)
        case SomeOf(names):
            return some_of(key, value, names)
        case Switch() | Flag() as takes:
            return (int if isinstance(takes, Switch) else bool)(switch(key, value))
    return text(key, value)


def _unknown(kind: str, key: str, allowed: Iterable[str]) -> UnknownNameError:
    """Error for an unknown key; for an abbreviation that reports use, the message names the full key."""
    return UnknownNameError(kind, key, allowed, otherwise=f"{key} of a report is {SHOWN[key]}" if key in SHOWN else "")


def graphs_of(value: Any) -> str:
    """Value of ``graphs``: ``none``, ``step``, or parts of a layer joined by ``+``, each once and in order.

    >>> graphs_of("router+attention"), graphs_of("step")
    ('attention+router', 'step')

    Raises:
        FieldError: it is no text, or ``none`` or ``step`` with others.
        UnknownNameError: a part is unknown.
    """
    if (given := text("graphs", value)) in GRAPHS:
        return given
    if (alone := next((part for part in given.split("+") if part in GRAPHS), None)) is not None:
        problem = f"{alone!r} cannot be combined with other parts"
        raise FieldError("", "graphs", problem, hint=f"parts of a layer: {', '.join(GRAPH_PARTS)}")
    allowed = GRAPH_PARTS if "+" in given else (*GRAPHS, *GRAPH_PARTS)
    parts = {choice("graphs", part, allowed) for part in given.split("+")}
    return "+".join(part for part in GRAPH_PARTS if part in parts)


def recompute_of(value: Any, framework: str = "") -> int:
    """The code of ``none``, ``full``, or parts joined by ``+``, in the terms of a framework.

    Raises:
        FieldError: it is no text.
        UnknownNameError: a part is unknown.
        PlanError: ``full`` together with parts.
    """
    code = recompute_code(text("recompute", value), framework)
    if code & FULL_RECOMPUTE and code != FULL_RECOMPUTE:
        raise PlanError(f"recompute {shorten(value)}: full recomputes every part already", hint="give full alone")
    return code


def check_mode(out: Mapping[str, Any], mode: Mode) -> None:
    """Refuse values that the mode does not model.

    Raises:
        PlanError: the message names the value, and what to drop.
    """
    attention = out.get("attention", "fused")
    if attention not in mode.attentions:
        raise PlanError(
            f"attention {shown(attention)} is only modelled in published mode",
            hint=f"give --mode published, or one of {', '.join(mode.attentions)}",
        )
    if not mode.method.calibrated:
        _check_published(out)


def _check_schedule(out: dict[str, Any]) -> None:
    """Set the virtual stages from a schedule given without them; refuse a contradiction."""
    if "schedule" not in out:
        return
    row = SCHEDULES[out["schedule"]]
    row.closed_forms()
    chunks = out.get("vpp", 1 if row.follows else row.usual_chunks)
    if row.follows and chunks < 2:
        raise PlanError(f"schedule {row.name} contradicts vpp {chunks}", hint=f"{row.name} needs vpp of at least 2")
    if row.only_chunks not in (None, chunks):
        raise PlanError(f"schedule {row.name} contradicts vpp {chunks}", hint=f"{row.name} needs vpp {row.only_chunks}")
    if chunks > 1:
        out["vpp"] = chunks


def _check_published(out: Mapping[str, Any]) -> None:
    usual = {row.name: row.usual for row in OPTIONS.values() if row.name in out and not row.published}
    beyond = [f"{key} {_words(out[key])}" for key, value in usual.items() if out[key] not in (value, frozenset())]
    code = out.get("recompute", 0)
    if code and not (code == ATTENTION_RECOMPUTE and out.get("attention") == "unfused"):
        beyond.append(f"recompute {recompute_text(code)}")
    if beyond:
        missing = f"the published model has no {', no '.join(beyond)}"
        raise PlanError(missing, hint="drop it, or use --mode corrected")


def _words(value: Any) -> str:
    return " and ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


def _placement(value: Any) -> dict[str, int]:
    """Devices of each axis inside the fast domain."""
    if not isinstance(value, Mapping):
        raise FieldError("", "placement", f"{shown(value)} is not a table of axis = devices")
    for axis in value:
        if axis not in AXES:
            raise UnknownNameError("axis of a placement", str(axis), AXES)
    return {axis: whole(f"placement.{axis}", n, *COUNTS[axis]) for axis, n in value.items()}


def strategy_of(strategy: str, plan: Mapping[str, Any], mode: Mode) -> tuple[str, dict[str, Any]]:
    """The strategy (for ``auto``: the one that the degrees imply), and the degrees keyed by its axes.

    With strategy context, ``tp2`` is read as ``cp`` if ``cp`` is 1.

    Raises:
        UserError: an unknown strategy, or degrees that belong to another one.
    """
    degrees = dict(plan)
    if text("strategy", strategy) == "auto":
        second = {name for name in ("tp2", "cp") if degrees.get(name, 1) > 1}
        if len(second) == 2:
            raise PlanError(f"tp2 {degrees['tp2']} and cp {degrees['cp']}: no strategy has both", hint="drop one")
        strategy = "2d" if "tp2" in second or degrees.get("panels", 1) > 1 else "context" if second else "1d"
    if strategy == "context" and degrees.get("tp2", 1) > 1 and degrees.get("cp", 1) == 1:
        degrees["cp"] = degrees.pop("tp2")
        placement = dict(degrees.get("placement", {}))
        if "tp2" in placement:
            placement["cp"] = placement.pop("tp2")
            degrees["placement"] = placement
    axes = (*mode.method.strategy(strategy).tensor_axes, "dp", "pp")
    for axis in ("tp", "tp2", "cp"):
        inside = degrees.get("placement", {}).get(axis, 1)
        if axis not in axes and (degrees.get(axis, 1) > 1 or inside > 1):
            raise PlanError(
                f"strategy {strategy} has no axis {axis}",
                hint=f"its axes are {', '.join(axes)}; tp2 belongs to strategy 2d, cp to context",
            )
    if strategy != "2d" and degrees.get("panels", 1) > 1:
        raise PlanError(f"panels {degrees['panels']}: only strategy 2d has panels", hint="drop panels")
    return strategy, degrees


def completed_degrees(
    degrees: Mapping[str, Any], gpus: int | None, cluster: NameOrPath | Cluster = ""
) -> dict[str, int]:
    """All degrees; ``dp`` and the number of devices follow from each other.

    Args:
        degrees: the given degrees.
        gpus: devices; None: the product of the degrees.
        cluster: the cluster, for the noun of its devices in messages.

    Raises:
        PlanError: their product is not the number of devices; the message shows the arithmetic.
    """
    out = {axis: int(degrees.get(axis, 1)) for axis in ("tp", "tp2", "cp", "pp")}
    inner = 1
    for value in out.values():
        inner *= value
    named = [f"{axis} {n}" for axis, n in out.items() if axis in degrees or n > 1] or ["tp 1"]
    if gpus is None:
        out["dp"] = int(degrees.get("dp", 1))
    elif "dp" in degrees:
        out["dp"] = int(degrees["dp"])
        if inner * out["dp"] != gpus:
            arithmetic = " x ".join([*named, f"dp {out['dp']}"])
            raise _no_mesh(f"{arithmetic} = {inner * out['dp']}, not", inner, gpus, cluster)
    else:
        if gpus % inner:
            product = f"{' x '.join(named)} = {inner}" if len(named) > 1 else named[0]
            raise _no_mesh(f"{product} does not divide", inner, gpus, cluster, ", so no dp is left")
        out["dp"] = gpus // inner
    return out


def _no_mesh(problem: str, inner: int, gpus: int, cluster: NameOrPath | Cluster, so: str = "") -> PlanError:
    """Error for degrees that do not multiply to the number of devices; its hint has numbers that would work."""
    noun, below, above = cluster_noun(cluster), gpus // inner * inner, round_up(gpus, inner)
    counts = f"{below} or {above} {noun}s" if below else counted(above, noun)
    fits = f"dp {gpus // inner} would make {gpus}" if below == gpus else f"with these degrees {counts} would work"
    return PlanError(f"{problem} {counted(gpus, noun)}{so}", hint=fits)


def constraints_of(fix: Mapping[str, Any], limit: Sequence[str], framework: str = "") -> list[Constraint]:
    """Constraints on the columns of a plan, in the terms of a framework.

    Raises:
        UserError: an unknown column, operator or value.
    """
    if not isinstance(fix, Mapping) or isinstance(limit, (str, bytes)) or not isinstance(limit, Sequence):
        raise UserError("fix is a table such as {'tp': 8}, limit a list such as ['pp<=16']")
    out = []
    for key, value in fix.items():
        if key not in COLUMNS:
            raise _unknown("degree", key, (*COLUMNS, *CHOICES))
        out.append(Constraint(column=key, relation="=", value=_checked(key, value, framework)))
    for bound in limit:
        if _CHANCE.match(text("limit", bound)):
            continue
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=|<|>)\s*(\d{1,12})\s*", bound)
        if match is None:
            raise UserError(f"limit {shorten(bound)!r} is not a comparison", hint="for example pp<=16")
        name, relation, value = match.groups()
        if name not in COUNTS or relation not in OPERATORS:
            raise _unknown("degree", name, (*COUNTS, CHANCE))
        out.append(Constraint(column=name, relation=relation, value=int(value)))
    return out


def oom_limit_of(limit: Sequence[str], mode: Mode) -> float | None:
    """The upper bound on the probability of running out of memory, among bounds; None: not bounded.

    Raises:
        FieldError: it is bounded from below, or not by a share between 0 and 1.
        PlanError: the mode does not model the probability of running out of memory.
    """
    chances = [_chance(bound) for bound in limit if _CHANCE.match(text("limit", bound))]
    if chances and not mode.method.calibrated:
        raise PlanError(
            f"mode {mode.method.name} does not model the probability of running out of memory: a plan fits or does not",
            hint=f"drop the limit of {CHANCE}, or use --mode corrected",
        )
    return min(chances, default=None)


def share(field: str, value: Any) -> float:
    """A share above 0, at most 1.

    Raises:
        FieldError: not a share above 0 and at most 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise FieldError("", field, f"{shown(value)} is no share above 0 and at most 1", hint="for example 0.05")
    return float(value)


def _chance(bound: str) -> float:
    found = re.fullmatch(rf"\s*{CHANCE}\s*<=?\s*(\d*\.?\d+(?:e-\d+)?)\s*", bound)
    chance = float(found[1]) if found and len(found[1]) < MAX_DIGITS else 0.0
    if not 0 < chance < 1:
        raise FieldError(
            "", "limit", f"{shorten(bound)!r} is no upper bound between 0 and 1", hint=f"for example {CHANCE}<=0.1"
        )
    return chance


def job_choices(fix: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split fixed values into checked choices of the job and unchecked columns of the plan.

    Raises:
        UserError: a choice is wrong.
    """
    chosen = {key: _checked(key, value) for key, value in fix.items() if key in CHOICES}
    row = SCHEDULES[chosen.get("schedule", "1f1b")]
    row.closed_forms()
    if row.follows:
        raise PlanError(f"schedule {row.name} follows from vpp", hint="give --limit 'vpp>=2'")
    return chosen, {key: value for key, value in fix.items() if key not in CHOICES}
