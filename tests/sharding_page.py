"""The page docs/sharding_operators.md: operators, their dims, and every rule that differs from DTensor's.

usage: scripts/sharding_operators [--write]    without --write the page is printed
"""

from __future__ import annotations

import sys
from pathlib import Path

from dtensor_rules import DRAWN, EXHAUSTIVE, MESH, ON_MESH, combinations, differences
from operator_samples import SAMPLES
from sharding_coverage import coverage
from steptime.captured.ops import OPERATORS, dims_of
from steptime.sharding.options import options

PAGE = Path(__file__).parents[1] / "docs" / "sharding_operators.md"
NOT_ASKED = {
    "mse_loss": "DTensor takes it apart, which takes seconds for all combinations",
    "mse_loss_backward": "DTensor takes it apart, which takes seconds for all combinations",
}
NO_RULE = "DTensor has no rule for the operator"
REASONS = {
    "terms": "linear in that input: its terms give terms of the output; DTensor reduces first",
    "masked": "each device treats the indices that point into its piece; DTensor does so for rows of `embedding` alone",
    "channels": "DTensor splits convolution by images alone",
    "windows": "windows that do not overlap: a piece of the pixels needs no neighbour",
    "groups": "groups of channels have statistics of their own; DTensor splits images alone",
    "made": "a dim that is made or broadcast is made in pieces",
    "truth": "truth values: any is the largest and all the smallest; DTensor calls them sum and product",
    "batch": "matrices or products apart, for which DTensor has no rule",
    "experts": "rows sorted by expert go with their experts, each device with as many as any other",
    "labels": "each device has the labels of its own classes (DTensor: only inside its `loss_parallel`)",
    "mean": "DTensor averages the means of the devices; labels that are ignored differ in number, so that steptime "
    "adds up their weight inside the operator",
    "strided": "a piece of the inner dim of a joined pair lies in strides: no plain placement",
    "norm": "DTensor has terms of a norm; steptime exchanges squares inside the operator",
    "unread": "the values of the input are not read, so DTensor takes any placement",
}
_OF_OPERATOR = {
    "steptime": {
        "all": "truth", "any": "truth", "tril": "batch", "mv": "batch", "_grouped_mm": "experts", "expand": "made",
        "new_zeros": "made", "avg_pool2d": "windows", "native_group_norm": "groups", "nll_loss_forward": "labels",
        "nll_loss_backward": "labels",
    },
    "DTensor": {
        "all": "truth", "any": "truth", "linalg_vector_norm": "norm", "nll_loss_forward": "mean", "view": "strided",
        "_unsafe_view": "strided", "zeros_like": "unread", "ones_like": "unread", "full_like": "unread",
        "new_zeros": "unread",
    },
}  # fmt: skip


def reason(name, side, inputs, outputs):
    """Why a rule is on one side alone."""
    op = SAMPLES[name].op
    if side == "steptime" and "P" in inputs:
        return "terms"
    if side == "steptime" and any(
        o.masked and tuple(map(str, o.inputs)) == inputs for o in options(SAMPLES[name].node)
    ):
        return _OF_OPERATOR[side].get(op, "masked")
    if op.startswith("convolution"):
        return "windows" if any(text in inputs for text in ("S(2)", "S(3)")) else "channels"
    return _OF_OPERATOR[side][op]


def text(placements):
    return " ".join("-" if each is None else each for each in placements)


def rows():
    """Of every sample, name -> its differences as (side, rule, reason), or the reason why there is no rule."""
    out = {}
    for name, sample in SAMPLES.items():
        if name in NOT_ASKED:
            continue
        found = differences(sample.node)
        if any(side == "steptime" and set(ins) == {"R"} == set(outs) for side, ins, outs in found):
            out[name] = NO_RULE
            continue
        out[name] = sorted((reason(name, *each), each[0], f"{text(each[1])} > {text(each[2])}") for each in found)
    return out


def dims_text(node):
    return ", ".join(f"{each.name} ({each.kind})" if each.kind != "batch" else each.name for each in dims_of(node).dims)


def differing(found):
    """Tables of the rules of one side, a table a reason."""
    lines = []
    for key, words in REASONS.items():
        chosen = [
            (name, *each[1:]) for name, some in found.items() if some != NO_RULE for each in some if each[0] == key
        ]
        if chosen:
            lines += [
                f"**{words[0].upper()}{words[1:]}.**",
                "",
                "| operator | rule of | inputs > outputs |",
                "|---|---|---|",
            ]
            lines += [f"| `{name}` | {side} | {rule} |" for name, side, rule in chosen] + [""]
    return lines


def page():
    found = rows()
    asked = {SAMPLES[name].op for name in found}
    same = {SAMPLES[name].op for name, each in found.items() if not each}
    differ = {SAMPLES[name].op for name, each in found.items() if each}
    counts = {op: max(combinations(s.node) for s in SAMPLES.values() if s.op == op) for op in asked}
    whole = sum(counts[op] <= ON_MESH for op in same - differ)
    drawn = sorted(op for op in asked if counts[op] > EXHAUSTIVE)
    none = sorted({SAMPLES[name].op for name, each in found.items() if each == NO_RULE})
    lines = [
        "# Shardings of operators", "",
        f"{sum(row.dims is not None for row in OPERATORS.values())} operators of the graph IR say which dims they "
        "have, and from these follow the placements of their tensors over a mesh (`src/steptime/captured/ops`). "
        "Any other operator is kept replicated. "
        "`scripts/sharding_operators --write` writes this page.", "",
        f"Rules of {len(asked)} operators were compared with those of DTensor (PyTorch 2.13) on a mesh of "
        f"{' x '.join(map(str, MESH.shape))}: {len(same - differ)} agree in all placements that need no communication, "
        f"{whole} of them asked in every combination on the mesh, the others in every one along an axis and in the "
        f"products of rules along both; {len(differ)} differ, by name and reason below. Of "
        f"{', '.join(f'`{op}`' for op in drawn)}, with {EXHAUSTIVE} combinations and more, {DRAWN} were drawn. `-` is "
        "an output that DTensor says nothing of. steptime splits dims whose largest piece is little above an equal "
        "one; DTensor any.",
        "",
        "## Differences", "",
    ]  # fmt: skip
    lines += differing(found)
    lines += [f"**{NO_RULE}:** {', '.join(f'`{name}`' for name in none)}.", ""]
    lines += [f"**Not asked:** {'; '.join(f'`{name}` ({why})' for name, why in NOT_ASKED.items())}.", ""]
    lines += [
        "## Coverage", "",
        "Training steps (forward, backward, optimiser) on an H100; what can be split has more strategies on "
        "the mesh than the replicated one. A call on a list of tensors counts as one.", "", *coverage(), "",
    ]  # fmt: skip
    lines += ["## Dims", "", "As the tests have them; a dim is batch-like where nothing else is said.", ""]
    lines += ["| operator | dims |", "|---|---|"]
    lines += [f"| `{name}` | {dims_text(sample.node)} |" for name, sample in sorted(SAMPLES.items())]
    return "\n".join(lines) + "\n"


def main():
    made = page()
    if "--write" in sys.argv:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
    return 0
