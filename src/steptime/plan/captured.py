"""The strategy of a captured module: its rows are the recorded operators, with the recorded ways of cutting them.

Tensor parallelism is Megatron's on the pairs of products that were found in the module; there are no axes ``cp``,
``tp2`` and ``ep``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from steptime.model.captured import NOTHING, CapturedModel, Line, Operator, Reduction
from steptime.model.spec import ELEMENT_BYTES
from steptime.num import Num, maximum, where
from steptime.plan.job import Job
from steptime.plan.plans import CAPTURED_RULES, RULES, Plans, Rule
from steptime.plan.rows import Block, Row, Timing, Transfer, over
from steptime.plan.strategies import CorrectedMethod, Strategy

DIRECTIONS = {False: "forward", True: "backward"}


class Captured1D(Strategy):
    """Data and pipeline parallelism, and 1D tensor parallelism if pairs of products were found."""

    name: ClassVar[str] = "1d"
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp",)
    gradient_axes: ClassVar[tuple[str, ...]] = ("dp",)

    def block(self, job: Job, plans: Plans) -> Block:
        """Rows of one block, of the head and of the tail."""
        model = captured_of(job)
        rows = _Rows(model, plans)
        layer = tuple(rows.of(model.block))
        if not model.repeats:
            layer = tuple(replace(row, share=row.share / model.layers) for row in layer)
        return Block(
            layer=layer,
            first=tuple(rows.of(model.head)),
            last=tuple(rows.of(model.tail)),
            boundary_bytes=rows.at(model.boundary_bytes),
            working_bytes=rows.largest(model.working_bytes) + rows.gathered(model),
            loss_bytes=rows.largest(model.loss_bytes),
            sharded=model.sharded,
        )


class _Rows:
    """Sizes of operators under the ways and micro-batches of some plans."""

    def __init__(self, model: CapturedModel, plans: Plans) -> None:
        self.plans, self.batch = plans, plans.micro_batch
        self.way = model.way(plans.tp, plans.sp)
        self.shared = where(plans.sp > 0, 1.0, 0.0) if model.sequence_parallel else 0.0
        self.dtype_bytes = float(ELEMENT_BYTES[model.dtype])

    def at(self, line: Line) -> Num:
        """Value of a size."""
        return line.at(self.way, self.batch)

    def largest(self, lines: Iterable[Line]) -> Num:
        """Largest value of several sizes."""
        first, *rest = (self.at(line) for line in lines)
        for value in rest:
            first = maximum(first, value)
        return first

    def gathered(self, model: CapturedModel) -> Num:
        """Bytes of gathered tokens: a product of sharded tokens needs all of them, as does its input's gradient."""
        sizes = [each.size_bytes for one in model.block for each in one.reductions if each.tokens]
        if not sizes or not model.sequence_parallel:
            return 0.0
        return 2 * self.largest(sizes) * self.shared * where(self.plans.tp > 1, 1.0, 0.0)

    def of(self, operators: Iterable[Operator]) -> Iterator[Row]:
        """Rows of a part."""
        for one in operators:
            yield self._row(one)
            if one.frozen is not NOTHING:
                yield Row(
                    name=f"{one.name}.frozen",
                    block="captured",
                    operator="nothing",
                    shape={},
                    trained=False,
                    weights=self.at(one.frozen),
                    weight_bytes=self.dtype_bytes,
                    share=float(one.times),
                )

    def _row(self, one: Operator) -> Row:
        direction = DIRECTIONS[one.backward]
        transfers = tuple(t for each in one.reductions for t in self._transfers(each, one.backward))
        transfers += tuple(
            Transfer(axis="tp", collective=each.collective, size_bytes=each.size_bytes, group=each.group)
            for each in one.exchanges
        )
        own = where(self.plans.pp > 1, 1.0, 0.0) if one.tied else 1.0
        kernel = one.kernel
        return Row(
            name=f"{one.name}",
            block="captured",
            share=float(one.times),
            operator="nothing" if one.group == "nothing" else f"captured_{one.group}_{direction}",
            shape={}
            if one.group == "nothing"
            else {
                "matrix_flops": self.at(one.matrix_flops),
                "vector_flops": self.at(one.vector_flops),
                "moved_bytes": self.at(one.moved_bytes),
            },
            timing=None
            if kernel is None
            else Timing(
                operator=kernel.operator,
                backward=kernel.backward,
                shape={name: self.at(size) for name, size in kernel.shape.items()},
                launches=kernel.launches,
            ),
            issued=one.issued,
            kept_bytes=self.at(one.kept_bytes),
            weights=self.at(one.weights) * own,
            replicated=self.at(one.replicated) * own,
            forward=() if one.backward else transfers,
            backward=transfers if one.backward else (),
        )

    def _transfers(self, reduction: Reduction, backward: bool) -> Iterator[Transfer]:
        """Sum over the ranks; sums of sharded tokens are scattered, and gathered before the next product."""
        size = self.at(reduction.size_bytes)
        shared = self.shared if reduction.tokens else 0.0
        if not isinstance(shared, float) or shared < 1.0:
            yield over("tp", "all_reduce", size * (1.0 - shared))
        if not isinstance(shared, float) or shared > 0.0:
            yield over("tp", "reduce_scatter", size * shared)
            yield over("tp", "all_gather", size * shared * (2 if backward else 1))


def captured_of(job: Job) -> CapturedModel:
    """The captured module of a job.

    Raises:
        ValueError: it has none.
    """
    if job.captured is None:
        raise ValueError("the job has no captured module")
    return job.captured


class CapturedMethod(CorrectedMethod):
    """The corrected method on the rows of a captured module."""

    strategies: ClassVar[Mapping[str, Strategy]] = {"1d": Captured1D()}
    rules: ClassVar[tuple[Rule, ...]] = (*(rule for rule in RULES if rule.always), *CAPTURED_RULES)


class ShardedMethod(CapturedMethod):
    """The corrected method on the operators of one device under a choice of shardings, for the whole step at once."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    def micro_batches(self, job: Job, plans: Plans) -> Num:
        """One micro-batch, as the shardings divide the samples."""
        return 1.0 + 0.0 * plans.dp


CAPTURED = CapturedMethod()
SHARDED = ShardedMethod()
