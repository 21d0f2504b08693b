"""Lines of MaxText: printed configuration, mesh, completed steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from steptime.doctor import words as w
from steptime.doctor.gather import Gathered
from steptime.doctor.records import StepLine
from steptime.lab.measured.meaning import recipe_called

_STEP: Final = re.compile(r"completed step:\s*(\d{1,12}), seconds:\s*" + w.NUMBER)
_TFLOPS: Final = re.compile(r"\bTFLOP/s/device:\s*" + w.NUMBER)
_SPEED: Final = re.compile(r"\bTokens/s/device:\s*" + w.NUMBER)
_TOKENS: Final = re.compile(r"\btotal_weights:\s*(\d{1,15})\b")
_CONFIG: Final = re.compile(r"Config param ([a-z][a-z0-9_]{1,63}): ?(.*)$")
_MESH: Final = re.compile(r"Num_devices: (\d{1,9}), shape \(([\d, ]{1,200})\)")
_CHECKPOINT: Final = re.compile(r"[Ss]aved a? ?checkpoint at step")

#: Axis of MaxText's mesh -> axis here.
_AXES: Final[Mapping[str, str]] = {
    "data": "dp", "fsdp": "dp", "fsdp_transpose": "dp", "tensor": "tp", "tensor_transpose": "tp",
    "tensor_sequence": "tp", "sequence": "cp", "context": "cp", "stage": "pp", "expert": "ep",
}  # fmt: skip
_SHARDED: Final = frozenset({"fsdp", "fsdp_transpose"})
_WHOLE: Final[Mapping[str, tuple[str, str]]] = {
    "global_batch_size_to_train_on": ("settings", "global_batch"), "max_target_length": ("settings", "seq"),
    "base_num_decoder_layers": ("model", "layers"), "base_emb_dim": ("model", "hidden"),
    "base_num_query_heads": ("model", "heads"), "base_num_kv_heads": ("model", "kv_heads"),
    "base_mlp_dim": ("model", "ffn_hidden"), "vocab_size": ("model", "vocab"),
}  # fmt: skip
#: Policy of rematerialisation -> what is recomputed here: the minimal ones keep the outputs of products, two of them
#: that of attention too. Others keep something in between and are not translated.
_REMAT: Final[Mapping[str, str]] = {
    "full": "full", "minimal": "attention+norm+activation", "minimal_flash": "norm+activation",
    "minimal_with_context": "norm+activation", "save_dot_except_mlp": "norm+attention+mlp",
    **dict.fromkeys(("save_qkv_proj", "qkv_proj_offloaded"), "norm+attention+attention_out+mlp"),
}  # fmt: skip


class MaxText:
    """MaxText, on GPUs or TPUs."""

    name = "maxtext"

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._tokens = 0.0
        self._gpus = 0.0

    def feed(self, rank: int | None, line: str) -> None:
        """Take one line."""
        g = self.gathered
        if match := _STEP.search(line):
            self._step(rank, line, int(match[1]), match[2])
        elif "Config param" in line and (match := _CONFIG.search(line)):
            g.add_flag(match[1], match[2].strip())
        elif (match := _MESH.search(line)) and int(match[1]):
            self._mesh(int(match[1]), match[2])
        elif _CHECKPOINT.search(line):
            g.add_event("checkpoint")

    def _step(self, rank: int | None, line: str, step: int, seconds: str) -> None:
        g = self.gathered
        time_s = w.step_time_s(w.number(seconds))
        g.add_step(rank, StepLine(number=step, time_s=time_s, at_s=w.clock_s(line)))
        if match := _TFLOPS.search(line):
            g.add_tflops(match[1])
        tokens, speed = _TOKENS.search(line), _SPEED.search(line)
        if tokens and speed and time_s and (each := w.rate(w.number(speed[1]))):
            self._tokens = float(tokens[1])
            self._gpus = self._tokens / (each * time_s)

    def _mesh(self, devices: int, shape: str) -> None:
        """Degrees from the shape of the mesh; the configuration names its axes."""
        g = self.gathered
        g.settings["gpus"] = devices
        names = re.findall(r"[a-z_]+", g.flags.get("mesh_axes", ""))
        sizes = [int(n) for n in re.findall(r"\d{1,7}", shape)]
        if len(names) != len(sizes) or math.prod(sizes) != devices:
            return
        degrees: dict[str, int] = {}
        for name, size in zip(names, sizes, strict=True):
            if size > 1 and name in _AXES:
                degrees[_AXES[name]] = degrees.get(_AXES[name], 1) * size
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
        if experts := w.count(g.flags.get("num_experts", "")):
            g.model["experts"] = experts if experts > 1 else 0
        g.model_name = g.flags.get("model_name", "") if g.flags.get("model_name") != "default" else ""
        if "gpus" not in g.settings and 0.5 <= self._gpus <= 1e7:
            g.settings["gpus"] = round(self._gpus)
        seq = g.settings.get("seq")
        if "global_batch" not in g.settings and seq and self._tokens and self._tokens % seq == 0:
            g.settings["global_batch"] = round(self._tokens / seq)
        micro = w.count(g.flags.get("micro_batch_size_to_train_on", ""))
        if micro and g.plan.get("pp", 1) == 1 and micro % g.plan.get("dp", 1) == 0 and "dp" in g.plan:
            g.plan["micro_batch"] = micro // g.plan["dp"]
        if g.flags.get("remat_policy") in _REMAT:
            g.plan["recompute"] = _REMAT[g.flags["remat_policy"]]
        if dtype := recipe_called(g.flags.get("dtype", "")):
            g.settings["dtype"] = recipe_called(g.flags.get("quantization", "")) or dtype
        g.set_optimizer(g.flags.get("opt_type", ""))
