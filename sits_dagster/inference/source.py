"""Where a partition's rows come from, as the user declares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sits_dagster.errors import ConfigError

__all__ = ["ParquetDataset", "column_names"]


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
        if self.columns is not None:
            object.__setattr__(self, "columns", column_names("columns", self.columns))


def column_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of an argument as they were given.

    Raises:
        ConfigError: It is one text, whose letters would count as names.
    """
    if isinstance(names, str):
        msg = f"{argument} must be a list of names, got the text {names!r}."
        raise ConfigError(msg, hint=f"write {argument}=[{names!r}].")
    return tuple(names)
