"""Runs a schedule on real layers on the CPU and counts the bytes of its tensors.

The model is a stack of ``Linear`` and an activation, of unequal widths. ``chain_of_layers`` gives its chain from shapes
alone; ``execute`` runs the actions one by one, ``Fn`` and ``Fck`` without autograd, ``Fall`` with it, ``B`` through the
graph that ``Fall`` left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from measured_memory import Storages
from steptime.captured.rematerialisation.chain import Action, Chain, Kind, Segment

FLOAT_BYTES = 4


def layers(widths: Sequence[int], activations: Sequence[type[nn.Module]]) -> nn.Sequential:
    """One segment per pair of widths."""
    pairs = zip(widths[:-1], widths[1:], activations, strict=True)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), activation()) for a, b, activation in pairs))


def chain_of_layers(widths: Sequence[int], activations: Sequence[type[nn.Module]], batch: int) -> Chain:
    """What autograd saves: Linear its input, GELU its input, ReLU its output.

    Without autograd the product lives until the activation is done. In the backward the gradient of the product lives
    beside the gradients of weight and bias, which are then added to those that exist. The seconds are multiply-adds.
    """
    rows = [batch * width * FLOAT_BYTES for width in widths]
    segments = []
    for i, activation in enumerate(activations):
        wide, weight = rows[i + 1], (widths[i] + 1) * widths[i + 1] * FLOAT_BYTES
        gradient = rows[i] if i else 0
        if activation is nn.ReLU:
            saved, saving, backward = 0, wide, wide + weight
        else:
            saved, saving, backward = wide, 0, max(wide - gradient, weight)
        work = float(batch * widths[i] * widths[i + 1])
        segments.append(
            Segment(
                forward_s=work, backward_s=2 * work, input_bytes=rows[i], saved_bytes=saved, gradient_bytes=gradient,
                forward_transient_bytes=wide, saving_transient_bytes=saving, backward_transient_bytes=backward,
                output_in_backward=activation is nn.ReLU,
            )
        )  # fmt: skip
    return Chain(segments=tuple(segments), output_bytes=rows[-1], output_gradient_bytes=rows[-1])


@dataclass(frozen=True)
class Executed:
    action_bytes: tuple[int, ...]
    """Peak during each action, beyond what lived before the first: without the input of the chain."""
    forward_runs: tuple[int, ...]
    gradients: tuple[torch.Tensor, ...]


def execute(model: nn.Sequential, chain: Chain, data: torch.Tensor, schedule: Sequence[Action]) -> Executed:
    """Run a schedule; the gradient of the output is 1 everywhere."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    runs = [0] * len(model)

    def counted(i: int) -> None:
        runs[i] += 1

    handles = [one.register_forward_pre_hook(lambda *_, i=i: counted(i)) for i, one in enumerate(model)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    peaks = _Runner(model, chain, data).run(schedule, Storages([*model.parameters(), *gradients, data]))
    for handle in handles:
        handle.remove()
    return Executed(
        action_bytes=tuple(peaks), forward_runs=tuple(runs), gradients=tuple(gradients)
    )  # fmt: skip


class _Runner:
    def __init__(self, model: nn.Sequential, chain: Chain, data: torch.Tensor) -> None:
        self.model, self.pins = model, [one.output_in_backward for one in chain.segments]
        self.values = {0: data}
        self.graphs: dict[int, tuple[torch.Tensor, torch.autograd.graph.GradientEdge]] = {}
        self.gradient: torch.Tensor | None = None

    def run(self, schedule: Sequence[Action], storages: Storages) -> list[int]:
        """Peak of each action."""
        peaks = []
        with storages:
            for action in schedule:
                storages.begin()
                self.step(action)
                peaks.append(storages.highest_bytes)
        return peaks

    def step(self, action: Action) -> None:
        kind, i = action
        if kind is Kind.BACKWARD:
            self.backward(i)
        elif kind is Kind.SAVE:
            self.save(i)
        elif kind is Kind.DISCARD:
            self.release(i)
        else:
            with torch.no_grad():
                self.values[i + 1] = self.model[i](self.values[i])
            if kind is Kind.FORWARD:
                self.release(i)

    def release(self, i: int) -> None:
        pinned = i in self.graphs or (i and self.pins[i - 1] and i - 1 in self.graphs)
        if i and not pinned:
            self.values.pop(i, None)

    def save(self, i: int) -> None:
        leaf = self.values[i].detach().requires_grad_(i > 0)
        out = self.model[i](leaf)
        self.graphs[i] = (leaf, get_gradient_edge(out))
        self.values[i + 1] = out.detach()

    def backward(self, i: int) -> None:
        if self.gradient is None:
            self.gradient = torch.ones_like(self.values[i + 1])
        self.release(i + 1)
        leaf, edge = self.graphs[i]
        torch.autograd.backward((edge,), (self.gradient,))
        self.gradient = leaf.grad
        del leaf, edge, self.graphs[i]
        self.release(i + 1)
        self.release(i)
