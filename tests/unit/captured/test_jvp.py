"""The Jacobian-vector product of a captured module: a product more per factor that moves, memory of a few layers."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import steptime  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402

BATCH, WIDTH = 32, 64


def stack(layers):
    each = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*each)


def captured(layers, **options):
    return steptime.capture(stack(layers), [torch.empty(BATCH, WIDTH)], optimizer=None, **options)


def product_flops(program):
    sizes = [call.node for call in program.calls if call.node.op in ("mm", "addmm")]
    return sum(2 * node.inputs[-2].type.shape[0] * WIDTH * WIDTH for node in sizes)


@pytest.mark.parametrize(("of", "products"), [("inputs", 1 + 1), ("parameters", 1 + 2)])
def test_each_factor_that_moves_takes_one_product_more(of, products):
    assert product_flops(steptime.jvp(captured(3, training=False), of)) == 3 * products * 2 * BATCH * WIDTH * WIDTH


def test_memory_does_not_grow_with_the_depth():
    def passes(layers):
        program = steptime.jvp(captured(layers, training=False))
        weights = sum(one.size_bytes for one in program.parameters)
        return Liveness(program).peak().size_bytes - weights

    assert passes(8) == passes(4)


def test_the_forward_pass_of_a_training_step_is_differentiated():
    step = captured(2, loss="mse")
    program = steptime.jvp(step, "parameters")
    assert {call.phase for call in program.calls} == {"forward"}
    moving = {s.name for s in program.storages if s.name.startswith("tangent.")}
    assert moving == {f"tangent.{parameter.name}" for parameter in step.parameters}
    assert {call.module for call in program.calls} <= set(program.modules)
    assert steptime.profile(program, "h100-sxm").table.totals.step_s > 0


def test_what_is_asked_for_must_be_there():
    program = captured(1, training=False)
    assert len(steptime.jvp(program, ["0.1.weight"]).calls) < len(steptime.jvp(program, "parameters").calls)
    with pytest.raises(steptime.UserError, match=r"there is no input or parameter '0\.1\.wight'"):
        steptime.jvp(program, "0.1.wight")
    with pytest.raises(steptime.UserError, match="no output depends"):
        steptime.jvp(program, [])
