"""Which module a call belongs to: forward by hooks, backward by the sequence numbers of autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import _get_sequence_nr as sequence_number  # type: ignore[attr-defined]
from torch.nn.modules import module as hooks


class Paths:
    """The path of the module that runs now.

    Autograd numbers its nodes in the order in which the forward pass makes them; the node that runs in the backward
    pass has the number of its forward operator, and so its module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._path = {id(child): path for path, child in module.named_modules()}
        self._owner = {
            id(parameter): name.rpartition(".")[0]
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        self._stack: list[str] = []
        self._of_sequence: dict[int, str] = {}
        self._next = 0
        self._last = ""

    @property
    def inside(self) -> bool:
        """Whether the forward of some module runs (in the backward pass: it runs again)."""
        return bool(self._stack)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow every module's forward."""
        self._next = sequence_number()
        enter = hooks.register_module_forward_pre_hook(self._enter)
        leave = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        self.note()
        self._stack.append(self._path.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        self.note()
        if self._stack:
            self._stack.pop()

    @contextmanager
    def inside_of(self, path: str) -> Iterator[None]:
        """What runs belongs to that path."""
        self.note()
        self._stack.append(path)
        try:
            yield
        finally:
            self.note()
            self._stack.pop()

    def note(self) -> None:
        """Give the nodes that autograd has made since the last note to the module that runs."""
        now = sequence_number()
        path = self._stack[-1] if self._stack else ""
        for number in range(self._next, now):
            self._of_sequence[number] = path
        self._next = now

    def current(self, *, backward: bool) -> str:
        """Path of the module whose forward or backward runs; what autograd adds up in between is the last one's."""
        self.note()
        if self._stack:
            self._last = self._stack[-1]
            return self._last
        node = torch._C._current_autograd_node()
        if node is None:
            self._last = self._last if backward else ""
            return self._last
        variable = getattr(node, "variable", None)
        if variable is not None:
            self._last = self._owner.get(id(variable), self._last)
        else:
            self._last = self._of_sequence.get(node._sequence_nr(), self._last)
        return self._last
