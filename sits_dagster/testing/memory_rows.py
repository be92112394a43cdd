"""A partition's input in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from sits_dagster.inference.dataset import Chunk, InputFile, PartitionInput

__all__ = ["MemoryRows"]


class MemoryRows:
    """The rows of a record batch as a partition of one file, and its reader.

    Args:
        rows: The rows.
        row_group_rows: Rows of each row group; one group of all rows when left out.

    Example:
        >>> source = MemoryRows(pa.RecordBatch.from_pydict({"x": [1.0, 2.0, 3.0]}))
        >>> [chunk.row_start for chunk in source.read(1, 3, rows_max=1, bytes_max=100)]
        [1, 2]
    """

    def __init__(self, rows: pa.RecordBatch, row_group_rows: Sequence[int] | None = None) -> None:
        self.rows = rows
        groups = tuple(row_group_rows) if row_group_rows is not None else (rows.num_rows,)
        digest = hashlib.sha256(repr(rows.to_pydict()).encode()).hexdigest()
        file = InputFile(path="memory", size_bytes=rows.nbytes, version=digest, row_group_rows=groups)
        self.partition = PartitionInput(files=(file,), schema=rows.schema)

    def read(self, row_start: int, row_end: int, *, rows_max: int, bytes_max: int) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks of at most `rows_max` rows; bytes do not matter here."""
        for start in range(row_start, row_end, rows_max):
            end = min(start + rows_max, row_end)
            yield Chunk(row_start=start, rows=self.rows.slice(start, end - start))
