"""Random models, jobs, machines and plans for the properties of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from steptime.estimate.evaluate import Evaluation, evaluate
from steptime.estimate.machine import Machine
from steptime.model.spec import ModelSpec
from steptime.num import divisors
from steptime.options import choices_of
from steptime.plan.framework import COPIES, IDEAL, Framework
from steptime.plan.job import OPTIMIZERS, PRECISIONS, Job
from steptime.plan.plans import COLUMNS, RECOMPUTE_CODES, Plans, broken_rules
from steptime.plan.strategies import CORRECTED, Method, Strategy
from steptime_lab.published.rows import PUBLISHED
from suites import examples

ENGINE = settings(max_examples=examples(100), derandomize=True)
NAMES = ("1d", "context", "2d")
PLAIN = ("bf16", "fp32", "fp8")
QUANTISED = ("fp8-te", "fp8-tensorwise", "fp8-blockwise")

HARSH = Framework(
    name="harsh", matrix=1.3, narrow=0.7, attention=1.6, vector=1.9, host_s=3e-5, router_s=1e-3, tensor_links=1.2,
    context_links=0.8, expert_links=2.0, data_links=0.9, data_exposed=0.4, stage_links=1.4, stage_s=2e-4, optimizer=1.1,
    step_s=0.01, growth=0.01,
)  # fmt: skip
"""A framework whose every parameter is another than that of the ideal one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Method, strategy, job and machine of some plans."""

    method: Method
    strategy: Strategy
    job: Job
    machine: Machine

    def evaluate(self, plans: Plans, **changes: Any) -> Evaluation:
        """The plans, with another machine or job if given."""
        job, machine = changes.get("job", self.job), changes.get("machine", self.machine)
        return evaluate(self.method, self.strategy, job, machine, plans)


@st.composite
def models(draw: st.DrawFn, plain: bool = False) -> ModelSpec:
    """Dense transformers; ``plain`` ones have only what the published model knows."""
    heads = 2 ** draw(st.integers(2, 6))
    head_dim = draw(st.sampled_from([32, 64, 128]))
    yes = st.just(False) if plain else st.booleans()
    layers, window = draw(st.integers(1, 40)), draw(st.sampled_from([None] if plain else [None, 64, 512]))
    position = "none" if plain else draw(st.sampled_from(["rope", "learned", "alibi"]))
    seq_len = 2 ** draw(st.integers(9, 14))
    return ModelSpec(
        name="random", family="random", source="test", layers=layers, hidden=heads * head_dim, heads=heads,
        kv_heads=heads if plain else heads // 2 ** draw(st.integers(0, 2)), head_dim=head_dim,
        ffn_hidden=draw(st.sampled_from([2, 4])) * heads * head_dim, gated_mlp=draw(yes), activation="gelu",
        norm="layernorm" if plain else draw(st.sampled_from(["layernorm", "rmsnorm"])),
        norms_per_layer=2 if plain else draw(st.sampled_from([1, 2, 4])),
        qk_norm="none" if plain else draw(st.sampled_from(["none", "head", "full"])),
        causal=draw(yes), seq_len=seq_len, vocab=0 if plain else draw(st.sampled_from([0, 32000, 50257])),
        tied_embeddings=draw(yes), position=position, max_positions=seq_len if position == "learned" else 0,
        qkv_bias=draw(yes), out_bias=draw(yes), mlp_bias=draw(yes), norm_bias=draw(yes), final_norm=draw(yes),
        head_bias=draw(yes), embedding_norm=draw(yes), layer_scale=draw(yes), dropout=draw(yes),
        mlp_dropout=draw(yes), window=window, windowed_layers=draw(st.integers(0, layers)) if window else 0,
    )  # fmt: skip


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Rates within the range of real machines."""
    scale = st.floats(0.3, 3.0)
    matrix, slow = 4e14 * draw(scale), 3e10 * draw(scale)
    return Machine(
        matrix_flops_per_s=matrix, attention_flops_per_s=matrix * draw(st.sampled_from([0.5, 1.0])),
        vector_flops_per_s=4e13 * draw(scale), peak_flops_per_s=matrix * 1.4, memory_Bps=2e12 * draw(scale),
        memory_bytes=8e10, kernel_latency_s=5e-6 * draw(scale), fast_Bps=3e11 * draw(scale),
        fast_latency_s=2.5e-6 * draw(scale), slow_Bps=slow, lone_slow_Bps=slow * draw(st.sampled_from([0.5, 1.0])),
        slow_latency_s=5e-6 * draw(scale), host_Bps=2e10 * draw(scale), fast_domain=8,
    )  # fmt: skip


@st.composite
def cases(
    draw: st.DrawFn, names: tuple[str, ...] = NAMES, methods: tuple[Method, ...] = (CORRECTED, PUBLISHED)
) -> Case:
    """A job of one mode and strategy."""
    method = draw(st.sampled_from(methods))
    model = draw(models(plain=method is PUBLISHED))
    attention = draw(st.sampled_from(["fused", "unfused"]))
    job = Job(
        model=model, gpus=1, global_batch=2 ** draw(st.integers(3, 9)), seq_len=model.seq_len,
        precision=PRECISIONS[draw(st.sampled_from(PLAIN if method is PUBLISHED else [*PLAIN, *QUANTISED]))],
        optimizer=OPTIMIZERS[draw(st.sampled_from(["adam", "sgd", "adam8bit"]))],
        attention=attention, overlap=frozenset(draw(st.sets(st.sampled_from(sorted(choices_of("overlap")))))),
        offload=frozenset(() if method is PUBLISHED else draw(st.sets(st.sampled_from(choices_of("offload"))))),
        exchange_once=draw(st.booleans()), separate_kernels=draw(st.booleans()),
        copied_parameters=draw(st.booleans()), complex_rope=draw(st.booleans()),
        triangular_softmax=draw(st.booleans()), one_pass_norms=draw(st.booleans()),
        asynchronous_tp=draw(st.booleans()),
        fused_copies=frozenset(draw(st.sets(st.sampled_from(COPIES)))),
        unfused_copies=frozenset(draw(st.sets(st.sampled_from(COPIES)))),
        framework=IDEAL if method is PUBLISHED else draw(st.sampled_from([IDEAL, HARSH])),
    )  # fmt: skip
    strategy = method.strategies[draw(st.sampled_from(names))]
    return Case(method=method, strategy=strategy, job=job, machine=draw(machines()))


@st.composite
def legal_plans(draw: st.DrawFn, case: Case) -> Plans:
    """One plan that breaks no rule, placed on domains of eight."""
    model, published = case.job.model, case.method is PUBLISHED
    columns: dict[str, int] = {
        axis: draw(st.sampled_from([1, 2, 4]), label=axis) for axis in (*case.strategy.tensor_axes, "dp")
    }
    stages = [n for n in divisors(model.layers) if n <= 16] if published else range(1, min(model.layers, 9) + 1)
    columns["pp"] = draw(st.sampled_from(stages), label="pp")
    share = -(-case.job.global_batch // columns["dp"])
    columns["micro_batch"] = draw(st.sampled_from([n for n in (1, 2, 4) if n <= share]), label="micro_batch")
    if case.strategy.name == "2d":
        columns["panels"] = draw(st.sampled_from([1, 4, 8]), label="panels")
    if not published:
        codes = st.sets(st.sampled_from(sorted(set(RECOMPUTE_CODES.values()))), max_size=3)
        columns["recompute"] = sum(draw(codes, label="recompute"))
        columns["zero"] = draw(st.sampled_from([0, 1] if columns["pp"] > 1 else [0, 1, 2, 3]), label="zero")
        columns["vpp"] = draw(st.sampled_from([1, 2]), label="vpp")
    room = 8
    for axis in (*case.strategy.tensor_axes, "dp", "pp"):
        columns[f"in_{axis}"] = draw(st.sampled_from([n for n in divisors(columns[axis]) if n <= room]))
        room //= columns[f"in_{axis}"]
    plans = Plans(**columns)
    if broken_rules(case.job, plans):
        plans = plans.with_columns({"vpp": 1})
    return plans


def stacked(plans: list[Plans]) -> Plans:
    """The plans as one block of arrays (float64, as the search has them)."""
    return Plans(**{name: np.array([float(getattr(p, name)) for p in plans]) for name in COLUMNS})


def close(a: float, b: float, tolerance: float = 1e-12) -> bool:
    """Equal within a relative tolerance."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-30)
