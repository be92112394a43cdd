"""What a partition's input is: files, row groups, one schema; and the digest that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from sits_dagster.errors import ConfigError

__all__ = ["Chunk", "InputFile", "PartitionInput", "RowReader", "partition_path", "unify_types"]

PATH_NAME_BYTES_MAX = 255
SAFE_CHARACTERS = " =:+,@-_.~()"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of a partition.

    Args:
        path: Where it is.
        size_bytes: Its size.
        version: What changes when its contents do: modification time in nanoseconds, or an ETag.
        row_group_rows: Rows of each row group, in file order.
    """

    path: str
    size_bytes: int
    version: str
    row_group_rows: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_group_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInput:
    """A partition's files in reading order, with the schema that all rows are read as.

    Args:
        files: Sorted by path; their rows are numbered through, from 0.
        schema: The columns that are read, unified over the files.
        notes: Sentences about what was widened or ignored, for the log.
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the partition."""
        return sum(file.rows for file in self.files)

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        """Rows of every row group of the partition, in reading order."""
        return tuple(rows for file in self.files for rows in file.row_group_rows)

    def digest(self) -> str:
        """Return a SHA-256 over the files' paths, sizes, versions and row groups, and the schema."""
        files = [[file.path, file.size_bytes, file.version, file.row_group_rows] for file in self.files]
        text = json.dumps([files, str(self.schema)], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def locate(self, rows: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the file and the row in that file of each row number of the partition."""
        starts = np.concatenate(([0], np.cumsum([file.rows for file in self.files])))
        found = np.searchsorted(starts, np.asarray(rows, np.int64), side="right") - 1
        return [self.files[i].path for i in found], [
            int(row - starts[i]) for row, i in zip(rows, found, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some contiguous rows as they were read.

    Args:
        row_start: Number of the first row within the partition.
        rows: The columns, in the partition's schema.
    """

    row_start: int
    rows: pa.RecordBatch

    @property
    def row_end(self) -> int:
        """Number of the row after the last one."""
        return self.row_start + self.rows.num_rows


class RowReader(Protocol):
    """Reads row ranges of a partition."""

    def read(self, row_start: int, row_end: int, *, rows_max: int, bytes_max: int) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks of at most `rows_max` rows and about `bytes_max` bytes."""
        ...


def partition_path(template: str, partition_key: str | None, dimensions: dict[str, str] | None = None) -> str:
    """Return the template with `{partition_key}` and `{dimension}` filled in; it never leaves the folder.

    Each value becomes one path component: `/`, control characters, what patterns are made of and the
    like are percent-encoded, and so is a leading `.` or `_` (readers take such folders for hidden).

    Raises:
        ConfigError: A placeholder has no value, or a value makes a name that is too long or empty.
    """
    values = dict(dimensions or {})
    if partition_key is not None:
        values["partition_key"] = partition_key
    encoded = {name: _component(value) for name, value in values.items()}
    try:
        return template.format(**encoded)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        known = (
            ", ".join(f"{{{name}}}" for name in sorted(encoded)) or "none, since the asset has no partitions"
        )
        msg = f"Path {template!r} has a placeholder without a value ({error}); available: {known}."
        raise ConfigError(msg) from error


def _component(value: str) -> str:
    text = quote(value, safe=SAFE_CHARACTERS)
    if text[:1] in {".", "_"}:
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if not text or len(text) > PATH_NAME_BYTES_MAX:
        msg = f"Partition key {value[:60]!r} makes a path component of {len(text)} bytes."
        raise ConfigError(msg, hint=f"a key must have 1 to {PATH_NAME_BYTES_MAX} bytes once encoded.")
    return text


def unify_types(left: pa.DataType, right: pa.DataType) -> tuple[pa.DataType, bool] | None:
    """Return the type that holds both without loss and whether values were widened, or `None` on a clash.

    Encodings (dictionary, large, view) do not matter; integers widen to integers and floats to floats;
    an all-null column takes the other's type.
    """
    left, right = _plain(left), _plain(right)
    if left == right:
        return left, False
    if pa.types.is_null(left) or pa.types.is_null(right):
        return (right if pa.types.is_null(left) else left), False
    for is_kind, order in _ENCODINGS:
        if is_kind(left) and is_kind(right):
            return order, False
    for is_kind in (pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating):
        if is_kind(left) and is_kind(right):
            return (left if left.bit_width > right.bit_width else right), True
    if _is_list(left) and _is_list(right):
        return _unify_lists(left, right)
    return None


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


_ENCODINGS = ((_is_text, pa.large_string()), (_is_bytes, pa.large_binary()))


def _unify_lists(left: pa.DataType, right: pa.DataType) -> tuple[pa.DataType, bool] | None:
    unified = unify_types(left.value_type, right.value_type)
    if unified is None:
        return None
    is_large = pa.types.is_large_list(left) or pa.types.is_large_list(right)
    return (pa.large_list if is_large else pa.list_)(unified[0]), unified[1]
