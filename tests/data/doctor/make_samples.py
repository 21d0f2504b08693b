"""Writes the synthetic logs and traces of this folder: python tests/data/doctor/make_samples.py."""

# ruff: noqa: E501 the lines of logs are long

from __future__ import annotations

import gzip
import json
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START = datetime(2026, 3, 1, 12, 0, 0)
ARGUMENTS = {
    "bf16": True, "context_parallel_size": 1, "data_parallel_size": 32, "eval_interval": 1000, "ffn_hidden_size": 11008,
    "fp16": False, "fp8": None, "global_batch_size": 256, "group_query_attention": False, "hidden_size": 4096,
    "micro_batch_size": 1, "num_attention_heads": 32, "num_layers": 32, "num_query_groups": 1, "optimizer": "adam",
    "overlap_grad_reduce": False, "pipeline_model_parallel_size": 1, "recompute_granularity": None,
    "save_interval": 50, "seq_length": 4096, "tensor_model_parallel_size": 2, "use_distributed_optimizer": True,
    "virtual_pipeline_model_parallel_size": None, "world_size": 64,
}  # fmt: skip


def megatron(steps: int = 200, base_ms: float = 1500.0) -> list[str]:
    """Exposed gradient reduction, a checkpoint every 50 steps between the steps, a slow step every 40."""
    rng = random.Random(1)
    out = ["using world size: 64, data-parallel size: 32, context-parallel size: 1, tensor-model-parallel size: 2, "
           "pipeline-model-parallel size: 1", "------------------------ arguments ------------------------"]  # fmt: skip
    out += [f"  {name} {'.' * max(46 - len(name), 3)} {value}" for name, value in ARGUMENTS.items()]
    out += ["-------------------- end of arguments ---------------------"]
    now = START
    for step in range(1, steps + 1):
        ms = rng.gauss(base_ms, 4.0) + (9000.0 if step == 1 else 0.0) + (700.0 if step % 40 == 0 else 0.0)
        now += timedelta(milliseconds=ms)
        out.append(
            f" [{now:%Y-%m-%d %H:%M:%S}] iteration {step:8d}/ {500000:8d} | consumed samples: {step * 256:12d} | elapsed "
            f"time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {702.3e3 / ms:.1f} | learning rate: "
            f"3.000000E-05 | global batch size: {256:5d} | lm loss: 6.543210E+00 | loss scale: 1.0 | grad norm: 1.234 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        if step == 2:
            out.append("[Rank 0] (after 2 iterations) memory (MB) | allocated: 13500.5 | max allocated: 24100.25 | "
                       "reserved: 25500.0 | max reserved: 25500.0")  # fmt: skip
        if step % 20 == 0:
            out += ["(min, max) time across ranks (ms):", timer("forward-backward", 1260.0, 1275.0),
                    timer("all-grads-sync", 120.0, 170.0), timer("params-all-gather", 0.5, 0.9),
                    timer("optimizer", 11.0, 14.0), timer("batch-generator", 2.0, 30.0)]  # fmt: skip
        if step % 50 == 0:
            now += timedelta(seconds=12)
            out += [f"saving checkpoint at iteration {step:7d} to /ckpt in torch_dist format",
                    f"  successfully saved checkpoint from iteration {step:7d} to /ckpt",
                    "(min, max) time across ranks (ms):", timer("save-checkpoint", 11890.0, 11990.0)]  # fmt: skip
    return out


def timer(name: str, least: float, most: float) -> str:
    """A line of the table of timers."""
    return f"    {(name + ' ').ljust(48, '.')}: ({least:.2f}, {most:.2f})"


def deepspeed(steps: int = 60, step_s: float = 4.0) -> list[str]:
    """ZeRO 3 with allocator retries, skipped steps, and a breakdown."""
    rng = random.Random(2)
    now = START
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
              "world_size": 8, "zero_optimization_stage": 3, "bfloat16_enabled": True, "fp16_enabled": False,
              "optimizer_name": "adamw", "steps_per_print": 1}  # fmt: skip
    out = [f"[{now:%Y-%m-%d %H:%M:%S},001] [INFO] [config.py:1003:print] DeepSpeedEngine configuration:"]
    out += [f"[{now:%Y-%m-%d %H:%M:%S},001] [INFO] [config.py:1007:print]   {k} {'.' * max(29 - len(k), 3)} {v}"
            for k, v in config.items()]  # fmt: skip
    out += [
        "  json = {",
        '    "zero_optimization": {',
        '        "stage": 3,',
        '        "overlap_comm": false',
        "    }",
        "}",
    ]
    for step in range(1, steps + 1):
        taken = rng.gauss(step_s, 0.02) + (6.0 if step == 1 else 0.0)
        now += timedelta(seconds=taken + 0.4)
        stamp = f"[{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}]"
        out += [
            f"{stamp} [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, lr=[2e-05], mom=[(0.9, 0.999)]",
            f"{stamp} [INFO] [timer.py:260:stop] epoch=0/micro_step={step * 4}/global_step={step}, "
            f"RunningAvgSamplesPerSec={64 / step_s:.6f}, CurrSamplesPerSec={64 / taken:.6f}, MemAllocated=20.1GB, "
            "MaxMemAllocated=71.9GB",
            f"{stamp} [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd_microstep: 230.11 | bwd_microstep: 690.20 | "
            "bwd_inner_microstep: 560.12 | bwd_allreduce_microstep: 130.05 | step_microstep: 120.66",
            f"{stamp} [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd: 920.44 | bwd: 2760.80 | bwd_inner: 2240.48 | "
            "bwd_allreduce: 520.20 | step: 120.70",
        ]  # fmt: skip
        if step % 10 == 0:
            out.append(f"{stamp} [WARNING] [stage3.py:2069:step] 1 pytorch allocator cache flushes since last step. this "
                       "happens when there is high memory pressure and is detrimental to performance.")  # fmt: skip
    return out


def torchtitan(steps: int = 60, step_s: float = 1.45) -> list[str]:
    """Two ranks in colours, the second slower to log; garbage collection every 10 steps."""
    rng = random.Random(3)
    now = START

    def line(rank: int, text: str) -> str:
        return f"[rank{rank}]:[titan] {now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} - root - INFO - {text}"

    out = [
        line(0, "Starting job: Llama 3 8B training"), line(0, "Building 1-D device mesh with ['dp_shard'], [8]"),
        line(0, "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory"),
        line(0, "Model llama3 8B size: 8,030,261,248 total parameters"), line(0, "Applied FSDP to the model"),
        line(0, "Trainer is initialized with local batch size 1, global batch size 8, gradient accumulation steps 1, "
                "sequence length 8192, total steps 1000 (warmup 200)"),
        line(0, "Training starts at step 1"),
    ]  # fmt: skip
    for step in range(1, steps + 1):
        taken = rng.gauss(step_s, 0.004) + (8.0 if step == 1 else 0.0) + (0.6 if step % 10 == 0 else 0.0)
        now += timedelta(seconds=taken)
        if step % 10 == 0:
            out.append(line(0, "[GC] Performing periodic GC collection took 0.58 s"))
        tps = round(8192 / taken)
        for rank in (0, 1):
            out.append(line(rank, f"\x1b[31mstep: {step:2}  \x1b[32mloss:  7.8123  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
                            f"\x1b[36mmemory: 77.01GiB(97.36%)  \x1b[34mtps: {tps:,}  \x1b[36mtflops: {tps * 0.0579:,.2f}  "
                            f"\x1b[35mmfu: {tps * 0.00585:.2f}%\x1b[39m"))  # fmt: skip
    return out


SCALE = 30.0


def group(kind: str, desc: str, size: int) -> dict[str, Any]:
    """What Kineto records of a collective."""
    return {"Collective name": kind, "In msg nelems": 4194304, "Out msg nelems": 33554432, "Group size": size,
            "dtype": "BFloat16", "Process Group Name": "3", "Process Group Description": desc}  # fmt: skip


GATHER, GATHER_ARGS = "ncclDevKernel_AllGather_RING_LL", group("_allgather_base", "DATA_PARALLEL_GROUP_WITH_CP", 32)
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
SCATTER_ARGS = group("_reduce_scatter_base", "TENSOR_MODEL_PARALLEL_GROUP", 2)
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"


class Events:
    """Events of a trace."""

    def __init__(self) -> None:
        self.out: list[dict[str, Any]] = []
        self.ids = iter(range(1, 10**9))

    def kernel(self, name: str, start: float, length: float, launch: float, stream: int = 7, **args: Any) -> None:
        """A kernel and its launch, microseconds."""
        n = next(self.ids)
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.out.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 77, "tid": 77,
                         "ts": launch, "dur": 3.0, "args": {"External id": n, "correlation": n}})  # fmt: skip
        self.out.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length * SCALE,
                         "args": {"External id": n, "correlation": n, "device": 0, "stream": stream, **args}})  # fmt: skip

    def step(self, number: int, begin: float, layers: int = 32) -> float:
        """One step; returns its end."""
        t, early = begin + 200.0 * SCALE, begin - 500.0
        for layer in range(layers):
            late = t - 4.0 if layer == 0 else early
            self.kernel("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", t, 100.0, late)
            self.kernel(GATHER, t + 20 * SCALE, 60.0, early, 20, **GATHER_ARGS)
            self.kernel(FLASH, t + 100 * SCALE, 40.0, early)
            self.kernel("triton_red_fused_native_layer_norm_3", t + 140 * SCALE, 10.0, early)
            self.kernel(SCATTER, t + 150 * SCALE, 30.0, early, 20, **SCATTER_ARGS)
            t += 180.0 * SCALE
        self.kernel(ADAM, t, 100.0, early)
        self.kernel("Memcpy DtoH (Device -> Pageable)", t + 100 * SCALE, 20.0, early)
        t += 120.0 * SCALE
        for cat, low, high in (("user_annotation", begin - 400, t - 400), ("gpu_user_annotation", begin, t)):
            self.out.append({"ph": "X", "cat": cat, "name": f"ProfilerStep#{number}", "pid": 0, "tid": 7, "ts": low,
                             "dur": high - low, "args": {"External id": next(self.ids)}})  # fmt: skip
        return t


def trace(steps: int = 4) -> dict[str, Any]:
    """Per layer: a product, attention, a norm, one exposed and one hidden collective; the host is late at each step."""
    events, now = Events(), 5_948_713_450_000.0
    for step in range(steps):
        now = events.step(step + 10, now)
    events.out.append({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}})
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84942979072}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64, "pg_count": 3},
        "traceEvents": events.out, "traceName": "trace.json", "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1767225600000000000,
    }  # fmt: skip


def main() -> None:
    """Write every sample."""
    for name, lines in (("megatron", megatron()), ("deepspeed", deepspeed()), ("torchtitan", torchtitan())):
        (HERE / f"{name}.log").write_text("\n".join(lines) + "\n")
    (HERE / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace()).encode(), mtime=0))


if __name__ == "__main__":
    main()
