"""Whatever is asked of the allocator: blocks never overlap, free ones merge, and the sums are those of the liveness."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hand_programs import MIB, step_of
from steptime.captured.graph.allocator import AllocatorSettings, CachingAllocator, OutOfMemoryError
from steptime.captured.graph.liveness import Liveness
from steptime.captured.graph.placement import place
from suites import examples

SLOW = settings(max_examples=examples(120))
SIZES = st.one_of(
    st.integers(0, 3000), st.integers(1, 2 * MIB), st.integers(1, 60 * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB, 21 * MIB]),
)  # fmt: skip
ACTIONS = st.lists(st.one_of(SIZES, st.integers(-30, -1)), max_size=60)
"""A size to allocate, or -n: free the n-th block that is in use."""
SETTINGS = st.builds(
    AllocatorSettings, expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 21 * MIB, 40 * MIB]), roundup_power2_divisions=st.sampled_from([0, 4]),
    capacity_bytes=st.sampled_from([None, 64 * MIB, 300 * MIB]),
)  # fmt: skip
LIVES = st.lists(st.tuples(SIZES, st.integers(-1, 9), st.integers(0, 12)), max_size=25)


def run(actions: list[int], given_settings: AllocatorSettings, check: bool = True) -> CachingAllocator:
    allocator = CachingAllocator(given_settings)
    used = []
    for action in actions:
        if action < 0 and used:
            allocator.free(used.pop(-action % len(used)))
        elif action > 0:
            try:
                used.append(allocator.malloc(action))
            except OutOfMemoryError:
                assert given_settings.capacity_bytes is not None
        if check:
            consistent(allocator)
    return allocator


def consistent(allocator: CachingAllocator) -> None:
    segments = allocator.segments()
    blocks = [block for segment in segments for block in segment.blocks]
    used = [block for block in blocks if block.allocated]
    for segment in segments:
        assert segment.blocks[0].address == segment.address
        assert sum(block.size_bytes for block in segment.blocks) == segment.size_bytes
        for first, second in pairwise(segment.blocks):
            assert first.address + first.size_bytes == second.address
            assert first.allocated or second.allocated, "free neighbours are one block"
    for first, second in pairwise(segments):
        assert first.address + first.size_bytes <= second.address
    assert allocator.reserved_bytes == sum(segment.size_bytes for segment in segments)
    assert allocator.allocated_bytes == sum(block.size_bytes for block in used)
    assert allocator.requested_bytes == sum(block.requested_bytes for block in used)
    assert allocator.reserved_bytes >= allocator.allocated_bytes >= allocator.requested_bytes
    assert all(block.size_bytes % 512 == 0 for block in blocks)
    capacity = allocator.settings.capacity_bytes
    assert capacity is None or allocator.reserved_bytes <= capacity


@SLOW
@given(actions=ACTIONS, chosen=SETTINGS)
def test_blocks_tile_their_segments_at_every_moment(actions: list[int], chosen: AllocatorSettings) -> None:
    run(actions, chosen)


@SLOW
@given(actions=ACTIONS, chosen=SETTINGS)
def test_when_everything_is_free_each_segment_is_one_block_and_goes_back(
    actions: list[int], chosen: AllocatorSettings
) -> None:
    allocator = run(actions, chosen, check=False)
    for block in list(allocator._used.values()):
        allocator.free(block)
    assert all(len(segment.blocks) == 1 for segment in allocator.segments())
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    allocator.release_cached()
    assert allocator.reserved_bytes == 0 and allocator.segments() == ()


@SLOW
@given(actions=ACTIONS, chosen=SETTINGS)
def test_the_events_replay_to_the_state_and_are_always_the_same(actions: list[int], chosen: AllocatorSettings) -> None:
    allocator = run(actions, chosen, check=False)
    assert allocator.events == run(actions, chosen, check=False).events
    reserved, live = 0, {}
    for event in allocator.events:
        if event.action in ("segment_alloc", "segment_map"):
            reserved += event.size_bytes
        elif event.action in ("segment_free", "segment_unmap"):
            reserved -= event.size_bytes
        elif event.action == "alloc":
            assert event.address not in live
            live[event.address] = event.size_bytes
        elif event.action == "free_completed":
            assert live.pop(event.address) == event.size_bytes
    assert reserved == allocator.reserved_bytes
    assert sum(live.values()) == allocator.requested_bytes


@SLOW
@given(lives=LIVES, expandable=st.booleans())
def test_a_placement_sums_to_the_liveness(lives: list[tuple[int, int, int]], expandable: bool) -> None:
    program = step_of([(size, born, max(freed, born)) for size, born, freed in lives], 10)
    placed = place(program, AllocatorSettings(expandable_segments=expandable), steps=1)
    asked, rounded = Liveness(program).in_use_bytes, Liveness(program, rounding=512).in_use_bytes
    assert placed.requested_bytes.tolist() == asked.tolist()
    if expandable:
        assert placed.allocated_bytes.tolist() == rounded.tolist()
    else:
        assert (placed.allocated_bytes >= rounded).all()
        assert (placed.allocated_bytes <= rounded + len(lives) * MIB).all()
    assert (placed.reserved_bytes >= placed.allocated_bytes).all()
    assert placed.peak_requested_bytes == asked.max()


@SLOW
@given(lives=LIVES, chosen=st.builds(AllocatorSettings, expandable_segments=st.booleans()))
def test_later_steps_need_what_the_second_needs(lives: list[tuple[int, int, int]], chosen: AllocatorSettings) -> None:
    program = step_of([(size, born, max(freed, born)) for size, born, freed in lives], 10)
    two, four = place(program, chosen, steps=2), place(program, chosen, steps=4)
    assert two.requested_bytes.tolist() == four.requested_bytes.tolist()
    assert two.peak_reserved_bytes <= four.peak_reserved_bytes
