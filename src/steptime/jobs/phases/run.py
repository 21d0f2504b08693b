"""A step of preference or reinforcement learning: phases of several models, in sequence on all devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from steptime.api.calls import asked_plan
from steptime.api.models import load_model
from steptime.api.request import choice, whole
from steptime.cost.generation import forward_share_s
from steptime.errors import FieldError, UserError
from steptime.estimate.result import SCHEMA_VERSION, Estimate
from steptime.estimate.single import estimate_plan
from steptime.jobs.phases.generation import Generation, Responses, generation_of, room_of
from steptime.jobs.phases.recipes import (
    CRITIC,
    FORWARD,
    GENERATE,
    LOGITS_OF_RESPONSES,
    POLICY,
    RECIPES,
    REWARD,
    TRAIN,
    Phase,
    Recipe,
)
from steptime.options import CHOICES
from steptime.plan.job import Job
from steptime.plan.memory_profile import log_probabilities_of
from steptime.plan.plans import MEMORY, NAMES
from steptime.terms import Terms

RULE, NONE, SAME = "rule", "none", "same"
HELD: Final = (
    "weights",
    "expert_weights",
    "gradients",
    "expert_gradients",
    "optimizer",
    "expert_optimizer",
    "preconditioners",
    "expert_preconditioners",
    "frozen_weights",
    "frozen_experts_weights",
)
"""Heads of memory terms that persist from step to step."""
MAX_COUNT: Final = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A phase with its time and memory."""

    name: str
    role: str
    model: str
    kind: str
    sequences: float
    time_s: float
    peak_bytes: float
    """Peak of a device, including all models that it holds."""
    reasons: tuple[str, ...]
    """Reasons why the phase is not feasible: it does not fit, or its estimate breaks a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStep:
    """A step as phases."""

    recipe: str
    title: str
    source: str
    sequences: int
    seq_len: int
    phases: tuple[Timed, ...]
    held: Mapping[str, float]
    """Bytes that a device holds throughout, by model."""
    step_time_s: float
    bracket_s: tuple[float, float]
    capacity_bytes: float
    generation: Generation | None
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> float:
        """Largest peak of the phases."""
        return max(phase.peak_bytes for phase in self.phases)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons of all phases."""
        found = {name for phase in self.phases for name in phase.reasons}
        return tuple(name for name in NAMES if name in found)

    @property
    def feasible(self) -> bool:
        """True if every phase fits and is legal."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in ("recipe", "title", "source", "sequences", "seq_len")},
            "phases": [asdict(phase) for phase in self.phases],
            "held_bytes": dict(self.held),
            "step_time_s": self.step_time_s,
            "bracket_s": list(self.bracket_s),
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "feasible": self.feasible,
            "reasons": list(self.reasons),
            "generation": None if self.generation is None else self.generation.to_json(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the user in addition to the job."""

    prompts: int = 64
    samples: int | None = None
    prompt_len: int = 512
    response_len: int = 512
    models: Mapping[str, str] | None = None
    """Role -> model, ``same`` (the policy's), ``rule`` (a reward without cost) or ``none``."""
    epochs: int = 1
    updates: int = 1
    """Optimiser steps per epoch."""
    offload_frozen: bool = False
    fused_loss: bool = False
    """True: log-probabilities are computed in chunks with the head (Liger), if the software has a fused loss."""
    generation_s: float | None = None
    generation_tp: int | None = None
    at_once: int | None = None


def rl_step(
    recipe: str,
    model: str,
    cluster: str,
    *,
    gpus: int,
    options: Options,
    plan: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RlStep:
    r"""Time and memory of a step of preference or reinforcement learning.

    The phases of :data:`steptime.jobs.phases.recipes.RECIPES` run in sequence on all devices. A training phase is an
    estimate of its model; a forward pass is the forward part of such an estimate; generation is a roofline, or a
    given time.

    Args:
        recipe: ``dpo``, ``orpo``, ``simpo``, ``kto``, ``ppo`` or ``grpo``.
        model: the policy.
        cluster: name or file.
        gpus: devices.
        options: prompts, lengths, the other models.
        plan: plan of the policy; the other models run under the same degrees.
        settings: settings of an estimate: ``dtype``, ``optimizer``, ``framework``, ``lora``, ...

    Raises:
        UserError: a name is unknown, a number is out of range, or an estimate refuses the job.
    """
    row = RECIPES[choice("recipe", recipe, tuple(RECIPES))]
    run = _Run(
        recipe=recipe,
        row=row,
        policy=model,
        cluster=cluster,
        gpus=gpus,
        options=options,
        plan=plan if plan and set(plan) - set(CHOICES) else {"dp": gpus, **(plan or {})},
        settings=settings,
    )
    return run.step()


@dataclass
class _Run:
    """Computation of one step."""

    recipe: str
    row: Recipe
    policy: str
    cluster: str
    gpus: int
    options: Options
    plan: Mapping[str, Any]
    settings: Mapping[str, Any]

    def step(self) -> RlStep:
        given = self.options
        self._check()
        samples = self.row.samples if given.samples is None else given.samples
        self.sequences = given.prompts * samples
        self.seq_len = given.prompt_len + given.response_len
        if self.sequences % given.updates:
            raise UserError(
                f"{self.sequences} sequences are no multiple of {given.updates} updates",
                hint="change --prompts, --samples or --updates",
            )
        phases = [phase for phase in self.row.phases if self._model_of(phase.role) not in (RULE, NONE)]
        self.estimates = {key: self._estimate(*key) for key in dict.fromkeys(map(self._key, phases))}
        # If a model scores and is trained, the training phase comes last and determines the held memory.
        held = {phase.role: self._held(phase) for phase in phases}
        self.generation: Generation | None = None
        timed = [self._timed(phase, held) for phase in phases]
        total = sum(each.time_s for each in timed)
        rest = total - sum(each.time_s for each in timed if each.kind == TRAIN)
        trains = [(self.estimates[self._key(phase)], self._times(phase)) for phase in phases if phase.kind == TRAIN]
        low, high = (rest + sum(e.step_time_bracket_s[n] * times for e, times in trains) for n in (0, 1))
        return RlStep(
            recipe=self.recipe,
            title=self.row.title,
            source=self.row.source,
            sequences=self.sequences,
            seq_len=self.seq_len,
            phases=tuple(timed),
            held=held,
            step_time_s=total,
            bracket_s=(low, high),
            capacity_bytes=next(iter(self.estimates.values())).memory_capacity_bytes,
            generation=self.generation,
            notes=tuple(self._notes(phases)),
        )

    def _check(self) -> None:
        given = self.options
        for name in ("prompts", "prompt_len", "response_len", "epochs", "updates"):
            whole(name, getattr(given, name), 1, MAX_COUNT)
        if given.samples is not None and self.row.fixed:
            raise FieldError("", "samples", f"{self.recipe} has {self.row.samples} sequences a prompt", hint="drop it")
        if given.samples is not None:
            whole("samples", given.samples, 1, MAX_COUNT)
        generates = any(phase.kind == GENERATE for phase in self.row.phases)
        for name in () if generates else ("generation_s", "generation_tp", "at_once"):
            if getattr(given, name) is not None:
                raise FieldError("", name, f"{self.recipe} generates nothing", hint="drop it, or take ppo or grpo")
        if given.generation_s is not None and not 0 <= given.generation_s < 1e9:
            raise FieldError("", "generation_s", f"{given.generation_s:g} s is out of range", hint="0 or more")
        for role in given.models or {}:
            if role not in self.row.roles:
                known = ", ".join(each for each in self.row.roles if each != POLICY) or "none but the policy"
                raise FieldError("", role, f"{self.recipe} has no {role}", hint=f"it has {known}")
        if self._model_of(CRITIC) in (RULE, NONE):
            raise FieldError("", CRITIC, "a critic is a model", hint="--critic same or a model; grpo has none")

    def _model_of(self, role: str) -> str:
        given = (self.options.models or {}).get(role, SAME)
        if given == RULE and role != REWARD:
            raise FieldError("", role, f"a {role} is a model", hint="rule is for --reward")
        return self.policy if given == SAME or role == POLICY else given

    def _times(self, phase: Phase) -> int:
        return self.options.epochs * self.options.updates

    def _key(self, phase: Phase) -> tuple[str, int]:
        """Role and number of sequences of a phase: all of the step for scoring, one update's for training."""
        return phase.role, self.sequences // (1 if phase.kind == FORWARD else self.options.updates)

    def _estimate(self, role: str, sequences: int) -> Estimate:
        """Estimate of a training step of a model; a forward pass without gradients is a part of it."""
        settings = {**self.settings} if role == POLICY else {k: v for k, v in self.settings.items() if k != "lora"}
        asked = asked_plan(
            self._model_of(role),
            self.cluster,
            gpus=self.gpus,
            global_batch=sequences,
            seq=self.seq_len,
            plan=self.plan,
            **settings,
        )
        setting = replace(asked.setting, job=self._of_trainer(asked.setting.job))
        return estimate_plan(setting, asked.strategy, asked.plans, explain=True)

    def _of_trainer(self, job: Job) -> Job:
        """The job with the loss of the recipe's trainer in place of the supervised loss."""
        if job.memory.name in LOGITS_OF_RESPONSES.get(self.recipe, ()):
            job = replace(job, answered_share=self.options.response_len / self.seq_len)
        memory = job.memory if self.options.fused_loss else log_probabilities_of(job.memory)
        self.whole_logits = job.memory.fused_head and not memory.fused_head
        return replace(job, memory=memory)

    def _trained(self, role: str) -> bool:
        return any(phase.role == role and phase.kind == TRAIN for phase in self.row.phases)

    def _held(self, phase: Phase) -> float:
        """Bytes of a device that the model of a phase holds throughout the step."""
        memory = self.estimates[self._key(phase)].memory
        kept = HELD if self._trained(phase.role) else ("weights", "expert_weights")
        return sum(size for path, size in memory.items() if path.partition("/")[0] in kept)

    def _timed(self, phase: Phase, held: Mapping[str, float]) -> Timed:
        found, resident = self.estimates[self._key(phase)], self._resident(phase, held)
        if phase.kind == TRAIN:
            time_s = found.step_time_s * self._times(phase)
            extra = found.peak_memory_bytes - held[phase.role]
        elif phase.kind == FORWARD:
            time_s = forward_s(found.time) * phase.share
            extra = forward_bytes(found)
        else:
            time_s, extra = self._generate(found, resident)
        fails = set() if phase.kind == GENERATE else {*found.reasons} - {MEMORY}
        fails |= {MEMORY} if resident + extra > found.memory_capacity_bytes else set()
        return Timed(
            name=phase.name,
            role=phase.role,
            model=self._model_of(phase.role),
            kind=phase.kind,
            sequences=self.sequences * phase.share,
            time_s=time_s,
            peak_bytes=resident + extra,
            reasons=tuple(name for name in NAMES if name in fails),
        )

    def _resident(self, phase: Phase, held: Mapping[str, float]) -> float:
        """Bytes that all models hold during a phase; offloaded frozen models hold none in other models' phases."""
        away = self.options.offload_frozen
        return sum(size for role, size in held.items() if role == phase.role or self._trained(role) or not away)

    def _generate(self, policy: Estimate, resident: float) -> tuple[float, float]:
        """Time and memory of generation; a given time does not change the memory."""
        given, model = self.options, load_model(self.policy)
        tp, free = given.generation_tp or int(policy.plan.get("tp", 1)), policy.memory_capacity_bytes - resident
        asked = Responses(
            sequences=self.sequences, prompt=given.prompt_len, response=given.response_len, at_once=given.at_once
        )
        if given.generation_s is not None:
            room = room_of(model, asked, gpus=self.gpus, tp=tp, free_bytes=free)
            return given.generation_s, room.cache_bytes + room.weight_bytes
        self.generation = generation_of(model, self.cluster, asked, gpus=self.gpus, tp=tp, free_bytes=free)
        return self.generation.total_s, self.generation.cache_bytes + self.generation.weight_bytes

    def _notes(self, phases: list[Phase]) -> list[str]:
        out = ["phases run one after the other on all devices"]
        if any(phase.kind == GENERATE for phase in phases):
            given = self.options.generation_s is not None
            out.append(
                "the time of generation is given; its cache and its copy of the weights count in memory"
                if given
                else "generation is a roofline: all responses are equally long, no host time; its weights are a copy"
            )
        if self.whole_logits:
            out.append(
                "log-probabilities are made of whole logits; --fused-loss: in pieces with the head, as Liger's are"
            )
        if any(phase.kind == FORWARD for phase in phases):
            out.append("forward passes are the forward part of a training step under the same plan")
        return out


def forward_s(time: Terms) -> float:
    """Time of a forward pass: its rows, gathers of weights, messages between stages, its part of the bubble."""
    forward = sum(s for path, s in time.items() if "forward" in path.split("/"))
    backward = sum(s for path, s in time.items() if {"backward", "recompute"} & set(path.split("/")))
    bubble = sum(s for path, s in time.items() if path.startswith("bubble/"))
    other = sum(s for path, s in time.items() if path.startswith(("dp_comm/weights/", "overhead/")))
    other += sum(s for path, s in time.items() if path.startswith(("pp_comm/", "host/stages/"))) / 2
    return float(forward_share_s(forward, backward, bubble, other))


def forward_bytes(found: Estimate) -> float:
    """Memory of a forward pass without gradients, without the weights: activations of a layer, the largest tensors."""
    layers = max(float(found.plan["stage_layers"]["first"]), 1.0) if "stage_layers" in found.plan else 1.0
    kept = sum(size for path, size in found.memory.items() if path.startswith("activations/"))
    working = sum(size for path, size in found.memory.items() if path.startswith(("working/", "buffers/")))
    return float(kept / layers / max(int(found.plan.get("pp", 1)), 1) + working)
