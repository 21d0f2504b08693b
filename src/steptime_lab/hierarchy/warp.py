"""Requests of a warp, counted from its addresses: sectors, bank conflicts, branch paths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime.errors import UserError
from steptime.num import Array
from steptime_lab.cost import warps


def counted_sectors(addresses: Array, access_bytes: int) -> int:
    """Sectors of 32 bytes that the threads of a warp touch.

    >>> counted_sectors(np.arange(32) * 4, 4)
    4
    """
    first, last = addresses // warps.SECTOR_BYTES, (addresses + access_bytes - 1) // warps.SECTOR_BYTES
    return len({sector for low, high in zip(first, last, strict=True) for sector in range(int(low), int(high) + 1)})


def counted_conflicts(addresses: Array) -> int:
    """Cycles of a request to shared memory: the most different words in one bank.

    >>> counted_conflicts(np.arange(32) * 128)
    32
    """
    words = np.unique(addresses // warps.BANK_BYTES)
    return int(np.bincount(words % warps.BANKS).max())


def counted_paths(paths: Array) -> int:
    """Number of different paths that the threads of a warp take.

    >>> counted_paths(np.arange(32) % 4)
    4
    """
    return len(np.unique(paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpRequest:
    """One memory instruction of a warp whose threads access addresses at equal distances."""

    stride_bytes: int
    access_bytes: int
    sectors: int
    least_sectors: int
    coalescing: float
    """Useful share of the bytes moved."""
    bank_conflict_ways: int
    paths: int
    memory_factor: float
    """Sectors over the fewest possible sectors."""


def warp_request(stride_bytes: int, access_bytes: int, *, offset_bytes: int = 0, paths: int = 1) -> WarpRequest:
    """Sectors, bank conflicts and paths of a request, counted.

    Raises:
        UserError: an access that is no power of two up to 16 bytes, or is not aligned to its own length.

    >>> warp_request(128, 4).memory_factor, warp_request(128, 4).bank_conflict_ways
    (8.0, 32)
    """
    if access_bytes not in (1, 2, 4, 8, 16):
        raise UserError(f"a thread does not load {access_bytes} bytes at once", hint="1, 2, 4, 8 or 16")
    if stride_bytes % access_bytes or offset_bytes % access_bytes:
        raise UserError(f"loads of {access_bytes} bytes start at multiples of {access_bytes} bytes")
    addresses = offset_bytes + np.arange(warps.WARP, dtype=np.int64) * stride_bytes
    sectors = counted_sectors(addresses, access_bytes)
    useful = len(np.unique(addresses)) * access_bytes
    least = -(-useful // warps.SECTOR_BYTES)
    return WarpRequest(
        stride_bytes=stride_bytes,
        access_bytes=access_bytes,
        sectors=sectors,
        least_sectors=least,
        coalescing=float(warps.coalescing(useful, sectors)),
        bank_conflict_ways=counted_conflicts(addresses),
        paths=int(warps.divergence_factor(paths)),
        memory_factor=sectors / least,
    )
