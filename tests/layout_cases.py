"""Cost models for the tests of layouts."""

from steptime.rewrite.fused import FusedTimer
from steptime.rewrite.layout.model import Layouts
from steptime.rewrite.pricing import Prices
from steptime.rewrite.search.problem import CostModel, time_weights


def cost_model(flow, device, weights=None):
    prices = Prices(FusedTimer(device=device))
    return CostModel(prices=prices, weights=weights or time_weights(prices, flow))


def moved(flow, device):
    """Layouts at the cost of bytes alone: numbers that can be worked out by hand."""
    return Layouts.under(cost_model(flow, device, {"moved_bytes": 1.0}))
