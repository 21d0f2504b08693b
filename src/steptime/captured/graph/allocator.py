"""PyTorch's caching allocator for CUDA, simulated without a GPU: reserved bytes, and the address of each block.

A process reserves more than its program needs (:class:`~steptime.captured.graph.liveness.Liveness`): sizes are rounded,
memory comes from the driver in segments, and a free block is reused only where it is large enough.

Source: PyTorch, `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` (`kMinBlockSize`, `kSmallSize`,
`kSmallBuffer`, `kLargeBuffer`, `kMinLargeAlloc`, `kRoundLarge`; `get_allocation_size`, `get_free_block`,
`should_split`, `try_merge_blocks`, `try_allocate_expandable_block`, `release_cached_blocks`). One stream, no graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from steptime.errors import UserError
from steptime.num import round_up


class Block:
    """A range of addresses, linked to its neighbours in the same segment; changed in place by the allocator."""

    __slots__ = (
        "address", "allocated", "base", "mapped", "next", "owner", "pool", "previous", "requested_bytes", "size_bytes",
    )  # fmt: skip

    def __init__(self, address: int, size_bytes: int, pool: Pool, *, base: int = -1, mapped: bool = True) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.base = base
        """First address of its expandable segment; -1 if it is in none."""
        self.mapped = mapped
        self.allocated = False
        self.owner = -1
        self.requested_bytes = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def end(self) -> int:
        """First address after the block."""
        return self.address + self.size_bytes

    @property
    def expandable(self) -> bool:
        """True in an expandable segment."""
        return self.base >= 0


class Pool:
    """Free blocks by size and address, and unmapped ranges of expandable segments by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int]] = []
        self._unmapped: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Add a free block."""
        self._blocks[block.address] = block
        if block.mapped:
            insort(self._free, (block.size_bytes, block.address))
        else:
            insort(self._unmapped, block.address)

    def remove(self, block: Block) -> None:
        """Remove a block; its size, address and mapping must not have changed since it was added."""
        del self._blocks[block.address]
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size_bytes, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, block.address)]

    def best_fit(self, size_bytes: int) -> Block | None:
        """The smallest free block of at least that size; among equal ones the lowest address.

        A free block at the end of an expandable segment can grow, so it counts with the unmapped pages after it:
        a block smaller than that sum is preferred.
        """
        at = bisect_left(self._free, (size_bytes, 0))
        if at == len(self._free):
            return None
        block = self._blocks[self._free[at][1]]
        while block.expandable and at + 1 < len(self._free):
            following = self._blocks[self._free[at + 1][1]]
            if _reach(following) >= _reach(block):
                break
            block, at = following, at + 1
        return block

    def free_blocks(self) -> list[Block]:
        """Free blocks, smallest first."""
        return [self._blocks[address] for _, address in self._free]

    def unmapped_blocks(self) -> list[Block]:
        """Unmapped ranges, by address."""
        return [self._blocks[address] for address in self._unmapped]


def _reach(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)


def split(block: Block, size_bytes: int, *, keep: bool = False) -> Block:
    """Split the first bytes off a block that is in no pool, as a new block before it.

    The rest goes into its pool, or with `keep` into none.
    """
    front = Block(block.address, size_bytes, block.pool, base=block.base, mapped=block.mapped)
    front.previous, front.next = block.previous, block
    if block.previous is not None:
        block.previous.next = front
    block.previous = front
    block.address += size_bytes
    block.size_bytes -= size_bytes
    if not keep:
        block.pool.add(block)
    return front


def merge(block: Block, neighbour: Block | None) -> bool:
    """Merge a neighbour into a block that is in no pool, if both are free and mapped, or both are unmapped."""
    if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
        return False
    neighbour.pool.remove(neighbour)
    if block.previous is neighbour:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
    block.size_bytes += neighbour.size_bytes
    return True


MIN_BLOCK_BYTES: Final = 512
"""`kMinBlockSize`: every block size is a multiple of it."""
SMALL_BYTES: Final = 2**20
"""`kSmallSize`: the largest block of the small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * 2**20
"""`kSmallBuffer`: a segment of the small pool, and a page of its expandable segment."""
LARGE_SEGMENT_BYTES: Final = 20 * 2**20
"""`kLargeBuffer`: a segment for blocks below `LARGE_BYTES`, and a page of the large expandable segment."""
LARGE_BYTES: Final = 10 * 2**20
"""`kMinLargeAlloc`: blocks of at least this size get a segment of their own size."""
LARGE_ROUNDING_BYTES: Final = 2 * 2**20
"""`kRoundLarge`: multiple to which a segment for one large block is rounded up."""

FIRST_ADDRESS: Final = 0x7F00_0000_0000
"""Arbitrary multiple of 2 MiB; below 2^53, so that a viewer in JavaScript represents it exactly."""
ADDRESS_SPACE_BYTES: Final = 2**40
"""Addresses that an expandable segment reserves; PyTorch takes 9/8 of the device's memory."""

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]
NOBODY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Options of `PYTORCH_CUDA_ALLOC_CONF`, and the memory of the device."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Blocks of at least this size are not split, and serve only sizes within 20 MiB of theirs; None: no limit."""
    roundup_power2_divisions: int = 0
    """Number of steps between two powers of two to which sizes are rounded up; 0 or 1: sizes round to 512 bytes."""
    capacity_bytes: int | None = None
    """Memory of the device; None: unlimited."""

    def __post_init__(self) -> None:
        if self.max_split_size_bytes is not None and self.max_split_size_bytes <= LARGE_SEGMENT_BYTES:
            raise UserError(f"max_split_size {self.max_split_size_bytes} B is too small", hint="more than 20 MiB")
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise UserError(f"roundup_power2_divisions {divisions} is not a power of two", hint="0, 1, 2, 4, 8, ...")
        if self.capacity_bytes is not None and self.capacity_bytes <= 0:
            raise UserError(f"a device of {self.capacity_bytes} B has no memory")


class Event(NamedTuple):
    """An event of the allocator; sizes of blocks are the requested ones, as in PyTorch's traces."""

    action: Action
    address: int
    size_bytes: int
    owner: int
    """Owner that the caller gave for the block; for a segment, the owner whose request allocated it."""
    time: int
    """Time on the clock of the caller."""


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    allocated: bool
    owner: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory from the driver: one range of addresses."""

    address: int
    size_bytes: int
    small: bool
    expandable: bool
    blocks: tuple[PlacedBlock, ...]


class OutOfMemoryError(Exception):
    """The device has too little memory, even after all cached segments were released."""

    def __init__(self, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{requested_bytes} B asked for, {free_bytes} B free on the device")
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes


def round_size(requested_bytes: int, divisions: int = 0) -> int:
    r"""Bytes of the block for a request of $b$ bytes.

    $$512 \lceil b / 512 \rceil$$

    or, with $d$ divisions and $b > 512 d$, the next multiple of $2^{\lfloor \log_2 b \rfloor} / d$.

    Source: PyTorch, `DeviceCachingAllocator::round_size`, `roundup_power2_next_division`.

    >>> round_size(1), round_size(512), round_size(513)
    (512, 512, 1024)
    >>> round_size(1200 * 1024, 4) // 1024
    1280
    """
    if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
        power = 1 << (requested_bytes.bit_length() - 1)
        step = power // divisions
        return round_up(requested_bytes, step)
    return max(round_up(requested_bytes, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)


def segment_size(size_bytes: int) -> int:
    """Bytes of the segment that the driver gives for a block of a rounded size.

    Source: PyTorch, `DeviceCachingAllocator::get_allocation_size`.

    >>> [segment_size(n * 2**20) // 2**20 for n in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size_bytes, LARGE_ROUNDING_BYTES)


class CachingAllocator:
    """State of the allocator: blocks in use, free blocks by pool, and the events so far.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(3 * 2**20)
    >>> allocator.reserved_bytes // 2**20, allocator.allocated_bytes // 2**20
    (20, 3)
    >>> allocator.free(block)
    >>> allocator.reserved_bytes // 2**20, allocator.allocated_bytes
    (20, 0)
    """

    def __init__(self, settings: AllocatorSettings | None = None, *, logs: bool = True) -> None:
        self.settings, self.logs = settings or AllocatorSettings(), logs
        self.events: list[Event] = []
        self.now = 0
        self.reserved_bytes = self.allocated_bytes = self.requested_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = self.peak_requested_bytes = 0
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._used: dict[int, Block] = {}
        self._next_address = FIRST_ADDRESS

    # -- interface ----------------------------------------------------------------------------------------------------

    def malloc(self, requested_bytes: int, owner: int = NOBODY) -> Block | None:
        """Allocate a block; None for 0 bytes, which take no memory.

        Raises:
            OutOfMemoryError: the capacity of the settings does not suffice.
        """
        if requested_bytes <= 0:
            return None
        size = round_size(requested_bytes, self.settings.roundup_power2_divisions)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, size) or self._new_block(pool, size, owner)
        if self._splits(block, size):
            block = split(block, size)
        block.allocated, block.owner, block.requested_bytes = True, owner, requested_bytes
        self._used[block.address] = block
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        if self.logs:
            self._log("alloc", block.address, requested_bytes, owner)
        return block

    def free(self, block: Block | None) -> None:
        """Return a block to the cache; free neighbours are merged."""
        if block is None:
            return
        if self._used.pop(block.address, None) is not block:
            raise ValueError(f"the block at {block.address:#x} is not in use")
        if self.logs:
            self._log("free_requested", block.address, block.requested_bytes, block.owner)
            self._log("free_completed", block.address, block.requested_bytes, block.owner)
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        block.allocated, block.owner, block.requested_bytes = False, NOBODY, 0
        merge(block, block.previous)
        merge(block, block.next)
        block.pool.add(block)

    def release_cached(self) -> None:
        """Return free segments, and free pages of expandable segments, to the driver (`empty_cache`)."""
        for pool in (self._large, self._small):
            for block in pool.free_blocks():
                if block.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self._reserve(-block.size_bytes)
                    self._log("segment_free", block.address, block.size_bytes, NOBODY)

    def segments(self) -> tuple[Segment, ...]:
        """Segments reserved now, by address; each mapped range of an expandable segment counts as one."""
        blocks = [*self._used.values(), *self._large.free_blocks(), *self._small.free_blocks()]
        heads = [block for block in blocks if block.previous is None or not block.previous.mapped]
        return tuple(_segment(head) for head in sorted(heads, key=lambda block: block.address))

    # -- sources of blocks --------------------------------------------------------------------------------------------

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """The best fitting free block, removed from its pool; None if there is none."""
        block = pool.best_fit(size)
        limit = self.settings.max_split_size_bytes
        if block is None:
            return None
        if limit is not None:
            oversize = block.size_bytes >= limit if size < limit else block.size_bytes >= size + LARGE_SEGMENT_BYTES
            if oversize:
                return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        """True if the rest of a block beyond `size` becomes a block of its own."""
        remaining = block.size_bytes - size
        if block.pool.small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_size_bytes
        return remaining > SMALL_BYTES and (limit is None or size < limit)

    def _new_block(self, pool: Pool, size: int, owner: int) -> Block:
        extend = self._expand if self.settings.expandable_segments else self._take_segment
        block = extend(pool, size, owner)
        if block is None:
            self.release_cached()
            block = extend(pool, size, owner)
        if block is None:
            free = (self.settings.capacity_bytes or 0) - self.reserved_bytes
            self._log("oom", free, size, owner)
            raise OutOfMemoryError(size, free)
        return block

    def _take_segment(self, pool: Pool, size: int, owner: int) -> Block | None:
        total = segment_size(size)
        if not self._has(total):
            return None
        block = Block(self._addresses(total), total, pool)
        self._reserve(total)
        self._log("segment_alloc", block.address, total, owner)
        return block

    def _expand(self, pool: Pool, size: int, owner: int) -> Block | None:
        """A block at the lowest address where free memory and unmapped pages suffice."""
        start = self._expandable(pool, size)
        block = start if start.mapped else self._map(start, min(start.size_bytes, size), owner)
        while block is not None and block.size_bytes < size:
            after = block.next
            assert after is not None
            block = self._map(after, min(size - block.size_bytes, after.size_bytes), owner)
        if block is not None:
            pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size: int) -> Block:
        for block in pool.unmapped_blocks():
            before = block.previous
            start = before if before is not None and not before.allocated else block
            if _room(start, size):
                return start
        space = max(ADDRESS_SPACE_BYTES, round_up(size, LARGE_SEGMENT_BYTES))
        base = self._addresses(space)
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        block = Block(base, space // page * page, pool, base=base, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int, owner: int) -> Block | None:
        """Map the pages of the first `size` bytes of an unmapped range."""
        page = SMALL_SEGMENT_BYTES if block.pool.small else LARGE_SEGMENT_BYTES
        mapped = min(round_up(size, page), block.size_bytes)
        if not self._has(mapped):
            return None
        block.pool.remove(block)
        front = split(block, mapped) if mapped < block.size_bytes else block
        front.mapped = True
        self._reserve(mapped)
        self._log("segment_map", front.address, mapped, owner)
        merge(front, front.previous)
        merge(front, front.next)
        front.pool.add(front)
        return front

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages inside a free block."""
        page = SMALL_SEGMENT_BYTES if block.pool.small else LARGE_SEGMENT_BYTES
        first = round_up(block.address - block.base, page) + block.base
        last = (block.end - block.base) // page * page + block.base
        if last <= first:
            return
        block.pool.remove(block)
        if first > block.address:
            front = split(block, first - block.address, keep=True)
            block.pool.add(front)
        middle = split(block, last - first) if last < block.end else block
        middle.mapped = False
        self._reserve(first - last)
        self._log("segment_unmap", first, last - first, NOBODY)
        merge(middle, middle.previous)
        merge(middle, middle.next)
        middle.pool.add(middle)

    # -- counting -----------------------------------------------------------------------------------------------------

    def _has(self, size: int) -> bool:
        capacity = self.settings.capacity_bytes
        return capacity is None or self.reserved_bytes + size <= capacity

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += round_up(size, LARGE_ROUNDING_BYTES)
        return address

    def _log(self, action: Action, address: int, size: int, owner: int) -> None:
        if self.logs:
            self.events.append(Event(action, address, size, owner, self.now))


def _room(block: Block | None, size: int) -> bool:
    """True if this block and those after it, free or unmapped, suffice."""
    room = 0
    while block is not None and not block.allocated and room < size:
        room += block.size_bytes
        block = block.next
    return room >= size


def _chain(head: Block) -> Iterator[Block]:
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.next


def _segment(head: Block) -> Segment:
    blocks = tuple(
        PlacedBlock(block.address, block.size_bytes, block.requested_bytes, block.allocated, block.owner)
        for block in _chain(head)
    )
    total = sum(block.size_bytes for block in blocks)
    return Segment(head.address, total, head.pool.small, head.expandable, blocks)
