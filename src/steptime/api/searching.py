"""A search as it is asked for, and what to ask for instead where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from steptime.api.accustomed import Scope, fixed_values, scope_of, shards_within_node
from steptime.api.captured import check_strategy, mode_of
from steptime.api.jobs import Request, check_model
from steptime.api.request import check_mode, constraints_of, oom_limit_of
from steptime.api.values import text
from steptime.errors import UserError
from steptime.estimate.machine import node_devices
from steptime.estimate.single import Setting
from steptime.plan.constraints import Constraint
from steptime.plan.legality import MEMORY, RISK
from steptime.search.advice import best_step_s, nearest_counts, why_empty
from steptime.search.modes import Mode
from steptime.search.result import PlanResult

OFFLOADS: Final = (frozenset({"optimizer"}), frozenset({"optimizer", "activations"}))
"""What may be kept in the memory of the host, the cheaper first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A job and the plans of it that are wanted."""

    request: Request
    gpus: int
    global_batch: int
    choices: Mapping[str, Any]
    """What holds for all candidates."""
    columns: Mapping[str, Any]
    """Degrees that may have one value only."""
    limit: Sequence[str]
    strategy: str

    def prepared(self) -> tuple[Setting, Scope]:
        """The job for the engine, and the plans that are tried.

        Raises:
            UserError: something in the input is wrong; the message says what to change.
        """
        setting = self.request.setting(self.gpus, self.global_batch, self.choices)
        chosen = mode_of(setting, self.request.mode)
        check_strategy(setting, text("strategy", self.strategy))
        constraints = constraints_of(self.columns, self.limit, setting.job.framework.name)
        given = {**self.choices, **fixed_values(constraints)}
        check_mode(given, chosen)
        check_model(setting.job.model, text("strategy", self.strategy), given)
        setting = replace(setting, oom_limit=oom_limit_of(self.limit, chosen))
        return setting, self._scope(setting, chosen, constraints)

    def _scope(self, setting: Setting, chosen: Mode, constraints: list[Constraint]) -> Scope:
        space, asked = chosen.space.fixed(fixed_values(constraints)), text("strategy", self.strategy)
        return scope_of(
            setting.job.framework.name, space, chosen.searched(asked), constraints, asked,
            within=shards_within_node(self.gpus, node_devices(setting.cluster)),
            experts=setting.job.model.experts is not None,
        )  # fmt: skip


def what_fits(search: Search, setting: Setting, scope: Scope, result: PlanResult) -> tuple[str, ...]:
    """Sentences on what else to ask for where nothing is feasible: each with the best step that it finds."""
    empty = () if result.candidates else why_empty(setting.job, scope.constraints)
    others = []
    kept_on_host = False
    for words, other in _alternatives(search, setting, scope, result):
        if kept_on_host and "offload" in words:
            continue
        time_s = _best_s(other)
        if time_s is not None:
            others.append(f"{words}: best step {time_s:.4g} s")
            kept_on_host |= "offload" in words
    counts = nearest_counts(setting, scope.space, scope.strategies, scope.constraints)
    return (*empty, *others, *_one_device(search, setting), *counts)


def _one_device(search: Search, setting: Setting) -> tuple[str, ...]:
    if search.gpus > 1 or setting.job.captured is not None or not search.request.mode.method.calibrated:
        return ()
    fit = f"steptime fit {search.request.model} --device {setting.cluster.device.name} --batch {search.global_batch}"
    return (f"{fit} weighs what one device can do: adapters, 8-bit states, the host's memory",)


def _alternatives(search: Search, setting: Setting, scope: Scope, result: PlanResult) -> Iterator[tuple[str, Search]]:
    """The same search with one thing changed, and the words for it."""
    for key, value in search.columns.items():
        rest = {name: one for name, one in search.columns.items() if name != key}
        yield f"without --fix {key}={value} plans fit", replace(search, columns=rest)
    for key in search.choices:
        rest = {name: one for name, one in search.choices.items() if name != key}
        yield f"without --fix {key} plans fit", replace(search, choices=rest)
    for number, bound in enumerate(search.limit):
        bounds = [*search.limit[:number], *search.limit[number + 1 :]]
        yield f"without --limit '{bound}' plans fit", replace(search, limit=bounds)
    if search.global_batch < search.gpus and result.reasons.get("batch"):
        per_device = f"a {setting.job.sample} per device"
        yield f"--global-batch {search.gpus} fits, {per_device}", replace(search, global_batch=search.gpus)
    if (result.reasons.get(MEMORY) or result.reasons.get(RISK)) and search.request.mode.method.calibrated:
        yield from _more_room(search, scope)


def _more_room(search: Search, scope: Scope) -> Iterator[tuple[str, Search]]:
    held = search.choices.get("offload", frozenset())
    for wanted in OFFLOADS:
        if not wanted <= held:
            both = {**search.choices, "offload": wanted | held}
            words = f"--fix offload={','.join(sorted(wanted | held, reverse=True))} fits, with {_kept(wanted | held)}"
            yield f"{words} in the host's memory", replace(search, choices=both)
    if scope.notes:
        generic = replace(search.request, framework=None)
        yield "--framework generic, which has every kind of plan, fits", replace(search, request=generic)


def _kept(offload: frozenset[str]) -> str:
    return " and ".join("the optimiser" if one == "optimizer" else one for one in sorted(offload, reverse=True))


def _best_s(search: Search) -> float | None:
    """Step time of the best plan; None where there is none, or the job cannot be had."""
    try:
        setting, scope = search.prepared()
    except UserError:
        return None
    return best_step_s(setting, setting.job.gpus, scope.space, scope.strategies, scope.constraints)
