"""Environment in which a module runs: fake tensors, and a restore of everything that the run may change.

The fake tensors carry contents that inputs determine; operators with insufficient fake kernels are replaced.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from steptime.captured import torch_parts as parts
from steptime.captured.record.compiler import compiling_nothing
from steptime.captured.record.fake import Replaced, all_modules, take_weights
from steptime.captured.record.guards import unread
from steptime.captured.record.higher_order import RULES
from steptime.captured.record.problems import explaining
from steptime.captured.record.results import NEW, RESULTS
from steptime.captured.record.values import DEVICE, Values, tensors_in

STRUCTURED = frozenset(parts.operators(
    "addmm.default", "gelu.default", "gelu_backward.default", "silu.default", "silu_backward.default",
    "threshold_backward.default", "tanh_backward.default", "sigmoid_backward.default", "_softmax.default",
    "_softmax_backward_data.default", "_log_softmax.default", "_log_softmax_backward_data.default",
    "nll_loss_forward.default", "nll_loss_backward.default",
))  # fmt: skip
"""Operators with a shape kernel that is valid for every device. PyTorch decomposes them because of symbolic sizes; here
sizes are numbers, and the kernel is ten times as fast."""


class Fakes(parts.NotCompiled, parts.FakeTensorMode):
    """Mode of fake tensors that looks up earlier results of an operator on equal tensors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cache_enabled = False
        self.values = Values()
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with parts.DisableTorchFunction():
            return self.dispatch(func, types, args, kwargs)

    def cpp_meta_supports_symint(self, func: Any) -> bool:
        """True if PyTorch runs the shape kernel of an operator instead of its decomposition."""
        return func in STRUCTURED or bool(super().cpp_meta_supports_symint(func))

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors, and also on real ones if their contents are known."""
        if func is DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if self._inside:  # contents follow the outer operator, not those of its decomposition
            return self._run(func, types, args, kwargs, tensors)
        output = self.again(func, args, kwargs, tensors)
        if output is not NEW:
            return output
        known = self.values.are_known(func, args, tensors)
        self._inside = True
        try:
            output = self._run(func, types, args, kwargs, tensors)
        finally:
            self._inside = False
        self.values.follow(func, args, kwargs, tensors, output, known=known)
        return output

    def again(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Result of an earlier equal call, without the dispatcher; ``NEW`` if there was none."""
        key = None if func in SHAPES else RESULTS.key(self, func, args, kwargs)
        output = NEW if key is None else RESULTS.known(key, self, tensors)
        if output is not NEW:
            known = self.values.are_known(func, args, tensors)
            self.values.follow(func, args, kwargs, tensors, output, known=known)
        return output

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        rule = SHAPES.get(func)
        if rule is not None:
            with self:
                return rule(self.values, *args, **kwargs)
        key = RESULTS.key(self, func, args, kwargs)
        if key is not None:
            output = RESULTS.known(key, self, tensors)
            if output is not NEW:
                return output
        try:
            output = super().dispatch(func, types, args, kwargs)
            if key is not None:
                RESULTS.learn(key, RESULTS.key(self, func, args, kwargs), self, tensors, output)
            return output
        except (parts.DataDependentOutputException, parts.DynamicOutputShapeException):
            if not self.values.are_known(func, args, tensors):
                raise
        self.values.read((args, kwargs))
        found = self.values.arguments(args, kwargs)
        with parts.without_modes(), torch.no_grad():
            real = func(*found[0], **found[1])
        with self:
            return parts.pytree.tree_map_only(torch.Tensor, _like, real)


def _like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(real.shape), tuple(real.stride()), dtype=real.dtype)


def _grouped_mm(
    _: Values, a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Result of a grouped product in any element type: groups of rows, of columns, of the inner dim, or batches."""
    if a.dim() == 2 and b.dim() == 2:
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [a.shape[1], b.shape[1]] if b.dim() == 2 else [*a.shape[:-1], b.shape[-1]]
    return torch.empty(shape, dtype=out_dtype or a.dtype)


def _masked_select(_: Values, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Result with one element for each true element of the mask."""
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


def _ctc_loss(
    values: Values, log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each sample, and for each step the states of the longest target: its labels with blanks around them."""
    longest = targets.shape[1] if targets.dim() == 2 else _largest(values, target_lengths)
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _largest(values: Values, lengths: Any) -> int:
    if not isinstance(lengths, torch.Tensor):
        return max(lengths)
    values.read(lengths)
    with parts.without_modes():
        real = values.of(lengths)
        if real is None:
            raise parts.DataDependentOutputException(torch.ops.aten._ctc_loss.Tensor)
        return int(real.max())


#: Operators whose fake kernels refuse valid arguments -> function that returns their result on fake tensors.
SHAPES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(parts.operators("_grouped_mm.default"), _grouped_mm),
    **dict.fromkeys(parts.operators("masked_select.default"), _masked_select),
    **dict.fromkeys(parts.operators("_ctc_loss.default", "_ctc_loss.Tensor"), _ctc_loss),
}

_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class _Reads(TorchFunctionMode):
    """Mode for reads of whole tensors by Python, which fake tensors refuse or do one element at a time."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func.name()) if isinstance(func, parts.HigherOrderOperator) else None
        if rule is not None:
            with self:
                return rule(self._values, *args, **kwargs)
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (parts.pytree.tree_map_only(parts.FakeTensor, self._number, args[0]), *args[1:])
        if func in _READS and isinstance(args[0], parts.FakeTensor):
            with parts.without_modes():
                real = self._values.of(args[0])
                if real is not None:
                    self._values.read(args[0])
                    return func(real.clone(), *args[1:], **kwargs)
        try:
            return func(*args, **kwargs)
        except parts.DataDependentOutputException:
            stands = unread(func, args, self._values, sys._getframe(1))
            if stands is NotImplemented:
                raise
            return stands

    def _number(self, tensor: torch.Tensor) -> Any:
        """Known number of a scalar tensor in a list from which a new tensor is made; else the tensor."""
        with parts.without_modes():
            real = self._values.of(tensor) if not tensor.dim() else None
            if real is None:
                return tensor
            self._values.read(tensor)
            return real.item()


@contextmanager
def values_read(values: Values) -> Iterator[None]:
    """Let Python read tensors with known contents."""
    with _Reads(values):
        yield


_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def capturing(module: torch.nn.Module, inputs: Any, *, name: str, training: bool) -> Iterator[tuple[Any, Replaced]]:
    """Arguments of the module's forward as fake tensors, and the table of replaced tensors.

    Args:
        module: a module; its weights are replaced, and restored at the end.
        inputs: positional arguments, or keyword arguments as a mapping.
        name: name in messages.
        training: training or evaluation mode.

    Raises:
        CaptureError: whatever the module raises, with its line.
    """
    with ExitStack() as stack:
        stack.enter_context(explaining(name))
        stack.enter_context(compiling_nothing())
        fakes = Fakes(allow_non_fake_inputs=True)
        replaced = Replaced(fakes)
        # TorchScript rewrites a program after two runs.
        stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        stack.enter_context(_settings_kept())
        stack.enter_context(_state_kept(module))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(parts.masks_not_read())
        stack.enter_context(parts.flexible_attention_on_any_device())
        stack.enter_context(_said_once())
        stack.enter_context(parts.conversions_to_the_same())
        stack.enter_context(fakes)
        stack.enter_context(values_read(fakes.values))
        stack.enter_context(_asked_if_fake())
        take_weights(module, replaced)
        module.train(training)
        with replaced.taking_inputs():
            arguments = replaced.of_tree(dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs))
        yield arguments, replaced


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore settings of the process that a forward pass may change."""
    dtype, threads, gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    exact, device = torch.are_deterministic_algorithms_enabled(), torch.get_default_device()
    automatic = torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        if torch.are_deterministic_algorithms_enabled() != exact:  # asking loads the compiler
            torch.use_deterministic_algorithms(exact)
        torch.set_autocast_enabled("cpu", automatic)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


@contextmanager
def _state_kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore attributes of the modules: weights are replaced, and a forward pass may store tensors or submodules."""
    held = [(child, {key: (value, _copied(value)) for key, value in child.__dict__.items()})
            for child in all_modules(module)]  # fmt: skip
    # TorchScript keeps tensors and the mode outside of Python's attributes.
    scripts = [child for child in all_modules(module) if isinstance(child, torch.jit.ScriptModule)]
    modes = [(child, child.training) for child in scripts]
    tables: list[Any] = [table for child in scripts for table in parts.tables_of(child)]
    tensors = [(table, dict(table.items())) for table in tables]
    try:
        yield
    finally:
        for script, mode in modes:
            script.training = mode
        for table, own in tensors:
            for name, tensor in own.items():
                table[name] = tensor
        for child, before in held:
            for key in set(child.__dict__) - set(before):
                del child.__dict__[key]
            for key, (value, content) in before.items():
                child.__dict__[key] = value
                _refill(value, content)


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _refill(value: Any, content: Any) -> None:
    if content is not None:
        value.clear()
        value.extend(content) if isinstance(value, list) else value.update(content)


#: Module -> function in it that tells if a tensor is fake, for code that then avoids reading values.
ASKED_IF_FAKE = {"transformers.utils.import_utils": "is_fake_tensor"}


@contextmanager
def _asked_if_fake() -> Iterator[None]:
    """Make code read values of fake tensors, since otherwise it takes other branches than in a real run."""
    with ExitStack() as stack:
        for module, name in ASKED_IF_FAKE.items():
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(patch.object(sys.modules[module], name, lambda _tensor: False))
        yield


@contextmanager
def _said_once() -> Iterator[None]:
    """Silence PyTorch's log of errors under fake tensors, since they are also raised and explained."""
    log = logging.getLogger(parts.FakeTensorMode.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
