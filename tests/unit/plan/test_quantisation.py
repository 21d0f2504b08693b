"""Bytes of quantised tensors by hand: per tensor, channel and group, NF4 with double quantisation, 8-bit states."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.cost.quantisation import (
    dequantised_bytes,
    doubly_quantised_element_bytes,
    element_bytes,
    groups_of,
    nf4_element_bytes,
    quantised_bytes,
    state_8bit_bytes,
    state_8bit_element_bytes,
)
from steptime.plan.job import PRECISIONS, QLORA_BYTES

ROWS, COLUMNS = 4096, 1024
ELEMENTS = ROWS * COLUMNS


@pytest.mark.parametrize(
    ("group", "groups", "size"),
    [
        (ELEMENTS, 1, 4194304 + 5),  # per tensor: an fp32 scale and an int8 zero point
        (COLUMNS, 4096, 4194304 + 4096 * 5),  # per channel
        (128, 32768, 4194304 + 32768 * 5),  # per group
    ],
)
def test_int8_by_granularity(group: int, groups: int, size: float) -> None:
    assert groups_of(ELEMENTS, group) == groups
    assert quantised_bytes(ELEMENTS, 8, groups, 4.0, 1.0) == size


def test_a_last_group_that_is_not_full_has_a_scale_too() -> None:
    assert groups_of(1025, 256) == 5
    assert quantised_bytes(1025, 4, 5) == 512.5 + 20


def test_elements_with_their_share_of_scales() -> None:
    assert element_bytes(8, 128, 4.0, 1.0) == pytest.approx(quantised_bytes(ELEMENTS, 8, 32768, 4.0, 1.0) / ELEMENTS)
    assert 8 * element_bytes(4, 64) == 4.5
    assert 8 * element_bytes(4, 32, 1.0) == 4.25  # one byte per 32: MX formats


def test_nf4_has_the_bits_of_the_paper() -> None:
    """0.5 bits of fp32 scales per 64 weights become 8 / 64 + 32 / (64 * 256) = 0.127."""
    assert 8 * nf4_element_bytes() - 4 == pytest.approx(0.127, abs=5e-5)
    assert doubly_quantised_element_bytes(4, 64, 8, 256) < element_bytes(4, 64)
    assert pytest.approx(nf4_element_bytes(), rel=1e-4) == QLORA_BYTES


def test_8bit_states() -> None:
    assert state_8bit_bytes(10 * 256) == 2560 + 40
    assert state_8bit_bytes(10 * 256 + 1) == 2561 + 44
    assert state_8bit_bytes(4096, 2048) == 4096 + 8
    assert state_8bit_element_bytes() == 1 + 4 / 256


def test_formulas_take_arrays() -> None:
    elements = np.array([100, 1000, 1024])
    assert state_8bit_bytes(elements).tolist() == [float(state_8bit_bytes(int(n))) for n in elements]


def test_widening_reads_narrow_and_writes_wide() -> None:
    assert dequantised_bytes(8, nf4_element_bytes(), 2.0) == pytest.approx(8 * 2.515869140625)


def test_narrow_recipes_use_the_same_formula() -> None:
    assert PRECISIONS["mxfp8"].quantised_bytes == 1 + 1 / 32
    assert PRECISIONS["nvfp4"].quantised_bytes == 0.5 + 1 / 16
