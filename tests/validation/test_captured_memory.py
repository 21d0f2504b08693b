"""Predicted peak memory of captured steps equals what their tensors take when the steps really run.

Scratch memory of CPU kernels depends on the instruction set; it is held against the allocator of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import models  # noqa: E402
from measured_memory import peak_bytes  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.profiling import without_scratch  # noqa: E402
from steptime.captured.record import capture  # noqa: E402
from steptime.captured.record.training import OPTIMIZERS  # noqa: E402

TOLERANCE, ABSOLUTE = 1e-3, 64 * 1024

#: The profiler itself warns of events that ended before it began.
pytestmark = pytest.mark.filterwarnings("ignore")


def checkpointed(**sizes: Any) -> tuple[Any, Any]:
    """A GPT whose blocks are recomputed in the backward pass."""
    module, inputs = models.gpt(**sizes)
    for block in module.h:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    return module, inputs


GPT = {"layers": 4, "width": 128, "heads": 4, "vocabulary": 4000, "tokens": 128, "batch": 4, "targets": True}
SMALL = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1000, "tokens": 16, "batch": 1, "targets": True}

#: Name -> model, dtype of its weights, optimiser, autocast.
CASES: dict[str, tuple[Callable[[], tuple[Any, Any]], str, str | None, str | None]] = {
    "gpt fp32 foreach adamw": (lambda: models.gpt(**GPT), "fp32", "adamw", None),
    "gpt fp32 loop adamw": (lambda: models.gpt(**GPT), "fp32", "adamw-loop", None),
    "gpt fp32 fused adamw": (lambda: models.gpt(**GPT), "fp32", "adamw-fused", None),
    "gpt bf16 foreach adamw": (lambda: models.gpt(**GPT), "bf16", "adamw", None),
    "gpt autocast bf16": (lambda: models.gpt(**GPT), "fp32", "adamw", "bf16"),
    "gpt small batch, foreach": (lambda: models.gpt(**SMALL), "fp32", "adamw", None),
    "gpt small batch, loop": (lambda: models.gpt(**SMALL), "fp32", "adamw-loop", None),
    "gpt without optimiser": (lambda: models.gpt(**GPT), "fp32", None, None),
    "gpt checkpointed": (lambda: checkpointed(**GPT), "fp32", "adamw", None),
    "gpt checkpointed, autocast": (lambda: checkpointed(**GPT), "fp32", "adamw-loop", "bf16"),
    "gpt eager attention, dropout": (
        lambda: models.gpt(**{**GPT, "fused": False, "dropout": 0.1}), "fp32", "sgd-momentum", None),
    "llama": (lambda: models.llama(batch=4), "fp32", "adamw", None),
    "bert": (lambda: models.bert(layers=4, width=128, tokens=64, batch=8), "fp32", "adamw", None),
    "resnet": (lambda: models.resnet_small(batch=16, pixels=128), "fp32", "sgd-momentum", None),
    "depthwise cnn": (lambda: models.mobile(batch=32, pixels=64), "fp32", "rmsprop", None),
    "u-net": (lambda: models.unet(batch=8, pixels=64), "fp32", "adam", None),
    "lstm": (
        lambda: models.lstm_language_model(vocabulary=1000, hidden=128, tokens=64, batch=16), "fp32", "adamw", None),
    "gru": (lambda: models.gru_tagger(batch=8), "fp32", "sgd", None),
    "moe": (lambda: models.moe(width=64, tokens=64, batch=4), "fp32", "adamw", None),
    "vit": (lambda: models.vit(width=128, layers=4, batch=16), "fp32", "adagrad", None),
}  # fmt: skip


def loss_of(output: Any) -> Any:
    """The loss that the model returns, else one whose gradient is dense: a sum's is one number, which kernels copy."""
    return output if isinstance(output, torch.Tensor) and output.dim() == 0 else models.loss_of(output)


def built(build: Callable[[], tuple[Any, Any]], dtype: str) -> tuple[Any, Any]:
    """The model with weights of that type."""
    torch.manual_seed(0)
    module, inputs = build()
    return (module.bfloat16() if dtype == "bf16" else module), inputs


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The number of threads decides which convolution kernel PyTorch takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.quick("gpt fp32 foreach adamw")
@pytest.mark.each("name", CASES)
def test_predicted_peak_is_that_of_the_tensors(name: str) -> None:
    build, dtype, optimizer, autocast = CASES[name]
    make = None if optimizer is None else OPTIMIZERS[optimizer]
    measured = peak_bytes(lambda: built(build, dtype), make, loss_of, autocast)
    module, inputs = built(build, dtype)
    program = capture(module, inputs, optimizer=optimizer, autocast=autocast, loss=loss_of)
    predicted = Liveness(without_scratch(program)).peak()
    scratch = Liveness(program).peak().size_bytes - predicted.size_bytes
    print(f"{name:30} {measured} predicted {predicted.size_bytes:>12,} + {scratch:,} B in {predicted.phase}")
    assert abs(predicted.size_bytes - measured.tensors_bytes) <= max(ABSOLUTE, TOLERANCE * measured.tensors_bytes)


@pytest.mark.quick("vit")
@pytest.mark.parametrize("name", ["gpt fp32 foreach adamw", "gpt small batch, loop", "vit"])
def test_predicted_peak_is_that_of_pytorchs_tracker(name: str) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    build, dtype, optimizer, _ = CASES[name]
    module, inputs = built(build, dtype)
    stepper = OPTIMIZERS[str(optimizer)](module.parameters())
    tracker = MemTracker()
    tracker.track_external(module, stepper, *inputs)
    for _ in range(2):
        tracker.reset_mod_stats()
        with tracker:
            value = loss_of(module(*inputs))
            value.backward()
            stepper.step()
            stepper.zero_grad(set_to_none=True)
    snapshot = tracker.get_tracker_snapshot("peak")
    tracked = next(iter(snapshot.values()))["Total"]
    module, inputs = built(build, dtype)
    predicted = Liveness(capture(module, inputs, optimizer=optimizer, loss=loss_of)).peak().size_bytes
    assert abs(predicted - tracked) <= max(ABSOLUTE, TOLERANCE * tracked)
