"""Checks that two graphs compute the same, on random inputs in fp64 and in their own element types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steptime.captured.graph import Nodes
from steptime.errors import UserError
from steptime.rewrite.flow import Flow
from steptime.rewrite.fused import opened

FP64: Final = 1e-10
FP32: Final = 1e-4
"""Relative errors that a rewritten graph may have."""
ROUNDINGS: Final = 2**8
"""A result below this many units in the last place of the largest result counts as zero up to rounding, such as the
gradient of the keys' bias, to which a softmax is invariant."""
ROUNDED: Final = "gelu"
"""Operator whose constants a graph stores rounded if it has the operator in single steps."""
MOST_BYTES: Final = 8 * 2**30
"""Largest number of bytes of weights of a graph that is run on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Largest relative errors of the outputs, each against its largest element."""

    fp64: float
    fp32: float | None
    """Error in the element types of the graph; None if they are narrower than fp32."""
    seeds: int
    limit: float = FP64
    """Largest fp64 error that passes; larger if an exact formula replaces one with rounded constants."""

    @property
    def passed(self) -> bool:
        """True if both errors are within the limits of a rewrite."""
        return self.fp64 <= self.limit and (self.fp32 is None or self.fp32 <= FP32)


def relative_error(expected: Any, found: Any) -> float:
    """Largest difference over the largest element; infinite if shapes or non-finite elements differ."""
    import torch

    a, b = torch.as_tensor(expected), torch.as_tensor(found)
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.to(torch.float64), b.to(torch.float64)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    scale = float(a[finite].abs().max()) if bool(finite.any()) else 0.0
    worst = float((a[finite] - b[finite]).abs().max()) if bool(finite.any()) else 0.0
    return worst / scale if scale else worst


def _worst(expected: list[Any], found: list[Any]) -> float:
    """Largest error of all results; results that are only rounding in both graphs count as equal."""
    import torch

    floats = [a for a in expected if a.is_floating_point() and a.numel()]
    largest = max((float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) for a in floats), default=0.0)
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        floor = ROUNDINGS * torch.finfo(a.dtype).eps * largest if a.is_floating_point() else 0.0
        nothing = a.shape == b.shape and bool((a.abs() <= floor).all()) and bool((b.abs() <= floor).all())
        worst = max(worst, 0.0 if nothing and floor else relative_error(a, b))
    return worst


def check(before: Flow, after: Flow, contents: Mapping[str, Any] | None = None, seeds: int = 2) -> Check:
    """Run both graphs on the same random inputs.

    Args:
        before: the graph.
        after: the rewritten graph.
        contents: weights to run with; None: random ones.
        seeds: number of random inputs.

    Raises:
        UserError: an operator cannot be run here, or the weights are too large.
    """
    from steptime.rewrite.kernels import evaluate, random_contents

    size = sum(node.outputs[0].size_bytes for node in before.order if not node.inputs and node.outputs)
    if size > MOST_BYTES:
        raise UserError(
            f"a graph with {size / 2**30:.0f} GiB of weights is not run here, so it cannot be checked",
            hint="write the same model with fewer layers",
        )
    narrow = any(type.dtype in ("bf16", "fp16") for node in before.order for type in node.outputs)
    worst = {True: 0.0, False: 0.0}
    for seed in range(seeds):
        given = random_contents(before, seed, contents)
        for wide in (True,) if narrow else (True, False):
            try:
                pair = [evaluate(flow, flow.outputs, given, wide=wide, seed=seed) for flow in (before, after)]
            except (RuntimeError, NotImplementedError) as error:
                said = next(iter(str(error).splitlines()), "")
                raise UserError(f"the graph cannot be checked here, so it is not written: {said}") from None
            worst[wide] = max(worst[wide], _worst(*pair))
    return Check(fp64=worst[True], fp32=None if narrow else worst[False], seeds=seeds, limit=_limit(before, after))


def _limit(before: Flow, after: Flow) -> float:
    r"""Largest relative error in fp64: $10^{-10}$, or the rounding unit of a type in which a GELU replaces its formula.

    A graph stores $1/\sqrt 2$ and $\sqrt{2/\pi}$ rounded to its own type; the GELU has them exactly. The error of the
    constant is at most half a unit, and that of the result, against its largest element, is smaller.
    """
    import torch

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    more = _rounded(after) - _rounded(before)
    return max([FP64, *(torch.finfo(types[dtype]).eps for dtype in more if dtype in types)])


def _rounded(flow: Flow) -> Counter[str]:
    """Number of operators :data:`ROUNDED` in a graph by element type, including those inside fused kernels."""
    steps = (step for node in flow.order for step in opened(Nodes(), node))
    return Counter(step.outputs[0].dtype for step in steps if step.op == ROUNDED)


def require_same(found: Check) -> None:
    """Raise an error if a rewritten graph computes something else.

    Raises:
        UserError: the errors exceed the limits of a rewrite.
    """
    if not found.passed:
        narrow = "" if found.fp32 is None else f", {found.fp32:.1e} in fp32"
        raise UserError(
            f"the rewritten graph differs from the original by {found.fp64:.1e} in fp64{narrow}; nothing was written",
            hint="name the passes to apply with --only, and report the one that differs",
        )
