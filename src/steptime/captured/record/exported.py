"""Programs of ``torch.export`` as modules that can be recorded, with the module paths that the export kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Interpreter, Node

from steptime.captured.record.paths import Paths


class Exported(torch.nn.Module):
    """Runs the graph of an exported program node by node, each under the path of the module it came from."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.graph = program.module()
        self.paths: Paths | None = None

    def train(self, mode: bool = True) -> Exported:
        """An exported graph is what it was traced as; there is nothing to switch."""
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the program."""
        return _Walk(self.graph, self.paths).run(*args, **kwargs) if not kwargs else self.graph(*args, **kwargs)


class _Walk(Interpreter):
    def __init__(self, graph: torch.nn.Module, paths: Paths | None) -> None:
        super().__init__(graph)  # type: ignore[arg-type]
        self._paths = paths

    def run_node(self, n: Node) -> Any:
        """One node, inside the innermost module of its stack."""
        stack = n.meta.get("nn_module_stack")
        if self._paths is None or not stack:
            return super().run_node(n)
        path = str(list(stack.values())[-1][0])
        with self._paths.inside_of(path.removeprefix("L['self'].").removeprefix("L['self']")):
            return super().run_node(n)


def as_module(given: Any) -> Any:
    """A module for an exported program, the eager module of a compiled one; anything else as it is."""
    if isinstance(given, torch.export.ExportedProgram):
        return Exported(given)
    return vars(given).get("_modules", {}).get("_orig_mod", given) if isinstance(given, torch.nn.Module) else given
