"""Calibrates this machine, and in the same run measures what the calibration has not seen.

Unseen matrix products, convolutions, batch norms and poolings, training steps of two-layer perceptrons and of small
convolutional nets, and collectives of unseen sizes are visited between the tasks of the calibration, so that other
programs disturb both alike. Needs the extra ``torch``.

usage: bench_machine.py [--processes N] [--out machine.md]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from steptime.captured.cost import Timer, cost_table
from steptime.cost.roofline import memory_s
from steptime.estimate.communication import collective_of
from steptime.estimate.kernels import streamed
from steptime.estimate.layer import BACKWARD, FORWARD, phase_time
from steptime.estimate.machine import Machine, machine_of
from steptime.estimate.measured import CONVOLVED, LOOPED
from steptime.estimate.operators import COLLECTIVES
from steptime.hardware import load_cluster
from steptime.hardware.records import Device
from steptime.measure.machine import cluster_file, collectives, profile, runner
from steptime.measure.machine.profile import Predictor
from steptime.measure.machine.runner import Bench, Settings, this_host
from steptime.measure.machine.torch_ops import load_torch, summary
from steptime.measure.machine.work import TRAINED, TURNED, Task, extent_of, tasks
from steptime.plan.job import PRECISIONS
from steptime.plan.plans import Plans
from steptime.plan.rows import Product, Row, activation, bias, matmul
from steptime.store.journal import Journal

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

#: Factory in tests/models and its sizes: their convolutions are none of those that are calibrated.
NETS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("resnet_small", {"batch": 6, "pixels": 72}), ("resnet_small", {"batch": 20, "pixels": 56}),
    ("resnet_small", {"batch": 2, "pixels": 120}), ("mobile", {"batch": 6, "pixels": 72, "width": 24}),
    ("mobile", {"batch": 20, "pixels": 40, "width": 32}), ("unet", {"batch": 3, "pixels": 48, "width": 20}),
    ("unet", {"batch": 1, "pixels": 72, "width": 28, "levels": 2}),
)  # fmt: skip
STEPS = 14


@dataclass(frozen=True)
class Step:
    """One training step of a two-layer perceptron: forward, backward, plain SGD."""

    batch: int
    width: int
    hidden: int
    dtype: str

    def operators(self) -> list[Task]:
        """What it runs, as tasks; the input of the first layer needs no gradient."""
        b, d, h = self.batch, self.width, self.hidden
        products = [(b, h, d, "nt"), (b, d, h, "nt"), (b, h, d, "nn"), (d, h, b, "tn"), (h, d, b, "tn")]
        maps = [("gelu", b, h), ("gelu_backward", b, h), ("column_sum", b, h), ("column_sum", b, d)]
        maps += [("update", d, h), ("update", h, d)]
        out = [
            Task(kind="matmul", dtype=self.dtype, shape={"m": m, "n": n, "k": k}, layout=layout)
            for m, n, k, layout in products
        ]
        out += [Task(kind=k, dtype=self.dtype, shape={"rows": r, "width": w}) for k, r, w in maps]
        return out


def unseen_steps(dtypes: Sequence[str]) -> list[Step]:
    draw = random.Random("steps of the benchmark")
    out = []
    for i in range(STEPS):
        width = 32 * draw.randint(3, 32)
        batch = 16 * draw.randint(2, 48)
        out.append(Step(batch, width, width * draw.choice((2, 3, 4)), dtypes[i % len(dtypes)]))
    return out


def step_call(step: Step, torch: Any) -> Callable[[int], object]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[step.dtype]
    layers = [torch.nn.Linear(step.width, step.hidden), torch.nn.GELU(), torch.nn.Linear(step.hidden, step.width)]
    network = torch.nn.Sequential(*layers).to(dtype)
    x = torch.randn(step.batch, step.width).to(dtype)
    gradient = 1e-3 * torch.randn(step.batch, step.width).to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, foreach=False)

    def call(_: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        network(x).backward(gradient)
        optimizer.step()

    return call


@dataclass(frozen=True)
class Net:
    """One training step of a convolutional net in fp32: forward, backward, plain SGD."""

    number: int

    def built(self) -> tuple[Any, Any]:
        """Module and inputs."""
        import models

        factory, sizes = NETS[self.number]
        return getattr(models, factory)(**sizes)  # type: ignore[no-any-return]

    def call(self) -> Callable[[int], object]:
        """A step of it."""
        import models
        from steptime.captured.record.training import OPTIMIZERS

        module, inputs = self.built()
        optimizer = OPTIMIZERS["sgd"](module.parameters())

        def call(_: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            models.loss_of(module(*inputs)).backward()
            optimizer.step()

        return call

    def predicted_s(self, device: Device) -> float:
        """Seconds of the step, as `steptime profile` has them."""
        import models
        import steptime

        module, inputs = self.built()
        program = steptime.capture(
            module, inputs, optimizer="sgd", loss=models.loss_of, keep_output=False, target="cpu"
        )
        return cost_table(program, Timer(device=device)).totals.step_s


def measure_operators(
    bench: Bench, todo: Sequence[Task], unseen: Sequence[Task], steps: Sequence[Step | Net], settings: Settings
) -> tuple[list[runner.Measured], list[runner.Measured], list[float]]:
    """Calibration tasks, unseen tasks and steps, in several rounds, each in an order of its own."""
    records: list[Mapping[str, Any]] = []
    step_s: dict[Step | Net, list[float]] = {step: [] for step in steps}
    for round_ in range(settings.rounds):
        order: list[Task | Step | Net] = [*todo, *unseen, *steps]
        random.Random(round_).shuffle(order)
        for item in order:
            if isinstance(item, (Step, Net)):
                call = step_call(item, bench.torch) if isinstance(item, Step) else item.call()
                samples = bench.timer.samples_s(call, settings.visit_s)
                step_s[item].append(summary(samples).seconds)
            else:
                records.append(runner.visit(bench, item, round_, settings.visit_s))
    known = {task.key for task in todo}
    found = runner.results(records)
    return (
        [one for one in found if one.task.key in known],
        [one for one in found if one.task.key not in known],
        [float(np.quantile(step_s[step], 0.25)) for step in steps],
    )


def rows_s(machine: Machine, rows: Sequence[tuple[Row, str]]) -> float:
    """Time of rows, each in one direction, as `steptime estimate` adds it up."""
    return float(sum(phase_time(row, phase, Plans(), machine).total_s for row, phase in rows))


def product(m: int, n: int, k: int, width: float, layout: str = "") -> Row:
    row = matmul("product", "bench", Product(m=m, n=n, k=k, element_bytes=width), kept_elements=0)
    return replace(row, shape={**row.shape, "turned": float(layout == TURNED)})


def step_estimate_s(machine: Machine, step: Step) -> float:
    """The same step as the rows of a block; the input of the first layer needs no gradient."""
    width = 4.0 if step.dtype == "fp32" else 2.0
    b, d, h = step.batch, step.width, step.hidden
    first, second = product(b, h, d, width), product(b, d, h, width)
    gelu = activation("gelu", "bench", b * h, element_bytes=width)
    sums = [bias("bias", "bench", b, n, element_bytes=width) for n in (d, h)]
    whole = [(first, FORWARD), (gelu, FORWARD), (second, FORWARD), (second, BACKWARD), (gelu, BACKWARD)]
    whole += [(one, BACKWARD) for one in sums] + [(product(d, h, b, width, TURNED), FORWARD)]
    update_bytes = 3 * 2 * d * h * width
    update = streamed(machine.models, update_bytes)
    update_s = memory_s(update_bytes, machine.memory_Bps) if update is None else update.seconds
    return rows_s(machine, whole) + float(update_s)


def collective_estimate_s(machine: Machine, one: collectives.Timed) -> float:
    plans = Plans(tp=one.ranks, in_tp=one.ranks)
    return float(collective_of(one.kind, plans, machine, ("tp",), one.size_bytes))


def errors(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float, float, int]:
    relative = np.array(predicted) / np.array(measured) - 1
    return float(np.median(np.abs(relative))), float(np.abs(relative).mean()), float(relative.mean()), len(relative)


Line = tuple[str, str, tuple[float, float, float, int]]


def image_rows(
    fitted: profile.Fitted, device: Device, unseen: Sequence[runner.Measured], net_s: Sequence[float]
) -> list[Line]:
    """Unseen operators on images, and nets: by the cluster file, and by those of before these were measured."""
    predictor = Predictor(fitted.curves)
    rows: list[Line] = []
    for kind in (*CONVOLVED, *LOOPED):
        for dtype in sorted({one.task.dtype for one in unseen if one.task.kind == kind}):
            found = [one for one in unseen if (one.task.kind, one.task.dtype) == (kind, dtype)]
            by_curve = [predictor.seconds(one.task) for one in found]
            rows.append((f"{kind} {dtype}", "curve", errors(by_curve, [one.seconds for one in found])))
    forms = {"cluster file": (), "without batch norm and pooling": LOOPED, "without convolutions": CONVOLVED,
             "without either": (*LOOPED, *CONVOLVED)}  # fmt: skip
    for by, kinds in forms.items():
        predicted = [Net(i).predicted_s(_without(device, kinds)) for i in range(len(NETS))]
        rows.append(("convolutional net training step fp32", by, errors(predicted, net_s)))
    return rows


def _without(device: Device, kinds: Sequence[str]) -> Device:
    """The device without the curves of some operators."""
    assert device.curves is not None
    kept = [curve for curve in device.curves.curves if curve.family.partition("/")[2] not in kinds]
    return replace(device, curves=replace(device.curves, curves=tuple(kept)))


def operator_rows(
    fitted: profile.Fitted, machines: Mapping[str, Machine], unseen: Sequence[runner.Measured],
    steps: Sequence[Step], step_s: Sequence[float],
) -> list[Line]:  # fmt: skip
    predictor = Predictor(fitted.curves)
    issued_s = TRAINED * (fitted.device.issue_s or 0.0)
    rows: list[Line] = []
    for dtype, machine in machines.items():
        found = [one for one in unseen if one.task.dtype == dtype and one.task.kind == "matmul"]
        measured = [one.seconds for one in found]
        rows.append((f"matrix product {dtype}", "curve", errors([predictor.seconds(o.task) for o in found], measured)))
        shapes = [[o.task.shape[name] for name in ("m", "n", "k")] for o in found]
        plain = [rows_s(machine, [(product(*s, o.task.element_bytes, o.task.layout), FORWARD)])
                 for s, o in zip(shapes, found, strict=True)]  # fmt: skip
        rows.append((f"matrix product {dtype}", "cluster file", errors(plain, measured)))
    for dtype, machine in machines.items():
        mine = [(step, measured) for step, measured in zip(steps, step_s, strict=True) if step.dtype == dtype]
        by_curve = [sum(predictor.seconds(task) for task in step.operators()) + issued_s for step, _ in mine]
        measured = [seconds for _, seconds in mine]
        rows.append((f"two-layer training step {dtype}", "curves", errors(by_curve, measured)))
        plain = [step_estimate_s(machine, step) + issued_s for step, _ in mine]
        rows.append((f"two-layer training step {dtype}", "cluster file", errors(plain, measured)))
    return rows


def collective_rows(
    fitted: profile.Fitted, machine: Machine, unseen: Sequence[collectives.Timed], ranks: int
) -> list[Line]:
    predictor = Predictor(fitted.curves)
    rows: list[Line] = []
    plain, plain_measured, every, every_measured = [], [], [], []
    for kind in collectives.KINDS:
        found = [one for one in unseen if one.kind == kind and one.ranks == ranks]
        if not found:
            continue
        measured = [one.seconds for one in found]
        predicted = [predictor.collective_s(o.kind, o.axis, o.ranks, o.size_bytes) for o in found]
        rows.append((f"{kind}, {ranks} ranks", "curve", errors(predicted, measured)))
        every += predicted
        every_measured += measured
        if kind in COLLECTIVES:
            plain += [collective_estimate_s(machine, one) for one in found]
            plain_measured += measured
    rows.append((f"all collectives, {ranks} ranks", "curve", errors(every, every_measured)))
    rows.append((f"ring collectives, {ranks} ranks", "cluster file", errors(plain, plain_measured)))
    return rows


def measure_collectives(
    bench: Bench, mesh: collectives.Mesh, folder: str, rounds: int
) -> tuple[list[collectives.Timed], list[collectives.Timed]]:
    """Sizes of the calibration, and sizes between them."""
    sizes = collectives.sizes_bytes("cpu", quick=True)
    between = [int((a * b) ** 0.5) // 64 * 64 for a, b in pairwise(sizes)]
    with Journal(f"{folder}/collectives.jsonl", {"of": "the benchmark"}) as journal:
        todo = collectives.visits(mesh, [*sizes, *between], rounds)
        collectives.measure(bench.host, journal, mesh, todo, 0.03, lambda done, total: None)
        found = collectives.results(journal.records, mesh)
    return [o for o in found if o.size_bytes in sizes], [o for o in found if o.size_bytes in between]


def report(fitted: profile.Fitted, rows: Sequence[Line], wall_s: float, load: Sequence[float]) -> str:
    host = fitted.host
    lines = [
        "# Machine calibration against what it has not seen", "",
        "`python benchmarks/bench_machine.py --out benchmarks/machine.md`", "",
        f"{host.title}, {host.cores} cores, torch {host.torch}, {fitted.date}; one thread per process; "
        f"{len(fitted.operators)} operators and {len(fitted.collectives)} collectives calibrated, {wall_s:.0f} s in "
        f"all. Noise between rounds {fitted.noise * 100:.1f} %; load of the machine {load[0]:.1f} at the end, "
        f"{load[1]:.1f} over five minutes.", "",
        "`curve`: the fitted curves, called one by one. `cluster file`: what `steptime estimate --cluster` adds up, "
        "which reads the curves beside the file.", "",
        "| what | predicted by | cases | median error | mean error | bias |", "|---|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for what, by, (median, mean, signed, count) in rows:
        lines.append(f"| {what} | {by} | {count} | {median:.1%} | {mean:.1%} | {signed:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begin_s = time.monotonic()
    torch = load_torch()
    bench = Bench.open(torch, this_host(torch, 1, "cpu"))
    settings = replace(Settings.of(quick=True), rounds=given.rounds)
    dtypes, convolved = bench.dtypes(), bench.dtypes(runner.CONVOLUTION)
    todo = runner.plan(bench, dtypes, convolved, settings)
    known = {task.key for task in todo}
    extent = replace(extent_of("cpu", True, bench.host.memory_bytes), products=24, convolutions=12)
    others = [t for t in tasks(extent, dtypes, convolved, seed=2) if t.key not in known]
    unseen = [t for t in others if t.kind in ("matmul", *CONVOLVED, *LOOPED)]
    steps, nets = unseen_steps(dtypes), [Net(i) for i in range(len(NETS))]
    seen, new, both_s = measure_operators(bench, todo, unseen, [*steps, *nets], settings)
    step_s, net_s = both_s[: len(steps)], both_s[len(steps) :]
    mesh = collectives.Mesh(nodes=1, local=given.processes)
    with tempfile.TemporaryDirectory() as folder:
        calibrated, between = measure_collectives(bench, mesh, folder, given.rounds)
        fitted = profile.fit(bench.host, seen, calibrated, mesh, time.strftime("%Y-%m-%d"))
        cluster_file.write(f"{folder}/machine.toml", fitted)
        cluster = load_cluster(f"{folder}/machine.toml")
    machines = {
        dtype: machine_of(
            cluster, given.processes, PRECISIONS.get(dtype), lone_rank_has_all_links=False, calibrated=True
        )
        for dtype in dtypes
    }  # fmt: skip
    rows = operator_rows(fitted, machines, new, steps, step_s)
    rows += image_rows(fitted, cluster.device, new, net_s)
    rows += collective_rows(fitted, machines[dtypes[0]], between, given.processes)
    text = report(fitted, rows, time.monotonic() - begin_s, os.getloadavg())
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    json.dump({f"{what} by {by}": values for what, by, values in rows}, sys.stderr)


if __name__ == "__main__":
    main()
