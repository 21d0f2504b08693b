"""Run a module as a sharding plan says, on PyTorch's DTensor: the second half of a file of ``steptime shard --export``.

The export sets the tables below to those of a plan. Nothing but PyTorch (2.9 or later) is imported, so that the file
runs where steptime is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
from torch.distributed.tensor.experimental import implicit_replication

Placements = tuple[Any, ...]
"""One of ``Shard(dim)``, ``Replicate()`` and ``Partial()`` for each axis of the mesh."""

# -- the plan ---------------------------------------------------------------------------------------------------------
MESH: Mapping[str, int] = {}
PARAMETERS: Mapping[str, Placements] = {}
UPDATES: Mapping[str, Placements] = {}
WEIGHTS: Mapping[str, Mapping[str, Placements]] = {}
INPUTS: Mapping[str, Placements] = {}
ENTERING: Mapping[str, Mapping[tuple[int, ...], Placements]] = {}
LEAVING: Mapping[str, Mapping[tuple[int, ...], Placements]] = {}
# -- how it is run ----------------------------------------------------------------------------------------------------


def parallelize(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Spread a module over a mesh, in place; afterwards it takes whole tensors and gives DTensors.

    Parameters become DTensors that lie as ``PARAMETERS`` says, their gradients lie as ``UPDATES`` says. Hooks of the
    modules in ``WEIGHTS``, ``ENTERING`` and ``LEAVING`` redistribute weights, arguments and results; DTensor decides
    the rest, also the backward pass.

    Args:
        module: the captured module, with the same weights in every process.
        mesh: a mesh with the axes of ``MESH``; its devices hold the module.

    Raises:
        ValueError: the mesh has other axes, or the module other parameters than the plan.
    """
    if dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) != MESH:
        raise ValueError(f"the plan is of a mesh with axes {MESH}, not {mesh}")
    named = dict(module.named_parameters())
    if set(named) != set(PARAMETERS):
        raise ValueError(f"the module and the plan differ in parameters {sorted(set(named) ^ set(PARAMETERS))[:5]}")
    made = {}
    for name, whole in named.items():
        lies = distribute_tensor(whole.detach(), mesh, PARAMETERS[name], src_data_rank=None)
        made[whole] = own = torch.nn.Parameter(lies, requires_grad=whole.requires_grad)
        if whole.requires_grad and name in UPDATES:
            gradients: Any = own
            gradients.register_hook(lambda grad, to=UPDATES[name]: grad.redistribute(placements=to))
    for child in module.modules():
        for key, held in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(child, key, made[held])
    for path, weights in WEIGHTS.items():
        _read(module.get_submodule(path), {made[named[name]]: to for name, to in weights.items()})
    for path, shapes in ENTERING.items():
        module.get_submodule(path).register_forward_pre_hook(
            lambda _, args, kwargs, to=shapes: (_brought(args, to), _brought(kwargs, to)), with_kwargs=True
        )
    for path, shapes in LEAVING.items():
        module.get_submodule(path).register_forward_hook(lambda _, args, made, to=shapes: _brought(made, to))
    module.register_forward_pre_hook(
        lambda _, args, kwargs: _distributed((args, kwargs), mesh), with_kwargs=True, prepend=True
    )
    return module


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest of tuples, lists and mappings with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(each, change) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_each(each, change) for each in value)
    if isinstance(value, dict):
        made = {key: _each(each, change) for key, each in value.items()}
        return made if type(value) is dict else type(value)(**made)
    return value


def _moved(tensor: Any, to: Placements) -> Any:
    return tensor.redistribute(placements=to)


def _brought(value: Any, shapes: Mapping[tuple[int, ...], Placements]) -> Any:
    """DTensors of the shapes in a table redistributed to its placements."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        to = shapes.get(tuple(tensor.shape)) if isinstance(tensor, DTensor) else None
        return tensor if to is None else _moved(tensor, to)

    return _each(value, change)


def _distributed(value: Any, mesh: DeviceMesh) -> Any:
    """Whole tensors as DTensors, the n-th as ``INPUTS`` has ``input.n``; one that it does not have is replicated."""
    number = iter(range(1 << 30))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        to = INPUTS.get(f"input.{next(number)}", (Replicate(),) * mesh.ndim)
        return tensor if isinstance(tensor, DTensor) else distribute_tensor(tensor, mesh, to, src_data_rank=None)

    return _each(value, change)


def _read(child: torch.nn.Module, weights: Mapping[torch.Tensor, Placements]) -> None:
    """While a module runs, it has its weights as it reads them; gradients go back the same way."""
    owned: dict[str, Any] = child._parameters

    def enter(*_: Any) -> None:
        for key, held in list(owned.items()):
            if held in weights:
                owned[key] = _moved(held, weights[held])
                kept[key] = held

    def leave(*_: Any) -> None:
        owned.update(kept)
        kept.clear()

    kept: dict[str, Any] = {}
    child.register_forward_pre_hook(enter)
    child.register_forward_hook(leave, always_call=True)


class Trainer:
    """Training steps of a module that is spread over a mesh.

    A parameter whose update lies otherwise than the parameter has a copy for the optimiser, in pieces, which is brought
    back after each step (ZeRO). The optimiser treats every element by itself, as SGD, Adam and AdamW do.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        loss: Callable[[Any], torch.Tensor] | None,
        mesh: DeviceMesh,
    ) -> None:
        self.module, self.loss = parallelize(module, mesh), loss
        self.updated: list[tuple[Any, Any]] = []
        for name, held in module.named_parameters():
            if held.requires_grad:
                same = UPDATES.get(name, PARAMETERS[name]) == PARAMETERS[name]
                piece = held if same else torch.nn.Parameter(_moved(held.detach(), UPDATES[name]))
                self.updated.append((held, piece))
        self.optimizer = optimizer([piece for _, piece in self.updated])

    def step(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """Forward, backward and update; inputs are whole in every process. Returns the whole loss."""
        with implicit_replication():
            output: Any = self.module(*inputs, **named)
            value: Any = output if self.loss is None else self.loss(output)
            if isinstance(value, DTensor):
                value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
            value.backward()
            for held, piece in self.updated:
                piece.grad = held.grad
            self.optimizer.step()
        with torch.no_grad():
            for held, piece in self.updated:
                held.grad = piece.grad = None
                if piece is not held:
                    held.copy_(_moved(piece, held.placements))
        return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def trainer(
    module: torch.nn.Module,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    mesh: DeviceMesh | None = None,
    device: str = "cpu",
) -> Trainer:
    """A trainer for this process of the job, whose process group is there.

    Args:
        module: the captured module, with the same weights in every process.
        optimizer: function from parameters to an optimiser.
        loss: function from what the module returns to the loss; None: the module returns it.
        mesh: a mesh with the axes of ``MESH``; None: one of all processes.
        device: type of its devices, as PyTorch names it, where no mesh is given.
    """
    made = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH)) if mesh is None else mesh
    return Trainer(module, optimizer, loss, made)
