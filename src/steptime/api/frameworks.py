"""Fitted frameworks as records: parameters with their doubts, habits, and how much they were fitted to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from steptime.api.accustomed import framework_taken, no_framework, renamed
from steptime.plan.framework import IDEAL, PARAMETERS, Habits, habits_of
from steptime.plan.framework_file import framework_path, framework_table
from steptime.plan.framework_library import GENERIC, framework_names
from steptime.plan.overlap_rules import RULES, OverlapRule

#: What is charged, by group, for a list of frameworks.
TITLES: Final = {IDEAL.name: "no slowdown, no overhead, no band", GENERIC: "the common values: not known which"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRecord:
    """One framework as ``steptime frameworks`` shows it."""

    name: str
    title: str
    runs: int | None
    """Measured runs of it that the fit used; None: the file does not say."""
    parameters: dict[str, float]
    doubts: dict[str, float]
    """Standard deviation of the logarithm (of shares: of the logit); empty for the ideal one."""
    habits: Habits
    source: str
    notes: tuple[str, ...] = ()
    """What to know of the name by which it was asked for."""

    @property
    def shown_habits(self) -> dict[str, Any]:
        """Every habit by its name, as plain data; sets in order."""
        values = {field.name: getattr(self.habits, field.name) for field in fields(self.habits)}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        parameters = {name: {"value": value, "doubt": self.doubts.get(name)} for name, value in self.parameters.items()}
        return {"name": self.name, "title": self.title, "runs": self.runs, "source": self.source,
                "habits": self.shown_habits, "parameters": parameters, "notes": list(self.notes)}  # fmt: skip


def framework_record(name: str) -> FrameworkRecord:
    """One framework of those in use.

    Raises:
        UnknownNameError: there is none of that name.
        UserError: the user's own file of frameworks cannot be used.
    """
    notes = renamed(name)
    name = framework_taken(name) or name
    if name not in framework_names():
        raise no_framework(name)
    table = framework_table()
    own, source = table["framework"].get(name, {}), str(table["provenance"]["source"])
    if name == IDEAL.name:
        values, doubts, runs, source = {p: float(getattr(IDEAL, p)) for p in PARAMETERS}, {}, None, "by definition"
    else:
        values = {p: float((own or table["common"])[p]) for p in PARAMETERS}
        doubts = {p: float((own.get("doubts") or table["doubts"])[p]) for p in PARAMETERS}
        runs = table["provenance"].get("rows") if name == GENERIC else own.get("runs")
    return FrameworkRecord(name=name, title=TITLES.get(name, ""), runs=runs, parameters=values, doubts=doubts,
                           habits=habits_of(name), source=source, notes=notes)  # fmt: skip


def overlap_records(name: str | None = None) -> list[dict[str, Any]]:
    """What hides behind what, as plain data; of one framework the rules that it follows unless told otherwise.

    Raises:
        UnknownNameError: there is no framework of that name.
        UserError: the user's own file of frameworks cannot be used.
    """
    habits = None if name is None else framework_record(name).habits
    return [asdict(rule) for rule in RULES if habits is None or _follows(habits, rule)]


def _follows(habits: Habits, rule: OverlapRule) -> bool:
    """Whether software with these habits has the traffic of a rule, and hides it."""
    has = bool(habits.zero_stages & set(rule.zero)) and (not rule.axis or rule.axis in habits.axes)
    hides = (not rule.word or rule.word in habits.overlap) and (not rule.habit or bool(getattr(habits, rule.habit)))
    return has and hides


def framework_file_record() -> dict[str, Any]:
    """Where the frameworks in use come from: file, source, runs, bands."""
    table = framework_table()
    return {"file": framework_path().name, **table["provenance"], "bands": table["band"],
            "devices": table["device"]}  # fmt: skip
