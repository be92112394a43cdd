"""The device's turn: one batch after another, split where it does not fit, until there is no more."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sits_dagster.errors import DeviceOutOfMemoryError, ModelError, StallError
from sits_dagster.inference.batches import Batch, split_batch
from sits_dagster.inference.encode import RowError, Stage
from sits_dagster.inference.engine import Arrays, Engine, MemorySample
from sits_dagster.inference.queues import ByteQueue, QueueEnded
from sits_dagster.inference.sizing import BatchMeasurement, BatchSizer, Bucket
from sits_dagster.inference.stats import Progress

__all__ = ["Predicted", "account", "predict_batches"]

POLL_SECONDS = 0.1


class Call(NamedTuple):
    """One device call that succeeded, without its arrays: they would wait for decode in memory."""

    bucket: Bucket
    rows: int
    cells: int
    cells_padded: int
    started: float
    ended: float
    memory: MemorySample


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One device call's outputs.

    Args:
        rows: Row numbers, int64 [n].
        outputs: Arrays with n rows.
        errors: Rows that the device cannot compute.
        call: What was called, for `account`; `None` where no call succeeded.
    """

    rows: NDArray[np.int64]
    outputs: Arrays = field(default_factory=dict[str, NDArray[np.generic]])
    errors: tuple[RowError, ...] = ()
    call: Call | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the outputs."""
        return sum(array.nbytes for array in self.outputs.values())


@dataclass(frozen=True, slots=True)
class CommitBarrier:
    """The device waits here until the segment before it is committed.

    Without it a killed run would lose the next segment's rows too. The next batches are ready meanwhile,
    so the wait is one commit long.

    Args:
        committed: Set once the segment is committed.
        wait_seconds_max: Longest wait.
    """

    committed: threading.Event
    wait_seconds_max: float

    def wait(self, batches: ByteQueue[Batch | CommitBarrier], should_stop: Callable[[], bool]) -> bool:
        """Return `True` once the segment is committed, `False` after a stop.

        Raises:
            QueueClosed: A stage failed.
            StallError: The commit took longer than the limit.
        """
        until = time.monotonic() + self.wait_seconds_max
        while not self.committed.wait(POLL_SECONDS):
            if should_stop():
                return False
            batches.check_open()
            if time.monotonic() > until:
                msg = f"A segment was not committed for {self.wait_seconds_max:g} s."
                raise StallError(msg, hint="look for a hanging decode or storage call.")
        return True


def account(predicted: Predicted, sizer: BatchSizer, progress: Progress) -> None:
    """Tell the sizer and the counters of a call. Not the device's thread: it would wait meanwhile."""
    call = predicted.call
    if call is None:
        return
    seconds = call.ended - call.started
    sizer.observe(BatchMeasurement(bucket=call.bucket, rows=call.rows, seconds=seconds, memory=call.memory))
    progress.add_call(
        started=call.started, ended=call.ended, rows=call.rows, memory_bytes=call.memory.bytes_used
    )
    progress.cells += call.cells
    progress.cells_padded += call.cells_padded


def predict_batches(
    batches: ByteQueue[Batch | CommitBarrier],
    predicted: ByteQueue[Predicted],
    *,
    engine: Engine,
    sizer: BatchSizer,
    progress: Progress,
    should_stop: Callable[[], bool],
    on_rows: Callable[[int], None],
) -> bool:
    """Send every batch through the device; a batch that fails is split, a single row that fails set apart.

    Args:
        batches: What to compute.
        predicted: Where the outputs go.
        engine: The device.
        sizer: Learns from each call.
        progress: Counters to keep.
        should_stop: Asked before each batch.
        on_rows: Told the rows that went through the device so far, before their results are handed on.

    Returns:
        `True` when the batches ended, `False` after a stop.
    """
    queue: deque[Batch] = deque()
    rows = 0
    while True:
        if should_stop():
            return False
        if not queue:
            try:
                batch = batches.get(POLL_SECONDS)
            except QueueEnded:
                return True
            if isinstance(batch, CommitBarrier):
                if not batch.wait(batches, should_stop):
                    return False
                continue
            if batch is None:
                continue
            queue.append(batch)
        batch = queue.popleft()
        try:
            result = _call(engine, batch, sizer, progress)
        except (DeviceOutOfMemoryError, ModelError) as error:
            batches.check_open()  # it may have failed because it was interrupted
            if len(batch.rows) > 1:
                queue.extendleft(reversed(split_batch(batch)))
                continue
            failed = RowError.of(int(batch.rows[0]), Stage.PREDICT, error)
            predicted.put(Predicted(rows=batch.rows[:0], errors=(failed,)), 0)
            continue
        rows += len(batch.rows)
        on_rows(rows)
        predicted.put(result, result.bytes)


def _call(engine: Engine, batch: Batch, sizer: BatchSizer, progress: Progress) -> Predicted:
    started = time.perf_counter()
    try:
        outputs = engine.predict(batch.arrays)
    except DeviceOutOfMemoryError:
        progress.out_of_memory += 1
        measurement = BatchMeasurement(
            bucket=batch.bucket,
            rows=len(batch.rows),
            seconds=time.perf_counter() - started,
            memory=engine.memory(),
            out_of_memory=True,
        )
        sizer.observe(measurement)
        raise
    ended = time.perf_counter()
    for name, array in outputs.items():
        if array.ndim and len(array) != len(batch.rows):
            msg = f"Model output {name!r} has {len(array)} rows for a batch of {len(batch.rows)}."
            raise ModelError(msg, hint="the model mixes rows: run it with batch_rows=1, or export it anew.")
    memory = engine.memory()
    call = Call(batch.bucket, len(batch.rows), batch.cells, batch.cells_padded, started, ended, memory)
    return Predicted(rows=batch.rows, outputs=outputs, call=call)
