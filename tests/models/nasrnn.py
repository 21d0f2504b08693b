"""The recurrent cell that architecture search found (Zoph and Le, arXiv 1611.01578), as TASO has it.

Eight products of the input and eight of the state; their sums go through the cell's tree of element-wise operators.
"""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

GATES = 8


class Cell(nn.Module):
    """One step: ``t_i = x W_i + h V_i`` for eight gates, then the tree."""

    def __init__(self, inside, hidden):
        super().__init__()
        self.of_input = nn.ParameterList(nn.Parameter(torch.randn(inside, hidden) / inside**0.5) for _ in range(GATES))
        self.of_state = nn.ParameterList(nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5) for _ in range(GATES))

    def forward(self, x, h):
        t = [x @ w + h @ v for w, v in zip(self.of_input, self.of_state, strict=True)]
        first = torch.relu(t[0]) + torch.sigmoid(t[3])
        second = torch.sigmoid(t[1]) + torch.tanh(t[2])
        third = torch.sigmoid(t[4]) * torch.tanh(t[5])
        fourth = torch.sigmoid(t[6]) * torch.relu(t[7])
        left = torch.tanh(torch.sigmoid(second) + torch.tanh(third))
        right = torch.tanh(torch.tanh(first) * torch.tanh(fourth))
        return torch.tanh(left * right)


class NasRnn(nn.Module):
    """The cell over the steps of a sequence, with one set of weights; time is the first dim."""

    def __init__(self, inside, hidden):
        super().__init__()
        self.cell, self.hidden = Cell(inside, hidden), hidden

    def forward(self, xs):
        h = xs.new_zeros(xs.shape[1], self.hidden)
        for x in xs.unbind(0):
            h = self.cell(x, h)
        return h


def nasrnn(steps=10, hidden=512, batch=1):
    """A sequence of inputs as wide as the state; TASO's example has 5 steps of 512."""
    return NasRnn(hidden, hidden), (torch.randn(steps, batch, hidden),)
