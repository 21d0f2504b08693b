"""Corrected mutants of convolutions of any geometry: exact modulo a prime at any sizes, and on tensors in fp64."""

from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rewritten import nn, rewritten  # noqa: E402
from steptime.errors import UserError  # noqa: E402
from steptime_lab.rules.mutants.correct import corrected  # noqa: E402
from steptime_lab.rules.mutants.generate import Trial, mutants  # noqa: E402
from steptime_lab.rules.mutants.passes import MUTANT_PASSES  # noqa: E402
from steptime_lab.rules.mutants.programs import Convolution, convolution  # noqa: E402
from steptime_lab.rules.mutants.regions import check_masks, regions  # noqa: E402

GEOMETRIES = [
    Convolution(kernel=(3, 3), pad=1, bias=True),
    Convolution(kernel=(3, 3), pad=4, dilation=2),
    Convolution(kernel=(2, 3), pad=1, dilation=3),
    Convolution(kernel=(1, 1), bias=True),
    Convolution(kernel=(3, 1), pad=0, groups=2),
]


def sizes(rng, count):
    names = {"n": 5, "c": 4, "h": 19, "v": 17, "o": 4}
    return [{name: int(rng.integers(1 + (name == "n"), top)) for name, top in names.items()} for _ in range(count)]


@pytest.mark.quick("Convolution(kernel=(3, 1), pad=0, dilation=1, groups=2, bias=False)")
@pytest.mark.parametrize("given", GEOMETRIES, ids=str)
def test_corrected_mutants_differ_nowhere_modulo_a_prime(given):
    rng, tried = np.random.default_rng(given.pad), 0
    for each in corrected(given, boxes=True):
        needs = each.rule.needs()
        fitting = [at for at in sizes(rng, 60) if all(need.holds(at) for need in needs)]
        tried += len(fitting)
        trial = Trial(each.program, tuple(fitting), seed=7)
        assert all(bool(mask.all()) for mask in trial.masks(each.rule.targets[0])), each.path
    assert tried > 30


@pytest.mark.quick("Convolution(kernel=(3, 3), pad=1, dilation=1, groups=1, bias=False)")
@pytest.mark.parametrize(
    "given", [Convolution(pad=1), Convolution(pad=2, dilation=2), Convolution(kernel=(5, 5), pad=2)], ids=str
)
def test_boxes_say_what_comparing_every_element_says(given):
    rng = np.random.default_rng(1)
    found = [regions(mutant) for mutant in islice((m for m in mutants(convolution(given)) if not m.exact), 6)]
    assert any(found)
    for each in filter(None, found):
        reach = max(given.halo)
        large = [at | {n: at[n] + 2 * reach for n in "hv"} for at in sizes(rng, 20)]
        assert check_masks(each, tuple(large)), str(each.mutant)


@pytest.mark.quick("2")
@pytest.mark.parametrize("seed", range(6))
def test_passes_keep_results_of_random_convolutions(seed):
    rng = np.random.default_rng(seed)
    groups, kernel, dilation = int(rng.choice([1, 1, 2])), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    pad = int(rng.integers(0, dilation * (kernel - 1) + 1))
    channels, filters = groups * rng.integers(1, 4), groups * rng.integers(1, 4)
    module = nn.Conv2d(channels, filters, kernel, padding=pad, dilation=dilation, groups=groups, bias=bool(seed % 2))
    high, wide = (dilation * (kernel - 1) + int(rng.integers(1, 9)) for _ in range(2))
    x = torch.randn(int(rng.integers(1, 4)), int(channels), high, wide)
    for each in MUTANT_PASSES:
        rewritten(lambda m, y: m.f(y), x, passes=[each.name], everything=True, f=module)


def test_a_kernel_of_nothing_is_refused():
    with pytest.raises(UserError):
        Convolution(kernel=(0, 3))
