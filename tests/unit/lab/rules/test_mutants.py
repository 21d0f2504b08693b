"""Mutants by hand: which are found, on which boxes they are right, what corrects them, what catches a wrong one."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from models.csrnet import csrnet, csrnet_back  # noqa: E402
from rewritten import nn, ops, rewritten, traced  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.engine import apply_passes  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime.rewrite.search.best_first import best_first  # noqa: E402
from steptime.rewrite.search.problem import CostModel, Problem, time_weights  # noqa: E402
from steptime_lab.rules.domains import Floats  # noqa: E402
from steptime_lab.rules.evaluation import evaluated  # noqa: E402
from steptime_lab.rules.mutants.chain import chain_rule  # noqa: E402
from steptime_lab.rules.mutants.correct import (  # noqa: E402
    BOXES,
    EXACT,
    ZERO_ROWS,
    corrected,
    corrected_product,
    corrected_spread,
    sound,
    verified,
    with_boxes,
    with_zero_rows,
)
from steptime_lab.rules.mutants.generate import mutants  # noqa: E402
from steptime_lab.rules.mutants.moves import cut, padded  # noqa: E402
from steptime_lab.rules.mutants.passes import MUTANT_PASSES  # noqa: E402
from steptime_lab.rules.mutants.programs import Convolution, convolution, product, sizes_for, transposed  # noqa: E402
from steptime_lab.rules.mutants.regions import check_masks, corner_and_neighbours, regions, thresholds  # noqa: E402
from steptime_lab.rules.rule import Rule  # noqa: E402
from steptime_lab.rules.sizes import size  # noqa: E402
from steptime_lab.rules.terms import parsed, replaced, term, variable  # noqa: E402
from steptime_lab.rules.verify_cases import proved_by_cases  # noqa: E402
from steptime_lab.rules.verify_generic import proved_generically  # noqa: E402

V100 = device_within("v100-sxm2-16gb")
R = torch.randn
#: Class of program -> the program and a mutant that has to be found, with the part that is equal at the first sizes.
CLASSES = {
    "1x1": (convolution(Convolution(kernel=(1, 1))), "product of rows", 1.0),
    "normal": (convolution(Convolution(kernel=(2, 2))), "product of patches", 1.0),
    "odd kernel": (convolution(Convolution(pad=1)), "N2H, convolution, H2N", 1 - 2 / 20),
    "dilated": (convolution(Convolution(pad=2, dilation=2)), "fill, S2B, dense convolution, B2S, crop", 1.0),
    "grouped": (convolution(Convolution(pad=1, groups=4)), "N2H, convolution, H2N", 1 - 2 / 20),
    "with a sum": (convolution(Convolution(pad=1, bias=True)), "N2W, convolution, W2N", 1 - 2 / 22),
    "product": (product(batched=False), "rows, product, batch", 1.0),
    "batched product": (product(batched=True), "transpose, turned product, transpose", 1.0),
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_its_mutants(name):
    program, wanted, share = CLASSES[name]
    found = {str(mutant): mutant for mutant in mutants(program)}
    assert wanted in found
    mask_share = regions(found[wanted]).share(sizes_for(program)[0]) if share < 1 else found[wanted].share
    assert mask_share == pytest.approx(share)
    assert len({str(mutant.term) for mutant in found.values()}) == len(found)
    pairs = [pair for m in found.values() for pair in zip(m.before, m.before[1:], strict=False)]
    assert ("N2H", "H2N") not in pairs


def n2h(conv):
    return next(m for m in mutants(convolution(conv)) if str(m) == "N2H, convolution, H2N")


def test_boxes_of_images_below_each_other_are_symbolic_and_right():
    """Two images of six rows, kernel three: six boxes and 83 % equal (spec of graph rewriting, 2f)."""
    found = regions(n2h(Convolution(pad=1)))
    rows, images = ([str(each) for each in found.borders[axis]] for axis in (2, 0))
    assert rows == ["0", "1", "h-1", "h"] and images == ["0", "1", "n-1", "n"]
    at = {"n": 2, "c": 1, "h": 6, "v": 3, "o": 1}
    assert found.share(at) == pytest.approx(10 / 12)
    here = [box for box in found.boxes if all(start.value(at) < end.value(at) for start, end in box.intervals)]
    assert len(here) == 6
    assert found.share({**at, "n": 10**6}) == pytest.approx(4 / 6, rel=1e-5)
    assert check_masks(found, tuple({**at, "n": n, "h": h} for n in (2, 3, 7) for h in (3, 5, 8)))
    wrong = tuple(type(box)(intervals=box.intervals, equal=not box.equal) for box in found.boxes)
    assert not check_masks(type(found)(mutant=found.mutant, borders=found.borders, boxes=wrong, places=0), (at,))


def test_a_box_is_tested_at_a_corner_and_its_neighbours():
    assert len(list(corner_and_neighbours([(0, 3), (2, 5), (0, 9), (4, 5)]))) == 4
    found = regions(n2h(Convolution(pad=1)))
    elements = sum(s["n"] * s["o"] * s["h"] * s["v"] for s in sizes_for(found.mutant.program))
    assert 0 < found.places < 3 * elements


def test_thresholds_of_an_index_of_two_images():
    points = {(name, str(at)) for name, at in thresholds(size("i*h + j - 1"), frozenset("ij"))}
    assert {("j", "1"), ("j", "h+1"), ("i", "1"), ("i", "0")} <= points


@pytest.mark.slow
def test_zero_rows_and_boxes_make_it_exact_and_too_few_zero_rows_do_not():
    mutant = n2h(Convolution(pad=1))
    by = {each.correction: each for each in corrected(Convolution(pad=1), boxes=True) if each.path == str(mutant)}
    assert set(by) == {ZERO_ROWS, BOXES}
    for each in by.values():
        assert each.certificate.random >= 50 and each.certificate.exact > 0
    program = mutant.program
    bare = verified(program, "no zero rows", mutant.term)
    assert bare.counterexample is not None and not sound(bare, program) and bare.word == "unsound"
    wide = n2h(Convolution(kernel=(5, 5), pad=2))
    few = cut(replaced(wide.term, {"x": padded(variable("x"), -2, 0, 1)}, {"h": size("h") + 1}), -2, 0, size("h"))
    assert verified(wide.program, "one zero row, two reached", few).counterexample is not None
    assert sound(verified(wide.program, "", with_zero_rows(wide, 2)), wide.program)


def test_a_correction_of_too_few_boxes_is_caught():
    mutant = n2h(Convolution(pad=1))
    found = regions(mutant)
    forgotten = tuple(
        type(box)(intervals=box.intervals, equal=box.equal or str(box.intervals[2][0]) == "h-1") for box in found.boxes
    )
    target, where = with_boxes(type(found)(mutant=mutant, borders=found.borders, boxes=forgotten, places=0))
    verdict = verified(mutant.program, "last row forgotten", target, where)
    assert (
        verdict.counterexample is not None and verdict.counterexample.index[2] == verdict.counterexample.sizes["h"] - 1
    )


@pytest.mark.slow
def test_borders_that_depend_on_a_rest_are_refused():
    parity = next(m for m in mutants(convolution(Convolution(pad=1))) if str(m).startswith("fill, N2H, conv"))
    assert regions(parity) is None


def test_a_transposed_convolution_is_pytorchs():
    program = transposed(2, bias=True)
    x, w, b = R(2, 3, 4, 5).double(), R(3, 2, 2, 2).double(), R(2).double()
    values = {"x": x.numpy(), "w": w.numpy(), "b": b.reshape(2, 1, 1).numpy()}
    made = evaluated(program.source, Floats(), values, {"n": 2, "c": 3, "h": 4, "v": 5, "o": 2}, {})
    assert torch.allclose(torch.from_numpy(made), nn.functional.conv_transpose2d(x, w, b, stride=2))
    assert len(corrected_spread(2, bias=True)) == len(corrected_spread(3, bias=False)) == 1


def conv(*args, **more):
    return nn.Conv2d(*args, **more)


#: Pass -> a module and its input, and one that lacks its condition.
CASES = {
    "dilated chain: space to batch": (
        nn.Sequential(conv(3, 4, 3, padding=2, dilation=2), nn.ReLU(), conv(4, 5, 3, padding=2, dilation=2)),
        R(2, 3, 6, 8), R(2, 3, 6, 7),
    ),
    "dilated conv: space to batch": (conv(3, 4, 3, padding=3, dilation=3), R(1, 3, 7, 8), None),
    "batch to rows": (conv(3, 4, 3, padding=1), R(3, 3, 5, 6), R(1, 3, 5, 6)),
    "batch to columns": (conv(3, 4, 5, padding=2, bias=False), R(2, 3, 7, 6), R(1, 3, 7, 6)),
    "rows to batch": (conv(3, 4, 3, padding=1), R(2, 3, 9, 6), None),
    "batch to rows, boxes again": (conv(3, 4, 3, padding=1), R(3, 3, 6, 6), R(1, 3, 6, 6)),
    "1x1 conv: product": (conv(3, 4, 1), R(2, 3, 5, 6), None),
    "1x1 conv: product of rows": (conv(3, 4, 1), R(2, 3, 5, 6), None),
    "conv: product of patches": (conv(3, 4, (2, 3)), R(2, 3, 5, 6), None),
    "transposed conv: product": (nn.ConvTranspose2d(3, 4, 2, stride=2), R(2, 3, 5, 6), None),
    "batched product of one matrix": (None, R(3, 4, 5), None),
}  # fmt: skip
STRIDED = {"batched product of one matrix": nn.Identity(), "transposed conv: product": nn.ConvTranspose2d(3, 4, 3, 2)}


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", [each.name for each in MUTANT_PASSES])
def test_each_pass_keeps_the_result_and_needs_its_condition(name):
    module, x, lacking = CASES[name]

    def function(m, y):
        return m.f(y) if module is not None else torch.bmm(y, m.w.expand(3, 5, 6))

    weights = {"f": module} if module is not None else {"w": R(1, 5, 6)}
    found, done = rewritten(function, x, passes=[name], everything=True, **weights)
    assert done == {name} and found.after.outputs != found.before.outputs
    assert ops(found.after) != ops(found.before)
    other = STRIDED.get(name) or nn.Sequential(conv(x.shape[1], 4, 3, stride=2))
    cases = [(x[..., :4] if name == "batched product of one matrix" else x, other)]
    cases += [(lacking, module)] if lacking is not None else []
    for given, without in cases:
        assert not rewritten(lambda m, y: m.f(y), given, passes=[name], everything=True, f=without)[1]


@pytest.mark.slow
def test_mutants_are_tried_only_when_asked_for():
    flow = traced(lambda m, x: m.f(x), R(1, 256, 64, 64), f=conv(256, 256, 3, padding=2, dilation=2)).flow
    for more, expected in (
        ({}, False),
        ({"mutants": True}, True),
        ({"passes": ["dilated conv: space to batch"]}, True),
    ):
        steps = apply_passes(flow, V100, **more).steps
        assert any(step.name == "dilated conv: space to batch" and step.applied for step in steps) is expected
    with pytest.raises(UserError, match="there is no pass"):
        apply_passes(flow, V100, passes=["dilated conv: space to bach"])


@pytest.mark.slow
def test_dilated_convolutions_gain_on_v100_what_pet_published_and_nothing_on_cpus():
    """PET's CSRNet on a V100: 1.3 to 2.5 times as fast; Winograd's algorithm takes the dense convolution alone."""
    module, inputs = csrnet_back()
    flow = traced(lambda m, x: m.f(x), *inputs, f=module).flow
    found = apply_passes(flow, V100, mutants=True)
    price = found.prices
    ratio = price.table(found.before).totals.device_s / price.table(found.after).totals.device_s
    assert 1.3 < ratio < 2.5
    assert next(step.name for step in found.steps if step.applied and not step.tidy) == "dilated chain: space to batch"


@pytest.mark.slow
def test_the_search_over_parts_takes_the_chain_on_v100():
    module, inputs = csrnet_back()
    flow = traced(lambda m, x: m.f(x), *inputs, f=module).flow
    prices = Prices(FusedTimer(device=V100))
    cost = CostModel(prices=prices, weights=time_weights(prices, flow))
    moves = tuple(each for each in MUTANT_PASSES if each.name != "batch to rows, boxes again")
    problem = Problem(flow=flow, moves=moves, cost=cost, on_cuda=True)
    found = best_first(problem, together=True, budget=60)
    chain = apply_passes(flow, V100, passes=["dilated chain: space to batch"], everything=True).after
    assert found.cost <= cost.of_graph(chain) < 0.8 * problem.start


def test_a_small_csrnet_is_the_same_after_all_mutants():
    module, inputs = csrnet(batch=2, pixels=32, divisor=32)
    _, done = rewritten(lambda m, x: m.f(x), *inputs, passes=["dilated chain: space to batch", "batch to rows"],
                        everything=True, f=module)  # fmt: skip
    assert done == {"dilated chain: space to batch", "batch to rows"}


def test_the_rule_of_a_chain_is_checked_and_a_chain_of_other_functions_is_not_its():
    rule = chain_rule(("relu", ""), (True, True), 3, 2, 2)
    assert rule.certificate.random >= 50 and rule.certificate.exact > 0
    assert "relu" in str(rule.sources[0])


def test_a_geometry_that_is_none_is_refused():
    with pytest.raises(UserError, match="is no convolution"):
        Convolution(dilation=0)
    assert {each.correction for each in corrected_product(batched=True)} <= {EXACT}
    assert parsed("matmul(x, w)") is product(batched=True).source


@pytest.mark.slow
def test_programs_that_fill_and_crop_are_proved_for_all_sizes_by_cases():
    """Blocks need their halo rows for it: without them, or with one too few, the proof does not close."""
    given = Convolution(kernel=(3, 3), pad=1)
    (halo,) = (each for each in corrected(given, boxes=False) if each.correction == "halo rows")
    assert not proved_generically(halo.rule) and proved_by_cases(halo.rule)
    every = mutants(convolution(given))
    (bare,) = (each for each in every if str(each) == halo.path)
    wrong = Rule(name="bare", variables=halo.rule.variables, sources=halo.rule.sources, targets=(bare.term,))
    assert not proved_by_cases(wrong)
    filled = [each for each in corrected(Convolution(kernel=(1, 1)), boxes=False) if "crop" in each.path]
    assert len(filled) == 4 and all(proved_by_cases(each.rule) for each in filled)
    source = replaced(filled[0].rule.sources[0], {"x": term("neg", (variable("x"),))}, {})
    assert not proved_by_cases(replace(filled[0].rule, sources=(source,)))
