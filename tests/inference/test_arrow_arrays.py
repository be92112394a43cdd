"""Arrow columns become arrays without a copy, whatever part of a larger table they are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError
from sits_dagster.inference.arrow_arrays import column_array, null_mask, tensor_column

TENSORS = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.float32).reshape(4, 2, 3))
DENSE = {
    "float32": pa.array([1, 2, 3, 4], pa.float32()),
    "int64": pa.array([1, 2, 3, 4], pa.int64()),
    "float16": pa.array(np.array([1, 2, 3, 4], np.float16)),
    "list of equal length": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32())),
    "large list": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.large_list(pa.float32())),
    "fixed-size list": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
    "fixed in fixed": pa.array([[[1], [2]]] * 4, pa.list_(pa.list_(pa.float32(), 1), 2)),
    "tensor": TENSORS,
}
RAGGED = {
    "lists": pa.array([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0]], pa.list_(pa.float32())),
    "binary": pa.array([b"a", b"bc", b"", b"def"], pa.binary()),
    "large binary": pa.array([b"a", b"bc", b"", b"def"], pa.large_binary()),
}


def _memory(column: pa.Array) -> list[np.ndarray]:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return [np.frombuffer(buffer, np.uint8) for buffer in column.buffers() if buffer and buffer.size]


def _as_lists(values: object) -> list[object]:
    return [np.asarray(row).tolist() for row in values]


def _expected(column: pa.Array) -> list[object]:
    if isinstance(column, pa.FixedShapeTensorArray):
        return column.to_numpy_ndarray().tolist()
    return [list(value) if isinstance(value, bytes) else value for value in column.to_pylist()]


@pytest.mark.parametrize("offset", [0, 1], ids=["whole", "sliced"])
@pytest.mark.parametrize("name", DENSE)
def test_regular_columns_are_views(name: str, offset: int) -> None:
    """Numbers, equal lists and tensors reach the model without a copy, also from a slice."""
    column = DENSE[name].slice(offset, 3)
    array = column_array(column)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == _expected(column)
    assert any(np.shares_memory(array, memory) for memory in _memory(column))


@pytest.mark.parametrize("offset", [0, 1], ids=["whole", "sliced"])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_columns_are_one_view_a_row(name: str, offset: int) -> None:
    """Rows of unlike length and images are views of the column, also from a slice."""
    column = RAGGED[name].slice(offset, 3)
    arrays = column_array(column)
    assert _as_lists(arrays) == _expected(column)
    memory = _memory(column)
    assert all(any(np.shares_memory(row, part) for part in memory) for row in arrays if row.size)


@given(
    rows=st.lists(
        st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    ),
    data=st.data(),
)
def test_nested_lists_become_matrices(rows: list[list[list[int]]], data: st.DataObject) -> None:
    """A list of equal lists is a matrix a row, for any slice."""
    start = data.draw(st.integers(0, len(rows) - 1))
    column = pa.array(rows, pa.list_(pa.list_(pa.int64()))).slice(start)
    assert _as_lists(column_array(column)) == rows[start:]


def test_lists_of_unlike_rows_become_one_matrix_a_row() -> None:
    """Sizes may differ from row to row, not within a row."""
    column = pa.array([[[1], [2]], [[1, 2, 3]]], pa.list_(pa.list_(pa.int64())))
    assert [row.shape for row in column_array(column)] == [(2, 1), (1, 3)]
    with pytest.raises(ValueError, match="same shape"):
        column_array(pa.array([[[1], [2, 3]]], pa.list_(pa.list_(pa.int64()))))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_becomes_objects(kind: pa.DataType) -> None:
    """Text columns of every encoding reach string inputs."""
    array = column_array(pa.array(["a", "", "ü"], kind))
    assert array.dtype == object
    assert array.tolist() == ["a", "", "ü"]


def test_booleans_and_lists_of_text() -> None:
    """Bits are unpacked, and a list of words a row is an array of words a row."""
    assert column_array(pa.array([True, False])).tolist() == [True, False]
    assert column_array(pa.array([["a", "b"], ["c", "d"]])).tolist() == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([{"a": 1}]),
        pa.array([1], pa.timestamp("s")),
        pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8())),
    ],
    ids=["struct", "timestamp", "map"],
)
def test_other_types_ask_for_an_encode_function(column: pa.Array) -> None:
    """A column that has no array form says what to write."""
    with pytest.raises(ConfigError, match="give an encode function"):
        column_array(column)


def test_nulls_are_found_over_several_columns() -> None:
    """A row counts as null when any named column is."""
    batch = pa.RecordBatch.from_pydict({"a": [1, None, 3], "b": ["x", "y", None], "c": [None, 1, 1]})
    assert null_mask(batch, ["a", "b"]).tolist() == [False, True, True]
    assert null_mask(batch.slice(0, 1), ["a", "b"]) is None
    assert null_mask(batch, []) is None


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)),
    declared=st.tuples(st.booleans(), st.booleans()),
)
def test_outputs_become_the_same_values(shape: tuple[int, int, int], declared: tuple[bool, bool]) -> None:
    """Matrices keep every value, whichever axes the model declares, also where an axis has no cell."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    free = tuple(n if is_declared else None for n, is_declared in zip(shape[1:], declared, strict=True))
    column = tensor_column(array, free)
    assert column.to_pylist() == array.tolist()
    column.validate(full=True)


def test_a_number_output_is_not_copied() -> None:
    """A vector of results goes to the file from where the model left it."""
    array = np.arange(1000, dtype=np.float32)
    column = tensor_column(array, ())
    assert np.shares_memory(column.to_numpy(), array)
