"""Rows to model inputs: what cannot be encoded is set apart row by row, the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError, DataError
from sits_dagster.inference.dataset import Chunk
from sits_dagster.inference.encode import EncodedChunk, Stage, encode_chunk, encode_columns
from sits_dagster.inference.engine import ModelSignature, TensorSpec

BASE = 100


def _signature(dtype: str = "float32", shape: tuple[int | None, ...] = (None,)) -> ModelSignature:
    return ModelSignature(inputs=(TensorSpec(name="x", dtype=dtype, shape=shape),), outputs=())


def _chunk(values: Sequence[object], kind: pa.DataType | None = None) -> Chunk:
    return Chunk(row_start=BASE, rows=pa.RecordBatch.from_pydict({"x": pa.array(values, kind)}))


def _encode(
    chunk: Chunk,
    function: Callable[[pa.RecordBatch], Mapping[str, object]] | None = None,
    signature: ModelSignature | None = None,
    **options: object,
) -> EncodedChunk:
    signature = signature or _signature()
    return encode_chunk(
        chunk,
        function or encode_columns(signature),
        signature,
        **{"columns_required": ("x",), **options},
    )


def test_a_number_column_reaches_the_model_without_a_copy() -> None:
    """The default costs no time and no memory."""
    chunk = _chunk([1.0, 2.0, 3.0], pa.float32())
    encoded = _encode(chunk)
    assert encoded.rows.tolist() == [100, 101, 102]
    assert np.shares_memory(encoded.columns["x"], chunk.rows.column("x").to_numpy())
    assert encoded.bytes == 12


def test_a_null_is_an_error_of_its_row_that_names_the_column() -> None:
    """A missing value costs one row, and the quarantine says which column."""
    rows = pa.RecordBatch.from_pydict({"x": pa.array([1, None, 3], pa.float32()), "y": [1, 2, None]})
    encoded = _encode(Chunk(row_start=BASE, rows=rows), columns_required=("x", "y"))
    assert encoded.rows.tolist() == [100]
    assert encoded.columns["x"].tolist() == [1.0]
    found = [(e.row, e.stage, e.error, e.message) for e in encoded.errors]
    assert found == [
        (101, Stage.ENCODE, "NullValue", "null in column 'x'"),
        (102, Stage.ENCODE, "NullValue", "null in column 'y'"),
    ]


def test_a_chunk_of_nulls_has_errors_only() -> None:
    """Nothing is encoded where nothing is left."""
    encoded = _encode(_chunk([None, None], pa.float32()))
    assert (len(encoded.rows), len(encoded.errors), encoded.bytes) == (0, 2, 0)


def test_known_rows_are_left_out() -> None:
    """Rows whose results were carried over are neither encoded again nor counted as errors."""
    seen: list[list[float]] = []

    def encode(batch: pa.RecordBatch) -> Mapping[str, object]:
        seen.append(batch.column("x").to_pylist())
        return {"x": batch.column("x").to_numpy(zero_copy_only=False)}

    encoded = _encode(
        _chunk([1, 2, None, 4], pa.float32()), encode, is_done=np.array([True, False, True, False])
    )
    assert encoded.rows.tolist() == [101, 103]
    assert seen == [[2.0, 4.0]]
    assert encoded.errors == ()


def _raises_on(bad: set[int]) -> Callable[[pa.RecordBatch], Mapping[str, object]]:
    def encode(batch: pa.RecordBatch) -> Mapping[str, object]:
        values = batch.column("x").to_pylist()
        found = sorted(bad & set(values))
        if found:
            msg = f"cannot read {found[0]}"
            raise ValueError(msg)
        return {"x": np.asarray(values, np.float32)}

    return encode


@given(rows=st.integers(1, 20), bad=st.sets(st.integers(0, 19)))
def test_a_raising_function_costs_exactly_the_rows_at_fault(rows: int, bad: set[int]) -> None:
    """Every good row is encoded, every bad one has its own message."""
    encoded = _encode(_chunk(range(rows), pa.int64()), _raises_on(bad))
    good = [row for row in range(rows) if row not in bad]
    assert encoded.rows.tolist() == [BASE + row for row in good]
    if good:
        assert [float(row) for row in encoded.columns["x"]] == good
    assert {e.row - BASE: e.message for e in encoded.errors} == {
        row: f"cannot read {row}" for row in bad if row < rows
    }


def test_this_packages_errors_are_not_a_rows_fault() -> None:
    """An encode function that raises DataError or ConfigError ends the run instead of hiding it."""

    def encode(_: pa.RecordBatch) -> Mapping[str, object]:
        msg = "the tokenizer's file is missing"
        raise DataError(msg)

    with pytest.raises(DataError, match="tokenizer"):
        _encode(_chunk([1.0]), encode)


@given(st.lists(st.booleans(), min_size=1, max_size=10))
def test_an_exception_in_place_of_an_array_costs_its_row(is_bad: list[bool]) -> None:
    """A function that knows which rows are bad says so without being called again."""
    calls: list[int] = []

    def encode(batch: pa.RecordBatch) -> Mapping[str, object]:
        calls.append(batch.num_rows)
        return {
            "x": [
                OSError(f"broken image {row}") if bad else np.full(row + 1, row, np.float32)
                for row, bad in enumerate(is_bad)
            ]
        }

    encoded = _encode(_chunk(range(len(is_bad)), pa.int64()), encode, _signature(shape=(None, None)))
    assert calls == [len(is_bad)]
    assert [row.shape[0] - 1 for row in encoded.columns["x"]] == [
        r for r, bad in enumerate(is_bad) if not bad
    ]
    assert encoded.rows.tolist() == [BASE + r for r, bad in enumerate(is_bad) if not bad]
    assert [(e.row - BASE, e.error, e.message) for e in encoded.errors] == [
        (r, "OSError", f"broken image {r}") for r, bad in enumerate(is_bad) if bad
    ]


def test_a_row_that_fails_in_two_inputs_is_one_error() -> None:
    """A row is in the quarantine once; the other input's array of that row is dropped with it."""
    specs = tuple(TensorSpec(name=name, dtype="float32", shape=(None,)) for name in ("x", "y", "z"))
    encoded = _encode(
        _chunk([1, 2]),
        lambda _: {
            "x": [KeyError("x"), np.float32(1)],
            "y": [KeyError("y"), np.float32(2)],
            "z": np.array([3, 4], np.float32),
        },
        ModelSignature(inputs=specs, outputs=()),
    )
    assert [e.message for e in encoded.errors] == ["'x'"]
    assert {name: [float(v) for v in column] for name, column in encoded.columns.items()} == {
        "x": [1.0],
        "y": [2.0],
        "z": [4.0],
    }


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, "no array for the model input 'x'; it returned \\[\\]"),
        ({"y": np.zeros(3)}, "no array for the model input 'x'; it returned \\['y'\\]"),
        ({"x": np.zeros(2, np.float32)}, "returned 2 rows for input 'x', given 3"),
        ({"x": [np.float32(1)] * 4}, "returned 4 rows for input 'x', given 3"),
        ({"x": np.float32(1)}, "input 'x'"),
        ({"x": np.zeros(3, "U1")}, "is float32, but encode returned <U1"),
        ({"x": np.zeros((3, 4), np.float32)}, r"takes rows of shape \[\], but encode returned \[4\]"),
    ],
    ids=["nothing", "other name", "too few", "too many", "scalar", "text", "wrong rank"],
)
def test_a_wrong_result_is_a_configuration_error(result: Mapping[str, object], message: str) -> None:
    """A function that does not fit the model is named at the first chunk, not quarantined row by row."""
    with pytest.raises(ConfigError, match=message):
        _encode(_chunk([1.0, 2.0, 3.0]), lambda _: result)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("float64", "float32"),
        ("float32", "float16"),
        ("int64", "float32"),
        ("int64", "int32"),
        ("bool", "uint8"),
    ],
)
def test_types_are_cast_where_nothing_is_lost_but_precision(found: str, wanted: str) -> None:
    """A float64 column feeds a float32 model."""
    encoded = _encode(_chunk([0, 0]), lambda _: {"x": np.array([0, 1], found)}, _signature(wanted))
    assert encoded.columns["x"].dtype == wanted
    assert encoded.columns["x"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("float32", "int64"),
        ("float32", "string"),
        ("object", "float32"),
        ("int8", "bool"),
        ("int64", "uint8"),
    ],
)
def test_types_are_not_cast_where_values_would_change(found: str, wanted: str) -> None:
    """A float column for an integer input is a mistake, and the message shows the remedy."""
    with pytest.raises(ConfigError, match=rf"is {wanted}.*convert with .astype"):
        _encode(_chunk([0, 0]), lambda _: {"x": np.zeros(2, found)}, _signature(wanted))


def test_an_integer_that_does_not_fit_is_not_wrapped() -> None:
    """An identifier beyond the model's integer type costs its row, and never becomes another identifier."""
    encoded = _encode(_chunk([1, 2**40, 3], pa.int64()), signature=_signature("int32"))
    assert encoded.rows.tolist() == [100, 102]
    assert encoded.columns["x"].tolist() == [1, 3]
    assert [(e.row, e.error) for e in encoded.errors] == [(101, "OverflowError")]


def test_inputs_without_a_batch_axis_are_passed_on_once() -> None:
    """A threshold that the model takes beside its rows is no column."""
    specs = (*_signature().inputs, TensorSpec(name="threshold", dtype="float32", shape=()))
    signature = ModelSignature(inputs=specs, outputs=())
    encoded = _encode(_chunk([1, 2]), lambda _: {"x": np.zeros(2), "threshold": np.float32(0.5)}, signature)
    assert list(encoded.columns) == ["x"]
    assert encoded.constants["threshold"] == np.float32(0.5)
    assert encoded.constants["threshold"].shape == ()


@pytest.mark.parametrize("values", [["a", "bc"], np.array(["a", "bc"], object), np.array(["a", "bc"])])
def test_text_inputs_take_any_array_of_text(values: Sequence[str]) -> None:
    """String models take lists, NumPy text and objects."""
    encoded = _encode(_chunk([0, 0]), lambda _: {"x": values}, _signature("string"))
    assert [str(np.asarray(value)) for value in encoded.columns["x"]] == ["a", "bc"]
    column = encoded.columns["x"]
    assert {c.dtype for c in ([column] if isinstance(column, np.ndarray) else column)} == {np.dtype(object)}


def test_a_row_of_impossible_shape_costs_that_row_wherever_it_is() -> None:
    """Whether a broken row comes first, last or alone in its chunk, it is quarantined and the rest go on."""
    signature = _signature(shape=(None, 3))
    rows = [np.zeros(3, np.float32), np.zeros(5, np.float32), np.zeros((3, 1), np.float32)]
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        encoded = _encode(_chunk([0] * 3), lambda _, o=order: {"x": [rows[i] for i in o]}, signature)
        assert [row - BASE for row in encoded.rows] == [order.index(0)]
        assert sorted(e.row - BASE for e in encoded.errors) == sorted(
            i for i, row in enumerate(order) if row != 0
        )
        assert "[3]" in encoded.errors[0].message
    alone = _encode(_chunk([[1.0] * 5], pa.list_(pa.float32())), signature=signature)
    assert len(alone.rows) == 0
    assert [e.row for e in alone.errors] == [BASE]
