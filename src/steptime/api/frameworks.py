"""Effects of a named framework on a plan: its name, default ZeRO stage, the space of a search.

Records of fitted frameworks: parameters with their doubts, habits, and the number of runs of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from steptime.errors import UserError, counted
from steptime.plan.framework import IDEAL, MODEL_AXES, PARAMETERS, Habits
from steptime.plan.framework_file import (
    GENERIC,
    bare_name,
    fitted_values,
    framework_called,
    framework_path,
    framework_table,
    framework_tables,
    habits_of,
    is_framework,
    left_open,
    memory_profile_of,
    source_of,
    unknown_framework,
    why_called,
)
from steptime.plan.memory_profile import PLAIN
from steptime.plan.overlap import RULES, OverlapRule
from steptime.plan.plans import AXES
from steptime.plan.recompute import SELECTIVE, recompute_code, says_selective, spelled_out
from steptime.plan.space import Constraint, CorrectedSpace, Space

Strategies = Mapping[str, tuple[Constraint, ...]]
#: Strategy -> axes that it stands for.
OF_STRATEGY = {"context": frozenset({"cp"}), "2d": frozenset({"tp"})}
OTHERS = "steptime frameworks lists all"
PLACED = "ranks lie as launchers number them, tp innermost; --framework generic tries every placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The plans that a search tries."""

    space: Space
    strategies: Strategies
    constraints: tuple[Constraint, ...]
    notes: tuple[str, ...] = ()
    """Notes on plans left out because the framework does not have them."""


def framework_taken(given: str | None) -> str | None:
    """The framework of a name: itself, or the one that tables of measured runs use for it."""
    return given if given is None or is_framework(given) else framework_called(given) or given


def no_framework(given: str) -> UserError:
    """Error for an unknown framework; an ambiguous name gets the list of candidates."""
    return unknown_framework(given, left_open(given))


def renamed(given: str | None) -> tuple[str, ...]:
    """A note if a name stands for a framework of another name: its runs, and why it is taken.

    >>> renamed("torchtitan"), renamed("Megatron-Core"), renamed(None)
    ((), (), ())
    """
    taken = framework_taken(given)
    if given is None or taken is None or bare_name(given) == bare_name(taken):
        return ()
    runs = fitted_values(taken).get("runs")
    behind = "" if runs is None else f", fitted to {counted(runs, 'run')}"
    why = why_called(given)
    return (f"framework {given} was taken as {taken}{behind}{f': {why}' if why else ''}; {OTHERS}",)


def read_as(framework: str, plan: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on the meaning of a recomputation that differs between frameworks.

    >>> read_as("torchtitan", {"recompute": "selective"})[0]
    'recompute selective was read as norm+activation+outputs, as torchtitan means it'
    >>> read_as("torchtitan", {"recompute": "attention"}), read_as("torchtitan", {})
    ((), ())
    """
    given = plan.get("recompute")
    if not isinstance(given, str) or not says_selective(given):
        return ()
    read = f"recompute {SELECTIVE} was read as {spelled_out(SELECTIVE, framework)}"
    if framework in (GENERIC, IDEAL.name):
        return (f"{read}, as in Megatron-LM; with a framework named it is what that means by it",)
    return (f"{read}, as {framework} means it",)


def stage_unless_given(framework: str, degrees: Mapping[str, int]) -> int:
    """Default ZeRO stage of a framework on a mesh; without replicas at most the default of a framework without habits.

    Without replicas all stages are the same, except for experts, which tensor ranks may replicate: a framework that
    does not shard the states of two replicas does not shard those of experts.

    >>> stage_unless_given("torchtitan", {"dp": 8, "pp": 1}), stage_unless_given("torchtitan", {"dp": 1, "tp": 8})
    (3, 1)
    >>> stage_unless_given("ddp", {"dp": 2, "tp": 8}), stage_unless_given("ddp", {"dp": 1, "tp": 8})
    (0, 0)
    """
    habits = habits_of(framework)
    shared = degrees.get("dp", 1) * degrees.get("cp", 1) > 1
    zero = habits.zero_with(degrees.get("pp", 1))
    return zero if shared else min(zero, Habits().zero)


def recompute_unless_given(framework: str) -> int:
    """Code of a framework's default recomputation.

    >>> recompute_unless_given("trl"), recompute_unless_given("torchtitan")
    (2, 0)
    """
    usual = habits_of(framework).recompute
    return 0 if usual == "none" else recompute_code(usual)


def shard_unless_given(framework: str | None, degrees: Mapping[str, int], node: int) -> int:
    """Ranks over which a framework shards if neither ``shard`` nor a ZeRO stage is given; 0: all.

    PyTorch's own FSDP, which a framework's name may stand for, shards over all ranks.

    Args:
        framework: its name as given.
        degrees: degrees of the mesh.
        node: devices of a node.

    >>> [shard_unless_given(name, {"dp": 64}, 8) for name in ("fms-fsdp", "FSDP", "torchtitan", None)]
    [8, 0, 0, 0]
    >>> shard_unless_given("fms-fsdp", {"dp": 8}, 8), shard_unless_given("fms-fsdp", {"dp": 64, "pp": 2}, 8)
    (0, 0)
    """
    own = habits_of(framework_taken(framework) or "").within_node and not renamed(framework)
    ranks = degrees.get("dp", 1)
    alone = all(degrees.get(axis, 1) == 1 for axis in ("cp", "pp"))
    return shards_within_node(ranks, node) if own and alone else 0


def shards_within_node(ranks: int, node: int) -> int:
    """Ranks of one node if the data ranks fill several whole nodes, for shards within a node; 0: all.

    >>> shards_within_node(64, 8), shards_within_node(8, 8), shards_within_node(12, 8)
    (8, 0, 0)
    """
    return node if ranks > node and ranks % node == 0 else 0


def scope_of(
    framework: str,
    space: Space,
    strategies: Strategies,
    constraints: Sequence[Constraint],
    asked: str,
    within: int = 0,
    experts: bool = False,
) -> Scope:
    """Plans of a search: those that a framework has, and those that the user asks for explicitly.

    Args:
        framework: its name.
        space: candidates of all frameworks, with what the user fixes.
        strategies: strategies to search, each with constraints of its own.
        constraints: the user's fixed values and bounds.
        asked: strategy that the user named, ``auto`` for none.
        within: ranks of a node, if the job has several nodes; shards within a node are tried if the framework has
            them.
        experts: True if the model has experts.
    """
    habits = habits_of(framework)
    wished = {c.column for c in constraints if _asks(c)} | OF_STRATEGY.get(asked, frozenset())
    lacking = [axis for axis in MODEL_AXES if axis not in habits.axes and axis not in wished]
    names = [name for name in strategies if name != "context" or "cp" not in lacking]
    narrowed = space.fixed({"ep": 1}) if "ep" in lacking else space
    left_out = [f"no {', '.join(lacking)}"] if lacking else []
    notes: tuple[str, ...] = ()
    if isinstance(narrowed, CorrectedSpace):
        usual, narrowed = narrowed, _with_habits(narrowed, habits, constraints, within=within, experts=experts)
        left_out += [] if narrowed.zero == usual.zero else [_stages(narrowed, pipelines="pp" not in lacking)]
        if framework not in (GENERIC, IDEAL.name):
            narrowed, notes = replace(narrowed, launched=True, order=AXES), (f"{framework}: {PLACED}",)
    alone = tuple(Constraint(column=axis, relation="<=", value=1) for axis in lacking if axis != "ep")
    others = (f"{framework}: {', '.join(left_out)}; other plans are tried only if --fix asks for one",)
    return Scope(
        space=narrowed,
        strategies={name: strategies[name] for name in names},
        constraints=(*constraints, *alone),
        notes=(*(others if left_out else ()), *notes),
    )


def _with_habits(
    space: CorrectedSpace, habits: Habits, constraints: Sequence[Constraint], *, within: int, experts: bool
) -> CorrectedSpace:
    """The space with the framework's ZeRO stages, shards and recomputed parts, unless the user fixes them."""
    fixed = {c.column for c in constraints}
    if not any(c.column == "zero" and c.relation == "=" for c in constraints):
        space = space.with_habits(habits)
        if habits.within_node and within and "shard" not in fixed:
            space = replace(space, shard=(0, within))
    parts = habits.expert_parts if experts else habits.parts
    if parts and not fixed & {"recompute", "recompute_every"}:
        space = space.with_parts(parts)
    return space


def _asks(constraint: Constraint) -> bool:
    """True if a constraint requires more than one rank of an axis."""
    least = constraint.value + (constraint.relation == ">")
    return constraint.relation in ("=", ">=", ">") and least > 1


def _stages(space: CorrectedSpace, *, pipelines: bool) -> str:
    plain, piped = (" and ".join(map(str, stages)) for stages in (space.zero, space.piped_zero))
    return f"only ZeRO-{plain}" if plain == piped or not pipelines else f"only ZeRO-{plain} ({piped} with a pipeline)"


def fixed_values(constraints: Sequence[Constraint]) -> dict[str, Any]:
    """Columns fixed to one value."""
    return {c.column: c.value for c in constraints if c.relation == "="}


#: Titles of the two frameworks that are not fitted to software.
TITLES: Final = {IDEAL.name: "no slowdown, no overhead, no band", GENERIC: "the common values: not known which"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRecord:
    """One framework as ``steptime frameworks`` shows it."""

    name: str
    title: str
    runs: int | None
    """Number of measured runs in the fit; None: the file does not say."""
    parameters: dict[str, float]
    doubts: dict[str, float]
    """Standard deviation of the logarithm (for shares: of the logit); empty for the ideal framework."""
    habits: Habits
    memory: dict[str, Any]
    """Nonzero memory needs beyond live tensors."""
    sources: dict[str, tuple[str, str]]
    """Source and kind of each habit and memory value in its file."""
    defaults: dict[str, Any]
    """Defaults of a fine-tuning stack."""
    source: str
    notes: tuple[str, ...] = ()
    """Notes on the name that was given for it."""

    @property
    def shown_habits(self) -> dict[str, Any]:
        """Habits by name as plain data, with sets as sorted lists."""
        values = {field.name: getattr(self.habits, field.name) for field in fields(self.habits)}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        parameters = {name: {"value": value, "doubt": self.doubts.get(name)} for name, value in self.parameters.items()}
        return {
            "name": self.name,
            "title": self.title,
            "runs": self.runs,
            "source": self.source,
            "habits": self.shown_habits,
            "parameters": parameters,
            "notes": list(self.notes),
        }


def framework_record(name: str) -> FrameworkRecord:
    """Record of one framework.

    Raises:
        UnknownNameError: the name is unknown.
        UserError: the user's own file of frameworks cannot be used.
    """
    notes = renamed(name)
    name = framework_taken(name) or name
    if not is_framework(name):
        raise no_framework(name)
    table, tables = framework_table(), framework_tables(name)
    own, source = fitted_values(name), str(table["provenance"]["source"])
    if name == IDEAL.name:
        values, doubts, runs, source = {p: float(getattr(IDEAL, p)) for p in PARAMETERS}, {}, None, "by definition"
    else:
        values = {p: float(own.get(p, table["common"][p])) for p in PARAMETERS}
        doubts = {**table["doubts"], **own.get("doubts", {})}
        runs = table["provenance"].get("rows") if name == GENERIC else own.get("runs")
    defaults = dict(tables.get("defaults", {}))
    if "source" in defaults and not own:
        source = f"{defaults['source']}; times: the common values, of {source}"
    memory = memory_profile_of(name)
    given = ((part, key) for part in ("habits", "memory") for key in tables.get(part, ()))
    return FrameworkRecord(
        name=name,
        title=TITLES.get(name, tables.get("title", "")),
        runs=runs,
        parameters=values,
        doubts=doubts,
        habits=habits_of(name),
        memory={
            f.name: value for f in fields(memory)[1:] if (value := getattr(memory, f.name)) != getattr(PLAIN, f.name)
        },
        sources={key: source_of(tables, part, key) for part, key in given if key not in ("source", "kind", "sources")},
        defaults={key: value for key, value in defaults.items() if key not in ("source", "kind")},
        source=source,
        notes=notes,
    )


def overlap_records(name: str | None = None) -> list[dict[str, Any]]:
    """Overlap rules as plain data; for one framework, the rules that it follows by default.

    Raises:
        UnknownNameError: the framework is unknown.
        UserError: the user's own file of frameworks cannot be used.
    """
    habits = None if name is None else framework_record(name).habits
    return [asdict(rule) for rule in RULES if habits is None or _follows(habits, rule)]


def _follows(habits: Habits, rule: OverlapRule) -> bool:
    """True if software with these habits has the traffic of a rule and overlaps it."""
    has = bool(habits.zero_stages & set(rule.zero)) and (not rule.axis or rule.axis in habits.axes)
    overlaps = (not rule.word or rule.word in habits.overlap) and (not rule.habit or bool(getattr(habits, rule.habit)))
    return has and overlaps


def framework_file_record() -> dict[str, Any]:
    """Provenance of the frameworks: file, source, runs, bands."""
    table = framework_table()
    return {"file": framework_path().name, **table["provenance"], "bands": table["band"], "devices": table["device"]}
