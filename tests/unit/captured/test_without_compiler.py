"""Captures load PyTorch's compiler only where a module asks for it, and leave it to others as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HEAD = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from steptime.captured.record import capture

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        nn.init.normal_(self.layer.weight)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False).exp()

def kinds(module):
    return [call.node.op for call in capture(module, [torch.ones(4, 8)], optimizer="adamw").calls]

def is_loaded():
    return "torch._dynamo" in sys.modules or "_dynamo" in vars(torch)
"""
CASES = {
    "modules that compile nothing load no compiler": """
from gpt import tiny
assert "exp" in "".join(kinds(Block())) and not is_loaded()
module, tokens, loss = tiny(batch=1)
capture(module, [tokens], loss=loss)
assert not is_loaded()
asked = [getattr(fn, "__wrapped__", fn) for fn in vars(torch.utils.checkpoint).values()]
assert not [fn for fn in asked if hasattr(fn, "__dynamo_disable")]
""",
    "what a module compiles runs as it is written, and is compiled after": """
made = []

def backend(graph, inputs):
    made.append(graph)
    return graph.forward

class Compiles(Block):
    def forward(self, x):
        return torch.compile(super().forward, backend=backend)(x)

assert kinds(Compiles()) == kinds(Block()) and not made
assert torch._dynamo.list_backends() and torch._dynamo.config is sys.modules["torch._dynamo.config"]
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
assert len(made) == 1
""",
    "a function that is not to be compiled is left out of what is compiled after": """
held = []

class Leaves(Block):
    def forward(self, x):
        import torch._dynamo as compiler
        held.append((compiler, compiler.disable(torch.neg if not held else len)))
        from torch._dynamo.utils import counters
        return super().forward(x)

kinds(Leaves())
import torch._dynamo
assert held[0][0].disable is torch._dynamo.disable and held[0][0].utils is torch._dynamo.utils
made = []
def backend(graph, inputs):
    made.append(graph)
    return graph.forward
@torch._dynamo.disable
def apart(x):
    return x.sin()
torch.compile(lambda x: apart(x + 1) + 1, backend=backend)(torch.ones(2))
assert len(made) == 2 and not any("sin" in str(graph.graph) for graph in made)
""",
}


@pytest.mark.quick("modules that compile nothing load no compiler")
@pytest.mark.parametrize("case", CASES)
def test_in_a_fresh_process(case: str) -> None:
    run = subprocess.run([sys.executable, "-c", HEAD + CASES[case]], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
