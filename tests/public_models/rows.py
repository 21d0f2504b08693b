"""Architectures of public packages, built from their configurations: at their real widths with few layers, and narrow.

Each row names a model and how it is built; nothing is downloaded. Integer inputs have values, since some models decide
shapes by them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


def load_torchvision() -> None:
    """Import torchvision, also where its compiled part is for another build of PyTorch and does not load."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")


load_torchvision()

Built = tuple[Any, Any]
"""A module and the arguments of its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture."""

    name: str
    package: str
    area: str
    build: Callable[..., Built]
    narrow: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its configuration under which it is small enough to be run for real."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the capture that it needs."""

    def real(self) -> Built:
        """At its real width."""
        return self.build({})

    def small(self) -> Built:
        """For a real run."""
        return self.build(self.narrow)


def ids(config: Any, *shape: int) -> torch.Tensor:
    return torch.randint(3, min(int(config.vocab_size), 30000) - 1, shape)


def of_transformers(
    kind: str, settings: Mapping[str, Any], inputs: Callable[[Any], Mapping[str, Any]]
) -> Callable[..., Built]:
    """A model class with the default of its configuration but for some settings."""

    def build(narrow: Mapping[str, Any]) -> Built:
        import transformers

        made = getattr(transformers, kind)
        module = made(made.config_class(**{**settings, **narrow}))
        return module, dict(inputs(module))

    return build


def text(batch: int = 2, length: int = 64, labels: bool = True, **more: Any) -> Callable[[Any], Mapping[str, Any]]:
    """Token ids and what is to be predicted."""

    def inputs(module: Any) -> Mapping[str, Any]:
        out: dict[str, Any] = {"input_ids": ids(module.config.get_text_config(), batch, length), **more}
        if labels:
            kind = type(module).__name__
            one = "SequenceClassification" in kind
            out["labels"] = torch.zeros(batch, dtype=torch.int64) if one else out["input_ids"].clone()
        return out

    return inputs


def masked_text(module: Any) -> Mapping[str, Any]:
    """Token ids of two sequences of which one is padded."""
    out = dict(text()(module))
    out["attention_mask"] = torch.ones_like(out["input_ids"])
    out["attention_mask"][1, 40:] = 0
    return out


def pairs(module: Any) -> Mapping[str, Any]:
    """Source and target ids."""
    source = ids(module.config, 2, 48)
    return {"input_ids": source, "decoder_input_ids": ids(module.config, 2, 32), "labels": ids(module.config, 2, 32)}


def images(size: int = 224, batch: int = 2, channels: int = 3, labels: bool = True, **more: Any) -> Any:
    """Images and their classes."""

    def inputs(module: Any) -> Mapping[str, Any]:
        out: dict[str, Any] = {"pixel_values": torch.randn(batch, channels, size, size), **more}
        if labels:
            out["labels"] = torch.zeros(batch, dtype=torch.int64)
        return out

    return inputs


def given(**tensors: Callable[[], Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Arguments that are made when the model is."""
    return lambda module: {name: make() for name, make in tensors.items()}


def hf(area: str, name: str, kind: str, inputs: Any, settings: Mapping[str, Any], narrow: Any = None) -> Row:
    build = of_transformers(kind, settings, inputs)
    return Row(name=name, package="transformers", area=area, build=build, narrow=narrow or {})


def called(path: str, inputs: Callable[[], Any], *args: Any, **settings: Any) -> Callable[..., Built]:
    """Something that makes a module, by its dotted name."""

    def build(narrow: Mapping[str, Any]) -> Built:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)(*args, **{**settings, **narrow}), inputs()

    return build


def timm(name: str, size: int = 224, **settings: Any) -> Row:
    build = called("timm.create_model", lambda: (torch.randn(2, 3, size, size),), name, pretrained=False, **settings)
    return Row(name=name, package="timm", area="vision", build=build)


def vision(name: str, size: int = 224, area: str = "vision", **settings: Any) -> Row:
    path = f"torchvision.models.{name}"
    return Row(name=name.rpartition(".")[2], package="torchvision", area=area,
               build=called(path, lambda: (torch.randn(2, 3, size, size),), weights=None, **settings))  # fmt: skip


DEEP = {"num_hidden_layers": 3}
NARROW = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip
HEADS = NARROW | {"head_dim": 32}
SHORT = {"num_hidden_layers": 2}


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns, else the mean square of its main output, whose gradient is dense."""
    from steptime.captured.record.training import given_loss, main_output

    if isinstance(output, Mapping) and not isinstance(given_loss(output), torch.Tensor) and "logits" not in output:
        losses = [value for value in output.values() if isinstance(value, torch.Tensor) and value.numel() == 1]
        if losses and losses[0].requires_grad:
            return sum(losses[1:], losses[0])
    own = given_loss(output)
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return own
    main: torch.Tensor = main_output(output)
    return main if main.numel() == 1 else main.float().pow(2).mean()
