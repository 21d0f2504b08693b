"""Ways to make a step fit, executed on the CPU: the peak of its tensors is the one that `steptime fit` says."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from measured_memory import Watch  # noqa: E402
from steptime.captured.fit.bench import FORMATS, Bench  # noqa: E402
from steptime.captured.fit.captured import Captured  # noqa: E402
from steptime.captured.fit.choice import Choice  # noqa: E402
from steptime.captured.fit.techniques import Change  # noqa: E402
from steptime.captured.record.training import FUSED  # noqa: E402
from steptime.captured.record.variants import arranged  # noqa: E402
from steptime.hardware import device_within  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/gpt.py"
CPU = Path(__file__).resolve().parents[1] / "data/machines/epyc-9004.toml"
"""A measured CPU: captures have the kernels and the casts that PyTorch takes there (CUDA has others)."""
TOLERANCE = 0.003
BATCH = 8

#: The profiler itself warns of events that ended before it began.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Name -> precision, micro-batch, start of the name of the checkpoints.
CASES = {
    "as it is": ("fp32", 8, "none"),
    "bf16, all blocks": ("bf16", 8, "all blocks"),
    "two micro-batches, groups": ("fp32", 4, "groups of 3"),
    "bf16, four micro-batches, optimal": ("bf16", 2, "optimal"),
    "two micro-batches, selective": ("fp32", 4, "selective"),
    "8-bit activations": ("fp32", 8, "saved activations in 8 bits"),
    "bf16 weights, every 2nd block, accumulated": ("pure-bf16", 4, "every 2nd block"),
}


@pytest.fixture(scope="module")
def engine() -> Captured:
    bench = Bench(text=f"{EXAMPLE}:tiny", device=device_within(str(CPU)))
    return Captured(bench=bench, batch=BATCH, host_Bps=20e9, allow=Change.TRAINING)


def chosen(engine: Captured, precision: str, micro: int, name: str) -> Choice:
    """The choice whose checkpoints begin with that name."""
    found = [one for one in engine.checkpoints(precision, micro) if one.name.startswith(name)]
    assert found, [one.name for one in engine.checkpoints(precision, micro)]
    return Choice(precision=precision, optimizer="fused", batch=BATCH, micro_batch=micro, checkpoints=found[-1])


def executed(engine: Captured, choice: Choice) -> int:
    """Most bytes in use in the second step of a loop with real tensors."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import gpt

    sys.path.remove(str(EXAMPLE.parent))
    form = FORMATS[choice.precision]
    tree, saves = engine._arrangements(choice.precision, choice.micro_batch)[choice.checkpoints]
    watch = Watch()
    with watch.watching():
        torch.manual_seed(0)
        module, tokens, loss = gpt.tiny(batch=choice.micro_batch)
        module = module.bfloat16() if form.weights == "bf16" else module
        optimizer = FUSED["adamw"](module.parameters())
        with arranged(module, engine.bench.paths, tree, saves):
            for _ in range(2):
                with watch.step():
                    for _ in range(choice.accumulation):
                        automatic = torch.autocast("cpu", dtype=torch.bfloat16)
                        with automatic if form.autocast else contextlib.nullcontext():
                            output = module(tokens)
                            value = loss(output)
                        value.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
    return watch.measured().tensors_bytes


@pytest.mark.quick("two micro-batches, selective")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_tensors(engine: Captured, name: str) -> None:
    choice = chosen(engine, *CASES[name])
    said = engine.verified(choice)
    assert said.basis == "capture"
    measured = executed(engine, choice)
    print(
        f"{name:45} executed {measured:>12,} said {said.memory_bytes:>14,.0f} ({said.memory_bytes / measured - 1:+.3%})"
    )
    assert said.memory_bytes == pytest.approx(measured, rel=TOLERANCE)
