"""Layouts are chosen exactly: the choice is the best of all, on random problems and on graphs of operators."""

import itertools
import math
import random

import pytest

pytest.importorskip("scipy")

from steptime.rewrite.layout.problem import Assignment, Need, Option, Slot
from steptime.rewrite.layout.solver import solve


def random_problem(seed, vertices, layouts, *, reach=3, exact=False):
    """Operators that read the last few results, any of some layouts or at a price any other."""
    draw = random.Random(seed)
    made, slots = [], []
    for vertex in range(vertices):
        read = [draw.randrange(max(0, vertex - reach), vertex) for _ in range(min(vertex, draw.randint(1, 2)))]
        options = []
        for _ in range(layouts if exact else draw.randint(1, layouts)):
            needs = []
            for slot in read:
                allowed = frozenset(draw.sample(range(layouts), draw.randint(1, layouts - 1)))
                soft = draw.random() < 0.3
                needs.append(Need(slot, allowed, float(draw.randint(1, 9)) if soft else math.inf))
            options.append(Option(float(draw.randint(0, 9)), (draw.randrange(layouts),), tuple(needs)))
        made.append(tuple(options))
        slots.append(Slot(vertex, 0, tuple(float(draw.randint(1, 9)) for _ in range(layouts))))
    return Assignment(vertices=tuple(made), slots=tuple(slots))


def least(problem):
    return min(problem.total(choice) for choice in itertools.product(*(range(len(o)) for o in problem.vertices)))


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_the_choice_is_the_best_of_all(size):
    for seed in range(60):
        problem = random_problem(seed, size, 3)
        found = solve(problem)
        assert found.cost == pytest.approx(least(problem)) == pytest.approx(found.bound)
        assert problem.total(found.choice) == found.cost


def test_a_conversion_is_paid_once_for_all_readers():
    reader = (Option(0.0, (), (Need(0, frozenset({1})),)),)
    problem = Assignment(vertices=((Option(0.0, (0,)),), reader, reader, reader), slots=(Slot(0, 0, (5.0, 5.0)),))
    assert solve(problem).cost == 5.0
    across = (Option(0.0, (), (Need(0, frozenset({1}), 2.0),)),)
    two = Assignment(vertices=((Option(0.0, (0,)),), across, across), slots=problem.slots)
    assert solve(two).cost == 4.0  # reading across twice is cheaper than the copy
    three = Assignment(vertices=((Option(0.0, (0,)),), across, across, across), slots=problem.slots)
    assert solve(three).cost == 5.0


def test_large_problems_are_proved():
    problem = random_problem(1, 200, 3, exact=True)
    found = solve(problem)
    assert found.bound == pytest.approx(found.cost)
    draw = random.Random(0)
    for _ in range(200):
        other = list(found.choice)
        other[draw.randrange(200)] = draw.randrange(3)
        assert problem.total(other) >= found.cost - 1e-9
