"""Random shapes and values never break a shipped rule: both sides in floats of 64 bits, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from steptime_lab.rules.domains import Floats
from steptime_lab.rules.rule import Rule, assignments, unified
from steptime_lab.rules.store import shipped
from steptime_lab.rules.verify_random import both, shapes_at

#: Floats close to overflow and functions of large arguments are no part of a rule: values are small.
SCALE = 0.5


def difference(rule: Rule, at: dict[str, int], seed: int, lead: tuple[int, ...] = ()) -> float:
    """Largest difference of both sides, relative to the largest element."""
    rng = np.random.default_rng(seed)
    values = {name: SCALE * rng.standard_normal(shape) for name, shape in shapes_at(rule, at, lead).items()}
    worst = 0.0
    with np.errstate(all="ignore"):
        for a, b in both(rule, Floats(), values, at):
            assert a.shape == b.shape, (rule, at)
            away = np.abs(a - b)[np.isfinite(a) & np.isfinite(b)]
            scale = max(1.0, float(np.max(np.abs(np.where(np.isfinite(a), a, 0.0)), initial=0.0)))
            worst = max(worst, float(away.max(initial=0.0)) / scale)
    return worst


@pytest.mark.slow
def test_no_random_shape_breaks_a_shipped_rule() -> None:
    broken = []
    for number, rule in enumerate(shipped().rules):
        for seed, at in enumerate(assignments(rule, 2, 7919 + number, 7)):
            if difference(rule, at, seed + number, (2,) if rule.lifts and seed else ()) > 1e-7:
                broken.append((rule.name, at))
    assert broken == []


def test_the_check_sees_a_broken_rule() -> None:
    rule = next(each for each in shipped().rules if each.name == "matmul-transposed")
    wrong = unified(Rule(name="wrong", variables=rule.variables, sources=rule.sources,
                         targets=(rule.targets[0].children[0].children[0],)))  # fmt: skip
    assert wrong is not None
    assert any(difference(wrong, at, 1) > 1e-3 for at in assignments(wrong, 5, 1))


def test_every_shipped_rule_has_a_whole_certificate() -> None:
    found = shipped()
    assert [rule.name for rule in found.rules if not rule.certificate.complete] == []
    assert len({rule.name for rule in found.rules}) == len(found.rules)
    generic = sum(rule.certificate.generic for rule in found.rules)
    assert generic >= 0.8 * len(found.rules)
    assert set(found.provenance) >= {"version", "seed", "operators"}
