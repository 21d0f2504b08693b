"""Runs graphs on real tensors through ``torch.ops.aten``: the oracle of the tests."""

from functools import cache

import pytest

torch = pytest.importorskip("torch")

from steptime.captured.graph import TensorType, topological  # noqa: E402

torch.set_num_threads(1)

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def type_of(tensor):
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorType(tuple(tensor.shape), NAMES[tensor.dtype], strides)


@cache
def overloads(op):
    packet = getattr(torch.ops.aten, op)
    return [getattr(packet, name) for name in packet.overloads() if name != "out" and not name.endswith("_out")]


def _fits(overload, tensors, numbers):
    known = {argument.name: argument for argument in overload._schema.arguments}
    if not set(tensors) | set(numbers) <= set(known):
        return False
    for name, argument in known.items():
        kind = str(argument.type)
        if name in tensors and "List" not in kind and len(tensors[name]) != 1:
            return False
        if name in tensors and "Tensor" not in kind:
            return False
        if name in numbers and ("Tensor" in kind or (kind in ("int", "float") and isinstance(numbers[name], tuple))):
            return False
        if name in numbers and "str" in kind and not isinstance(numbers[name], str):
            return False  # dims by name: some versions list that overload first
        required = not argument.has_default_value() and "Optional" not in kind
        if required and name not in tensors and name not in numbers:
            return False
    return True


def call(node, inputs):
    """Result of one node on tensors, as a tuple."""
    tensors, numbers = {}, {}
    for name, tensor in zip(node.names, inputs, strict=True):
        tensors.setdefault(name, []).append(tensor)
    for name, given in node.attributes:
        if name in ("draw", "layout", "pin_memory", "device"):
            continue
        if isinstance(given, str) and given.startswith("torch."):
            given = getattr(torch, given.removeprefix("torch."))
        numbers[name] = DTYPES[given] if name in ("dtype", "input_dtype") and isinstance(given, str) else given
    for overload in overloads(node.op):
        if _fits(overload, tensors, numbers):
            given = dict(numbers)
            for argument in overload._schema.arguments:
                if argument.name in tensors:
                    members = tensors[argument.name]
                    given[argument.name] = members if "List" in str(argument.type) else members[0]
                if argument.name not in given and not argument.has_default_value():
                    given[argument.name] = None
                if "List[int]" in str(argument.type) and isinstance(given.get(argument.name), tuple):
                    given[argument.name] = list(given[argument.name])
            result = overload(**given)
            results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            return tuple(each for each in results if each is not None)
    raise AssertionError(f"no overload of {node.op} takes {sorted(tensors)} and {numbers}")


def evaluate(values, sources, check=True):
    """Tensors of values; ``sources``: name of each source -> tensor."""
    known = {}
    for node in topological(value.node for value in values):
        if node.op in ("parameter", "buffer", "input", "state", "constant"):
            results = (sources[node.attribute("name")],)
        else:
            results = call(node, [known[v.node][v.index] for v in node.inputs])
        if check:
            for result, type in zip(results, node.outputs, strict=False):
                if result is not None and result.numel():
                    assert tuple(result.shape) == type.shape, f"{node}: really {tuple(result.shape)}"
                    assert NAMES[result.dtype] == type.dtype, f"{node}: really {result.dtype}"
        known[node] = results
    return [known[value.node][value.index] for value in values]
