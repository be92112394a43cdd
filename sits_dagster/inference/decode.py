"""Model outputs to columns: the user's function or a default, with failing rows set apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sits_dagster.errors import ConfigError, SitsError
from sits_dagster.inference.arrow_arrays import tensor_column
from sits_dagster.inference.encode import RowError, Stage
from sits_dagster.inference.engine import Arrays, ModelSignature

__all__ = ["DecodeFunction", "DecodedBatch", "decode_batch", "decode_columns", "default_schema"]

DecodeFunction: TypeAlias = Callable[[Arrays], "pa.RecordBatch | Mapping[str, object]"]
"""A batch's outputs to columns (a record batch, or names to arrays or lists), a row a row, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedBatch:
    """The output columns of some rows.

    Args:
        rows: Row numbers, int64 [n].
        columns: n rows.
        errors: Rows that have no output.
    """

    rows: NDArray[np.int64]
    columns: pa.RecordBatch | None
    errors: tuple[RowError, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the columns."""
        return 0 if self.columns is None else self.columns.nbytes


def decode_columns(signature: ModelSignature) -> DecodeFunction:
    """Return the default: each output becomes the column of its name; further axes become lists.

    An output without axes is about the whole batch, not about a row, and is left out.
    """
    shapes = {spec.name: spec.shape[1:] for spec in signature.outputs}

    def decode(outputs: Arrays) -> Mapping[str, object]:
        return {
            name: tensor_column(array, _fit(shapes.get(name, ()), array.ndim - 1))
            for name, array in outputs.items()
            if np.ndim(array)
        }

    return decode


def default_schema(signature: ModelSignature) -> pa.Schema | None:
    """Return the schema of the default's columns, or `None` where the model does not declare its ranks."""
    columns: dict[str, pa.Array] = {}
    for spec in signature.outputs:
        if not spec.is_batched:
            return None
        empty = np.empty((0, *(length or 0 for length in spec.shape[1:])), spec.numpy_dtype)
        columns[spec.name] = tensor_column(empty, spec.shape[1:])
    return pa.RecordBatch.from_pydict(columns).schema


def _fit(shape: tuple[int | None, ...], rank: int) -> tuple[int | None, ...]:
    # Some exporters declare a wrong rank; then every axis counts as free.
    return shape if len(shape) == rank else (None,) * rank


def decode_batch(rows: NDArray[np.int64], outputs: Arrays, decode: DecodeFunction) -> list[DecodedBatch]:
    """Return the columns of every row; where `decode` raises, the rows at fault become errors.

    Raises:
        ConfigError: The function returned another number of rows than it was given.
    """
    try:
        columns = _record_batch(decode(outputs))
    except SitsError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        if len(rows) == 1:
            failed = RowError.of(int(rows[0]), Stage.DECODE, error)
            return [DecodedBatch(rows=rows[:0], columns=None, errors=(failed,))]
        half = len(rows) // 2
        parts = (slice(0, half), slice(half, None))
        return [d for part in parts for d in decode_batch(rows[part], _rows_of(outputs, part), decode)]
    if columns.num_rows != len(rows):
        msg = f"decode returned {columns.num_rows} rows for a batch of {len(rows)}."
        raise ConfigError(msg, hint="return exactly one row for each row of the outputs, in order.")
    return [DecodedBatch(rows=rows, columns=columns)]


def _rows_of(outputs: Arrays, rows: slice) -> Arrays:
    return {name: array[rows] if np.ndim(array) else array for name, array in outputs.items()}


def _record_batch(columns: pa.RecordBatch | Mapping[str, object]) -> pa.RecordBatch:
    if isinstance(columns, pa.RecordBatch):
        return columns
    arrays = {
        name: value if isinstance(value, pa.Array) else pa.array(value) for name, value in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)
