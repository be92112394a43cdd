"""Shards cut a partition into parallel units; what is left of one is the complement of its commits."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.inference.shards import RowRange, Shard, plan_shards, remaining_ranges

groups = st.lists(st.integers(0, 50), max_size=30)


@given(
    group_rows=groups,
    seconds_per_row=st.floats(0, 10),
    seconds_min=st.floats(0, 100),
    shards_max=st.integers(1, 10),
)
def test_shards_partition_the_rows_on_row_group_borders(
    group_rows: list[int], seconds_per_row: float, seconds_min: float, shards_max: int
) -> None:
    """Every row is in exactly one shard, in order, and no row group is read twice."""
    shards = plan_shards(
        group_rows, seconds_per_row=seconds_per_row, seconds_min=seconds_min, shards_max=shards_max
    )
    borders = {0, *accumulate(group_rows)}
    assert [s.index for s in shards] == list(range(len(shards)))
    assert [row for s in shards for row in range(s.row_start, s.row_end)] == list(range(sum(group_rows)))
    assert {s.row_start for s in shards} | {s.row_end for s in shards} <= borders
    assert all(s.row_start < s.row_end for s in shards)


@given(
    group_rows=groups,
    seconds_per_row=st.floats(0.01, 10),
    seconds_min=st.floats(0, 100),
    shards_max=st.integers(1, 10),
)
def test_shards_are_few_and_long_enough(
    group_rows: list[int], seconds_per_row: float, seconds_min: float, shards_max: int
) -> None:
    """No more shards than allowed, and none too short to pay for its overhead."""
    shards = plan_shards(
        group_rows, seconds_per_row=seconds_per_row, seconds_min=seconds_min, shards_max=shards_max
    )
    assert len(shards) <= shards_max
    assert len(shards) >= 1 or sum(group_rows) == 0
    if len(shards) > 1:
        assert all((s.row_end - s.row_start) * seconds_per_row >= seconds_min * 0.999 for s in shards)


def test_equal_row_groups_give_equal_shards() -> None:
    """A regular partition is balanced over the devices."""
    shards = plan_shards([10] * 8, seconds_per_row=1.0, seconds_min=10.0, shards_max=4)
    assert [(s.row_start, s.row_end) for s in shards] == [(0, 20), (20, 40), (40, 60), (60, 80)]


def test_unknown_cost_makes_one_shard() -> None:
    """Without a prediction nothing is split."""
    assert len(plan_shards([10] * 8, seconds_per_row=0.0, seconds_min=1.0, shards_max=4)) == 1


@given(borders=st.lists(st.integers(0, 100), min_size=2, max_size=12, unique=True), data=st.data())
def test_remaining_is_the_complement_of_the_committed(borders: list[int], data: st.DataObject) -> None:
    """A resumed run computes what is missing, all of it and nothing else, whatever was committed."""
    borders.sort()
    shard = Shard(index=0, row_start=borders[0], row_end=borders[-1])
    pieces = [RowRange(row_start=start, row_end=end) for start, end in pairwise(borders)]
    committed = [piece for piece in pieces if data.draw(st.booleans())]
    remaining = remaining_ranges(shard, data.draw(st.permutations(committed)))
    done = {row for piece in committed for row in range(piece.row_start, piece.row_end)}
    left = [row for piece in remaining for row in range(piece.row_start, piece.row_end)]
    assert left == [row for row in range(shard.row_start, shard.row_end) if row not in done]
    assert all(a.row_end < b.row_start for a, b in pairwise(remaining)), "ranges that touch are one"
