"""Packing encoded rows of one padded shape into batches, inside a look-ahead window."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sits_dagster.errors import ConfigError
from sits_dagster.inference.encode import Column, EncodedChunk
from sits_dagster.inference.engine import Array, Arrays, ModelSignature, TensorSpec
from sits_dagster.inference.sizing import BatchSizer, Bucket
from sits_dagster.models.model import Padding
from sits_dagster.models.samples import is_mask

__all__ = ["Batch", "Packer", "split_batch"]

WINDOW_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that go through the device together.

    Args:
        rows: Row numbers, int64 [n]; row i of every array belongs to `rows[i]`.
        arrays: The model's inputs, padded; batched ones have n rows.
        bucket: The padded row shapes.
        batched: Names of the inputs that have a batch axis.
        cells: Cells of the batched inputs that hold data.
        cells_padded: Cells of the batched inputs, padding included.
    """

    rows: NDArray[np.int64]
    arrays: Arrays
    bucket: Bucket
    batched: frozenset[str]
    cells: int
    cells_padded: int

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Return the two halves of a batch of at least two rows; the cells are shared out by rows."""
    half = len(batch.rows) // 2
    return _part(batch, slice(0, half)), _part(batch, slice(half, None))


def _part(batch: Batch, rows: slice) -> Batch:
    arrays = {name: array[rows] if name in batch.batched else array for name, array in batch.arrays.items()}
    found = batch.rows[rows]
    share = len(found) / len(batch.rows)
    return Batch(
        rows=found,
        arrays=arrays,
        bucket=batch.bucket,
        batched=batch.batched,
        cells=round(batch.cells * share),
        cells_padded=round(batch.cells_padded * share),
    )


@dataclass(slots=True)
class _Piece:
    chunk: EncodedChunk
    offsets: NDArray[np.int64]


@dataclass(slots=True)
class _Waiting:
    """The rows of one bucket, oldest first."""

    pieces: list[_Piece] = field(default_factory=list[_Piece])
    count: int = 0

    @property
    def oldest(self) -> int:
        piece = self.pieces[0]
        return int(piece.chunk.rows[piece.offsets[0]])

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.count += len(piece.offsets)

    def take(self, rows: int) -> list[_Piece]:
        taken: list[_Piece] = []
        self.count -= rows
        while rows:
            piece = self.pieces[0]
            if len(piece.offsets) <= rows:
                taken.append(self.pieces.pop(0))
                rows -= len(piece.offsets)
            else:
                taken.append(_Piece(piece.chunk, piece.offsets[:rows]))
                piece.offsets = piece.offsets[rows:]
                rows = 0
        return taken


class Packer:
    """Holds encoded rows by bucket and gives a batch as soon as one is full.

    A row's padded shape is a function of that row alone, so its result does not depend on the rows
    beside it. The window bounds how many rows may wait: beyond it the bucket that holds the oldest
    row is sent although it is not full.

    Args:
        signature: The model's inputs.
        padding: Axes that may be padded.
        sizer: Says how many rows a batch of a bucket has.
        window_rows_max: Most rows between the oldest waiting one and the newest, >= 1.
        window_bytes_max: Most bytes of padded rows that wait.
    """

    def __init__(
        self,
        *,
        signature: ModelSignature,
        padding: Sequence[Padding],
        sizer: BatchSizer,
        window_rows_max: int,
        window_bytes_max: int = WINDOW_BYTES_MAX,
    ) -> None:
        self._inputs = [spec for spec in signature.inputs if spec.is_batched]
        self._names = frozenset(spec.name for spec in self._inputs)
        self._padding = {name: [rule for rule in padding if rule.input == name] for name in self._names}
        self._fill = {name: rules[0].value if rules else 0.0 for name, rules in self._padding.items()}
        self._sizer = sizer
        self._rows_fixed = signature.batch_rows_fixed
        self._window_rows_max = window_rows_max
        self._window_bytes_max = window_bytes_max
        self._waiting: dict[Bucket, _Waiting] = {}
        self._row_newest = 0
        _check_padding(padding, self._inputs)

    @property
    def rows_waiting(self) -> int:
        """Rows that wait for a batch."""
        return sum(waiting.count for waiting in self._waiting.values())

    @property
    def bytes_waiting(self) -> int:
        """Bytes of those rows, padded."""
        return sum(waiting.count * self._row_bytes(bucket) for bucket, waiting in self._waiting.items())

    def _row_bytes(self, bucket: Bucket) -> int:
        return sum(
            math.prod(shape) * spec.numpy_dtype.itemsize
            for spec, shape in zip(self._inputs, bucket, strict=True)
        )

    def add(self, encoded: EncodedChunk) -> Iterator[Batch]:
        """Take in a chunk's rows and yield the batches that are full, or are forced by the window."""
        self._row_newest = encoded.chunk.row_end
        for bucket, offsets in self._buckets(encoded).items():
            waiting = self._waiting.setdefault(bucket, _Waiting())
            waiting.add(_Piece(encoded, offsets))
            while waiting.count >= (rows := self._rows(bucket)):
                yield self._batch(bucket, rows)
        while self._waiting:
            row, bucket = self._oldest()
            if (
                self._row_newest - row <= self._window_rows_max
                and self.bytes_waiting <= self._window_bytes_max
            ):
                break
            yield self._send(bucket)

    def flush(self) -> Iterator[Batch]:
        """Yield everything that waits, oldest bucket first."""
        while self._waiting:
            yield self._send(self._oldest()[1])

    def relieve(self) -> Iterator[Batch]:
        """Yield the bucket that holds the oldest waiting row, so that finished rows can be written."""
        if self._waiting:
            yield self._send(self._oldest()[1])

    def _rows(self, bucket: Bucket) -> int:
        rows = self._sizer.rows(bucket)
        return rows if self._rows_fixed is None else min(rows, self._rows_fixed)

    def _oldest(self) -> tuple[int, Bucket]:
        return min((waiting.oldest, bucket) for bucket, waiting in self._waiting.items())

    def _send(self, bucket: Bucket) -> Batch:
        return self._batch(bucket, min(self._waiting[bucket].count, self._rows(bucket)))

    def _batch(self, bucket: Bucket, rows: int) -> Batch:
        waiting = self._waiting[bucket]
        pieces = waiting.take(rows)
        if not waiting.count:
            del self._waiting[bucket]
        arrays: dict[str, Array] = dict(pieces[0].chunk.constants)
        cells = 0
        for spec, shape in zip(self._inputs, bucket, strict=True):
            columns = [piece.chunk.columns[spec.name] for piece in pieces]
            array, filled = _gather(columns, pieces, shape, spec, self._fill[spec.name])
            arrays[spec.name] = array
            cells += filled
        return Batch(
            rows=np.concatenate([piece.chunk.rows[piece.offsets] for piece in pieces]),
            arrays=arrays,
            bucket=bucket,
            batched=self._names,
            cells=cells,
            cells_padded=sum(arrays[name].size for name in self._names),
        )

    def _buckets(self, encoded: EncodedChunk) -> dict[Bucket, NDArray[np.int64]]:
        count = len(encoded.rows)
        if not count:
            return {}
        columns = [encoded.columns[spec.name] for spec in self._inputs]
        dense = [column for column in columns if isinstance(column, np.ndarray)]
        if len(dense) == len(columns):
            bucket = tuple(
                self._padded(s.name, c.shape[1:]) for s, c in zip(self._inputs, dense, strict=True)
            )
            return {bucket: np.arange(count)}
        shapes = [self._row_shapes(spec, column) for spec, column in zip(self._inputs, columns, strict=True)]
        found: dict[Bucket, list[int]] = {}
        for offset, bucket in enumerate(zip(*shapes, strict=True)):
            found.setdefault(bucket, []).append(offset)
        return {bucket: np.asarray(offsets) for bucket, offsets in found.items()}

    def _row_shapes(self, spec: TensorSpec, column: Column) -> list[tuple[int, ...]]:
        if isinstance(column, np.ndarray):
            return [self._padded(spec.name, column.shape[1:])] * len(column)
        return [self._padded(spec.name, row.shape) for row in column]

    def _padded(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        rules = self._padding[name]
        if not rules:
            return shape
        lengths = list(shape)
        for rule in rules:
            lengths[rule.axis] = rule.length(lengths[rule.axis])
        return tuple(lengths)


def _gather(
    columns: Sequence[Column], pieces: Sequence[_Piece], shape: tuple[int, ...], spec: TensorSpec, fill: float
) -> tuple[Array, int]:
    """Return one input's array [rows, *shape] and how many of its cells hold data."""
    only = columns[0]
    if len(columns) == 1 and isinstance(only, np.ndarray) and only.shape[1:] == shape:
        offsets = pieces[0].offsets
        contiguous = int(offsets[-1] - offsets[0]) + 1 == len(offsets)
        view = only[offsets[0] : offsets[-1] + 1] if contiguous else only[offsets]
        return view, view.size
    count = sum(len(piece.offsets) for piece in pieces)
    array = np.empty((count, *shape), spec.numpy_dtype)
    row, cells = 0, 0
    for column, piece in zip(columns, pieces, strict=True):
        if isinstance(column, np.ndarray) and column.shape[1:] == shape:
            array[row : row + len(piece.offsets)] = column[piece.offsets]
            row += len(piece.offsets)
            cells += len(piece.offsets) * math.prod(shape)
            continue
        for offset in piece.offsets:
            cells += _place(array[row, ...], column[offset], fill)
            row += 1
    return array, cells


def _place(target: Array, source: Array, fill: float) -> int:
    """Copy the row and fill what is left of its padded cells; return the row's own cells."""
    if target.shape != source.shape:
        # Only the margins are filled: the row's cells would be written twice otherwise.
        for axis, length in enumerate(source.shape):
            target[(*(slice(n) for n in source.shape[:axis]), slice(length, None))] = fill
        target = target[tuple(slice(length) for length in source.shape)]
    target[...] = source
    return source.size


def _check_padding(padding: Sequence[Padding], inputs: Sequence[TensorSpec]) -> None:
    ranks: Mapping[str, int] = {spec.name: len(spec.shape) - 1 for spec in inputs}
    for rule in padding:
        if rule.input not in ranks:
            msg = f"Padding names the input {rule.input!r}, but the model's inputs are {sorted(ranks)}."
            raise ConfigError(msg)
        if not -ranks[rule.input] <= rule.axis < ranks[rule.input]:
            rank = ranks[rule.input]
            msg = f"Padding axis {rule.axis} is outside of the rows of input {rule.input!r} ({rank} axes)."
            raise ConfigError(msg, hint="axes are counted within a row, without the batch axis.")
    for name, rank in ranks.items():
        rules = [rule for rule in padding if rule.input == name]
        if len({rule.axis % rank for rule in rules}) < len(rules):
            msg = f"Padding names an axis of input {name!r} twice."
            raise ConfigError(msg, hint="give one Padding for each axis.")
        if len({rule.value for rule in rules}) > 1:
            msg = f"Padding fills the axes of input {name!r} with {[rule.value for rule in rules]}."
            raise ConfigError(msg, hint="give one value for all axes of an input.")
    _check_masks(padding, inputs)


def _check_masks(padding: Sequence[Padding], inputs: Sequence[TensorSpec]) -> None:
    """Refuse padding that the model would take for data: a mask beside it must say that it is none."""
    if not padding:
        return
    for spec in inputs:
        rules = [rule for rule in padding if rule.input == spec.name]
        is_of_free_length = any(length is None for length in spec.shape[1:])
        if not is_mask(spec.name) or (not rules and not is_of_free_length):
            continue
        # Masks that name the padding itself, as PyTorch's key_padding_mask does, are 1 there.
        is_padded_as_data = any(rule.value for rule in rules) and "pad" not in spec.name.lower()
        if not rules or is_padded_as_data:
            what = "is not padded" if not rules else f"is padded with {rules[0].value:g}"
            msg = f"The mask {spec.name!r} {what}, so the model would take padding for data."
            raise ConfigError(msg, hint=f"add Padding(input={spec.name!r}, …, value=0) with the same edges.")
