"""Layouts: which dims of a module are one, how they are called, and which options follow."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from sharded_modules import gpt, on_mesh, shardings  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.sharding.annotate import annotations_of  # noqa: E402
from steptime.sharding.layout import dims_of_flow, laid_out  # noqa: E402
from steptime.sharding.propagate import propagated  # noqa: E402
from steptime.sharding.reshards import reshards_of  # noqa: E402

MEGATRON = "batch:data, heads:model, ffn:model, vocab:model"


def problem():
    return gpt()


def test_dims_are_named_by_where_they_occur():
    named = dims_of_flow(problem().flow).named
    assert {name: each.sizes for name, each in named.items()} == {
        "batch": (8,), "sequence": (64,), "vocabulary": (1000,), "hidden": (128,), "heads": (8,), "ffn": (512,)
    }  # fmt: skip
    assert len(named["heads"].classes) == len(named["ffn"].classes) == 3  # first, middle and last blocks


def test_dims_of_images():
    module = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2, padding=1))
    named = dims_of_flow(on_mesh(capture(module, [torch.zeros(8, 4, 32, 16)])).flow).named
    assert {name: each.sizes for name, each in named.items()} == {
        "batch": (8,), "height": (16,), "width": (8,), "channels": (4, 8, 16)
    }  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name, inputs, outputs", [
    ("tokens: embedding", ["R S(0)", "S(0) R"], ["S(0) P"]),
    ("blocks.1.attention.q: mm", ["S(0) R", "R S(1)"], ["S(0) S(1)"]),
    ("blocks.1.attention.out: mm", ["S(0) S(1)", "R S(0)"], ["S(0) P"]),
    ("blocks.1.mlp.0: addmm", ["R S(0)", "S(0) R", "R S(1)"], ["S(0) S(1)"]),
    ("blocks.1.mlp.1: gelu", ["S(0) S(2)"], ["S(0) S(2)"]),
    ("blocks.1.mlp.2: addmm", ["R P", "S(0) S(1)", "R S(0)"], ["S(0) P"]),
    ("blocks.1.attention.q.weight", [], ["R S(0)"]),
    ("blocks.1.mlp.2.weight", [], ["R S(1)"]),
    ("blocks.1.mlp.2.bias", [], ["R R"]),
])  # fmt: skip
def test_heads_and_inner_widths_on_one_axis_are_the_columns_and_rows_of_megatron(name, inputs, outputs):
    found = laid_out(problem(), MEGATRON)
    assert shardings(problem(), found.choice, name) == (inputs, outputs)


def test_megatron_adds_up_four_times_a_block():
    """Activations of a block: one all-reduce after attention, one after the MLP, and their counterparts backward."""
    found = laid_out(problem(), MEGATRON)
    moved = [
        each for each in reshards_of(problem(), found.choice)
        if each.source.startswith("blocks.1.") and each.target.startswith(("blocks.1", "blocks.2"))
        and "bias" not in each.source and "update" not in each.target
    ]  # fmt: skip
    assert {each.source for each in moved} == {"blocks.1.attention.out: mm", "blocks.1.mlp.2: addmm"}
    assert all(step.kind == "all_reduce" and step.axes == ("model",) for each in moved for step in each.steps)


def test_batch_alone_is_data_parallel():
    found = laid_out(problem(), "batch:data")
    for name, number in problem().flow.of_parameter.items():
        assert str(problem().ways[number][found.choice[number]].outputs[0][0]) == "R", name
    traffic = reshards_of(problem(), found.choice)
    assert all(each.target.endswith("(update)") or "loss" in each.source for each in traffic)
    assert {step.kind for each in traffic for step in each.steps} == {"all_reduce"}
    assert not [each for each in found.unmatched if each.axis == "data" and "mlp" in each.item]


def test_a_layout_and_the_annotations_that_it_amounts_to_give_the_same_choice():
    text = ("input.*=S(0) R; tokens.weight=R S(0); head.weight=R S(0); *.[qkv].weight=R S(0); *.out.weight=R S(1); "
            "*.mlp.0.weight=R S(0)")  # fmt: skip
    one, other = laid_out(problem(), MEGATRON), propagated(problem(), annotations_of([text]))
    differing = {problem().flow.items[n].name for n in (one.choice != other.choice).nonzero()[0]}
    assert differing == set() and not other.conflicts


def test_what_no_option_splits_is_replicated_and_reported():
    found = laid_out(problem(), "batch:data, sequence:model")
    products = [each for each in found.unmatched if each.axis == "model" and each.item == "blocks.1.mlp.0: addmm"]
    assert products and products[0].because == "no dim of it is on the axis" and products[0].share_of_compute > 0
    assert shardings(problem(), found.choice, "blocks.1: add")[1] == ["S(0) S(1)"]
    assert math.fsum(each.share_of_compute for each in found.unmatched if each.axis == "model") < 1


def test_a_dim_is_named_by_an_example():
    both = laid_out(problem(), "tokens.weight[0]:model, head.weight[0]:model")
    assert (both.choice == laid_out(problem(), "vocab:model").choice).all()


@pytest.mark.parametrize("layout, message", [
    ("batch:data, batch:model", "batch:data and batch:model put one dim on two axes"),
    ("heads:model, hidden:model", r"put dims 0 and 1 of one tensor on one axis: blocks.0.attention.q"),
    ("batch:data, vocab:data", "batch:data and vocab:data put dims"),
    ("head:model", "there is no dim 'head'\n  did you mean heads"),
    ("heads:tensor", "there is no axis of the mesh 'tensor'"),
    ("tokens.weight[2]:model", "tokens.weight is 1000x128"),
    ("token.weight[0]:model", "did you mean tokens.weight"),
    ("batch=data", "is no dim with its axis"),
])  # fmt: skip
def test_contradictions_and_unknown_names_are_errors(layout, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        laid_out(problem(), layout)


def test_a_dim_that_an_axis_does_not_divide_is_an_error():
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
    with pytest.raises(UserError, match=r"axis model of 4 devices does not divide 6: .*6") as error:
        laid_out(on_mesh(capture(module, [torch.zeros(16, 8)])), "ffn:model")
    assert "0.weight of 6x8, dim 0" in str(error.value) or "0: addmm" in str(error.value)
