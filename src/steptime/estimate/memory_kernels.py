"""Fitted time models of operators that the memory bounds: which curve stands for which operator, and its shape.

The shapes are those of the measured rows that the curves were fitted to. A curve that was timed with the host's
launch is used without it: in a step the host runs ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from steptime.cost import elementwise, movement
from steptime.cost.memory_bound import memory_bound_s
from steptime.estimate.kernels import KernelModel, Models, Timed
from steptime.estimate.measured import LOOPED
from steptime.estimate.operators import Formula
from steptime.hardware.profile import Curve, Profile
from steptime.hardware.records import Device
from steptime.num import Num, where

MEMORY_BOUND: Final = Formula(memory_bound_s)
L2_BYTES: Final = float(4 * 2**20)
"""Last-level cache of a device whose datasheet does not give it."""
ONE_BLOCK: Final = 1024
"""Longest row that a block of a softmax kernel keeps in registers; longer rows are read again."""
GELU_FLOPS, DROPOUT_FLOPS, SOFTMAX_FLOPS = 12, 10, 4
"""Vector instructions per element of a GELU, a dropout and a softmax, as the fitted curves count them (none of the
gradient of a softmax)."""

Shape = Mapping[str, Num]
KERNEL, EAGER = "kernel", "eager"
#: Role -> curves that can play it, the best first: training kernels of a framework, then those of serving.
ROLES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "stream": (("elementwise", KERNEL), ("elementwise", EAGER)),
    "gate": (("activation", KERNEL), ("elementwise", KERNEL), ("elementwise", EAGER)),
    "rope": (("rope", KERNEL), ("elementwise", KERNEL), ("elementwise", EAGER)),
    "norm": (
        ("layernorm_pytorch", KERNEL), ("layernorm", EAGER), ("layernorm_torch_compile", KERNEL), ("layernorm", KERNEL),
    ),
    "norm_backward": (
        ("layernorm_bwd_pytorch", KERNEL), ("layernorm_bwd", EAGER), ("layernorm_bwd_torch_compile", KERNEL),
    ),
    "softmax": (("softmax", EAGER),),
    "softmax_backward": (("softmax_bwd", EAGER),),
    "dropout": (("dropout", EAGER),),
    "embedding": (("embedding", EAGER), ("embedding", KERNEL)),
}  # fmt: skip


def memory_models(device: Device, profile: Profile | None) -> dict[str, KernelModel]:
    """Models by role, for those roles that a profile has a curve for."""
    out: dict[str, KernelModel] = {}
    if profile is None:
        return out
    for role, choices in ROLES.items():
        curve = next((c for c in (profile.curve(f, "any", t) for f, t in choices) if c is not None), None)
        if curve is not None:
            out[role] = KernelModel(formula=MEMORY_BOUND, fixed=_fixed(device, curve), curve=curve)
    return out


def device_numbers(device: Device) -> dict[str, float]:
    """Datasheet numbers of :func:`steptime.cost.memory_bound.memory_bound_s`."""
    return {
        "memory_Bps": device.memory_Bps, "l2_bytes": float(device.l2_bytes or L2_BYTES),
        "vector_flops_per_s": device.peak_vector_flops_per_s,
    }  # fmt: skip


def _fixed(device: Device, curve: Curve) -> dict[str, float]:
    numbers = {**device_numbers(device), **curve.coefficients, "most_rows": most_rows(curve)}
    if curve.timer == EAGER:
        numbers |= {"floor_s": 0.0, "launch_s": min(numbers["launch_s"], device.kernel_latency_s)}
    return numbers


def most_rows(curve: Curve) -> float:
    """Rows up to which a curve was measured, and up to which each costs something of its own; none: all do."""
    most = curve.ranges["rows"][1] if "rows" in curve.ranges else 0.0
    return most if most > 0 else math.inf


def _call(moved: Num, rows: Num = 0.0, reread: Num = 0.0, flops: Num = 0.0) -> dict[str, Num]:
    return {"moved_bytes": moved, "rows": rows, "reread_bytes": reread, "vector_flops": flops}


def _layer_norm(s: Shape) -> dict[str, Num]:
    x, rows, width, size = s["elements"], s["rows"], s["width"], s["element_bytes"]
    return _call(elementwise.layer_norm_bytes(x, rows, width, size), rows, 0.0, elementwise.layer_norm_flops(x))


def _layer_norm_backward(s: Shape) -> dict[str, Num]:
    return _call(elementwise.layer_norm_backward_bytes(s["elements"], s["width"], s["element_bytes"]), s["rows"])


def _one_pass_layer_norm_backward(s: Shape) -> dict[str, Num]:
    x, rows, width, size = s["elements"], s["rows"], s["width"], s["element_bytes"]
    moved = elementwise.one_pass_layer_norm_backward_bytes(x, rows, width, size)
    return _call(moved, flops=elementwise.layer_norm_backward_flops(x, rows, width))


def _rms_norm(s: Shape) -> dict[str, Num]:
    x, rows, width, size = s["elements"], s["rows"], s["width"], s["element_bytes"]
    return _call(elementwise.rms_norm_bytes(x, rows, width, size), rows, 0.0, elementwise.rms_norm_flops(x))


def _rms_norm_backward(s: Shape) -> dict[str, Num]:
    x, rows, width, size = s["elements"], s["rows"], s["width"], s["element_bytes"]
    return _call(elementwise.rms_norm_backward_bytes(x, rows, width, size), rows)


def _softmax(s: Shape) -> dict[str, Num]:
    return _normalised(s, 2, 1, SOFTMAX_FLOPS * s["elements"])


def _softmax_backward(s: Shape) -> dict[str, Num]:
    return _normalised(s, 3, 2, 0.0)


def _triangular_softmax(s: Shape) -> dict[str, Num]:
    """A warp keeps its row, of any length that the kernel takes, so that all of it is one stream."""
    x = s["elements"]
    return _call(elementwise.triangular_softmax_bytes(x, s["element_bytes"]), flops=SOFTMAX_FLOPS * x)


def _triangular_softmax_backward(s: Shape) -> dict[str, Num]:
    return _call(elementwise.triangular_softmax_backward_bytes(s["elements"], s["element_bytes"]))


def _normalised(s: Shape, tensors: int, read: int, flops: Num) -> dict[str, Num]:
    """Rows that are read, and read again where a block cannot hold them."""
    x, size = s["elements"], s["element_bytes"]
    again = where(x > ONE_BLOCK * s["rows"], read * x * size, 0.0)
    return _call(tensors * x * size, s["rows"], again, flops)


@dataclass(frozen=True, slots=True)
class Use:
    """The role that plays an operator in one direction, and how its shape is made from a row's."""

    role: str
    shape: Callable[[Shape], dict[str, Num]]


def _map(flops: Callable[[Shape], Num], moved: Callable[[Shape], Num]) -> Callable[[Shape], dict[str, Num]]:
    return lambda s: _call(moved(s), 0.0, 0.0, flops(s))


_E = elementwise
_MAP = _map(lambda s: GELU_FLOPS * s["elements"], lambda s: _E.map_bytes(s["elements"], s["element_bytes"]))
_MAP_BACKWARD = _map(
    lambda s: _E.gelu_backward_flops(s["elements"]), lambda s: _E.map_backward_bytes(s["elements"], s["element_bytes"])
)
_GATED = _map(lambda s: _E.gated_flops(s["elements"]), lambda s: _E.gated_bytes(s["elements"], s["element_bytes"]))
_GATED_BACKWARD = _map(
    lambda s: _E.gated_backward_flops(s["elements"]),
    lambda s: _E.gated_backward_bytes(s["elements"], s["element_bytes"]),
)
_DROPOUT = Formula(_E.dropout_bytes)
_DROPOUT_ADD, _DROPOUT_ADD_BACKWARD = Formula(_E.dropout_add_bytes), Formula(_E.dropout_add_backward_bytes)
_BIAS, _RESIDUAL, _EMBEDDING = Formula(_E.bias_bytes), Formula(_E.residual_bytes), Formula(_E.embedding_bytes)
_ROPE = _map(lambda s: _E.rope_flops(s["elements"]), lambda s: _E.map_bytes(s["elements"], s["element_bytes"]))
_COMPLEX_ROPE = _map(lambda s: _E.rope_flops(s["elements"]), Formula(_E.complex_rope_bytes))
_LOSS_FLOPS: Callable[[Shape], Num] = lambda s: _E.cross_entropy_flops(s["elements"])  # noqa: E731
_MOVED = _map(lambda s: 0.0, lambda s: s["read_bytes"] + s["written_bytes"])
_LOOPED = _map(lambda s: 0.0, lambda s: s["moved_bytes"])
_ELEMENTS: Callable[[Shape], Num] = lambda s: s["elements"]  # noqa: E731

NOTHING: Final = "nothing"
"""Role of a direction in which an operator has no work; no model has it."""

#: Operator -> forward, backward.
USES: Final[Mapping[str, tuple[Use, Use]]] = {
    "layer_norm": (Use("norm", _layer_norm), Use("norm_backward", _layer_norm_backward)),
    "one_pass_layer_norm": (Use("norm", _layer_norm), Use("stream", _one_pass_layer_norm_backward)),
    "rms_norm": (Use("norm", _rms_norm), Use("norm_backward", _rms_norm_backward)),
    "plain_rms_norm": (
        Use("stream", _map(lambda s: _E.rms_norm_flops(s["elements"]), Formula(movement.plain_rms_norm_bytes))),
        Use("stream", _map(_ELEMENTS, Formula(movement.plain_rms_norm_backward_bytes))),
    ),
    "activation": (Use("stream", _MAP), Use("stream", _MAP_BACKWARD)),
    "gated_activation": (Use("gate", _GATED), Use("stream", _GATED_BACKWARD)),
    "dropout": (
        Use("dropout", _map(lambda s: DROPOUT_FLOPS * s["elements"], _DROPOUT)),
        Use("stream", _map(_ELEMENTS, _DROPOUT)),
    ),
    "dropout_add": (
        Use("dropout", _map(lambda s: (DROPOUT_FLOPS + 1) * s["elements"], _DROPOUT_ADD)),
        Use("stream", _map(lambda s: _E.dropout_add_flops(s["elements"]), _DROPOUT_ADD_BACKWARD)),
    ),
    "residual": (Use("stream", _map(_ELEMENTS, _RESIDUAL)), Use("stream", _map(_ELEMENTS, _RESIDUAL))),
    "bias": (Use("stream", _map(_ELEMENTS, _BIAS)), Use("stream", _map(_ELEMENTS, _BIAS))),
    "rope": (Use("rope", _ROPE), Use("rope", _ROPE)),
    "complex_rope": (Use("stream", _COMPLEX_ROPE), Use("stream", _COMPLEX_ROPE)),
    "move": (Use("stream", _MOVED), Use("stream", _MOVED)),
    "move_forward": (Use("stream", _MOVED), Use(NOTHING, _MOVED)),
    "move_backward": (Use(NOTHING, _MOVED), Use("stream", _MOVED)),
    **dict.fromkeys(LOOPED, (Use("stream", _LOOPED), Use("stream", _LOOPED))),
    "top_k": (Use("stream", _MOVED), Use("stream", _MOVED)),
    "triangular_softmax": (Use("stream", _triangular_softmax), Use("stream", _triangular_softmax_backward)),
    "softmax": (Use("softmax", _softmax), Use("softmax_backward", _softmax_backward)),
    "cross_entropy": (
        Use("stream", _map(_LOSS_FLOPS, Formula(_E.cross_entropy_bytes))),
        Use("stream", _map(_LOSS_FLOPS, Formula(_E.cross_entropy_backward_bytes))),
    ),
    "embedding": (
        Use("embedding", lambda s: _call(_EMBEDDING(s), s["tokens"])),
        Use("embedding", lambda s: _call(_EMBEDDING(s), s["tokens"])),
    ),
}


def memory_timed(models: Models, operator: str, shape: Shape, *, backward: bool) -> Timed | None:
    """The model call of a row, or None where the roofline has to do."""
    if operator not in USES:
        return None
    use = USES[operator][backward]
    if use.role not in models:
        return None
    return Timed(model=models[use.role], shapes=(use.shape(shape),))


def streamed(models: Models, moved_bytes: Num) -> Timed | None:
    """One pass over large tensors (the optimiser), or None where the roofline has to do."""
    return Timed(model=models["stream"], shapes=(_call(moved_bytes),)) if "stream" in models else None
