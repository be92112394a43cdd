"""The whole data plane in memory: every row once, in order, through splits, errors, stops and resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sits_dagster.errors import (
    ModelError,
    QuarantineLimitError,
)
from sits_dagster.inference.engine import Arrays
from sits_dagster.inference.sizing import FixedBatchSizer
from sits_dagster.testing import FakeEngine, MemoryRows, MemoryStore, Trial, visible_files

Make = Callable[..., Trial]
Expected = Callable[[int], list[dict[str, Any]]]


def _ids(engine: FakeEngine) -> list[int]:
    """Rows that the engine computed: the first cell of each is its number."""
    return [int(row[0]) for batch in engine.batches for row in batch["x"]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 40),
    policy=st.fixed_dictionaries(
        {
            "batch_rows": st.integers(1, 9),
            "chunk_rows": st.integers(1, 9),
            "segment_rows": st.integers(1, 20),
            "window_rows": st.integers(1, 20),
            "encode_workers": st.integers(1, 3),
            "decode_workers": st.integers(1, 3),
            "queue_bytes": st.sampled_from([1, 1000]),
            "pending_bytes": st.sampled_from([1, 10_000]),
            "flush_bytes": st.sampled_from([1, 10_000]),
            "shard_seconds_min": st.sampled_from([0.0, 0.05]),
            "segment_seconds": st.sampled_from([0.0, 3600.0]),
        }
    ),
    rows_max=st.integers(1, 9),
)
def test_the_output_is_the_input_in_order_under_every_policy(
    ragged: Make, expected: Expected, count: int, policy: dict[str, Any], rows_max: int
) -> None:
    """Batch, chunk, segment and shard sizes, workers, windows and memory never change the output."""
    groups = [5] * (count // 5) + ([count % 5] if count % 5 else [])
    trial = ragged(count, policy=policy, row_group_rows=groups)
    store, engine = MemoryStore(), FakeEngine(trial.signature, trial.function, rows_max=rows_max)
    stats = trial.run(store, engine=engine)
    assert Trial.output(store) == expected(count)
    assert sorted(_ids(engine)) == list(range(count))
    assert (stats.rows, stats.rows_written, stats.rows_quarantined) == (count, count, 0)
    assert stats.is_complete
    assert "_SUCCESS" in store.list("")


def test_a_finished_partition_is_not_computed_again(ragged: Make, expected: Expected) -> None:
    """Running a partition twice costs nothing and changes no file."""
    trial, store = ragged(20), MemoryStore()
    trial.run(store)
    before, engine = dict(store.list("")), trial.engine()
    stats = trial.run(store, engine=engine)
    assert engine.calls == 0
    assert store.list("") == before
    assert (stats.is_complete, stats.rows_written, stats.rows_resumed) == (True, 20, 20)
    assert Trial.output(store) == expected(20)


def test_a_partition_without_rows_gets_its_columns(ragged: Make) -> None:
    """An empty day has a file with the columns of a full one, so that readers need no special case."""
    schema = pa.schema([("y", pa.float32())])
    store = MemoryStore()
    stats = ragged(0, output_schema=schema).run(store)
    assert (stats.rows, stats.is_complete) == (0, True)
    (part,) = visible_files(store)
    with pa.ipc.open_stream(store.read(part)) as stream:
        assert stream.schema.names == ["id", "y"]
    assert Trial.output(store) == []


def test_a_partition_without_files_is_published(ragged: Make) -> None:
    """An empty folder knows no columns to keep; the run still succeeds."""
    source = MemoryRows(pa.RecordBatch.from_pydict({}), ())
    store = MemoryStore()
    trial = ragged(0, source=source, output_schema=pa.schema([("y", pa.float32())]))
    assert trial.run(store).is_complete
    assert "_SUCCESS" in store.list("")


def test_nothing_needs_to_be_kept(ragged: Make, expected: Expected) -> None:
    """An output of decoded columns alone has every row, and so has its quarantine."""
    store = MemoryStore()
    trial = ragged(20, columns_kept=(), decode=_failing_decode({10}))
    assert trial.run(store).rows_quarantined == 1
    assert Trial.output(store) == [{"y": row["y"]} for row in expected(20) if row["id"] != 7]
    assert [row["file_row"] for row in Trial.quarantine(store)] == [7]


def test_a_batch_that_does_not_fit_is_split_and_the_sizer_learns(ragged: Make, expected: Expected) -> None:
    """Running out of memory costs a retry of that batch; later batches of the shape are smaller."""
    trial, store = ragged(40, policy={"batch_rows": 8, "segment_rows": 100}), MemoryStore()
    engine = FakeEngine(trial.signature, trial.function, rows_max=2)
    sizer = FixedBatchSizer(8)
    stats = trial.run(store, engine=engine, sizer=sizer)
    assert Trial.output(store) == expected(40)
    assert 0 < stats.out_of_memory < engine.calls
    assert max(sizer.ceilings.values()) <= 4
    assert max(len(batch["x"]) for batch in engine.batches) <= 2
    assert stats.batches == len(engine.batches)


def test_a_single_row_that_does_not_fit_is_quarantined(ragged: Make, expected: Expected) -> None:
    """Only a row that is too large alone is given up, with the device's words; its batch goes on."""
    trial, store = ragged(20, policy={"batch_rows": 8}), MemoryStore()
    engine = FakeEngine(trial.signature, trial.function, bytes_max=5 * 4)
    stats = trial.run(store, engine=engine)
    large = [i for i in range(20) if i % 5 in {2, 4}]
    assert Trial.output(store) == [row for row in expected(20) if row["id"] not in large]
    found = Trial.quarantine(store)
    assert [(row["id"], row["file"], row["file_row"]) for row in found] == [(i, "memory", i) for i in large]
    assert {(row["stage"], row["error"]) for row in found} == {("predict", "DeviceOutOfMemoryError")}
    assert "do not fit" in found[0]["message"]
    assert (stats.rows_written, stats.rows_quarantined) == (12, 8)


def test_a_row_that_the_model_refuses_is_isolated(ragged: Make, expected: Expected) -> None:
    """A model error costs the rows that cause it, not the batch."""

    def refuse(inputs: Arrays) -> Arrays:
        if (inputs["x"][:, 0] == 11).any():
            msg = "the graph does not like 11"
            raise ModelError(msg)
        return {"y": inputs["x"].sum(axis=1)}

    trial, store = ragged(30, function=refuse, policy={"batch_rows": 8}), MemoryStore()
    trial.run(store)
    assert Trial.output(store) == [row for row in expected(30) if row["id"] != 11]
    assert [(r["id"], r["error"], r["message"]) for r in Trial.quarantine(store)] == [
        (11, "ModelError", "the graph does not like 11")
    ]


def test_a_model_that_returns_other_rows_is_not_believed(ragged: Make) -> None:
    """Outputs that cannot belong to the rows are never written."""
    trial = ragged(6, function=lambda inputs: {"y": np.zeros(len(inputs["x"]) + 1, np.float32)})
    store = MemoryStore()
    assert trial.run(store).rows_written == 0
    assert {row["error"] for row in Trial.quarantine(store)} == {"ModelError"}
    assert "has 2 rows for a batch of 1" in Trial.quarantine(store)[0]["message"]


def _failing_decode(bad: set[int]) -> Callable[[Arrays], Mapping[str, object]]:
    def decode(outputs: Arrays) -> Mapping[str, object]:
        if any(int(value) in bad for value in outputs["y"]):
            msg = "no text"
            raise ValueError(msg)
        return {"y": outputs["y"]}

    return decode


def _failing_encode(bad: set[int]) -> Callable[[pa.RecordBatch], Mapping[str, object]]:
    def encode(batch: pa.RecordBatch) -> Mapping[str, object]:
        numbers = batch.column("id").to_pylist()
        if bad & set(numbers):
            msg = f"broken: {sorted(bad & set(numbers))}"
            raise ValueError(msg)
        return {"x": [np.asarray(value.as_py(), np.float32) for value in batch.column("x")]}

    return encode


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.sets(st.integers(0, 24)), flush_bytes=st.sampled_from([1, 100_000]))
def test_each_row_is_in_the_output_or_in_the_quarantine(
    ragged: Make, expected: Expected, bad: set[int], flush_bytes: int
) -> None:
    """Whichever rows fail, each is accounted for once, in order, with its own error."""
    store = MemoryStore()
    policy = {"flush_bytes": flush_bytes, "chunk_rows": 3, "segment_rows": 6}
    stats = ragged(25, encode=_failing_encode(bad), policy=policy).run(store)
    assert Trial.output(store) == [row for row in expected(25) if row["id"] not in bad]
    assert [(r["id"], r["stage"], r["message"]) for r in Trial.quarantine(store)] == [
        (i, "encode", f"broken: [{i}]") for i in sorted(bad)
    ]
    assert (stats.rows_written, stats.rows_quarantined) == (25 - len(bad), len(bad))


def test_a_failure_in_a_column_of_numbers_keeps_its_neighbours(ragged: Make) -> None:
    """A raising encode of scalar inputs leaves the other rows of the chunk unharmed."""
    rows = pa.RecordBatch.from_pydict({"id": np.arange(9), "x": pa.array(range(9), pa.float32())})
    trial = ragged(0, source=MemoryRows(rows), padding=(), function=lambda inputs: {"y": inputs["x"] * 2})
    spec = trial.signature.inputs[0]
    trial.signature = type(trial.signature)(
        inputs=(type(spec)(name="x", dtype="float32", shape=(None,)),), outputs=trial.signature.outputs
    )

    def encode(batch: pa.RecordBatch) -> Mapping[str, object]:
        if 4 in batch.column("id").to_pylist():
            msg = "four"
            raise ValueError(msg)
        return {"x": batch.column("x").to_numpy()}

    trial.encode = encode
    store = MemoryStore()
    trial.run(store)
    assert Trial.output(store) == [{"id": i, "y": 2.0 * i} for i in range(9) if i != 4]


def test_too_many_failures_end_the_run_with_the_first_ones(ragged: Make) -> None:
    """A broken night is noticed: the message shows rows, files, stages and errors."""
    trial = ragged(40, encode=_failing_encode(set(range(5, 40, 2))), policy={"rows_quarantined_max": 3})
    with pytest.raises(QuarantineLimitError) as caught:
        trial.run(MemoryStore())
    assert "rows failed, above rows_quarantined_max=3" in str(caught.value)
    assert "memory row 5: encode ValueError: broken: [5]" in str(caught.value)


def test_the_limit_counts_failures_of_resumed_runs(ragged: Make) -> None:
    """A partition does not get a new allowance with each retry."""
    bad = {1, 2, 9, 10}
    trial = ragged(40, encode=_failing_encode(bad), policy={"rows_quarantined_max": 3, "decode_workers": 1})
    store = MemoryStore()
    for _ in range(3):
        with pytest.raises(QuarantineLimitError):
            trial.run(store)


def _stop_after_calls(engine: FakeEngine, calls: int) -> Callable[[], bool]:
    return lambda: engine.calls >= calls


@pytest.mark.parametrize("queue_bytes", [1, 1 << 20])
@pytest.mark.parametrize("calls", range(12))
def test_a_stopped_run_keeps_everything_that_was_computed(
    ragged: Make, expected: Expected, calls: int, queue_bytes: int
) -> None:
    """A stop between any two batches commits the finished prefix and carries the rest: nothing is redone."""
    trial, store = ragged(30, policy={"segment_rows": 16, "queue_bytes": queue_bytes}), MemoryStore()
    first = trial.engine()
    stopped = trial.run(store, engine=first, should_stop=_stop_after_calls(first, calls))
    assert not stopped.is_complete
    assert "_SUCCESS" not in store.list("")
    assert Trial.output(store) == expected(30)[: stopped.rows_written]
    second = trial.engine()
    resumed = trial.run(store, engine=second)
    assert Trial.output(store) == expected(30)
    assert sorted(_ids(first) + _ids(second)) == list(range(30))
    assert resumed.rows_recomputed == 0
    assert resumed.rows_resumed == stopped.rows_written
    assert resumed.rows_resumed + resumed.rows_carried == len(_ids(first))


def test_a_run_that_is_stopped_again_and_again_gets_done(ragged: Make, expected: Expected) -> None:
    """Pre-emption after every single batch still computes each row once, over any number of runs."""
    trial, store = ragged(30, policy={"segment_rows": 16}), MemoryStore()
    seen: list[int] = []
    for _ in range(40):
        engine = trial.engine()
        stats = trial.run(store, engine=engine, should_stop=_stop_after_calls(engine, 1))
        seen += _ids(engine)
        assert stats.rows_recomputed == 0
        if stats.is_complete:
            break
    else:
        trial.run(store)
    assert Trial.output(store) == expected(30)
    assert sorted(seen) == list(range(30))


def test_a_stop_keeps_its_quarantined_rows_apart(ragged: Make, expected: Expected) -> None:
    """Rows that fail are in the quarantine once, whether the run was stopped before or after them."""
    for calls in range(8):
        trial = ragged(30, encode=_failing_encode({3, 12, 20}), policy={"segment_rows": 16})
        store, engine = MemoryStore(), trial.engine()
        trial.run(store, engine=engine, should_stop=_stop_after_calls(engine, calls))
        trial.run(store)
        assert Trial.output(store) == [row for row in expected(30) if row["id"] not in {3, 12, 20}]
        assert [row["id"] for row in Trial.quarantine(store)] == [3, 12, 20]


class _SlowRows(MemoryRows):
    """Reads a chunk in a hundredth of a second."""

    def read(self, row_start: int, row_end: int, **limits: int) -> Iterator[Any]:
        for chunk in super().read(row_start, row_end, **limits):
            time.sleep(0.01)
            yield chunk


@pytest.mark.parametrize("stage", ["read", "encode"])
def test_a_stop_is_quick_while_rows_are_still_prepared(ragged: Make, expected: Expected, stage: str) -> None:
    """A stop waits for what is in work, not for what could still be read; and it is no error."""

    def slow(batch: pa.RecordBatch) -> Mapping[str, object]:
        time.sleep(0.01)
        return _failing_encode(set())(batch)

    trial = ragged(400, policy={"encode_workers": 1, "segment_rows": 1000})
    if stage == "encode":
        trial.encode = slow
    else:
        trial.source = _SlowRows(trial.source.rows)
    for calls in (0, 1, 2):
        store, engine = MemoryStore(), trial.engine()
        began = time.monotonic()
        stats = trial.run(store, engine=engine, should_stop=_stop_after_calls(engine, calls))
        assert not stats.is_complete
        assert time.monotonic() - began < 1
    assert Trial.output(store) == expected(400)[: stats.rows_written]
