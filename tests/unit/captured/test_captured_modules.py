"""A module as a workload: its parts, its lines over the micro-batch, and how tensor ranks cut it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import captured_modules  # noqa: E402
from captured_modules import GPT, LLAMA, captured  # noqa: E402
from steptime.captured.cut.cutting import cutting_of  # noqa: E402
from steptime.captured.cut.rules import reshaped  # noqa: E402
from steptime.captured.cut.sections import Sections, sections_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402
from steptime.captured.workload import captured_model  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.model.captured import CapturedModel, Line  # noqa: E402

EVERY = ("gpt", "llama", "bert", "vit", "gpt_eager", "encoder", "mlp", "resnet", "unet")


def sections(module: torch.nn.Module, *inputs: torch.Tensor) -> Sections:
    return sections_of(capture(module, inputs, optimizer=None))


def total(model: CapturedModel, name: str, tp: int = 1, sp: int = 0, batch: int = 3) -> float:
    """Sum of a size over all parts, blocks as often as they are there."""
    way = model.way(tp, sp)
    parts = ((model.head, 1), (model.block, model.layers if model.repeats else 1), (model.tail, 1))
    return sum(count * one.times * float(getattr(one, name).at(way, batch)) for part, count in parts for one in part)


@pytest.mark.quick("gpt", "mlp")
@pytest.mark.each("name", EVERY)
def test_no_parameter_is_lost_or_counted_twice(name):
    model = captured(name)
    tied = sum(one.times * float(one.weights.at(0, 1)) for one in model.tail if one.tied)
    assert total(model, "weights") - tied == model.parameters


@pytest.mark.quick(every=3)
@pytest.mark.each("name", EVERY)
def test_operations_add_up_to_those_of_the_step(name):
    model = captured(name)
    forward = sum(float(line.at(0, 3)) for line in model.forward_flops.values())
    parts = ((model.head, 1), (model.block, model.layers if model.repeats else 1), (model.tail, 1))
    rows = sum(
        count * one.times * float(one.matrix_flops.at(0, 3))
        for part, count in parts for one in part if not one.backward
    )  # fmt: skip
    assert rows == pytest.approx(forward, rel=1e-9)
    assert 2.5 * forward < model.model_flops.at(0, 3) <= 3 * forward * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt", 8), ("llama", 6), ("bert", 4), ("vit", 4), ("gpt_eager", 4), ("encoder", 3), ("checkpointed", 4)],
)
def test_blocks_are_found(name, layers):
    model = captured(name)
    assert model.repeats and model.layers == layers


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_without_a_run_of_equal_blocks_everything_is_in_slices(name):
    model = captured(name)
    assert not model.repeats and not model.head and not model.tail and model.layers > 1


def test_members_of_a_list_that_are_no_sequence_are_no_blocks():
    with torch.device("meta"):
        module, inputs = captured_modules.models.moe()
    assert sections_of(capture(module, inputs, optimizer=None, loss=captured_modules.models.loss_of)).blocks is None


@pytest.mark.each(("name", "ranks"), [
    ("gpt", (1, 2, 4, 8, 16)), ("llama", (1, 2, 4)), ("bert", (1, 2, 4)), ("vit", (1, 2, 4)), ("gpt_eager", (1, 2, 4)),
    ("resnet", (1,)), ("unet", (1,)), ("mlp", (1,)),
])  # fmt: skip
def test_tensor_ranks_divide_heads_and_widths(name, ranks):
    assert captured(name).ranks == ranks


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_block_reduces_twice_forward_and_twice_backward(name):
    """As Megatron (arXiv 1909.08053, section 3): the residual stream of two products out of, and two into a block."""
    sizes = GPT if name == "gpt" else LLAMA
    stream = 3 * sizes["tokens"] * sizes["width"] * 2
    for backward in (False, True):
        found = [each for one in captured(name).block if one.backward == backward for each in one.reductions]
        assert [each.size_bytes.at(0, 3) for each in found] == [stream, stream]
        assert all(each.tokens for each in found)


@pytest.mark.each("name", ["gpt", "llama", "bert", "vit", "gpt_eager", "encoder"])
@pytest.mark.each("tp", [2, 4])
def test_shards_of_a_block_are_the_whole(name, tp):
    model = captured(name)
    for one in model.block:
        whole, local = (float(one.matrix_flops.at(model.way(n, 0), 2)) for n in (1, tp))
        assert local * tp == pytest.approx(whole, rel=1e-9)
        weights, part, same = (float(line.at(way, 1)) for line, way in (
            (one.weights, 0), (one.weights, model.way(tp, 0)), (one.replicated, model.way(tp, 0)),
        ))  # fmt: skip
        assert (part - same) * tp + same == weights


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_tokens_that_are_shared_out_leave_nothing_whole_in_a_block(name):
    model = captured(name)
    kept = {sp: sum(o.times * o.kept_bytes.at(model.way(4, sp), 2) for o in model.block) for sp in (0, 1)}
    whole = sum(o.times * o.kept_bytes.at(0, 2) for o in model.block)
    assert model.sequence_parallel
    assert kept[1] == pytest.approx(whole / 4, abs=64), "but for the state of the generator"
    assert kept[1] < kept[0] < whole


def test_work_that_runs_again_is_no_work_of_the_model():
    model = captured("checkpointed")
    forward = sum(float(line.at(0, 3)) for line in model.forward_flops.values())
    again = sum(4 * o.times * float(o.matrix_flops.at(0, 3)) for o in model.block if o.backward)
    first = 2 * 3 * 16 * 64 * 64  # no gradient of the input of the whole
    assert model.model_flops.at(0, 3) == 3 * forward - first
    # A checkpoint runs again up to the last result that is needed: one of the two products.
    assert again == 2.5 * (forward - first)


def test_a_norm_of_a_head_is_cut_and_a_router_is_not():
    module = captured_modules.UsesRmsNorm()
    cutting = cutting_of(sections(module, torch.empty(2, 8, 64)))
    assert cutting.weights == {"into.weight": 0, "into.bias": 0, "out.weight": 1}
    assert cutting.ranks == (1, 2, 4)


def test_a_product_whose_columns_are_summed_is_left_whole():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(self.norm(self.up(x)))

    cutting = cutting_of(sections(Normed(), torch.empty(4, 8)))
    assert cutting.ranks == (1,) and not cutting.weights


def test_the_vocabulary_is_cut_with_its_table_and_its_loss():
    model = captured("gpt")
    table = GPT["vocabulary"] * GPT["width"]
    head = {tp: sum(one.times * one.weights.at(model.way(tp, 0), 1) for one in model.head) for tp in (1, 4)}
    assert head[1] - head[4] == table * 3 / 4
    logits = {tp: max(one.matrix_flops.at(model.way(tp, 0), 1) for one in model.tail) for tp in (1, 4)}
    assert logits[4] * 4 == logits[1]
    (exchanged,) = [each for one in model.tail for each in one.reductions if not each.tokens]
    assert exchanged.size_bytes.at(0, 2) == 2 * GPT["tokens"] * 3 * 4


def test_a_tied_head_has_its_table_again_only_on_a_stage_of_its_own():
    (tied,) = [one for one in captured("gpt").tail if one.tied]
    assert tied.weights.at(0, 1) == GPT["vocabulary"] * GPT["width"]
    assert not [one for one in captured("llama").tail if one.tied]


def test_one_kernel_for_rms_norm_keeps_its_input_alone():
    """As on a GPU, not as the CPU writes it out in fp32."""
    names = [one.name for one in captured("llama").block]
    assert sum("fused_rms_norm" in name for name in names) == 4
    assert not [name for name in names if "rsqrt" in name]


def test_only_norms_and_biases_of_rows_are_on_every_rank():
    model, width = captured("gpt"), GPT["width"]
    same = sum(one.times * one.replicated.at(model.way(4, 0), 1) for one in model.block)
    local = sum(one.times * one.weights.at(model.way(4, 0), 1) for one in model.block)
    assert same == 6 * width
    assert local == (12 * width * width + 7 * width) / 4 + same


def test_the_gradient_of_a_tied_weight_is_no_temporary():
    """It waits in the backward pass for the other one, but it is counted as the gradient."""
    model, stream = captured("gpt"), 2 * GPT["tokens"] * GPT["width"] * 2
    largest = max(line.at(0, 2) for line in model.working_bytes)
    assert 4 * stream <= largest <= 5 * stream < GPT["vocabulary"] * GPT["width"] * 2


def test_a_handed_on_stream_is_the_residual_stream():
    assert captured("llama").boundary_bytes.at(0, 3) == 3 * LLAMA["tokens"] * LLAMA["width"] * 2


def test_ways_of_arrays_are_those_of_numbers():
    model = captured("gpt")
    tp, sp = np.array([1, 2, 3, 4, 16]), np.array([1, 0, 1, 1, 1])
    one_by_one = [model.way(int(t), int(s)) for t, s in zip(tp, sp, strict=True)]
    assert model.way(tp, sp).tolist() == one_by_one
    assert one_by_one[2] == 0, "three ranks cannot cut it"
    line = Line(tuple(range(len(model.ways))), (2.0,) * len(model.ways))
    assert line.at(model.way(tp, sp), 5).tolist() == [float(line.at(way, 5)) for way in one_by_one]


def test_sizes_that_are_no_line_are_refused():
    module = torch.nn.Linear(8, 8)
    with pytest.raises(UserError, match="not affine in the samples"):
        captured_model(module, lambda batch: (torch.empty(batch * batch, 8),))


def test_other_operators_for_another_batch_are_refused():
    class Grows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.f = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.f(x).relu() if x.shape[0] > 2 else self.f(x).tanh()

    with pytest.raises(UserError, match="where with 3 it runs"):
        captured_model(Grows(), lambda batch: (torch.empty(batch, 8),))


@pytest.mark.parametrize(("old", "new", "dim", "heads", "found"), [
    ((2, 8, 96), (2, 8, 3, 4, 8), 2, {4}, 3),  # queries, keys, values of four heads
    ((2, 8, 96), (2, 8, 3, 4, 8), 2, set(), 3),
    ((2, 8, 96), (2, 8, 3, 32), 2, set(), 3),  # no heads yet
    ((2, 4, 8, 16), (8, 8, 16), 1, set(), 0),
    ((8, 8, 16), (2, 4, 8, 16), 0, {4}, 1),
    ((2, 8, 4, 16), (2, 8, 64), 2, set(), 2),
    ((2, 8, 64), (4, 4, 64), 1, set(), None),
])  # fmt: skip
def test_a_reshape_carries_a_cut_on(old, new, dim, heads, found):
    assert reshaped(old, new, dim, frozenset(heads)) == found


def test_a_pair_does_not_reach_from_one_block_into_the_next():
    """Of layers with one product each every other one would be cut by rows, so that layers would differ."""
    alike = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)))
    found = sections(alike, torch.empty(4, 8))
    assert len(found.each) == 4 and cutting_of(found).ranks == (1,)


def test_a_list_between_whose_members_another_runs_is_no_run_of_blocks():
    model = captured("moe")
    assert not model.repeats and model.parameters == total(model, "weights")
