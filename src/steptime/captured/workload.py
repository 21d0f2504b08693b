"""A module as a workload: recorded at three micro-batches, cut over tensor ranks, costed operator by operator.

Costs are lines over the micro-batch, for every number of tensor ranks. The module can come from a factory in user code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter
from typing import Any, Final

import numpy as np

from steptime.api.models import CAPTURED_DTYPES
from steptime.captured.cost import Work, work_of
from steptime.captured.cut.cutting import Cutting, Exchange, cutting_of, weights_of
from steptime.captured.cut.levels import Levels, levels_of
from steptime.captured.cut.sections import Sections, sections_of
from steptime.captured.graph import Call, Node, Program, TensorType, Value
from steptime.captured.ops import OPERATORS, labelled_by
from steptime.captured.ops.maps import Elementwise
from steptime.captured.ops.norms import norm_dims
from steptime.captured.record import require_torch
from steptime.captured.record.factory import Target
from steptime.errors import UnknownNameError, UserError, counted
from steptime.model.captured import NOTHING, CapturedModel, Group, Kernel, Line, Operator, Reduction, Way, line

TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def named(module: Any) -> str:
    """Name of the class of a module."""
    return type(module).__name__


def converted(module: Any, dtype: str | None) -> tuple[Any, Callable[[Any], Any]]:
    """A copy of the module in an element type, and a function that converts floating-point inputs.

    Raises:
        UnknownNameError: the element type is unknown.
    """
    if dtype is None:
        return module, lambda inputs: inputs
    if dtype not in TYPES:
        raise UnknownNameError("element type", dtype, TYPES)
    import copy

    import torch

    from steptime.captured import torch_parts as parts

    wanted = getattr(torch, TYPES[dtype])
    if any(t.is_floating_point() and t.dtype != wanted for t in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).to(device="meta", dtype=wanted)

    def cast(inputs: Any) -> Any:
        def one(tensor: Any) -> Any:
            return tensor.to(wanted) if tensor.is_floating_point() else tensor

        return parts.pytree.tree_map_only(torch.Tensor, one, inputs)

    return module, cast


TOLERANCE: Final = 1e-6
PADDING: Final = 0.01
"""Relative deviation of bytes from the line that is allowed, since workspaces are rounded up."""
_MAPS: Final = {name for name, row in OPERATORS.items() if isinstance(row.dims, Elementwise)}
_BY_TOKEN: Final = {"sum", "mean"} | _MAPS | labelled_by(norm_dims)
"""Operators that work token by token, unless they reduce the dim of tokens."""


@dataclass(frozen=True, slots=True)
class Costed:
    """Work of one call, by way, at two micro-batches."""

    node: Node
    works: tuple[tuple[Work, Work], ...]
    by_token: bool


class Costs:
    """Costs of the calls of one module that was recorded at three micro-batches."""

    def __init__(self, recorded: Sequence[Sections], batches: tuple[int, ...], cutting: Cutting) -> None:
        self.sections, self.batches, self.cutting = recorded[0], batches, cutting
        self.program = recorded[0].program
        self.nodes = [[call.node for call in each.program.calls] for each in recorded]
        self.shares = self.shares_tokens()
        self.ways: tuple[Way, ...] = (
            (1, 0),
            *((n, s) for n in cutting.ranks if n > 1 for s in ((0, 1) if self.shares else (0,))),
        )
        self.unknown: Counter[str] = Counter()
        self._costs: dict[Node, Costed] = {}

    # -- lines --------------------------------------------------------------------------------------------------------

    def through(self, low: Sequence[float], high: Sequence[float]) -> Line:
        """Line through sizes at the first two micro-batches, by way."""
        b0, b1 = self.batches[:2]
        slopes = [(h - v) / (b1 - b0) for v, h in zip(low, high, strict=True)]
        return line([v - s * b0 for v, s in zip(low, slopes, strict=True)], slopes)

    def _shared(self, at: Line, by_token: bool) -> Line:
        """Line of one rank: work on single tokens is divided where the ranks divide the tokens."""
        if not by_token or not self.shares:
            return at
        parts = [tp if sp else 1 for tp, sp in self.ways]
        return line(
            (at.constant[w % len(at.constant)] for w in range(len(parts))),
            (at.slope[w % len(at.slope)] / parts[w] for w in range(len(parts))),
        )

    def size(self, costed: Costed, value: Callable[[Work], float]) -> Line:
        """A size of an operator on one rank."""
        pairs = [(float(value(low)), float(value(high))) for low, high in costed.works]
        return self._shared(self.through(*zip(*pairs, strict=True)), costed.by_token)

    # -- how operators are cut ----------------------------------------------------------------------------------------

    def by_token(self, node: Node) -> bool:
        """True if a node works on whole activations token by token."""
        cutting = self.cutting
        touched = [cutting.of(value) for value in node.inputs] + list(cutting.layouts.get(node, []))
        if any(each.dim is not None for each in touched) or node.op not in _BY_TOKEN or not node.inputs:
            return False
        if node.op in ("sum", "mean"):
            rank = len(node.inputs[0].type.shape)
            over = node.attribute("dim")
            return isinstance(over, tuple) and all(
                isinstance(d, int) and (d % rank == rank - 1 or len(node.outputs[0].shape) <= 2) for d in over
            )
        return True

    def shares_tokens(self) -> bool:
        """True if all operators of a block that are not cut work token by token."""
        if len(self.cutting.ranks) < 2:
            return False
        numbers = self.sections.each[self.sections.typical] if self.sections.each else self.sections.head
        for number in numbers:
            call = self.program.calls[number]
            node, larger = call.node, self.nodes[1][number]
            grows = any(a.elements != b.elements for a, b in zip(node.outputs, larger.outputs, strict=True))
            whole = all(self.cutting.of(v).dim is None for v in node.inputs)
            made = all(each.dim is None for each in self.cutting.layouts.get(node, []))
            if not call.view and grows and whole and made and not self.by_token(node) and work_of(node).moved_bytes:
                return False
        return True

    def _local(self, value: Value, large: Value, tp: int) -> TensorType:
        """Type of a value on one rank; ``large`` is the same value at another micro-batch."""
        dim, type = self.cutting.of(value).dim, large.type
        if dim is None or tp == 1:
            return type
        shape = (*type.shape[:dim], ceil(type.shape[dim] / tp), *type.shape[dim + 1 :])
        return TensorType(shape, type.dtype, type.strides)

    def _local_node(self, number: int, recording: int, tp: int) -> Node:
        node, large = self.nodes[0][number], self.nodes[recording][number]
        if tp == 1:
            return large
        stand_ins: dict[Value, Value] = {}
        for value, other in zip(node.inputs, large.inputs, strict=True):
            if other not in stand_ins:
                type = self._local(value, other, tp)
                stand_ins[other] = Node("constant", (), (), (), (type,), 0).value()
        outputs = tuple(self._local(Value(node, n), Value(large, n), tp) for n in range(len(large.outputs)))
        inputs = tuple(stand_ins[other] for other in large.inputs)
        return Node(large.op, inputs, large.names, large.attributes, outputs, 0)

    # -- costs --------------------------------------------------------------------------------------------------------

    def costed(self, number: int, call: Call) -> Costed:
        """Cost of a call; calls of one node cost the same.

        Raises:
            UserError: a size is not affine in the micro-batch.
        """
        node = call.node
        if node not in self._costs:
            by_rank = {
                tp: tuple(work_of(self._local_node(number, r, tp), inplace=call.inplace) for r in (0, 1))
                for tp in self.cutting.ranks
            }
            works = tuple((by_rank[tp][0], by_rank[tp][1]) for tp, _ in self.ways)
            self._costs[node] = Costed(node, works, self.by_token(node))
            self._check(number, call, works[0])
        return self._costs[node]

    def _check(self, number: int, call: Call, works: tuple[Work, Work]) -> None:
        """Check that the third recording lies on the line through the first two."""
        third = work_of(self.nodes[2][number], inplace=call.inplace)
        for name in ("matrix_flops", "vector_flops", "moved_bytes"):
            low, high, found = (float(getattr(work, name)) for work in (*works, third))
            expected = float(self.through([low], [high]).at(0, self.batches[2]))
            allowed = PADDING if name == "moved_bytes" else TOLERANCE
            if abs(expected - found) > allowed * max(found, 1.0):
                raise UserError(
                    f"{self.program.name}: {name} of {call.node.op} in {call.module or '(top)'} are not affine in the "
                    f"samples: {low:g}, {high:g}, {found:g} for {', '.join(map(str, self.batches))}",
                    hint="inputs_of_batch must change the number of samples only",
                )
        if works[0].family == "unknown":
            self.unknown[call.node.op] += 1


BATCHES: Final = (2, 3, 5)
"""Micro-batches that are recorded: two give a line, the third checks it."""
SLICES: Final = 16
"""Largest number of slices of a module without equal blocks, at most one for each module with weights."""


def captured_model(
    module: Any, inputs_of_batch: Callable[[int], Any], *, name: str = "", dtype: str | None = None,
    loss: Any = None, autocast: str | None = None, batches: Sequence[int] = BATCHES, **options: Any,
) -> CapturedModel:  # fmt: skip
    """A `torch.nn.Module` as a workload of plans.

    Args:
        module: any module that can be captured; its weights are not read.
        inputs_of_batch: function from a number of samples to the inputs of its forward (a sequence, or a mapping of
            keyword arguments); every tensor that depends on it has the samples as one dim.
        name: name in reports; by default its class.
        dtype: element type of weights and floating-point inputs, ``bf16``, ``fp16`` or ``fp32``, to which the module
            is converted; None: unchanged.
        loss: loss, as in :func:`steptime.captured.record.capture`.
        autocast: element type of automatic mixed precision, as in :func:`steptime.captured.record.capture`.
        batches: three different numbers of samples to record.
        options: further options of the capture; the default target is ``cuda``.

    Raises:
        UserError: its sizes are not affine in the samples, or its operators depend on their number.
        CaptureError: it cannot be captured.
    """
    from steptime.captured.workload import converted

    module, cast = converted(module, dtype)

    def step(batch: int) -> tuple[Any, Any, Any]:
        return module, cast(inputs_of_batch(batch)), loss

    return captured_steps(step, name=name, batches=batches, autocast=autocast, **options)


def captured_steps(
    step_of_batch: Callable[[int], tuple[Any, Any, Any]], *, name: str = "", dtype: str | None = None,
    batches: Sequence[int] = BATCHES, **options: Any,
) -> CapturedModel:  # fmt: skip
    """A workload of plans from a module, inputs and loss that are made again for each number of samples.

    Args:
        step_of_batch: function from a number of samples to a module, the inputs of its forward and its loss; the sizes
            of all three may depend on the samples.
        name: name in reports; this and all other arguments as in :func:`captured_model`.

    Raises:
        UserError: as in :func:`captured_model`.
    """
    from steptime.captured.record import capture
    from steptime.captured.workload import converted, named

    programs = []
    for batch in batches:
        given, inputs, loss = step_of_batch(batch)
        module, cast = converted(given, dtype)
        chosen = {"target": "cuda", "optimizer": None, "loss": loss, "name": name or named(module), **options}
        programs.append(capture(module, cast(inputs), **chosen))
    return model_of_programs(programs, tuple(batches))


def model_of_programs(programs: Sequence[Program], batches: tuple[int, ...]) -> CapturedModel:
    """The workload of a step that was recorded at three micro-batches.

    Raises:
        UserError: the recordings differ in more than sizes, or a size is not affine in the micro-batch.
    """
    _check_alike(programs, batches)
    return _Builder([sections_of(program) for program in programs], batches).model()


def _check_alike(programs: Sequence[Program], batches: tuple[int, ...]) -> None:
    first, samples = programs[0], counted(batches[0], "sample")
    for program, batch in zip(programs[1:], batches[1:], strict=True):
        for one, other in zip(first.calls, program.calls, strict=False):
            if one.node.op != other.node.op:
                problem = f"with {samples} it runs {one.node.op} where with {batch} it runs {other.node.op}"
                raise UserError(f"{first.name}: {problem}", hint=f"see module {one.module or '(top)'}")
        if len(first.calls) != len(program.calls):
            counts = f"{counted(len(first.calls), 'operator')} with {samples}, {len(program.calls)} with {batch}"
            raise UserError(f"{first.name}: {counts}", hint="its control flow depends on the batch")


class _Builder:
    """Builder of the record of one module."""

    def __init__(self, recorded: list[Sections], batches: tuple[int, ...]) -> None:
        self.batches = batches
        self.sections, self.program = recorded[0], recorded[0].program
        self.cutting = cutting_of(self.sections)
        self.costs = Costs(recorded, batches, self.cutting)
        self.levels: Levels = levels_of(recorded, batches, self._classes(), self.costs.ways)

    def _classes(self) -> dict[int, int]:
        """Storage -> class of `steptime.captured.cut.levels.CLASSES`."""
        out: dict[int, int] = {}
        for call in self.program.calls:
            layouts = self.cutting.layouts.get(call.node)
            if layouts is None or call.view:
                continue
            for storage, layout in zip(call.writes, layouts, strict=True):
                tokens = self.costs.shares and (layout.partial or self.costs.by_token(call.node))
                out[storage] = 2 if layout.dim is not None else 1 if tokens else 0
        return out

    def _operators(self, part: int, numbers: Sequence[int]) -> tuple[Operator, ...]:
        weights = weights_of(self.sections, self.cutting, self.costs.ways, part, numbers)
        out: list[Operator] = []
        for number in numbers:
            call = self.program.calls[number]
            kept = self.levels.born(number)
            exchanges = self.cutting.exchanges.get(call.node, [])
            held = weights.pop(number, None)
            costed = None if call.view else self.costs.costed(number, call)
            idle = costed is None or not any(work.moved_bytes or work.launches for work in costed.works[0])
            idle = idle or (costed is not None and costed.works[0][0].family == "view")
            if idle and held is None and kept is NOTHING and not exchanges:
                continue
            one = operator_of(self.program, call, self.sections, None if idle or costed is None else costed.works[0][0])
            one = replace(one, kept_bytes=kept, reductions=tuple(self._reduction(number, e) for e in exchanges))
            if held is not None:
                one = replace(one, weights=held.trained, replicated=held.replicated, frozen=held.frozen, tied=held.tied)
            out += [one] if idle or costed is None else self._by_kernel(one, costed)
        return numbered(out)

    def _by_kernel(self, one: Operator, costed: Costed) -> list[Operator]:
        """The operator by its kernels; only sizes that grow with tokens shrink where tokens are divided."""
        alone = replace(costed, by_token=False)

        def size(value: Callable[[Work], float], name: str) -> Line:
            return self.costs.size(costed if name in _GROWING else alone, value)

        return by_kernel(one, costed.works[0][0], size)

    def _reduction(self, number: int, exchange: Exchange) -> Reduction:
        type = exchange.value.type
        larger = self._matching(number, exchange.value)
        sizes = [t.size_bytes if exchange.numbers is None else t.elements // t.shape[-1] * exchange.numbers * 4
                 for t in (type, larger)]  # fmt: skip
        return Reduction(size_bytes=self.costs.through([sizes[0]], [sizes[1]]), tokens=exchange.numbers is None)

    def _matching(self, number: int, value: Value) -> TensorType:
        """Type of the same value at the second micro-batch."""
        seen: set[Node] = set()
        stack = [(self.costs.nodes[0][number], self.costs.nodes[1][number])]
        while stack:
            one, other = stack.pop()
            if one is value.node:
                return other.outputs[value.index]
            if one in seen:
                continue
            seen.add(one)
            stack += [(a.node, b.node) for a, b in zip(one.inputs, other.inputs, strict=True)]
        raise AssertionError("a value is made by what is above its reader")

    # -- the whole ----------------------------------------------------------------------------------------------------

    def model(self) -> CapturedModel:
        """Build the record."""
        sections, levels = self.sections, self.levels
        repeats = sections.blocks is not None
        layers = len(sections.each) if repeats else self._slices()
        typical = sections.each[sections.typical] if repeats else sections.head
        model_flops, forward = self._flops()
        self._check_flops(forward)
        return CapturedModel(
            name=self.program.name, source=self.program.source, layers=layers, repeats=repeats, ways=self.costs.ways,
            sequence_parallel=self.costs.shares, seq_len=self._seq_len(),
            head=self._operators(-1, sections.head) if repeats else (),
            block=self._operators(sections.typical if repeats else -1, typical),
            tail=self._operators(len(sections.each), sections.tail) if repeats else (),
            boundary_bytes=levels.boundary, working_bytes=levels.working, loss_bytes=levels.loss,
            model_flops=model_flops, forward_flops=forward, parameters=self.program.parameter_count,
            dtype=element_of(self.program), unknown=dict(self.costs.unknown), turns=() if repeats else self._turns(),
        )  # fmt: skip

    def _turns(self) -> tuple[tuple[float, float], ...]:
        """(fraction of forward operations before the read, fraction of parameters) for each first read of weights."""
        out, done, seen = list[tuple[float, float]](), 0.0, set[int]()
        sizes = {parameter.storage: parameter.elements for parameter in self.program.parameters if parameter.trained}
        calls = [call for call in map(self.program.calls.__getitem__, self.sections.head) if call.phase == "forward"]
        flops = [0.0 if call.view else float(work_of(call.node).matrix_flops) for call in calls]
        whole, trained = sum(flops), sum(sizes.values())
        for call, one in zip(calls, flops, strict=True):
            read = [s for s in dict.fromkeys(call.reads) if s in sizes and s not in seen]
            seen.update(read)
            if read and whole:
                out.append((done / whole, sum(sizes[s] for s in read) / trained))
            done += one
        return tuple(out)

    def _slices(self) -> int:
        owners = {parameter.name.rpartition(".")[0] for parameter in self.program.parameters}
        return max(1, min(SLICES, len(owners)))

    def _seq_len(self) -> int:
        """Size of the dim of the first input that is not the samples, if the input has integers; else 1."""
        first = next((s.name for s in self.program.storages if s.category == "input" and s.name), None)
        for nodes in zip(*self.costs.nodes[:2], strict=True):
            for value, other in zip(nodes[0].inputs, nodes[1].inputs, strict=True):
                node, small, large = value.node, value.type, other.type
                if node.op == "input" and node.attribute("name") == first and small.dtype.startswith("int"):
                    same = [a for a, b in zip(small.shape, large.shape, strict=True) if a == b]
                    return same[0] if len(small.shape) == 2 and len(same) == 1 else 1
        return 1

    def _flops(self) -> tuple[Line, dict[str, Line]]:
        sums = np.zeros((2, 3))
        totals = np.zeros(2)
        part_of = self.sections.of_calls()
        for number, call in enumerate(self.program.calls):
            if call.view or part_of[number] == -2:
                continue
            works = self.costs.costed(number, call).works[0]
            which = 1 if 0 <= part_of[number] < len(self.sections.each) else 0 if part_of[number] == -1 else 2
            for n, work in enumerate(works):
                totals[n] += 0.0 if call.recomputed else float(work.model_flops)
                sums[n, which] += float(work.matrix_flops) if call.phase == "forward" else 0.0
        names = ("embedding", "layers", "head")
        parts = {name: self.costs.through([sums[0, n]], [sums[1, n]]) for n, name in enumerate(names)}
        if self.sections.blocks is None:
            parts = {"layers": parts["embedding"]}
        return self.costs.through([totals[0]], [totals[1]]), parts

    def _check_flops(self, forward: Mapping[str, Line]) -> None:
        """Check that the operations of all blocks are those of a typical block times their number."""
        if self.sections.blocks is None:
            return
        calls = [self.program.calls[n] for n in self.sections.each[self.sections.typical]]
        one = sum(float(work_of(c.node).matrix_flops) for c in calls if c.phase == "forward" and not c.view)
        whole = float(forward["layers"].at(0, self.batches[0]))
        if abs(one * len(self.sections.each) - whole) > TOLERANCE * max(whole, 1.0):
            raise UserError(f"{self.program.name}: its blocks look alike but do different work")


def element_of(program: Program) -> str:
    """Element type of most parameters of a program."""
    sizes: Counter[str] = Counter()
    for parameter in program.parameters:
        sizes[parameter.dtype] += parameter.elements
    return sizes.most_common(1)[0][0] if sizes else "fp32"


_SHARED: Final = ("matrix_flops", "vector_flops", "moved_bytes")
_OF_DATA: Final = ("conv_bwd_data", "rnn_bwd_data")
"""Kernels for the gradient of an input, of operators with several kernels."""
_GROWING: Final = frozenset({"elements", "rows", "tokens", "read_bytes", "written_bytes", "moved_bytes", "matrix_flops",
                             "vector_flops", "whole_bytes", "value_bytes", "index_bytes",
                             "tensor_bytes", "result_bytes", "loops", "steps"})  # fmt: skip
"""Sizes of a kernel that grow with its tokens."""


def operator_of(program: Program, call: Call, sections: Sections, work: Work | None) -> Operator:
    """Operator with name, direction and group of a call; ``work`` None: it has no work."""
    module = call.module if sections.blocks is None else sections.blocks.inside(call.module)
    op = call.node.op.replace("_for_cpu", "").strip("_")
    group: Group = "nothing" if work is None else _group(program, call, work)
    return Operator(name=f"{module}.{op}".lstrip("."), group=group, backward=call.phase == "backward")


def _group(program: Program, call: Call, work: Work) -> Group:
    if work.family == "attention":
        return "attention"
    made = any(program.storages[storage].category == "gradient" for storage in call.writes)
    return "pass" if not work.matrix_flops else "weights" if made and call.phase == "backward" else "product"


def by_kernel(one: Operator, work: Work, size: Callable[[Callable[[Work], float], str], Line]) -> list[Operator]:
    """An operator divided into its kernels, with equal shares of its work; the first kernel has everything else.

    Kernels for gradients of inputs are in the group of products, those for gradients of weights in that of weights.

    Args:
        one: the operator without work.
        work: its work.
        size: function from a size of a work, and the name of the size, to its line.
    """
    sums: dict[str, Any] = {name: size(attrgetter(name), name) for name in _SHARED}
    count = len(work.kernels)
    if count < 2:
        return [replace(one, **sums, kernel=_kernel(work, 0, size) if count else None)]
    parts: dict[str, Any] = {name: each.scaled(1 / count) for name, each in sums.items()}
    parts["issued"] = one.issued / count
    bare = Operator(name=one.name, group=one.group, backward=one.backward)
    return [
        replace(
            bare if number else one, kernel=_kernel(work, number, size),
            group="product" if kernel.operator in _OF_DATA else one.group, **parts,
        )
        for number, kernel in enumerate(work.kernels)
    ]  # fmt: skip


def _kernel(work: Work, number: int, size: Callable[[Callable[[Work], float], str], Line]) -> Kernel:
    """A kernel of some work."""
    kernel = work.kernels[number]

    def of(name: str) -> Callable[[Work], float]:
        return lambda work: float(work.kernels[number].shape[name])

    shape = {name: size(of(name), name) for name in kernel.shape}
    launches = max(float(work.launches) / len(work.kernels), 1.0)
    return Kernel(operator=kernel.operator, backward=kernel.backward, shape=shape, launches=launches)


def numbered(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Operators with equal ones counted, and others of the same name numbered."""
    counts: dict[tuple[Any, ...], int] = {}
    first: dict[tuple[Any, ...], Operator] = {}
    for one in operators:
        kernel = None if one.kernel is None else (one.kernel.operator, one.kernel.backward, *one.kernel.shape.items())
        key = (*(getattr(one, n) for n in Operator.__slots__ if n != "kernel"), kernel)
        first.setdefault(key, one)
        counts[key] = counts.get(key, 0) + 1
    seen: Counter[str] = Counter()
    out = []
    for key, one in first.items():
        seen[one.name] += 1
        name = one.name if seen[one.name] == 1 else f"{one.name}.{seen[one.name]}"
        out.append(replace(one, name=name, times=counts[key] * one.times))
    return tuple(out)


def captured_target(target: str, dtype: str, seq: int | None) -> CapturedModel:
    """The module of a factory as a workload.

    A factory that takes a batch is called for each of three batches, and gives module, inputs and loss. Otherwise the
    leading dim of its inputs is the batch, with checks.

    Args:
        target: ``pkg.module:factory`` or ``file.py:factory``.
        dtype: training recipe; the module is captured in the element type of its activations.
        seq: tokens of a sample, for a factory that takes them.

    Raises:
        UserError: PyTorch is missing, the factory fails, its module cannot be captured, or its batch is unknown.
    """
    require_torch()
    from steptime.captured.record.factory import load_target
    from steptime.captured.record.variants import batch_parameter

    element = CAPTURED_DTYPES.get(dtype)
    more = {} if seq is None else {"seq": seq}
    takes = batch_parameter(target) is not None

    def made(batch: int) -> Any:
        sizes = {"batch": batch, **more} if takes else more
        return load_target(target, sizes=sizes, dtype=element, inputs=())

    first = made(BATCHES[0])
    if not takes:
        return _of_one_batch(target, first, element)

    def step(batch: int) -> tuple[Any, Any, Any]:
        one = first if batch == BATCHES[0] else made(batch)
        return one.module, one.inputs, one.loss

    return captured_steps(step, name=first.name, dtype=element)


def made_in(target: str, seq: int | None) -> str:
    """Default element type of the module of a factory: that of most of its parameters.

    Args:
        target: the factory, as for :func:`captured_target`.
        seq: tokens of a sample, for a factory that takes them.

    Raises:
        UserError: PyTorch is missing, or the factory fails.
    """
    require_torch()
    from steptime.captured.record.factory import load_target
    from steptime.captured.record.values import dtype_name
    from steptime.captured.record.variants import batch_parameter

    sizes = {} if seq is None else {"seq": seq}
    sizes |= {} if batch_parameter(target) is None else {"batch": BATCHES[0]}
    found: Counter[str] = Counter()
    for parameter in load_target(target, sizes=sizes, dtype=None, inputs=()).module.parameters():
        found[dtype_name(parameter.dtype)] += parameter.numel()
    return max(found, key=lambda name: found[name], default="fp32")


def _of_one_batch(target: str, made: Target, element: str | None) -> CapturedModel:
    """The module of a factory that does not take a batch, as a workload with resized inputs."""
    from steptime.captured.record.problems import CaptureError
    from steptime.captured.record.variants import TAKE_BATCH, leading_batch, resized

    given = leading_batch(target, made.module, made.inputs)
    try:
        return captured_model(
            made.module, lambda batch: resized(made.inputs, batch, given), name=made.name, dtype=element, loss=made.loss
        )
    except CaptureError as error:
        sizes = ", ".join(map(str, BATCHES))
        raise CaptureError(f"{error}\n  recorded with {sizes} samples; it makes {given}", hint=TAKE_BATCH) from None
