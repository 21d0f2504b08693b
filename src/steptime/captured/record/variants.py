"""Variants of the training of a module: checkpoints around blocks, saved activations in 8 bits, adapters, batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch.utils import checkpoint as recompute

from steptime.captured import torch_parts as parts
from steptime.captured.graph.segments import Checkpoint, Saves, Tree, leaves
from steptime.captured.ops import of_family
from steptime.captured.record.factory import SIZES, found_factory
from steptime.captured.record.fold import LEFT_OUT
from steptime.captured.record.values import signature
from steptime.errors import UserError
from steptime.model.captured import TARGET

LEAST_BLOCKS: Final = 2
GROUP: Final = 256
"""Number of elements of a saved activation with one scale."""
_PRODUCTS: Final = of_family("product", "convolution", "attention")


def blocks_of(module: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Paths of the blocks of a module, one tuple per list or sequence of blocks, outermost first and not nested.

    A block has parameters and members of its own.
    """
    found: list[tuple[str, ...]] = []
    inside: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(child) >= LEAST_BLOCKS:
            members = dict(child.named_children())
            if all(any(True for _ in m.parameters()) and any(True for _ in m.children()) for m in members.values()):
                found.append(tuple(f"{path}.{name}" if path else name for name in members))
                inside.append(path)
    return tuple(found)


@contextmanager
def arranged(
    module: torch.nn.Module, paths: Sequence[str], tree: Tree, saves: Saves = "all", *, chained: bool = False
) -> Iterator[None]:
    """Run blocks under the checkpoints of a tree.

    A checkpoint over several blocks runs all of them when the first is called, with its arguments; the others then
    return their input. So these blocks must follow each other, and take the same further arguments. A cache of keys
    and values that the configuration of the module requests is disabled meanwhile.

    Args:
        module: module with the blocks.
        paths: paths of the blocks, in order.
        tree: tree of checkpoints.
        saves: tensors that a block saves.
        chained: nothing runs between blocks, so a few blocks of one checkpoint may be recorded for all.
    """
    blocks = [module.get_submodule(path) for path in paths]
    runs = [block.forward for block in blocks]
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for item in tree:
            first, *others = leaves((item,))
            handed = {number: _Handed(blocks[number], runs[number]) for number in others}
            if isinstance(item, Checkpoint) or saves == "8bit":
                inside = {first: runs[first], **{number: one.within for number, one in handed.items()}}
                _set(blocks[first], _run(item, inside, saves), (len(inside), repr(_shape(item, first)), saves))
            begins = dict(_innermost(item))
            for number, one in handed.items():
                _set(blocks[number], one, (0, (begins[number] if chained else number) - first))
        again = any(isinstance(item, Checkpoint) for item in tree)
        with _without_cache(module) if again else nullcontext():
            yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            block.__dict__.pop("steptime_checkpoint", None)
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = own


def caching(module: torch.nn.Module) -> list[Any]:
    """Configurations of submodules that request a cache of keys and values."""
    configs = {id(held): held for child in module.modules() if (held := getattr(child, "config", None)) is not None}
    return [config for config in configs.values() if getattr(config, "use_cache", None) is True]


@contextmanager
def _without_cache(module: torch.nn.Module) -> Iterator[None]:
    """Set `config.use_cache` of the modules to False, since a block that runs again would append to the cache twice.

    Hugging Face transformers do the same with checkpoints.
    """
    asking = caching(module)
    try:
        for config in asking:
            config.use_cache = False
        yield
    finally:
        for config in asking:
            config.use_cache = True


def _set(block: torch.nn.Module, forward: Callable[..., Any], mark: tuple[Any, ...]) -> None:
    """Replace the forward of a block; the mark distinguishes equal blocks that run differently."""
    block.__dict__["forward"] = forward
    block.__dict__["steptime_checkpoint"] = mark


def _shape(item: int | Checkpoint, first: int) -> Any:
    """An item with block numbers relative to the first."""
    return [_shape(one, first) for one in item.items] if isinstance(item, Checkpoint) else item - first


class _Handed:
    """Forward of a block that runs inside the call of the first block of its checkpoint, and then returns its input."""

    def __init__(self, block: torch.nn.Module, run: Callable[..., Any]) -> None:
        self._block, self._run, self._within = block, run, False

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(first, *args, **kwargs) if self._within else first

    def within(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the block by a call, so that its path is known; hooks of the user run when it returns its input.

        A block that folding has left out returns its input here too.
        """
        if LEFT_OUT in vars(self._block):
            return first
        if any(parts.hooks_of(self._block)[:2]):
            return self._run(first, *args, **kwargs)
        self._within = True
        try:
            return self._block(first, *args, **kwargs)
        finally:
            self._within = False


def _innermost(item: int | Checkpoint, begins: int = 0) -> Iterator[tuple[int, int]]:
    """Blocks of an item, each with the first block of its innermost checkpoint."""
    if isinstance(item, int):
        yield item, begins
    else:
        for one in item.items:
            yield from _innermost(one, next(leaves((item,))))


def _run(item: int | Checkpoint, runs: Mapping[int, Callable[..., Any]], saves: Saves) -> Callable[..., Any]:
    if isinstance(item, int):
        return partial(_narrow, runs[item]) if saves == "8bit" else runs[item]
    inner = [_run(one, runs, saves) for one in item.items]
    contexts: dict[str, Any] = {}
    if saves == "products":
        contexts = {"context_fn": partial(recompute.create_selective_checkpoint_contexts, _policy)}

    def again(*args: Any, **kwargs: Any) -> Any:
        return recompute.checkpoint(partial(_in_order, inner), *args, use_reentrant=False, **contexts, **kwargs)

    return again


def _in_order(runs: Sequence[Callable[..., Any]], first: Any, *args: Any, **kwargs: Any) -> Any:
    """Run blocks one after the other; the first member of a tuple is the next input."""
    output = runs[0](first, *args, **kwargs)
    for run in runs[1:]:
        output = run(output[0] if isinstance(output, tuple) else output, *args, **kwargs)
    return output


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    saved = signature(operator).name in _PRODUCTS
    return recompute.CheckpointPolicy.MUST_SAVE if saved else recompute.CheckpointPolicy.PREFER_RECOMPUTE


# -- activations in 8 bits --------------------------------------------------------------------------------------------


def _narrow(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
        return run(*args, **kwargs)


def _packed(tensor: torch.Tensor) -> Any:
    """An activation as 8-bit integers with one scale per group; other tensors unchanged."""
    if not tensor.is_floating_point() or tensor.numel() % GROUP or tensor.numel() < 64 * GROUP or _is_weight(tensor):
        return tensor
    rows = tensor.detach().reshape(-1, GROUP)
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min_(1e-12).div_(127)
    return rows.div(scale).round_().to(torch.int8), scale, tensor.shape


def _unpacked(held: Any) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held
    rows, scale, shape = held
    restored: torch.Tensor = rows.to(scale.dtype).mul_(scale).reshape(shape)
    return restored


def _is_weight(tensor: torch.Tensor) -> bool:
    """True for a parameter, a view of one, or a copy of one in another type."""
    if isinstance(tensor, torch.nn.Parameter) or isinstance(parts.base_of(tensor), torch.nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    for _ in range(3):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if type(node).__name__ == "AccumulateGrad":
            return True
    return False


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapt(module: torch.nn.Module, paths: Sequence[str], rank: int) -> tuple[str, ...]:
    """Freeze a module and give every linear layer of its blocks a low-rank adapter; this cannot be undone.

    Returns:
        Names of the frozen weights that get adapters.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    names = []
    for path in paths:
        for inner, layer in module.get_submodule(path).named_modules():
            if isinstance(layer, torch.nn.Linear):
                down = layer.weight.new_empty((rank, layer.in_features))
                up = layer.weight.new_empty((layer.out_features, rank))
                layer.register_parameter("adapter_down", torch.nn.Parameter(down))
                layer.register_parameter("adapter_up", torch.nn.Parameter(up))
                layer.__dict__["forward"] = partial(_adapted, layer)
                names.append(f"{path}.{inner}.weight" if inner else f"{path}.weight")
    return tuple(names)


def _adapted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.functional.linear
    out: torch.Tensor = linear(x, layer.weight, layer.bias) + linear(linear(x, layer.adapter_down), layer.adapter_up)
    return out


# -- inputs and optimisers --------------------------------------------------------------------------------------------


def resized(inputs: Any, batch: int, given: int | None) -> Any:
    """Inputs with another batch where the leading dim is the batch; others are unchanged."""
    if given is None or given == batch:
        return inputs

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != given:
            return tensor
        return torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return parts.pytree.tree_map_only(torch.Tensor, other, inputs)


def batch_parameter(text: str) -> inspect.Parameter | None:
    """The parameter by which a factory takes the batch, if it has one.

    Args:
        text: ``pkg.module:factory`` or ``file.py:factory``; its file is imported.

    Raises:
        UserError: the import fails.
    """
    match = TARGET.fullmatch(text)
    if match is None:
        return None
    factory = found_factory(match["module"], match["name"])
    if isinstance(factory, torch.nn.Module):
        return None
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    return next((parameters[word] for word in SIZES["batch"] if word in parameters), None)


def leading_batch(text: str, module: torch.nn.Module, inputs: Any) -> int:
    """Leading dim of the inputs, checked to be the batch.

    Args:
        text: the factory of the module, for messages.
        module: no submodule may have its batch elsewhere (``batch_first=False``).
        inputs: their leading dims must be equal, or 1.

    Raises:
        UserError: no input has a dim, the inputs hold no sample, or the batch may be another dim.
    """
    tensors = [t for t in parts.pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()]
    sizes = {int(tensor.shape[0]) for tensor in tensors}
    if not sizes:
        raise UserError(f"{text}: no input has a batch dim", hint=TAKE_BATCH)
    if sizes == {0}:
        raise UserError(f"{text}: its inputs hold no sample: their leading dim is 0", hint="make them for 1 or more")
    if len(sizes - {1}) > 1:
        several = ", ".join(map(str, sorted(sizes)))
        raise UserError(f"{text}: which dim is the batch is not known: the leading dims of the inputs are {several}",
                        hint=TAKE_BATCH)  # fmt: skip
    for path, child in module.named_modules():
        if getattr(child, "batch_first", None) is False:
            kind = f"{path or 'it'} ({type(child).__name__})"
            raise UserError(
                f"{text}: which dim is the batch is not known: {kind} has batch_first=False", hint=TAKE_BATCH
            )
    return max(sizes)


TAKE_BATCH: Final = "let the factory take `batch`, and make its inputs for it"


def family_of(optimizer: str) -> str:
    """Name of an optimiser without its implementation.

    > family_of("adamw-loop"), family_of("sgd-momentum"), family_of("adam-fused")
    ('adamw', 'sgd-momentum', 'adam')
    """
    return optimizer.removesuffix("-loop").removesuffix("-fused")
