"""Outputs to columns: the default keeps every value and type, and a failing row costs itself alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError, DataError
from sits_dagster.inference.decode import decode_batch, decode_columns, default_schema
from sits_dagster.inference.encode import Stage
from sits_dagster.inference.engine import Arrays, ModelSignature, TensorSpec

F4, I8 = pa.float32(), pa.int64()
OUTPUTS = {
    "scalar": ("float32", (None,), np.array([1, 2], np.float32), F4),
    "vector": ("float32", (None, 3), np.zeros((2, 3), np.float32), pa.list_(F4, 3)),
    "free vector": ("int64", (None, None), np.zeros((2, 3), np.int64), pa.list_(I8)),
    "matrix": ("float32", (None, 2, 3), np.zeros((2, 2, 3), np.float32), pa.list_(pa.list_(F4, 3), 2)),
    "free rows": ("float32", (None, None, 3), np.zeros((2, 2, 3), np.float32), pa.list_(pa.list_(F4, 3))),
    "free columns": ("float32", (None, 2, None), np.zeros((2, 2, 3), np.float32), pa.list_(pa.list_(F4), 2)),
    "float16": ("float16", (None,), np.array([1, 2], np.float16), pa.float16()),
    "text": ("string", (None,), np.array(["a", "ü"], object), pa.string()),
    "texts": ("string", (None, 2), np.array([["a", "b"], ["c", ""]], object), pa.list_(pa.string(), 2)),
    "bool": ("bool", (None,), np.array([True, False]), pa.bool_()),
    "uint8": ("uint8", (None,), np.array([1, 255], np.uint8), pa.uint8()),
    "fixed batch": ("float32", (2, 3), np.zeros((2, 3), np.float32), pa.list_(F4, 3)),
}


def _signature(**outputs: tuple[str, tuple[int | None, ...]]) -> ModelSignature:
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in outputs.items()]
    return ModelSignature(inputs=(), outputs=tuple(specs))


def _decode(signature: ModelSignature, outputs: Arrays) -> pa.RecordBatch:
    rows = np.arange(len(next(iter(outputs.values()))), dtype=np.int64)
    (decoded,) = decode_batch(rows, outputs, decode_columns(signature))
    assert decoded.columns is not None
    return decoded.columns


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_becomes_a_column_of_its_type(name: str) -> None:
    """Without a decode function every number, list, matrix and text arrives in the file as it was."""
    dtype, shape, array, kind = OUTPUTS[name]
    columns = _decode(_signature(y=(dtype, shape)), {"y": array})
    assert columns.schema.field("y").type == kind
    assert columns.column("y").to_pylist() == array.tolist()


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_schema_is_known_before_the_first_result(name: str) -> None:
    """An empty partition gets the same columns as a full one."""
    dtype, shape, array, _ = OUTPUTS[name]
    signature = _signature(y=(dtype, shape))
    assert default_schema(signature) == _decode(signature, {"y": array}).schema


def test_several_outputs_become_several_columns_in_graph_order() -> None:
    """The model's outputs keep their names and order."""
    signature = _signature(label=("int64", (None,)), scores=("float32", (None, 2)))
    columns = _decode(signature, {"label": np.array([7, 8]), "scores": np.ones((2, 2), np.float32)})
    assert columns.schema.names == ["label", "scores"]
    assert columns.schema == default_schema(signature)


def test_an_output_of_another_rank_than_declared_is_still_decoded() -> None:
    """Some exporters declare a wrong shape; the schema then comes from the first results."""
    columns = _decode(_signature(y=("float32", (None,))), {"y": np.ones((2, 3), np.float32)})
    assert columns.column("y").to_pylist() == [[1.0] * 3] * 2
    assert default_schema(_signature(y=("float32", ()))) is None


def test_an_output_without_rows_is_left_out() -> None:
    """A scalar about the whole batch belongs to no row."""
    signature = _signature(y=("float32", (None,)), loss=("float32", ()))
    columns = _decode(signature, {"y": np.ones(2, np.float32), "loss": np.float32(3)})
    assert columns.schema.names == ["y"]


@given(rows=st.integers(1, 20), bad=st.sets(st.integers(0, 19)))
def test_a_raising_function_costs_exactly_the_rows_at_fault(rows: int, bad: set[int]) -> None:
    """Every other row of the batch is decoded, each once, in order; batch-wide outputs do no harm."""

    def decode(outputs: Arrays) -> Mapping[str, object]:
        found = sorted(bad & set(outputs["y"].tolist()))
        if found:
            msg = f"no text for {found[0]}"
            raise ValueError(msg)
        return {"text": [str(value) for value in outputs["y"].tolist()]}

    outputs = {"y": np.arange(rows), "loss": np.float32(1)}
    decoded = decode_batch(np.arange(rows) + 50, outputs, decode)
    texts = [text for part in decoded if part.columns for text in part.columns.column("text").to_pylist()]
    numbers = [int(row) - 50 for part in decoded for row in part.rows]
    assert texts == [str(row) for row in numbers]
    assert numbers == [row for row in range(rows) if row not in bad]
    errors = [error for part in decoded for error in part.errors]
    assert [(e.row - 50, e.stage, e.message) for e in errors] == [
        (row, Stage.DECODE, f"no text for {row}") for row in sorted(bad) if row < rows
    ]


def test_a_wrong_number_of_rows_is_a_configuration_error() -> None:
    """A decode function that drops rows would shift results to other rows: it is stopped."""
    with pytest.raises(ConfigError, match="returned 1 rows for a batch of 2"):
        decode_batch(np.arange(2), {"y": np.zeros(2)}, lambda _: {"y": [1]})


def test_this_packages_errors_are_not_a_rows_fault() -> None:
    """A decode function that raises DataError ends the run instead of hiding it."""

    def decode(_: Arrays) -> Mapping[str, object]:
        msg = "the labels' file is missing"
        raise DataError(msg)

    with pytest.raises(DataError, match="labels"):
        decode_batch(np.arange(2), {"y": np.zeros(2)}, decode)


def test_a_record_batch_is_taken_as_it_is() -> None:
    """A function may build its own Arrow columns."""
    made = pa.RecordBatch.from_pydict({"y": pa.array([1, 2], pa.int8())})
    (decoded,) = decode_batch(np.arange(2), {"y": np.zeros(2)}, lambda _: made)
    assert decoded.columns is made
    assert decoded.bytes == 2
