"""Turns what a user says about a plan into columns, with errors that show the arithmetic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from steptime.errors import FieldError, PlanError, UnknownNameError, UserError, shorten
from steptime.plan.constraints import OPERATORS, Constraint
from steptime.plan.job import ATTENTIONS, OVERLAPS, RECOMPUTES, SCHEDULES
from steptime.plan.plans import RECOMPUTE_CODES
from steptime.study.modes import Mode

DEGREES = ("tp", "tp2", "cp", "pp", "dp", "vpp")
PLAN_KEYS = (
    *DEGREES, "ep", "micro_batch", "panels", "zero", "recompute", "schedule", "overlap", "attention", "placement",
)  # fmt: skip
LARGEST = {"zero": 3, "vpp": 10**5, "panels": 10**6, "micro_batch": 10**9}
CONSTRAINED = ("tp", "tp2", "cp", "pp", "dp", "vpp", "micro_batch", "panels", "zero", "recompute")


def whole(field: str, value: Any, low: int, high: int) -> int:
    """A whole number within bounds.

    Raises:
        FieldError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise FieldError("", field, f"{shorten(repr(value))} must be a whole number from {low} to {high}")
    return int(value)


def text(field: str, value: Any) -> str:
    """A text.

    Raises:
        FieldError: it is none.
    """
    if not isinstance(value, str):
        raise FieldError("", field, f"{value!r} is not a text")
    return value


def choice(field: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some names.

    Raises:
        FieldError: it is no text.
        UnknownNameError: it is none of them.
    """
    if not isinstance(value, str):
        raise FieldError("", field, f"{value!r} is not one of {', '.join(allowed)}")
    if value not in allowed:
        raise UnknownNameError(field, value, allowed)
    return value


def checked_plan(plan: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    """The plan's values, each checked on its own.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of range, or one that no version supports yet.
    """
    out: dict[str, Any] = {}
    for key, value in plan.items():
        if key not in PLAN_KEYS:
            raise UnknownNameError("key of a plan", key, PLAN_KEYS)
        if key in (*DEGREES, "ep", "micro_batch", "panels", "zero"):
            out[key] = whole(key, value, 0 if key == "zero" else 1, LARGEST.get(key, 10**7))
        elif key == "placement":
            out[key] = _placement(value)
        elif key == "overlap":
            out[key] = overlap_of(value)
        else:
            allowed = {"recompute": RECOMPUTES, "schedule": SCHEDULES, "attention": ATTENTIONS}[key]
            out[key] = choice(key, value, allowed)
    if out.get("ep", 1) != 1:
        raise PlanError(f"ep {out['ep']}: the step of a model with experts cannot be estimated yet", hint="drop ep")
    attention = out.get("attention", "fused")
    if attention not in mode.attentions:
        raise PlanError(
            f"attention {attention!r} is only modelled in published mode",
            hint=f"give --mode published, or one of {', '.join(mode.attentions)}",
        )
    _check_schedule(out)
    check_recompute(out.get("recompute", "none"), attention)
    if mode.method.name == "published":
        _check_published(out)
    return out


def _check_schedule(out: Mapping[str, Any]) -> None:
    interleaved = out.get("vpp", 1) > 1
    if "schedule" in out and (out["schedule"] == "interleaved") != interleaved:
        raise PlanError(
            f"schedule {out['schedule']} contradicts vpp {out.get('vpp', 1)}",
            hint="interleaved needs vpp of at least 2, 1f1b needs vpp 1",
        )


def _check_published(out: Mapping[str, Any]) -> None:
    beyond = [f"{key} {out[key]}" for key in ("vpp", "zero") if out.get(key, 1) != 1]
    if out.get("recompute") == "full":
        beyond.append("recompute full")
    if beyond:
        missing = f"the published model has no {', no '.join(beyond)}"
        raise PlanError(missing, hint="drop it, or use --mode corrected")


def check_recompute(recompute: str, attention: str) -> None:
    """Refuses recomputation that means nothing.

    Raises:
        PlanError: attention alone is to be recomputed, but it is fused.
    """
    if recompute == "attention" and attention != "unfused":
        raise PlanError(
            "recompute attention means nothing for fused attention, which always recomputes its scores",
            hint="give --attention unfused, or --recompute none or full",
        )


def overlap_of(value: Any) -> frozenset[str]:
    """Kinds of traffic from ``"dp,pp"``, ``"none"`` or a list.

    Raises:
        UserError: something else.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise FieldError("", "overlap", f"{value!r} is not a list of {', '.join(OVERLAPS)}, or none")
    names = [n.strip() if isinstance(n, str) else n for n in names]
    if names in (["none"], [""], []):
        return frozenset()
    return frozenset(choice("overlap", name, OVERLAPS) for name in names)


def _placement(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise FieldError("", "placement", f"{value!r} is not a table of axis = devices")
    axes = ("tp", "tp2", "cp", "dp", "pp", "ep")
    for axis in value:
        if axis not in axes:
            raise UnknownNameError("axis of a placement", str(axis), axes)
    return {axis: whole(f"placement.{axis}", n, 1, 10**7) for axis, n in value.items() if axis != "ep"}


def strategy_of(strategy: str, plan: Mapping[str, Any], mode: Mode) -> tuple[str, dict[str, Any]]:
    """The strategy that the degrees mean, and the degrees under its axes.

    ``tp2`` of the context strategy is accepted for ``cp``.

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
    axes = (*mode.method.strategies[strategy].tensor_axes, "dp", "pp")
    for axis in ("tp", "tp2", "cp"):
        inside = degrees.get("placement", {}).get(axis, 1)
        if axis not in axes and (degrees.get(axis, 1) > 1 or inside > 1):
            raise PlanError(
                f"strategy {strategy} has no axis {axis}",
                hint=f"its axes are {', '.join(axes)}; tp2 is 2d, cp is context",
            )
    if strategy != "2d" and degrees.get("panels", 1) > 1:
        raise PlanError(f"panels {degrees['panels']}: only strategy 2d has panels", hint="drop panels")
    return strategy, degrees


def completed_degrees(degrees: Mapping[str, Any], gpus: int | None) -> dict[str, int]:
    """All degrees; ``dp`` and the number of devices follow from each other.

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
            raise PlanError(f"{arithmetic} = {inner * out['dp']}, not {gpus} GPUs", hint=_fitting(inner, gpus))
    else:
        if gpus % inner:
            product = f"{' x '.join(named)} = {inner}" if len(named) > 1 else named[0]
            raise PlanError(
                f"{product} does not divide {gpus} GPUs, so no dp is left",
                hint=_fitting(inner, gpus),
            )
        out["dp"] = gpus // inner
    return out


def _fitting(inner: int, gpus: int) -> str:
    if gpus % inner == 0:
        return f"dp {gpus // inner} would make {gpus}"
    below, above = gpus // inner * inner, -(-gpus // inner) * inner
    counts = f"{below} or {above}" if below else f"{above}"
    return f"with these degrees {counts} GPUs would work"


def constraints_of(fix: Mapping[str, int | str], limit: Sequence[str]) -> list[Constraint]:
    """Conditions on the columns of a plan.

    Raises:
        UserError: an unknown column, operator or value.
    """
    if not isinstance(fix, Mapping) or isinstance(limit, (str, bytes)) or not isinstance(limit, Sequence):
        raise UserError("fix is a table such as {'tp': 8}, limit a list such as ['pp<=16']")
    out = []
    for key, value in fix.items():
        if key == "recompute":
            value = RECOMPUTE_CODES[choice(key, value, RECOMPUTES)]
        elif key not in CONSTRAINED:
            raise UnknownNameError("degree", key, CONSTRAINED)
        out.append(
            Constraint(
                column=key, relation="=", value=whole(key, value, 0 if key in ("zero", "recompute") else 1, 10**9)
            )
        )
    for bound in limit:
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=|<|>)\s*(\d{1,12})\s*", text("limit", bound))
        if match is None:
            raise UserError(f"limit {shorten(bound)!r} is not a comparison", hint="for example pp<=16")
        name, relation, number = match.groups()
        if name not in CONSTRAINED or name == "recompute" or relation not in OPERATORS:
            raise UnknownNameError("degree", name, CONSTRAINED)
        out.append(Constraint(column=name, relation=relation, value=int(number)))
    return out
