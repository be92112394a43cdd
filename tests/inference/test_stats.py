"""What a run did, counted from several threads."""

from __future__ import annotations

from sits_dagster.inference.engine import MemorySample
from sits_dagster.inference.sizing import BatchMeasurement, FixedBatchSizer
from sits_dagster.inference.stats import Progress

MEMORY = MemorySample(bytes_used=None, bytes_limit=None)


def _call(progress: Progress, started: float, ended: float) -> None:
    progress.add_call(started=started, ended=ended, rows=4, memory_bytes=None)


def test_calls_may_be_counted_in_any_order() -> None:
    """The wall time is from the earliest start to the latest end, whoever reports first."""
    progress = Progress()
    _call(progress, 2.0, 3.0)
    _call(progress, 1.0, 2.0)
    assert progress.wall_seconds == 2.0
    assert progress.busy_fraction == 1.0
    assert progress.rows_per_second == 4.0


def test_an_early_batch_that_fails_late_does_not_raise_the_ceiling() -> None:
    """A batch that was packed before a smaller ceiling was learned says nothing new."""
    sizer = FixedBatchSizer(64)
    for rows in (64, 16, 64):
        sizer.observe(
            BatchMeasurement(bucket=((3,),), rows=rows, seconds=0.1, memory=MEMORY, out_of_memory=True)
        )
    assert sizer.rows(((3,),)) == 8


def test_steps_that_found_the_same_say_it_once() -> None:
    """The verdicts of several steps are put together; steps that computed nothing have none."""
    parts = [Progress(batching=found) for found in ("invariant", "", "invariant", "unprobed")]
    assert Progress.total(parts).batching == "invariant, unprobed"
    assert Progress.total(parts[1:2]).batching == ""
