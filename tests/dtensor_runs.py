"""Placements that PyTorch's DTensor propagates through a module, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.captured.ops.placement import P, R, Sharding, shard

SIZES = (2, 4)


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, list[Sharding]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [each for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, DTensor)]
        if made:
            name = func.overloadpacket.__name__
            self.rows.append((name, [tuple(map(ours, each.placements)) for each in made]))
        return out


def ours(placement):
    if isinstance(placement, Shard):
        return shard(placement.dim)
    return {Replicate(): R, Partial("sum"): P}.get(placement, placement)


def theirs(sharding: Sharding):
    return [Shard(each.dim) if each.dim is not None else Replicate() for each in sharding]


@contextmanager
def fake_devices() -> Iterator[object]:
    """A mesh of devices that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=SIZES[0] * SIZES[1], store=FakeStore())
    try:
        yield init_device_mesh("cpu", SIZES, mesh_dim_names=("data", "model"))
    finally:
        dist.destroy_process_group()


def dtensor_run(module, inputs, loss, given: Mapping[str, Sharding], mesh) -> list[tuple[str, list[Sharding]]]:
    """Every operator of a step on DTensors, and how its outputs lie; what is not given is replicated."""
    whole = (R,) * len(SIZES)
    for name, parameter in list(module.named_parameters()):
        path, _, own = name.rpartition(".")
        lies = theirs(given.get(name, whole))
        module.get_submodule(path)._parameters[own] = torch.nn.Parameter(distribute_tensor(parameter.data, mesh, lies))
    put = [
        distribute_tensor(each, mesh, theirs(given.get(f"input.{number}", whole))) for number, each in enumerate(inputs)
    ]
    with _Log() as log:
        loss(module(*put)).backward()
    return log.rows
