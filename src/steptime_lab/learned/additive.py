r"""The additive predictor: a step is the sum of its pieces, each at its analytic time times a learned factor.

$$\hat t = \Big(\big(\textstyle\sum_i n_i\, t_i\, e^{h(x_i)}\big)^p
  + \big(\textstyle\sum_i n_i\, \tau_i\, e^{g_i}\big)^p\Big)^{1/p}$$

with $n_i$ calls of piece $i$, $t_i$ its analytic time on the device and $\tau_i$ that of the host (s), $x_i$ its
features (:func:`steptime.estimate.learned.described`), $h$ a number for each operator plus a small network, $g$ a
number for each kind of issuer and $p$ the exponent that combines device and host. Where several machines were measured,
each card and its host have a factor of their own. Only whole graphs are timed; the factors of their pieces are fitted
to these times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from steptime.cost.host import IN_TURN
from steptime.estimate.learned import ANY, ISSUERS, LIMIT, Correction
from steptime.num import Array
from steptime_lab.learned.data import Rows

HIDDEN: Final = 32
"""Width of both hidden layers."""
EPOCHS, BATCH, RATE = 160, 64, 3e-3
"""Passes over the graphs, graphs of a step of the optimiser, and its largest rate."""
PRIOR: Final = 0.05
"""Weight of the mean square of the network's output in the loss: factors without evidence stay near 1."""
OFFSETS: Final = 0.002
"""Weight of the mean square of the operators' numbers in the loss."""
HOST: Final = 0.002
"""Weight of the mean square of the host's factors in the loss; steps that wait for the device do not determine them."""
CARDS: Final = 0.02
"""Weight of the mean square of the factors of cards in the loss: clocks, power, the host's processor."""
FORGOTTEN: Final = 0.15
"""Share of operators whose name the network does not see in a step, so that it learns from their features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of fitting the network."""

    hidden: int = HIDDEN
    epochs: int = EPOCHS
    batch: int = BATCH
    rate: float = RATE
    prior: float = PRIOR
    offsets: float = OFFSETS
    cards: float = CARDS
    forgotten: float = FORGOTTEN
    seed: int = 0


class Fit:
    """A network under training."""

    def __init__(self, rows: Rows, options: Options) -> None:
        self.rows, self.options = rows, options
        self.operators = tuple(sorted(set(rows.operators)))
        self.centre, spread = rows.numbers.mean(0), rows.numbers.std(0)
        self.spread = np.where(spread > 1e-6, spread, 1.0)
        self.low, self.high = rows.numbers.min(0), rows.numbers.max(0)
        torch.manual_seed(options.seed)
        size = len(self.centre) + len(self.operators)
        self.network = nn.Sequential(
            nn.Linear(size, options.hidden),
            nn.Tanh(),
            nn.Linear(options.hidden, options.hidden),
            nn.Tanh(),
            nn.Linear(options.hidden, 1),
        )
        last = self.network[-1]
        nn.init.zeros_(last.weight)  # type: ignore[arg-type]
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        self.offsets = nn.Parameter(torch.zeros(len(self.operators)))
        self.host = nn.Parameter(torch.zeros(len(ISSUERS)))
        self.machines = tuple(sorted(set(rows.machines)))
        self.cards = nn.Parameter(torch.zeros(len(self.machines), 2))

    def run(self) -> Correction:
        """Fit the network."""
        options, rows = self.options, self.rows
        inputs = torch.tensor(self._inputs(), dtype=torch.float32)
        base = torch.tensor(rows.device_s * rows.count, dtype=torch.float32)
        host = torch.tensor(rows.host_s * rows.count, dtype=torch.float32)
        issuer = torch.tensor(rows.issuer)
        machine = torch.tensor([self.machines.index(name) for name in rows.machines])
        goal = torch.tensor(np.log(rows.measured_s), dtype=torch.float32)
        order = np.argsort(rows.graph, kind="stable")
        starts = np.searchsorted(rows.graph[order], np.arange(len(goal) + 1))
        draw = np.random.default_rng(options.seed)
        steps = options.epochs * -(-len(goal) // options.batch)
        optimizer = torch.optim.AdamW(
            [*self.network.parameters(), self.offsets, self.host, self.cards], lr=options.rate, weight_decay=1e-3
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=steps)
        for _ in range(options.epochs):
            shuffled = draw.permutation(len(goal))
            for begin in range(0, len(goal), options.batch):
                chosen = shuffled[begin : begin + options.batch]
                picked = np.concatenate([order[starts[g] : starts[g + 1]] for g in chosen])
                owner = np.repeat(np.arange(len(chosen)), [starts[g + 1] - starts[g] for g in chosen])
                card = self.cards[machine[chosen]][owner].exp() if len(self.machines) > 1 else torch.ones(len(owner), 2)
                issued = host[picked] * self.host.exp()[issuer[picked]] * card[:, 1]
                parts = (base[picked] * card[:, 0], issued, torch.tensor(owner))
                loss = self._loss(inputs[picked], parts, goal[chosen])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        return self._made()

    def _inputs(self) -> Array:
        rows = self.rows
        places = {name: number for number, name in enumerate(self.operators)}
        own = np.zeros((len(rows.operators), len(self.operators)))
        own[np.arange(len(own)), [places[name] for name in rows.operators]] = 1.0
        return np.concatenate([(rows.numbers - self.centre) / self.spread, own], axis=1)

    def _loss(self, inputs: Tensor, parts: tuple[Tensor, Tensor, Tensor], goal: Tensor) -> Tensor:
        names, (base, host, owner) = len(self.operators), parts
        kept = (torch.rand(len(inputs), 1) >= self.options.forgotten).float()
        own = inputs[:, -names:] * kept
        output = self.network(torch.cat([inputs[:, :-names], own], 1))[:, 0]
        factor = LIMIT * torch.tanh((output + own @ self.offsets) / LIMIT)
        total = torch.zeros(len(goal)).index_add(0, owner, base * factor.exp())
        issued = torch.zeros(len(goal)).index_add(0, owner, host)
        p = self.rows.sharpness
        scale = torch.maximum(total, issued).detach()
        combined = scale.log() + ((total / scale) ** p + (issued / scale) ** p).log() / p
        error = nn.functional.smooth_l1_loss(combined, goal, beta=0.05)
        penalty = self.options.prior * (output**2).mean() + self.options.offsets * (self.offsets**2).mean()
        penalty = penalty + self.options.cards * (self.cards**2).mean() + HOST * (self.host**2).mean()
        return error + penalty  # type: ignore[no-any-return]

    def _cards(self) -> dict[str, tuple[float, float]]:
        """Log factors of each card and its host, and their mean for cards that were not measured."""
        if len(self.machines) == 1:
            return {}
        own = self.cards.detach().numpy().astype(np.float64)
        every = [*zip(self.machines, own, strict=True), (ANY, own.mean(0))]
        return {name: (float(card[0]), float(card[1])) for name, card in every}

    def _made(self) -> Correction:
        layers = tuple(
            (layer.weight.detach().numpy().T.astype(np.float64), layer.bias.detach().numpy().astype(np.float64))
            for layer in self.network
            if isinstance(layer, nn.Linear)
        )
        return Correction(
            name="",
            operators=self.operators,
            centre=self.centre,
            spread=self.spread,
            low=self.low,
            high=self.high,
            layers=layers,
            offsets=self.offsets.detach().numpy().astype(np.float64),
            host=self.host.detach().numpy().astype(np.float64),
            machines=self._cards(),
            workspaces={},
            of_processor=self.rows.sharpness == IN_TURN,
            band=(1.0, 1.0),
            error=0.0,
            provenance={},
        )


def fitted(rows: Rows, options: Options | None = None) -> Correction:
    """The correction fitted to measured graphs."""
    return Fit(rows, options or Options()).run()


def predicted_s(correction: Correction, rows: Rows) -> Array:
    """Time of each graph under a correction."""
    factors = np.zeros(len(rows.operators))
    names = np.array(rows.operators, object)
    for name in sorted(set(rows.operators)):
        chosen = names == name
        factors[chosen] = correction.log_factor(name, tuple(rows.numbers[chosen].T))
    cards = np.array([correction.card(name) for name in rows.machines])[rows.graph]
    return rows.total_s(np.exp(factors + cards[:, 0]), np.exp(correction.host[rows.issuer] + cards[:, 1]))
