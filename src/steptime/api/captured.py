"""A captured module as the model of a job: what it needs in place of a specification, a mode, a space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.errors import PlanError, counted
from steptime.estimate.single import Setting
from steptime.model.captured import CapturedModel
from steptime.model.spec import ModelSpec
from steptime.plan.captured import CAPTURED
from steptime.plan.corrected_space import CorrectedSpace
from steptime.plan.job import Precision
from steptime.plan.plans import RECOMPUTE_CODES
from steptime.search.modes import Mode

CAPTURED_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": "bf16"}
"""Training recipe -> element type in which a module is captured for it."""

USUAL_DTYPE = "bf16"
"""Training recipe where none is given."""
CONVERTED = (
    f"dtype was not given: {USUAL_DTYPE} was taken, with fp32 weights beside for the optimiser; steptime profile and "
    "steptime fit take the module as it is made"
)
"""What a factory's module is planned in: most make it in fp32."""


def dtype_taken(model: str | CapturedModel, dtype: str | None) -> str:
    """The recipe as given; else that for which a module was captured, or the usual one."""
    if dtype is not None:
        return dtype
    captured = model.dtype if isinstance(model, CapturedModel) else USUAL_DTYPE
    return next((recipe for recipe, element in CAPTURED_DTYPES.items() if element == captured), USUAL_DTYPE)


def summary_of(model: CapturedModel) -> ModelSpec:
    """The few facts of a specification that the rest of a job asks for; the operators are in the captured model."""
    return ModelSpec(
        name=model.name, family="captured", source=model.source, layers=model.layers, hidden=1, heads=max(model.ranks),
        kv_heads=max(model.ranks), head_dim=1, ffn_hidden=1, gated_mlp=False, activation="captured", norm="layernorm",
        causal=True, seq_len=model.seq_len, vocab=0, position="none",
        tied_embeddings=any(one.tied for one in (*model.head, *model.tail)),
    )  # fmt: skip


def mode_of(setting: Setting, mode: Mode) -> Mode:
    """The mode of a job: that of captured modules where it has one."""
    model = setting.job.captured
    if model is None:
        return mode
    every = (RECOMPUTE_CODES["none"], RECOMPUTE_CODES["full"])
    space = CorrectedSpace(
        zero=(1, 2, 3), sp=(int(model.sequence_parallel),), recompute=every if model.repeats else every[:1]
    )
    return Mode(method=CAPTURED, space=space, auto={"1d": ()}, attentions=("fused",))


def check_captured(model: CapturedModel, precision: Precision, *, seq: int | None, adapter: Any, mode: Mode) -> None:
    """Refuses what a captured module cannot be asked for.

    Raises:
        PlanError: names it, and says what to do instead.
    """
    if not mode.method.calibrated:
        raise PlanError(f"mode {mode.method.name} has no captured modules", hint="drop --mode")
    if adapter is not None:
        raise PlanError(f"{model.name} is captured as it is", hint="put the adapters into the module, and drop --lora")
    if seq not in (None, model.seq_len):
        raise PlanError(f"{model.name} was captured with {counted(model.seq_len, 'token')} a sample, not {seq}",
                        hint="capture it with inputs of that length")  # fmt: skip
    wanted = CAPTURED_DTYPES.get(precision.name)
    if wanted is None:
        raise PlanError(f"dtype {precision.name} is not modelled for captured modules",
                        hint=f"one of {', '.join(CAPTURED_DTYPES)}")  # fmt: skip
    if model.dtype != wanted:
        raise PlanError(f"{model.name} was captured in {model.dtype}, dtype {precision.name} needs {wanted}",
                        hint=f"captured_model(..., dtype={wanted!r}), or another --dtype")  # fmt: skip


def check_captured_choices(model: CapturedModel, chosen: Mapping[str, Any]) -> None:
    """Refuses choices that the module itself has made.

    Raises:
        PlanError: names it, and says what to do instead.
    """
    for name in ("attention_dtype", "document_length"):
        if name in chosen:
            raise PlanError(f"{name} {chosen[name]}: {model.name} is captured with an attention of its own",
                            hint="drop it")  # fmt: skip


def check_strategy(setting: Setting, strategy: str) -> None:
    """Refuses strategies that need to know what the operators mean.

    Raises:
        PlanError: it is not 1d.
    """
    if setting.job.captured is not None and strategy not in ("auto", "1d"):
        raise PlanError(f"strategy {strategy}: a captured module has data, pipeline and 1D tensor parallelism only",
                        hint="give --strategy 1d")  # fmt: skip
