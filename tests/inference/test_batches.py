"""Packing: every row once, one padded shape a batch, and a shape that depends on the row alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError
from sits_dagster.inference.batches import Batch, Packer, split_batch
from sits_dagster.inference.dataset import Chunk
from sits_dagster.inference.encode import Column, EncodedChunk
from sits_dagster.inference.engine import ModelSignature, TensorSpec
from sits_dagster.inference.sizing import Bucket, FixedBatchSizer
from sits_dagster.models.model import Padding

FILL = -7.0
shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=40)
PADDING = (
    Padding(input="x", axis=0, multiple=4, value=FILL),
    Padding(input="x", axis=-1, edges=(2, 5), value=FILL),
)


def _signature(*shape: int | None, batch: int | None = None) -> ModelSignature:
    return ModelSignature(inputs=(TensorSpec(name="x", dtype="float32", shape=(batch, *shape)),), outputs=())


def _chunk(columns: dict[str, Column], row_start: int = 0, constants: object = None) -> EncodedChunk:
    count = len(next(iter(columns.values())))
    rows = pa.RecordBatch.from_pydict({"i": np.arange(count)})
    return EncodedChunk(
        chunk=Chunk(row_start=row_start, rows=rows),
        rows=np.arange(row_start, row_start + count),
        columns=columns,
        constants=constants or {},
    )


def _packer(
    signature: ModelSignature, *, rows: int = 8, window: int = 1000, padding: Sequence[Padding] = ()
) -> Packer:
    return Packer(
        signature=signature,
        padding=padding,
        sizer=FixedBatchSizer(rows),
        window_rows_max=window,
    )


def _array(row: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, row, np.float32)


def _pack(packer: Packer, chunks: Iterable[EncodedChunk]) -> list[Batch]:
    batches = [batch for chunk in chunks for batch in packer.add(chunk)]
    return [*batches, *packer.flush()]


def _chunks(found: list[tuple[int, int]], size: int, *, is_dense: bool) -> list[EncodedChunk]:
    """Rows in chunks; where a chunk's rows have one shape, as one array if asked for."""
    chunks = []
    for start in range(0, len(found), size):
        rows = [_array(start + i, shape) for i, shape in enumerate(found[start : start + size])]
        is_regular = len({row.shape for row in rows}) == 1
        column = np.stack(rows) if is_dense and is_regular else rows
        chunks.append(_chunk({"x": column}, start))
    return chunks


@given(
    found=shapes,
    size=st.integers(1, 9),
    rows=st.integers(1, 9),
    window=st.integers(1, 30),
    dense=st.booleans(),
)
def test_every_row_is_packed_once_with_its_own_values(
    found: list[tuple[int, int]], size: int, rows: int, window: int, *, dense: bool
) -> None:
    """Whatever the shapes, chunks, batch size and window: no row is lost, doubled or mixed up."""
    packer = _packer(_signature(None, None), rows=rows, window=window, padding=PADDING)
    batches = _pack(packer, _chunks(found, size, is_dense=dense))
    assert sorted(int(row) for batch in batches for row in batch.rows) == list(range(len(found)))
    assert packer.rows_waiting == 0
    for batch in batches:
        assert len(batch.rows) <= rows
        assert (np.diff(batch.rows) > 0).all()
        assert batch.arrays["x"].shape == (len(batch.rows), *batch.bucket[0])
        assert batch.cells == sum(np.prod(found[row]) for row in batch.rows)
        assert batch.cells_padded == batch.arrays["x"].size
        for row, array in zip(batch.rows, batch.arrays["x"], strict=True):
            length, width = found[row]
            assert (array[:length, :width] == row).all()
            is_padding = np.ones(array.shape, bool)
            is_padding[:length, :width] = False
            assert (array[is_padding] == FILL).all()


@given(found=shapes, size=st.integers(1, 9), rows=st.integers(1, 9), window=st.integers(1, 30))
def test_a_padded_shape_depends_on_the_row_alone(
    found: list[tuple[int, int]], size: int, rows: int, window: int
) -> None:
    """A row has the same padded shape alone as in any company: its result cannot depend on the others."""
    packer = _packer(_signature(None, None), rows=rows, window=window, padding=PADDING)
    for batch in _pack(packer, _chunks(found, size, is_dense=True)):
        for row in batch.rows:
            alone = _packer(_signature(None, None), padding=PADDING)
            (single,) = _pack(alone, [_chunk({"x": [_array(0, found[row])]})])
            assert single.bucket == batch.bucket


@given(found=shapes, size=st.integers(1, 9), rows=st.integers(1, 9), window=st.integers(1, 30))
def test_no_row_waits_longer_than_the_window(
    found: list[tuple[int, int]], size: int, rows: int, window: int
) -> None:
    """A rare shape cannot hold back the output: memory stays bounded."""
    packer = _packer(_signature(None, None), rows=rows, window=window, padding=PADDING)
    sent: set[int] = set()
    for chunk in _chunks(found, size, is_dense=True):
        for batch in packer.add(chunk):
            sent.update(int(row) for row in batch.rows)
        waiting = set(range(chunk.chunk.row_end)) - sent
        assert packer.rows_waiting == len(waiting)
        assert not waiting or chunk.chunk.row_end - min(waiting) <= window


def test_relief_sends_the_oldest_rows() -> None:
    """When results pile up behind a slow shape, that shape goes first."""
    packer = _packer(_signature(None))
    found = [_array(0, (9,)), _array(1, (2,)), _array(2, (2,))]
    assert list(packer.add(_chunk({"x": found}))) == []
    assert [batch.rows.tolist() for batch in packer.relieve()] == [[0]]
    assert [batch.rows.tolist() for batch in packer.relieve()] == [[1, 2]]
    assert list(packer.relieve()) == []


def test_a_regular_chunk_is_not_copied() -> None:
    """Equal rows that fill a batch go to the device from where they were read."""
    array = np.zeros((8, 3), np.float32)
    batches = _pack(_packer(_signature(3), rows=4), [_chunk({"x": array})])
    assert [batch.rows.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(np.shares_memory(batch.arrays["x"], array) for batch in batches)


@given(count=st.integers(1, 20), size=st.integers(1, 7), as_list=st.booleans())
def test_scalar_columns_are_packed(count: int, size: int, *, as_list: bool) -> None:
    """Plain numbers, also those left over after a raising encode, cross chunk borders unharmed."""
    values = np.arange(count, dtype=np.float32)
    parts = [values[start : start + size] for start in range(0, count, size)]
    columns = [list(part) if as_list else part for part in parts]
    chunks = [
        _chunk({"x": [np.asarray(v) for v in column] if as_list else column}, index * size)
        for index, column in enumerate(columns)
    ]
    batches = _pack(_packer(_signature(), rows=4), chunks)
    assert [v for batch in batches for v in batch.arrays["x"].tolist()] == values.tolist()


def test_text_columns_are_packed() -> None:
    """Text rows of several chunks share a batch."""
    signature = ModelSignature(inputs=(TensorSpec(name="x", dtype="string", shape=(None,)),), outputs=())
    parts = [np.array(["a", "bc"], object), [np.array("d", object)]]
    (batch,) = _pack(_packer(signature), [_chunk({"x": parts[0]}), _chunk({"x": parts[1]}, 2)])
    assert batch.arrays["x"].tolist() == ["a", "bc", "d"]


def test_rows_are_told_apart_by_all_inputs() -> None:
    """Two inputs of unlike shape make a bucket together; scalar inputs go with every batch."""
    specs = (
        TensorSpec(name="x", dtype="float32", shape=(None, None)),
        TensorSpec(name="y", dtype="int64", shape=(None, None)),
        TensorSpec(name="c", dtype="float32", shape=()),
    )
    columns = {
        "x": [_array(row, (1 + row % 2,)) for row in range(4)],
        "y": [np.full((1 + row // 2,), row) for row in range(4)],
    }
    packer = _packer(ModelSignature(inputs=specs, outputs=()))
    batches = _pack(packer, [_chunk(columns, constants={"c": np.float32(5)})])
    assert [batch.rows.tolist() for batch in batches] == [[0], [1], [2], [3]]
    assert {batch.bucket for batch in batches} == {((a,), (b,)) for a in (1, 2) for b in (1, 2)}
    assert all(batch.arrays["c"] == 5 for batch in batches)
    assert {batch.arrays["y"].dtype for batch in batches} == {np.dtype(np.int64)}


class _ShrinkingSizer:
    """Gives fewer rows each time, as a sizer under memory pressure does."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def rows(self, bucket: Bucket) -> int:
        self.given.append(max(1, 6 - len(self.given)))
        return self.given[-1]

    def observe(self, measurement: object) -> None:
        """Learn nothing."""


def test_the_sizer_is_asked_for_each_batch() -> None:
    """A limit that was learned counts from the next batch on."""
    sizer = _ShrinkingSizer()
    packer = Packer(signature=_signature(), padding=(), sizer=sizer, window_rows_max=1000)
    batches = _pack(packer, [_chunk({"x": np.zeros(20, np.float32)})])
    assert [len(batch.rows) for batch in batches[:3]] == [6, 5, 4]
    assert sum(len(batch.rows) for batch in batches) == 20


def test_a_model_of_fixed_batch_size_is_never_given_more() -> None:
    """A model exported for two rows gets two, whatever the sizer says."""
    batches = _pack(_packer(_signature(3, batch=2), rows=8), [_chunk({"x": np.zeros((5, 3), np.float32)})])
    assert [len(batch.rows) for batch in batches] == [2, 2, 1]


@given(count=st.integers(2, 20))
def test_a_split_batch_is_its_two_halves(count: int) -> None:
    """After an out-of-memory every row is still there, once, with its own values."""
    specs = (*_signature(None).inputs, TensorSpec(name="c", dtype="float32", shape=()))
    column = [_array(row, (1 + row % 3,)) for row in range(count)]
    padding = (Padding(input="x", multiple=3),)
    packer = _packer(ModelSignature(inputs=specs, outputs=()), rows=20, padding=padding)
    (batch,) = _pack(packer, [_chunk({"x": column}, 10, {"c": np.zeros(1)})])
    left, right = split_batch(batch)
    assert abs(len(left.rows) - len(right.rows)) <= 1
    assert np.concatenate([left.rows, right.rows]).tolist() == batch.rows.tolist()
    assert np.concatenate([left.arrays["x"], right.arrays["x"]]).tolist() == batch.arrays["x"].tolist()
    assert left.bucket == right.bucket == batch.bucket
    assert left.arrays["c"] is batch.arrays["c"]
    assert left.cells_padded + right.cells_padded == batch.cells_padded


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ((Padding(input="z", multiple=2),), "names the input 'z'"),
        ((Padding(input="x", axis=2, multiple=2),), "axis 2 is outside"),
        ((Padding(input="x", axis=-3, multiple=2),), "axis -3 is outside"),
        (
            (Padding(input="x", axis=0, multiple=2), Padding(input="x", axis=1, multiple=2, value=1)),
            "one value",
        ),
        ((Padding(input="x", axis=1, multiple=2), Padding(input="x", axis=-1, multiple=3)), "twice"),
    ],
    ids=["input", "axis", "negative axis", "two values", "one axis twice"],
)
def test_padding_that_does_not_fit_the_model_is_refused(padding: Sequence[Padding], message: str) -> None:
    """A typing error in the padding ends the run before it starts."""
    with pytest.raises(ConfigError, match=message):
        _packer(_signature(None, None), padding=padding)


IDS = TensorSpec(name="input_ids", dtype="int64", shape=(None, None))
EDGES = Padding(input="input_ids", edges=(4, 8))


def _masked(mask: str = "attention_mask", length: int | None = None) -> ModelSignature:
    return ModelSignature(
        inputs=(IDS, TensorSpec(name=mask, dtype="int64", shape=(None, length))), outputs=()
    )


def test_padding_without_its_mask_is_refused() -> None:
    """Words that are padded beside a mask that is not would count as words; the message says what to add."""
    with pytest.raises(ConfigError, match=r"'attention_mask' is not padded.*Padding\(input='attention_mask'"):
        _packer(_masked(), padding=[EDGES])


def test_a_mask_that_is_padded_with_data_is_refused() -> None:
    """A mask of 1 says that padding is data."""
    mask = Padding(input="attention_mask", edges=(4, 8), value=1)
    with pytest.raises(ConfigError, match=r"'attention_mask' is padded with 1,.*value=0"):
        _packer(_masked(), padding=[EDGES, mask])


@pytest.mark.parametrize(
    ("signature", "padding"),
    [
        (_masked(), []),
        (_masked(), [EDGES, Padding(input="attention_mask", edges=(4, 8))]),
        (_masked(length=8), [EDGES]),
        (_masked("key_padding_mask"), [EDGES, Padding(input="key_padding_mask", edges=(4, 8), value=1)]),
    ],
    ids=["no padding", "padded with 0", "of fixed length", "1 is padding by name"],
)
def test_a_mask_that_covers_the_padding_is_fine(signature: ModelSignature, padding: list[Padding]) -> None:
    """Nothing is refused where the model is told what is padding, or where there is none."""
    packer = _packer(signature, padding=padding)
    rows = [np.ones(length, np.int64) for length in (2, 3)]
    mask = [np.ones(signature.inputs[1].shape[1] or len(row), np.int64) for row in rows]
    batches = _pack(packer, [_chunk({"input_ids": rows, signature.inputs[1].name: mask})])
    assert sum(len(batch.rows) for batch in batches) == 2


def test_a_padded_mask_is_zero_behind_the_row() -> None:
    """Each row's mask is 1 for its own cells and 0 for the padding."""
    packer = _packer(_masked(), padding=[EDGES, Padding(input="attention_mask", edges=(4, 8))])
    rows = [np.ones(length, np.int64) for length in (2, 3)]
    [batch] = _pack(packer, [_chunk({"input_ids": rows, "attention_mask": rows})])
    assert batch.arrays["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
