"""Published times of whole models on one GPU: captured graphs of the timed modules, and their rows.

Language models come from Transformers with eager attention, image models from torchvision on 12 images. No published
time includes an optimiser. The copies of images from the host are a piece of their own.

Source: `models_single_gpu` of the folder of measurements; the scripts that timed the models are those of NeuSight and
of pytorch-gpu-benchmark.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from steptime.captured.ops.work import KernelCall, Work
from steptime.errors import UserError
from steptime.estimate.kernels import profile_of
from steptime.hardware.profiles import FOLDER as PROFILES
from steptime.hardware.profiles import load_profile, profile_names, save_curves
from steptime.hardware.records import Curve, Device
from steptime.store.journal import Journal
from steptime_lab.calibrate.transfer import transferred_curve
from steptime_lab.learned.sketch import Piece, Sketch, sketch, sketch_from
from steptime_lab.scoring.kernels import device_of

PATH_VARIABLE: Final = "STEPTIME_PATH"
COPY: Final = "host_copy"
"""Operator of the copy of inputs from the host."""
PIXELS: Final = 224
CLASSES: Final = 1000
GPT: Final = {"n_positions": 2048}
LANGUAGE: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert_large": (
        "Bert",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
    ),
    "gpt2_large": ("GPT2", {"n_embd": 1280, "n_head": 20, "n_layer": 36}),
    "gpt3_xl": ("GPT2", {"n_embd": 3072, "n_head": 24, "n_layer": 24, **GPT}),
    "gpt3_27": ("GPT2", {"n_embd": 2560, "n_head": 32, "n_layer": 32, **GPT}),
    "opt_13": ("OPT", {"ffn_dim": 8192, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24}),
}
"""Model -> family of Transformers and its dimensions, from the configurations published with the times."""
HEADS: Final[Mapping[tuple[str, bool], str]] = {
    ("Bert", False): "BertForSequenceClassification",
    ("Bert", True): "BertForPreTraining",
    ("GPT2", False): "GPT2LMHeadModel",
    ("GPT2", True): "GPT2LMHeadModel",
    ("OPT", False): "OPTForCausalLM",
    ("OPT", True): "OPTForCausalLM",
}
"""Family and whether it was trained -> class."""
DTYPES: Final = {"fp32": "fp32", "fp16": "fp16", "fp32(TF32 convs on by default)": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published time."""

    source: str
    device: Device
    model: str
    trained: bool
    batch: int
    seq: int
    dtype: str
    seconds: float

    @property
    def graph(self) -> str:
        """Name of the graph: model, mode, sizes and dtype, without the device."""
        return f"{self.model}:{'train' if self.trained else 'inference'}:{self.batch}:{self.seq}:{self.dtype}"


def read_rows(path: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows of a table that can be predicted, with one median for each graph and device, and why others are left out.

    Raises:
        UserError: the file is not such a table.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    left: dict[str, int] = {}
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
        lines = list(csv.DictReader(io.StringIO(text)))
        for line in lines:
            device, why = device_of(re.sub(r"\(.*\)", "", line["gpu"])), None
            own = {
                "model": line["model"],
                "trained": line["mode"] == "train",
                "batch": _whole(line["batch"]),
                "seq": _whole(line["seq"]),
                "dtype": DTYPES.get(line["dtype"], ""),
            }
            if not own["dtype"]:
                why = "element type without a rate"
            elif "compile" in line["notes"]:
                why = "compiled graphs"
            elif line["source"].startswith("gavel") or line["model"].startswith("switch"):
                why = "modules that are not public, or not as they were timed"
            elif device is None:
                why = f"no device {line['gpu']}"
            if why is not None or device is None:
                left[str(why)] = left.get(str(why), 0) + 1
                continue
            key = (line["source"], device.name, str(own))
            found.setdefault(key, []).append(float(line["latency_ms"]) / 1e3)
            kept[key] = {"source": line["source"], "device": device, **own}
    except (OSError, KeyError, ValueError, EOFError) as error:
        raise UserError(
            f"{path} is no table of models on one GPU: {error}", hint="it is models_single_gpu.csv.gz"
        ) from None
    rows = [Row(seconds=sorted(times)[len(times) // 2], **kept[key]) for key, times in found.items()]
    return rows, left


def _whole(text: str) -> int:
    return int(float(text)) if text else 0


def _language(model: str, batch: int, seq: int, trained: bool) -> tuple[Any, Any]:
    import torch
    import transformers

    family, sizes = LANGUAGE[model]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager", use_cache=False)
    with torch.device("meta"):  # a capture reads no weights
        module = getattr(transformers, HEADS[family, trained])(config)
    return module, (torch.ones(batch, seq, dtype=torch.int64),)


def _image(model: str, batch: int) -> tuple[Any, Any]:
    import torch

    module = getattr(importlib.import_module("torchvision.models"), model)
    return module(weights=None), (torch.randn(batch, 3, PIXELS, PIXELS),)


def module_of(row: Row) -> tuple[Any, Any]:
    """The module of a row and its inputs.

    Raises:
        UserError: the package that has it is not installed.
    """

    try:
        language = row.model in LANGUAGE
        made = _language(row.model, row.batch, row.seq, row.trained) if language else _image(row.model, row.batch)
    except ImportError as error:
        raise UserError(f"published models need {error.name}", hint="pip install transformers torchvision") from None
    module, inputs = made
    if row.dtype == "fp16":
        module, inputs = module.half(), tuple(x.half() if x.is_floating_point() else x for x in inputs)
    return module.train(row.trained), inputs


def sketch_of(row: Row) -> Sketch:
    """The sketch of a row's graph on a GPU."""
    from steptime.captured.record import capture

    module, inputs = module_of(row)
    program = capture(
        module,
        inputs,
        name=row.graph,
        training=row.trained,
        target="cuda",
        optimizer=None,
        loss="cross-entropy" if row.trained else None,
    )
    drawn = sketch(program)
    return drawn if row.model in LANGUAGE else with_copy(drawn, float(inputs[0].numel() * inputs[0].element_size()))


def with_copy(drawn: Sketch, copied_bytes: float) -> Sketch:
    """A sketch with an additional copy of its input from the host."""
    work = Work(
        family=COPY,
        moved_bytes=copied_bytes,
        launches=1.0,
        kernels=(KernelCall(operator=COPY, shape={"moved_bytes": copied_bytes}),),
    )
    piece = Piece(op=COPY, work=work, read_bytes=0.0, written_bytes=copied_bytes)
    return replace(
        drawn,
        pieces=(*drawn.pieces, piece),
        calls=(*drawn.calls, len(drawn.pieces)),
        phases=(*drawn.phases, 0),
        issuers=(*drawn.issuers, 0),
        held_bytes=(*drawn.held_bytes, 0),
    )


def sketches(rows: list[Row], path: Path, told: Callable[[str], None] = lambda name: None) -> dict[str, Sketch]:
    """Sketches of all graphs of rows, kept in a journal so that each is captured once."""
    import torch

    with Journal(path, {"of": "published graphs", "torch": str(torch.__version__)}, resume=True) as journal:
        new = {row.graph: row for row in rows if row.graph not in journal.keys}
        for name, row in new.items():
            told(name)
            journal.append({"key": name, "sketch": sketch_of(row).to_json()})
        return {record["key"]: sketch_from(record["sketch"]) for record in journal.records}


def unseen_curves(device: Device) -> list[Curve]:
    """Curves of a device as if it had not been measured: transferred from other devices, of its vendor where possible.

    Raises:
        UserError: no device has a curve.
    """
    profiles = {name: p for name in profile_names() if (p := load_profile(name)) is not None and name != device.name}
    records = {name: record for name in profiles if (record := device_of(name)) is not None}
    kin = [name for name in records if records[name].vendor == device.vendor] or list(records)
    found: dict[tuple[str, str, str], dict[str, Curve]] = {}
    for name in kin:
        for curve in profiles[name].curves:
            if curve.kind == "fitted" and (curve.dtype in device.matrix_flops_per_s or curve.dtype == "any"):
                found.setdefault((curve.family, curve.dtype, curve.timer), {})[name] = curve
    return [transferred_curve(device, curves, records) for curves in found.values()]


@contextlib.contextmanager
def unmeasured(devices: Sequence[Device]) -> Iterator[None]:
    """Replace the catalogue's profiles of some devices by curves as if these had not been measured."""
    before = os.environ.get(PATH_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        for device in devices:
            save_curves(device.name, unseen_curves(device), Path(folder) / PROFILES)
        os.environ[PATH_VARIABLE] = os.pathsep.join([folder, *([before] if before else [])])
        profile_of.cache_clear()
        try:
            yield
        finally:
            os.environ.pop(PATH_VARIABLE)
            if before is not None:
                os.environ[PATH_VARIABLE] = before
            profile_of.cache_clear()
