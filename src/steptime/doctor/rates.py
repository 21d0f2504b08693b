"""What a log calls FLOP/s, beside the prediction counted the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime.doctor.records import Compared, Log
from steptime.estimate.result import Estimate
from steptime.lab.measured.flops import TflopsDefinition, flops_per_token, forward_flops
from steptime.model.spec import ModelSpec

_FULL, _CAUSAL, _HARDWARE = TflopsDefinition.MODEL_FULL, TflopsDefinition.MODEL_CAUSAL, TflopsDefinition.HARDWARE
#: What the releases of a framework count; where they differ, what a log prints decides. torchtitan
#: (`get_num_flop_per_token`) counts all pairs of tokens; Megatron-LM, NeMo and MaxText did, and later halve them;
#: Megatron-LM of 2021 and Megatron-DeepSpeed add what is recomputed (arXiv 2104.04473, equation 3).
_COUNTED: Final[Mapping[str, tuple[TflopsDefinition, ...]]] = {
    "torchtitan": (_FULL,), "megatron": (_FULL, _CAUSAL, _HARDWARE), "nemo": (_FULL, _CAUSAL),
    "maxtext": (_FULL, _CAUSAL), "megatron-deepspeed": (_HARDWARE, _FULL, _CAUSAL),
}  # fmt: skip
_WORDS: Final = {
    _FULL: "with the full attention mask", _CAUSAL: "with half of the attention mask",
    _HARDWARE: "with what is recomputed and the full attention mask", TflopsDefinition.SIX_N: "as 6 per weight",
    TflopsDefinition.SIX_N_FULL: "as 6 per weight, and the full attention mask",
}  # fmt: skip
#: A printed rate is that of a definition if FLOPs per token differ by no more: padded vocabularies, norms, rounding.
_CLOSE: Final = 0.04


def rate_row(log: Log, step_s: float, e: Estimate | None, model: ModelSpec | None) -> Compared | None:
    """FLOP/s of one device as the log counts them; the prediction too, where it is known how the log counts.

    Args:
        log: the log.
        step_s: its step time.
        e: the prediction.
        model: model of the prediction.
    """
    if log.tflops_per_gpu is None:
        return None
    measured = log.tflops_per_gpu * 1e12
    if e is None or model is None or not all(e.workload.get(name) for name in ("gpus", "global_batch", "seq_len")):
        return Compared(name=NAME, unit="flops_per_s", measured=measured, predicted=None,
                        note="measured: as the log counts FLOPs")  # fmt: skip
    tokens, gpus = float(e.workload["global_batch"]) * e.workload["seq_len"], int(e.workload["gpus"])
    printed = measured * gpus * step_s / tokens
    parts, again = forward_flops(model, int(e.workload["seq_len"])), _recomputed(e)
    counts = {kind: flops_per_token(kind, parts, again) for kind in _COUNTED.get(log.framework, tuple(_WORDS))}
    kind = min(counts, key=lambda kind: abs(printed / counts[kind] - 1.0))
    if abs(printed / counts[kind] - 1.0) > _CLOSE:
        note = (
            f"measured: as the log counts FLOPs, {printed / 1e9:.3g} GFLOP per token; the predicted job has "
            f"{counts[kind] / 1e9:.3g} {_WORDS[kind]}: not compared, check model, sequence, batch and GPUs"
        )
        return Compared(name=NAME, unit="flops_per_s", measured=measured, predicted=None, note=note)
    predicted = counts[kind] * tokens / e.step_time_s / gpus
    return Compared(name=NAME, unit="flops_per_s", measured=measured, predicted=predicted,
                    note=f"both counted as the log does, {_WORDS[kind]}")  # fmt: skip


NAME: Final = "FLOP/s per GPU"


def _recomputed(e: Estimate) -> str:
    """Recomputation in the words of a definition of hardware FLOPs."""
    words = str(e.plan.get("recompute", "none"))
    return words if words == "full" else "attention" if "attention" in words.split("+") else "none"
