"""What a capture looks up is what it would find: results of operators, states of optimisers, blocks that are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from steptime.captured.fit.bench import FORMATS, Bench  # noqa: E402
from steptime.captured.graph import Program  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.graph.placement import place  # noqa: E402
from steptime.captured.graph.segments import Checkpoint, Tree, every, grouped, plain, text  # noqa: E402
from steptime.captured.record import capture, environment, step  # noqa: E402
from steptime.captured.record.environment import Fakes  # noqa: E402
from steptime.captured.record.fold import repeats  # noqa: E402
from steptime.captured.record.results import NEW, RESULTS, Results  # noqa: E402
from steptime.hardware import load_device  # noqa: E402

aten = torch.ops.aten
CALLS: dict[str, Any] = {
    "new": lambda x: aten.add.Tensor(x, x),
    "view": lambda x: aten.view.default(x, [12, 2]),
    "turned": lambda x: aten.t.default(aten.view.default(x, [4, 6])),
    "part": lambda x: aten.slice.Tensor(x, 1, 1, 3),
    "several views": lambda x: aten.split.Tensor(x, 2, 2),
    "several results": lambda x: aten.native_layer_norm.default(x, [6], None, None, 1e-5),
    "in place": lambda x: aten.mul_.Tensor(x, 2.0),
    "another type": lambda x: aten._to_copy.default(x, dtype=torch.bfloat16),
    "chosen": lambda x: aten.index.Tensor(x, [torch.zeros(5, dtype=torch.int64)]),
    "sizes among results": lambda x: aten._scaled_dot_product_flash_attention.default(
        *[aten._to_copy.default(aten.view.default(x, [1, 2, 2, 6]), dtype=torch.bfloat16)] * 3
    ),
}


def described(given: Any, x: Any) -> list[Any]:
    """All that a result is: its layout, and whose storage it has."""
    results = given if isinstance(given, (tuple, list)) else [given]
    shared = [id(one.untyped_storage()) for one in results if isinstance(one, torch.Tensor)]
    return [type(given) is list, len(set(shared))] + [
        (tuple(one.shape), one.stride(), one.storage_offset(), one.dtype, one.device, one.untyped_storage().nbytes(),
         one is x, one.untyped_storage()._cdata == x.untyped_storage()._cdata)
        if isinstance(one, torch.Tensor) else one
        for one in results
    ]  # fmt: skip


@pytest.mark.each("name", CALLS)
def test_a_result_that_is_looked_up_is_that_of_the_operator(name: str) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 2, 6)
        expected = described(CALLS[name](x), x)
    for _ in range(2):
        with Fakes():
            x = torch.empty(2, 2, 6)
            before = len(RESULTS._entries)
            assert described(CALLS[name](x), x) == expected
    assert len(RESULTS._entries) == before, "the second time nothing new is learnt"


def test_numbers_that_decide_a_shape_are_not_looked_up() -> None:
    masks = [torch.arange(4) < count for count in (3, 1)]
    fakes = Fakes()
    with fakes:
        x = torch.empty(4, 3)
        for count, mask in zip((3, 1), masks, strict=True):
            chosen = torch.empty(4, dtype=torch.bool)
            fakes.values.put(chosen, mask)
            assert x[chosen].shape == (count, 3)
            assert torch.nonzero(chosen).shape == (count, 1)


def test_whose_storage_a_result_has_is_not_learnt_from_arguments_that_share_one() -> None:
    results, mode = Results(), Fakes()
    with mode:
        x, y, out = (torch.empty(5, 7) for _ in range(3))

    def called(*tensors: Any) -> Any:
        first, second, into = tensors
        key = results.key(mode, aten.add.out, (first, second), {"out": into})
        assert key is not None
        found = results.known(key, mode, tensors)
        results.learn(key, key, mode, tensors, into)
        return found

    assert called(x, y, x) is NEW and called(x, y, out) is NEW
    assert called(x, y, x) is x and called(y, out, x) is x


def test_what_changes_a_shape_in_place_is_run_each_time() -> None:
    with Fakes():
        for _ in range(2):
            x = torch.empty(3, 8)
            assert aten.unsqueeze_.default(x, 0).shape == x.shape == (1, 3, 8)


def texts(program: Program) -> list[str]:
    """Every call with its node's attributes and types."""
    return [
        f"{c.node.op} {c.node.attributes} {c.node.outputs} {c.reads} {c.writes} {c.phase} {c.module}"
        for c in program.calls
    ]


@pytest.mark.each("optimizer", ["adamw", "adam-loop", "sgd-momentum", "adagrad", "rmsprop", "adafactor"])
def test_an_optimiser_that_starts_from_states_of_before_does_the_same_step(optimizer: str) -> None:
    module, x = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3)), [torch.empty(4, 6)]
    first, second = (capture(module, x, optimizer=optimizer) for _ in range(2))
    assert texts(first) == texts(second)
    assert first.storages == second.storages


PUBLIC = {
    "llama": {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 100},
    "bert": {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "vocab_size": 100},
}  # fmt: skip


@pytest.mark.quick("bert")
@pytest.mark.each("name", PUBLIC)
def test_a_public_model_is_recorded_the_same_without_looking_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from models.hub import hub_model

    with torch.device("meta"):
        module, inputs = hub_model(name, 16, **PUBLIC[name])
    looked_up = capture(module, inputs, autocast="bf16", target="cuda")
    monkeypatch.setattr(Results, "known", lambda *_: NEW)
    run = capture(module, inputs, autocast="bf16", target="cuda")
    assert texts(looked_up) == texts(run) and looked_up.storages == run.storages


def test_weights_and_states_ask_no_mode_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    before = environment._Reads.__torch_function__

    def noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(str(func))
        return before(self, func, types, args, kwargs)

    monkeypatch.setattr(environment._Reads, "__torch_function__", noted)
    module, counts = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]), []
    for optimizer in (None, "adamw", "adamw"):
        asked.clear()
        capture(module, [torch.empty(4, 6)], optimizer=optimizer)
        counts.append(len(asked))
    assert counts[2] < counts[0] + 6 * len(list(module.parameters()))


# -- blocks that are alike --------------------------------------------------------------------------------------------

FACTORIES = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, between=False):
        super().__init__()
        self.blocks, self.head, self.between = nn.ModuleList(Block() for _ in range(10)), nn.Linear(16, 4), between

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) if self.between else block(x)
        return self.head(x)


def net(batch=4):
    return Net(), torch.zeros(batch, 16)


def working_between(batch=4):
    return Net(True), torch.zeros(batch, 16)
"""
TREES: tuple[Tree, ...] = (
    grouped(10, 1), every(10, 2), (Checkpoint(tuple(range(10))),), (0, Checkpoint(tuple(range(1, 9))), 9),
    (0, Checkpoint((1, Checkpoint(tuple(range(2, 10)))))), grouped(10, 3),
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("factories") / "factories_of_blocks.py"
    made.write_text(FACTORIES)
    return made


def weighed(program: Program) -> Any:
    """What a step is and takes, whatever the order in which its storages were numbered."""
    ran = [(c.node.op, c.node.outputs, c.module, c.phase, c.recomputed, c.view, c.inplace) for c in program.calls]
    sizes = sorted((s.size_bytes, s.born, -2 if s.freed is None else s.freed, s.category) for s in program.storages)
    return ran, sizes, Liveness(program).in_use_bytes.tolist(), place(program).peak_reserved_bytes


@pytest.mark.slow
@pytest.mark.each("name", ["net", "working_between"])
def test_checkpoints_of_a_module_that_was_seen_are_those_of_a_new_one(path: Path, name: str) -> None:
    """Blocks are not compared again; those of one checkpoint are folded where nothing runs between them."""
    seen = Bench(text=f"{path}:{name}", device=load_device("rtx-3090"), batch=4)
    assert seen._captured(FORMATS["fp32"], 4, plain(10), "all", fused=True).folded == ("blocks.0-9",)
    for tree in TREES:
        alone = Bench(text=seen.text, device=seen.device, batch=4)
        one, other = (each._captured(FORMATS["fp32"], 4, tree, "all", fused=True) for each in (seen, alone))
        assert weighed(one) == weighed(other), text(tree)
        assert bool(one.folded) == (tree in TREES[:1] or (name == "net" and tree in TREES[2:5])), text(tree)


def test_blocks_are_compared_once_for_each_batch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def counted(*args: Any, **more: Any) -> str | None:
        compared.append(more["name"])
        return repeats(*args, **more)

    monkeypatch.setattr(step, "repeats", counted)
    bench = Bench(text=f"{path}:net", device=load_device("rtx-3090"), batch=4)
    for batch in (4, 2):
        for precision in ("fp32", "bf16"):
            for tree in (plain(10), TREES[0], TREES[2]):
                bench.run(precision, batch, tree)
    assert len(compared) == 2
