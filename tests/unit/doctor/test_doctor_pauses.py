"""Pauses of a device: many short ones are slow launches, a few long ones are a host that stops, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime.doctor import Diagnosis, TraceTimes, diagnose_trace, read_trace, trace_times
from steptime.doctor.advice import ADVICE
from steptime.doctor.records import LongGap
from steptime.doctor.trace_findings import TITLES, cause_of

MS = 1000.0
"""Microseconds."""


class Steps:
    """A trace of steps of equal kernels, with pauses before some of them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1e9

    def add(self, category: str, name: str, start: float, length: float, thread: int = 1, **args: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 0,
                            "tid": thread, "args": args})  # fmt: skip

    def kernel(self, name: str, length: float, pause: float, *, queued: bool = False, launches: bool = True) -> float:
        """A kernel after a pause; returns when the pause began. Launched at its end, or long before."""
        begin, n = self.now, len(self.events) + 1
        start = begin + pause
        launch = start - 0.2 if pause and not queued else begin - 500.0
        if launches:
            self.add("cuda_runtime", "cudaLaunchKernel", launch, 3.0, 1, correlation=n)
        self.add("gpu_memcpy" if name.startswith("Memcpy") else "kernel", name, start, length, 7,
                 correlation=n, device=0, stream=7)  # fmt: skip
        self.now = start + length
        return begin

    def step(self, number: int, pauses: dict[int, float], kernels: int = 353, length: float = 1.81 * MS,
             named: dict[int, str] | None = None, **how: bool) -> dict[int, float]:  # fmt: skip
        """One step of kernels with pauses (us) before those of these numbers; returns when they began."""
        begin = self.now
        at = {}
        for i in range(kernels):
            name = (named or {}).get(i, "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT")
            at[i] = self.kernel(name, length, pauses.get(i, 0.0), **how)
        self.add("user_annotation", f"ProfilerStep#{number}", begin - 400.0, self.now - begin, 1)
        self.add("gpu_user_annotation", f"ProfilerStep#{number}", begin, self.now - begin, 7)
        return at

    def times(self, folder: Path) -> TraceTimes:
        path = folder / "t.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return trace_times(read_trace(str(path)), str(path), {})

    def diagnosis(self, folder: Path) -> Diagnosis:
        return diagnose_trace(self.times(folder))


def test_one_long_pause_per_step_is_no_lack_of_launches(tmp_path):
    """353 kernels of 1.81 ms back to back, and 40 ms in which the host does something else."""
    s = Steps()
    for n in range(4):
        s.step(n, {141: 40 * MS})
    t = s.times(tmp_path)
    (gap,) = t.long_gaps
    assert (gap.time_s, gap.per_step, gap.lost_s) == pytest.approx((0.04, 1.0, 0.04))
    assert gap.position == pytest.approx(141 * 1.81 / (353 * 1.81 + 40))
    assert (gap.between_steps, gap.waits_for_host, gap.host) == (False, True, "")
    (found,) = diagnose_trace(t).findings
    assert found.code == "stall"
    assert found.lost_s == pytest.approx(0.04)
    assert found.evidence[0] == "40 ms, 5.9 % of the step, in one pause per step"
    assert "40 ms at 38 % of the step, after nvjet" in found.evidence[1]
    assert "with_stack=True" in found.evidence[2]
    advice = " ".join(found.advice)
    assert "larger micro-batches do not help" in advice
    assert "torch.compile" not in advice


def test_many_short_pauses_are_a_lack_of_launches(tmp_path):
    s = Steps()
    for n in range(3):
        s.step(n, dict.fromkeys(range(1, 300), 40.0), kernels=300, length=60.0)
    d = s.diagnosis(tmp_path)
    (found,) = d.findings
    assert found.code == "launch"
    assert found.lost_s == pytest.approx(299 * 39.8e-6)
    assert any("CUDA graphs" in line for line in found.advice)
    assert d.measured["long_gaps"] == []


def test_few_kernels_that_all_wait_are_a_lack_of_launches(tmp_path):
    """Twenty kernels, each after 2 ms: no pause stands out."""
    s = Steps()
    for n in range(3):
        s.step(n, dict.fromkeys(range(1, 20), 2 * MS), kernels=20, length=MS)
    assert [f.code for f in s.diagnosis(tmp_path).findings] == ["launch"]


def test_both_kinds_are_told_apart(tmp_path):
    s = Steps()
    for n in range(3):
        s.step(n, dict.fromkeys(range(1, 300), 40.0) | {150: 30 * MS}, kernels=300, length=60.0)
    stall, launch = s.diagnosis(tmp_path).findings
    assert (stall.code, launch.code) == ("stall", "launch")
    assert stall.lost_s == pytest.approx(0.03, rel=0.01)
    assert launch.lost_s == pytest.approx(298 * 39.8e-6, rel=1e-3)
    assert "in addition to the long pauses" in launch.evidence[0]


@pytest.mark.each(
    ("category", "name", "title"),
    [
        ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "the next batch"),
        ("python_function", "torch/utils/data/dataloader.py(708): __next__", "the next batch"),
        ("cpu_op", "aten::_local_scalar_dense", "reads a value from the device"),
        ("cuda_runtime", "cudaStreamSynchronize", "reads a value from the device"),
        ("python_function", "<built-in function collect>", "collects garbage"),
        ("user_annotation", "Optimizer.step#AdamW.step", "at the optimiser"),
        ("python_function", "megatron/training/checkpointing.py(380): save_checkpoint", "the host saves"),
        ("cuda_runtime", "cudaMalloc", "allocated or freed"),
        ("python_function", "torch/_dynamo/convert_frame.py(1290): __call__", "compiles"),
        ("python_function", "train.py(42): my_hook", "few long pauses"),
    ],
)
def test_what_the_host_does_in_the_pause_is_named(tmp_path, category, name, title):
    s = Steps()
    for n in range(4):
        begin = s.step(n, {50: 20 * MS}, kernels=100)[50]
        s.add("python_function", "train.py(10): main", begin - 50 * MS, 100 * MS)
        s.add(category, name, begin - 0.1 * MS, 19.9 * MS)
        s.add("cpu_op", "aten::copy_", begin + MS, 0.5 * MS)
        s.add("python_function", "threading.py(900): run", begin, 19 * MS, thread=99)
    found = next(f for f in s.diagnosis(tmp_path).findings if f.code == "stall")
    assert title in found.title
    assert f"the host is in {name}"[:60] in found.evidence[1]


@pytest.mark.parametrize(
    ("named", "pauses", "cause"),
    [
        ({0: "Memcpy HtoD (Pinned -> Device)"}, {0: 20 * MS}, "data"),
        ({}, {0: 20 * MS}, "between_steps"),
        ({49: "Memcpy DtoH (Device -> Pinned)"}, {50: 20 * MS}, "host_sync"),
        ({99: "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"}, {99: 20 * MS}, "host_optimizer"),
        ({}, {50: 20 * MS}, "stall"),
    ],
)
def test_without_events_of_the_host_the_kernels_around_the_pause_speak(tmp_path, named, pauses, cause):
    s = Steps()
    for n in range(4):
        s.step(n, pauses, kernels=100, named=named)
    (gap,) = s.times(tmp_path).long_gaps
    assert cause_of(gap) == cause
    assert gap.between_steps is (0 in pauses)


def test_pauses_at_many_places_count_together(tmp_path):
    """One before each of eight micro-batches."""
    s = Steps()
    for n in range(3):
        s.step(n, dict.fromkeys(range(40, 360, 40), 5 * MS), kernels=353)
    (gap,) = s.times(tmp_path).long_gaps
    assert (gap.per_step, gap.position, gap.between_steps) == (8.0, None, False)
    (found,) = s.diagnosis(tmp_path).findings
    assert found.evidence[0].endswith("in 8 pauses per step")
    assert "5 ms at several places of the step" in found.evidence[1]


def test_a_pause_with_work_queued_is_not_the_hosts(tmp_path):
    s = Steps()
    for n in range(3):
        s.step(n, {50: 20 * MS}, kernels=100, queued=True)
    (found,) = s.diagnosis(tmp_path).findings
    assert (found.code, found.title) == ("idle", "the device is idle although work is queued")
    assert "20 ms at 50 % of the step"[:8] in found.evidence[1]


def test_a_trace_without_launches_still_says_where(tmp_path):
    s = Steps()
    for n in range(3):
        s.step(n, {50: 20 * MS}, kernels=100, launches=False)
    t = s.times(tmp_path)
    assert (t.launch_bound_s, t.long_gaps[0].waits_for_host) == (None, None)
    (found,) = diagnose_trace(t).findings
    assert found.code == "idle"
    assert "of the step, after nvjet" in found.evidence[1]


def test_one_pause_in_some_steps_only(tmp_path):
    s = Steps()
    for n in range(5):
        s.step(n, {50: 200 * MS} if n == 3 else {}, kernels=100)
    found = next(f for f in s.diagnosis(tmp_path).findings if f.code == "stall")
    assert found.evidence[0].endswith("in one pause in 4 steps")
    assert found.lost_s == pytest.approx(0.05, rel=0.01)


def test_steps_that_are_only_counted_have_no_places(tmp_path):
    """Without annotations the trace is one window, and a share of it is no share of a step."""
    s = Steps()
    for n in range(4):
        s.step(n, {50: 20 * MS} if n == 2 else {}, kernels=100)
    path = tmp_path / "t.json"
    path.write_text(json.dumps([e for e in s.events if "ProfilerStep" not in e["name"]]))
    (gap,) = trace_times(read_trace(str(path)), str(path), {}, 4).long_gaps
    assert (gap.per_step, gap.position, gap.between_steps) == (0.25, None, False)


def test_every_cause_has_its_advice():
    assert set(TITLES) <= set(ADVICE)


def test_a_gap_in_json_has_what_it_costs():
    gap = LongGap(time_s=0.02, per_step=0.5, before="a", after="b", between_steps=True)
    assert gap.to_json()["lost_s"] == 0.01
    assert json.loads(json.dumps(gap.to_json()))["host"] == ""
