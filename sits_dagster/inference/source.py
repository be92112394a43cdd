"""Where a partition's rows come from, as the user declares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sits_dagster.errors import ConfigError

__all__ = ["ParquetDataset"]


@dataclass(frozen=True, slots=True)
class ParquetDataset:
    """A folder, file or glob pattern of Parquet files for each partition.

    Args:
        path: With `{partition_key}` in it (or a dimension's name, for several dimensions); absolute
            or below the storage resource's root. Hidden files and `_SUCCESS` are ignored.
        columns: The columns that `encode` reads; a null in one quarantines its row. By default the
            model's inputs, or every column (nulls included) when an `encode` function is given.

    Example:
        >>> ParquetDataset("lines/{partition_key}", columns=["image"]).columns
        ('image',)
    """

    path: str
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.path:
            msg = "ParquetDataset needs a path."
            raise ConfigError(msg)
        if isinstance(self.columns, str):
            msg = f"columns must be a list of names, got the text {self.columns!r}."
            raise ConfigError(msg, hint=f"write columns=[{self.columns!r}].")
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))
