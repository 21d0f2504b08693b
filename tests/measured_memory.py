"""What PyTorch's CPU allocator gave and took back in a real training step, from the profiler's memory events."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any


def peak_bytes(
    build: Callable[[], tuple[Any, Any]],
    optimizer: Callable[[Any], Any] | None,
    loss: Callable[[Any], Any],
    autocast: str | None = None,
) -> int:
    """Most bytes in use in the second step of a loop, everything that was made for it counted."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()  # What earlier work left behind must not be freed while the profiler counts.
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            module, inputs = build()
            stepper = optimizer(module.parameters()) if optimizer else None
            for number in range(2):
                with record_function(f"step {number}"):
                    _step(module, inputs, stepper, loss, autocast)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    return _highest(recorded.profiler.kineto_results.experimental_event_tree())


def _step(module: Any, inputs: Any, stepper: Any, loss: Callable[[Any], Any], autocast: str | None) -> None:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    with torch.autocast("cpu", dtype=kinds[autocast]) if autocast else contextlib.nullcontext():
        output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        value = loss(output)
    value.backward()
    if stepper is None:
        module.zero_grad(set_to_none=True)
        return
    stepper.step()
    stepper.zero_grad(set_to_none=True)


def _highest(roots: Any) -> int:
    """Highest sum of all events from the start of the second step on."""
    from torch._C._profiler import _EventType

    changes: list[tuple[int, int]] = []
    begin = 0
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name == "step 1":
            begin = event.start_time_ns
    assert begin, "the second step was not recorded"
    in_use = highest = 0
    for time, change in sorted(changes, key=lambda each: each[0]):
        in_use += change
        if time >= begin:
            highest = max(highest, in_use)
    return highest
