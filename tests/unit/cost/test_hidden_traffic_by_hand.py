"""What shows of data-parallel traffic behind passes of 2 s a layer, against sums that can be made by hand."""

from __future__ import annotations

import pytest

from steptime.cost.data_parallel import exposed_buckets_s, exposed_gather_s, exposed_sharded_s, layers_per_bucket


@pytest.mark.parametrize(
    ("layers", "replicas_s", "shown"),
    [
        (
            5,
            0.0,
            1.5 + 3 + 3 * 5 + 1,
        ),  # gather beside the head; head's reduction and a gather; three of both; a reduction
        (2, 0.0, 1.5 + 3 + 1),
        (1, 0.0, 1.5),  # nothing to gather beside its only pass, and the head's reduction takes 1 s of 2
        (5, 1.0, 20.5 + 1),  # links and sums over replicas are each a part of the way
        (5, 9.0, 5 * 9 - 4 * 2),  # the sums over replicas are the longest way
    ],
)
def test_gathers_and_reductions_stall_a_backward_pass(layers: int, replicas_s: float, shown: float) -> None:
    """Gathers of 4 s, reductions of 3 s, the head's 1 s, the embedding's 0.5 s; passes of 2 s, that of the head 2.5."""
    found = exposed_sharded_s(3.0, 4.0, replicas_s, layers, 2.0, 2.5, 0.5, 1.0)
    assert found == pytest.approx(0.5 + 3.0 + shown)


def test_long_passes_hide_all_but_the_last_reduction_and_a_long_head() -> None:
    assert exposed_sharded_s(3.0, 4.0, 1.0, 5, 10.0, 4.0, 0.5, 1.0) == pytest.approx(0.5 + 3.0 + 1.0)
    assert exposed_sharded_s(3.0, 4.0, 0.0, 5, 10.0, 4.0, 0.5, 9.0) == pytest.approx(0.5 + 3.0 + (9 + 4 - 10))
    assert exposed_sharded_s(3.0, 4.0, 0.0, 1, 2.0, 2.0, 0.5, 9.0) == pytest.approx(0.5 + 3.0 + (4 - 2) + (9 - 2))
    assert exposed_sharded_s(3.0, 4.0, 9.0, 1, 2.0, 2.0, 0.5, 0.0) == pytest.approx(0.5 + 3.0 + (4 - 2) + 9)


@pytest.mark.parametrize(
    ("one_s", "layers", "head_s", "shown"), [(3.0, 4, 4.0, 3 + 3 * 1 + 2), (3.0, 1, 4.0, 3 + 2), (1.0, 4, 1.0, 1)]
)
def test_weights_of_one_layer_ahead(one_s: float, layers: int, head_s: float, shown: float) -> None:
    assert exposed_gather_s(one_s, layers, 2.0, 0.5, head_s) == pytest.approx(0.5 + shown)


@pytest.mark.parametrize(
    ("one_s", "layers", "bucket", "chunks", "head_s", "shown"),
    [
        (3.0, 8, 1, 1, 0.0, 3 + 7 * 2),
        (1.5, 6, 2, 1, 3.0, 3 + 4 * 0.5 + (3 - 2)),  # the head's gradients travel behind the first bucket's passes
        (0.5, 6, 1, 1, 4.0, 0.5 + (-5 * 0.5 + 3)),  # and are made up for by layers that send less than they hide
        (0.5, 8, 1, 1, 2.0, 0.5),
        (3.0, 8, 1, 2, 0.0, 8 * 3 - 1 * 2 * 4),  # the second chunk has two passes more of the first to hide behind
        (3.0, 9, 1, 3, 0.0, 9 * 3 - 2 * 2 * 3),
        (1.2, 8, 1, 2, 0.0, 1.2 + 3 * 0.2),  # the first chunk is the longer way
    ],
)
def test_buckets_of_chunks(one_s: float, layers: int, bucket: int, chunks: int, head_s: float, shown: float) -> None:
    """Two stages, 0.25 s for the embedding's gradients; all other times in units of a pass, which takes 2 s."""
    assert exposed_buckets_s(2 * one_s, layers, 2.0, bucket, chunks, 2, 0.25, 2 * head_s) == pytest.approx(
        0.25 + 2 * shown
    )


def test_layers_without_parameters_travel_as_one() -> None:
    assert layers_per_bucket(0.0, 8, 32) == 32
    assert layers_per_bucket(1e7, 8, 0) == 1
