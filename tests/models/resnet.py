"""Residual convolution nets: ResNet-50 as in arXiv 1512.03385 (stride in the 3 x 3), a small one, a depthwise one."""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


def convolution(inside, outside, kernel, stride=1, groups=1):
    """A convolution without bias and its batch norm."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, padding, groups=groups, bias=False), nn.BatchNorm2d(outside)
    )


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 with a shortcut; the output is four times as wide as the middle."""

    def __init__(self, inside, middle, stride, groups=1):
        super().__init__()
        self.reduce = convolution(inside, middle, 1)
        self.spatial = convolution(middle, middle, 3, stride, groups)
        self.expand = convolution(middle, 4 * middle, 1)
        same = stride == 1 and inside == 4 * middle
        self.shortcut = nn.Identity() if same else convolution(inside, 4 * middle, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.reduce(x))
        y = self.relu(self.spatial(y))
        return self.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, pooling and a classifier."""

    def __init__(self, blocks=(3, 4, 6, 3), width=64, classes=1000, groups=1):
        super().__init__()
        self.stem = convolution(3, width, 7, 2)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        stages, inside = [], width
        for i, count in enumerate(blocks):
            middle = width * 2**i
            for j in range(count):
                stages.append(Bottleneck(inside, middle, 2 if i and not j else 1, groups))
                inside = 4 * middle
        self.stages = nn.Sequential(*stages)
        self.average, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(inside, classes)

    def forward(self, x):
        x = self.stages(self.pool(self.relu(self.stem(x))))
        return self.head(self.average(x).flatten(1))


def resnet50(batch=2, pixels=224):
    """ResNet-50 for ImageNet: 25,557,032 parameters."""
    return ResNet(), (torch.randn(batch, 3, pixels, pixels),)


def resnet_small(batch=2, pixels=64):
    """The same blocks, one a stage and narrow."""
    return ResNet(blocks=(1, 1, 1, 1), width=16, classes=10), (torch.randn(batch, 3, pixels, pixels),)


def mobile(batch=2, pixels=32, width=16):
    """Depthwise and pointwise convolutions, and grouped ones, with ReLU6."""
    layers = [convolution(3, width, 3, 2), nn.ReLU6()]
    for inside, outside, stride in ((width, 2 * width, 1), (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)):
        layers += [convolution(inside, inside, 3, stride, inside), nn.ReLU6()]
        layers += [convolution(inside, outside, 1), nn.ReLU6()]
    layers += [convolution(4 * width, 4 * width, 5, 1, 4), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * width, 10)), (torch.randn(batch, 3, pixels, pixels),)
