"""Results back into input order: an open segment collects them and writes its finished prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sits_dagster.errors import ConfigError, InvariantError
from sits_dagster.inference.decode import DecodedBatch
from sits_dagster.inference.encode import RowError

__all__ = ["ROW_COLUMN", "OpenSegment", "OutputSchema", "join_decoded"]

ROW_COLUMN = "__row"


class OutputSchema:
    """The output's columns: declared, or those of the first results. Later ones are cast to them.

    Args:
        declared: The decoded columns' schema, or `None` to take it from the first results.
    """

    def __init__(self, declared: pa.Schema | None) -> None:
        self._decoded = declared

    def conform(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        """Return decoded columns in the schema.

        Raises:
            ConfigError: They do not fit, or the first results are null throughout.
        """
        if self._decoded is None:
            empty = [field.name for field in columns.schema if pa.types.is_null(field.type)]
            if empty:
                msg = f"The first decoded rows are null in {empty}, so the columns' types are unknown."
                raise ConfigError(msg, hint="declare output_schema on the sink.")
            self._decoded = columns.schema
        if columns.schema.equals(self._decoded):
            return columns
        try:
            return columns.select(self._decoded.names).cast(self._decoded)
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            found, wanted = columns.schema.to_string(), self._decoded.to_string()
            msg = f"decode returned columns {found!r}, wanted {wanted!r}: {error}"
            raise ConfigError(msg, hint="return the same names and types for every batch.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """Finished rows in input order.

    Args:
        kept: The kept columns of the rows that have a result.
        kept_failed: The kept columns of the rows that have an error.
        decoded: The decoded columns, a row for each of `kept`; `None` when that has no rows.
    """

    kept: pa.RecordBatch
    kept_failed: pa.RecordBatch
    decoded: pa.RecordBatch | None


class OpenSegment:
    """The rows of one segment until it is committed.

    Args:
        shard: Index of its shard.
        row_start: First row.
        schema: The decoded columns' schema.
    """

    def __init__(self, *, shard: int, row_start: int, schema: OutputSchema) -> None:
        self.shard = shard
        self.row_start = row_start
        self.row_end: int | None = None
        self.row_flushed = row_start
        self.row_done = row_start
        self.errors: list[RowError] = []
        self.bytes_waiting = 0
        self._schema = schema
        self._row_arrived = row_start
        self._is_done = np.zeros(1024, np.bool_)
        self._kept: list[tuple[int, pa.RecordBatch]] = []
        self._decoded: list[DecodedBatch] = []

    @property
    def is_complete(self) -> bool:
        """Whether every row of the segment has a result or an error."""
        return self.row_done == self.row_end

    def arrive(self, row_start: int, kept: pa.RecordBatch, errors: Sequence[RowError]) -> None:
        """Take in rows that were read: the columns to keep, and the rows that could not be encoded."""
        if row_start != self._row_arrived:
            msg = f"Rows arrived at {row_start}, expected {self._row_arrived}."
            raise InvariantError(msg)
        self._row_arrived = row_start + kept.num_rows
        self._kept.append((row_start, kept))
        self.bytes_waiting += kept.nbytes
        capacity = self._row_arrived - self.row_start
        if capacity > len(self._is_done):
            self._is_done = np.concatenate((self._is_done, np.zeros(capacity, np.bool_)))
        self._advance(errors)

    def add(self, decoded: DecodedBatch) -> None:
        """Take in results, in any order."""
        if decoded.columns is not None and len(decoded.rows):
            columns = self._schema.conform(decoded.columns)
            self._decoded.append(DecodedBatch(rows=decoded.rows, columns=columns))
            self.bytes_waiting += columns.nbytes
            self._is_done[decoded.rows - self.row_start] = True
        self._advance(decoded.errors)

    def flush(self) -> Flushed | None:
        """Return the finished prefix in input order, and forget it; `None` where nothing is new."""
        if self.row_done == self.row_flushed:
            return None
        failed = np.asarray(
            [e.row for e in self.errors if self.row_flushed <= e.row < self.row_done], np.int64
        )
        kept = self._take_kept()
        is_good = np.ones(kept.num_rows, np.bool_)
        is_good[failed - self.row_flushed] = False
        ready, self._decoded = _split(self._decoded, self.row_done)
        self.row_flushed = self.row_done
        self.bytes_waiting = sum(k.nbytes for _, k in self._kept) + sum(d.bytes for d in self._decoded)
        return Flushed(
            kept=kept.filter(pa.array(is_good)) if len(failed) else kept,
            kept_failed=kept.filter(pa.array(~is_good)) if len(failed) else kept.slice(0, 0),
            decoded=join_decoded(ready)[1] if ready else None,
        )

    def ahead(self) -> list[DecodedBatch]:
        """Return the results beyond the finished prefix."""
        return _split(self._decoded, self.row_done)[1]

    def cut(self) -> None:
        """End the segment at its finished prefix."""
        self.row_end = self.row_done
        self.errors = [error for error in self.errors if error.row < self.row_done]

    def _advance(self, errors: Sequence[RowError]) -> None:
        self.errors.extend(errors)
        for error in errors:
            self._is_done[error.row - self.row_start] = True
        start, arrived = self.row_done - self.row_start, self._row_arrived - self.row_start
        missing = np.flatnonzero(~self._is_done[start:arrived])
        self.row_done = self.row_start + (start + int(missing[0]) if len(missing) else arrived)

    def _take_kept(self) -> pa.RecordBatch:
        taken: list[pa.RecordBatch] = []
        while self._kept and self._kept[0][0] < self.row_done:
            row_start, batch = self._kept.pop(0)
            rows = self.row_done - row_start
            if rows < batch.num_rows:
                self._kept.insert(0, (self.row_done, batch.slice(rows)))
                batch = batch.slice(0, rows)
            taken.append(batch)
        return taken[0] if len(taken) == 1 else pa.concat_batches(taken)


def join_decoded(decoded: Sequence[DecodedBatch]) -> tuple[NDArray[np.int64], pa.RecordBatch]:
    """Return the rows of several results, ascending, and their columns in that order."""
    rows = np.concatenate([d.rows for d in decoded])
    columns = pa.concat_batches([d.columns for d in decoded if d.columns is not None])
    if (np.diff(rows) > 0).all():
        return rows, columns
    order = np.argsort(rows)
    return rows[order], columns.take(pa.array(order))


def _split(decoded: Sequence[DecodedBatch], row_end: int) -> tuple[list[DecodedBatch], list[DecodedBatch]]:
    """Return what lies before `row_end` and what lies behind; rows ascend within each result."""
    before: list[DecodedBatch] = []
    behind: list[DecodedBatch] = []
    for item in decoded:
        count = int(np.searchsorted(item.rows, row_end))
        if count and item.columns is not None:
            before.append(DecodedBatch(rows=item.rows[:count], columns=item.columns.slice(0, count)))
        if count < len(item.rows) and item.columns is not None:
            behind.append(DecodedBatch(rows=item.rows[count:], columns=item.columns.slice(count)))
    return before, behind
