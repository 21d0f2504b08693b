"""Memory that a real training step has in use on the CPU: by its tensors, and by PyTorch's allocator.

The storages of tensors follow from the program. What kernels take and give back while they run does not: it depends on
the instruction set of the processor, and the allocator alone sees it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Measured(NamedTuple):
    """Most bytes in use in the last step."""

    tensors_bytes: int
    """Storages of tensors: the same on every processor."""
    allocator_bytes: int
    """With the scratch memory of kernels."""


class Storages(TorchDispatchMode):
    """Counts storages that operators make, until they are let go; not those of tensors that were there before."""

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.in_use_bytes = self.highest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.highest_bytes = max(self.highest_bytes, self.in_use_bytes)
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size_bytes = storage._cdata, storage.nbytes()
        if address not in self._sizes:
            weakref.finalize(storage, self._free, address).atexit = False
            self._sizes[address] = size_bytes
            self.in_use_bytes += size_bytes

    def begin(self) -> None:
        """The highest use is that of what follows."""
        self.highest_bytes = self.in_use_bytes

    def _free(self, address: int) -> None:
        self.in_use_bytes -= self._sizes.pop(address, 0)


class Watch:
    """Follows a loop of steps; :meth:`step` begins each of them."""

    def __init__(self) -> None:
        self._storages = Storages()
        self._steps = 0
        self._profile: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Everything that is made for the steps is made within; one thread, which decides on kernels."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        gc.collect()  # What earlier work left behind must not be freed while the profiler counts.
        gc.disable()
        cpu = torch.profiler.ProfilerActivity.CPU
        try:
            with torch.profiler.profile(activities=[cpu], profile_memory=True) as self._profile, self._storages:
                yield
        finally:
            gc.enable()
            torch.set_num_threads(threads)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step."""
        self._storages.begin()
        with torch.profiler.record_function(f"step {self._steps}"):
            yield
        self._steps += 1

    def measured(self) -> Measured:
        """Peaks of the last step."""
        roots = self._profile.profiler.kineto_results.experimental_event_tree()
        return Measured(self._storages.highest_bytes, _highest(roots, f"step {self._steps - 1}"))


def peak_bytes(
    build: Callable[[], tuple[Any, Any]],
    optimizer: Callable[[Any], Any] | None,
    loss: Callable[[Any], Any],
    autocast: str | None = None,
) -> Measured:
    """Most bytes in use in the second step of a loop, everything that was made for it counted."""
    watch = Watch()
    with watch.watching():
        module, inputs = build()
        stepper = optimizer(module.parameters()) if optimizer else None
        for _ in range(2):
            with watch.step():
                _step(module, inputs, stepper, loss, autocast)
    return watch.measured()


def _step(module: Any, inputs: Any, stepper: Any, loss: Callable[[Any], Any], autocast: str | None) -> None:
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


def _highest(roots: Any, step: str) -> int:
    """Highest sum of all events from the start of a step on."""
    from torch._C._profiler import _EventType

    changes: list[tuple[int, int]] = []
    begin = 0
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name == step:
            begin = event.start_time_ns
    assert begin, f"{step} was not recorded"
    in_use = highest = 0
    for time, change in sorted(changes, key=lambda each: each[0]):
        in_use += change
        if time >= begin:
            highest = max(highest, in_use)
    return highest
