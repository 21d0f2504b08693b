"""Cost of every combination on a captured module: proposed from few captures, then verified by its own capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from steptime.captured.cost import KernelCall, Work
from steptime.captured.fit.bench import Bench, Footprint, Issued, Run, accumulating, with_states
from steptime.captured.fit.choice import Batched, Checkpoints, Choice, Point
from steptime.captured.fit.layout import Layout, tree_of
from steptime.captured.fit.techniques import TECHNIQUES, Change
from steptime.captured.graph.allocator import AllocatorSettings
from steptime.captured.graph.placement import place
from steptime.captured.graph.segments import Saves, Tree, every, grouped, leaves, plain, text
from steptime.captured.rematerialisation import rotor
from steptime.captured.rematerialisation.chain import Infeasible, keep_all
from steptime.captured.rematerialisation.swap import HostLink, Place, choose_places
from steptime.cost.data_parallel import adam_flops
from steptime.cost.host import HOST_ADAM_PER_S, host_adam_s
from steptime.errors import UserError
from steptime.estimate.machine import host_ranks
from steptime.estimate.memory_definitions import MemoryConstants, exceeding, memory_constants

OPTIMAL: Final = 6
"""Largest number of optimal schedules of the chain that are proposed."""


class Arranged(NamedTuple):
    """Checkpoints of a capture."""

    tree: Tree
    saves: Saves


def arrangements(
    count: int, layout: Layout | None, *, groups: bool, narrow: bool
) -> Iterator[tuple[Checkpoints, Arranged]]:
    """All candidate checkpoints, the simple ones first.

    Args:
        count: number of blocks.
        layout: chain of the blocks, if they form one.
        groups: a checkpoint may contain several blocks, as all stand in one list.
        narrow: saved activations may have fewer bits.
    """
    yield Checkpoints(), Arranged(plain(count), "all")
    if not count:
        return
    if narrow:
        yield _named("8bit-activations", "saved activations in 8 bits"), Arranged(plain(count), "8bit")
    yield _named("selective", "selective"), Arranged(grouped(count, 1), "products")
    if count > 2:
        yield _named("every", "every 2nd block", k="2"), Arranged(every(count, 2), "all")
    yield _named("all", "all blocks"), Arranged(grouped(count, 1), "all")
    if not groups:
        return
    for size in _sizes(count):
        words = {"k": str(size), "segments": str(-(-count // size))}
        yield _named("groups", f"groups of {size}", **words), Arranged(grouped(count, size), "all")
    seen = {text(grouped(count, size)) for size in (1, *_sizes(count))} | {text(plain(count)), text(every(count, 2))}
    for tree in _optimal(layout) if layout is not None else ():
        if text(tree) not in seen:
            again = sum(1 for item in tree if not isinstance(item, int) for _ in leaves((item,)))
            name = f"optimal, {again} of {count} blocks again"
            yield _named("optimal", f"{name}: {text(tree)}", tree=text(tree)), Arranged(tree, "all")


def _named(key: str, name: str, **values: str) -> Checkpoints:
    return Checkpoints(key=key, name=name, values=tuple(values.items()))


def _sizes(count: int) -> tuple[int, ...]:
    """Sizes of groups around the square root of the number of blocks."""
    root = max(round(count**0.5), 2)
    return tuple(sorted({size for size in (root // 2, root, 2 * root) if 1 < size < count}))


def _optimal(layout: Layout) -> Iterable[Tree]:
    """At most :data:`OPTIMAL` schedules of the front of memory and time, evenly spaced."""
    front = rotor.front(layout.chain)
    step = max(len(front) / OPTIMAL, 1.0)
    for number in range(min(OPTIMAL, len(front))):
        tree = tree_of(front[int(number * step)].schedule)
        if tree and tree[-1] == layout.blocks:
            yield tree[:-1]


SWAPS: Final = (0.25, 0.5, 0.75)
"""Candidate fractions of the activations above the least possible that are swapped."""
HOST_KINDS: Final = ("paged", "offload")
OFFLOADED_CALLS: Final = 3
"""Operators per parameter of an optimiser on the host, which waits for each of them: copy of the gradient to the host,
update, copy of the weights to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Forward and backward pass of one micro-batch with some checkpoints."""

    work: Issued
    footprint: Footprint
    stall_s: float = 0.0
    captured: bool = False


@dataclass(kw_only=True)
class Captured(Batched):
    """Evaluates combinations on captures of one module."""

    bench: Bench
    host_Bps: float

    # -- the space ----------------------------------------------------------------------------------------------------

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that the device has rates for and that are allowed."""
        rates = self.bench.device.matrix_flops_per_s
        self.bench.run("fp32", self.batch)
        found = [*self.plain_precisions(rates)]
        if self.allow is Change.TRAINING and "bf16" in rates:
            found.append("pure-bf16")
        return tuple(name for name in found if self._can(name))

    @cached_property
    def refused(self) -> dict[str, str]:
        """Precisions, micro-batches and checkpoints in which the module cannot be captured -> reason."""
        return {}

    @cached_property
    def unverified(self) -> dict[str, str]:
        """Checkpoints that are only simulated, because their capture fails -> reason."""
        return {}

    @cached_property
    def _can_adapt(self) -> bool:
        return "bf16" in self.precisions and bool(self.bench.paths) and self._can("qlora")

    def _can(self, precision: str, micro: int | None = None, label: str = "", arranged: Arranged | None = None) -> bool:
        """True if a variant can be captured; otherwise the reason is noted in ``refused``."""
        try:
            self.bench.run(precision, micro or self.batch, *(arranged or ()))
        except UserError as error:
            self.refused.setdefault(label or precision, _first_line(error))
            return False
        return True

    def _micro_batches(self, precision: str) -> tuple[int, ...]:
        """Micro-batches that can be captured."""
        rest = (one for one in self.micro_batches[1:] if self._can(precision, one, f"a micro-batch of {one}"))
        return (self.micro_batches[0], *rest)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Allowed kinds of optimiser states; fused ones replace the default."""
        if not self.bench.has_fused:
            return ("default",)
        kinds = ["fused"]
        if self.bench.family in ("adam", "adamw"):
            kinds += ["8bit"] if self.allow.rank >= Change.ROUNDING.rank else []
            kinds += () if self.is_host else HOST_KINDS
        return tuple(kinds)

    @cached_property
    def worthwhile(self) -> tuple[str, ...]:
        """Precisions that, without any further technique, no other beats in both time and memory."""
        first = {name: self.proposed(self.plain(name)) for name in self.precisions}
        return tuple(
            name
            for name, one in first.items()
            if not any(o.step_s < one.step_s and o.memory_bytes <= one.memory_bytes for o in first.values())
        )

    def choices(self) -> Iterator[Choice]:
        """Every combination that is weighed."""
        swaps = () if self.is_host else SWAPS
        adapters = ("qlora",) if self.allow is Change.TRAINING and self._can_adapt else ()
        for precision in (*self.worthwhile, *adapters):
            frozen = precision == "qlora"
            for micro in self._micro_batches(precision):
                chain = self.bench.run(precision, micro).layout is not None
                for checkpoints in self.checkpoints(precision, micro):
                    for swapped in (0.0, *swaps) if chain and checkpoints.key == "none" else (0.0,):
                        for optimizer in self.optimizers[:1] if frozen else self.optimizers:
                            yield Choice(
                                precision="bf16" if frozen else precision, optimizer=optimizer, batch=self.batch,
                                micro_batch=micro, checkpoints=checkpoints, swapped=swapped,
                                weights="qlora" if frozen else "trained",
                            )  # fmt: skip

    def checkpoints(self, precision: str, micro: int) -> tuple[Checkpoints, ...]:
        """Checkpoints that can be captured, the simple ones first."""
        found = self._arrangements(precision, micro).items()
        return tuple(one for one, arranged in found if self._can_arrange(precision, micro, one, arranged))

    def _can_arrange(self, precision: str, micro: int, one: Checkpoints, arranged: Arranged) -> bool:
        if self._simulates(precision, micro, one, arranged):
            return True
        return all(self._can(precision, end, _label(one), arranged) for end in self._ends(precision))

    def _simulates(self, precision: str, micro: int, one: Checkpoints, arranged: Arranged) -> bool:
        """True if time and memory of the checkpoints follow from a capture without checkpoints."""
        if one == Checkpoints():
            return True
        return arranged.saves == "all" and self.bench.run(precision, micro).layout is not None

    def _ends(self, precision: str) -> tuple[int, ...]:
        """The largest and the smallest micro-batch."""
        sizes = self._micro_batches(precision)
        return tuple(dict.fromkeys((sizes[0], sizes[-1])))

    def _arrangements(self, precision: str, micro: int) -> dict[Checkpoints, Arranged]:
        key = (precision, micro)
        if key not in self._known:
            layout = self.bench.run(precision, micro).layout if len(self.bench.blocks) == 1 else None
            narrow = self.allow.rank >= Change.ROUNDING.rank
            groups = len(self.bench.blocks) == 1
            self._known[key] = dict(arrangements(len(self.bench.paths), layout, groups=groups, narrow=narrow))
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, int], dict[Checkpoints, Arranged]]:
        return {}

    # -- one combination ----------------------------------------------------------------------------------------------

    def proposed(self, choice: Choice) -> Point:
        """Cost of a combination from existing captures, or a few more."""
        return self._point(choice, self._passes(choice), verify=False)

    def verified(self, choice: Choice, proposed: Point | None = None) -> Point:
        """Cost of a combination from its own capture; without a capture it stays a proposal."""
        arranged = self._arrangements(form_of(choice), choice.micro_batch)[choice.checkpoints]
        if choice.swapped:
            return self._point(choice, self._passes(choice), verify=False)
        try:
            run = self.bench.run(form_of(choice), choice.micro_batch, *arranged)
        except UserError as error:
            self.unverified.setdefault(_label(choice.checkpoints), _first_line(error))
            return self.proposed(choice)
        passes = Passes(
            work=run.part("forward", "backward"), footprint=run.footprint(choice.accumulation > 1), captured=True
        )
        before = proposed if proposed is not None else self.proposed(choice)
        return replace(self._point(choice, passes, verify=True), proposed_bytes=before.memory_bytes)

    def _passes(self, choice: Choice) -> Passes:
        key = (form_of(choice), choice.micro_batch, choice.checkpoints, choice.swapped)
        if key not in self._weighed:
            self._weighed[key] = self._weigh(choice)
        return self._weighed[key]

    @cached_property
    def _weighed(self) -> dict[tuple[str, int, Checkpoints, float], Passes]:
        return {}

    def _weigh(self, choice: Choice) -> Passes:
        arranged = self._arrangements(form_of(choice), choice.micro_batch)[choice.checkpoints]
        if not self._simulates(form_of(choice), choice.micro_batch, choice.checkpoints, arranged):
            return self._interpolated(choice, arranged)
        base = self.bench.run(form_of(choice), choice.micro_batch)
        work, footprint = base.part("forward", "backward"), base.footprint(choice.accumulation > 1)
        if choice.checkpoints.key == "none" and not choice.swapped:
            return Passes(work=work, footprint=footprint, captured=True)
        layout = self._layout(choice)
        if layout is None:
            return Passes(work=work, footprint=footprint)
        if choice.swapped:
            return self._swapped(choice, layout, work, footprint)
        weighed = layout.weigh((*arranged.tree, layout.blocks))
        extra = base.gradient_bytes if choice.accumulation > 1 else 0
        limit = footprint.passes_bytes
        return Passes(
            work=replace(work, device_s=work.device_s + weighed.recomputed_s, host_s=work.host_s + weighed.reissued_s),
            footprint=replace(footprint, passes_bytes=min(weighed.passes_bytes + extra, limit)),
        )

    def _layout(self, choice: Choice) -> Layout | None:
        return self.bench.run(form_of(choice), choice.micro_batch).layout

    def _interpolated(self, choice: Choice, arranged: Arranged) -> Passes:
        """Passes between captures of the largest and smallest micro-batch; checkpoints have effects affine in size."""
        micro, accumulate = choice.micro_batch, choice.accumulation > 1
        rows = []
        for end in self._ends(form_of(choice)):
            run, base = self.bench.run(form_of(choice), end, *arranged), self.bench.run(form_of(choice), end)
            one, other = run.part("forward", "backward"), base.part("forward", "backward")
            saved = run.footprint(accumulate).passes_bytes - base.footprint(accumulate).passes_bytes
            rows.append((end, one.device_s - other.device_s, one.host_s - other.host_s, saved))
        (high, *top), (low, *bottom) = rows[0], rows[-1]
        share = (micro - low) / (high - low) if high > low else 1.0
        device_s, host_s, saved = (b + share * (t - b) for t, b in zip(top, bottom, strict=True))
        base = self.bench.run(form_of(choice), micro)
        work, footprint = base.part("forward", "backward"), base.footprint(accumulate)
        return Passes(
            work=replace(work, device_s=work.device_s + device_s, host_s=work.host_s + host_s),
            footprint=replace(footprint, passes_bytes=footprint.passes_bytes + saved),
        )

    def _swapped(self, choice: Choice, layout: Layout, work: Issued, footprint: Footprint) -> Passes:
        chain = layout.chain
        link = HostLink(out_Bps=self.host_Bps, in_Bps=self.host_Bps)
        everything, least = self._swap_range(layout)
        limit = everything - choice.swapped * (everything - least)
        found = choose_places(chain, limit, link, allowed=(Place.KEEP, Place.SWAP))
        if isinstance(found, Infeasible):
            return Passes(work=work, footprint=footprint)
        extra = footprint.passes_bytes - layout.weigh(plain(layout.blocks + 1)).passes_bytes
        peak = layout.beside_bytes + found.best.peak_bytes + layout.left_total_bytes + extra
        return Passes(
            work=work,
            footprint=replace(footprint, passes_bytes=min(peak, footprint.passes_bytes)),
            stall_s=found.best.stall_s,
        )

    def _swap_range(self, layout: Layout) -> tuple[float, float]:
        from steptime.captured.rematerialisation.chain import simulate
        from steptime.captured.rematerialisation.swap import least_bytes

        chain = layout.chain
        return simulate(chain, keep_all(len(chain))).peak_bytes, least_bytes(chain)

    @property
    def _constants(self) -> MemoryConstants:
        return memory_constants(is_host=self.is_host)

    # -- time and memory of a step ------------------------------------------------------------------------------------

    def _point(self, choice: Choice, passes: Passes, *, verify: bool) -> Point:
        base = self.bench.run(form_of(choice), choice.micro_batch)
        count, micro_s = choice.accumulation, passes.work.seconds + passes.stall_s
        update_s, adding_s = self._apart(choice, base)
        step_s = count * micro_s + (count - 1) * adding_s + update_s
        totals = base.table.totals
        scale = step_s / totals.step_s
        memory, phases = self._memory(choice, passes.footprint, base)
        reserved, fits = self._reserved(choice, memory, verify=verify)
        context = self._constants.context_bytes
        return Point(
            choice=choice, step_s=step_s, memory_bytes=memory, reserved_bytes=reserved, fits=fits,
            bracket_s=(min(totals.bracket_s[0] * scale, step_s), max(totals.bracket_s[1] * scale, step_s)),
            band_s=(totals.band_s[0] * scale, totals.band_s[1] * scale), device_bytes=reserved + context,
            oom_probability=exceeding(reserved + context, self.bench.device.memory_bytes,
                                      self._constants.deviation["device"]),
            basis="capture" if passes.captured else "simulation", phases_bytes=phases,
        )  # fmt: skip

    def _memory(self, choice: Choice, footprint: Footprint, base: Run) -> tuple[float, dict[str, float]]:
        """Peak of live tensors, in total and by phase, with the kind of optimiser states that was chosen."""
        states = base.state_bytes(choice.optimizer) - footprint.state_bytes
        temporaries = 0.0
        if choice.optimizer == "default" and self.bench.has_fused:
            run = self.bench.run(form_of(choice), self.batch, fused=False)
            temporaries = (
                run.footprint(False).optimizer_bytes
                - self.bench.run(form_of(choice), self.batch).footprint(False).optimizer_bytes
            )
        phases = {
            "passes": footprint.passes_bytes + states,
            "optimizer": footprint.optimizer_bytes + states + temporaries,
        }
        return max(phases.values()), phases

    def _reserved(self, choice: Choice, memory: float, *, verify: bool) -> tuple[float, bool]:
        """Bytes that the allocator reserves, and True if they fit with the context of the driver."""
        constants = self._constants
        room = self.bench.device.memory_bytes - constants.context_bytes
        if not verify:
            reserved = memory * (1 + constants.slack)
            return reserved, reserved <= room
        arranged = self._arrangements(form_of(choice), choice.micro_batch)[choice.checkpoints]
        fused = choice.optimizer != "default"
        program = self.bench.run(form_of(choice), choice.micro_batch, *arranged, fused=fused).program
        program = with_states(accumulating(program) if choice.accumulation > 1 else program, choice.optimizer)
        placed = place(program, logs=False)
        if placed.peak_reserved_bytes <= room or room <= 0:
            return float(placed.peak_reserved_bytes), placed.peak_reserved_bytes <= room
        tight = place(program, AllocatorSettings(capacity_bytes=int(room)), logs=False)
        reserved = placed.peak_reserved_bytes if tight.shortage else tight.peak_reserved_bytes
        return float(reserved), tight.shortage is None

    def _apart(self, choice: Choice, base: Run) -> tuple[float, float]:
        """Time of the optimiser step, and of adding the gradients of a micro-step."""
        key = (form_of(choice), choice.micro_batch, choice.optimizer)
        if key not in self._updates:
            self._updates[key] = self._update_s(choice, base), self._adding_s(choice, base)
        return self._updates[key]

    @cached_property
    def _updates(self) -> dict[tuple[str, int, str], tuple[float, float]]:
        return {}

    def _adding_s(self, choice: Choice, base: Run) -> float:
        """Time of adding the gradients of a micro-step to their sum."""
        size = base.gradient_bytes
        count = sum(one.category == "gradient" for one in base.program.storages)
        return self._streamed_s(form_of(choice), "add", 3.0 * size, size / 4, count)

    def _update_s(self, choice: Choice, base: Run) -> float:
        """Time of the optimiser step."""
        kind, program = choice.optimizer, base.program
        if kind == "default" and self.bench.has_fused:
            base = self.bench.run(form_of(choice), self.batch, fused=False)
        update_s = base.part("optimizer").seconds
        trained = [one for one in program.parameters if one.trained]
        elements, weights = sum(one.elements for one in trained), sum(one.size_bytes for one in trained)
        if kind == "8bit":
            moved = 2.0 * weights + base.gradient_bytes + 2.0 * base.state_bytes("8bit")
            return self._streamed_s(form_of(choice), "adamw8bit", moved, float(adam_flops(elements)), len(trained))
        if kind == "paged":
            return update_s + 2.0 * base.state_bytes() / self.host_Bps
        if kind == "offload":
            ranks = host_ranks(self.bench.device, 1, 1)
            moved = base.gradient_bytes + weights
            issued_s = OFFLOADED_CALLS * len(trained) * self.bench.timer(form_of(choice)).host_s
            return issued_s + float(host_adam_s(elements, ranks, moved, HOST_ADAM_PER_S, self.host_Bps))
        return update_s

    def _streamed_s(self, precision: str, name: str, moved: float, flops: float, launches: float) -> float:
        timer = self.bench.timer(precision)
        call = KernelCall(operator="move", shape={"read_bytes": moved, "written_bytes": 0.0})
        work = Work(moved_bytes=moved, vector_flops=flops, launches=launches, kernels=(call,), family="optimiser")
        seconds, host_s = timer.time(name, work).seconds, launches * timer.host_s
        return Issued(device_s=seconds, host_s=host_s, sharpness=timer.sharpness).seconds


def _first_line(error: UserError) -> str:
    return str(error).partition("\n")[0]


def _label(one: Checkpoints) -> str:
    """Name of checkpoints in a note."""
    return TECHNIQUES[one.key].title if one.key in TECHNIQUES else one.name


def form_of(choice: Choice) -> str:
    """Key of :data:`FORMATS` in which a choice is captured."""
    return "qlora" if choice.weights == "qlora" else choice.precision
