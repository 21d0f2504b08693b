"""What cannot be captured is explained, kernels are those of the target, and a capture leaves no trace."""

from __future__ import annotations

import io
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import models  # noqa: E402
from recorded import calls_of  # noqa: E402
from steptime.captured.graph import PHASES, Program  # noqa: E402
from steptime.captured.profiling import NotedLoss  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.captured.record.problems import CaptureError  # noqa: E402
from steptime.captured.record.step import as_module  # noqa: E402
from steptime.captured.record.training import OPTIMIZERS  # noqa: E402
from steptime.errors import UnknownNameError, UserError  # noqa: E402


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


X = torch.empty(5, 8)


# -- what cannot be captured ------------------------------------------------------------------------------------------


class Reads(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum().item() > 0:
            return x
        return -x


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        rows = (x[:, 0] > 0).nonzero().flatten()
        return self.line(x[rows])


class Breaks(nn.Module):
    def forward(self, x: Any) -> Any:
        raise KeyError("no such key")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Reads(), "if x.sum().item() > 0"),
        (Picks(), "rows = (x[:, 0] > 0).nonzero().flatten()"),
        (Breaks(), 'raise KeyError("no such key")'),
    ],
)
def test_the_message_names_the_line(module: Any, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(module, [X])
    assert message in str(caught.value)
    assert __file__ in str(caught.value)


def test_what_fails_is_said_once() -> None:
    """PyTorch would log the stack of its own functions beside."""
    said: list[str] = []
    log, listener = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(listener)
    try:
        with pytest.raises(UserError, match="same reduction dim"):
            capture(nn.Linear(8, 8), (torch.zeros(2, 4),))
        assert said == []
        log.error("later")
    finally:
        log.removeHandler(listener)
    assert said == ["later"]


def test_a_share_of_a_mask_can_be_stated() -> None:
    program = capture(Picks(), [torch.empty(40, 8)], nonzero_share=0.25)
    assert next(c for c in program.calls if c.node.op == "addmm").node.outputs[0].shape == (10, 8)


def test_wrong_options_are_named() -> None:
    with pytest.raises(UnknownNameError, match="adamv"):
        capture(mlp(), [X], optimizer="adamv")
    with pytest.raises(UserError, match="fp8"):
        capture(mlp(), [X], autocast="fp8")
    with pytest.raises(CaptureError, match="not a scalar"):
        capture(mlp(), [X], loss=lambda output: output)


def test_every_call_has_a_known_phase() -> None:
    program = capture(mlp(), [X])
    assert {call.phase for call in program.calls} == set(PHASES)


# -- kernels of the target --------------------------------------------------------------------------------------------


def operators(program: Program) -> Counter[str]:
    return Counter(call.node.op for call in program.calls)


def test_cuda_drops_out_with_a_mask_of_one_byte() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    here, there = (capture(module, [X], target=target, optimizer=None) for target in ("cpu", "cuda"))
    assert "native_dropout" not in operators(here)
    assert operators(there)["native_dropout"] == operators(there)["native_dropout_backward"] == 1
    assert any(s.category == "activation" and s.size_bytes == 5 * 8 for s in there.storages)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_cuda_attention_depends_on_the_type(dtype: Any, kernel: str) -> None:
    module, inputs = models.gpt(layers=1)
    found = operators(capture(module.to(dtype), inputs, target="cuda"))
    assert found[f"_scaled_dot_product_{kernel}_attention"] == 1
    assert found[f"_scaled_dot_product_{kernel}_attention_backward"] == 1


def test_kernels_are_found_inside_pytorchs_own_functions() -> None:
    attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Any) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    program = capture(Own(), [torch.empty(2, 4, 16)], target="cuda")
    assert operators(program)["_scaled_dot_product_efficient_attention"] == 1


def test_cuda_has_one_kernel_for_an_rms_norm() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    found = capture(module, [X], target="cuda", optimizer=None)
    assert operators(found)["_fused_rms_norm"] == operators(found)["_fused_rms_norm_backward"] == 1
    assert "pow" not in operators(found)
    assert any(s.category == "activation" and s.size_bytes == 4 * 5 for s in found.storages)


def test_the_functions_are_as_before() -> None:
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention
    capture(mlp(), [X], target="cuda")
    assert (nn.functional.dropout, nn.functional.scaled_dot_product_attention) == before
    with pytest.raises(UserError, match="tpu"):
        capture(mlp(), [X], target="tpu")


def test_cuda_casts_softmax_and_norms_to_fp32_under_autocast() -> None:
    module, inputs = models.gpt_eager(layers=1)
    here, there = (capture(module, inputs, target=target, autocast="bf16") for target in ("cpu", "cuda"))
    kinds = [next(c for c in p.calls if c.node.op == "_softmax").node.outputs[0].dtype for p in (here, there)]
    assert kinds == ["bf16", "fp32"]
    norm = next(c for c in there.calls if c.node.op == "native_layer_norm")
    assert norm.node.outputs[0].dtype == "fp32"


# -- what a capture must leave as it was ------------------------------------------------------------------------------


class Stores(nn.Module):
    """Keeps things on itself while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.seen.append(x)
        self.table = torch.arange(8.0)
        self.more = nn.Linear(8, 8)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        return self.line(x) * self.table


def test_nothing_of_a_capture_stays() -> None:
    module = Stores()
    threads = torch.get_num_threads()
    first = capture(module, [X])
    assert module.seen == []
    assert not hasattr(module, "table") and not hasattr(module, "more")
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads
    assert len(capture(module, [X]).calls) == len(first.calls)
    assert float(module.line(torch.ones(5, 8)).sum().detach()) < 1e9


def test_what_a_list_held_is_put_back() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.cache = nn.Linear(8, 8), [torch.zeros(3)]

        def forward(self, x: Any) -> Any:
            self.cache[0] = torch.ones(3)
            return self.line(x)

    module = Caches()
    (held,) = module.cache
    capture(module, [X])
    assert module.cache[0] is held


def test_a_real_optimiser_is_taken_with_its_settings() -> None:
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, amsgrad=True, foreach=False)
    program = capture(module, [X], optimizer=optimizer)
    assert "0.weight.max_exp_avg_sq" in {s.name for s in program.storages}
    assert not optimizer.state


@pytest.mark.each("name", OPTIMIZERS)
def test_every_named_optimiser_can_be_captured(name: str) -> None:
    assert calls_of(capture(mlp(), [X], optimizer=name), "optimizer")


def test_one_tensor_is_one_argument() -> None:
    assert capture(nn.Linear(8, 4), torch.empty(1, 8)).batch == 1


@dataclass
class Given:
    """An input in a class that PyTorch does not know."""

    x: Any
    scale: float = 2.0


def test_tensors_in_dataclasses_are_inputs() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, given: Given) -> Any:
            return self.line(given.x) * given.scale

    assert capture(Takes(), [Given(torch.empty(3, 8))]).calls


def test_a_lazy_module_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match="run the module once"):
        capture(nn.Sequential(nn.LazyLinear(4)), [X])


def test_the_module_inside_of_data_parallelism_is_captured() -> None:
    program = capture(nn.DataParallel(mlp()), [X])
    assert program.name == "Sequential" and len(program.calls) == len(capture(mlp(), [X]).calls)


def test_a_part_that_is_split_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match="Sequential: DataParallel splits it or a part"):
        capture(nn.Sequential(nn.DataParallel(mlp())), [X])


def scripted() -> Any:
    return torch.jit.trace(mlp(), X)


def loaded() -> Any:
    """As a program that was scripted and written to a file; it has no Python code."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(scripted()), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.each("make", [scripted, loaded, lambda: nn.Sequential(loaded())])
def test_torchscript_is_captured_and_put_back(make: Any) -> None:
    module, plain = make(), capture(mlp(), [X])
    before = [weight.clone() for weight in module.parameters()]
    for _ in range(3):  # the compiler of TorchScript rewrites a program after two runs
        program = capture(module, [X])
        assert len(program.calls) == len(plain.calls)
        assert sum(p.elements for p in program.parameters) == sum(p.elements for p in plain.parameters)
    capture(module, [X], training=False)
    assert module.training and all(map(torch.equal, before, module.parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_frozen_program_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match=r"before torch\.jit\.freeze"):
        capture(torch.jit.freeze(loaded().eval()), [X])


class HasSparse(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.line, self.reads = nn.Linear(8, 8), reads
        self.register_buffer("mask", torch.eye(5).to_sparse())

    def forward(self, x: Any) -> Any:
        return self.line(torch.sparse.mm(self.mask, x) if self.reads else x)


def test_a_sparse_buffer_may_be_there_but_not_be_read() -> None:
    module = HasSparse(reads=False)
    assert capture(module, [X]).calls and module.mask.is_sparse
    with pytest.raises(CaptureError, match="take dense ones"):
        capture(HasSparse(reads=True), [X])


def test_a_call_of_exit_is_an_error() -> None:
    class Leaves(nn.Module):
        def forward(self, x: Any) -> Any:
            raise SystemExit(0)

    with pytest.raises(CaptureError, match=r"sys\.exit"):
        capture(Leaves(), [X])


def test_a_module_whose_attributes_fail_is_captured() -> None:
    """Looking for what torch.compile wraps asked it for an attribute, and its error was reported as a defect."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def __getattr__(self, name: str) -> Any:
            if name != "layer":
                raise ZeroDivisionError(name)
            return super().__getattr__(name)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    odd = Odd()
    assert as_module(odd) is odd


def test_a_module_without_a_result_is_told_of_no_line_of_ours() -> None:
    class Silent(nn.Module):
        def forward(self, x: Any) -> None:
            return None

    with pytest.raises(CaptureError, match="returns no floating-point tensor") as caught:
        capture(Silent(), [X], loss=NotedLoss())
    assert "\n  at " not in str(caught.value)
    with pytest.raises(CaptureError, match="does not depend on any trained parameter") as caught:
        capture(nn.ReLU(), [X])
    assert "--inference" in str(caught.value)
