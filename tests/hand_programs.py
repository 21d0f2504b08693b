"""Programs made by hand, without PyTorch: one small training step, and steps of any sizes and lifetimes."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.captured.graph import BEFORE, Call, Category, Nodes, Phase, Program, Storage, TensorType

MIB = 2**20


def call(
    op: str, phase: Phase, module: str, writes: Sequence[int], *, scratch_bytes: int = 0, view: bool = False
) -> Call:
    """A call without inputs."""
    node = Nodes().apply(op, {}, outputs=[TensorType((1,), "fp32") for _ in writes])
    return Call(node, phase, module, (), tuple(writes), view=view, scratch_bytes=scratch_bytes)


def small_step() -> Program:
    """A weight of 3 MiB with a state of 3 MiB, an activation of 4 MiB, a temporary, a gradient, 1 MiB of workspace."""
    storages = (
        Storage(3 * MIB, BEFORE, None, "parameter", "net.fc.weight"),
        Storage(3 * MIB, BEFORE, None, "state", "net.fc.weight.momentum_buffer"),
        Storage(1000, BEFORE, None, "input", "input.0"),
        Storage(4 * MIB, 0, 3, "activation"),
        Storage(700, 1, 2, "temporary"),
        Storage(3 * MIB, 3, 4, "gradient", "net.fc.weight.grad"),
    )
    calls = (
        call("mm", "forward", "net.fc", [3], scratch_bytes=MIB),
        call("relu", "forward", "net.act", [4]),
        call("view", "forward", "net.act", [4], view=True),
        call("mm", "backward", "net.fc", [5]),
        call("_foreach_add", "optimizer", "", [0]),
    )
    modules = {"": "Model", "net": "Sequential", "net.fc": "Linear", "net.act": "ReLU"}
    return Program(name="small", calls=calls, storages=storages, modules=modules)


def step_of(lives: Sequence[tuple[int, int, int]], count: int, category: Category = "temporary") -> Program:
    """`count` calls with storages of (size, born, freed); born -1: before the step, freed beyond the end: never."""
    storages = [Storage(size, born, freed if freed < count else None, category) for size, born, freed in lives]
    calls = []
    for n in range(count):
        phase: Phase = "forward" if n < count // 2 else "backward"
        calls.append(call("op", phase, f"m.{n % 3}", [i for i, life in enumerate(lives) if life[1] == n]))
    return Program(name="random", calls=tuple(calls), storages=tuple(storages))
