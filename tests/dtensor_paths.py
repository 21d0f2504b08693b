"""What PyTorch's DTensor plans for a redistribution, in our placements."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from steptime.captured.ops.placement import P, R, Sharding, shard


def dtensor_path(shape: tuple[int, ...], source: Sharding, target: Sharding, sizes: tuple[int, ...]) -> list[Sharding]:
    """The shardings that DTensor plans to go through, one axis at a time; no process group is needed."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import _gen_transform_infos

    ours = {Replicate(): R, Partial(): P, **{Shard(dim): shard(dim) for dim in range(len(shape))}}
    theirs = {placement: each for each, placement in ours.items()}
    mesh = DeviceMesh("cpu", torch.arange(prod(sizes)).reshape(sizes), _init_backend=False, _rank=0)
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, torch.bfloat16)
    pair = (DTensorSpec(mesh, tuple(theirs[p] for p in each), tensor_meta=meta) for each in (source, target))
    out, now = [source], list(source)
    for info in _gen_transform_infos(*pair):
        before, after = info.src_dst_placements
        assert now[info.mesh_dim] == ours[before]
        now[info.mesh_dim] = ours[after]
        out.append(tuple(now))
    assert out[-1] == target
    return out


def is_refused(path: list[Sharding]) -> bool:
    """Whether the path has a step from sharded to a term of a sum, which DTensor plans and then refuses to run."""
    pairs = (pair for a, b in pairwise(path) for pair in zip(a, b, strict=True))
    return any(before.sharded and after.partial for before, after in pairs)
