"""Problems for the tests of equality saturation."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from rewritten import H100  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.fused import FusedTimer  # noqa: E402
from steptime.rewrite.pricing import Prices  # noqa: E402
from steptime.rewrite.saturation.moves import rule_moves  # noqa: E402
from steptime.rewrite.saturation.search import saturated  # noqa: E402
from steptime.rewrite.search.problem import CostModel, Problem  # noqa: E402


def problem(flow, moves=None, weights=None, limits=None):
    cost = CostModel(prices=Prices(FusedTimer(device=H100)), weights=weights or {"device_s": 1.0}, limits=limits or {})
    return Problem(flow=flow, moves=rule_moves() if moves is None else moves, cost=cost, on_cuda=True)


def solved(given, seconds=20.0):
    """The result of a problem, checked against its graph."""
    out = saturated(given, seconds)
    assert check(given.flow, out.found.flow).passed
    assert out.found.bound <= out.found.cost <= given.start
    return out
