"""CSRNet (arXiv 1802.10062): ten convolutions of VGG-16 with three pools, then six dilated ones and a density map."""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

FRONT = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512)
"""Channels; 0 is a pool."""
BACK = (512, 512, 512, 256, 128, 64)


def stack(inside, channels, dilation):
    """3 x 3 convolutions with ReLU, and pools."""
    layers = []
    for outside in channels:
        if outside:
            layers += [nn.Conv2d(inside, outside, 3, padding=dilation, dilation=dilation), nn.ReLU(inplace=True)]
            inside = outside
        else:
            layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers)


class CsrNet(nn.Module):
    """Front end, dilated back end, 1 x 1."""

    def __init__(self, divisor=1):
        super().__init__()
        front, back = ([c // divisor for c in channels] for channels in (FRONT, BACK))
        self.frontend = stack(3, front, 1)
        self.backend = stack(front[-1], back, 2)
        self.output = nn.Conv2d(back[-1], 1, 1)

    def forward(self, x):
        return self.output(self.backend(self.frontend(x)))


def csrnet(batch=1, pixels=224, divisor=1):
    """CSRNet B: dilation 2 throughout the back end, 16,263,489 parameters; ``divisor`` narrows it."""
    return CsrNet(divisor), (torch.randn(batch, 3, pixels, pixels),)


def csrnet_back(batch=1, pixels=64):
    """The six dilated convolutions and the head, on what the front end makes of images of eight times the side."""
    back = nn.Sequential(stack(512, BACK, 2), nn.Conv2d(BACK[-1], 1, 1))
    return back.eval(), (torch.zeros(batch, 512, pixels, pixels),)
