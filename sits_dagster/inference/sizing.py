"""How many rows a batch should have: the seam, and the policy of a fixed number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from sits_dagster.errors import ConfigError
from sits_dagster.inference.engine import MemorySample

__all__ = ["BatchMeasurement", "BatchOptimum", "BatchSizer", "Bucket", "FixedBatchSizer"]

Bucket: TypeAlias = tuple[tuple[int, ...], ...]
"""The padded shapes of a row, one for each batched input in graph order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMeasurement:
    """What one device call told.

    Args:
        bucket: The padded row shapes of the batch.
        rows: Rows of the batch, >= 1.
        seconds: Time inside the device call.
        memory: The device after the call.
        out_of_memory: Whether the call failed for memory.
    """

    bucket: Bucket
    rows: int
    seconds: float
    memory: MemorySample
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptimum:
    """The smallest batch of one shape that was measured to be nearly the fastest.

    Args:
        bucket: The padded row shapes.
        rows: Rows of that batch, >= 1.
    """

    bucket: Bucket
    rows: int


class BatchSizer(Protocol):
    """Chooses the rows of the next batch of a bucket and learns from each call."""

    def rows(self, bucket: Bucket) -> int:
        """Return how many rows the next batch of this bucket should have, >= 1."""
        ...

    def observe(self, measurement: BatchMeasurement) -> None:
        """Take in one device call. Called from another thread than `rows`."""
        ...


@dataclass(slots=True)
class FixedBatchSizer:
    """Gives the same number for every bucket, and less for a bucket that once ran out of memory.

    Args:
        batch_rows: Rows of a batch, >= 1.
    """

    batch_rows: int
    ceilings: dict[Bucket, int] = field(default_factory=dict[Bucket, int])

    def __post_init__(self) -> None:
        if self.batch_rows < 1:
            msg = f"batch_rows must be >= 1, got {self.batch_rows}."
            raise ConfigError(msg)

    def rows(self, bucket: Bucket) -> int:
        """Return the fixed number, or the learned ceiling of the bucket where that is lower."""
        return min(self.batch_rows, self.ceilings.get(bucket, self.batch_rows))

    def observe(self, measurement: BatchMeasurement) -> None:
        """Halve the ceiling of a bucket that ran out of memory."""
        if measurement.out_of_memory:
            # Batches that were packed before it was learned may fail too, with more rows.
            learned = self.ceilings.get(measurement.bucket, measurement.rows)
            self.ceilings[measurement.bucket] = min(learned, max(1, measurement.rows // 2))
