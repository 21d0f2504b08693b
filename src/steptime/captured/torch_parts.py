"""Private parts of PyTorch that steptime uses, each with its purpose. No other module names one, except for code of
exported files (`sharding/dtensor.py`), which import only PyTorch.

A version that lacks a part, or is older than :data:`OLDEST`, is refused before a capture; every other one is accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from operator import attrgetter, methodcaller
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.nn.modules import transformer

from steptime.errors import UserError

OLDEST: Final = "2.9"  #: Lower end of the range in `pyproject.toml`.
TESTED: Final = "2.9.1, 2.13.0 and 2.14.1"  #: Versions of the table in `docs/profile.md`; CI tests the second.


@contextmanager
def taking(version: Any = torch.__version__) -> Iterator[None]:
    """Report parts that this version of PyTorch lacks.

    Raises:
        UserError: this version lacks one, or is below the range.
    """
    hint = f"steptime runs with torch>={OLDEST}; {TESTED} were tested"
    if version < OLDEST:
        raise UserError(f"PyTorch {version} is too old", hint=hint)
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise UserError(f"PyTorch {version} lacks a part that steptime needs: {error}", hint=hint) from None


with taking():
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import symbolic_shapes
    from torch.utils import _device, _python_dispatch, _pytree

    # -- fake tensors -------------------------------------------------------------------------------------------------
    FakeTensor = fake_tensor.FakeTensor  #: A tensor with a shape and no memory.
    FakeTensorMode = fake_tensor.FakeTensorMode  #: Mode in which operators return fake tensors.
    DataDependentOutputException = fake_tensor.DataDependentOutputException  #: Python reads a value of a fake tensor.
    DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException  #: The shape of a result depends on values.
    GuardOnDataDependentSymNode = symbolic_shapes.GuardOnDataDependentSymNode  #: A branch depends on such a shape.
    constructors = _device._device_constructors  #: Returns the functions that make new tensors.
    _make_subclass: Any = torch.Tensor._make_subclass
    _warning, _refusing = torch._C._set_warn_deprecated_on_mutable_data_ptr, torch._C._set_throw_on_mutable_data_ptr

    # -- dispatch -----------------------------------------------------------------------------------------------------
    TorchDispatchMode = _python_dispatch.TorchDispatchMode  #: Sees every operator.
    without_modes = _python_dispatch._disable_current_modes  #: Context in which operators run on real tensors.
    DisableTorchFunction = torch._C.DisableTorchFunction  #: Context without function modes, which are slow.
    DisableTorchDispatch = torch._C._DisableTorchDispatch  #: Context without dispatch modes.
    no_torch_function = torch._C._disabled_torch_function_impl  #: For classes that intercept operators, not functions.
    wrapper: Any = torch.Tensor._make_wrapper_subclass  #: Makes a tensor of a class with a shape and no memory.
    dispatch_keys: Any = torch._C._dispatch_key_set  #: Keys that select the kernel for a tensor.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  #: True if an operator has a kernel for a dispatch key.
    schema_of = attrgetter("_schema")  #: Names and types of an operator's arguments and results.

    HigherOrderOperator = torch._ops.HigherOrderOperator  #: An operator that takes functions.

    # -- autograd -----------------------------------------------------------------------------------------------------
    sequence_number: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  #: Number of the next node.
    number_of = methodcaller("_sequence_nr")  #: Sequence number of a node.
    saved_by = attrgetter("_raw_saved_tensors")  #: Saved tensors of a node, not unpacked.
    current_node: Any = torch._C._current_autograd_node  #: The node whose backward runs.
    engine: Any = torch.autograd.Variable._execution_engine  #: Runs the backward pass.
    top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  #: Hooks that pack saved tensors.
    base_of = attrgetter("_base")  #: The tensor that another one is a view of.

    # -- modules and functions ----------------------------------------------------------------------------------------
    pytree = _pytree  #: Trees of lists, tuples, mappings and registered classes.
    tables_of = attrgetter("_parameters", "_buffers")  #: Writable tables of a module by name; values may be None.
    members_of = attrgetter("_modules")  #: Writable table of the children of a module by name.
    hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    IS_PARAMETER: Final = "_is_param"  #: Attribute that makes a tensor of another class a parameter.
    assertion = torch._assert  #: Checks a value of a tensor.
    # Attributes of objects are read once, so that a missing one is reported here and not during a capture.
    (schema_of(torch.ops.prim.device.default), base_of(torch.empty(0)), hooks_of(torch.nn.Module()))

    # -- the compiler -------------------------------------------------------------------------------------------------
    DYNAMO: Final = "torch._dynamo"  #: Module of the compiler.
    LEFT_ALONE: Final = "__dynamo_disable"  #: Attribute of a function: its variant that is never compiled.
    Source: Any = torch._guards.Source  #: Source of a tensor of a compiled function.


def operators(*names: str) -> tuple[Any, ...]:
    """Overloads of ATen by name; those that this version does not have are left out.

    >>> operators("gelu.default", "gelu.of_another_version", "of_another_version.default")
    (<OpOverload(op='aten.gelu', overload='default')>,)
    """
    found = [(getattr(torch.ops.aten, name, None), overload) for name, _, overload in (n.partition(".") for n in names)]
    return tuple(getattr(packet, overload) for packet, overload in found if hasattr(packet, overload))


def fake(mode: Any, made: torch.Tensor, device: torch.device) -> Any:
    """A fake tensor with attributes copied from an earlier one of its mode, since the constructor is slow."""
    of_mode: dict[torch.device, dict[str, Any]] = vars(mode).setdefault("steptime_attributes", {})
    if device not in of_mode:
        of_mode[device] = dict(vars(FakeTensor(mode, made, device)))
    fake = _make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
    (_warning if mode._allow_unsafe_data_ptr_access else _refusing)(fake)
    vars(fake).update(of_mode[device])
    return fake


class NotCompiled:
    """Base of modes that PyTorch need not exclude from compilation, since a capture compiles nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def masks_not_read() -> AbstractContextManager[object]:
    """Make `nn.Transformer` trust its argument `is_causal`, instead of comparing values of the mask."""
    return patch.object(
        transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal), create=True
    )


def flexible_attention_on_any_device() -> AbstractContextManager[object]:
    """Disable the checks of `flex_attention` for device and compiler, since fake tensors stand for any device."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    own = {"_validate_device": lambda *_: None, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    return nullcontext() if module is None else patch.dict(vars(module), own)


def associative_scan(combine: Any, along: Any, additional_inputs: Any) -> Any:
    """`torch.associative_scan` without compilation."""
    with taking():
        return import_module("torch._higher_order_ops.associative_scan").generic_associative_scan(
            combine, along, additional_inputs=additional_inputs
        )


def conversions_to_the_same() -> AbstractContextManager[object]:
    """Keep the weights of a module that is converted to its own type in its forward; PyTorch would swap fake ones."""
    before: Any = torch.nn.Module._apply

    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(fn)
        held = [t for table in tables_of(module) for t in table.values() if t is not None]
        with torch.no_grad():
            same = all(fn(tensor) is tensor for tensor in held)
        return module if same else before(module, fn, recurse=False)

    return patch.object(torch.nn.Module, "_apply", apply)


def tracer() -> tuple[Any, Any, Any]:
    """The compiler's `explain`, and the functions that clear and return its compilation metrics."""
    with taking():
        from torch._dynamo import explain, utils

        return explain, utils.clear_compilation_metrics, utils.get_compilation_metrics


def inductor() -> tuple[Any, Any]:
    """Inductor's metrics of a compilation, and the function that runs compiled code and returns its source."""
    with taking():
        from torch._inductor import metrics
        from torch._inductor.utils import run_and_get_code

        return metrics, run_and_get_code


def spread_by_dtensor(name: str) -> bool:
    """True if DTensor has a sharding rule for an overload of an ATen operator, or decomposes the operator.

    >>> spread_by_dtensor("mm"), spread_by_dtensor("mkldnn_rnn_layer")
    (True, False)
    """
    with taking():
        from torch._decomp import decomposition_table
        from torch.distributed.tensor import DTensor

        dispatcher: Any = DTensor._op_dispatcher
        rules = dispatcher.sharding_propagator
        tables = [rules.op_strategy_funcs, rules.op_to_rules, dispatcher._custom_op_handlers]
    tables.append(getattr(rules, "op_single_dim_strategy_funcs", {}))  # of newer versions
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return any(
        each in decomposition_table or each._can_decompose() or any(each in table for table in tables)
        for each in overloads
    )
