"""What a named framework means for a plan: its name, its ZeRO stage where none is given, the space of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steptime.errors import UserError, counted
from steptime.plan.constraints import Constraint
from steptime.plan.corrected_space import CorrectedSpace
from steptime.plan.framework import IDEAL, MODEL_AXES, Habits, habits_of
from steptime.plan.framework_file import framework_table
from steptime.plan.framework_library import GENERIC, bare_name, framework_names, unknown_framework
from steptime.plan.recompute import SELECTIVE, says_selective, spelled_out
from steptime.plan.space import Space

Strategies = Mapping[str, tuple[Constraint, ...]]
#: Axes that a strategy is asked for by its name.
OF_STRATEGY = {"context": frozenset({"cp"}), "2d": frozenset({"tp"})}
OTHERS = "steptime frameworks lists all"
PLACED = "ranks lie as launchers number them, tp innermost; --framework generic tries every placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which plans a search tries."""

    space: Space
    strategies: Strategies
    constraints: tuple[Constraint, ...]
    notes: tuple[str, ...] = ()
    """What is left out because the framework has it not."""


def framework_taken(given: str | None) -> str | None:
    """The framework that a name means: itself, or the one that tables of measured runs have for it."""
    if given is None or given in framework_names():
        return given
    from steptime.plan.framework_names import framework_called

    return framework_called(given) or given


def no_framework(given: str) -> UserError:
    """The error for a name that no framework has; a name that leaves it open is told what there is."""
    from steptime.plan.framework_names import left_open

    return unknown_framework(given, left_open(given))


def renamed(given: str | None) -> tuple[str, ...]:
    """A note where a name means a framework of another name: the runs that stand behind it, and why it is taken.

    >>> renamed("torchtitan"), renamed("Megatron-Core"), renamed(None)
    ((), (), ())
    """
    taken = framework_taken(given)
    if given is None or taken is None or bare_name(given) == bare_name(taken):
        return ()
    runs = framework_table()["framework"].get(taken, {}).get("runs")
    behind = "" if runs is None else f", fitted to {counted(runs, 'run')}"
    from steptime.plan.framework_names import why_called

    why = why_called(given)
    return (f"framework {given} was taken as {taken}{behind}{f': {why}' if why else ''}; {OTHERS}",)


def read_as(framework: str, plan: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on how a recomputation was read that frameworks mean differently.

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
    """The ZeRO stage of a framework on a mesh; without replicas no higher than that of a framework without habits.

    Where there are no replicas all stages are one, but for experts, which tensor ranks may replicate: what does not
    share out the states of two replicas does not share out theirs.

    >>> stage_unless_given("torchtitan", {"dp": 8, "pp": 1}), stage_unless_given("torchtitan", {"dp": 1, "tp": 8})
    (3, 1)
    >>> stage_unless_given("ddp", {"dp": 2, "tp": 8}), stage_unless_given("ddp", {"dp": 1, "tp": 8})
    (0, 0)
    """
    habits = habits_of(framework)
    shared = degrees.get("dp", 1) * degrees.get("cp", 1) > 1
    zero = habits.zero_with(degrees.get("pp", 1))
    return zero if shared else min(zero, Habits().zero)


def shard_unless_given(framework: str | None, degrees: Mapping[str, int], node: int) -> int:
    """Ranks among which a framework shares out where neither they nor a ZeRO stage are given; 0: all.

    PyTorch's own FSDP, which a framework's name may stand for, shards over all.

    Args:
        framework: its name as given.
        degrees: of the mesh.
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
    """Ranks among which one node shares out, where the ranks are several whole nodes of so many; 0: all.

    >>> shards_within_node(64, 8), shards_within_node(8, 8), shards_within_node(12, 8)
    (8, 0, 0)
    """
    return node if ranks > node and ranks % node == 0 else 0


def scope_of(
    framework: str, space: Space, strategies: Strategies, constraints: Sequence[Constraint], asked: str,
    within: int = 0, experts: bool = False,
) -> Scope:  # fmt: skip
    """The plans of a search that a framework has, and those that the user asks for all the same.

    Args:
        framework: its name.
        space: candidates of all frameworks, with what the user fixes.
        strategies: strategies that are searched, each with constraints of its own.
        constraints: what the user fixes or bounds.
        asked: the strategy that the user named, ``auto`` for none.
        within: ranks of a node, where the job has several; shards within it are tried if the framework has them.
        experts: whether the model has experts.
    """
    habits = habits_of(framework)
    wished = {c.column for c in constraints if _asks(c)} | OF_STRATEGY.get(asked, frozenset())
    lacking = [axis for axis in MODEL_AXES if axis not in habits.axes and axis not in wished]
    names = [name for name in strategies if name != "context" or "cp" not in lacking]
    narrowed = space.fixed({"ep": 1}) if "ep" in lacking else space
    left_out = [f"no {', '.join(lacking)}"] if lacking else []
    notes: tuple[str, ...] = ()
    if isinstance(narrowed, CorrectedSpace):
        usual, narrowed = narrowed, _accustomed(narrowed, habits, constraints, within=within, experts=experts)
        left_out += [] if narrowed.zero == usual.zero else [_stages(narrowed, pipelines="pp" not in lacking)]
        if framework not in (GENERIC, IDEAL.name):
            narrowed, notes = replace(narrowed, launched=True), (f"{framework}: {PLACED}",)
    alone = tuple(Constraint(column=axis, relation="<=", value=1) for axis in lacking if axis != "ep")
    others = (f"{framework}: {', '.join(left_out)}; other plans are tried only if --fix asks for one",)
    return Scope(
        space=narrowed, strategies={name: strategies[name] for name in names}, constraints=(*constraints, *alone),
        notes=(*(others if left_out else ()), *notes),
    )  # fmt: skip


def _accustomed(
    space: CorrectedSpace, habits: Habits, constraints: Sequence[Constraint], *, within: int, experts: bool
) -> CorrectedSpace:
    """The space with the ZeRO stages, shards and recomputed parts of a framework, where the user fixes none."""
    fixed = {c.column for c in constraints}
    if not any(c.column == "zero" and c.relation == "=" for c in constraints):
        space = space.accustomed(habits)
        if habits.within_node and within and "shard" not in fixed:
            space = replace(space, shard=(0, within))
    parts = habits.expert_parts if experts else habits.parts
    if parts and not fixed & {"recompute", "recompute_every"}:
        space = space.with_parts(parts)
    return space


def _asks(constraint: Constraint) -> bool:
    """Whether a constraint asks for more than one rank of an axis."""
    least = constraint.value + (constraint.relation == ">")
    return constraint.relation in ("=", ">=", ">") and least > 1


def _stages(space: CorrectedSpace, *, pipelines: bool) -> str:
    plain, piped = (" and ".join(map(str, stages)) for stages in (space.zero, space.piped_zero))
    return f"only ZeRO-{plain}" if plain == piped or not pipelines else f"only ZeRO-{plain} ({piped} with a pipeline)"


def fixed_values(constraints: Sequence[Constraint]) -> dict[str, Any]:
    """Columns that may have one value only."""
    return {c.column: c.value for c in constraints if c.relation == "="}
