"""Writes a calibration: a cluster file that every command reads, and its file of curves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from steptime.estimate.measured import CONVOLVED
from steptime.hardware.library import device_named
from steptime.hardware.profiles import profile_toml, read_profile
from steptime.hardware.records import CPU, CUDA_MAKER, Profile
from steptime.measure import toml_file
from steptime.measure.machine.profile import Fitted, LevelFit
from steptime.measure.machine.runner import Measured
from steptime.measure.machine.work import Task, padding_of
from steptime.measure.toml_file import quantity_of, text_of
from steptime.store.files import write_whole

#: First line of every file that is written here; a file without it is not overwritten.
MARK: Final = "# Written by `steptime calibrate machine`; a later run overwrites it."


def curves_path(path: str | Path) -> Path:
    """Path of the curves of a cluster file.

    >>> str(curves_path("here/my.toml"))
    'here/my.curves.toml'
    """
    return Path(path).with_suffix(".curves.toml")


def journal_path(path: str | Path) -> Path:
    """Path of the measurements behind a cluster file."""
    return Path(path).with_suffix(".journal.jsonl")


def refuse_foreign(path: str | Path) -> None:
    """Refuses to overwrite a file that was not written here.

    Raises:
        InputFileError: the file exists and does not begin with the mark.
    """
    toml_file.refuse_foreign(path, MARK)


def write(path: str | Path, fitted: Fitted) -> None:
    """Writes both files, each whole or not at all.

    Raises:
        InputFileError: one cannot be written, or was not written here.
    """
    curves = curves_path(path)
    for target in (Path(path), curves):
        refuse_foreign(target)
    write_whole(curves, curves_text(fitted))
    write_whole(Path(path), cluster_text(fitted, curves.name))


def device_name(fitted: Fitted) -> str:
    """Name of the device: that of the processor in the letters of the catalogue, ``a-z 0-9 -``."""
    return re.sub(r"[^a-z0-9]+", "-", fitted.host.processor.lower()).strip("-")[:60] or "machine"


def cluster_text(fitted: Fitted, curves: str = "") -> str:
    """The cluster file; ``curves``: name of its file of curves."""
    host, device = fitted.host, fitted.device
    chip = host.processor if host.device == "cuda" else f"{host.threads} core(s) of {host.processor}"
    noise = "noise unknown (one round)" if fitted.noise != fitted.noise else f"noise {fitted.noise * 100:.1f} %"
    made = f"measured on {host.host} on {fitted.date} with torch {host.torch}, {len(fitted.operators)} points, {noise}"
    architecture = CPU if host.device == "cpu" else _architecture(host.processor)
    shares = [name for name in _SHARES if not fitted.memory_note or name != "memory_efficiency"]
    rows = [
        MARK,
        f"title = {text_of(host.title)}",
        f"source = {text_of(made)}",
        'kind = "measured"',
        "",
        "[device]",
        f"name = {text_of(device_name(fitted))}",
        f"title = {text_of(chip)}",
        *([f"vendor = {text_of(CUDA_MAKER)}"] if host.device == "cuda" and "rocm" not in host.torch else []),
        *([] if architecture is None else [f"architecture = {text_of(architecture)}"]),
        f"memory = {quantity_of(device.memory_bytes, 'B')}",
        f"memory_bandwidth = {quantity_of(device.memory_Bps, 'B/s')}",
        *(f"{name} = {_number(getattr(device, name))}" for name in _SHARES),
        *([f"curves = {text_of(curves)}"] if curves else []),
        f"kernel_latency = {quantity_of(device.kernel_latency_s, 's')}",
        *([] if device.issue_s is None else [f"issue = {quantity_of(device.issue_s, 's')}"]),
        f"source = {text_of(made)}",
        'kind = "measured"',
        "",
        *_rates("matrix", device.matrix_flops_per_s),
        *_rates("vector", device.vector_flops_per_s),
        "[[device.sources]]",
        f"fields = {json.dumps([*shares, 'kernel_latency', 'matrix', 'vector'])}",
        f"source = {text_of('linear regressions of time on work; ' + made)}",
        'kind = "fitted"',
        *(_memory_source(fitted.memory_note) if fitted.memory_note else []),
    ]
    for level in fitted.levels:
        rows += ["", *_level(level, made)]
    return "\n".join(rows) + "\n"


def _architecture(processor: str) -> str | None:
    """Architecture of a GPU of the catalogue, or None: workspaces of libraries, and so memory, depend on it."""
    known = device_named(processor)
    return None if known is None else known.architecture


_SHARES: Final = ("matrix_efficiency", "vector_efficiency", "memory_efficiency")


def _memory_source(note: str) -> list[str]:
    return [
        "",
        "[[device.sources]]",
        'fields = ["memory_bandwidth", "memory_efficiency"]',
        f"source = {text_of(note)}",
        'kind = "assumed"',
    ]


def _rates(table: str, rates: Mapping[str, float]) -> list[str]:
    rows = [f"{dtype} = {quantity_of(value, 'FLOP/s')}" for dtype, value in rates.items()]
    return [f"[device.{table}]", *rows, ""]


def _level(level: LevelFit, made: str) -> list[str]:
    if level.points:
        source = f"ring formulas fitted to {level.points} collectives (torch.distributed); {made}"
    else:
        source = "no collective was measured (--processes): a copy through memory, once in and once out"
    return [
        f"[levels.{level.name}]",
        *([] if level.devices is None else [f"devices = {level.devices}"]),
        f"bandwidth = {quantity_of(level.link_Bps, 'B/s')}",
        f"efficiency = {_number(level.efficiency)}",
        f"latency = {quantity_of(level.latency_s, 's')}",
        f"source = {text_of(source)}",
        f'kind = "{"fitted" if level.points else "assumed"}"',
    ]


def _number(value: float) -> str:
    return f"{value:.6f}"


def curves_text(fitted: Fitted) -> str:
    """The curves, in the format of :mod:`steptime.hardware.profiles`."""
    return f"{MARK}\n{profile_toml(Profile(device=device_name(fitted), curves=fitted.curves))}"


def read_curves(path: str | Path) -> Profile:
    """The curves that :func:`write` wrote with a cluster file.

    Raises:
        InputFileError: the file is missing or is not TOML.
        FieldError: it is not a file of curves.
    """
    return read_profile(curves_path(path))


def kernel_rows(operators: Sequence[Measured], gpu: str, method: str) -> Iterable[dict[str, Any]]:
    """The measurements with the columns of the tables of kernels that ``steptime score --kernels`` reads."""
    for one in operators:
        columns = _columns(one.task)
        if columns is not None:
            yield {
                "source": "steptime calibrate machine",
                "gpu": gpu,
                **columns,
                "dtype": one.task.dtype,
                "latency_us": one.seconds * 1e6,
                "method": method,
            }


_MAP_NAMES: Final = {"add": "elementwise", "gelu": "elementwise", "layer_norm": "layernorm", "softmax": "softmax"}


def _columns(task: Task) -> dict[str, Any] | None:
    """Operator and shape as those tables name them; None for an operator that they do not have."""
    shape = task.shape
    if task.kind == "matmul":
        return {"op": "gemm", **shape, "batch": 1, "notes": f"layout={task.layout}"}
    if task.kind.startswith("attention"):
        seq, heads, head_dim = shape["seq"], shape["heads"], shape["head_dim"]
        name = "attention_fwd" if task.kind == "attention_forward" else "attention_bwd"
        return {
            "op": name,
            "b": shape["batch"],
            "notes": "causal=1",
            "h_q": heads,
            "h_kv": heads,
            "s_q": seq,
            "s_kv": seq,
            "d_qk": head_dim,
            "d_v": head_dim,
        }
    if task.kind in CONVOLVED:
        return None if shape["groups"] > 1 else {"op": task.kind, **_convolution(shape)}
    if task.kind in _MAP_NAMES:
        return {
            "op": _MAP_NAMES[task.kind],
            "rows": shape["rows"],
            "cols": shape["width"],
            "notes": f"opname={task.kind}",
        }
    return None


def _convolution(shape: Mapping[str, int]) -> dict[str, int]:
    side, kernel = shape["side"], shape["kernel"]
    return {
        "batch": shape["batch"],
        "conv_cin": shape["channels_in"],
        "conv_cout": shape["channels_out"],
        "conv_h": side,
        "conv_w": side,
        "conv_kh": kernel,
        "conv_kw": kernel,
        "conv_stride": shape["stride"],
        "conv_pad": padding_of(kernel),
    }
