"""The cut that is found is right: ranks that run the module on their parts of the weights get its output."""

from __future__ import annotations

import copy
import threading

import pytest

torch = pytest.importorskip("torch")
import models  # noqa: E402
from steptime.captured.cut.cutting import Cutting, cutting_of, family  # noqa: E402
from steptime.captured.cut.sections import sections_of  # noqa: E402
from steptime.captured.record.step import capture  # noqa: E402

RANKS = 2


class Sums:
    """Sums over the ranks, each of them a thread."""

    def __init__(self) -> None:
        self.parts = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=60)

    def of(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        total = sum(self.parts)
        self.barrier.wait()
        return total


def local(module, cutting: Cutting, rank: int, sums: Sums, blocks):
    """The module of one rank: its rows or columns of the weights, its heads, sums after products cut by rows."""
    mine = copy.deepcopy(module)
    for name, weight in module.named_parameters():
        dim = cutting.weights.get(name)
        if dim is None or family(name, blocks) in cutting.vocabulary:
            continue
        path, _, kind = name.rpartition(".")
        owner = mine.get_submodule(path)
        owner._parameters[kind] = torch.nn.Parameter(weight.detach().chunk(RANKS, dim)[rank].clone())
        if dim == 1:
            if rank and owner.bias is not None:
                owner.bias.data.zero_()
            owner.register_forward_hook(lambda _module, _inputs, output: sums.of(rank, output))
    return mine


def outputs(module, inputs, cutting, blocks, shrink):
    sums, found = Sums(), [None] * RANKS

    def run(rank):
        mine = local(module, cutting, rank, sums, blocks)
        shrink(mine)
        with torch.no_grad():
            found[rank] = mine(*inputs)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def fewer_heads(module) -> None:
    for child in module.modules():
        for name in ("heads", "kv_heads"):
            if isinstance(getattr(child, name, None), int):
                setattr(child, name, getattr(child, name) // RANKS)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_ranks_with_their_parts_compute_what_the_whole_computes(name, monkeypatch):
    torch.manual_seed(0)
    module, inputs = models.FACTORIES[name]()
    module = module.double().eval()
    sections = sections_of(capture(module, inputs, optimizer=None, loss=models.loss_of))
    cutting = cutting_of(sections)
    assert len(cutting.pairs) == 2
    module.eval()
    with torch.no_grad():
        whole = module(*inputs)
    reshape = torch.Tensor.reshape
    monkeypatch.setattr(torch.Tensor, "reshape", lambda x, *shape: reshape(x, *_local_shape(x, shape)))
    for mine in outputs(module, inputs, cutting, sections.blocks, fewer_heads):
        for a, b in zip(_leaves(mine), _leaves(whole), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _local_shape(x, shape):
    """The modules join heads to the width of the whole; a rank has some of them."""
    wanted = 1
    for size in shape:
        wanted *= size
    return (*shape[:-1], -1) if wanted > 0 and wanted != x.numel() else shape


def _leaves(output):
    return output if isinstance(output, tuple) else (output,)
