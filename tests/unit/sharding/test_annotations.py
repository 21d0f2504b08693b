"""Annotations: what they match, what contradicts, how they propagate, and how the solver keeps them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from sharded_modules import gpt, on_mesh, shardings  # noqa: E402
from steptime.captured.ops.placement import R, text_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.sharding.annotate import agrees, annotations_of, named_tensors, resolved  # noqa: E402
from steptime.sharding.build import shardings_of  # noqa: E402
from steptime.sharding.complete import Directions, completed  # noqa: E402
from steptime.sharding.planner import planned  # noqa: E402
from steptime.sharding.propagate import propagated  # noqa: E402


def problem():
    return gpt()


def test_parameters_of_all_blocks_inputs_and_results_have_names():
    named = named_tensors(problem().flow)
    assert {"tokens.weight", "input.0", "blocks.0.mlp.0.weight", "blocks.2.mlp.0.weight", "norm"} <= {*named}
    assert named["blocks.1.attention"].type.shape == (8, 64, 128)
    assert named["blocks.1.mlp.0.weight"].item == named["blocks.2.mlp.0.weight"].item


def test_a_result_behind_views_is_a_sharding_of_what_the_operator_made():
    (found,) = resolved(problem(), annotations_of(["blocks.0.mlp.0=S(0) S(2)"]))
    assert problem().flow.items[found.item].name == "blocks.0.mlp.0: addmm"
    assert text_of(found.sharding) == "S(0) S(1)"


@pytest.mark.parametrize("texts, message", [
    (["*.mlp.0.weight=R S(0)", "head.weight=R R", "blocks.0.mlp.0.weight=R S(1)"],
     r"\*.mlp.0.weight=R S\(0\) and blocks.0.mlp.0.weight=R S\(1\) contradict .* for tensor blocks.0.mlp.0.weight"),
    (["blocks.1.norm_1.bias=R S(0)", "blocks.2.norm_1.bias=R R"],
     "contradict each other for tensors blocks.1.norm_1.bias and blocks.2.norm_1.bias\n.*equal blocks"),
    (["tokens.weight=R S(2)"], "tokens.weight is 1000x128, it has no dim 2"),
    (["tokens.weight=R"], "has 1 placement, data=2 x model=4 has 2 axes"),
    (["head.weight=S(0) S(0) S(0)"], "has 3 placements"),
    (["input.0=S(0) S(0)", "blocks.*.mlp.0=S(0) S(1)"], r"S\(0\) S\(1\) is no sharding of what view sees as 8x64x512"),
    (["token.weight=R R"], "there is no parameter, input or module 'token.weight'\n  did you mean tokens.weight"),
    (["tokens.weight"], "is no annotation"),
    ([""], "'' is no annotation"),
    (["tokens.weight=R Q"], "'Q' is not a placement"),
    (["blocks.0.mlp.1=P R"], r"blocks.0.mlp.1: gelu cannot give P R"),
])  # fmt: skip
def test_annotations_that_cannot_be_are_errors_with_names(texts, message):
    with pytest.raises(UserError, match=message):
        completed(problem(), Directions(annotate=tuple(texts)))


@pytest.mark.slow
def test_a_dim_that_no_axis_divides_is_an_error():
    odd = on_mesh(problem().flow.program, data=96, model=4)
    with pytest.raises(UserError, match=r"tokens.weight is 1000x128, which mesh data=96 x model=4 does not divide"):
        resolved(odd, annotations_of(["tokens.weight=S(1) R"]))


def test_conflicts_name_both_annotations_and_their_ways():
    """Weights split over the axis of the batch: activations are kept in the products, weights gathered."""
    found = propagated(problem(), annotations_of(["input.0=S(0) R", "blocks.*.mlp.0.*=S(0) R"]))
    conflict = next(each for each in found.conflicts if each.tensor == "blocks.0.mlp.0: addmm, its mat2 of 128x512")
    assert conflict.axis == "data"
    assert str(conflict.kept).startswith("S(0) of input.0=S(0) R via tokens: embedding")
    assert str(conflict.dropped) == "S(1) of blocks.*.mlp.0.*=S(0) R"
    assert shardings(problem(), found.choice, "blocks.0.mlp.0: addmm") == (["R R", "S(0) R", "R R"], ["S(0) R"])
    steps = {(each.source, each.target): [step.kind for step in each.steps] for each in found.reshards}
    # Gathered before it is transposed: no piece has to be put into its place.
    assert steps["blocks.0.mlp.0.weight", "blocks.0.mlp.0: addmm"] == ["all_gather"]
    assert steps["blocks.0.mlp.0: mm", "blocks.0.mlp.0.weight (update)"] == ["reduce_scatter"]


def test_a_sharding_goes_on_forward_and_backward_and_meets_one_of_another_axis():
    found = propagated(problem(), annotations_of(["blocks.0.mlp.1=S(0) S(2)"]))
    assert shardings(problem(), found.choice, "blocks.0.mlp.0.weight")[1] == ["R S(0)"]
    assert shardings(problem(), found.choice, "blocks.0.mlp.2.weight")[1] == ["R S(1)"]
    assert shardings(problem(), found.choice, "input.0")[1] == ["S(0) R"]
    assert shardings(problem(), found.choice, "blocks.3.mlp.1: gelu")[1] == ["S(0) R"]


def test_reshards_are_all_the_seconds_of_traffic_but_what_operators_exchange():
    found = propagated(problem(), annotations_of(["input.*=S(0) R; *.mlp.0.weight=R S(0)"]))
    _, data, others = problem().parts_s(found.choice)
    inside = sum(each[option] for each, option in zip(problem().seconds.inside, found.choice, strict=True))
    assert math.isclose(sum(each.seconds for each in found.reshards), data + others - inside, rel_tol=1e-9)


def chosen(choice):
    return [ways[option] for ways, option in zip(problem().ways, choice, strict=True)]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_annotated_is_kept_and_the_rest_is_legal(seed):
    draw, flow, sizes = random.Random(seed), problem().flow, problem().mesh.sizes
    names = draw.sample([*flow.of_parameter, "input.0", "input.1"], 6)
    named = named_tensors(flow)
    chosen_for = {named[name].item: (name, draw.choice(shardings_of(named[name].type, sizes))) for name in names}
    annotations = annotations_of([f"{name}={text_of(sharding)}" for name, sharding in chosen_for.values()])
    found = propagated(problem(), annotations)
    assert math.isfinite(sum(problem().parts_s(found.choice)))
    for each in resolved(problem(), annotations):
        lies = problem().ways[each.item][found.choice[each.item]].outputs[each.output]
        assert all(map(agrees, each.sharding, lies))


def test_nothing_annotated_on_an_axis_leaves_it_replicated():
    found = propagated(problem(), annotations_of(["input.*=S(0) R"]))
    assert all(sharding[1] == R for way in chosen(found.choice) for sharding in (*way.inputs, *way.outputs))


@pytest.mark.slow
def test_the_solver_keeps_annotations_and_is_no_slower_than_propagation():
    annotate = ("tokens.weight=R S(0)", "blocks.*.mlp.0.weight=R S(0)", "input.*=S(0) R")
    free = planned(problem())
    solved, _ = completed(problem(), Directions(annotate=annotate))
    spread, given = completed(problem(), Directions(annotate=annotate, complete="propagate"))
    assert text_of(solved.parameters["blocks.2.mlp.0.weight"]) == "R S(0)"
    assert free.bound_s <= solved.step_s <= spread.step_s * (1 + 1e-9) * 1.01
    assert given is not None and (spread.choice == given.choice).all() and spread.bound_s == 0


@pytest.mark.slow
def test_what_is_annotated_stays_where_another_sharding_of_the_one_tensor_is_faster():
    """A step with overlap goes on by changes of one item: none of them changes what is given."""
    annotate = ("tokens.weight=S(0) S(0)", "norm.weight=S(0) R")
    solved, _ = completed(problem(), Directions(annotate=annotate))
    assert text_of(solved.parameters["tokens.weight"]) == "S(0) S(0)"
    assert text_of(solved.parameters["norm.weight"]) == "S(0) R"


@pytest.mark.slow
def test_a_layout_leaves_other_axes_to_the_solver():
    solved, given = completed(problem(), Directions(layout="batch:data"))
    spread, _ = completed(problem(), Directions(layout="batch:data", complete="propagate"))
    assert solved.step_s <= spread.step_s * 1.01
    products = [n for n, item in enumerate(problem().flow.items) if item.name == "blocks.1.mlp.0: addmm"]
    assert all(problem().ways[n][solved.choice[n]].outputs[0][0].dim == 0 for n in products) and given is not None


@pytest.mark.parametrize("given, message", [
    ({"annotate": ("a=R",), "layout": "batch:data"}, "annotations and a layout together"),
    ({"complete": "propagate"}, "nothing to propagate"),
    ({"complete": "guess", "layout": "batch:data"}, "it is solve or propagate"),
])  # fmt: skip
def test_directions_that_cannot_be_are_errors(given, message):
    with pytest.raises(UserError, match=message):
        Directions(**given)


def test_weights_split_over_the_axis_of_the_batch_are_fully_sharded_data_parallelism():
    """Gathered for forward and for backward, gradients reduced and scattered, nothing else but the loss."""
    found = propagated(problem(), annotations_of(["input.*=S(0) R; *.weight=S(0) R; *.bias=S(0) R"]))
    parameters = set(problem().flow.of_parameter)
    for each in found.reshards:
        steps = [step.kind for step in each.steps if step.collective]
        if each.source in parameters:
            assert steps == ["all_gather"], each
        elif each.target.endswith("(update)"):
            assert steps == ["reduce_scatter"], each
        else:
            assert "loss" in each.source, each
    gathered = [each.target for each in found.reshards if each.source == "blocks.1.mlp.0.weight"]
    assert set(gathered) == {"blocks.1.mlp.0: addmm", "blocks.2.mlp.0: mm"}


def test_gradients_of_three_projections_in_terms_are_added_up_once():
    found = propagated(problem(), annotations_of(["input.*=S(0) R; *.[qkv].weight=R S(0)"]))
    sums = [
        [text_of(sharding) for sharding in (*way.inputs, *way.outputs)]
        for item, way in zip(problem().flow.items, chosen(found.choice), strict=True)
        if item.phase == "backward" and item.name.startswith("blocks.0.attention") and item.node.op == "add"
    ]  # fmt: skip
    assert sums == [["S(0) P"] * 3] * 2


def test_what_does_not_fit_with_what_is_given_is_an_error_with_its_names():
    small = replace(problem(), limit_bytes=1e5)
    with pytest.raises(UserError, match=r"with the given shardings of tokens.weight: no shardings fit"):
        completed(small, Directions(annotate=("tokens.weight=R R",)))
    spread, _ = completed(small, Directions(annotate=("tokens.weight=R R",), complete="propagate"))
    assert spread.stop.endswith("memory is above the limit")


class Scaled(nn.Module):
    """A scale by channel, a product, and an element-wise sum with another input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up = nn.Parameter(torch.ones(64)), nn.Linear(64, 128)

    def forward(self, x, y):
        return self.up(x * self.scale).relu() + y


@cache
def scaled():
    return on_mesh(capture(Scaled(), [torch.zeros(8, 16, 64), torch.zeros(8, 16, 128)]))


@pytest.mark.parametrize("texts, name, inputs, outputs", [
    ("scale=S(0) R; input.0=S(0) R", "(outside modules): mul", ["S(0) R", "R R"], ["S(0) R"]),  # not its channels
    ("scale=S(0) R; up.weight=S(0) R", "up: addmm", ["S(0) R", "R R", "S(1) R"], ["S(1) R"]),  # a product
    ("up.weight=R S(0); input.1=R S(0)", "up: addmm", ["R R", "R S(0)", "R R"], ["R S(0)"]),  # what is element-wise
    ("input.0=R S(1)", "(outside modules): mul", ["R S(1)", "R R"], ["R S(1)"]),
    ("input.0=R S(1)", "up: addmm", ["R R", "R R", "R R"], ["R R"]),  # lies in strides behind a view
    ("scale=R S(0)", "up: addmm", ["R P", "R S(1)", "R S(0)"], ["R P"]),  # nothing else decides
])  # fmt: skip
def test_what_decides_of_an_operator(texts, name, inputs, outputs):
    found = propagated(scaled(), annotations_of([texts]))
    assert shardings(scaled(), found.choice, name) == (inputs, outputs)
