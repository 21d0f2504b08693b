"""`steptime fit` on modules of all kinds: where their batch is, what cannot be captured, losses, optimisers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from steptime.api.jobs import CAPTURED_OPTIMIZERS, captured_optimizer
from steptime.captured.fit.bench import Bench
from steptime.captured.fit.captured import Captured
from steptime.captured.fit.techniques import Change
from steptime.captured.fitting import fit
from steptime.captured.profiling import profile
from steptime.errors import UserError
from steptime.hardware import load_device

FACTORIES = '''
import torch
from torch import nn
from torch.nn import functional

WIDTH = 64


class Recurrent(nn.Module):
    """Its inputs are (time, batch)."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(100, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, 100)

    def forward(self, tokens):
        return self.head(self.rnn(self.table(tokens))[0])


def recurrent(batch=20):
    return Recurrent(), torch.zeros(7, batch, dtype=torch.long)


def recurrent_required(batch_size):
    return Recurrent(), torch.zeros(7, batch_size, dtype=torch.long)


def recurrent_fixed():
    return Recurrent(), torch.zeros(7, 20, dtype=torch.long)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x)
        return x


def fixed():
    return Net(), torch.zeros(4, 32, WIDTH)


def masked():
    return Net(), (torch.zeros(4, 32, WIDTH), torch.zeros(32, 32))


def own_targets():
    return Net(), torch.zeros(4, 32, WIDTH), lambda output: functional.mse_loss(output, torch.zeros(4, 32, WIDTH))


class Normed(Block):
    """Refuses a batch of one sample, as batch norm does."""

    def forward(self, x):
        if x.shape[0] == 1:
            raise ValueError("more than one sample is needed")
        return super().forward(x)


class Branching(Block):
    """Does something else with a batch of two."""

    def forward(self, x):
        return super().forward(x.sin() if x.shape[0] == 2 else x)


def branching(batch=4):
    return Net(Branching), torch.zeros(batch, 32, WIDTH)


def normed(batch=4):
    return Net(Normed), torch.zeros(batch, 32, WIDTH)


class Config:
    use_cache = True


CONFIG = Config()


class Caching(Block):
    """Runs otherwise the second time, as a block does that adds to a cache of keys and values."""

    def __init__(self):
        super().__init__()
        self.config = CONFIG
        self.runs = []

    def forward(self, x):
        self.runs.append(1)
        if self.config.use_cache and len(self.runs) > 1:
            x = x.sin()
        return super().forward(x)


class Forgetful(Block):
    """An operator that a selective checkpoint did not see the first time."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def forward(self, x):
        self.runs.append(1)
        if len(self.runs) > 1:
            x = x[:, :, :].cos()
        return super().forward(x)


class CachingNet(Net):
    def __init__(self):
        super().__init__(Caching)
        self.config = CONFIG


def caching(batch=4):
    return CachingNet(), torch.zeros(batch, 32, WIDTH)


def forgetful(batch=4):
    return Net(Forgetful), torch.zeros(batch, 32, WIDTH)
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("factories") / "factories_of_fit.py"
    made.write_text(FACTORIES)
    return made


def bench(path: Path, name: str, **more: Any) -> Bench:
    return Bench(text=f"{path}:{name}", device=load_device("rtx-3090"), **more)


def engine(path: Path, name: str, batch: int, **more: Any) -> Captured:
    return Captured(bench=bench(path, name, batch=batch, **more), batch=batch, host_Bps=20e9, allow=Change.NONE)


def input_shapes(one: Bench, batch: int) -> list[int]:
    """Bytes of the captured inputs."""
    return [each.size_bytes for each in one.run("fp32", batch).program.storages if each.category == "input"]


# -- the batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recurrent", "recurrent_required"])
def test_a_factory_that_takes_the_batch_is_called_for_each(path: Path, name: str) -> None:
    one = bench(path, name, batch=40)
    assert [input_shapes(one, batch) for batch in (40, 10)] == [[8 * 7 * 40], [8 * 7 * 10]]
    assert not one.resizes


def test_the_own_batch_is_the_default_of_the_factory(path: Path) -> None:
    assert bench(path, "recurrent").own_batch() == 20
    with pytest.raises(UserError, match=r"its batch has no default\n.*give --batch"):
        bench(path, "recurrent_required").own_batch()


def test_without_one_the_leading_dim_is_the_batch(path: Path) -> None:
    one = bench(path, "fixed")
    assert one.own_batch() == 4
    assert [input_shapes(one, batch) for batch in (8, 2)] == [[8 * 32 * 64 * 4], [2 * 32 * 64 * 4]]
    assert any("leading dim" in note for note in fit(one.text, "rtx-3090", batch=2, allow="none").notes)


@pytest.mark.parametrize(
    ("name", "why"), [("recurrent_fixed", r"rnn \(GRU\) has batch_first=False"), ("masked", "inputs are 4, 32")]
)
def test_a_batch_that_may_be_elsewhere_is_refused(path: Path, name: str, why: str) -> None:
    for given in ({}, {"batch": 8}):
        with pytest.raises(UserError, match=rf"{why}\n.*let the factory take `batch`"):
            fit(f"{path}:{name}", "rtx-3090", **given)


def test_what_fails_with_resized_inputs_says_so(path: Path) -> None:
    with pytest.raises(UserError, match=r"4, was made 8\)[\s\S]*let the factory take `batch`"):
        fit(f"{path}:own_targets", "rtx-3090", batch=8)


def test_inputs_by_shape_are_resized_though_the_factory_takes_a_batch(path: Path) -> None:
    from steptime.captured.record.inputs import parse_input

    one = bench(path, "normed", inputs=(parse_input("6x32x64"),))
    assert one.own_batch() == 6
    assert input_shapes(one, 3) == [3 * 32 * 64 * 4]


# -- what cannot be captured ------------------------------------------------------------------------------------------


def test_micro_batches_that_fail_are_left_out_with_a_note(path: Path) -> None:
    result = fit(f"{path}:normed", "rtx-3090", batch=4, allow="none")
    assert {point.choice.micro_batch for point in result.front} <= {4, 2}
    assert [note for note in result.notes if "a micro-batch of 1 is left out" in note and "one sample" in note]


def test_a_module_that_branches_on_its_batch_is_recorded_as_it_runs(path: Path) -> None:
    one = bench(path, "branching")
    sines = {batch: sum(call.node.op == "sin" for call in one.run("fp32", batch).program.calls) for batch in (4, 2, 1)}
    assert sines == {4: 0, 2: 3, 1: 0}


def test_checkpoints_that_cannot_be_captured_are_left_out_with_a_note(path: Path) -> None:
    one = engine(path, "forgetful", 4)
    keys = [each.key for each in one.checkpoints("fp32", 4)]
    assert "selective" not in keys and "all" in keys
    refusal = one.refused["selective checkpointing"]
    assert "RuntimeError" in refusal or "CheckpointError" in refusal  # the latter, a RuntimeError, in PyTorch 2.9
    result = fit(one.bench.text, "rtx-3090", batch=4, allow="none")
    assert any("selective checkpointing is left out" in note for note in result.notes)


def test_a_simulation_whose_capture_fails_says_so(path: Path) -> None:
    one = engine(path, "forgetful", 4)
    all_blocks = next(each for each in one.checkpoints("fp32", 4) if each.key == "all")
    point = one.verified(replace(one.plain(), checkpoints=all_blocks))
    assert point.basis == "simulation"
    assert list(one.unverified) == ["checkpoints around all blocks"]


def test_the_cache_is_off_under_checkpoints_and_on_again_after(path: Path) -> None:
    one = engine(path, "caching", 4)
    keys = [each.key for each in one.checkpoints("fp32", 4)]
    assert "selective" in keys and not one.refused
    module = one.bench.target(None, 4).module
    assert module.config.use_cache is True


# -- losses and optimisers --------------------------------------------------------------------------------------------


def test_a_loss_by_name_takes_the_place_of_the_factorys(path: Path) -> None:
    def kinds(loss: str | None) -> set[str]:
        return {call.node.op for call in bench(path, "own_targets", loss=loss).run("fp32", 4).program.calls}

    assert any("mse_loss" in op for op in kinds(None))
    assert not any("mse_loss" in op for op in kinds("sum"))
    with pytest.raises(UserError, match="there is no loss 'crossentropy'"):
        fit(f"{path}:fixed", "rtx-3090", loss="crossentropy")
    with pytest.raises(UserError, match="loss: is for a module that is captured"):
        fit("gpt2", "rtx-3090", loss="sum")


def test_every_optimiser_that_can_be_captured_is_accepted() -> None:
    from steptime.captured.record.training import OPTIMIZERS

    assert set(CAPTURED_OPTIMIZERS) == set(OPTIMIZERS)
    assert {captured_optimizer(name, load_device("rtx-3090")) for name in (*CAPTURED_OPTIMIZERS, "momentum")} == set(
        OPTIMIZERS
    )


def test_an_optimiser_that_cannot_be_captured_is_told(path: Path) -> None:
    with pytest.raises(UserError, match="optimizer: adam8bit cannot be captured"):
        fit(f"{path}:normed", "rtx-3090", optimizer="adam8bit")


@pytest.mark.quick(every=3)
@pytest.mark.each("name", CAPTURED_OPTIMIZERS)
def test_every_optimiser_is_weighed(path: Path, name: str) -> None:
    one = engine(path, "normed", 4, optimizer=name)
    own = name.removesuffix("-loop").removesuffix("-fused")
    kinds = ("default",) if own in ("adagrad", "rmsprop", "adafactor") else ("fused",)
    kinds += ("paged", "offload") if own in ("adam", "adamw") else ()
    assert one.optimizers == kinds
    start, best = (one.verified(one.plain("fp32", kind)) for kind in ("default", kinds[0]))
    assert best.step_s <= start.step_s * (1 + 1e-6) and start.phases_bytes["optimizer"] > 0


def test_a_step_that_the_host_paces_takes_as_long_as_in_profile(tmp_path: Path) -> None:
    """Every further kernel of an operator was issued as slowly as its first one."""
    model = tmp_path / "norms.py"
    model.write_text(
        "import torch\ndef norms(batch=4):\n"
        "    return torch.nn.Sequential(*(torch.nn.LayerNorm(64) for _ in range(8))), torch.zeros(batch, 64)\n"
    )
    totals = profile(f"{model}:norms", "rtx-4090").table.totals
    assert totals.host_s > 2 * totals.device_s
    assert fit(f"{model}:norms", "rtx-4090").baseline.step_s == pytest.approx(totals.step_s, rel=1e-2)


def test_a_cross_entropy_of_a_loss_says_what_to_do(tmp_path: Path) -> None:
    """The message was that a tuple index was out of range."""
    model = tmp_path / "own.py"
    model.write_text(
        "import torch\nclass Own(torch.nn.Linear):\n    def forward(self, x): return super().forward(x).sum()\n"
        "def own(batch=4):\n    return Own(8, 8), torch.zeros(batch, 8)\n"
    )
    with pytest.raises(UserError, match="the module returns one number\n  where that number is the loss: --loss own"):
        profile(f"{model}:own", "rtx-4090", loss="cross-entropy")
    assert profile(f"{model}:own", "rtx-4090", loss="own").settings.loss
