"""The procedure by which engineers choose a parallel plan, question by question, and the exhaustive search.

Does the model fit one device; is that fast enough; does saving memory make it fit; how are the devices connected; does
traffic within operators fit the fast domain, and traffic between operators outside it; what do the other devices do.
Each answer has the numbers it rests on, the alternative that it beat, and a change that would reverse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from steptime.api.calls import asked_plan
from steptime.api.request import NameOrPath
from steptime.api.searches import plan
from steptime.errors import UserError, counted
from steptime.estimate.communication import collective_over
from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.explain import step_time_on
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.model.captured import CapturedModel
from steptime.search.planner import PlanResult
from steptime.units import format_bytes, format_seconds

FAR: Final = 256.0
"""Largest factor on the links between domains at which a decision is examined."""
HALVINGS: Final = 24
"""Bisection steps for the factor at which two plans take the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A common way of splitting a model that is chosen without a search."""

    name: str
    fix: Mapping[str, Any] = field(default_factory=dict)
    limit: tuple[str, ...] = ()
    """``{domain}``: devices of a fast domain; ``{beyond}``: one more."""


RECIPES: Final = (
    Recipe(name="data parallelism", fix={"tp": 1, "pp": 1, "cp": 1}, limit=("zero<=2",)),
    Recipe(name="sharded data parallelism (ZeRO-3, FSDP)", fix={"tp": 1, "pp": 1, "cp": 1, "zero": 3}),
    Recipe(
        name="tensor parallelism inside the domain", fix={"pp": 1, "cp": 1}, limit=("tp>=2", "tp<={domain}", "zero<=2")
    ),
    Recipe(
        name="tensor parallelism inside, a pipeline between", fix={"cp": 1}, limit=("pp>=2", "tp<={domain}", "zero<=2")
    ),
)
"""Recipes tried on all devices; the fastest that fits is the answer of the procedure."""
BEYOND: Final = Recipe(name="tensor parallelism beyond the domain", fix={"cp": 1}, limit=("tp>={beyond}",))
"""Recipe that is never an answer: it shows the cost of traffic within operators outside the domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """An alternative that an answer beat."""

    name: str
    step_time_s: float | None
    """Step time; None: it does not fit."""
    peak_memory_bytes: float | None
    plan: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One question of the procedure with its answer."""

    question: str
    answer: str
    numbers: Mapping[str, float]
    """Numbers that the answer rests on (SI)."""
    because: str
    beaten: tuple[Alternative, ...] = ()
    turns: str = ""
    """Change that would reverse the answer."""
    plan: Mapping[str, Any] | None = None
    """Plan of the answer."""
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """All questions, the plan at which they end, and the plan of the exhaustive search."""

    model: str
    cluster: str
    gpus: int
    decisions: tuple[Decision, ...]
    shortcut: Estimate | None
    """The plan at which the questions end; None: no recipe fits."""
    best: Estimate | None
    """The fastest plan of the whole space; None: none fits."""
    notes: tuple[str, ...] = ()

    @property
    def cost_of_shortcut(self) -> float | None:
        """Share by which the procedure's plan is slower than the best; None: one of them is missing."""
        if self.shortcut is None or self.best is None:
            return None
        return self.shortcut.step_time_s / self.best.step_time_s - 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        from dataclasses import asdict

        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "cluster": self.cluster,
            "gpus": self.gpus,
            "decisions": [asdict(each) for each in self.decisions],
            "shortcut": None if self.shortcut is None else self.shortcut.to_json(),
            "best": None if self.best is None else self.best.to_json(),
            "cost_of_shortcut": self.cost_of_shortcut,
            "notes": list(self.notes),
        }


def guide(
    model: NameOrPath | CapturedModel,
    cluster: NameOrPath,
    *,
    gpus: int,
    global_batch: int,
    steps: int | None = None,
    within_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    **job: Any,
) -> Guide:
    """Follow the decision procedure for a model on a number of devices.

    Args:
        model: as for :func:`steptime.api.plan`.
        cluster: as for :func:`steptime.api.plan`.
        gpus: available devices.
        global_batch: sequences of a step.
        steps: steps of the whole training, for the question whether it ends in time.
        within_s: seconds that the whole training may take.
        progress: as for :func:`steptime.api.plan`, of each search.
        job: the other arguments of :func:`steptime.api.plan` that describe the job: ``seq``, ``dtype``, ``optimizer``,
            ``framework``.

    Raises:
        UserError: something in the input is wrong; the message says what to change.
    """
    if (steps is None) != (within_s is None):
        raise UserError("steps and a time limit belong together", hint="give --steps and --within, or neither")
    if within_s is not None and not 0 < within_s < inf:
        raise UserError(
            f"a training within {format_seconds(within_s)}", hint="give a time above 0, as --within '30 days'"
        )
    walk = _Walk(model, cluster, gpus, global_batch, steps, within_s, progress, job)
    return walk.guide()


class _Walk:
    """State of the procedure: the decisions so far, with cached searches."""

    def __init__(
        self,
        model: Any,
        cluster: NameOrPath,
        gpus: int,
        global_batch: int,
        steps: int | None,
        within_s: float | None,
        progress: Callable[[int, int], None] | None,
        job: Mapping[str, Any],
    ) -> None:
        self.model, self.cluster, self.gpus, self.batch = model, cluster, gpus, global_batch
        self.steps, self.within_s, self.progress, self.job = steps, within_s, progress, job
        self.decisions: list[Decision] = []
        self.notes: tuple[str, ...] = ()
        self.whole = self.search(gpus, advise=True)
        first = self.whole.plans[0] if self.whole.plans else self.whole.nearest
        if first is None:
            raise UserError(f"no plan of {counted(gpus, 'device')} can run this job", hint="steptime plan says why")
        self.notes = self.whole.notes
        self.first = first
        self.machine = self.evaluation(first).machine
        self.domain = min(int(self.machine.fast_domain), gpus)

    # -- searches -------------------------------------------------------------------------------------------------

    def search(
        self, gpus: int, fix: Mapping[str, Any] | None = None, limit: Sequence[str] = (), *, advise: bool = False
    ) -> PlanResult:
        """The best plan of a number of devices under some constraints."""
        return plan(
            self.model,
            self.cluster,
            gpus=gpus,
            global_batch=self.batch,
            fix=dict(fix or {}),
            limit=tuple(limit),
            top=1,
            advise=advise,
            progress=self.progress,
            **self.job,
        )

    def of_recipe(self, recipe: Recipe, gpus: int) -> PlanResult | None:
        """The search under a recipe; None: no plan of the recipe exists."""
        limit = [text.format(domain=self.domain, beyond=self.domain + 1) for text in recipe.limit]
        try:
            return self.search(gpus, recipe.fix, limit)
        except UserError:
            return None

    def evaluation(self, found: Estimate) -> Evaluation:
        """The evaluation of an estimate's plan, to time it with other links."""
        asked = asked_plan(
            self.model,
            self.cluster,
            gpus=int(found.workload["gpus"]),
            global_batch=self.batch,
            plan=found.plan,
            **self.job,
        )
        setting = asked.setting
        return evaluate(setting.method, asked.strategy, setting.job, setting.machine, asked.plans)

    def crossing(self, one: Estimate, other: Estimate) -> float | None:
        """Factor on the links between domains at which two plans take the same time; None: above :data:`FAR`."""
        pair = [self.evaluation(each) for each in (one, other)]

        def lead(factor: float) -> float:
            times = [step_time_on(e, e.machine.faster(slow_Bps=factor, lone_slow_Bps=factor)) for e in pair]
            return times[1] - times[0]

        for end in (1 / FAR, FAR):
            if lead(1.0) * lead(end) < 0:
                near, far = 1.0, end
                for _ in range(HALVINGS):
                    middle = (near * far) ** 0.5
                    near, far = (middle, far) if lead(middle) * lead(1.0) > 0 else (near, middle)
                return far
        return None

    # -- questions ------------------------------------------------------------------------------------------------

    def guide(self) -> Guide:
        """All questions in order."""
        single = self._fits_one_device()
        shortcut = self._fast_enough(single) if single is not None else self._several_devices()
        best = self.whole.plans[0] if self.whole.plans else None
        self._end(shortcut, best)
        if best is not None and self.steps is not None:
            self._ends_in_time(best)
        return Guide(
            model=self.first.provenance.model,
            cluster=self.first.provenance.cluster,
            gpus=self.gpus,
            decisions=tuple(self.decisions),
            shortcut=shortcut,
            best=best,
            notes=self.notes,
        )

    def _fits_one_device(self) -> Estimate | None:
        """The plan on one device, plain or with memory savings; None: it does not fit."""
        plainly = self.search(1, {"recompute": "none", "micro_batch": 1})
        found = plainly.plans[0] if plainly.plans else plainly.nearest
        if found is None:
            return None
        room = found.memory_capacity_bytes
        need = found.peak_memory_bytes
        fits = bool(plainly.plans)
        self.decisions.append(
            Decision(
                question="Does the model fit one device?",
                answer="yes" if fits else "no",
                numbers={"peak_memory_bytes": need, "memory_capacity_bytes": room, "step_time_s": found.step_time_s},
                because=f"one sample at a time, nothing recomputed: {format_bytes(need)} of {format_bytes(room)}",
                turns=_memory_turns(need, room),
                plan=found.plan,
                step_time_s=found.step_time_s,
            )
        )
        if fits:
            return self.search(1).plans[0]
        return self._saving_memory(need)

    def _saving_memory(self, before: float) -> Estimate | None:
        """The plan on one device with recomputation, accumulation or an offloaded optimiser."""
        saving = self.search(1)
        swapping = self._swapping()
        found = saving.plans[0] if saving.plans else saving.nearest
        if found is None:
            return None
        fits, room = bool(saving.plans), found.memory_capacity_bytes
        self.decisions.append(
            Decision(
                question="Do recomputation and small micro-batches make it fit?",
                answer="yes" if fits else "no",
                numbers={
                    "peak_memory_bytes": found.peak_memory_bytes,
                    "memory_capacity_bytes": room,
                    "saved_bytes": before - found.peak_memory_bytes,
                    "step_time_s": found.step_time_s,
                },
                because=f"recompute {found.plan['recompute']}, micro-batches of {found.plan['micro_batch']}: "
                f"{format_bytes(found.peak_memory_bytes)} of {format_bytes(room)}",
                beaten=(swapping,),
                turns=_memory_turns(found.peak_memory_bytes, room),
                plan=found.plan,
                step_time_s=found.step_time_s,
            )
        )
        return found if fits else None

    def _swapping(self) -> Alternative:
        """The alternative with the optimiser on the host, which often fits and is rarely worth its time."""
        name = "optimiser on the host (swapping)"
        try:
            found = self.search(1, {"offload": "optimizer"})
        except UserError:
            return Alternative(name=name, step_time_s=None, peak_memory_bytes=None, plan=None)
        return _alternative(name, found)

    def _fast_enough(self, single: Estimate) -> Estimate:
        """The plan on one device if it is fast enough, else on the fewest replicas that are."""
        found, gpus = single, 1
        while gpus < self.gpus and not self._in_time(found):
            gpus = min(2 * gpus, self.gpus)
            more = self.of_recipe(RECIPES[0], gpus)
            if more is not None and more.plans:
                found = more.plans[0]
        self.decisions.append(
            Decision(
                question="Is the completion time of one device acceptable?",
                answer="yes" if gpus == 1 else "no",
                numbers={"step_time_s": single.step_time_s, **self._completion(single)},
                because=self._completion_text(single),
                plan=single.plan,
                step_time_s=single.step_time_s,
                turns=self._deadline_turns(single),
            )
        )
        if gpus == 1:
            return single
        efficiency = single.step_time_s / (gpus * found.step_time_s)
        self.decisions.append(
            Decision(
                question="How many replicas until it is?",
                answer=counted(gpus, "replica"),
                numbers={
                    "gpus": float(gpus),
                    "step_time_s": found.step_time_s,
                    "efficiency": efficiency,
                    **self._completion(found),
                },
                because=f"data parallelism keeps {100 * efficiency:.0f} % of {counted(gpus, 'device')}; "
                + self._completion_text(found),
                beaten=tuple(self._others(RECIPES[1:], gpus)),
                plan=found.plan,
                step_time_s=found.step_time_s,
                turns=self._turned(found, RECIPES[2], gpus),
            )
        )
        return found

    def _several_devices(self) -> Estimate | None:
        """The plan with intra- and inter-operator parallelism on several devices."""
        self._connected()
        self._fits_a_node()
        return self._inside_and_outside()

    def _connected(self) -> None:
        machine, size = self.machine, float(self.evaluation(self.first).sizes.boundary_bytes)
        inside = self.domain
        near_s = float(collective_over("all_reduce", machine, size, max(inside, 2), max(inside, 2)))
        across = max(2 * inside, 2)
        far_s = float(collective_over("all_reduce", machine, size, across, inside)) if self.gpus > inside else 0.0
        numbers = {
            "fast_domain": float(inside),
            "fast_Bps": float(machine.fast_Bps),
            "slow_Bps": float(machine.slow_link_Bps(inside)),
            "all_reduce_inside_s": near_s,
        }
        text = (
            "a device alone shares links with no other"
            if inside == 1
            else f"{counted(inside, 'device')} share links of {format_bytes(machine.fast_Bps)}/s"
        )
        if far_s:
            numbers["all_reduce_across_s"] = far_s
            text += (
                f"; to other domains {format_bytes(float(machine.slow_link_Bps(inside)))}/s a device. Activations of "
                f"one layer ({format_bytes(size)}) are summed in {format_seconds(near_s)} inside, "
                f"{format_seconds(far_s)} across two domains"
            )
        self.decisions.append(
            Decision(
                question="How are the devices connected?",
                answer=f"domains of {inside}",
                numbers=numbers,
                because=text,
            )
        )

    def _fits_a_node(self) -> None:
        """Decide on the least number of devices (a power of two) on which a plan fits."""
        gpus = min(2, self.gpus)
        found = self._try(gpus)
        while not (found is not None and found.plans) and gpus < self.gpus:
            gpus = min(2 * gpus, self.gpus)
            found = self._try(gpus)
        first = None if found is None else found.plans[0] if found.plans else found.nearest
        if found is None or first is None:
            return
        inside, devices = bool(found.plans) and gpus <= self.domain, counted(gpus, "device")
        text = (
            f"it fits from {devices} on" if found.plans else f"not even {devices} {'holds' if gpus == 1 else 'hold'} it"
        )
        need, room = first.peak_memory_bytes, first.memory_capacity_bytes
        domain = None if inside else self._try(self.domain)
        lacking = first if domain is None or domain.nearest is None else domain.nearest
        self.decisions.append(
            Decision(
                question="Does one fast domain hold it?",
                answer="yes" if inside else "no",
                numbers={"gpus": float(gpus), "peak_memory_bytes": need, "memory_capacity_bytes": room},
                because=f"{text}: {format_bytes(need)} of {format_bytes(room)}",
                turns=_memory_turns(lacking.peak_memory_bytes, room),
                plan=first.plan,
                step_time_s=first.step_time_s,
            )
        )

    def _try(self, gpus: int) -> PlanResult | None:
        try:
            return self.search(gpus)
        except UserError:
            return None

    def _inside_and_outside(self) -> Estimate | None:
        """The fastest recipe on all devices, with the other recipes as alternatives."""
        tried = [(recipe, self.of_recipe(recipe, self.gpus)) for recipe in RECIPES]
        fitting = [(recipe, found.plans[0]) for recipe, found in tried if found is not None and found.plans]
        if not fitting:
            return None
        chosen, best = min(fitting, key=lambda pair: pair[1].step_time_s)
        rest = [(recipe, each) for recipe, each in fitting if recipe is not chosen]
        second = min(rest, key=lambda pair: pair[1].step_time_s, default=None)
        beyond = self.of_recipe(BEYOND, self.gpus) if self.gpus > self.domain else None
        beaten = [_alternative(recipe.name, found) for recipe, found in tried if recipe is not chosen]
        beaten += [_alternative(BEYOND.name, beyond)] if self.gpus > self.domain else []
        numbers = {f"{name}_s": value for name, value in best.time.rollup(1).items() if name.endswith("comm")}
        self.decisions.append(
            Decision(
                question="Does traffic within operators fit the fast domain, and traffic between them outside it?",
                answer=chosen.name,
                numbers={"step_time_s": best.step_time_s, **numbers},
                because=self._inside_text(best, beyond),
                beaten=tuple(beaten),
                plan=best.plan,
                step_time_s=best.step_time_s,
                turns="" if second is None else self._turns_text(best, second[0].name, second[1]),
            )
        )
        return best

    def _inside_text(self, best: Estimate, beyond: PlanResult | None) -> str:
        tp, inside = int(best.plan["tp"]), int(best.plan["placement"].get("tp", 1))
        text = f"tp {tp} lies inside a domain of {self.domain}" if tp <= inside else f"tp {tp} leaves the domain"
        if tp == 1:
            text = "no operator is split"
        if beyond is not None and beyond.plans:
            slower = beyond.plans[0].step_time_s / best.step_time_s
            text += f"; tensor groups beyond the domain take {slower:.2f} times as long"
        return text

    def _end(self, shortcut: Estimate | None, best: Estimate | None) -> None:
        if best is None:
            self.decisions.append(
                Decision(
                    question="What does the exhaustive search find?",
                    answer="nothing fits",
                    numbers={},
                    because=f"none of {self.whole.candidates:,} candidates fits {counted(self.gpus, 'device')}",
                    turns="; ".join(self.whole.advice),
                )
            )
            return
        cost = None if shortcut is None else shortcut.step_time_s / best.step_time_s - 1.0
        same = cost is not None and abs(cost) < 1e-9
        text = (
            "nothing that the questions know fits"
            if cost is None
            else ("the questions end at the best plan" if same else f"the questions cost {100 * cost:.1f} %")
        )
        self.decisions.append(
            Decision(
                question="What does the exhaustive search find?",
                answer="the same" if same else "a faster plan",
                numbers={
                    "step_time_s": best.step_time_s,
                    "candidates": float(self.whole.candidates),
                    **({} if cost is None else {"cost_of_shortcut": cost}),
                },
                because=f"it is the fastest of {self.whole.candidates:,} candidates; {text}",
                plan=best.plan,
                step_time_s=best.step_time_s,
            )
        )

    def _ends_in_time(self, best: Estimate) -> None:
        """Decide whether the fastest plan of all devices ends the training in time."""
        fits = self._in_time(best)
        self.decisions.append(
            Decision(
                question="Does the training end in time on all devices?",
                answer="yes" if fits else "no",
                numbers={"step_time_s": best.step_time_s, **self._completion(best)},
                because=self._completion_text(best),
                turns=self._deadline_turns(best),
                plan=best.plan,
                step_time_s=best.step_time_s,
            )
        )

    # -- texts ----------------------------------------------------------------------------------------------------

    def _others(self, recipes: Sequence[Recipe], gpus: int) -> list[Alternative]:
        return [_alternative(recipe.name, self.of_recipe(recipe, gpus)) for recipe in recipes]

    def _in_time(self, found: Estimate) -> bool:
        """True if the training ends in time; without a limit False, so that all devices are used."""
        return self.within_s is not None and self.steps is not None and found.step_time_s * self.steps <= self.within_s

    def _completion(self, found: Estimate) -> dict[str, float]:
        return {} if self.steps is None else {"completion_s": found.step_time_s * self.steps}

    def _completion_text(self, found: Estimate) -> str:
        if self.steps is None or self.within_s is None:
            return f"{format_seconds(found.step_time_s)} a step; no time limit was given, so all devices are used"
        return (
            f"{self.steps:,} steps of {format_seconds(found.step_time_s)} take "
            f"{days(found.step_time_s * self.steps)} of {days(self.within_s)}"
        )

    def _deadline_turns(self, found: Estimate) -> str:
        if self.steps is None or self.within_s is None:
            return ""
        return f"a limit of {days(found.step_time_s * self.steps)}"

    def _turned(self, found: Estimate, recipe: Recipe, gpus: int) -> str:
        other = self.of_recipe(recipe, gpus)
        return "" if other is None or not other.plans else self._turns_text(found, recipe.name, other.plans[0])

    def _turns_text(self, best: Estimate, name: str, other: Estimate) -> str:
        factor = self.crossing(best, other)
        if factor is None:
            return f"no speed of the links between domains makes {name} faster"
        return f"links between domains {factor:.2g} times as fast: then {name} takes the same"


def days(seconds: float) -> str:
    """A long time as text in days or hours.

    >>> days(86400 * 2.5), days(7200)
    ('2.5 days', '2 h')
    """
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else f"{seconds / 3600:.3g} h"


def _memory_turns(need: float, room: float) -> str:
    factor = f"{need / room:.2g}"
    return (
        f"a device with {factor} times the memory" if need > room else f"a device with less than {factor} of the memory"
    )


def _alternative(name: str, found: PlanResult | None) -> Alternative:
    first = None if found is None else found.plans[0] if found.plans else found.nearest
    fits = found is not None and bool(found.plans)
    return Alternative(
        name=name,
        step_time_s=first.step_time_s if fits and first is not None else None,
        peak_memory_bytes=None if first is None else first.peak_memory_bytes,
        plan=None if first is None else first.plan,
    )
