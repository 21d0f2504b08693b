"""Parsers of torchtitan and MaxText: configuration, steps, checkpoints, garbage collection."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from steptime.doctor import gather
from steptime.doctor.gather import Gathered
from steptime.doctor.records import StepLine
from steptime.measure.runs.canonical import recomputation
from steptime.measure.runs.meaning import recipe_called, recompute_words, selective, shards_of
from steptime.num import round_up
from steptime.plan.framework import piped_stage

_STEP: Final = re.compile(r"\bstep:\s*(\d{1,12})\s+loss:")
_TPS: Final = re.compile(r"\b(?:tps|wps):\s*" + gather.NUMBER)
_TFLOPS: Final = re.compile(r"\btflops:\s*" + gather.NUMBER)
_MEMORY: Final = re.compile(r"memory:\s*" + gather.NUMBER + r"GiB\(" + gather.NUMBER + r"%\)")
_BATCH: Final = re.compile(
    r"local batch size:? (\d{1,9}), global batch size:? (\d{1,9}), .*?sequence length:? (\d{1,9})"
)
_MESH: Final = re.compile(r"Building \d-D device mesh with \[([^\]]{1,200})\], \[([\d, ]{1,100})\]")
_MESH_WORDS: Final = re.compile(r"Building device mesh with parallelism: (.{1,300})")
_DEGREE: Final = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep|dp)=(\d{1,7})")
_RETRIES: Final = re.compile(r"(\d{1,9}) \w+ memory allocation retries")
_GC: Final = re.compile(r"\[GC\].*?(?:took|collection)\D{0,20}([\d.]+)\s*s")
_SAVED: Final = re.compile(r"(?:Finished saving|Saved) the checkpoint.*? in ([\d.]+) seconds", re.I)
#: ``Building llama3 8B with TransformerModelArgs(dim=4096, ...)``, or with JSON over many lines.
_MODEL: Final = re.compile(r"Building ([\w.-]{1,60}) +([\w.-]{1,60}?) ?with (?:[A-Za-z_]{0,60}\(|(\{))(.*)$")
_SIZED: Final = re.compile(r"Model ([\w.-]{1,60}) ([\w.-]{1,60}) size: [\d,]+ total parameters")
_FIELD: Final = re.compile(r"""["']?\b([a-z_]{1,40})["']?\s*[=:]\s*([\w.]+)""")
_OPTION: Final = re.compile(r"""["']selective_ac_option["']: ["'](\w{1,20})["']""")
_CHECKPOINTING: Final = re.compile(r"Appl\w+ (\w{1,30}) activation checkpointing")
#: ``Swapped to Float8Linear layers``, ``Swapped to MXLinear layers``.
_NARROW: Final = re.compile(r"Swapped to (?=MX|NV|Fl|FP)(MX|NV)?(Float8|FP8|FP4)?Linear", re.I)
_ASYNCHRONOUS: Final = re.compile(r"Async TP is enabled|Async Tensor Parallelism to")
_AXES: Final[Mapping[str, str]] = gather.NAMES["torchtitan"]["axes"]
#: Field of the model's arguments -> steptime's field.
_FIELDS: Final[Mapping[str, str]] = gather.NAMES["torchtitan"]["model"]


class Torchtitan:
    """Parser of torchtitan, with TOML or Python configurations."""

    name = "torchtitan"

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._fields: dict[str, str] = {}
        self._open = False
        self._option = ""
        self._mode = ""

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if match := _STEP.search(line):
            if "validate step" not in line:
                self._step(rank, line, int(match[1]))
            else:
                g.add_event("evaluation")
        elif match := _RETRIES.search(line):
            g.add_event("allocator_retry")
        elif "OOM errors thrown" in line:
            g.add_event("out_of_memory")
        elif match := _GC.search(line):
            g.add_event("garbage_collection", gather.number(match[1]))
        elif "the checkpoint" in line.lower():
            match = _SAVED.search(line)
            g.add_event("checkpoint", gather.number(match[1]) if match else None)
        else:
            self._header(line)

    def _header(self, line: str) -> None:
        """Read a line before the first step: mesh, batch, model, applied techniques."""
        g = self.gathered
        if self._open:
            self._model_fields(line)
        elif "device mesh with" in line:
            self._mesh(line)
        elif "Building " in line and (match := _MODEL.search(line)):
            g.model_name = f"{match[1]} {match[2]}"
            self._open = match[3] is not None
            self._model_fields(match[4])
        elif match := _SIZED.search(line):
            g.model_name = g.model_name or f"{match[1]} {match[2]}"
        elif match := _BATCH.search(line):
            g.plan["micro_batch"], g.settings["global_batch"] = int(match[1]), int(match[2])
            g.settings["seq"] = int(match[3])
        elif match := _OPTION.search(line):
            self._option = match[1]
        elif _ASYNCHRONOUS.search(line):
            g.add_flag("tp_comm_overlap", "True")
        elif "Applied" in line or "Applying" in line or "Swapped to" in line:
            self._applied(line)

    def _step(self, rank: int | None, line: str, step: int) -> None:
        g = self.gathered
        tps = _TPS.search(line)
        speed = gather.rate(gather.number(tps[1])) if tps else None
        g.add_step(rank, StepLine(number=step, tokens_per_s_per_gpu=speed, at_s=gather.clock_s(line)))
        if (match := _MEMORY.search(line)) and (used := gather.number(match[1])):
            g.add_memory("reserved", used * 2**30)
            share = gather.number(match[2])
            if g.capacity_bytes is None and share and 1.0 <= share <= 100.0:
                g.capacity_bytes = used * 2**30 * 100.0 / share
        if match := _TFLOPS.search(line):
            g.add_tflops(match[1])

    def _mesh(self, line: str) -> None:
        if match := _MESH.search(line):
            names = re.findall(r"\w+", match[1])
            sizes = [int(n) for n in re.findall(r"\d{1,7}", match[2])]
        elif match := _MESH_WORDS.search(line):
            pairs = [(name, int(n)) for name, n in _DEGREE.findall(match[1]) if name != "ep"]
            names, sizes = [name for name, _ in pairs], [n for _, n in pairs]
            if ep := re.search(r"\bep=(\d{1,7})", match[1]):
                self.gathered.plan["ep"] = int(ep[1])
        else:
            return
        degrees: dict[str, int] = {}
        named = dict(zip(names, sizes, strict=False))
        if named.get("dp_replicate", 1) > 1 and named.get("dp_shard", 1) > 1:
            self.gathered.plan["shard"] = shards_of(self.name, named["dp_shard"], named.get("cp", 1))
        for name, size in named.items():
            axis = _AXES.get(name, name)
            if axis in ("dp", "tp", "pp", "cp") and size >= 1:
                degrees[axis] = degrees.get(axis, 1) * size
        if degrees:
            self.gathered.plan.update(degrees)
            self.gathered.settings["gpus"] = math.prod(degrees.values())

    def _model_fields(self, text: str) -> None:
        """Read fields of the model, on one line or on many."""
        for name, value in _FIELD.findall(text):
            self._fields.setdefault(name, value)
        self._open = self._open and not text.rstrip().endswith("}") and len(self._fields) < 200

    def _applied(self, line: str) -> None:
        plan = self.gathered.plan
        if match := _CHECKPOINTING.search(line):
            self._mode = match[1]
        elif "FSDP" in line or "HSDP" in line:
            plan["zero"] = 3
        elif "DDP" in line:
            plan["zero"] = 0
        elif dtype := _narrow(line, self.name):
            self.gathered.settings["dtype"] = dtype

    def finish(self) -> None:
        """Adjust the plan for pipelines: the local batch is no micro-batch, and weights stay gathered over the step."""
        plan = self.gathered.plan
        if plan.get("pp", 1) > 1:
            plan.pop("micro_batch", None)
            plan["zero"] = piped_stage(plan.get("zero", 1), plan["pp"])
        self._recomputation()
        self.gathered.model.update(_sizes(self._fields))

    def _recomputation(self) -> None:
        """Set the recomputation from the mode and its option, translated as for a row of measured runs."""
        g = self.gathered
        if not self._mode:
            return
        option = self._option if self._mode == "selective" else ""
        found = recomputation(f"{self._mode} {option}", selective(self.name))
        if found is None:
            g.notes.append(f"{self._mode} activation checkpointing is not modelled: give --recompute")
            return
        g.plan["recompute"] = recompute_words(found.kind)
        if found.share < 1:
            g.plan["recompute_every"] = round(1 / found.share)
        if self._mode == "selective" and not option:
            g.notes.append("selective activation checkpointing: by operator, as the log does not say otherwise")


def _narrow(line: str, framework: str) -> str | None:
    """Recipe of the low-precision layers that a line names; None: none."""
    match = _NARROW.search(line)
    return recipe_called(f"{match[1] or ''}{match[2] or 'fp8'}", framework) if match else None


def _sizes(fields: Mapping[str, str]) -> dict[str, int]:
    """Dimensions of the model, under the names of :class:`~steptime.model.spec.ModelSpec`.

    The width of the MLP is 2/3 of four hidden sizes, times a factor, rounded up, as in Llama's published code.
    """
    said = {name: gather.count(value) for name, value in fields.items()}
    out = {ours: value for theirs, ours in _FIELDS.items() if (value := said.get(theirs)) and value > 0}
    if "heads" in out:
        out.setdefault("kv_heads", out["heads"])
    multiple, factor = said.get("multiple_of"), gather.number(fields.get("ffn_dim_multiplier", "1")) or 1.0
    if multiple and 0 < factor < 1e3 and "hidden" in out and "ffn_hidden" not in out:
        width = int(factor * int(8 * out["hidden"] / 3))
        out["ffn_hidden"] = round_up(width, multiple)
    return out


_MAXTEXT_STEP: Final = re.compile(r"completed step:\s*(\d{1,12}), seconds:\s*" + gather.NUMBER)
_MAXTEXT_TFLOPS: Final = re.compile(r"\bTFLOP/s/device:\s*" + gather.NUMBER)
_SPEED: Final = re.compile(r"\bTokens/s/device:\s*" + gather.NUMBER)
_TOKENS: Final = re.compile(r"\btotal_weights:\s*(\d{1,15})\b")
_CONFIG: Final = re.compile(r"Config param ([a-z][a-z0-9_]{1,63}): ?(.*)$")
_MAXTEXT_MESH: Final = re.compile(r"Num_devices: (\d{1,9}), shape \(([\d, ]{1,200})\)")
_MAXTEXT_CHECKPOINT: Final = re.compile(r"[Ss]aved a? ?checkpoint at step")

#: Axis of MaxText's mesh -> steptime's axis.
_MAXTEXT_AXES: Final[Mapping[str, str]] = gather.NAMES["maxtext"]["axes"]
_SHARDED: Final = frozenset({"fsdp", "fsdp_transpose"})
_WHOLE: Final[Mapping[str, tuple[str, str]]] = gather.NAMES["maxtext"]["counts"]
#: Policy of rematerialisation -> recomputation: the minimal ones keep the outputs of products, two of them also the
#: output of attention. Other policies lie in between and are not translated.
_REMAT: Final[Mapping[str, str]] = gather.NAMES["maxtext"]["recomputation"]


class MaxText:
    """Parser of MaxText, on GPUs or TPUs."""

    name = "maxtext"

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._tokens = 0.0
        self._gpus = 0.0

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if match := _MAXTEXT_STEP.search(line):
            self._step(rank, line, int(match[1]), match[2])
        elif "Config param" in line and (match := _CONFIG.search(line)):
            g.add_flag(match[1], match[2].strip())
        elif (match := _MAXTEXT_MESH.search(line)) and int(match[1]):
            self._mesh(int(match[1]), match[2])
        elif _MAXTEXT_CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _step(self, rank: int | None, line: str, step: int, seconds: str) -> None:
        g = self.gathered
        time_s = gather.step_time_s(gather.number(seconds))
        tokens, speed = _TOKENS.search(line), _SPEED.search(line)
        each = gather.rate(gather.number(speed[1])) if speed else None
        g.add_step(rank, StepLine(number=step, time_s=time_s, tokens_per_s_per_gpu=each, at_s=gather.clock_s(line)))
        if match := _MAXTEXT_TFLOPS.search(line):
            g.add_tflops(match[1])
        if tokens and time_s and each:
            self._tokens = float(tokens[1])
            self._gpus = self._tokens / (each * time_s)

    def _mesh(self, devices: int, shape: str) -> None:
        """Set the degrees from the shape of the mesh; the configuration names its axes."""
        g = self.gathered
        g.settings["gpus"] = devices
        names = re.findall(r"[a-z_]+", g.flags.get("mesh_axes", ""))
        sizes = [int(n) for n in re.findall(r"\d{1,7}", shape)]
        if len(names) != len(sizes) or math.prod(sizes) != devices:
            return
        degrees: dict[str, int] = {}
        for name, size in zip(names, sizes, strict=True):
            if size > 1 and name in _MAXTEXT_AXES:
                degrees[_MAXTEXT_AXES[name]] = degrees.get(_MAXTEXT_AXES[name], 1) * size
        if ep := degrees.get("ep"):  # experts are spread over ranks that have data of their own
            degrees["dp"] = degrees.get("dp", 1) * ep
        g.plan.update({"tp": 1, "pp": 1, "cp": 1} | degrees)
        sharded = math.prod(size for name, size in zip(names, sizes, strict=True) if name in _SHARDED)
        if degrees.get("pp", 1) == 1:
            g.plan["zero"] = 3 if sharded > 1 else 0
            if 1 < sharded < degrees.get("dp", 1):
                g.plan["shard"] = sharded

    def finish(self) -> None:
        """Translate the printed configuration; without it devices and batch follow from the step lines."""
        g = self.gathered
        g.read_counts(_WHOLE)
        if experts := gather.count(g.flags.get("num_experts", "")):
            g.model["experts"] = experts if experts > 1 else 0
        g.model_name = g.flags.get("model_name", "") if g.flags.get("model_name") != "default" else ""
        if "gpus" not in g.settings and 0.5 <= self._gpus <= 1e7:
            g.settings["gpus"] = round(self._gpus)
        seq = g.settings.get("seq")
        if "global_batch" not in g.settings and seq and self._tokens and self._tokens % seq == 0:
            g.settings["global_batch"] = round(self._tokens / seq)
        micro = gather.count(g.flags.get("micro_batch_size_to_train_on", ""))
        if micro and g.plan.get("pp", 1) == 1 and micro % g.plan.get("dp", 1) == 0 and "dp" in g.plan:
            g.plan["micro_batch"] = micro // g.plan["dp"]
        if g.flags.get("remat_policy") in _REMAT:
            g.plan["recompute"] = _REMAT[g.flags["remat_policy"]]
        if dtype := recipe_called(g.flags.get("dtype", "")):
            g.settings["dtype"] = recipe_called(g.flags.get("quantization", "")) or dtype
        g.set_optimizer(g.flags.get("opt_type", ""))
