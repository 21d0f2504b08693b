"""Runs a sharded step: the module's own eager forward and backward, each operator on this device's pieces.

The module sees tensors with the shapes of the unsharded step (:class:`Whole`), which have no numbers. A dispatch mode
takes the place of every operator: it brings what the operator reads to where the plan has it, by the steps of the plan,
runs it on the pieces, and keeps the results as pieces. Parameters of the module become ``DTensor``. Calls have to be
those that were recorded, on the same tensors in the same order; the first that differs ends the step with an error.

The optimiser has its own copy of each parameter where the plan updates it elsewhere than it lies. Needs PyTorch, and in
every process ``torch.distributed`` with one process for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from steptime.captured import torch_parts as parts
from steptime.captured.graph import TensorType
from steptime.captured.ops.placement import Placement
from steptime.captured.record.fake import with_loss
from steptime.captured.record.training import LOSSES, Loss, own_loss
from steptime.captured.record.values import TORCH_DTYPES, signature, tensors_in
from steptime.errors import UserError
from steptime.sharding.devices import Devices, Piece
from steptime.sharding.kernels import KERNELS, Local
from steptime.sharding.moves import Layout
from steptime.sharding.script import Move, Plain, Script, ScriptCall, View, Way, script_of

_QUERIES: Final = ("prim::device", "prim::layout", "prim::dtype")
_RESHAPES: Final = ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")


class Whole(torch.Tensor):
    """A tensor of the step as the module sees it: its shape, and the number of the storage that devices have."""

    storage_number: int
    __torch_function__ = parts.no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, storage: int, type: TensorType, device: torch.device) -> Whole:
        """A wrapper without memory."""
        made: Whole = parts.wrapper(
            cls, type.shape, strides=type.strides, dtype=TORCH_DTYPES[type.dtype], device=device
        )
        made.storage_number = storage
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Whole(storage {self.storage_number}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UserError(
            f"{func} is called on a tensor of a sharded step outside the step",
            hint="Trainer.step gives the loss; Trainer.whole brings its pieces together",
        )


class _Step(parts.TorchDispatchMode):
    """One forward and backward."""

    def __init__(self, script: Script, devices: Devices, known: dict[int, int], held: dict[int, Piece]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.script, self.devices, self.known, self.held = script, devices, known, held
        self.at = 0
        self.sources = {source.storage: source for source in script.sources}
        self.kept_alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        query = parts.schema_of(func).name
        if query in _QUERIES or func.namespace == "profiler":
            return getattr(args[0], query.removeprefix("prim::"))
        known = signature(func)
        given = {**dict(zip(known.arguments, args, strict=False)), **kwargs}
        call = self._next(known.name)
        tensors = [each for value in given.values() for each in tensors_in(value)]
        self._check(call, tensors)
        result = self._view(func, call, tensors) if call.view else self._run(func, known.written, call, given, tensors)
        for storage in call.freed:
            self.held.pop(storage, None)
        self.at += 1
        return result

    def _next(self, name: str) -> ScriptCall:
        if self.at == len(self.script.calls):
            raise UserError(f"the step goes on with {name} where the plan's ends", hint=_AGAIN)
        call = self.script.calls[self.at]
        if call.op != name:
            raise UserError(
                f"call {self.at} of the step is {name}, the plan has {call.op} of {_place(call)} there", hint=_AGAIN
            )
        return call

    def _check(self, call: ScriptCall, tensors: Sequence[torch.Tensor]) -> None:
        wanted = [read.storage for read in call.reads]
        found = [self._storage(each, to) for each, to in zip(tensors, wanted, strict=False)]
        if found != wanted or len(tensors) != len(wanted):
            raise UserError(
                f"call {self.at} of the step, {call.op} of {_place(call)}, reads other tensors than in the plan",
                hint=_AGAIN,
            )

    def _storage(self, tensor: torch.Tensor, wanted: int) -> int | None:
        """Number of its storage; a plain tensor that is new is what the plan has there, if that comes from outside."""
        if isinstance(tensor, Whole):
            return tensor.storage_number
        found = self.known.get(id(tensor))
        if found is not None or isinstance(tensor, DTensor):
            return found
        source = self.sources.get(wanted)
        if source is None or wanted in self.held or tuple(tensor.shape) != source.type.shape:
            return None
        self.known[id(tensor)] = wanted
        self.kept_alive.append(tensor)
        self.held[wanted] = self.devices.cut(tensor, source.layout)
        return wanted

    def _view(self, func: Any, call: ScriptCall, tensors: Sequence[torch.Tensor]) -> Any:
        made = [Whole(write.storage, write.type, tensors[0].device) for write in call.writes]
        return made[0] if str(parts.schema_of(func).returns[0].type) == "Tensor" else made

    def _run(
        self,
        func: Any,
        written: Sequence[str],
        call: ScriptCall,
        given: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        for storage, piece, way in call.copies:
            self.held[piece] = brought(self.devices, self.held[storage], way)
        pieces = [brought(self.devices, self.held[read.piece], read.way) for read in call.reads]
        rest = iter(pieces)
        local: dict[str, Any] = parts.pytree.tree_map_only(torch.Tensor, lambda _: next(rest).local, dict(given))
        if not pieces:
            return self._made(func(**_keywords(local)), call)
        local |= call.attributes
        rest = iter(pieces)
        named = {name: next(rest) for name, value in given.items() for _ in tensors_in(value)}
        kernel = KERNELS.get(call.op)
        run = Local(self.devices, lambda **each: func(**_keywords(each)), local, named, call.writes)
        with torch.no_grad():
            result = run.plain() if kernel is None else kernel(run)
        originals = {id(piece.local): tensor for piece, tensor in zip(pieces, tensors, strict=True)} if written else {}
        results = tensors_in(result) or [each for name in written for each in tensors_in(local[name])]
        wholes = []
        for tensor, write in zip(results, call.writes, strict=True):
            wholes.append(originals.get(id(tensor)) if written else None)
            self._keep(tensor, write)
        made = iter(wholes)
        writes = iter(call.writes)

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            old, write = next(made), next(writes)
            return Whole(write.storage, write.type, tensor.device) if old is None else old

        return parts.pytree.tree_map_only(torch.Tensor, whole, result)

    def _made(self, result: Any, call: ScriptCall) -> Any:
        """Of what is made from numbers alone every device makes all, and keeps its piece."""
        writes = iter(call.writes)

        def whole(tensor: torch.Tensor) -> Whole:
            write = next(writes)
            assert write.layout is not None
            self.held[write.storage] = self.devices.cut(tensor, write.layout)
            return Whole(write.storage, write.type, tensor.device)

        return parts.pytree.tree_map_only(torch.Tensor, whole, result)

    def _keep(self, tensor: torch.Tensor, write: Any) -> None:
        wanted = tuple(size for _, size in self.devices.box(Piece(tensor, write.type.shape, write.layout)))
        if tuple(tensor.shape) != wanted:
            raise UserError(f"call {self.at} of the step made a piece of {tuple(tensor.shape)}, the plan has {wanted}")
        self.held[write.storage] = Piece(tensor, write.type.shape, write.layout)

    def finish(self) -> None:
        """Check that nothing of the plan is left."""
        if self.at < len(self.script.calls):
            call = self.script.calls[self.at]
            raise UserError(
                f"the step ends before call {self.at} of the plan, {call.op} of {_place(call)}", hint=_AGAIN
            )


_AGAIN: Final = (
    "the step has to be the captured one: the same module, loss, shapes and PyTorch; capture and plan it again"
)


def _place(call: ScriptCall) -> str:
    return call.module or "no module"


def _keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def brought(devices: Devices, piece: Piece, way: Way) -> Piece:
    """The piece at the end of a way."""
    for step in way:
        piece = devices.moved(piece, step) if isinstance(step, Move) else _looked(piece, step)
    return piece


def _looked(piece: Piece, view: View) -> Piece:
    given = dict(view.attributes)
    if view.op in _RESHAPES:
        size: Any = given.get("size", given.get("shape"))
        local = piece.local.reshape(size)
    else:
        x = piece.local.contiguous() if view.op == "as_strided" else piece.local
        result = getattr(torch.ops.aten, view.op)(x, **_keywords(given))
        local = result[view.output] if isinstance(result, (list, tuple)) else result
    return Piece(local, view.shape, view.target)


def placements_of(layout: Layout) -> list[Any]:
    """A sharding as PyTorch has it."""
    return [_placement(each) for each in layout.sharding]


def _placement(given: Placement) -> Any:
    if given.dim is not None:
        return Shard(given.dim)
    return Replicate() if given.reduction is None else Partial(given.reduction)


@dataclass(frozen=True, slots=True)
class _Updated:
    """A parameter of the module, and the optimiser's piece of it."""

    parameter: torch.Tensor
    piece: torch.nn.Parameter


class Trainer:
    """Steps of a module in one of the processes of a job."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        script: Script,
        loss: Loss | None = None,
        device: str = "cpu",
    ) -> None:
        self._loss = own_loss if loss is None else LOSSES[loss] if isinstance(loss, str) else loss
        self.module, self.script = with_loss(module, self._loss), script
        self.devices = Devices(script.sizes)
        self.mesh = init_device_mesh(device, script.sizes, mesh_dim_names=script.names)
        weights = dict(self.module.named_parameters())
        whole = {name: weight.detach() for name, weight in weights.items()}
        self._parameters = {
            source.storage: self._distributed(weights[source.name], source.layout)
            for source in script.sources
            if source.kind == "parameter"
        }
        self._updated = [
            _Updated(
                own := self._parameters[each.storage], _own_piece(self.devices, own, whole[each.parameter], each.layout)
            )
            for each in script.updates
        ]
        self.optimizer = optimizer([each.piece for each in self._updated])

    def _distributed(self, old: torch.nn.Parameter, layout: Layout) -> torch.nn.Parameter:
        """A parameter as a DTensor in the module, wherever the module has it, and in the closure of the loss."""
        local = self.devices.cut(old.detach(), layout).local.clone(memory_format=torch.contiguous_format)
        spread = DTensor.from_local(
            local, self.mesh, placements_of(layout), run_check=False, shape=old.shape, stride=old.stride()
        )
        new = torch.nn.Parameter(spread, requires_grad=old.requires_grad)
        for child in self.module.modules():
            parameters, _ = parts.tables_of(child)
            for key, each in parameters.items():
                if each is old:
                    parameters[key] = new
        for cell in getattr(self._loss, "__closure__", None) or ():
            if cell.cell_contents is old:
                cell.cell_contents = new
        return new

    def step(self, *inputs: Any, **named: Any) -> Piece:
        """Forward, backward and update; inputs are whole in every process.

        Returns:
            This device's piece of the loss (:meth:`whole` brings it together).

        Raises:
            UserError: the step is not the recorded one.
        """
        held, known = self._start(named or inputs)
        mode = _Step(self.script, self.devices, known, held)
        with mode:
            loss: Any = self._loss(self.module(*inputs, **named))
            loss.backward()
        mode.finish()
        self.module.zero_grad(set_to_none=True)
        with torch.no_grad():
            self._update(held)
        return held[loss.storage_number]

    def _start(self, inputs: Any) -> tuple[dict[int, Piece], dict[int, int]]:
        """Pieces of what is there before the step, and the storages of the tensors that the module has of it."""
        held: dict[int, Piece] = {}
        known = {id(parameter): storage for storage, parameter in self._parameters.items()}
        tensors = [each for each in parts.pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor)]
        given = {f"input.{number}": tensor for number, tensor in enumerate(tensors)}
        given |= dict(self.module.named_buffers())
        for source in self.script.sources:
            if source.storage in self._parameters:
                held[source.storage] = Piece(_local(self._parameters[source.storage]), source.type.shape, source.layout)
            elif source.name in given:
                tensor = given[source.name]
                if tuple(tensor.shape) != source.type.shape:
                    raise UserError(
                        f"{source.name} is {tuple(tensor.shape)}, in the plan {source.type.shape}", hint=_AGAIN
                    )
                known[id(tensor)], held[source.storage] = source.storage, self.devices.cut(tensor, source.layout)
        return held, known

    def _update(self, held: dict[int, Piece]) -> None:
        for each, own in zip(self.script.updates, self._updated, strict=True):
            own.piece.grad = brought(self.devices, held.pop(each.gradient), each.there).local.contiguous()
        self.optimizer.step()
        for each, own in zip(self.script.updates, self._updated, strict=True):
            own.piece.grad = None
            new = Piece(own.piece.detach(), tuple(own.parameter.shape), each.layout)
            _local(own.parameter).copy_(brought(self.devices, new, each.back).local)

    def whole(self, piece: Piece) -> torch.Tensor:
        """All of a tensor of which this device has a piece."""
        return self.devices.whole(piece)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # the piece itself, not a look at it
        local: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return local


def _own_piece(devices: Devices, parameter: torch.Tensor, whole: torch.Tensor, layout: Layout) -> torch.nn.Parameter:
    """The optimiser's piece: the module's where it lies the same."""
    same = list(parameter.placements) == placements_of(layout)  # type: ignore[attr-defined]
    return torch.nn.Parameter(_local(parameter) if same else devices.cut(whole, layout).local.clone())


def trainer(
    module: torch.nn.Module,
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer],
    mesh: Mapping[str, int],
    step: Mapping[str, Sequence[Plain]],
    *,
    loss: Loss | None = None,
    device: str = "cpu",
) -> Trainer:
    """What an exported file runs; the module has the same weights in every process.

    Args:
        module: the captured module; its parameters become pieces.
        optimizer: function from parameters to an optimiser that treats every element by itself (SGD, Adam, AdamW).
        mesh: ``MESH`` of the file.
        step: ``STEP`` of the file.
        loss: as it was captured.
        device: type of the devices, as PyTorch names it.
    """
    return Trainer(module, optimizer, script_of(mesh, step), loss, device)
