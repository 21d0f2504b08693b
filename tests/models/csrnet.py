"""CSRNet, a counter of crowds: the first ten convolutions of VGG-16 and six dilated ones.

Source: Li, Zhang, Chen, CVPR 2018, arXiv 1802.10062, configuration B: dilation 2 in the back end.
"""

import torch
from torch import nn

FRONT = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512)
BACK = (512, 512, 512, 256, 128, 64)
DILATION = 2


def stack(widths, channels, dilation):
    layers = []
    for width in widths:
        if width == "M":
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=dilation, dilation=dilation), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers), channels


class CSRNet(nn.Module):
    """A density map of an image, an eighth as high and wide."""

    def __init__(self, front=FRONT, back=BACK, dilation=DILATION):
        super().__init__()
        self.front, channels = stack(front, 3, 1)
        self.back, channels = stack(back, channels, dilation)
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x):
        return self.head(self.back(self.front(x)))


def csrnet(batch: int = 1, side: int = 512):
    """The whole network and images of side x side pixels."""
    return CSRNet().eval(), (torch.zeros(batch, 3, side, side),)


def csrnet_back(batch: int = 1, side: int = 64):
    """The six dilated convolutions and the head, on what the front end makes of images of eight times the side."""
    back, channels = stack(BACK, 512, DILATION)
    return nn.Sequential(*back, nn.Conv2d(channels, 1, 1)).eval(), (torch.zeros(batch, 512, side, side),)


def csrnet_small(batch: int = 2, side: int = 64):
    """The same shape of network with few channels, to be run in a test."""
    front = (4, "M", 8, "M", 8, "M", 16)
    return CSRNet(front, (16, 16, 8)).eval(), (torch.zeros(batch, 3, side, side),)
