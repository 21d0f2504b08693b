"""The Jacobian-vector product of a captured module: a product more per factor that moves, memory of a few layers."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import steptime  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402

BATCH, WIDTH = 32, 64


def stack(layers):
    each = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*each)


def tangents(layers, of="inputs", **options):
    return steptime.jvp(stack(layers), [torch.empty(BATCH, WIDTH)], of, **options)


def product_flops(program):
    sizes = [call.node for call in program.calls if call.node.op in ("mm", "addmm")]
    return sum(2 * node.inputs[-2].type.shape[0] * WIDTH * WIDTH for node in sizes)


@pytest.mark.quick(without=["inputs"])
@pytest.mark.parametrize("of", ["inputs", "parameters"])
def test_each_factor_takes_one_product_more(of):
    """Also a weight that does not move: PyTorch multiplies by zeros."""
    products = 1 + 2
    assert product_flops(tangents(3, of)) == 3 * products * 2 * BATCH * WIDTH * WIDTH


def test_memory_does_not_grow_with_the_depth():
    def passes(layers):
        program = tangents(layers)
        weights = sum(one.size_bytes for one in program.parameters)
        return Liveness(program).peak().size_bytes - weights

    assert passes(8) == passes(4)


def test_tangents_are_further_inputs():
    program = tangents(2, "parameters")
    assert {call.phase for call in program.calls} == {"forward"}
    moving = {s.name for s in program.storages if s.name.startswith("tangent.")}
    assert moving == {f"tangent.{parameter.name}" for parameter in program.parameters}
    assert {call.module for call in program.calls} <= set(program.modules)
    assert steptime.profile(program, "h100-sxm").table.totals.step_s > 0


def test_operators_are_those_that_pytorch_runs():
    """Real tensors through ``torch.func.jvp``, its shapes on the meta device left out."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if not any(one.is_meta or one._is_zerotensor() for one in args if isinstance(one, torch.Tensor)):
                seen[func.__name__.partition(".")[0].removesuffix("_")] += 1
            return result

    each = nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4, bias=False)
    module, x, seen = nn.Sequential(*each).eval(), torch.randn(5, 8), Counter()
    with Counted(), torch.no_grad():
        torch.func.jvp(module, (x,), (x,))
    ours = Counter(call.node.op for call in steptime.jvp(module, [x]).calls)
    for name in ("addmm", "mm", "tanh", "tanh_backward", "mul", "add", "sub", "zeros", "native_layer_norm", "mean"):
        assert ours[name] == seen[name] > 0, name


def test_attention_is_pushed_forward():
    program = steptime.jvp(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), [torch.empty(2, 5, 16)])
    assert {"bmm", "_safe_softmax"} <= {call.node.op for call in program.calls}


def test_what_is_asked_for_must_be_there():
    assert len(tangents(1, ["0.1.weight"]).calls) < len(tangents(1, "parameters").calls)
    with pytest.raises(steptime.UserError, match=r"there is no input or parameter '0\.1\.wight'"):
        tangents(1, "0.1.wight")
    with pytest.raises(steptime.UserError, match="no output depends"):
        tangents(1, [])


@pytest.mark.each("of", (None, 3, [None]))
def test_what_moves_is_given_by_names(of):
    with pytest.raises(steptime.UserError, match=r"of: is [\s\S]*'inputs', 'parameters', or names"):
        tangents(1, of)
