"""Whether a partition's own rows may share a batch: which rows are tried, and what their failures mean."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError, ModelError, StallError, TransientError
from sits_dagster.inference.batching_probe import probe_partition
from sits_dagster.inference.engine import Array, Arrays, ModelSignature, TensorSpec
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.trials import ROWS_READ_MAX
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.model import Padding
from sits_dagster.testing import FakeEngine, MemoryFormat, MemoryRows, MemoryStore, Trial

FREE = (None, None)
NO_TWO_ROWS = "no two unlike rows of equal shape"


def _spec(name: str, shape: tuple[int | None, ...] = FREE) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


def _engine(
    function: Callable[[Any], Any], *, shape: tuple[int | None, ...] = FREE, **faults: Any
) -> FakeEngine:
    signature = ModelSignature(inputs=(_spec("x", shape),), outputs=(_spec("y"),))
    return FakeEngine(signature, lambda inputs: {"y": np.asarray(function(inputs["x"]))}, **faults)


def _probe(
    rows: list[Any],
    engine: FakeEngine,
    *,
    encode: Callable[[pa.RecordBatch], Mapping[str, Any]] | None = None,
    padding: tuple[Padding, ...] = (),
    required: tuple[str, ...] = ("x",),
    should_stop: Callable[[], bool] = lambda: False,
    **policy: Any,
) -> BatchingReport:
    column = pa.array(rows, pa.list_(pa.float32()))
    limits = PipelinePolicy(**{"chunk_rows": 4, **policy})
    trial = Trial(
        source=MemoryRows(pa.RecordBatch.from_pydict({"x": column, "id": np.arange(len(rows))})),
        signature=engine.signature,
        function=lambda inputs: inputs,
        encode=encode,
        padding=padding,
        columns_required=required,
        policy=limits,
    )
    work = trial.work(MemoryFormat(MemoryStore()))
    return probe_partition(work, engine, limits, should_stop=should_stop)


def _rows(count: int, width: int = 3) -> list[list[float]]:
    return [[float(row + 1)] * width for row in range(count)]


def _quantised(x: Array) -> Array:
    scale = np.abs(x).max() / 127
    return (np.round(x / scale) * scale).astype(np.float32)


def test_rows_that_keep_to_themselves_may_share_a_batch() -> None:
    """Three rows are tried alone and together: five calls."""
    engine = _engine(lambda x: x * 2)
    report = _probe(_rows(9), engine)
    assert (report.verdict, report.output_axes) == (Batching.INVARIANT, {"y": 0})
    assert [len(batch["x"]) for batch in engine.batches] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "function",
    [_quantised, lambda x: np.exp(x - x.max(0)) / np.exp(x - x.max(0)).sum(0), lambda x: np.cumsum(x, 0)],
    ids=["quantised by all", "softmax over the batch", "sum along the batch"],
)
def test_rows_that_feel_each_other_may_not(function: Callable[[Any], Any]) -> None:
    """Whatever mixes rows is found with a partition's own rows."""
    report = _probe([[1.0, 0.31], [2.0, 0.17], [5.0, 0.01]], _engine(function))
    assert report.verdict is Batching.NOT_BATCHABLE
    assert "of a batch of" in report.evidence[0]


def test_copies_among_the_first_rows_do_not_hide_that_rows_mix() -> None:
    """Rows that are equal agree in any batch: the unlike ones further down are taken."""
    rows = [[1.0, 0.3]] * 20 + [[1.0, 0.3], [100.0, 0.3]]
    assert _probe(rows, _engine(_quantised)).verdict is Batching.NOT_BATCHABLE


def test_the_least_and_the_largest_rows_are_tried() -> None:
    """What scales over the batch shows most in rows of unlike size."""
    engine = _engine(lambda x: x)
    _probe([[3.0], [1.0], [2.0], [7.0], [2.5], [9.0]], engine, chunk_rows=5)
    assert [batch["x"].tolist() for batch in engine.batches[:3]] == [[[1.0]], [[2.5]], [[7.0]]]


@pytest.mark.parametrize("rows", [[[2.0, 3.0]], [[2.0, 3.0]] * 5], ids=["one row", "copies"])
def test_rows_without_an_unlike_one_tell_the_axes_only(rows: list[Any]) -> None:
    """One row, or copies of it, say where the outputs' rows lie, and nothing about mixing."""
    report = _probe(rows, _engine(lambda x: x[None] * 2))
    assert (report.verdict, report.output_axes) == (Batching.UNPROBED, {"y": 1})
    assert NO_TWO_ROWS in report.evidence[0]


def test_rows_of_unlike_shape_are_not_tried_together() -> None:
    """Without two rows of one shape nothing is said; with padding they have one."""
    rows = [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]]
    assert _probe(rows, _engine(lambda x: x)).verdict is Batching.UNPROBED
    engine = _engine(lambda x: x.sum(axis=1))
    report = _probe(rows, engine, padding=(Padding(input="x", multiple=4),))
    assert report.verdict is Batching.INVARIANT
    assert {batch["x"].shape[1] for batch in engine.batches} == {4}


def test_the_shape_of_most_rows_is_tried() -> None:
    """A few odd rows at the start do not keep the others from being tried."""
    engine = _engine(lambda x: x)
    assert _probe([[1.0], [2.0, 2.0], *_rows(5)], engine).verdict is Batching.INVARIANT
    assert {batch["x"].shape[1] for batch in engine.batches} == {3}


def test_an_empty_partition_is_not_tried() -> None:
    """No rows, no calls."""
    engine = _engine(lambda x: x)
    assert _probe([], engine).verdict is Batching.UNPROBED
    assert engine.calls == 0


def test_at_most_the_first_rows_are_read() -> None:
    """The first chunk is enough if it has what is needed; a long partition is not read through."""
    seen: list[int] = []

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        seen.extend(batch.column("id").to_pylist())
        return {"x": [np.array(x, np.float32) for x in batch.column("x").to_pylist()]}

    def rows_read(rows: list[Any], **policy: Any) -> list[int]:
        seen.clear()
        _probe(rows, _engine(lambda x: x), encode=encode, **policy)
        return list(seen)

    assert rows_read(_rows(500)) == list(range(4))
    copies = [[1.0] * 3] * 500
    assert rows_read(copies) == list(range(ROWS_READ_MAX))
    assert rows_read(copies, queue_bytes=100) == list(range(12)), "rows of 12 bytes"


def test_rows_that_cannot_be_encoded_are_passed_over() -> None:
    """Nulls and rows that fail are left to the run, which quarantines them."""
    rows = [None, [1.0], [2.0], None, [3.0]]

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        values = batch.column("x").to_pylist()
        return {"x": [ValueError("two") if v == [2.0] else np.array(v, np.float32) for v in values]}

    report = _probe(rows, _engine(lambda x: x), encode=encode)
    assert report.verdict is Batching.INVARIANT
    all_fail = _probe(rows, _engine(lambda x: x), encode=lambda batch: {"x": [ValueError()] * len(batch)})
    assert all_fail.verdict is Batching.UNPROBED


def test_a_fault_of_the_declaration_is_raised() -> None:
    """Padding that fits no input is the deployment's fault, here as in the run itself."""
    with pytest.raises(ConfigError, match="Padding names the input 'z'"):
        _probe(_rows(3), _engine(lambda x: x), padding=(Padding(input="z", multiple=4),))


def test_an_encode_function_that_ends_the_run_is_left_to_it() -> None:
    """Rows before the error are tried, and may be committed; without any nothing is known."""

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        if batch.column("id")[0].as_py() >= 4:
            message = "the licence ended"
            raise ConfigError(message)
        return {"x": np.array(batch.column("x").to_pylist(), np.float32)}

    copies = [[1.0]] * 3
    assert _probe([*copies, [2.0], [3.0]], _engine(lambda x: x), encode=encode).verdict is Batching.INVARIANT
    assert _probe(_rows(3), _engine(lambda x: x), encode=lambda _: {}).verdict is Batching.UNPROBED


def _refuses(value: float) -> Callable[[Any], Any]:
    def function(x: Array) -> Array:
        if (x == value).any():
            message = "bad row"
            raise ModelError(message)
        return x

    return function


def test_a_row_that_the_model_refuses_is_not_the_last_word() -> None:
    """Other rows are tried in place of those among which one fails; if all fail nothing is known."""
    assert _probe(_rows(9), _engine(_refuses(9.0))).verdict is Batching.INVARIANT
    report = _probe([[9.0, float(i)] for i in range(5)], _engine(_refuses(9.0)))
    assert report.verdict is Batching.UNPROBED
    assert "the first rows could not be tried: bad row" in report.evidence[0]


def test_a_batch_that_the_model_refuses_is_evidence() -> None:
    """Rows that work alone and not together must not share a batch."""

    def function(x: Array) -> Array:
        if len(x) > 1:
            message = "cannot reshape"
            raise ModelError(message)
        return x

    report = _probe(_rows(4), _engine(function))
    assert (report.verdict, report.output_axes) == (Batching.NOT_BATCHABLE, {"y": 0})
    assert report.evidence == ("a batch of 2 rows fails: cannot reshape",)
    report = _probe(_rows(4), _engine(lambda x: np.stack([function(x)[0]] * 5)))
    assert report.output_axes == {"y": None}, "five entries of a row are not five rows"


@pytest.mark.parametrize("rows_max", [0, 1, 2])
def test_running_out_of_memory_says_nothing_about_rows(rows_max: int) -> None:
    """Rows that do not fit together are no evidence that they may not share a batch."""
    report = _probe(_rows(4), _engine(lambda x: x, rows_max=rows_max))
    assert report.verdict is Batching.UNPROBED
    assert "fit" in report.evidence[0]


@pytest.mark.parametrize("call", [1, 4, 5])
def test_a_passing_fault_is_raised(call: int) -> None:
    """A device that fails is no property of the model: the step is tried again."""
    fault = TransientError("the card fell off the bus", retry_after_seconds=1.0)
    with pytest.raises(TransientError, match="fell off"):
        _probe(_rows(4), _engine(lambda x: x, errors={call: fault}))


def test_a_passing_fault_of_a_function_is_raised() -> None:
    """A function that asks for another try gets it before anything is computed."""

    def encode(_: pa.RecordBatch) -> Mapping[str, Any]:
        message = "the database is away"
        raise TransientError(message, retry_after_seconds=1.0)

    with pytest.raises(TransientError, match="is away"):
        _probe(_rows(4), _engine(lambda x: x), encode=encode)


def test_rows_that_lie_along_another_axis_are_found() -> None:
    """The outputs' axes are those of the partition's own rows."""
    report = _probe(_rows(4), _engine(lambda x: x.T[:, :, None]))
    assert (report.verdict, report.output_axes) == (Batching.INVARIANT, {"y": 1})


@pytest.mark.parametrize(
    "function",
    [lambda x: np.repeat(x, 2, axis=0), lambda x: x.reshape(1, -1, 1)],
    ids=["first axis", "second axis"],
)
def test_several_entries_of_a_row_keep_rows_apart(function: Callable[[Any], Any]) -> None:
    """Results that are one behind the other cannot be told apart by the pipeline: a batch is one row."""
    report = _probe(_rows(4), _engine(function))
    assert (report.verdict, report.output_axes) == (Batching.NOT_BATCHABLE, {"y": None})
    assert "entries for a row" in report.evidence[0]


def test_an_output_that_never_changes_is_no_evidence() -> None:
    """A list of labels beside the scores does not keep rows apart."""
    signature = ModelSignature(inputs=(_spec("x"),), outputs=(_spec("y"), _spec("labels", (None,))))
    engine = FakeEngine(signature, lambda inputs: {"y": inputs["x"], "labels": np.arange(7)})
    report = _probe(_rows(4), engine)
    assert (report.verdict, report.output_axes) == (Batching.INVARIANT, {"y": 0})


def test_inputs_that_all_rows_share_are_given_as_they_are() -> None:
    """A threshold goes along with each row and each batch."""
    signature = ModelSignature(inputs=(_spec("x"), _spec("limit", ())), outputs=(_spec("y"),))
    engine = FakeEngine(signature, lambda inputs: {"y": inputs["x"] * inputs["limit"]})

    def encode(batch: pa.RecordBatch) -> Arrays:
        return {"x": np.array(batch.column("x").to_pylist(), np.float32), "limit": np.float32(0.5)}

    assert _probe(_rows(4), engine, encode=encode).verdict is Batching.INVARIANT
    assert {batch["limit"].shape for batch in engine.batches} == {()}


@pytest.mark.parametrize(("fixed", "calls"), [(2, [1, 1, 2]), (4, [1, 1, 1, 2, 3])])
def test_a_fixed_batch_is_not_exceeded(fixed: int, calls: list[int]) -> None:
    """A model of a fixed batch is tried with as many rows as it takes; the engine fills it up."""
    engine = _engine(_quantised, shape=(fixed, 3))
    assert _probe(_rows(8), engine).verdict is Batching.NOT_BATCHABLE
    assert [len(batch["x"]) for batch in engine.batches] == calls


def test_texts_are_told_apart() -> None:
    """Rows of text have no size; unlike ones are found all the same."""
    text = TensorSpec(name="x", dtype="string", shape=(None,))
    engine = FakeEngine(ModelSignature(inputs=(text,), outputs=(text,)), lambda inputs: {"y": inputs["x"]})

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        return {"x": np.array([f"row {row // 3}" for row in batch.column("id").to_pylist()], object)}

    assert _probe(_rows(7), engine, encode=encode).verdict is Batching.INVARIANT
    assert len({*engine.batches[0]["x"], *engine.batches[1]["x"], *engine.batches[2]["x"]}) == 3


class _Endless(FakeEngine):
    """Computes until it is interrupted."""

    def __init__(self) -> None:
        x = _spec("x")
        super().__init__(ModelSignature(inputs=(x,), outputs=(x,)), lambda inputs: inputs)
        self.began, self.interrupted = threading.Event(), threading.Event()

    def predict(self, inputs: Arrays) -> Arrays:
        """Wait for the interruption."""
        self.began.set()
        self.interrupted.wait(30)
        message = "terminated"
        raise ModelError(message)

    def interrupt(self) -> None:
        """End the wait."""
        self.interrupted.set()


def test_a_call_that_never_ends_is_interrupted() -> None:
    """The run's own limit holds for the trial as well."""
    engine = _Endless()
    with pytest.raises(StallError, match=r"took longer than 0\.2 s"):
        _probe(_rows(3), engine, stall_seconds_max=0.2)
    assert engine.interrupted.is_set()


def test_an_encode_function_that_hangs_is_left_behind() -> None:
    """The trial ends although the function does not."""
    may_end = threading.Event()

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        may_end.wait(30)
        return {"x": np.zeros((len(batch), 3), np.float32)}

    started = time.monotonic()
    with pytest.raises(StallError, match="took longer"):
        _probe(_rows(3), _engine(lambda x: x), encode=encode, stall_seconds_max=0.2)
    assert time.monotonic() - started < 10
    may_end.set()


def test_a_stop_ends_the_trial_at_once() -> None:
    """A run that is cancelled during the trial does not wait for it."""
    engine = _Endless()
    report = _probe(_rows(3), engine, should_stop=engine.began.is_set)
    assert (report.verdict, engine.interrupted.is_set()) == (Batching.UNPROBED, True)


def test_memory_error_of_a_single_row_is_passed_over() -> None:
    """A row too large for the device is left to the run; others are tried."""

    def function(x: Array) -> Array:
        if (x == 9.0).any():
            message = "too large"
            raise DeviceOutOfMemoryError(message, batch_rows=len(x))
        return x

    assert _probe(_rows(9), _engine(function)).verdict is Batching.INVARIANT
