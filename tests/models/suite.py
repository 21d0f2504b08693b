"""The models that rewriting is held against: as published at batch 1, and small enough for tests.

A factory gives a module in evaluation mode and its inputs. Weights are random; norms have statistics of their own, so
that folding them changes something.
"""

from types import MappingProxyType

import pytest

torch = pytest.importorskip("torch")

from models.bert import bert, bert_base  # noqa: E402
from models.csrnet import csrnet  # noqa: E402
from models.llama import Block  # noqa: E402
from models.nasrnn import nasrnn  # noqa: E402
from public_models.rows import load_torchvision  # noqa: E402


def of_torchvision(name, pixels=224, **options):
    """A classifier of images of torchvision."""
    load_torchvision()
    torchvision = pytest.importorskip("torchvision")
    return getattr(torchvision.models, name)(weights=None, **options), (torch.randn(1, 3, pixels, pixels),)


def resnext(pixels=224, groups=32):
    """ResNeXt-50 with groups of width 4."""
    load_torchvision()
    resnet = pytest.importorskip("torchvision").models.resnet
    module = resnet.ResNet(resnet.Bottleneck, [3, 4, 6, 3], groups=groups, width_per_group=4)
    return module, (torch.randn(1, 3, pixels, pixels),)


def inception(pixels=299):
    """Inception-v3; its second classifier takes part in training only."""
    return of_torchvision("inception_v3", pixels, init_weights=False)


def nasnet(pixels=331, **options):
    """NasNet-A (6 @ 4032) of timm: 88,753,150 parameters."""
    load_torchvision()
    timm = pytest.importorskip("timm")
    return timm.create_model("nasnetalarge", pretrained=False, **options), (torch.randn(1, 3, pixels, pixels),)


def llama_block(tokens=512, width=4096, heads=32, kv_heads=8, hidden=14336):
    """A block of Llama 3 8B."""
    turns = [torch.randn(tokens, width // heads) for _ in range(2)]
    return Block(width, heads, kv_heads, hidden), (torch.randn(1, tokens, width), *turns)


def settled(factory, *args, **options):
    """A factory of a module in evaluation mode whose norms have seen data."""

    def build():
        torch.manual_seed(0)
        module, inputs = factory(*args, **options)
        for part in module.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.running_mean.normal_(0, 0.1)
                part.running_var.uniform_(0.5, 1.5)
        return module.eval(), inputs

    return build


SUITE = MappingProxyType(
    {
        "ResNet-50": settled(of_torchvision, "resnet50"),
        "ResNeXt-50": settled(resnext),
        "NasNet-A": settled(nasnet),
        "NasRNN": settled(nasrnn),
        "BERT": settled(bert_base, tokens=128),
        "Inception-v3": settled(inception),
        "SqueezeNet": settled(of_torchvision, "squeezenet1_1"),
        "CSRNet": settled(csrnet),
        "Llama block": settled(llama_block),
    }
)
"""Name -> factory, at published sizes and batch 1."""
SMALL = MappingProxyType(
    {
        "ResNet-50": settled(of_torchvision, "resnet50", 64, width_per_group=16),
        "ResNeXt-50": settled(resnext, 64, groups=8),
        "NasNet-A": settled(nasnet, 96, stem_size=8, num_features=192, num_classes=10),
        "NasRNN": settled(nasrnn, steps=3, hidden=32),
        "BERT": settled(bert),
        "Inception-v3": settled(inception, 96),
        "SqueezeNet": settled(of_torchvision, "squeezenet1_1", 64),
        "CSRNet": settled(csrnet, pixels=48, divisor=16),
        "Llama block": settled(llama_block, tokens=8, width=64, heads=4, kv_heads=2, hidden=128),
    }
)
"""The same graphs, narrower and on smaller inputs."""
