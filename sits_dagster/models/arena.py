"""How ONNX Runtime's arena grows: what it holds, not what lives in it, is what meets a device's limit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["CARD_STRATEGY", "Arena", "ArenaFullError", "ArenaPolicy", "ExtendStrategy", "rounded"]

ALIGNMENT_BYTES = 256
INITIAL_BYTES = 1 << 20
SLACK_BYTES_MAX = 128 << 20  # a chunk with more to spare than this is always split
POWER_OF_TWO_BYTES_MAX = 1 << 30
REGION_ADDRESSES = 1 << 60  # apart, so that no two regions overlap


class ExtendStrategy(StrEnum):
    """How much memory the arena takes when it has none that fits."""

    NEXT_POWER_OF_TWO = "next-power-of-two"
    SAME_AS_REQUESTED = "same-as-requested"


CARD_STRATEGY: Final = ExtendStrategy.SAME_AS_REQUESTED
"""How the engine lets the arena of a GPU grow; that of the CPU doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPolicy:
    """How an arena grows, and how far.

    Args:
        strategy: What it takes from the device at a time.
        bytes_limit: Most bytes that it may hold, `None` where it is not limited.
    """

    strategy: ExtendStrategy = ExtendStrategy.NEXT_POWER_OF_TWO
    bytes_limit: int | None = None


class ArenaFullError(Exception):
    """A request did not fit into the arena's limit."""


def rounded(size: int) -> int:
    """Return how many bytes the arena sets apart for a request, before it looks for a chunk."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class _Chunk:
    size: int
    address: int
    before: _Chunk | None = None
    after: _Chunk | None = None
    is_free: bool = True


class Arena:
    """A best-fit arena with coalescing, as ONNX Runtime's `BFCArena` (bfc_arena.cc) keeps it.

    Args:
        policy: How it grows.
    """

    def __init__(self, policy: ArenaPolicy) -> None:
        self._policy = policy
        self._step = INITIAL_BYTES
        self._free: list[tuple[int, int]] = []  # (size, address), ascending: the best fit comes first
        self._chunks: dict[int, _Chunk] = {}
        self._used: dict[int, _Chunk] = {}
        self._regions = 0
        self.bytes_held = 0
        self.bytes_used = 0
        self.bytes_used_peak = 0

    def allocate(self, key: int, size: int) -> None:
        """Set `size` bytes apart under a key that is not in use.

        Raises:
            ArenaFullError: The limit leaves no room.
        """
        if size <= 0:
            return
        size = rounded(size)
        at = bisect.bisect_left(self._free, (size,))
        if at == len(self._free):
            self._extend(size)
            at = bisect.bisect_left(self._free, (size,))
        chunk = self._chunks[self._free.pop(at)[1]]
        if chunk.size >= 2 * size or chunk.size - size >= SLACK_BYTES_MAX:
            self._split(chunk, size)
        chunk.is_free = False
        self._used[key] = chunk
        self.bytes_used += chunk.size
        self.bytes_used_peak = max(self.bytes_used_peak, self.bytes_used)

    def release(self, key: int) -> None:
        """Give back what was set apart under a key; a key without memory is fine."""
        chunk = self._used.pop(key, None)
        if chunk is None:
            return
        self.bytes_used -= chunk.size
        chunk.is_free = True
        after = chunk.after
        if after is not None and after.is_free:
            self._forget(after)
            self._join(chunk, after)
        before = chunk.before
        if before is not None and before.is_free:
            self._forget(before)
            self._join(before, chunk)
            chunk = before
        self._offer(chunk)

    def _extend(self, size: int) -> None:
        available = None if self._policy.bytes_limit is None else self._policy.bytes_limit - self.bytes_held
        if available is not None:
            available = available // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if size > available:
                raise ArenaFullError
        taken = size
        if self._policy.strategy is ExtendStrategy.NEXT_POWER_OF_TWO:
            has_grown = False
            while size > self._step:
                self._step *= 2
                has_grown = True
            taken = self._step if available is None else min(self._step, available)
            if not has_grown:
                # A step that one large request has raised beyond the end of doubling falls back to that.
                self._step = min(self._step * 2, POWER_OF_TWO_BYTES_MAX)
        self.bytes_held += taken
        # Large regions are mapped downwards: of chunks of one size the newest region's comes first.
        self._regions += 1
        self._offer(self._new(taken, -self._regions * REGION_ADDRESSES))

    def _new(self, size: int, address: int) -> _Chunk:
        chunk = _Chunk(size, address)
        self._chunks[address] = chunk
        return chunk

    def _split(self, chunk: _Chunk, size: int) -> None:
        rest = self._new(chunk.size - size, chunk.address + size)
        rest.before, rest.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after = rest
        chunk.size = size
        self._offer(rest)

    def _join(self, chunk: _Chunk, after: _Chunk) -> None:
        chunk.size += after.size
        chunk.after = after.after
        if after.after is not None:
            after.after.before = chunk
        del self._chunks[after.address]

    def _offer(self, chunk: _Chunk) -> None:
        bisect.insort(self._free, (chunk.size, chunk.address))

    def _forget(self, chunk: _Chunk) -> None:
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.address))]
