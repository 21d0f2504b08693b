"""Operators that take functions are recorded through their bodies, with a note of what was assumed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._higher_order_ops import associative_scan, scan, while_loop  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime.hardware import load_device  # noqa: E402
from steptime.rewrite.rewriting import rewritten_of, write  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402

TURNS, WIDTH = 5, 8


class Body(torch.nn.Module):
    """Two layers, and a function that runs them."""

    def __init__(self, run) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.run = run

    def forward(self, x):
        return self.run(self, x).sum()


def program_of(run, shape=(4, WIDTH)):
    return capture(Body(run), (torch.zeros(shape),), loss="own", training=True, target="cuda", name="m")


def counted(program, op, phase="forward"):
    return sum(call.node.op == op and call.phase == phase for call in program.calls)


def test_a_branch_on_data_takes_the_first_way_and_says_so():
    program = program_of(lambda m, x: torch.cond(x.sum() > 0, m.one, m.other, (x,)))
    assert [call.node.outputs[0].shape for call in program.calls if call.node.op == "addmm"] == [(4, WIDTH)]
    assert (
        "the first branch of torch.cond is taken" in program.assumed[0] and "test_higher_order.py" in program.assumed[0]
    )


def test_a_branch_on_a_known_value_is_the_one_that_runs():
    program = program_of(lambda m, x: torch.cond(torch.tensor(1) > 2, m.one, m.other, (x,)))
    assert [call.node.outputs[0].shape for call in program.calls if call.node.op == "addmm"] == [(4, 2 * WIDTH)]
    assert program.assumed == ()


def test_a_loop_with_a_known_number_of_turns_runs_them_all():
    def run(m, x):
        return while_loop(lambda i, _: i < TURNS, lambda i, x: (i + 1, m.one(x)), (torch.tensor(0), x))[1]

    program = program_of(run)
    assert (counted(program, "addmm"), program.assumed) == (TURNS, ())
    assert counted(program, "mm", "backward") == 2 * TURNS - 1  # nobody asks for the gradient of the input


def test_a_loop_until_data_says_so_runs_once():
    program = program_of(lambda m, x: while_loop(lambda x: x.sum() < 1, lambda x: (m.one(x),), (x,))[0])
    assert counted(program, "addmm") == 1
    assert "runs its body once" in program.assumed[0]


def test_an_assumption_inside_a_loop_leaves_its_turns():
    """One that is made again adds no note and ends no loop."""

    def until_data(m, x):
        return while_loop(lambda x: x.sum() < 1, lambda x: (m.one(x),), (x,))[0]

    def run(m, x):
        return while_loop(lambda i, _: i < TURNS, lambda i, x: (i + 1, until_data(m, x)), (torch.tensor(0), x))[1]

    program = program_of(run)
    assert counted(program, "addmm") == TURNS
    assert len(program.assumed) == 1


def test_a_scan_is_its_steps():
    def run(m, x):
        def step(state, now):
            state = m.one(state) + now
            return state, state.clone()

        return scan(step, torch.zeros(4, WIDTH), x, dim=0)[1]

    program = program_of(run, (TURNS, 4, WIDTH))
    assert (counted(program, "addmm"), counted(program, "stack")) == (TURNS, 1)
    assert counted(program, "mm", "backward") > TURNS


def test_an_associative_scan_takes_rounds():
    program = program_of(lambda m, x: m.one(associative_scan(torch.add, x, dim=0, combine_mode="generic")), (16, WIDTH))
    assert 2 <= counted(program, "add") <= 2 * 4  # rounds: twice the logarithm of the length


class Flexible(torch.nn.Module):
    """Attention with a mask and a function of scores."""

    def __init__(self, mask) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 64)
        self.mask = mask

    def forward(self, x):
        q = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j), block_mask=self.mask).sum()


@pytest.mark.parametrize(("causal", "share"), [(True, "62%"), (False, "100%")])
def test_flexible_attention_is_a_fused_kernel(causal, share):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cpu") if causal else None
    x = torch.zeros(2, 512, 64)
    program = capture(Flexible(mask), (x,), loss="own", training=True, target="cuda", name="m", autocast="bf16")
    fused = [call.node for call in program.calls if "scaled_dot_product" in call.node.op]
    assert [node.op.endswith("_backward") for node in fused] == [False, True]
    assert fused[0].attribute("is_causal", False) is causal
    assert f"keeps {share} of the blocks" in program.assumed[0]


def test_a_window_keeps_its_share_of_the_pairs():
    def attended(mask):
        program = capture(Flexible(mask), (torch.zeros(2, 2048, 64),), training=False, target="cuda", name="m")
        return next(call.node for call in program.calls if "scaled_dot_product" in call.node.op)

    near = create_block_mask(lambda b, h, i, j: (i - j < 256) & (j <= i), None, None, 2048, 2048, device="cpu")
    window, whole = attended(near), attended(None)
    assert not window.attribute("is_causal", False)
    kept = near.kv_num_blocks.sum() + near.full_kv_num_blocks.sum()
    assert float(work_of(window).matrix_flops / work_of(whole).matrix_flops) == pytest.approx(
        float(kept) / 16**2, abs=0.01
    )


def test_what_was_assumed_is_not_written_as_the_module(tmp_path):
    traced = trace(Flexible(None), (torch.zeros(2, 128, 64),))
    found = rewritten_of(traced, load_device("h100-sxm"))
    with pytest.raises(UserError, match="the graph is not the module on all inputs: flex_attention"):
        write(found, tmp_path / "out.py")
    assert not (tmp_path / "out.py").exists()
