"""The same arithmetic on numbers and on arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime import num

WHOLE = st.integers(-(2**40), 2**40)
PAIRS = [num.maximum, num.minimum]
DIVISIONS = [num.floor_div, num.ceil_div]


@given(WHOLE, WHOLE)
def test_extremes_of_numbers_and_arrays_agree(a, b):
    for function in PAIRS:
        assert function(np.array([a, b]), b).tolist() == [function(a, b), b]
        assert function(a, np.array([a, b])).tolist() == [a, function(a, b)]
    assert (num.maximum(a, b), num.minimum(a, b)) == (max(a, b), min(a, b))


@given(WHOLE, st.integers(1, 2**20))
def test_divisions(a, b):
    assert num.floor_div(a, b) * b <= a < (num.floor_div(a, b) + 1) * b
    assert (num.ceil_div(a, b) - 1) * b < a <= num.ceil_div(a, b) * b
    for function in DIVISIONS:
        assert function(np.array([a]), b).tolist() == [function(a, b)]
        assert function(a, np.array([float(b)])).tolist() == [function(a, b)]


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 16))
def test_soft_maximum_lies_between_the_larger_and_the_sum(a, b, sharpness):
    soft = num.soft_maximum(a, b, sharpness)
    assert max(a, b) * (1 - 1e-12) <= soft <= (a + b) * (1 + 1e-12)
    assert num.soft_maximum(np.array([a]), b, sharpness) == pytest.approx(soft, rel=1e-12)


@given(st.floats(1e-3, 1e3))
def test_functions_of_one_number_agree_on_arrays(x):
    for function in (num.floor, num.ceil, num.exp, num.log2):
        if function is not num.exp or x < 700:
            assert function(np.array([x])).tolist() == pytest.approx([function(x)], rel=1e-12)


@given(st.integers(0, 2**60), st.integers(1, 2**30))
def test_a_size_is_rounded_up_to_the_next_multiple(size, multiple):
    whole = num.round_up(size, multiple)
    assert whole % multiple == 0 and 0 <= whole - size < multiple


def test_numbers_stay_numbers():
    assert type(num.maximum(1, 2)) is type(num.where(True, 1, 2)) is type(num.ceil_div(3, 2)) is int
    assert type(num.log2(8)) is type(num.exp(0)) is float
    assert num.where(np.array([True, False]), 1.0, 2.0).tolist() == [1.0, 2.0]
    assert num.where(True, np.array([1.0]), 2.0).tolist() == [1.0]
    assert num.where(False, 1.0, 2.0) == 2.0


@given(st.integers(1, 5000))
def test_divisors(n):
    assert num.divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(("n", "count"), [(1, 1), (2**20, 21), (720720, 240), (999983, 2)])
def test_numbers_of_divisors(n, count):
    assert len(num.divisors(n)) == count
