"""Torch modules of the common families; each factory returns a module and example inputs for its forward."""

from collections.abc import Callable
from typing import Any

from models.bert import bert, bert_base
from models.gpt import gpt, gpt2_small, gpt_eager
from models.llama import llama
from models.mlp import mlp
from models.moe import moe
from models.recurrent import gru_tagger, lstm_language_model
from models.resnet import mobile, resnet50, resnet_small
from models.unet import unet
from models.vit import vit

Factory = Callable[..., tuple[Any, tuple[Any, ...]]]

#: Small modules, a second or less for a step on one core.
FACTORIES: dict[str, Factory] = {
    "mlp": mlp, "resnet": resnet_small, "mobile": mobile, "unet": unet, "gpt": gpt, "gpt_eager": gpt_eager,
    "bert": bert, "llama": llama, "lstm": lstm_language_model, "gru": gru_tagger, "moe": moe, "vit": vit,
}  # fmt: skip

#: Published architectures at full size -> factory and number of parameters of the published checkpoint.
PUBLISHED: dict[str, tuple[Factory, int]] = {
    "resnet50": (resnet50, 25_557_032),
    "bert-base-uncased": (bert_base, 109_482_240),
    "gpt2": (gpt2_small, 124_439_808),
}


def loss_of(output: Any) -> Any:
    """A scalar that depends on every output: the sum of the means of squares."""
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return sum(each.float().pow(2).mean() for each in outputs)


def parameters_of(module: Any) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


__all__ = [
    "FACTORIES", "PUBLISHED", "Factory", "bert", "bert_base", "gpt", "gpt2_small", "gpt_eager", "gru_tagger", "llama",
    "loss_of", "lstm_language_model", "mlp", "mobile", "moe", "parameters_of", "resnet50", "resnet_small", "unet",
    "vit",
]  # fmt: skip
