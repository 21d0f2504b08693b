"""Random training graphs of several families, small enough for a processor.

A *case* is a family and a number. The number seeds every draw, so that a case is the same module on every machine.
Predictors are trained and scored on families of whole networks; a graph of the family ``single`` has one operator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime.errors import UnknownNameError

OPTIMIZERS: Final = ("sgd-loop", "sgd-momentum-loop", "adam-loop", "adamw-loop")
"""Optimisers of the graphs, as PyTorch runs them on a processor (:mod:`steptime.captured.record.training`)."""
SINGLE: Final = "single"
"""Family of graphs of one operator."""
CLASSES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step that can be run and captured."""

    family: str
    number: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: str
    """Name of the loss (:data:`steptime.captured.record.training.LOSSES`)."""
    optimizer: str

    @property
    def key(self) -> str:
        """Name of the case."""
        return f"{self.family}:{self.number}"


Built = tuple[nn.Module, tuple[Tensor, ...]]
Maker = Callable[[random.Random], Built]


class Sum(nn.Module):
    """The sum of a path and its shortcut."""

    def __init__(self, path: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.path, self.shortcut = path, shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.path(x) + self.shortcut(x)  # type: ignore[no-any-return]


class Joined(nn.Module):
    """Parallel branches, their channels concatenated; ``keep`` puts the input before them."""

    def __init__(self, branches: list[nn.Module], *, keep: bool = False) -> None:
        super().__init__()
        self.branches, self.keep = nn.ModuleList(branches), keep

    def forward(self, x: Tensor) -> Tensor:
        """The concatenation."""
        return torch.cat([*([x] if self.keep else []), *(branch(x) for branch in self.branches)], 1)


class Attention(nn.Module):
    """Self-attention, fused or written out."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over the second dim."""
        batch, tokens, width = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """A module applied along the second dim instead of the last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The inner module on the exchanged dims."""
        return self.inner(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Last(nn.Module):
    """A recurrent module with the output of the last token, or the mean over tokens, as its output."""

    def __init__(self, inner: nn.Module, *, mean: bool = False) -> None:
        super().__init__()
        self.inner, self.mean = inner, mean

    def forward(self, x: Tensor) -> Tensor:
        """One vector a sample."""
        out = self.inner(x)
        whole = out[0] if isinstance(out, tuple) else out
        return whole.mean(1) if self.mean else whole[:, -1]  # type: ignore[no-any-return]


class Exchanged(nn.Module):
    """The last two dims exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """A view of the input."""
        return x.transpose(1, 2)


class Level(nn.Module):
    """One level of a U-Net: down, the levels below, up, and the skip connection concatenated."""

    def __init__(self, down: nn.Module, below: nn.Module, up: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.down, self.below, self.up, self.after = down, below, up, after

    def forward(self, x: Tensor) -> Tensor:
        """The level's output, of the size of its input."""
        kept = self.down(x)
        return self.after(torch.cat([kept, self.up(self.below(kept))], 1))  # type: ignore[no-any-return]


ACTIVATIONS: Final = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)
SMOOTH: Final = (nn.GELU, nn.SiLU, nn.ReLU)


def _chain(parts: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*parts)


def _conv(draw: random.Random, inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution, a norm with probability 0.75, and an activation."""
    normed = draw.random() < 0.75
    parts: list[nn.Module] = [nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=not normed)]
    if normed:
        parts.append(nn.BatchNorm2d(outside) if draw.random() < 0.8 else nn.GroupNorm(math.gcd(8, outside), outside))
    return _chain([*parts, draw.choice(SMOOTH)()])


def _images(draw: random.Random, channels: int, sizes: tuple[int, ...], batches: tuple[int, ...]) -> Tensor:
    size = draw.choice(sizes)
    return torch.randn(draw.choice(batches), channels, size, size)


def _pooled(parts: list[nn.Module], channels: int) -> nn.Module:
    return _chain([*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)])


def mlp(draw: random.Random) -> Built:
    """Dense layers with activations, norms and dropout."""
    width = inside = draw.choice((64, 96, 128, 200, 256, 384, 512, 768))
    x = torch.randn(draw.choice((16, 32, 64, 128, 256, 512)), inside)
    parts: list[nn.Module] = []
    normed, dropped, activation = draw.random() < 0.4, draw.random() < 0.3, draw.choice(ACTIVATIONS)
    for _ in range(draw.randint(1, 7)):
        out = draw.choice((64, 128, 160, 256, 400, 512, 1024))
        parts += [nn.Linear(width, out), activation()]
        parts += [nn.LayerNorm(out)] * normed + [nn.Dropout(0.1)] * dropped
        width = out
    return _chain([*parts, nn.Linear(width, CLASSES)]), (x,)


def plain(draw: random.Random) -> Built:
    """Convolutions one after the other, with pooling (VGG)."""
    x = _images(draw, 3, (16, 24, 32, 48), (2, 4, 8, 16))
    channels, inside, parts = draw.choice((8, 16, 24, 32)), 3, list[nn.Module]()
    for stage in range(draw.randint(1, 3)):
        out = channels * 2**stage
        for _ in range(draw.randint(1, 3)):
            parts.append(_conv(draw, inside, out, draw.choice((3, 3, 3, 5))))
            inside = out
        parts.append(draw.choice((nn.MaxPool2d(2), nn.AvgPool2d(2))))
    return _pooled(parts, inside), (x,)


def residual(draw: random.Random) -> Built:
    """Residual blocks, plain or with a bottleneck (ResNet)."""
    x = _images(draw, 3, (16, 24, 32, 40), (2, 4, 8))
    width = draw.choice((8, 16, 24, 32, 48))
    parts, inside = [_conv(draw, 3, width, 3)], width
    bottleneck, groups = draw.random() < 0.5, draw.choice((1, 1, 1, 4))
    for stage in range(draw.randint(1, 3)):
        for block in range(draw.randint(1, 3)):
            out, stride = width * 2**stage, 2 if stage and not block else 1
            if bottleneck:
                wide = out * 2
                path = [
                    _conv(draw, inside, out, 1),
                    _conv(draw, out, out, 3, stride, groups),
                    _conv(draw, out, wide, 1),
                ]
            else:
                wide, path = out, [_conv(draw, inside, out, 3, stride), _conv(draw, out, out, 3)]
            shortcut = None if wide == inside and stride == 1 else nn.Conv2d(inside, wide, 1, stride)
            parts += [Sum(_chain(path), shortcut), nn.ReLU()]
            inside = wide
    return _pooled(parts, inside), (x,)


def depthwise(draw: random.Random) -> Built:
    """Inverted residual blocks with depthwise convolutions (MobileNet)."""
    x = _images(draw, 3, (16, 24, 32, 48), (2, 4, 8))
    width = draw.choice((8, 16, 24, 32))
    parts, inside = [_conv(draw, 3, width, 3, 2 if draw.random() < 0.5 else 1)], width
    expand, kernel = draw.choice((2, 3, 4, 6)), draw.choice((3, 3, 5))
    for stage in range(draw.randint(1, 3)):
        for block in range(draw.randint(1, 3)):
            out, stride = int(width * 1.5**stage), 2 if stage and not block else 1
            mid = inside * expand
            path = _chain(
                [
                    _conv(draw, inside, mid, 1),
                    _conv(draw, mid, mid, kernel, stride, mid),
                    nn.Conv2d(mid, out, 1),
                    nn.BatchNorm2d(out),
                ]
            )
            parts.append(Sum(path) if out == inside and stride == 1 else path)
            inside = out
    return _pooled(parts, inside), (x,)


def branching(draw: random.Random) -> Built:
    """Blocks whose branches are concatenated (Inception, DenseNet)."""
    x = _images(draw, 3, (16, 24, 32), (2, 4, 8))
    width = draw.choice((8, 16, 24))
    parts, inside = [_conv(draw, 3, width, 3)], width
    dense = draw.random() < 0.5
    for _ in range(draw.randint(1, 3)):
        if dense:
            for _ in range(draw.randint(2, 4)):
                parts.append(
                    Joined([_chain([_conv(draw, inside, 2 * width, 1), _conv(draw, 2 * width, width, 3)])], keep=True)
                )
                inside += width
            parts.append(_chain([_conv(draw, inside, inside // 2, 1), nn.AvgPool2d(2)]))
            inside //= 2
        else:
            branches: list[nn.Module] = [_conv(draw, inside, width, 1)]
            branches.append(_chain([_conv(draw, inside, width, 1), _conv(draw, width, 2 * width, 3)]))
            if draw.random() < 0.7:
                branches.append(_chain([_conv(draw, inside, width, 1), _conv(draw, width, width, 5)]))
            if draw.random() < 0.7:
                branches.append(_chain([nn.MaxPool2d(3, 1, 1), _conv(draw, inside, width, 1)]))
            parts.append(Joined(branches))
            inside = width * (3 + len(branches) - 2)
    return _pooled(parts, inside), (x,)


def unet(draw: random.Random) -> Built:
    """Convolutions with skip connections (U-Net)."""
    x = _images(draw, draw.choice((1, 3, 4)), (16, 32, 48), (1, 2, 4))
    width, depth = draw.choice((8, 12, 16, 24)), draw.randint(1, 3)
    transposed = draw.random() < 0.5

    def level(inside: int, number: int) -> nn.Module:
        out = width * 2**number
        if number == depth:
            return _conv(draw, inside, out, 3)
        below = _chain([nn.MaxPool2d(2), level(out, number + 1)])
        up: nn.Module = nn.ConvTranspose2d(2 * out, out, 2, 2)
        if not transposed:
            up = _chain(
                [nn.Upsample(scale_factor=2, mode=draw.choice(("nearest", "bilinear"))), nn.Conv2d(2 * out, out, 1)]
            )
        return Level(
            _chain([_conv(draw, inside, out, 3), _conv(draw, out, out, 3)]), below, up, _conv(draw, 2 * out, out, 3)
        )

    return _chain([level(x.shape[1], 0), nn.Conv2d(width, 2, 1)]), (x,)


def transformer(draw: random.Random) -> Built:
    """Blocks of attention and dense layers over tokens."""
    heads = draw.choice((2, 4, 8))
    width = heads * draw.choice((16, 24, 32, 48))
    tokens, batch = draw.choice((16, 32, 48, 64, 96, 128)), draw.choice((1, 2, 4, 8))
    fused, activation = draw.random() < 0.5, draw.choice(SMOOTH)
    words = draw.random() < 0.6
    parts: list[nn.Module] = [nn.Embedding(draw.choice((500, 2000, 8000)), width)] if words else []
    for _ in range(draw.randint(1, 4)):
        wide = width * draw.choice((2, 4))
        parts.append(Sum(_chain([nn.LayerNorm(width), Attention(width, heads, fused=fused)])))
        parts.append(
            Sum(
                _chain(
                    [
                        nn.LayerNorm(width),
                        nn.Linear(width, wide),
                        activation(),
                        nn.Linear(wide, width),
                    ]
                )
            )
        )
    parts += [nn.LayerNorm(width), nn.Linear(width, draw.choice((CLASSES, 200, 2000)))]
    x = torch.randint(0, 500, (batch, tokens)) if words else torch.randn(batch, tokens, width)
    return _chain(parts), (x,)


def recurrent(draw: random.Random) -> Built:
    """Recurrent layers over tokens."""
    width, inside = draw.choice((32, 64, 96, 128, 192, 256)), draw.choice((32, 64, 128))
    kind = draw.choice((nn.LSTM, nn.LSTM, nn.GRU, nn.RNN))
    both = draw.random() < 0.3
    inner = kind(inside, width, draw.randint(1, 3), batch_first=True, bidirectional=both)
    x: Tensor = torch.randn(draw.choice((2, 4, 8, 16, 32)), draw.choice((8, 16, 24, 32, 64)), inside)
    parts: list[nn.Module] = []
    if draw.random() < 0.5:
        parts.append(nn.Embedding(1000, inside))
        x = torch.randint(0, 1000, x.shape[:2])
    out = width * (2 if both else 1)
    return _chain([*parts, Last(inner, mean=draw.random() < 0.5), nn.Linear(out, CLASSES)]), (x,)


def mixer(draw: random.Random) -> Built:
    """Dense layers along tokens and along channels in turn, behind a convolution of patches (MLP-Mixer)."""
    patch, width = draw.choice((4, 8)), draw.choice((32, 64, 96, 128, 192))
    x = _images(draw, 3, (32, 48, 64), (2, 4, 8, 16))
    tokens = (x.shape[-1] // patch) ** 2
    parts: list[nn.Module] = [nn.Conv2d(3, width, patch, patch), nn.Flatten(2), Exchanged()]
    for _ in range(draw.randint(1, 5)):
        hidden, wide = tokens * draw.choice((1, 2)), width * draw.choice((2, 4))
        across = Turned(_chain([nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens)]))
        parts.append(Sum(_chain([nn.LayerNorm(width), across])))
        parts.append(Sum(_chain([nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)])))
    return _chain([*parts, Last(nn.Identity(), mean=True), nn.Linear(width, CLASSES)]), (x,)


def _map(draw: random.Random) -> Built:
    kinds = (*ACTIVATIONS, nn.Sigmoid, nn.LeakyReLU, nn.ELU)
    return draw.choice(kinds)(), (torch.randn(draw.choice((8, 64, 512)), draw.choice((64, 1024, 8192))),)


def _linear(draw: random.Random) -> Built:
    inside, outside = (draw.choice((16, 64, 128, 256, 512, 1024)) for _ in range(2))
    return nn.Linear(inside, outside), (torch.randn(draw.choice((4, 16, 64, 256, 1024)), inside),)


def _convolution(draw: random.Random) -> Built:
    groups = draw.choice((1, 1, 1, 4, 0))
    inside = draw.choice((8, 16, 32, 64, 96))
    outside = inside if groups == 0 else draw.choice((8, 16, 32, 64, 96))
    kernel = draw.choice((1, 3, 3, 5, 7))
    module = nn.Conv2d(inside, outside, kernel, draw.choice((1, 1, 2)), kernel // 2, groups=groups or inside)
    return module, (_images(draw, inside, (8, 16, 32, 48), (1, 2, 4, 8)),)


def _transposed(draw: random.Random) -> Built:
    inside = draw.choice((16, 32, 64))
    return nn.ConvTranspose2d(inside, inside // 2, 2, 2), (_images(draw, inside, (4, 8, 16, 24), (1, 2, 4)),)


def _norm(draw: random.Random) -> Built:
    if draw.random() < 0.5:
        width = draw.choice((64, 128, 256, 512))
        return nn.LayerNorm(width), (torch.randn(draw.choice((1, 4, 8)), draw.choice((16, 64, 256)), width),)
    channels = draw.choice((8, 16, 32, 64, 128))
    norm = nn.BatchNorm2d(channels) if draw.random() < 0.7 else nn.GroupNorm(8, channels)
    return norm, (_images(draw, channels, (4, 8, 16, 32, 48), (1, 2, 4, 8)),)


def _pool(draw: random.Random) -> Built:
    kinds = (
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.MaxPool2d(3, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )
    return draw.choice(kinds), (_images(draw, draw.choice((8, 32, 64)), (8, 16, 32, 48), (1, 2, 4, 8)),)


def _attention(draw: random.Random) -> Built:
    heads = draw.choice((2, 4, 8))
    width = heads * draw.choice((16, 24, 32, 48))
    x = torch.randn(draw.choice((1, 2, 4, 8)), draw.choice((16, 32, 64, 96, 128)), width)
    return Attention(width, heads, fused=draw.random() < 0.5), (x,)


def _words(draw: random.Random) -> Built:
    rows, width = draw.choice((500, 2000, 8000)), draw.choice((32, 64, 128, 256))
    return nn.Embedding(rows, width), (torch.randint(0, 500, (draw.choice((1, 4, 8)), draw.choice((16, 64, 128)))),)


def _recurrent(draw: random.Random) -> Built:
    width, inside = draw.choice((32, 64, 96, 128, 192, 256)), draw.choice((32, 64, 128))
    inner = draw.choice((nn.LSTM, nn.GRU, nn.RNN))(inside, width, batch_first=True)
    return Last(inner), (torch.randn(draw.choice((2, 4, 8, 16, 32)), draw.choice((8, 16, 32, 64)), inside),)


def _joined(draw: random.Random) -> Built:
    branches: list[nn.Module] = [nn.Identity() for _ in range(draw.randint(2, 4))]
    made: nn.Module = Joined(branches) if draw.random() < 0.5 else Sum(nn.Dropout(0.1))
    return made, (_images(draw, draw.choice((8, 32, 64)), (8, 16, 32, 48), (1, 2, 4, 8)),)


def _classes(draw: random.Random) -> Built:
    width = draw.choice((10, 200, 2000))
    return Sum(nn.Softmax(-1)), (torch.randn(draw.choice((16, 128, 1024)), width),)


SINGLES: Final[tuple[Maker, ...]] = (
    _linear,
    _convolution,
    _convolution,
    _transposed,
    _norm,
    _norm,
    _map,
    _pool,
    _attention,
    _words,
    _recurrent,
    _recurrent,
    _joined,
    _classes,
)


def single(draw: random.Random) -> Built:
    """One operator, or one layer, with its loss and its optimiser."""
    return draw.choice(SINGLES)(draw)


FAMILIES: Final[Mapping[str, Maker]] = {
    "mlp": mlp,
    "plain": plain,
    "residual": residual,
    "depthwise": depthwise,
    "branching": branching,
    "unet": unet,
    "transformer": transformer,
    "recurrent": recurrent,
    "mixer": mixer,
}
"""Name of a family of whole networks -> function that makes a member."""
ALL: Final[Mapping[str, Maker]] = {**FAMILIES, SINGLE: single}


LOSSES: Final = {SINGLE: ("sum", "sum", "mse"), "unet": ("mse",), "": ("cross-entropy", "mse")}
"""Family -> losses that its members may have; the empty name is the default."""


def case(family: str, number: int) -> Case:
    """The case of a family and a number; sets PyTorch's random state.

    Raises:
        UnknownNameError: no family has that name.
    """
    if family not in ALL:
        raise UnknownNameError("family of graphs", family, ALL)
    draw = random.Random(f"{family}:{number}")
    torch.manual_seed(draw.randrange(2**31))
    module, inputs = ALL[family](draw)
    losses = LOSSES.get(family, LOSSES[""])
    loss = draw.choice(losses) if len(losses) > 1 else losses[0]
    if family == SINGLE and inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    return Case(
        family=family, number=number, module=module, inputs=inputs, loss=loss, optimizer=draw.choice(OPTIMIZERS)
    )
