"""The sizer that nobody tells a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError
from sits_dagster.inference.adaptive import RECOVERY_CALLS, AdaptiveBatchSizer, SizingReason
from sits_dagster.inference.engine import MemorySample
from sits_dagster.inference.sizing import BatchMeasurement, BatchOptimum, Bucket

NARROW: Bucket = ((3, 16),)
WIDE: Bucket = ((3, 64),)
NOTHING = MemorySample(bytes_used=None, bytes_limit=None)


def call(rows: int, bucket: Bucket = NARROW, *, fits: bool = True) -> BatchMeasurement:
    return BatchMeasurement(bucket=bucket, rows=rows, seconds=0.1, memory=NOTHING, out_of_memory=not fits)


def test_other_shapes_get_as_many_cells() -> None:
    """Four times the width is a quarter of the rows; very wide rows still come one by one."""
    sizer = AdaptiveBatchSizer(BatchOptimum(bucket=NARROW, rows=32), rows_max=1024)
    assert sizer.rows(NARROW) == 32
    assert sizer.rows(WIDE) == 8
    assert sizer.rows(((3, 100_000),)) == 1
    assert [decision.reason for decision in sizer.decisions] == [
        SizingReason.MEASURED,
        SizingReason.SCALED,
        SizingReason.SCALED,
    ]


def test_the_named_limit_holds() -> None:
    """Tiny rows would fill a batch with very many."""
    sizer = AdaptiveBatchSizer(BatchOptimum(bucket=WIDE, rows=32), rows_max=100)
    assert sizer.rows(NARROW) == 100
    assert sizer.decisions[-1].reason is SizingReason.ROWS_MAX


def test_a_batch_that_does_not_fit_halves_the_next_of_its_shape_alone() -> None:
    """And again, down to one row; other shapes keep theirs."""
    sizer = AdaptiveBatchSizer(BatchOptimum(bucket=NARROW, rows=8), rows_max=64)
    found = []
    for _ in range(5):
        rows = sizer.rows(NARROW)
        found.append(rows)
        sizer.observe(call(rows, fits=False))
    assert found == [8, 4, 2, 1, 1]
    assert sizer.rows(WIDE) == 2
    assert sizer.decisions[-2].reason is SizingReason.OUT_OF_MEMORY


def test_what_ran_out_of_memory_grows_back() -> None:
    """Whoever took the memory may give it back: half as much more is tried in time, up to the aim."""
    sizer = AdaptiveBatchSizer(BatchOptimum(bucket=NARROW, rows=16), rows_max=64)
    sizer.observe(call(16, fits=False))
    grown = [sizer.rows(NARROW)]
    for _ in range(3 * RECOVERY_CALLS):
        sizer.observe(call(grown[-1]))
        if sizer.rows(NARROW) != grown[-1]:
            grown.append(sizer.rows(NARROW))
    assert grown == [8, 12, 16]
    reasons = [decision.reason for decision in sizer.decisions]
    assert reasons == [SizingReason.OUT_OF_MEMORY, SizingReason.RECOVERED, SizingReason.MEASURED]


def test_trouble_starts_the_wait_anew() -> None:
    """A ceiling that is hit again is not lifted by calls from before."""
    sizer = AdaptiveBatchSizer(BatchOptimum(bucket=NARROW, rows=16), rows_max=64)
    sizer.observe(call(16, fits=False))
    for _ in range(RECOVERY_CALLS - 1):
        sizer.observe(call(8))
    sizer.observe(call(8, fits=False))
    sizer.observe(call(4))
    assert sizer.rows(NARROW) == 4


@pytest.mark.parametrize(("rows", "limit"), [(0, 8), (8, 0)])
def test_a_batch_without_rows_is_refused(rows: int, limit: int) -> None:
    """It would never end."""
    with pytest.raises(ConfigError, match="at least one row"):
        AdaptiveBatchSizer(BatchOptimum(bucket=NARROW, rows=rows), rows_max=limit)


@given(
    optimum=st.integers(1, 500),
    limit=st.integers(1, 500),
    events=st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=200),
)
def test_rows_stay_between_one_and_the_limit(
    optimum: int, limit: int, events: list[tuple[int, bool]]
) -> None:
    """Whatever the calls tell, and never above what was just refused."""
    sizer = AdaptiveBatchSizer(BatchOptimum(bucket=NARROW, rows=optimum), rows_max=limit)
    for width, fits in events:
        bucket: Bucket = ((3, width),)
        rows = sizer.rows(bucket)
        assert 1 <= rows <= limit
        sizer.observe(call(rows, bucket, fits=fits))
        assert fits or sizer.rows(bucket) <= max(1, rows // 2)
