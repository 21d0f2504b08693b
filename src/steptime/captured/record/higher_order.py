"""Higher-order operators, recorded as the operators of their functions, with notes of assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.record.values import Values

BRANCH: Final = "the first branch of torch.cond is taken"
ONE_TURN: Final = "a while_loop whose condition is data runs its body once"
MORE_WORK: Final = "an If whose condition is data takes the branch with more work"
ALL_TURNS: Final = "a Loop whose condition is data runs to its trip count"
FLEX: Final = (
    "flex_attention is one fused kernel, whose mask keeps {share:.0%} of the blocks and functions of scores are free"
)


_OTHER: Final = (BRANCH, ONE_TURN, MORE_WORK, ALL_TURNS)


def changed(assumed: Sequence[str]) -> str:
    """The first assumption of a recording that makes it another computation than its module; else empty."""
    return next((each for each in assumed if each.startswith((*_OTHER, FLEX.partition(",")[0]))), "")


MOST_TURNS: Final = 100_000
"""Largest number of turns of a loop that are recorded."""


def _branch(values: Values, predicate: Any, first: Any, second: Any, operands: Any = ()) -> Any:
    """Run the branch of a known predicate, else the first branch."""
    known = _known(values, predicate)
    if known is None:
        values.take(BRANCH)
    return (second if known is False else first)(*operands)


def _known(values: Values, asked: Any) -> bool | None:
    """A truth value; None if it depends on data."""
    if not isinstance(asked, torch.Tensor):
        return bool(asked)
    with parts.without_modes():
        real = values.of(asked)
        if real is None:
            return None
        values.read(asked)
        return bool(real)


def _loop(values: Values, condition: Any, body: Any, carried: Any, more: Any = (), **_: Any) -> Any:
    """Run every turn of a loop, or one if their number depends on data."""
    for _turn in range(MOST_TURNS):
        known = _known(values, condition(*carried, *more))
        if known is False:
            break
        carried = tuple(body(*carried, *more))
        if known is None:
            values.take(ONE_TURN)
            break
    return tuple(carried)


def _scan(_: Values, combine: Any, initial: Any, along: Any, more: Any = ()) -> Any:
    """Run every step along the first dim, and stack the results."""
    carried, results = list(initial), []
    for at in range(along[0].shape[0]):
        made = list(combine(*carried, *(tensor[at] for tensor in along), *more))
        carried, rest = made[: len(carried)], made[len(carried) :]
        results.append(rest)
    return [*carried, *(torch.stack(members) for members in zip(*results, strict=True))]


def _associative_scan(_: Values, combine: Any, along: Any, more: Any = ()) -> Any:
    """Run the scan of PyTorch without compilation, whose rounds are the logarithm of the length."""
    return parts.associative_scan(combine, along, additional_inputs=tuple(more))


def _flex_attention(
    values: Values, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _score: Any, mask: Any, scale: float,
    *_: Any,
) -> Any:  # fmt: skip
    """Run one fused kernel: causal if the mask keeps that number of blocks, else over its fraction of the keys."""
    rows, columns = query.shape[-2], key.shape[-2]
    share, blocks = _share(values, mask, rows), -(-rows // _BLOCK)
    values.take(FLEX.format(share=share))
    causal = rows == columns and blocks > 1 and abs(share - (blocks + 1) / (2 * blocks)) < 0.5 / blocks**2
    if share < 1 and not causal:
        kept = max(round(share * columns), 1)
        key, value = key[..., :kept, :], value[..., :kept, :]
    shared = query.shape[1] != key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scale, enable_gqa=shared
    )
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return out, sums, sums


_BLOCK: Final = 128
"""Rows and columns of a block of PyTorch's block masks."""
_COUNTS: Final = slice(2, 5, 2)
"""Members of a mask with the numbers of kept blocks in each row of blocks: partially and fully kept ones."""
_INDICES: Final = 3


def _share(values: Values, mask: Any, rows: int) -> float:
    """Fraction of the blocks that a mask keeps; 1 if that depends on data, or without a mask."""
    counts = [each for each in mask[_COUNTS] if isinstance(each, torch.Tensor)]
    with parts.without_modes():
        known = [values.of(each) for each in counts]
        if not known or any(each is None for each in known) or rows <= _BLOCK:
            return 1.0
        kept = sum(int(each.sum()) for each in known if each is not None)
    return min(kept / max(mask[_INDICES].numel(), 1), 1.0)


RULES: Final[Mapping[str, Callable[..., Any]]] = {
    "cond": _branch,
    "while_loop": _loop,
    "scan": _scan,
    "associative_scan": _associative_scan,
    "flex_attention": _flex_attention,
}
"""Name of a higher-order operator -> function that is recorded in its place, of known values and arguments."""
