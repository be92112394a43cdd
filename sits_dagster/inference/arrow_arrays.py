"""Arrow columns as NumPy arrays and back, without a copy wherever the layouts agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sits_dagster.errors import ConfigError
from sits_dagster.inference.engine import Array

__all__ = ["column_array", "null_mask", "tensor_column"]


def null_mask(batch: pa.RecordBatch, columns: Sequence[str]) -> NDArray[np.bool_] | None:
    """Return which rows have a null in one of the columns, or `None` where there is none."""
    mask: NDArray[np.bool_] | None = None
    for name in columns:
        column = batch.column(name)
        if column.null_count:
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            mask = nulls if mask is None else mask | nulls
    return mask


def column_array(column: pa.Array) -> Array | list[Array]:
    """Return a column without nulls as one array, or as one array a row where lengths differ.

    Numbers, fixed-size lists, tensors and lists of equal length give one array [rows, …]; other lists
    and binaries one array a row (binaries as uint8). These are views of the column's memory. Strings
    and booleans are copied.

    Raises:
        ConfigError: The type has no array form (structs, maps, timestamps, …).
    """
    kind = column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return cast("Array", column.to_numpy_ndarray())
    if pa.types.is_primitive(kind) and not pa.types.is_temporal(kind):
        return cast("Array", column.to_numpy(zero_copy_only=not pa.types.is_boolean(kind)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return np.array(column.to_pylist(), dtype=object)
    return _nested_array(column, kind)


def _nested_array(column: pa.Array, kind: pa.DataType) -> Array | list[Array]:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _binary_rows(column)
    if pa.types.is_fixed_size_list(kind):
        return _fixed_rows(column, kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_rows(column)
    msg = f"A column of type {kind} cannot be a model input."
    raise ConfigError(msg, hint="give an encode function that turns it into arrays.")


def _binary_rows(column: pa.Array) -> list[Array]:
    _, offset_buffer, data = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    offsets = np.frombuffer(offset_buffer, width)[column.offset : column.offset + len(column) + 1]
    values = np.frombuffer(data or b"", np.uint8)
    return [values[start:end] for start, end in pairwise(offsets)]


def _fixed_rows(column: pa.Array, length: int) -> Array | list[Array]:
    values = column_array(column.flatten())
    if isinstance(values, np.ndarray):
        return values.reshape(len(column), length, *values.shape[1:])
    return [np.stack(values[row * length : (row + 1) * length]) for row in range(len(column))]


def _list_rows(column: pa.Array) -> Array | list[Array]:
    offsets = column.offsets.to_numpy(zero_copy_only=True)
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    values = column_array(column.flatten())
    if isinstance(values, np.ndarray):
        if len(lengths) and (lengths == lengths[0]).all():
            return values.reshape(len(column), int(lengths[0]), *values.shape[1:])
        return [values[start:end] for start, end in pairwise(offsets)]
    return [np.stack(values[start:end]) for start, end in pairwise(offsets)]


def tensor_column(array: Array, shape: tuple[int | None, ...]) -> pa.Array:
    """Return an output [rows, …] as a column: numbers as they are, further axes as (fixed-size) lists.

    Args:
        array: The output, rows on axis 0.
        shape: The declared lengths of the further axes; a free one becomes a variable list.
    """
    if array.dtype == object or array.dtype.kind == "U":
        flat = pa.array(array.reshape(-1).tolist(), pa.string())
    else:
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    lengths = array.shape[1:]
    for axis in range(len(lengths) - 1, -1, -1):
        length = lengths[axis]
        if shape[axis] is not None and length:
            flat = pa.FixedSizeListArray.from_arrays(flat, length)
        else:
            count = int(np.prod(array.shape[: axis + 1]))
            flat = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * length), flat)
    return flat
