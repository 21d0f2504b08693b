"""Measures the training steps of `gpu_cases.py` on the GPU of this machine: times, kernels, memory, as JSON lines.

A step is timed with the device waited for before and after it, and a row of steps without waiting. What its kernels
take comes from a trace of one step. Memory is that of PyTorch's allocator.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_cases import Case, built

WARM = 3
LEAST, MOST = 10, 30
"""Steps that are timed one by one."""
BUDGET_S = 1.5
"""For these."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are work of the device."""
LISTED = 60
"""Operators of a case that are written, the longest first."""
PHASES = ("forward", "backward", "optimizer")


def software() -> dict[str, str]:
    """Versions of what runs."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("torch", "transformers", "torchvision", "timm", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


class Gpu:
    """What a measurement asks of the device."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.cuda = torch.cuda

    def facts(self) -> dict[str, Any]:
        """Name and memory."""
        properties = self.cuda.get_device_properties(0)
        return {"gpu": properties.name, "memory_bytes": properties.total_memory, "software": software()}

    def begin(self) -> None:
        """Give back what earlier cases held, the workspaces of libraries too."""
        gc.collect()
        self.cuda.synchronize()
        clear = getattr(self.torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        self.cuda.empty_cache()
        self.reset()

    def reset(self) -> None:
        """Peaks from here on."""
        self.cuda.reset_peak_memory_stats()

    def clock(self) -> dict[str, float]:
        """Clock (MHz), power (W) and temperature (degrees Celsius), where the driver tells them."""
        try:
            power_W = self.cuda.power_draw() / 1e3
            return {"MHz": self.cuda.clock_rate(), "W": power_W, "C": self.cuda.temperature()}
        except Exception:  # an optional package of the driver
            return {}


def stepper(case: Case, module: Any, inputs: Any, loss: Callable[[Any], Any]) -> Callable[[], None]:
    """One step as a training loop has it, its phases marked."""
    import torch

    mark = torch.profiler.record_function
    fused = {"adamw": {"foreach": True}, "adamw-fused": {"fused": True}}[case.optimizer]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, **fused)
    called = torch.compile(module) if case.compiled else module
    mixed = case.autocast is not None

    def step() -> None:
        with mark("phase forward"), torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed):
            output = called(**inputs) if isinstance(inputs, dict) else called(*inputs)
            found = loss(output)
        with mark("phase backward"):
            found.backward()
        with mark("phase optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def timed(gpu: Gpu, step: Callable[[], None]) -> dict[str, Any]:
    """Seconds of steps one by one, and of a step in a row of them without waiting."""
    wait = gpu.cuda.synchronize
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < LEAST or (len(samples) < MOST and time.perf_counter() - start < BUDGET_S):
        wait()
        begin = time.perf_counter()
        step()
        wait()
        samples.append(time.perf_counter() - begin)
    count = max(4, len(samples) // 2)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    issued_s = time.perf_counter() - begin
    clock = gpu.clock()
    wait()
    row_s = time.perf_counter() - begin
    return {"step_s": [round(s, 7) for s in samples], "row_s": row_s / count, "issued_s": issued_s / count, **clock}


def traced(gpu: Gpu, step: Callable[[], None]) -> dict[str, Any]:
    """Kernels of one step: their sum, when any runs, by phase and by the operator that launched them."""
    profiler = gpu.torch.profiler
    kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=kinds, record_shapes=True) as found:
        step()
        gpu.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def read_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Device time of a trace of PyTorch's profiler."""
    kernels = [e for e in events if e.get("cat") in KERNELS]
    operators = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "args" in e}
    launches = {
        e["args"]["correlation"]: e for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }  # fmt: skip
    marks = [
        (e["name"].removeprefix("phase "), e["ts"], e["ts"] + e["dur"]) for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("phase ")
    ]  # fmt: skip
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    names: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    phases: dict[str, list[float]] = {name: [0, 0.0] for name in (*PHASES, "other")}
    for kernel in kernels:
        about = kernel.get("args", {})
        operator = operators.get(about.get("External id"), {})
        launch = launches.get(about.get("correlation"), kernel)
        phase = next((name for name, begin, end in marks if begin <= launch["ts"] <= end), "other")
        phase = phase if phase in phases else "other"
        shown = (operator.get("name", kernel["cat"]), phase, _dims(operator))
        for key, table in ((json.dumps(shown), sums), (kernel["name"][:90], names), (phase, phases)):
            table[key][0] += 1
            table[key][1] += kernel["dur"] * 1e-6
    return {
        "kernels": len(kernels), "kernel_sum_s": sum(k["dur"] for k in kernels) * 1e-6, "busy_s": _covered_s(kernels),
        "phases": phases,
        "operators": [[*json.loads(key), *value] for key, value in _longest(sums)],
        "kernel_names": [[key, *value] for key, value in _longest(names)],
    }  # fmt: skip


def _dims(operator: Mapping[str, Any]) -> str:
    """Shapes and types of an operator's tensors as text."""
    about = operator.get("args", {})
    dims, types = about.get("Input Dims", []), about.get("Input type", [])
    shown = [f"{t}{d}" for d, t in zip(dims, types, strict=False) if d and t not in ("", "Scalar", "ScalarList")]
    return " ".join(shown).replace("c10::", "")[:160]


def _longest(sums: Mapping[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(sums.items(), key=lambda pair: -pair[1][1])[:LISTED]


def _covered_s(kernels: list[dict[str, Any]]) -> float:
    """Time in which at least one kernel runs."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: float(k["ts"])):
        begin, stop = float(kernel["ts"]), float(kernel["ts"] + kernel["dur"])
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total * 1e-6


def measured(case: Case, gpu: Gpu) -> dict[str, Any]:
    """All that is known of a case after it ran."""
    begin = time.perf_counter()
    gpu.begin()
    module, inputs, loss = built(case, "cuda")
    parameters = sum(p.numel() for p in module.parameters())
    gc.collect()
    gpu.cuda.empty_cache()
    gpu.reset()
    built_s = time.perf_counter() - begin
    step = stepper(case, module, inputs, loss)
    memory: dict[str, Any] = {"start_allocated": gpu.cuda.memory_allocated()}
    step()
    gpu.cuda.synchronize()
    memory["rest_allocated"] = gpu.cuda.memory_allocated()
    first = gpu.cuda.max_memory_reserved()
    gpu.reset()
    for _ in range(WARM):
        step()
    gpu.cuda.synchronize()
    memory["peak_allocated"] = gpu.cuda.max_memory_allocated()
    memory["peak_reserved"] = max(first, gpu.cuda.max_memory_reserved())
    requested = gpu.cuda.memory_stats().get("requested_bytes.all.peak")
    memory["peak_requested"] = requested
    free, total = gpu.cuda.mem_get_info()
    memory["outside"] = total - free - gpu.cuda.memory_reserved()
    times = timed(gpu, step)
    trace = traced(gpu, step)
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return {
        "case": case.to_json(), "parameters": parameters, "attention": implementation, "memory": memory, **times,
        **trace, "built_s": built_s, "whole_s": time.perf_counter() - begin,
    }  # fmt: skip


def done(path: Path) -> set[str]:
    """Cases in a file of measurements, finished or begun."""
    if not path.exists():
        return set()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {Case.of(line["case"]).title for line in lines if "case" in line}


def missing(cases: tuple[Case, ...], path: Path) -> Iterator[Case]:
    """Cases that a file does not have."""
    known = done(path)
    return (case for case in cases if case.title not in known)


def run(cases: tuple[Case, ...], path: Path, until: float) -> None:
    """Measure what a file does not have yet, until a time of the clock; every result is written at once.

    A case that ends the process stays in the file as begun, so that the next run goes on behind it.
    """
    gpu = Gpu()
    with path.open("a", encoding="utf-8") as file:

        def write(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        if not done(path):
            write({"facts": gpu.facts()})
        for case in missing(cases, path):
            if time.time() > until:
                return
            write({"case": case.to_json(), "begun": True})
            try:
                line = measured(case, gpu)
            except Exception as error:  # one case must not end the others
                line = {"case": case.to_json(), "error": f"{type(error).__name__}: {error}"[:600]}
            write(line)
            shown = line.get("error") or f"{1e3 * sorted(line['step_s'])[len(line['step_s']) // 2]:.1f} ms"
            print(f"{case.title}: {shown}", flush=True)
            gc.collect()
            gpu.torch._dynamo.reset()
