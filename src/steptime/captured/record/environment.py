"""Where a module is run: under fake tensors, with everything that it may change put back afterwards."""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.nn.modules import transformer

from steptime.captured.record.fake import Replaced, all_modules, take_weights
from steptime.captured.record.fake_mode import Fakes, values_read
from steptime.captured.record.problems import explaining

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def capturing(
    module: torch.nn.Module, inputs: Any, *, name: str, training: bool, meta: bool = False
) -> Iterator[tuple[Any, Replaced]]:
    """The arguments of the module's forward without memory, and what stands for its tensors.

    Args:
        module: its weights are replaced, and it is as before when this ends.
        inputs: positional arguments, or keyword arguments as a mapping.
        name: for messages.
        training: training or evaluation mode.
        meta: tensors of the meta device instead of fake ones: faster, and less like a CPU.

    Raises:
        CaptureError: whatever the module raises, with its line.
    """
    fakes = None if meta else Fakes(allow_non_fake_inputs=True)
    replaced = Replaced("meta" if meta else "cpu", None if fakes is None else fakes.values)
    with ExitStack() as stack:
        stack.enter_context(explaining(name))
        stack.enter_context(_settings_kept())
        stack.enter_context(_state_kept(module))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_masks_not_read())
        stack.enter_context(_said_once())
        stack.enter_context(_conversions_to_the_same())
        if fakes is None:
            stack.enter_context(torch.device("meta"))
        else:
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
    """Settings of the process that a forward pass may change."""
    dtype, threads, gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    exact, device = torch.are_deterministic_algorithms_enabled(), torch.get_default_device()
    automatic = torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(exact)
        torch.set_autocast_enabled("cpu", automatic)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


@contextmanager
def _state_kept(module: torch.nn.Module) -> Iterator[None]:
    """What the modules hold: weights are taken away, and a forward pass may store fake tensors, caches, submodules."""
    held = [(child, {key: (value, _copied(value)) for key, value in child.__dict__.items()})
            for child in all_modules(module)]  # fmt: skip
    try:
        yield
    finally:
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


def _masks_not_read() -> AbstractContextManager[object]:
    """`nn.Transformer` compares a mask with the causal one by value; here it is what the caller says it is."""
    return patch.object(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal))


#: Module -> function in it that is asked whether a tensor is fake, by code that then avoids reading values.
ASKED_IF_FAKE = {"transformers.utils.import_utils": "is_fake_tensor"}


@contextmanager
def _asked_if_fake() -> Iterator[None]:
    """Code that reads no values of fake tensors would take other branches than in a real run; here it reads them."""
    with ExitStack() as stack:
        for module, name in ASKED_IF_FAKE.items():
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(patch.object(sys.modules[module], name, lambda _tensor: False))
        yield


def _conversions_to_the_same() -> AbstractContextManager[object]:
    """A module that is converted to what it is, in its forward, keeps its weights; PyTorch would swap fake ones."""
    before: Any = torch.nn.Module._apply

    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(fn)
        held = [t for table in (module._parameters, module._buffers) for t in table.values() if t is not None]
        with torch.no_grad():
            same = all(fn(tensor) is tensor for tensor in held)
        return module if same else before(module, fn, recurse=False)

    return patch.object(torch.nn.Module, "_apply", apply)


@contextmanager
def _said_once() -> Iterator[None]:
    """PyTorch logs what fails under fake tensors with its own stack; it is raised too, and explained."""
    log = logging.getLogger(fake_tensor.__name__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
