"""Calls that a run makes before the first batch counts: watched, and with the partition's own first rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, perf_counter
from typing import TypeVar

import numpy as np

from sits_dagster.errors import DeviceOutOfMemoryError, ModelError, SitsError, StallError, TransientError
from sits_dagster.inference.batches import Batch, Packer
from sits_dagster.inference.climb import Climb, climb
from sits_dagster.inference.encode import encode_chunk
from sits_dagster.inference.engine import Arrays, Engine
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import Bucket, FixedBatchSizer
from sits_dagster.inference.workers import WorkerPool

__all__ = ["ROWS_READ_MAX", "first_batches", "measure_batches", "watched"]

T = TypeVar("T")

ROWS_READ_MAX = 64
POLL_SECONDS = 0.05
CALLS = 2  # of each size: the first of a shape may set things up


def watched(
    task: Callable[[], T], engine: Engine, policy: PipelinePolicy, should_stop: Callable[[], bool]
) -> T | None:
    """Return what a task returns that calls the engine, or `None` after a stop.

    Args:
        task: Run in a thread of its own, which is left behind if it hangs.
        engine: Interrupted, for good, when the task must end.
        policy: The task ends with its `stall_seconds_max`.
        should_stop: Asked all the time.

    Raises:
        StallError: It took too long.
    """
    pool = WorkerPool[T]("sits-trial", workers=1)
    until = monotonic() + policy.stall_seconds_max
    future = pool.submit(task)
    try:
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
            if should_stop():
                engine.interrupt()
                return None
            if monotonic() > until:
                engine.interrupt()
                msg = f"Trying the first rows took longer than {policy.stall_seconds_max:g} s."
                raise StallError(msg, hint="look for a hanging encode function or an endless model.")
    finally:
        pool.close()


def first_batches(work: PartitionWork, engine: Engine, policy: PipelinePolicy) -> Iterator[Batch]:
    """Yield the first rows chunk by chunk; a lasting error ends them, since the run itself will raise it."""
    packer = Packer(
        signature=engine.signature,
        padding=work.padding,
        sizer=FixedBatchSizer(ROWS_READ_MAX),
        window_rows_max=ROWS_READ_MAX,
        window_bytes_max=policy.queue_bytes,
    )
    rows = min(work.partition.rows, ROWS_READ_MAX)
    chunks = work.reader.read(0, rows, rows_max=policy.chunk_rows, bytes_max=policy.chunk_bytes)
    try:
        for chunk in chunks:
            encoded = encode_chunk(
                chunk, work.encode, engine.signature, columns_required=work.columns_required
            )
            yield from packer.add(encoded)
            yield from packer.flush()
    except TransientError:
        raise
    except SitsError:
        return


def measure_batches(
    work: PartitionWork,
    engine: Engine,
    policy: PipelinePolicy,
    *,
    rows_max: int,
    seconds_max: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Bucket, Climb] | None:
    """Return the best batch for the commonest shape of the first rows; `None` where no row can be tried.

    Batches are filled with those rows again and again.

    Args:
        work: The partition, with its encode function.
        engine: A device with the model.
        policy: The data plane's limits.
        rows_max: Never more rows than this, >= 1.
        seconds_max: For all calls together, as far as can be foreseen.
        should_stop: Asked all the time; after `True` the engine is interrupted, for good.

    Raises:
        StallError: A function or a call hangs.
        TransientError: The device failed, or a function asks for another try.
    """
    task = partial(_measure, work, engine, policy, rows_max, seconds_max)
    return watched(task, engine, policy, should_stop)


def _measure(
    work: PartitionWork, engine: Engine, policy: PipelinePolicy, rows_max: int, seconds_max: float
) -> tuple[Bucket, Climb] | None:
    batch = max(first_batches(work, engine, policy), key=lambda found: len(found.rows), default=None)
    if batch is None:
        return None

    def measure(rows: int) -> float:
        arrays = _filled(batch, rows)
        seconds: list[float] = []
        for _ in range(CALLS):
            start = perf_counter()
            engine.predict(arrays)
            seconds.append(perf_counter() - start)
        return max(min(seconds), 1e-9)

    try:
        return batch.bucket, climb(measure, rows_max=rows_max, seconds_max=seconds_max / CALLS)
    except (DeviceOutOfMemoryError, ModelError):
        return None  # the run meets it row by row, and says so


def _filled(batch: Batch, rows: int) -> Arrays:
    index = np.arange(rows) % len(batch.rows)
    return {name: array[index] if name in batch.batched else array for name, array in batch.arrays.items()}
