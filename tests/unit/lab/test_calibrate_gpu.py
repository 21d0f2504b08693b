"""Measuring a GPU, as far as that can be tested without one; residuals against public profiles."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_calibrate_machine import HOST, KINDS, TODO, measured

from steptime.errors import UserError
from steptime.estimate.measured import LOOPED
from steptime.hardware.library import device_named
from steptime.measure.machine import cluster_file, comparison, profile, session, work
from steptime.measure.machine.torch_ops import CudaTimer
from steptime.measure.machine.work import LAUNCHES
from steptime.measure.runs.canonical import device_name

# --- against a public profile


@pytest.mark.slow
def test_residuals_against_a_public_profile(tmp_path: Path) -> None:
    fitted = profile.fit(HOST, measured(TODO), [], None, "2026-01-01")
    found = comparison.compare(fitted, "h100-sxm", "cuda_graph_p25")
    assert found.device == "h100-sxm" and found.score["rows"] == len(found.residuals) == found.score["scored"]
    own = [abs(r.own_s / r.measured_s - 1) for r in found.residuals if r.op == "matmul"]
    assert np.median(own) < 0.05
    public = [r.public_s / r.measured_s - 1 for r in found.residuals if r.op == "matmul"]
    assert len(public) == 96 and found.score["by_op"]["gemm"]["bias"] == pytest.approx(np.mean(public))
    path = comparison.residuals_path(tmp_path / "m.toml")
    comparison.write_residuals(found, path)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert len(lines) == len(found.residuals)
    assert {line["op"] for line in lines} == {kind for kind in KINDS if not kind.startswith("cpu_")} - {
        "copy", "gelu_backward", "layer_norm_backward", "softmax_backward", "column_sum", "update",
        *LOOPED}  # fmt: skip
    for line in lines:
        error = float(line["public_s"]) / float(line["measured_s"]) - 1
        assert float(line["public_error"]) == pytest.approx(error, rel=1e-3)
        assert line["shape"] and line["public_curve"] and line["public_device"] == "h100-sxm"


@pytest.mark.each(
    ("processor", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA H200", "h200-sxm"),
        ("AMD Instinct MI250X", "mi250x"), ("NVIDIA B300 SXM6 AC", "b300-sxm"), ("AMD EPYC", None), ("", None),
        ("../h100-sxm.toml", None),
    ],
)  # fmt: skip
def test_the_catalogue_name_of_a_gpu(processor: str, name: str | None) -> None:
    device = device_named(processor)
    assert (None if device is None else device.name) == name
    assert name is None or device_name(processor).name == name


# --- a GPU that is not there


class FakeCuda:
    """Counts what a timer asks of torch.cuda; every call takes 2 ms on the device."""

    def __init__(self, *, capture: bool) -> None:
        self.capture, self.now_ms, self.log = capture, 0.0, []  # type: ignore[var-annotated]
        self.cuda = self
        self.graphs = 0
        self.recording: list[int] | None = None

    def current_stream(self) -> str:
        return "side"

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def CUDAGraph(self) -> Any:
        held: list[int] = []
        return SimpleNamespace(held=held, replay=lambda: self.run(len(held)))

    @contextmanager
    def graph(self, graph: Any, stream: str) -> Iterator[None]:
        assert stream == "side"
        self.recording = graph.held
        try:
            yield
        finally:
            self.recording = None
        if not self.capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs += 1

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_ms=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ms", self.now_ms)
        event.elapsed_time = lambda other: other.at_ms - event.at_ms
        return event

    def run(self, calls: int) -> None:
        self.now_ms += 2.0 * calls

    def call(self, i: int) -> None:
        if self.recording is not None:
            self.recording.append(i)
        else:
            self.run(1)


@pytest.mark.parametrize("capture", [True, False])
def test_cuda_timer_reads_the_events_of_the_device(capture: bool) -> None:
    fake = FakeCuda(capture=capture)
    samples = CudaTimer(fake).samples_s(fake.call, 0.0)
    assert samples == pytest.approx([2e-3] * 5) and fake.graphs == int(capture)
    assert CudaTimer(fake, graphs=False).samples_s(fake.call, 0.0) == pytest.approx([2e-3] * 5)
    assert fake.graphs == int(capture)


GPU = replace(HOST, processor="NVIDIA H100 80GB HBM3", device="cuda", gpus=1, memory_bytes=85e9, cache_bytes=5e7)


def as_on_a_gpu(task: work.Task) -> float:
    """3 TB/s and 2 us for kernels, 2.4 TB/s for whole copies; sums of columns take a hundred times as long."""
    done = work.work_of(task)
    slow = 100.0 if task.kind == "column_sum" else 1.25 if task.kind == "copy" else 1.0
    return 2e-6 + done.matrix_flops / 5e14 + slow * done.moved_bytes / 3e12


@cache
def fitted_gpu() -> profile.Fitted:
    extent = replace(work.extent_of("cuda", True, 85e9, 5e7), products=16, attentions=0)
    tasks = work.tasks(extent, ("fp32", "bf16"), ())
    found = [replace(one, seconds=as_on_a_gpu(one.task)) for one in measured(tasks) if one.task.kind not in LAUNCHES]
    launched = [replace(one, seconds=6e-4) for one in measured([]) if one.task.kind in LAUNCHES]
    return profile.fit(GPU, [*found, *launched], [], None, "2026-01-01")


@pytest.mark.slow
def test_the_host_and_the_copy_engine_are_not_taken_for_the_device() -> None:
    """As an H100 behind a slow host: 600 us to issue anything, and copies slower than kernels."""
    device = fitted_gpu().device
    assert device.memory_Bps * device.memory_efficiency == pytest.approx(3e12, rel=0.05)
    assert device.kernel_latency_s == pytest.approx(2e-6, rel=0.1), "what is replayed, without the host"
    assert device.issue_s == pytest.approx(6e-4 / 9)
    gelu = work.work_of(work.Task(kind="gelu", dtype="bf16", shape={"rows": 1, "width": 1}))
    least = gelu.vector_flops / gelu.moved_bytes * 3e12
    assert device.vector_efficiency == 1.0 and device.vector_flops_per_s["bf16"] >= 0.9 * least


@pytest.mark.slow
def test_the_file_of_a_known_gpu_says_its_architecture() -> None:
    fitted = fitted_gpu()
    assert '\narchitecture = "hopper"\n' in cluster_file.cluster_text(fitted)
    other = replace(fitted, host=replace(GPU, processor="NVIDIA Something"))
    assert "architecture" not in cluster_file.cluster_text(other)


def test_a_gpu_that_torch_does_not_see(tmp_path: Path) -> None:
    fake = SimpleNamespace(__version__="2.13.0+cpu", cuda=SimpleNamespace(is_available=lambda: False))
    with pytest.raises(UserError, match=r"--device cuda: torch 2\.13\.0\+cpu sees no GPU"):
        session.host_of(fake, session.Request(out=tmp_path / "m.toml", device="cuda"))


def test_facts_of_a_gpu(tmp_path: Path) -> None:
    facts = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85e9, L2_cache_size=52428800)
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda i: facts)
    host = session.host_of(SimpleNamespace(__version__="2.13.0", cuda=cuda), session.Request(out=tmp_path / "m.toml"))
    assert (host.device, host.gpus, host.cache_bytes, host.memory_bytes) == ("cuda", 1, 52428800, 85e9)
    assert session._mesh(session.Request(out=tmp_path / "m.toml"), host) is None, "one GPU has nobody to talk to"
    with pytest.raises(UserError, match="--processes 2: there is 1 GPU, one for each process"):
        session._mesh(session.Request(out=tmp_path / "m.toml", processes=2), host)
