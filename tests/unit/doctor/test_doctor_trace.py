"""Traces: streaming, classification, interval arithmetic."""

# ruff: noqa: E501 names of kernels are long

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.doctor import read_trace, trace, trace_times
from steptime.doctor.timeline import covered, union
from steptime.doctor.trace import axis_of, collective_of, group_of
from steptime.errors import InputFileError

SAMPLE = str(Path(__file__).resolve().parents[2] / "data/doctor/trace.json.gz")


def kernel(name: str, start: float, length: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "pid": 0, "tid": stream,
            "args": {"device": 0, "stream": stream, **args}}  # fmt: skip


def times_of(tmp_path: Path, trace_events: list[Any], **more: Any) -> Any:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": trace_events, **more}))
    return trace_times(read_trace(str(path)), str(path), {})


def test_the_sample_adds_up_to_hand_numbers():
    t = trace_times(read_trace(SAMPLE), SAMPLE, {})
    ms = 1e-3
    assert (t.steps_found, len(t.step_times_s)) == (4, 3)
    assert t.step_s == pytest.approx((6 + 32 * 5.4 + 3.6) * ms)
    assert t.groups == pytest.approx({
        "matmul": 96 * ms, "attention": 38.4 * ms, "optimizer": 3 * ms, "memory_bound": 9.6 * ms, "copies": 0.6 * ms,
    })  # fmt: skip
    tp, dp = t.traffic
    assert (tp.axis, dp.axis) == ("tp", "dp")
    assert (tp.busy_s, tp.exposed_s) == pytest.approx((28.8 * ms, 28.8 * ms))
    assert dp.busy_s == pytest.approx(57.6 * ms)
    assert dp.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert dp.collectives == pytest.approx({"all_gather": 57.6 * ms})
    assert t.idle_s == pytest.approx(6 * ms)
    total = sum(t.groups.values()) + sum(each.exposed_s for each in t.traffic) + t.idle_s
    assert total == pytest.approx(t.step_s)
    assert t.kernels_per_step == 162
    assert (t.gpus, t.device) == (64, "NVIDIA H100 80GB HBM3")
    assert t.top[0].group == "matmul"


def test_idle_time_is_split_by_when_the_next_kernel_was_launched(tmp_path):
    launches = [{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1.0,
                 "args": {"correlation": n}} for n, ts in ((1, 0.0), (2, 130.0), (3, 50.0))]  # fmt: skip
    kernels = [kernel("gemm", 0, 100, correlation=1), kernel("gemm", 140, 60, correlation=2),
               kernel("gemm", 220, 80, correlation=3)]  # fmt: skip
    t = times_of(tmp_path, launches + kernels)
    assert t.idle_s == pytest.approx(60e-6)
    assert t.launch_bound_s == pytest.approx(30e-6)
    assert t.longest_gap_s == pytest.approx(40e-6)
    assert times_of(tmp_path, kernels).launch_bound_s is None


SENDS = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def called(annotation: str, **said: Any) -> list[dict[str, Any]]:
    """One kernel of messages, launched inside an annotation and the profiler's record of a call."""
    host: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": annotation, "ts": 0, "dur": 20, "tid": 1, "args": {}},
        {"cat": "cpu_op", "name": "record_param_comms", "ts": 1, "dur": 9, "tid": 1, "args": said},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": 5, "dur": 2, "tid": 1, "args": {"correlation": 4}},
    ]
    return [{"ph": "X", "pid": 0, **event} for event in host] + [kernel(SENDS, 30, 100, 20, correlation=4)]


EXPERTS = {"Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP", "Group size": 8}


@pytest.mark.parametrize(
    ("events", "axis", "kind"),
    [
        (called("nccl:all_to_all", **{"Collective name": "all_to_allv"}), "unassigned", "all_to_all"),
        (called("nccl:all_to_all"), "unassigned", "all_to_all"),
        (called("step", **{"Collective name": "all_to_allv"}, **EXPERTS), "ep", "all_to_all"),
        (called("nccl:send 0->1", **{"Collective name": "send"}), "pp", "send_recv"),
        ([kernel(SENDS, 0, 9, 20, **{"Collective name": "all_to_allv"})], "unassigned", "all_to_all"),
        ([kernel(SENDS, 0, 9, 20)], "pp", "send_recv"),
    ],
)
def test_what_a_kernel_of_messages_carries_is_what_its_call_says(tmp_path, events, axis, kind):
    t = times_of(tmp_path, events)
    (found,) = t.traffic
    assert (found.axis, list(found.collectives)) == (axis, [kind])
    guessed = any("taken for messages of a pipeline" in warning for warning in t.warnings)
    assert guessed == (len(events) == 1 and axis == "pp")


def test_waiting_is_what_exceeds_the_fastest_call_of_a_size(tmp_path):
    meta = {"Collective name": "allreduce", "Group size": 8, "In msg nelems": 100, "Process Group Description": "dp"}
    sizes = [kernel("ncclDevKernel_AllReduce", 100.0 * i, length, 20, **meta) for i, length in enumerate((10, 10, 40))]
    (dp,) = times_of(tmp_path, sizes).traffic
    assert dp.waiting_s == pytest.approx(30e-6)


def test_steps_annotated_on_the_host_only(tmp_path):
    steps = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 100.0 * n, "dur": 90.0}
             for n in range(5)]  # fmt: skip
    t = times_of(tmp_path, [*steps, *(kernel("gemm", 100.0 * n + 10, 50.0) for n in range(5))])
    assert len(t.step_times_s) == 4
    assert t.step_times_s[:3] == pytest.approx((100e-6,) * 3)
    assert any("host only" in warning for warning in t.warnings)


def test_one_trace_read_in_pieces_of_any_size(monkeypatch):
    whole = trace_times(read_trace(SAMPLE), SAMPLE, {})
    for size in (1, 7, 1000):
        monkeypatch.setattr(trace, "CHUNK", size)
        if size == 1:
            monkeypatch.setattr(trace.Text, "read", lambda self, wanted: _few(self, 50))
        assert trace_times(read_trace(SAMPLE), SAMPLE, {}) == whole
        monkeypatch.undo()


def _few(text: Any, size: int) -> str:
    return str(text._decoder.decode(text._file.read1(size)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_cut_anywhere_gives_what_was_read_or_one_message(tmp_path, packed):
    whole = gzip.decompress(Path(SAMPLE).read_bytes())
    data = gzip.compress(whole) if packed else whole
    path = tmp_path / "t.json"
    read = 0
    for end in range(3, len(data) - 40, len(data) // 12):
        path.write_bytes(data[:end])
        try:
            t = trace_times(read_trace(str(path)), str(path), {})
        except InputFileError:
            continue
        read += 1
        assert any("cut off" in warning for warning in t.warnings)
        assert t.step_s > 0
    assert read >= 8


BAD = {
    "no json": ("{ not json", "no readable trace"), "other": ('{"a": 1}', "no trace events"),
    "none": ('{"traceEvents": []}', "no trace events"), "deep": ('{"traceEvents": [' + "[" * 10**5, "no readable trace"),
    "digits": ('{"traceEvents": [' + "9" * 10**4 + "]}", "no readable trace"),
    "host only": ('{"traceEvents": [{"cat": "cpu_op", "ph": "X", "ts": 1, "dur": 2}]}', "no kernel of a device"),
    "zero": ('[{"cat": "kernel", "name": "gemm", "ts": 1, "dur": 0}]', "duration of zero"),
    "nan": ('[{"cat": "kernel", "name": "gemm", "ts": NaN, "dur": 1}]', "no kernel of a device"),
    "endless": ('[{"cat": "kernel", "name": "gemm", "ts": 1, "dur": 1e400}]', "no kernel of a device"),
    "words": ('[{"cat": "kernel", "name": 5, "ts": "x", "dur": null}, 3, null, "a"]', "no kernel of a device"),
}  # fmt: skip


@pytest.mark.each("name", BAD)
def test_bad_traces_give_one_message(tmp_path, name):
    text, message = BAD[name]
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputFileError, match=message):
        trace_times(read_trace(str(path)), str(path), {})


def test_odd_fields_of_good_kernels_do_no_harm(tmp_path):
    odd = kernel("gemm", 0, 10) | {"args": {"stream": 2**80, "device": None, "correlation": "x", "Group size": []}}
    assert times_of(tmp_path, [odd, odd | {"args": 5}]).step_s == pytest.approx(10e-6)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), min_size=1, max_size=20))
def test_union_and_cover_agree_with_counting_cells(pairs):
    pairs.sort()
    starts = np.array([float(a) for a, _ in pairs])
    ends = starts + np.array([float(b) for _, b in pairs])
    cells = {c for a, b in pairs for c in range(a, a + b)}
    u = union(starts, ends)
    assert covered(*u, np.array([[0.0, 100.0]])) == len(cells)
    windows = np.array([[5.0, 12.0], [20.0, 33.0]])
    inside = [c for c in cells if 5 <= c < 12 or 20 <= c < 33]
    assert covered(*u, windows) == len(inside)


@pytest.mark.each(
    ("name", "group"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "comm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "matmul"),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x32", "matmul"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_128x64x128_4x1x1_kernel0_0", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>", "memory_bound"),
        ("triton_poi_fused_mul_silu_1", "memory_bound"),
        ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 11, false>", "memory_bound"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>", "memory_bound"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(name, group):
    assert group_of(name) == group


def test_axes_of_process_groups():
    degrees = {"tp": 2, "dp": 32, "pp": 1}
    assert axis_of("DATA_PARALLEL_GROUP_WITH_CP", 32, "all_gather", {}) == "dp"
    assert axis_of("mesh_tp", None, "all_gather", {}) == "tp"
    assert axis_of("PIPELINE_MODEL_PARALLEL_GROUP", 4, "send_recv", {}) == "pp"
    assert axis_of("EXPERT_MODEL_PARALLEL_GROUP", 4, "all_to_all", {}) == "ep"
    assert axis_of("default_pg", 32, "all_reduce", degrees) == "dp"
    assert axis_of("", 2, "all_reduce", degrees) == "tp"
    assert axis_of("", 64, "all_reduce", degrees) == "unassigned"
    assert axis_of("", 64, "all_reduce", {"dp": 64}) == "dp"
    assert axis_of("", None, "send_recv", {}) == "pp"
    assert axis_of("", None, "send_recv", {"dp": 8, "ep": 8, "pp": 1}) == "ep"
    assert collective_of("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") == "send_recv"
