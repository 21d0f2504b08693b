"""Memory of fine-tuning stacks against captures of real modules: `python benchmarks/bench_finetuning.py [--write]`.

Captures whole steps (forward, own loss, backward, AdamW) of Llama as Hugging Face's transformers has it, with adapters
of PEFT where that package is there, on CUDA's operators and without a GPU, and holds the largest sum of live tensors
against the formulas. 4-bit weights are those of a module that packs two weights in a byte and turns them to bf16 in
both passes, as bitsandbytes does. ``--write`` also writes benchmarks/finetuning.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
warnings.filterwarnings("ignore", category=FutureWarning)

from steptime.api.models import load_model  # noqa: E402
from steptime.estimate.memory import peak_bytes  # noqa: E402
from steptime.estimate.result import planned_job  # noqa: E402
from steptime.estimate.sizes import sizes_of  # noqa: E402
from steptime.model.spec import ModelSpec  # noqa: E402
from steptime.plan.job import OPTIMIZERS, PRECISIONS, QLORA_BYTES, Adapter, Job, with_habits  # noqa: E402
from steptime.plan.plans import FULL_RECOMPUTE, Plans  # noqa: E402
from steptime.plan.strategies import CORRECTED  # noqa: E402

RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step to capture and to predict."""

    name: str
    dims: tuple[int, ...]
    """Layers, width, inner width, heads, key heads, vocabulary, tokens, sequences."""
    tuned: str = "full"
    """``full``, ``lora`` or ``qlora``."""
    checkpoints: bool = False
    dropout: float = 0.0
    dora: bool = False
    wide: bool = False
    """Weights in fp32 under autocast."""


WIDE_VOCABULARY, DEEP = (4, 1024, 2816, 16, 16, 32000, 1024, 2), (8, 1024, 4096, 16, 4, 2048, 1024, 2)
BIG = (4, 4096, 11008, 32, 32, 32000, 512, 1)


def cases() -> Iterator[Case]:
    """Full training and adapters, with and without checkpoints, where the loss needs most and where layers do."""
    for label, dims in (("loss binds", WIDE_VOCABULARY), ("layers bind", DEEP), ("weights bind", BIG)):
        for tuned in ("full", "lora", "qlora"):
            for checkpoints in (False, True):
                words = f"{tuned}{', checkpoints' if checkpoints else ''}; {label}"
                yield Case(name=words, dims=dims, tuned=tuned, checkpoints=checkpoints)
    yield Case(name="lora, dropout; layers bind", dims=DEEP, tuned="lora", dropout=0.05)
    yield Case(name="dora; layers bind", dims=DEEP, tuned="lora", dora=True)
    yield Case(name="full, fp32 weights under autocast; layers bind", dims=DEEP, wide=True)


def captured_bytes(case: Case) -> int:
    """Largest sum of live tensors of the real modules."""
    from public_models.rows import load_torchvision

    load_torchvision()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from steptime.captured.graph.liveness import Liveness
    from steptime.captured.record import capture

    layers, width, inner, heads, keys, vocab, tokens, batch = case.dims
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=vocab, max_position_embeddings=tokens, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.float32 if case.wide else torch.bfloat16)
    with torch.device("meta"):
        module: Any = LlamaForCausalLM(config)
    if case.tuned == "qlora":
        _quantise(module)
    torch.set_default_dtype(torch.float32)
    if case.tuned != "full":
        import peft

        with torch.device("meta"):
            lora = peft.LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=case.dropout, use_dora=case.dora)
            module = peft.get_peft_model(module, lora)
    if case.checkpoints:
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
        if case.tuned != "full":
            module.enable_input_require_grads()
    module.train()
    ids = torch.zeros((batch, tokens), dtype=torch.int64, device="meta")
    program = capture(
        module, {"input_ids": ids, "labels": ids}, loss="own", autocast="bf16", optimizer="adamw", target="cuda",
        fold=False,
    )  # fmt: skip
    return int(Liveness(program).peak().size_bytes)


def _quantise(module: Any) -> None:
    """Products of layers with weights of 4 bits, everything else in fp32, as `prepare_model_for_kbit_training` does."""
    import torch

    class Product4Bit(torch.autograd.Function):
        """A product whose weight is in the dtype of the run for as long as it runs."""

        @staticmethod
        def forward(ctx: Any, x: Any, packed: Any, shape: Any) -> Any:
            ctx.save_for_backward(packed)
            ctx.shape = shape
            return x @ _wide(packed, shape).t()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient @ _wide(ctx.saved_tensors[0], ctx.shape), None, None

    def _wide(packed: Any, shape: Any) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device=packed.device)

    class Linear4bit(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            shape = (self.out_features, self.in_features)
            return Product4Bit.apply(x.to(torch.bfloat16), self.weight, shape)

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                made = Linear4bit(child.in_features, child.out_features, bias=False, device="meta")
                size = child.in_features * child.out_features
                held = torch.empty((round(size * QLORA_BYTES), 1), dtype=torch.uint8, device="meta")
                made.weight = torch.nn.Parameter(held, requires_grad=False)
                setattr(parent, name, made)
    for parameter in module.parameters():
        parameter.requires_grad = False
        if parameter.dtype != torch.uint8:
            parameter.data = parameter.data.float()


def predicted_bytes(case: Case) -> float:
    """The same by the formulas of the stack that trains so."""
    layers, width, inner, heads, keys, vocab, tokens, batch = case.dims
    spec: ModelSpec = replace(
        load_model("llama2-7b"), layers=layers, hidden=width, ffn_hidden=inner, heads=heads, kv_heads=keys,
        head_dim=width // heads, vocab=vocab, seq_len=tokens,
    )  # fmt: skip
    stored = QLORA_BYTES if case.tuned == "qlora" else None
    adapter = None if case.tuned == "full" else Adapter(rank=RANK, weight_bytes=stored, dora=case.dora)
    job = Job(model=spec, gpus=1, global_batch=batch, seq_len=tokens, precision=PRECISIONS["bf16"],
              optimizer=OPTIMIZERS["adamw"], adapter=adapter)  # fmt: skip
    job = with_habits(job, "llama-factory" if case.wide else "ms-swift" if case.dropout else "transformers")
    job = replace(job, memory=replace(job.memory, workspace_bytes=0.0, update_bytes=2.0 if not case.wide else 4.0))
    plans = Plans(micro_batch=batch, zero=0, recompute=FULL_RECOMPUTE if case.checkpoints else 0)
    strategy = CORRECTED.strategies["context"]
    return float(peak_bytes(planned_job(CORRECTED, strategy, job, plans, sizes_of(strategy.block(job, plans)))))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page")
    lines = ["| step | captured MB | predicted MB | error |", "|---|--:|--:|--:|"]
    errors = []
    for case in cases():
        if case.tuned != "full" and find_spec("peft") is None:
            print(f"{case.name}: needs peft", file=sys.stderr)
            continue
        found, predicted = captured_bytes(case), predicted_bytes(case)
        errors.append(abs(predicted / found - 1))
        lines.append(f"| {case.name} | {found / 1e6:,.1f} | {predicted / 1e6:,.1f} | {predicted / found - 1:+.1%} |")
        print(lines[-1], flush=True)
    text = "\n".join([
        "# Memory of fine-tuning: formulas against captures of real modules", "",
        "Whole steps of Llama as transformers has it, with PEFT's adapters of rank 16 on all products; live tensors at",
        "the peak. Nothing is fitted: what is kept follows from the code of the modules",
        "(`src/steptime/plan/frameworks`).",
        "", *lines, "",
        f"Mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}.", "",
        "Command: `python benchmarks/bench_finetuning.py --write`", "",
    ])  # fmt: skip
    if parser.parse_args().write:
        (ROOT / "benchmarks" / "finetuning.md").write_text(text)


if __name__ == "__main__":
    main()
