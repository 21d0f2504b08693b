"""The allocator's simulation gives the numbers that PyTorch's rules give by hand."""

from __future__ import annotations

import pytest

from hand_programs import MIB, small_step, step_of
from steptime.captured.graph import Program
from steptime.captured.graph.allocator import AllocatorSettings, CachingAllocator, OutOfMemoryError
from steptime.captured.graph.placement import place
from steptime.errors import UserError


def sizes(allocator: CachingAllocator) -> tuple[float, float]:
    return allocator.reserved_bytes / MIB, allocator.allocated_bytes / MIB


def test_small_blocks_share_segments_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    for expected in (2, 2, 4):
        allocator.malloc(MIB)
        assert allocator.reserved_bytes == expected * MIB
    assert [segment.small for segment in allocator.segments()] == [True, True]


def test_a_large_remainder_up_to_one_mebibyte_stays_with_the_block() -> None:
    allocator = CachingAllocator()
    allocator.malloc(3 * MIB)
    assert sizes(allocator) == (20, 3)
    allocator.malloc(16 * MIB)
    assert sizes(allocator) == (20, 20)
    allocator.malloc(11 * MIB)
    assert sizes(allocator) == (32, 32)
    allocator.malloc(12 * MIB + MIB // 2)
    assert sizes(allocator) == (46, 44.5)
    assert allocator.requested_bytes == 42.5 * MIB


def test_the_smallest_block_that_suffices_is_used_and_equal_ones_from_below() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30, 20)]
    addresses = [block.address for block in blocks if block is not None]
    for block in blocks:
        allocator.free(block)
    again = [allocator.malloc(20 * MIB), allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)]
    assert [block.address for block in again if block is not None] == [addresses[1], addresses[3], addresses[2]]
    assert allocator.reserved_bytes == 110 * MIB


def test_neighbours_that_are_free_become_one_block() -> None:
    allocator = CachingAllocator()
    a, b, c = (allocator.malloc(4 * MIB) for _ in range(3))
    for block in (a, c, b):
        allocator.free(block)
    (segment,) = allocator.segments()
    assert [(block.size_bytes, block.allocated) for block in segment.blocks] == [(20 * MIB, False)]


def test_an_expandable_segment_grows_by_pages_where_native_segments_do_not() -> None:
    expandable, native = CachingAllocator(AllocatorSettings(expandable_segments=True)), CachingAllocator()
    for allocator in (expandable, native):
        for size in (3, 30):
            allocator.malloc(size * MIB)
    assert sizes(native) == (50, 33)
    assert sizes(expandable) == (40, 33)
    assert [len(segment.blocks) for segment in expandable.segments()] == [3]


def test_a_hole_is_preferred_to_the_end_that_can_grow() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    hole, _ = allocator.malloc(10 * MIB), allocator.malloc(5 * MIB)
    allocator.free(hole)
    block = allocator.malloc(4 * MIB)
    assert hole is not None and block is not None
    assert block.address == allocator.segments()[0].address


def test_what_is_cached_goes_back_to_the_driver_before_memory_runs_out() -> None:
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=20 * MIB))
    allocator.free(allocator.malloc(12 * MIB))
    kept = allocator.malloc(14 * MIB)
    assert sizes(allocator) == (14, 14)
    assert [e.action for e in allocator.events if e.action.startswith("segment")] == [
        "segment_alloc", "segment_free", "segment_alloc",
    ]  # fmt: skip
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(12 * MIB)
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (12 * MIB, 6 * MIB)
    assert allocator.events[-1].action == "oom"
    allocator.free(kept)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(kept)


def test_pages_of_an_expandable_segment_go_back_and_come_again_at_the_same_place() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True, capacity_bytes=100 * MIB))
    a, b = allocator.malloc(50 * MIB), allocator.malloc(30 * MIB)
    allocator.free(a)
    allocator.release_cached()
    assert allocator.reserved_bytes == 40 * MIB
    assert [len(segment.blocks) for segment in allocator.segments()] == [2]
    again = allocator.malloc(50 * MIB)
    assert again is not None and b is not None
    assert again.end == b.address
    assert allocator.reserved_bytes == 80 * MIB


def test_blocks_above_the_limit_of_splitting_are_used_whole_or_not_at_all() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_size_bytes=40 * MIB))
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(25 * MIB)
    assert sizes(allocator) == (76, 26)
    allocator.malloc(42 * MIB)
    assert sizes(allocator) == (76, 76)


@pytest.mark.parametrize(
    "settings", [{"max_split_size_bytes": 20 * MIB}, {"roundup_power2_divisions": 3}, {"capacity_bytes": 0}]
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UserError):
        AllocatorSettings(**settings)


def test_a_step_by_hand() -> None:
    placed = place(small_step(), steps=1)
    assert (placed.requested_bytes / MIB).round(2).tolist() == [6.0, 11.0, 10.0, 10.0, 13.0, 9.0]
    assert placed.peak_requested_bytes == 13 * MIB + 1000
    assert placed.peak_allocated_bytes == 13 * MIB + 1024
    assert placed.peak_reserved_bytes == 22 * MIB
    assert placed.shortage is None


def test_states_are_made_by_the_first_step() -> None:
    program = small_step()
    placed = place(program, steps=2)
    first = next(event for event in placed.events if event.owner == 1 and event.action == "alloc")
    assert first.time == 4
    assert placed.requested_bytes.tolist() == place(program, steps=1).requested_bytes.tolist()
    with pytest.raises(UserError, match="1 to 16"):
        place(program, steps=0)


def test_states_in_what_activations_left_cost_a_further_segment() -> None:
    """12 MiB of activation, then a state of 12 MiB in its place: the second step needs 12 MiB more."""
    step = step_of([(12 * MIB, 0, 1)], 4)
    state = small_step().storages[1]
    update = small_step().calls[-1]
    storages = (*step.storages, type(state)(12 * MIB, -1, None, "state", "s"))
    program = Program(name="late", calls=(*step.calls, update), storages=storages)
    assert [place(program, steps=n).peak_reserved_bytes // MIB for n in (1, 2, 3)] == [24, 24, 24]
    assert [len(place(program, steps=n).segments) for n in (1, 2)] == [2, 2]
    state_at = [e.address for e in place(program, steps=2).events if e.owner == 1 and e.action == "alloc"]
    activations = [e.address for e in place(program, steps=2).events if e.owner == 0 and e.action == "alloc"]
    assert state_at == activations[:1] and activations[1] != activations[0]


def test_without_logs_the_peaks_are_the_same() -> None:
    for settings in (None, AllocatorSettings(capacity_bytes=10 * MIB)):
        logged, bare = (place(small_step(), settings, logs=logs) for logs in (True, False))
        assert (logged.peak_reserved_bytes, logged.shortage) == (bare.peak_reserved_bytes, bare.shortage)
        assert logged.events and not bare.events and not bare.segments


def test_a_step_that_does_not_fit_says_where() -> None:
    placed = place(small_step(), AllocatorSettings(capacity_bytes=10 * MIB), steps=1)
    assert placed.shortage is not None
    assert (placed.shortage.call, placed.shortage.owner) == (-1, 0)
    small = step_of([(12 * MIB, 0, 3), (14 * MIB, 1, 3)], 4)
    placed = place(small, AllocatorSettings(capacity_bytes=20 * MIB), steps=1)
    assert placed.shortage is not None
    assert (placed.shortage.call, placed.shortage.owner, placed.shortage.free_bytes) == (1, 1, 8 * MIB)
