"""How many rows a batch has where nobody pins it: the fastest number, less where memory ran out."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from sits_dagster.errors import ConfigError
from sits_dagster.inference.sizing import BatchMeasurement, BatchOptimum, Bucket

__all__ = ["AdaptiveBatchSizer", "BatchDecision", "SizingReason", "bucket_cells"]

# After so many calls that fitted a ceiling is lifted by half: what took the memory may be gone.
RECOVERY_CALLS = 64
RECOVERY_FACTOR = 1.5
DECISIONS_MAX = 256


class SizingReason(StrEnum):
    """What decided the rows of a batch."""

    MEASURED = "the smallest batch that was nearly the fastest"
    SCALED = "as many cells as the measured batch"
    ROWS_MAX = "the named limit"
    OUT_OF_MEMORY = "a larger batch did not fit"
    RECOVERED = "memory was enough for a while"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """Why batches of one shape have so many rows from a call on.

    Args:
        call: How many device calls came before.
        bucket: The padded row shapes.
        rows: What was decided.
        rows_before: What held before; 0 for a new shape.
        reason: What decided.
    """

    call: int
    bucket: Bucket
    rows: int
    rows_before: int
    reason: SizingReason


class AdaptiveBatchSizer:
    """Gives one shape its measured optimum, others as many cells, and learns from running out of memory.

    Args:
        optimum: The best batch of one shape.
        rows_max: Never more rows than this, >= 1.

    Raises:
        ConfigError: A number of rows is below 1.
    """

    def __init__(self, optimum: BatchOptimum, *, rows_max: int) -> None:
        if min(optimum.rows, rows_max) < 1:
            msg = f"A batch needs at least one row, got {optimum.rows} and at most {rows_max}."
            raise ConfigError(msg)
        self._optimum = optimum
        self._rows_max = rows_max
        self._cells_budget = optimum.rows * bucket_cells(optimum.bucket)
        self._ceilings: dict[Bucket, int] = {}
        self._lifted: set[Bucket] = set()
        self._current: dict[Bucket, int] = {}
        self._decisions: deque[BatchDecision] = deque(maxlen=DECISIONS_MAX)
        self._calls = 0
        self._calm_calls = 0
        self._lock = threading.Lock()

    @property
    def decisions(self) -> tuple[BatchDecision, ...]:
        """The latest decisions, oldest first."""
        with self._lock:
            return tuple(self._decisions)

    def rows(self, bucket: Bucket) -> int:
        """Return how many rows the next batch of this shape should have, >= 1."""
        with self._lock:
            rows, reason = self._decide(bucket)
            before = self._current.get(bucket, 0)
            if rows != before:
                self._current[bucket] = rows
                self._decisions.append(
                    BatchDecision(
                        call=self._calls, bucket=bucket, rows=rows, rows_before=before, reason=reason
                    )
                )
            return rows

    def observe(self, measurement: BatchMeasurement) -> None:
        """Take in one device call. Called from another thread than `rows`."""
        with self._lock:
            self._calls += 1
            if measurement.out_of_memory:
                self._calm_calls = 0
                self._ceilings[measurement.bucket] = max(1, measurement.rows // 2)
                self._lifted.discard(measurement.bucket)
                return
            self._calm_calls += 1
            if self._calm_calls >= RECOVERY_CALLS:
                self._calm_calls = 0
                self._lift()

    def _decide(self, bucket: Bucket) -> tuple[int, SizingReason]:
        rows, reason = self._aim(bucket)
        ceiling = self._ceilings.get(bucket, rows)
        if ceiling < rows:
            is_lifted = bucket in self._lifted
            return ceiling, SizingReason.RECOVERED if is_lifted else SizingReason.OUT_OF_MEMORY
        return rows, reason

    def _aim(self, bucket: Bucket) -> tuple[int, SizingReason]:
        if bucket == self._optimum.bucket:
            rows, reason = self._optimum.rows, SizingReason.MEASURED
        else:
            rows, reason = max(1, self._cells_budget // bucket_cells(bucket)), SizingReason.SCALED
        return (self._rows_max, SizingReason.ROWS_MAX) if rows > self._rows_max else (rows, reason)

    def _lift(self) -> None:
        """Raise what running out of memory had lowered; a shape that reaches its aim is free again."""
        for bucket, ceiling in list(self._ceilings.items()):
            raised = math.ceil(ceiling * RECOVERY_FACTOR)
            if raised >= self._aim(bucket)[0]:
                del self._ceilings[bucket]
                self._lifted.discard(bucket)
            else:
                self._ceilings[bucket] = raised
                self._lifted.add(bucket)


def bucket_cells(bucket: Bucket) -> int:
    """Return the cells of one padded row, over all inputs; 1 at least."""
    return max(1, sum(math.prod(shape) for shape in bucket))
