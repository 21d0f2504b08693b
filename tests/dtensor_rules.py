"""What DTensor's rules say of one node, without a process group: which placements of inputs need no communication."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from inspect import signature

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.distributed.tensor._op_schema import OpSchema  # noqa: E402
from torch.distributed.tensor._ops import utils  # noqa: E402

from aten_interpreter import DTYPES, _fits, overloads  # noqa: E402
from steptime.captured.graph import contiguous_strides  # noqa: E402
from steptime.captured.ops.placement import divides, placement_of, shard  # noqa: E402
from steptime.sharding.options import options  # noqa: E402

SIZES = (2, 4)
if "_rank" not in signature(DeviceMesh.__init__).parameters:
    pytest.skip("this PyTorch makes no mesh without processes", allow_module_level=True)
MESH = DeviceMesh("cpu", torch.arange(8).reshape(SIZES), _init_backend=False, _rank=0)
PROPAGATOR = DTensor._op_dispatcher.sharding_propagator
R, P = placement_of("R"), placement_of("P")
EXHAUSTIVE = 700
"""Combinations along one axis up to which all are asked for."""
DRAWN = 150
ON_MESH = 25
"""Combinations along one axis up to which all of the mesh are asked for."""


def ours_to_theirs(placement):
    if placement.dim is not None:
        return Shard(placement.dim)
    return Partial(placement.reduction) if placement.partial else Replicate()


def _changed(src_strategy, dst_spec):
    """In place of times of resharding, which take most of the time: whether there is any; a mask is none."""
    to = [None if type(each).__name__ == "_MaskPartial" else each for each in dst_spec.placements]
    given = (each.output_spec.placements for each in src_strategy.strategies)
    return [float(any(b is not None and a != b for a, b in zip(each, to, strict=True))) for each in given]


COSTS = utils.generate_redistribute_costs
RETURNED = {"_scaled_dot_product_flash_attention": (0, 1, 6, 7, 8)}
"""Operator -> which of the values that it returns are outputs of the node, where not all are tensors."""


def theirs_to_text(placement):
    if type(placement).__name__ == "_MaskPartial":
        return "P"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        kind = placement.reduce_op
        return "P" if kind == "sum" else f"P({kind})"
    return "R" if isinstance(placement, Replicate) else type(placement).__name__


def meta_of(type):
    strides = contiguous_strides(type.shape)
    return TensorMeta(torch.Size(type.shape), strides, DTYPES.get(type.dtype, torch.float32))


class Rules:
    """DTensor's rules for one node."""

    def __init__(self, node):
        self.node = node
        self.overload, self.template = bound(node)
        outputs = [meta_of(type) for type in node.outputs]
        mask = node.attribute("output_mask")
        self.masked = mask if isinstance(mask, tuple) else None
        if isinstance(mask, tuple):
            rest = iter(outputs)
            outputs = [next(rest) if kept else None for kept in mask]
        kept = RETURNED.get(node.op)
        if kept:
            outputs = [outputs[kept.index(n)] if n in kept else None for n in range(max(kept) + 1)]
        self.kept = kept or range(len(outputs))
        single = len(self.overload._schema.returns) == 1 and "List" not in str(self.overload._schema.returns[0].type)
        self.metas = outputs[0] if single else tuple(outputs)
        self.info = PROPAGATOR.op_to_schema_info.get(
            self.overload
        ) or PROPAGATOR.op_to_schema_info_for_single_dim_strategy.get(self.overload)

    def schema(self, shardings):
        specs = [
            DTensorSpec(MESH, tuple(map(ours_to_theirs, sharding)), tensor_meta=meta_of(value.type))
            for sharding, value in zip(shardings, self.node.inputs, strict=True)
        ]
        args, kwargs = self.template(specs)
        return OpSchema(self.overload, args, kwargs, schema_info=self.info)

    def ask(self, shardings):
        """Shardings of inputs that it takes, and of outputs, as texts; None where it refuses."""
        schema = self.schema(shardings)
        try:
            utils.generate_redistribute_costs = _changed
            PROPAGATOR._propagate_tensor_meta_non_cached = lambda _: self.metas
            found = PROPAGATOR.propagate_op_sharding_non_cached(schema)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError, TypeError, KeyError):
            return None
        finally:
            utils.generate_redistribute_costs = COSTS
            del PROPAGATOR._propagate_tensor_meta_non_cached
        taken = found.redistribute_schema or schema
        specs = [*taken.args_spec, *(each for each in taken.kwargs_schema.values() if isinstance(each, DTensorSpec))]
        out = found.output_spec if isinstance(found.output_spec, (list, tuple)) else [found.output_spec]
        out = [out[n] for n in self.kept if self.masked is None or self.masked[n]]
        return tuple(map(_taken, specs)), tuple(each and tuple(map(theirs_to_text, each.placements)) for each in out)


def _taken(spec):
    """Placements of an input; indices are replicated where a mask of the table's rows is said of them."""
    names = (type(each).__name__ == "_MaskPartial" for each in spec.placements)
    return tuple("R" if masked else theirs_to_text(each) for masked, each in zip(names, spec.placements, strict=True))


def bound(node):
    """The overload of a node, and a function from specs of its inputs to positional and keyword arguments."""
    tensors, numbers = {}, {}
    for number, name in enumerate(node.names):
        tensors.setdefault(name, []).append(number)
    for name, given in node.attributes:
        numbers[name] = DTYPES[given] if name in ("dtype", "input_dtype") else given
    every = overloads(node.op)
    chosen = next((each for each in every if _fits(each, tensors, numbers)), every[0])

    def template(specs):
        args, kwargs = [], {}
        for argument in chosen._schema.arguments:
            name = argument.name
            default = argument.default_value if argument.has_default_value() else None
            value = numbers.get(name, default)
            if name in tensors:
                members = [specs[number] for number in tensors[name]]
                value = members if "List" in str(argument.type) else members[0]
            if "List[int]" in str(argument.type) and isinstance(value, tuple):
                value = list(value)
            if not argument.kwarg_only:
                args.append(value)
            elif name in tensors or name in numbers:
                kwargs[name] = value
        return tuple(args), kwargs

    return chosen, template


def along_one_axis(node, size):
    """Every placement of every input that `size` devices divide."""
    each = []
    for value in node.inputs:
        shape = value.type.shape
        each.append([R, P, *(shard(d) for d in range(len(shape)) if divides(shape, (shard(d),), (size,)))])
    return each


def combinations(node):
    """Number of combinations of placements along an axis."""
    return math.prod(map(len, along_one_axis(node, SIZES[0])))


def texts(placements):
    return tuple(map(str, placements))


def rules_along(node, axis):
    """Rules along one axis, the other replicated, that need no communication: placements of inputs and of outputs.

    An output that DTensor says nothing of (the state of a generator) is None.
    """
    rules, found = Rules(node), set()
    each = along_one_axis(node, SIZES[axis])
    every = itertools.product(*each)
    if math.prod(map(len, each)) > EXHAUSTIVE:
        generator = random.Random(0)
        drawn = [tuple(generator.choice(one) for one in each) for _ in range(DRAWN)]
        near = [tuple(one if n == at else R for n in range(len(each))) for at, ones in enumerate(each) for one in ones]
        ours = [option.inputs for option in options(node) if option.units % SIZES[axis] == 0]
        every = drawn + near + [given for given in ours if all(p in ones for p, ones in zip(given, each, strict=True))]
    for placements in every:
        answer = rules.ask([(p, R) if axis == 0 else (R, p) for p in placements])
        if answer is not None:  # what it would go over to needs none either
            found.add(tuple(tuple(one and one[axis] for one in side) for side in answer))
    return found


def rules_on_mesh(node, each_axis):
    """Of all combinations of placements along the axes, those that need no communication, with those of the outputs."""
    rules, found = Rules(node), set()
    for combination in itertools.product(*each_axis):
        shardings = tuple(zip(*combination, strict=True))
        if not all(divides(v.type.shape, s, SIZES) for v, s in zip(node.inputs, shardings, strict=True)):
            continue
        answer = rules.ask(shardings)
        if answer is not None and answer[0] == tuple(tuple(map(str, each)) for each in shardings):
            found.add(answer)
    return found


def our_rules(node, size):
    """Options along one axis without communication, as texts."""
    return {
        (texts(each.inputs), texts(each.outputs))
        for each in options(node)
        if each.exchange is None and (not each.dim or each.units % size == 0)
        and all(divides(v.type.shape, (p,), (size,)) for v, p in zip(node.inputs, each.inputs, strict=True))
    }  # fmt: skip


def agree(ours, theirs):
    """Whether two rules are the same; an output of which DTensor says nothing agrees with anything."""
    return ours[0] == theirs[0] and all(b is None or a == b for a, b in zip(ours[1], theirs[1], strict=True))


@cache
def differences(node, axis=1):
    """Rules that only one of both has: ("steptime" or "DTensor", placements of inputs, of outputs)."""
    ours, theirs = our_rules(node, SIZES[axis]), rules_along(node, axis)
    out = [("steptime", *rule) for rule in ours if not any(agree(rule, other) for other in theirs)]
    return out + [("DTensor", *rule) for rule in theirs if not any(agree(other, rule) for other in ours)]
