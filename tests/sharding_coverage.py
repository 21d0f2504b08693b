"""How much of real training steps has dims: seven models captured in full, timed on an H100."""

from __future__ import annotations

import torch

import models
from public_models.rows import load_torchvision
from steptime.captured.cost import Timer
from steptime.captured.ops import dims_of
from steptime.captured.record import capture
from steptime.hardware import load_device
from steptime.sharding.options import strategies

SIZES = (2, 4)


def labelled(output):
    return torch.nn.functional.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.int64))


def on_meta(make, *given):
    with torch.device("meta"):
        return make(*given)


def steps():
    """Name, module, inputs, options of the capture."""
    load_torchvision()
    import torchvision
    import transformers as hf

    vision = torchvision.models
    ids, short = torch.zeros(8, 1024, dtype=torch.int64), torch.zeros(8, 512, dtype=torch.int64)
    images = (torch.empty(64, 3, 224, 224, device="meta"),)
    yield "ResNet-50", on_meta(vision.resnet50), images, {"loss": labelled, "optimizer": "sgd"}
    yield "U-Net", *on_meta(models.unet, 8, 128, 64, 3), {}
    yield "ViT-B/16", on_meta(vision.vit_b_16), images, {"loss": labelled}
    yield "BERT-base", on_meta(hf.BertForMaskedLM, hf.BertConfig()), {"input_ids": short, "labels": short}, {}
    yield "GPT-2", on_meta(hf.GPT2LMHeadModel, hf.GPT2Config()), {"input_ids": ids, "labels": ids}, {}
    llama = hf.LlamaConfig(num_key_value_heads=8, intermediate_size=14336, vocab_size=128256)
    texts = {"input_ids": ids, "labels": ids}, {"autocast": "bf16"}
    yield "Llama-3-8B", on_meta(hf.LlamaForCausalLM, llama), *texts
    mixtral = hf.MixtralConfig(num_hidden_layers=8)
    mixtral._experts_implementation = "grouped_mm"
    yield "Mixtral, 8 layers", on_meta(hf.MixtralForCausalLM, mixtral), *texts


def coverage():
    """Lines of a table: calls, shares of calls and of time that have dims, share of time that the mesh can split."""
    timer = Timer(device=load_device("h100-sxm"))
    yield "| model | calls | calls with dims | time with dims | time that can be split |"
    yield "|---|--:|--:|--:|--:|"
    for name, module, inputs, options in steps():
        program = capture(module, inputs, target="cuda", name=name, **options)
        rows = [(c.node, timer.cost(c.node, inplace=c.inplace).seconds) for c in program.calls]
        total = sum(seconds for _, seconds in rows)
        known = [(node, seconds) for node, seconds in rows if dims_of(node) is not None]
        split = sum(seconds for node, seconds in known if len(strategies(node, SIZES)) > 1)
        shares = (len(known) / len(rows), sum(seconds for _, seconds in known) / total, split / total)
        yield f"| {name} | {len(rows):,} | " + " | ".join(f"{100 * share:.2f} %" for share in shares) + " |"
