"""Rules are those of DTensor, along an axis of a 2 x 4 mesh and on the whole mesh; the page names what differs."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from dtensor_rules import (  # noqa: E402
    ON_MESH,
    SIZES,
    Rules,
    agree,
    along_one_axis,
    combinations,
    differences,
    our_rules,
    rules_on_mesh,
)
from operator_samples import SAMPLES  # noqa: E402
from sharding_page import NO_RULE, NOT_ASKED, PAGE, reason, text  # noqa: E402
from steptime.captured.ops.placement import R, shard  # noqa: E402
from steptime.sharding.options import options, strategies  # noqa: E402

ASKED = [name for name in SAMPLES if name not in NOT_ASKED]


def named():
    """Differences of the page: name -> rules as (side, text)."""
    out = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            out.setdefault(cells[0].strip("`"), set()).add((cells[1], cells[2]))
    return out


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("name", ASKED)
def test_what_differs_along_an_axis_is_named(name):
    node = SAMPLES[name].node
    found = differences(node)
    if any(side == "steptime" and set(ins) == {"R"} == set(outs) for side, ins, outs in found):
        line = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"**{NO_RULE}"))
        assert f"`{node.op}`" in line
        return
    assert {(side, f"{text(ins)} > {text(outs)}") for side, ins, outs in found} == named().get(name, set())
    assert all(reason(name, *each) for each in found)


def small():
    """Names whose combinations on the mesh are few."""
    for name in ASKED:
        if combinations(SAMPLES[name].node) <= ON_MESH:
            yield name


@pytest.mark.quick(
    without=[
        "bmm",
        "mv",
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "lerp",
        "masked_fill",
        "eq",
        "threshold_backward",
        "gelu_backward",
        "silu_backward",
        "sigmoid_backward",
        "native_dropout_backward",
        "stack",
        "embedding_dense_backward",
        "index_select",
        "gather",
        "gather:part",
    ]
)
@pytest.mark.parametrize("name", list(small()))
def test_all_combinations_on_the_mesh(name):
    """On the whole mesh both have the products of what they have along the axes, and differ where they differ there."""
    node = SAMPLES[name].node
    each_axis = [list(itertools.product(*along_one_axis(node, size))) for size in SIZES]
    theirs = {rule[0]: rule[1] for rule in rules_on_mesh(node, each_axis)}
    exchanged = {each.dim for each in options(node) if each.exchange is not None}
    ours = {}
    for each in strategies(node, SIZES):
        if not exchanged & set(each.dims):
            made = tuple(tuple(tuple(map(str, s)) for s in side) for side in (each.inputs, each.outputs))
            ours.setdefault(made[0], set()).add(made[1])
    apart = {ins for _, ins, _ in differences(node)}

    def differs(inputs, outputs):
        along = [tuple(tuple(one and one[axis] for one in side) for side in (inputs, outputs)) for axis in (0, 1)]
        return any(each[0] in apart for each in along)

    for inputs in {*ours, *theirs}:
        agreed = inputs in theirs and any(
            agree((inputs, one), (inputs, theirs[inputs])) for one in ours.get(inputs, ())
        )
        assert agreed or differs(inputs, theirs.get(inputs, next(iter(ours.get(inputs, [()]))))), inputs


@pytest.mark.slow
def test_products_of_rules_on_the_mesh():
    """Operators with many inputs: each pair of rules along the axes is a rule on the mesh, with the same outputs."""
    pairs = 0
    for name in set(ASKED) - set(small()):
        node, rules = SAMPLES[name].node, Rules(SAMPLES[name].node)
        apart = {ins for _, ins, _ in differences(node)}
        exchanged = {each.dim for each in options(node) if each.exchange is not None}
        for each in strategies(node, SIZES):
            along = [tuple(str(s[axis]) for s in each.inputs) for axis in (0, 1)]
            if exchanged & set(each.dims) or apart & set(along):
                continue
            inputs, outputs = (tuple(tuple(map(str, s)) for s in side) for side in (each.inputs, each.outputs))
            answer = rules.ask(each.inputs)
            assert answer is not None and agree((inputs, outputs), answer), f"{name}: {inputs} > {outputs} is {answer}"
            pairs += 1
    assert pairs > 250


def test_enough_operators_agree():
    """At least 60 operators have the same rules as DTensor in all placements."""
    ours = {SAMPLES[name].op for name in ASKED}
    lines = named()
    agreeing = {SAMPLES[name].op for name in ASKED if name not in lines} - {SAMPLES[name].op for name in lines}
    assert len(ours) >= 100 and len(agreeing) >= 60


def test_a_wrong_rule_is_seen():
    """Columns of a product that are not split with their weight are on neither side."""
    node = SAMPLES["mm"].node
    assert Rules(node).ask([(R, R), (R, shard(1))])[1] == (("R", "S(1)"),)
    assert (("R", "S(1)"), ("S(0)",)) not in our_rules(node, 4)
