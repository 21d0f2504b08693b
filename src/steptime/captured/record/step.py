"""Capture of one training step with fake tensors: forward, loss, backward, optimiser.

Programs of ``torch.export`` are recorded with the module paths that the export kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Interpreter, Node

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Parameter, Program
from steptime.captured.graph.segments import Run
from steptime.captured.graph.unroll import unroll
from steptime.captured.record.device import TARGETS, cuda_kernels
from steptime.captured.record.environment import capturing
from steptime.captured.record.fake import check_module, with_loss, without_closed_over
from steptime.captured.record.fold import repeats, runs, shortened
from steptime.captured.record.problems import CaptureError
from steptime.captured.record.recorder import Paths, Recorder
from steptime.captured.record.training import LOSSES, Loss, Optimizers, is_ours, optimizer_of, own_loss
from steptime.captured.record.values import TORCH_DTYPES, dtype_name
from steptime.errors import UnknownNameError, UserError


class Exported(torch.nn.Module):
    """Runs the graph of an exported program node by node, each with the path of its original module."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        parts.members_of(self)[""] = program.module()
        self.paths: Paths | None = None

    def train(self, mode: bool = True) -> Exported:
        """Set the flag only: an exported graph keeps the mode in which it was traced."""
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the program."""
        graph: Any = parts.members_of(self)[""]
        return _Walk(graph, self.paths).run(*args, **kwargs) if not kwargs else graph(*args, **kwargs)


class _Walk(Interpreter):
    def __init__(self, graph: torch.nn.Module, paths: Paths | None) -> None:
        super().__init__(graph)  # type: ignore[arg-type]
        self._paths = paths

    def run_node(self, n: Node) -> Any:
        """Run one node inside the innermost module of its stack."""
        stack = n.meta.get("nn_module_stack")
        if self._paths is None or not stack:
            return super().run_node(n)
        path = str(list(stack.values())[-1][0])
        with self._paths.inside_of(path.removeprefix("L['self'].").removeprefix("L['self']")):
            return super().run_node(n)


AROUND = ("OptimizedModule", "DistributedDataParallel", "DataParallel")
"""Classes of wrappers whose only child is the complete module, with unsharded weights."""


def as_module(given: Any) -> Any:
    """Module of an exported program, or inside ``torch.compile`` or data parallelism; other objects unchanged."""
    if isinstance(given, torch.export.ExportedProgram):
        return Exported(given)
    while isinstance(given, torch.nn.Module) and type(given).__name__ in AROUND:
        (given,) = given.children()
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of a captured step."""

    optimizer: Optimizers = "adamw"
    """``adamw``, ``adamw-loop``, ``adamw-fused``, ``sgd``, ... , an optimiser of this module's parameters, a function
    from parameters to an optimiser, or None for none. Its states exist from the start, so the step is not the first
    one."""
    loss: Loss | None = None
    """Function from the output of the module to a scalar, or its name; None: the loss that the module returns, else the
    sum of its output."""
    autocast: str | None = None
    """Element type of automatic mixed precision, ``bf16`` or ``fp16``."""
    training: bool = True
    """False: forward only, without gradients."""
    keep_output: bool = True
    """The training loop holds the output of the module until the step ends, as most loops do."""
    nonzero_share: float | None = None
    """Assumed fraction of true elements of a mask on which the shape of a result depends."""
    target: str = "cpu"
    """Device type whose operators are recorded: ``cpu``, or ``cuda`` for an NVIDIA GPU."""
    fold: bool = True
    """Record four blocks of each run of equal blocks and unroll the program, if a comparison of two of them shows that
    the result is the same; False records every block."""
    alike: tuple[Run, ...] = ()
    """Runs of this module that were folded before with the same inputs, so that their blocks are not compared again."""
    name: str = ""
    """Name in reports; the default of a capture is the class of the module."""


def capture(
    module: torch.nn.Module | torch.export.ExportedProgram, inputs: Sequence[Any] | Mapping[str, Any], **options: Any
) -> Program:
    """Record one step of a module without running it: no weights, no data, no GPU.

    A folded program was compared with the whole module in one forward pass of both: blocks of equal structure that run
    different operators are recorded one by one.

    Args:
        module: any module, or a program of ``torch.export``; its weights are not read, and it is unchanged afterwards.
        inputs: positional arguments of its forward, or keyword arguments as a mapping; only shapes and types count.
        options: fields of :class:`StepOptions`.

    Returns:
        The recorded program: calls, and storages with their lifetimes.

    Raises:
        CaptureError: the module raises, or its control flow or shapes depend on data; the message names the line.
    """
    plain = as_module(module)
    return record(plain, inputs, StepOptions(**options | {"name": options.get("name") or type(plain).__name__}))


Seen = Callable[[Recorder, str, Any], None]
"""Callback during the recording of a step, called with the recorder, a word, and its object: ``labels`` in the closure
of the loss by name, ``output``, ``loss``, or the module at the ``end``."""


def _unseen(_recorder: Recorder, _what: str, _made: Any) -> None:
    """Callback that does nothing."""


def record(
    module: torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    options: StepOptions,
    *,
    seen: Seen = _unseen,
    recorder: type[Recorder] = Recorder,
) -> Program:
    """Record one step of a module as :func:`capture`, with the options in one object.

    Args:
        module: any module.
        inputs: arguments of its forward.
        options: options of the step.
        seen: callback, used if nothing is folded.
        recorder: class of the recorder, used if nothing is folded.
    """
    if options.target not in TARGETS:
        raise UserError(f"target {options.target!r} is unknown", hint=f"one of {', '.join(TARGETS)}")
    if isinstance(options.loss, str) and options.loss not in LOSSES:
        raise UnknownNameError("loss", options.loss, LOSSES)
    if options.autocast not in (None, "bf16", "fp16"):
        raise UserError(f"autocast {options.autocast!r} is unknown", hint="bf16 or fp16")
    check_module(with_loss(module, options.loss), options.name)
    given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    found = runs(module) if options.fold else []
    if not found:
        return _recorded(module, given, options, recorder, seen)
    whole = _unrolled(module, given, options, found)
    if isinstance(whole, Program):
        return whole
    lists = ", ".join(run.container or "(root)" for run in found)
    return replace(_recorded(module, given, options), unfolded=f"{lists}: {whole}")


def _unrolled(module: torch.nn.Module, inputs: Any, options: StepOptions, found: list[Run]) -> Program | str:
    """Record the shortened module and unroll it; a text is the reason why that fails."""
    if not all(any(run.is_within(one) for one in options.alike) for run in found):
        problem = repeats(module, inputs, found, name=options.name, training=options.training)
        if problem is not None:
            return problem
    try:
        with shortened(module, found):
            program = _recorded(module, inputs, options)
    except CaptureError:
        return "the step cannot be recorded with fewer blocks"
    for run in found:
        longer = unroll(program, run)
        if longer is None:
            return "the recorded blocks differ, or what follows them reads several of them"
        program = longer
    return program


def _recorded(
    module: torch.nn.Module, inputs: Any, options: StepOptions, kind: type[Recorder] = Recorder, seen: Seen = _unseen
) -> Program:
    whole = with_loss(module, options.loss if options.training else None)
    running = capturing(whole, inputs, name=options.name, training=options.training)
    with running as (arguments, replaced), without_closed_over(options.loss, replaced) as labels:
        optimizer = optimizer_of(options.optimizer, whole, replaced) if options.training else None
        paths = Paths(whole)
        if isinstance(module, Exported):
            module.paths = paths
        recorder = kind(paths, replaced.mode, options.nonzero_share)
        with parts.DisableTorchFunction():
            parameters = named(recorder, whole, arguments, optimizer)
            seen(recorder, "labels", labels)
        with paths.watching(), recorder:
            _step(recorder, whole, arguments, optimizer, options, seen)
        return recorded(recorder, options.name, whole, parameters, arguments)


def recorded(
    recorder: Recorder, name: str, module: torch.nn.Module, parameters: tuple[Parameter, ...], arguments: Any
) -> Program:
    """Program of the calls and storages of a recorder; its batch is the first dim of the first input tensor."""
    tensors = (t for t in parts.pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.dim())
    batch = next((int(tensor.shape[0]) for tensor in tensors), None)
    return Program(
        name=name, calls=tuple(recorder.calls), storages=recorder.storages(), parameters=parameters,
        modules={path: type(child).__name__ for path, child in module.named_modules()},
        source=f"PyTorch {torch.__version__.split('+')[0]}, fake tensors", batch=batch,
        assumed=tuple(recorder.fakes.values.assumed),
    )  # fmt: skip


def named(recorder: Recorder, module: Any, arguments: Any, optimizer: Any = None) -> tuple[Parameter, ...]:
    """Name the storages that exist before the step, and return the parameters."""
    found = []
    for name, weight in module.named_parameters():
        number = recorder.name(weight, "parameter", name)
        found.append(
            Parameter(
                name=name, storage=number, elements=weight.numel(), size_bytes=weight.untyped_storage().nbytes(),
                trained=weight.requires_grad, dtype=dtype_name(weight.dtype),
            )
        )  # fmt: skip
    for name, buffer in module.named_buffers():
        if buffer.layout is torch.strided:
            recorder.name(buffer, "buffer", name)
    for number, tensor in enumerate(parts.pytree.tree_leaves(arguments)):
        if isinstance(tensor, torch.Tensor):
            recorder.name(tensor, "input", f"input.{number}")
    names = {id(weight): name for name, weight in module.named_parameters()}
    for weight, states in optimizer.state.items() if optimizer is not None else ():
        for key, state in states.items():
            if isinstance(state, torch.Tensor):
                recorder.name(state, "state", f"{names.get(id(weight), 'parameter')}.{key}")
    return tuple(found)


def _step(recorder: Recorder, module: Any, arguments: Any, optimizer: Any, options: StepOptions, seen: Seen) -> None:
    automatic: AbstractContextManager[Any] = nullcontext()
    if options.autocast is not None:
        automatic = torch.autocast("cpu", dtype=TORCH_DTYPES[options.autocast])
    kernels: AbstractContextManager[Any] = cuda_kernels() if options.target == "cuda" else nullcontext()
    with torch.set_grad_enabled(options.training), kernels:
        with automatic:
            output = module(**arguments) if isinstance(arguments, dict) else module(*arguments)
            seen(recorder, "output", output)
            if not options.training:
                return
            loss = _loss(output, options.loss)
            seen(recorder, "loss", loss)
        if not options.keep_output:
            del output
        with recorder.in_phase("backward"):
            # Tensor.backward would disable the mode of CUDA kernels for operators that a checkpoint runs again
            seed = torch.ones_like(loss, memory_format=torch.preserve_format)
            parts.engine.run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            del seed
    with parts.DisableTorchFunction():
        _name_gradients(recorder, module, optimizer)
    if optimizer is not None:
        plain: AbstractContextManager[Any] = nullcontext()
        if is_ours(options.optimizer):
            plain = parts.DisableTorchFunction()
        with recorder.in_phase("optimizer"), plain:
            optimizer.step()
            seen(recorder, "end", module)
            optimizer.zero_grad(set_to_none=True)
    else:
        seen(recorder, "end", module)
        module.zero_grad(set_to_none=True)


def _loss(output: Any, loss: Loss | None) -> torch.Tensor:
    function: Callable[[Any], Any] = own_loss if loss is None else LOSSES[loss] if isinstance(loss, str) else loss
    value = function(output)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise CaptureError(
            "the loss is not a scalar tensor", hint="give --loss, a function from the output to a scalar"
        )
    if not value.requires_grad:
        hint = "train a parameter; steptime profile --inference, in Python training=False, times the forward pass alone"
        raise CaptureError("the loss does not depend on any trained parameter", hint=hint)
    return value


def _name_gradients(recorder: Recorder, module: torch.nn.Module, optimizer: Any) -> None:
    """Name the gradients; a parameter without a gradient has no optimiser states either."""
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            recorder.name(weight.grad, "gradient", f"{name}.grad")
        elif optimizer is not None:
            for state in optimizer.state.pop(weight, {}).values():
                if isinstance(state, torch.Tensor):
                    recorder.never_made(state)
