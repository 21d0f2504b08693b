"""Counted FLOPs of real modules equal those of PyTorch's own counter; every operator of the tables exists in ATen."""

import collections
import functools

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

from models import FACTORIES, PUBLISHED, loss_of, parameters_of  # noqa: E402
from recorded import excess_of_grouped_weights, full_flops  # noqa: E402
from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.ops import FREE, OPERATORS  # noqa: E402
from steptime.captured.record import capture  # noqa: E402

torch.set_num_threads(1)
COUNTED = {operator.__name__ for operator in flop_registry if hasattr(operator, "__name__")}


@functools.cache
def program(name):
    module, inputs = FACTORIES[name]()
    return capture(module, inputs, loss=loss_of)


def by_operator(recorded):
    """Matrix operations by operator, causal attention counted full, as PyTorch's counter does."""
    out = collections.Counter()
    for call in recorded.calls:
        if not call.view:
            out[call.node.op] += full_flops(call.node)
    return {op: flops for op, flops in out.items() if flops}


def counted_by_torch(name):
    module, inputs = FACTORIES[name]()
    with FlopCounterMode(display=False) as counter:
        loss_of(module(*inputs)).backward()
    return {str(op).rpartition(".")[2]: flops for op, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.quick(every=3)
@pytest.mark.each("name", sorted(FACTORIES))
def test_flops_of_forward_and_backward_equal_those_of_pytorch(name):
    ours, theirs = by_operator(program(name)), counted_by_torch(name)
    excess = excess_of_grouped_weights(program(name))
    assert {op: flops for op, flops in ours.items() if op in COUNTED} == {
        op: flops - (excess if op == "convolution_backward" else 0) for op, flops in theirs.items()
    }
    assert (excess > 0) == (name == "mobile")


@pytest.mark.each("name", sorted(FACTORIES))
def test_every_operator_of_the_modules_is_known(name):
    unknown = {call.node.op for call in program(name).calls if work_of(call.node).family == "unknown"}
    assert unknown == set()


def test_attention_on_cpu_counts_as_the_same_attention_written_out():
    fused, eager = by_operator(program("gpt")), by_operator(program("gpt_eager"))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert fused[name] + fused[f"{name}_backward"] * 4 / 5 == eager["bmm"]


def test_lstm_layers_count_both_products():
    flops = by_operator(program("lstm"))
    batch, tokens, width, hidden = 4, 16, 32, 64
    forward = 2 * batch * tokens * 4 * hidden * ((width + hidden) + 2 * hidden)
    assert flops["mkldnn_rnn_layer"] == forward
    assert flops["mkldnn_rnn_layer_backward"] == 2 * forward


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_full_size_modules_have_the_parameters_of_the_published_checkpoints(name):
    factory, count = PUBLISHED[name]
    with torch.device("meta"):
        assert parameters_of(factory()[0]) == count


SOURCES = {"parameter", "buffer", "input", "state", "constant"}


LATER = {"_foreach_clone", "_foreach_mm", "_foreach_powsum"}
"""Operators that PyTorch 2.13 has and an older version may lack: rows that never match there."""


def test_the_tables_name_operators_of_aten():
    """A misspelt name would count nothing, and nobody would see it."""
    names = {name for name in OPERATORS if "::" not in name} - SOURCES
    missing = {n for n in names if not (hasattr(torch.ops.aten, n) or hasattr(torch.ops.aten, f"{n}_"))}
    assert missing <= (LATER if torch.__version__ < "2.13" else set())


def test_pytorchs_own_registry_is_covered():
    assert {name for name in COUNTED if not name.startswith("flex_attention")} <= OPERATORS.keys() - FREE
