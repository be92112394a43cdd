"""Cutting a partition into shards: contiguous row ranges on row-group borders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["RowRange", "Shard", "plan_shards", "remaining_ranges"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RowRange:
    """Rows `row_start` to `row_end` (exclusive) of a partition."""

    row_start: int
    row_end: int

    @property
    def rows(self) -> int:
        """Rows of the range."""
        return self.row_end - self.row_start


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shard:
    """A parallel unit of a partition.

    Args:
        index: Its number within the partition, from 0.
        row_start: Its first row.
        row_end: The row after its last one.
    """

    index: int
    row_start: int
    row_end: int


def plan_shards(
    row_group_rows: Sequence[int], *, seconds_per_row: float, seconds_min: float, shards_max: int
) -> tuple[Shard, ...]:
    """Return shards that partition the rows in order, none shorter than `seconds_min` where it can be helped.

    Args:
        row_group_rows: Rows of each row group in reading order; a shard never splits one.
        seconds_per_row: Predicted device seconds of a row, >= 0.
        seconds_min: Least device seconds of a shard; a small partition is one shard.
        shards_max: Most shards.

    Returns:
        At least one shard unless there are no rows; row ranges adjoin.
    """
    rows = sum(row_group_rows)
    if rows == 0:
        return ()
    rows_min = seconds_min / seconds_per_row if seconds_per_row > 0 else rows
    rows_min = max(rows_min, 1)
    count = max(1, min(shards_max, int(rows / rows_min)))
    borders, seen = [0], 0
    for group in row_group_rows:
        seen += group
        # Cut at the first row-group border at or past each even share, where both sides stay long enough.
        is_due = seen * count >= len(borders) * rows
        if is_due and seen - borders[-1] >= rows_min and rows - seen >= rows_min:
            borders.append(seen)
    borders.append(rows)
    return tuple(
        Shard(index=index, row_start=start, row_end=end)
        for index, (start, end) in enumerate(pairwise(borders))
    )


def remaining_ranges(shard: Shard, committed: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """Return what of the shard is not committed, in order; committed ranges do not overlap."""
    ranges: list[RowRange] = []
    row = shard.row_start
    for done in sorted(committed):
        if done.row_start > row:
            ranges.append(RowRange(row_start=row, row_end=done.row_start))
        row = max(row, done.row_end)
    if row < shard.row_end:
        ranges.append(RowRange(row_start=row, row_end=shard.row_end))
    return tuple(ranges)
