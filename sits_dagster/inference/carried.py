"""Results that were ready beyond the last commit when an attempt was stopped.

They are a cache, not a commit: a row's result depends on the row alone, so a result that is found
again is the one that would be computed again. A damaged file is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sits_dagster.errors import StorageError
from sits_dagster.inference.attempt import Attempt
from sits_dagster.inference.dataset import Chunk
from sits_dagster.inference.decode import DecodedBatch
from sits_dagster.inference.segments import ROW_COLUMN, join_decoded
from sits_dagster.inference.shards import Shard
from sits_dagster.inference.store import PartFormat

__all__ = ["Carried", "load_carried", "save_carried"]


class Carried:
    """Known results by row number.

    Args:
        rows: Ascending row numbers, int64 [n].
        columns: Their decoded columns, n rows; `None` when there are none.
    """

    def __init__(self, rows: NDArray[np.int64], columns: pa.RecordBatch | None) -> None:
        self._rows = rows
        self._columns = columns

    def __len__(self) -> int:
        """Return the number of known rows."""
        return len(self._rows)

    def of(self, chunk: Chunk) -> tuple[NDArray[np.bool_] | None, DecodedBatch | None]:
        """Return which rows of a chunk are known, and their results; `None` twice where none is."""
        start, end = np.searchsorted(self._rows, (chunk.row_start, chunk.row_end))
        if start == end or self._columns is None:
            return None, None
        rows = self._rows[start:end]
        is_known = np.zeros(chunk.rows.num_rows, np.bool_)
        is_known[rows - chunk.row_start] = True
        return is_known, DecodedBatch(rows=rows, columns=self._columns.slice(start, end - start))


def save_carried(attempt: Attempt, part_format: PartFormat, decoded: Sequence[DecodedBatch]) -> int:
    """Write the results to the generation's control folder for the next attempt; return their number."""
    if not decoded:
        return 0
    rows, columns = join_decoded(decoded)
    batch = columns.add_column(0, ROW_COLUMN, pa.array(rows))
    path = f"{attempt.names.carried}/{attempt.epoch:08d}-{rows[0]:012d}{part_format.suffix}"
    try:
        writer = part_format.open(path, batch.schema)
        writer.write(batch)
        writer.close()
    except StorageError:
        return 0  # a cache only: a full disk must not turn a clean stop into a failure
    return len(rows)


def load_carried(attempt: Attempt, part_format: PartFormat, shards: Sequence[Shard]) -> Carried:
    """Return what earlier attempts left of some shards and nobody committed since."""
    tables: list[pa.Table] = []
    for path in sorted(attempt.store.list(attempt.names.carried)):
        try:
            table = part_format.read(path)
        except StorageError:
            continue
        if ROW_COLUMN in table.schema.names and (not tables or tables[0].schema.equals(table.schema)):
            tables.append(table)
    if not tables:
        return Carried(np.empty(0, np.int64), None)
    table = pa.concat_tables(tables).combine_chunks()
    rows, first = np.unique(table.column(ROW_COLUMN).to_numpy(), return_index=True)
    is_open = np.zeros(len(rows), np.bool_)
    for shard in shards:
        is_open |= (rows >= shard.row_start) & (rows < shard.row_end)
    for commit in attempt.commits:
        is_open &= (rows < commit.row_start) | (rows >= commit.row_end)
    columns = table.drop_columns([ROW_COLUMN]).take(pa.array(first[is_open])).combine_chunks()
    if columns.num_rows == 0:
        return Carried(np.empty(0, np.int64), None)
    return Carried(rows[is_open], columns.to_batches()[0])
