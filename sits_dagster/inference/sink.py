"""Where a partition's results go, as the user declares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from sits_dagster.errors import ConfigError
from sits_dagster.inference.source import column_names

__all__ = ["QUARANTINE_COLUMNS", "ParquetSink"]

CODECS = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
QUARANTINE_COLUMNS = ("file", "file_row", "stage", "error", "message")


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """A folder of Parquet files for each partition; this package owns the `part-*` files in it.

    Args:
        path: With `{partition_key}` in it (or a dimension's name, for several dimensions); absolute
            or below the storage resource's root.
        keep_columns: Input columns that go to the output, and to the quarantine, as they are.
        output_schema: Schema of the decoded columns; by default that of the first results.
        compression: Parquet codec: `"zstd"`, `"snappy"`, `"none"`, …

    Example:
        >>> ParquetSink("texts/{partition_key}", keep_columns=["line_id"]).keep_columns
        ('line_id',)
    """

    path: str
    keep_columns: Sequence[str] = ()
    output_schema: pa.Schema | None = None
    compression: str = "zstd"

    def __post_init__(self) -> None:
        if not self.path:
            msg = "ParquetSink needs a path."
            raise ConfigError(msg)
        if self.compression not in CODECS:
            msg = f"ParquetSink has no compression {self.compression!r}."
            raise ConfigError(msg, hint=f"choose one of {', '.join(CODECS)}.")
        object.__setattr__(self, "keep_columns", column_names("keep_columns", self.keep_columns))
        taken = sorted(set(self.keep_columns) & set(QUARANTINE_COLUMNS))
        if taken:
            msg = f"Columns {taken} cannot be kept: the quarantine has columns of these names."
            raise ConfigError(msg, hint="rename them in the input.")
