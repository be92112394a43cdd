"""Rows to model inputs: the user's function or a zero-copy default, with failing rows set apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sits_dagster.errors import ConfigError, SitsError
from sits_dagster.inference.arrow_arrays import column_array, null_mask
from sits_dagster.inference.dataset import Chunk
from sits_dagster.inference.engine import Array, ModelSignature, TensorSpec

__all__ = ["Column", "EncodeFunction", "EncodedChunk", "RowError", "Stage", "encode_chunk", "encode_columns"]

Column: TypeAlias = Array | Sequence[Array]
"""One input for several rows: an array with a row an entry of axis 0, or one array a row."""

EncodeFunction: TypeAlias = Callable[[pa.RecordBatch], Mapping[str, Array | Sequence[Array | Exception]]]
"""A record batch to the model's inputs, rows in order. A row's array may be an `Exception` instead:
that row is quarantined with it. An exception that is raised makes the batch be tried in halves."""


class Stage(StrEnum):
    """Where a row failed."""

    ENCODE = "encode"
    PREDICT = "predict"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Why a row has no output."""

    row: int
    stage: Stage
    error: str
    message: str

    @staticmethod
    def of(row: int, stage: Stage, error: BaseException) -> RowError:
        """Return the record of an exception."""
        return RowError(row=row, stage=stage, error=type(error).__name__, message=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """A chunk's rows as model inputs.

    Args:
        chunk: The rows as they were read.
        rows: Row numbers of the encoded rows, ascending; int64 [n].
        columns: A column of n rows for each batched input.
        constants: Inputs without a batch axis.
        errors: The rows that could not be encoded.
    """

    chunk: Chunk
    rows: NDArray[np.int64]
    columns: Mapping[str, Column]
    constants: Mapping[str, Array] = field(default_factory=dict[str, Array])
    errors: tuple[RowError, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        columns = self.columns.values()
        return sum(c.nbytes if isinstance(c, np.ndarray) else sum(a.nbytes for a in c) for c in columns)


def encode_columns(signature: ModelSignature) -> EncodeFunction:
    """Return the default: a model input is the column of its name, without a copy where Arrow allows it."""
    names = [spec.name for spec in signature.inputs]

    def encode(batch: pa.RecordBatch) -> Mapping[str, Array | Sequence[Array]]:
        return {name: column_array(batch.column(name)) for name in names}

    return encode


def encode_chunk(
    chunk: Chunk,
    encode: EncodeFunction,
    signature: ModelSignature,
    *,
    columns_required: Sequence[str],
    is_done: NDArray[np.bool_] | None = None,
) -> EncodedChunk:
    """Return the chunk's rows as inputs of the right types; nulls and failing rows become errors.

    Args:
        chunk: The rows.
        encode: The user's function.
        signature: The model's inputs.
        columns_required: A null in one of these columns is an error of its row.
        is_done: Rows of the chunk whose results are known already; they are left out.

    Raises:
        ConfigError: The function's result does not have the model's inputs, or has another type.
    """
    errors = _null_errors(chunk, columns_required)
    keep = np.ones(chunk.rows.num_rows, np.bool_)
    keep[[error.row - chunk.row_start for error in errors]] = False
    if is_done is not None:
        keep &= ~is_done
        errors = [error for error in errors if not is_done[error.row - chunk.row_start]]
    offsets = np.flatnonzero(keep)
    batch = chunk.rows if len(offsets) == len(keep) else chunk.rows.filter(pa.array(keep))
    if len(offsets) == 0:
        return EncodedChunk(chunk=chunk, rows=offsets, columns={}, errors=tuple(errors))
    return _encode(chunk, batch, offsets + chunk.row_start, encode, signature, errors)


def _encode(
    chunk: Chunk,
    batch: pa.RecordBatch,
    rows: NDArray[np.int64],
    encode: EncodeFunction,
    signature: ModelSignature,
    errors: list[RowError],
) -> EncodedChunk:
    pieces = list(_try_halves(batch, rows, encode, signature, errors))
    batched = [spec for spec in signature.inputs if spec.is_batched]
    constants = {
        spec.name: np.asarray(pieces[0][1][spec.name])
        for spec in signature.inputs
        if pieces and not spec.is_batched
    }
    if len(pieces) == 1:
        return _assemble(chunk, pieces[0][0], pieces[0][1], batched, constants, errors)
    found = np.concatenate([piece_rows for piece_rows, _ in pieces]) if pieces else rows[:0]
    columns = {spec.name: [row for _, piece in pieces for row in piece[spec.name]] for spec in batched}
    return _assemble(chunk, found, columns, batched, constants, errors)


def _try_halves(
    batch: pa.RecordBatch,
    rows: NDArray[np.int64],
    encode: EncodeFunction,
    signature: ModelSignature,
    errors: list[RowError],
) -> list[tuple[NDArray[np.int64], Mapping[str, Array | Sequence[Array | Exception]]]]:
    """Encode the batch; where the function raises, its halves, down to the rows that are at fault."""
    try:
        encoded = encode(batch)
    except SitsError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        if len(rows) == 1:
            errors.append(RowError.of(int(rows[0]), Stage.ENCODE, error))
            return []
        half = len(rows) // 2
        left = _try_halves(batch.slice(0, half), rows[:half], encode, signature, errors)
        return left + _try_halves(batch.slice(half), rows[half:], encode, signature, errors)
    _check_names(encoded, signature, len(rows))
    return [(rows, encoded)]


def _check_names(encoded: Mapping[str, object], signature: ModelSignature, rows: int) -> None:
    for spec in signature.inputs:
        if spec.name not in encoded:
            msg = (
                f"encode returned no array for the model input {spec.name!r}; it returned {sorted(encoded)}."
            )
            raise ConfigError(msg, hint="return one entry for each model input.")
        try:
            found = len(cast("Sequence[object]", encoded[spec.name])) if spec.is_batched else rows
        except TypeError:
            found = 0
        if found != rows:
            msg = f"encode returned {found} rows for input {spec.name!r}, given {rows}."
            raise ConfigError(
                msg, hint="return one array a row, in order; an Exception for a row that fails."
            )


def _assemble(
    chunk: Chunk,
    rows: NDArray[np.int64],
    encoded: Mapping[str, Array | Sequence[Array | Exception]],
    batched: Sequence[TensorSpec],
    constants: Mapping[str, Array],
    errors: list[RowError],
) -> EncodedChunk:
    failures: dict[int, Exception] = {}
    columns: dict[str, Column] = {
        spec.name: _typed_column(encoded[spec.name], spec, failures) for spec in batched
    }
    if failures:
        errors.extend(RowError.of(int(rows[o]), Stage.ENCODE, failures[o]) for o in sorted(failures))
        keep = np.ones(len(rows), np.bool_)
        keep[list(failures)] = False
        rows = rows[keep]
        columns = {
            name: c[keep] if isinstance(c, np.ndarray) else [c[o] for o in range(len(keep)) if keep[o]]
            for name, c in columns.items()
        }
    return EncodedChunk(
        chunk=chunk,
        rows=rows,
        columns=columns,
        constants={name: np.asarray(value) for name, value in constants.items()},
        errors=tuple(errors),
    )


def _typed_column(
    column: Array | Sequence[Array | Exception], spec: TensorSpec, failures: dict[int, Exception]
) -> Column:
    """Return the column in the input's type; rows that the model cannot take are added to the failures."""
    if not isinstance(column, np.ndarray):
        return [_typed_row(row, spec, offset, failures) for offset, row in enumerate(column)]
    if len(column.shape) != len(spec.shape):
        msg = f"{_misfit(column.shape[1:], spec)} in every row."
        raise ConfigError(msg, hint="return rows without the batch axis, axes in the model's order.")
    if not _fits(column.shape[1:], spec):
        for offset in range(len(column)):
            failures.setdefault(offset, ValueError(_misfit(column.shape[1:], spec)))
    typed = _typed(column, spec)
    lost = _lost_cells(typed, column)
    if lost is not None:
        for offset in np.flatnonzero(lost.reshape(len(column), -1).any(axis=1)):
            failures.setdefault(int(offset), _overflow(column[offset], spec))
    return typed


def _typed_row(
    row: Array | Exception, spec: TensorSpec, offset: int, failures: dict[int, Exception]
) -> Array:
    if isinstance(row, Exception):
        failures.setdefault(offset, row)
        return np.empty(0)
    array = np.asarray(row)
    if not _fits(array.shape, spec):
        failures.setdefault(offset, ValueError(_misfit(array.shape, spec)))
        return array
    typed = _typed(array, spec)
    lost = _lost_cells(typed, array)
    if lost is not None and lost.any():
        failures.setdefault(offset, _overflow(array, spec))
    return typed


def _typed(array: Array, spec: TensorSpec) -> Array:
    wanted = spec.numpy_dtype
    if array.dtype == wanted:
        return array
    if spec.dtype == "string":
        if array.dtype.kind in "OUST":
            return array.astype(object)
    elif np.can_cast(array.dtype, wanted, "same_kind"):
        with np.errstate(over="ignore"):  # found by _lost_cells
            return array.astype(wanted)
    msg = f"Model input {spec.name!r} is {spec.dtype}, but encode returned {array.dtype}."
    raise ConfigError(
        msg, hint=f"convert with .astype({spec.dtype!r}) in encode, or read a column of that type."
    )


def _lost_cells(typed: Array, array: Array) -> NDArray[np.bool_] | None:
    """Return which cells became another number, not only a less precise one; `None` where none can."""
    if typed is array or typed.dtype == object or np.can_cast(array.dtype, typed.dtype, "safe"):
        return None
    if typed.dtype.kind in "iu":
        signs_differ = np.less(typed, 0) != np.less(array, 0)
        return cast("NDArray[np.bool_]", (typed.astype(array.dtype) != array) | signs_differ)
    return np.isinf(typed) & ~np.isinf(array)


def _overflow(row: Array, spec: TensorSpec) -> OverflowError:
    return OverflowError(
        f"a value of {np.max(np.abs(row))} does not fit into {spec.dtype} input {spec.name!r}"
    )


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    # A shorter axis may be padded; if it is not, the model says what it wants.
    wanted = spec.shape[1:]
    return len(shape) == len(wanted) and all(w is None or s <= w for w, s in zip(wanted, shape, strict=True))


def _misfit(shape: tuple[int, ...], spec: TensorSpec) -> str:
    return (
        f"Input {spec.name!r} takes rows of shape {list(spec.shape[1:])}, but encode returned {list(shape)}"
    )


def _null_errors(chunk: Chunk, columns: Sequence[str]) -> list[RowError]:
    nulls = null_mask(chunk.rows, columns)
    if nulls is None:
        return []
    return [_null_error(chunk, columns, int(offset)) for offset in np.flatnonzero(nulls)]


def _null_error(chunk: Chunk, columns: Sequence[str], offset: int) -> RowError:
    column = next(name for name in columns if not chunk.rows.column(name)[offset].is_valid)
    return RowError(
        row=chunk.row_start + offset,
        stage=Stage.ENCODE,
        error="NullValue",
        message=f"null in column {column!r}",
    )
