"""A small fake of the API, so that these tests see the surface and nothing below it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steptime.errors import PlanError
from steptime.estimate.result import Detail, Estimate, Provenance
from steptime.search.planner import PlanResult, Stop
from steptime.terms import Terms

GIB = 2.0**30


PLAN = {
    "strategy": "1d", "dp": 4, "tp": 8, "tp2": 1, "cp": 1, "pp": 64, "vpp": 1, "ep": 1, "micro_batch": 1,
    "placement": {"tp": 8, "pp": 1, "dp": 1},
}  # fmt: skip
PROVENANCE = Provenance(
    steptime_version="0", mode="corrected", model="toy", model_source="a paper", cluster="box",
    device="b200", weakest_kind="assumed",
    constants={
        "matrix_efficiency": {"value": 0.7, "source": "a guess [sic]", "kind": "assumed"},
        "memory_Bps": {"value": 8e12, "source": "a sheet", "kind": "datasheet"},
    },
    assumptions=("routing is balanced",),
)  # fmt: skip
TIME = {
    "compute/forward/fc1/matmul_flops": 6.0,
    "compute/forward/fc2/tiny_s": 0.01,
    "compute/forward/norm/tiny_s": 0.01,
    "tp_comm/forward/fc2/ring_reduce_scatter_s": 1.98,
    "bubble/bubble_s": 2.0,
}
DETAILS = (
    Detail(
        path="tp_comm/forward/fc2/ring_reduce_scatter_s", function="collective.ring_all_gather_s", value=1.98,
        arguments={"size_bytes": 1e9, "ranks": 8, "inside": 8},
    ),
    Detail(
        path="compute/forward/fc1/matmul_flops", function="matmul.matmul_flops", value=48.0,
        arguments={"m": 2, "n": 3, "k": 4, "accumulate": 1},
    ),
)  # fmt: skip


def make_estimate(**changes: Any) -> Estimate:
    values: dict[str, Any] = {
        "step_time_s": 10.0, "step_time_bracket_s": (8.0, 12.5), "step_time_band_s": None, "mfu": 0.4567, "hfu": 0.5,
        "tokens_per_s_per_gpu": 1234.0, "samples_per_s": 409.6, "model_flops": 5e19, "time": Terms(TIME),
        "overlapped": Terms({"dp_comm/ring_all_gather_s": 0.5}), "peak_memory_bytes": 60 * GIB,
        "memory": Terms({"weights": 20 * GIB, "optimizer": 30 * GIB, "activations": 10 * GIB}),
        "memory_capacity_bytes": 80 * GIB, "oom_probability": 0.0, "feasible": True, "reasons": (),
        "bottleneck": "compute 60 %", "plan": PLAN, "provenance": PROVENANCE, "what_if": {"matrix_flops_x2": 7.0},
        "workload": {"gpus": 2048, "global_batch": 4096, "seq_len": 2048, "dtype": "bf16", "optimizer": "adam"},
        "details": DETAILS,
    }  # fmt: skip
    return Estimate(**(values | changes))


def make_plan_result(**changes: Any) -> PlanResult:
    best = make_estimate()
    values: dict[str, Any] = {
        "candidates": 1000,
        "feasible": 400,
        "reasons": {"memory": 500, "heads % tp": 300},
        "stop": Stop(reason="exhausted", proof="every candidate was costed", elapsed_cpu_s=0.25),
        "plans": (best, make_estimate(step_time_s=11.0)),
        "pareto": (
            {"step_time_s": 10.0, "peak_memory_bytes": 60 * GIB, "plan": best.plan},
            {"step_time_s": 11.0, "peak_memory_bytes": 50 * GIB, "plan": best.plan},
        ),
        "nearest": None,
    }
    return PlanResult(**(values | changes))


@dataclass(frozen=True)
class FakeLedger:
    name: str = "toy"
    family: str = "gpt"
    source: str = "a paper"
    parameters: Terms = dataclasses.field(default_factory=lambda: Terms({"embedding": 1e6, "layers/mlp": 3e6}))
    flops: Terms = dataclasses.field(default_factory=lambda: Terms({"layers/mlp": 6e9}))
    bytes: Terms = dataclasses.field(default_factory=lambda: Terms({"weights": 8e6}))
    notes: tuple[str, ...] = ("tied embeddings",)
    sample: str = "sequence"
    samples: int = 1
    activations: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"layer_input": 1e6, "layer_inputs": 2e6, "kept": 3e6}
    )
    zero: tuple[Any, ...] = ()
    recomputation: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"none": 3.0})

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "name": self.name, "parameters": dict(self.parameters)}


@dataclass(frozen=True)
class FakeDifference:
    plan: Mapping[str, Any]
    time: Mapping[str, Any]
    memory: Mapping[str, Any]
    headline: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **dataclasses.asdict(self)}


class FakeApi(types.ModuleType):
    """Records how it is called; answers with what a test put into it."""

    def __init__(self) -> None:
        super().__init__("steptime.api")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.estimate_result = make_estimate()
        self.plan_result = make_plan_result()
        self.raises: BaseException | None = None

    def _called(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.calls.append((name, args, given))
        if self.raises is not None:
            raise self.raises

    def estimate(self, model: str, cluster: str | None, **given: Any) -> Estimate:
        self._called("estimate", (model, cluster), given)
        if given.get("plan", {}).get("tp") == 7:
            raise PlanError("tp 7 does not divide 160 heads")
        return self.estimate_result

    def ledger(self, model: str, **given: Any) -> FakeLedger:
        self._called("ledger", (model,), given)
        return FakeLedger()

    def plan(self, model: str, cluster: str, **given: Any) -> PlanResult:
        self._called("plan", (model, cluster), given)
        given["progress"](1, 2)
        return self.plan_result

    def diff(self, a: Estimate, b: Estimate) -> FakeDifference:
        self._called("diff", (a, b), {})
        paths = dict.fromkeys((*a.time, *b.time))
        return FakeDifference(
            plan={key: [a.plan.get(key), b.plan.get(key)] for key in a.plan},
            time={path: [a.time.get(path), b.time.get(path)] for path in paths},
            memory={path: [a.memory[path], b.memory[path]] for path in a.memory},
            headline={"step_time_s": [a.step_time_s, b.step_time_s], "mfu": [a.mfu, b.mfu]},
        )


Run = Callable[..., Any]
