"""Blocks of memory in a chain, and the pools in which free ones are found again."""

from __future__ import annotations

from bisect import bisect_left, insort


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
        """First address of the expandable segment that it belongs to, else -1."""
        self.mapped = mapped
        self.allocated = False
        self.owner = -1
        self.requested_bytes = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.address + self.size_bytes

    @property
    def expandable(self) -> bool:
        """Whether it belongs to an expandable segment."""
        return self.base >= 0


class Pool:
    """Free blocks by size and then address, and by address the ranges of expandable segments without memory."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int]] = []
        self._unmapped: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Put in a block that nobody uses."""
        self._blocks[block.address] = block
        if block.mapped:
            insort(self._free, (block.size_bytes, block.address))
        else:
            insort(self._unmapped, block.address)

    def remove(self, block: Block) -> None:
        """Take out a block; size, address and whether it has memory must be as they were when it was put in."""
        del self._blocks[block.address]
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size_bytes, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, block.address)]

    def best_fit(self, size_bytes: int) -> Block | None:
        """The smallest free block of at least that size, of equal ones the lowest.

        The free block at the end of an expandable segment counts with the pages behind it, as it can grow: another
        one is preferred as long as it is smaller than that.
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
        """Ranges without memory, by address."""
        return [self._blocks[address] for address in self._unmapped]


def _reach(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)


def split(block: Block, size_bytes: int, *, keep: bool = False) -> Block:
    """Cut the first bytes off a block that is in no pool: a new block in front of it.

    The rest goes into its pool; with `keep` it stays out, to be used further.
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
    """Take a neighbour into a block that is in no pool, if it is free (or without memory) like the block itself."""
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
