"""The best batch is measured with a partition's own first rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster.errors import StallError, TransientError
from sits_dagster.inference.climb import Climb, ClimbEnd
from sits_dagster.inference.engine import Arrays, ModelSignature, TensorSpec
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import Bucket
from sits_dagster.inference.trials import measure_batches
from sits_dagster.testing import FakeEngine, MemoryFormat, MemoryRows, MemoryStore, Trial
from sits_dagster.testing.paced import PacedEngine

SIGNATURE = ModelSignature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, None)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, None)),),
)


def _echo(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"]}


def _paced(**options: Any) -> PacedEngine:
    return PacedEngine(SIGNATURE, _echo, **{"seconds_per_call": 0.004, "seconds_per_row": 0.001, **options})


def _measure(
    rows: list[Any], engine: Any, *, rows_max: int = 256, seconds_max: float = 60.0, **policy: Any
) -> tuple[Bucket, Climb] | None:
    limits = PipelinePolicy(**{"chunk_rows": 16, **policy})
    column = pa.array(rows, pa.list_(pa.float32()))
    trial = Trial(
        source=MemoryRows(pa.RecordBatch.from_pydict({"x": column, "id": np.arange(len(rows))})),
        signature=SIGNATURE,
        function=_echo,
        columns_required=("x",),
        policy=limits,
    )
    work = trial.work(MemoryFormat(MemoryStore()))
    return measure_batches(work, engine, limits, rows_max=rows_max, seconds_max=seconds_max)


def test_a_device_with_a_plateau_gets_a_batch_near_it() -> None:
    """A call's fixed time is worth 4 rows: 64 of them reach 94 %, and that is found by measuring."""
    found = _measure([[1.0, 2.0]] * 3, _paced())
    assert found is not None
    bucket, climbed = found
    assert bucket == ((2,),)
    reached = climbed.rows / (0.004 + 0.001 * climbed.rows)
    assert reached >= 0.85 * 1000
    assert 16 <= climbed.rows <= 128


def test_a_batch_is_filled_with_the_rows_that_there_are() -> None:
    """Three rows are enough to try a batch of many; each size is called twice."""
    engine = FakeEngine(SIGNATURE, _echo)
    found = _measure([[1.0], [2.0], [3.0]], engine, rows_max=4)
    assert found is not None
    sizes = [len(batch["x"]) for batch in engine.batches]
    assert sizes == [rows for rows in (1, 2, 4)[: len(sizes) // 2] for _ in range(2)]
    assert engine.batches[-1]["x"].ravel().tolist()[:4] == [1.0, 2.0, 3.0, 1.0][: sizes[-1]]


def test_the_commonest_shape_is_measured() -> None:
    """Rare long rows do not decide for all."""
    found = _measure([[1.0, 2.0]] * 9 + [[1.0] * 50], FakeEngine(SIGNATURE, _echo), rows_max=1)
    assert found is not None
    assert found[0] == ((2,),)


def test_memory_bounds_what_is_tried() -> None:
    """A device that runs out of memory ends the climb; the run starts with what fitted."""
    engine = _paced(bytes_per_row=1 << 20, memory_bytes_limit=10 << 20)
    found = _measure([[1.0]] * 4, engine)
    assert found is not None
    assert found[1].end is ClimbEnd.OUT_OF_MEMORY
    assert found[1].rows <= 8


def test_measuring_ends_in_time() -> None:
    """A slow device is not measured for minutes."""
    found = _measure([[1.0]] * 4, _paced(seconds_per_call=0.2), seconds_max=0.9)
    assert found is not None
    assert found[1].end is ClimbEnd.TIME
    assert found[1].trials[-1].rows <= 4


@pytest.mark.parametrize("rows", [[], [None, None]], ids=["no rows", "nulls"])
def test_without_rows_there_is_nothing_to_measure(rows: list[Any]) -> None:
    """The run itself says what is wrong with them."""
    engine = FakeEngine(SIGNATURE, _echo)
    assert _measure(rows, engine) is None
    assert not engine.batches


def test_a_device_fault_is_the_runs_to_retry() -> None:
    """It says nothing about batches."""

    def fails(_: Arrays) -> Arrays:
        msg = "gone"
        raise TransientError(msg, retry_after_seconds=1.0)

    with pytest.raises(TransientError):
        _measure([[1.0]], FakeEngine(SIGNATURE, fails))


def test_a_model_that_hangs_ends_with_the_stall_limit() -> None:
    """No run waits for ever for its first batch."""
    with pytest.raises(StallError, match="first rows"):
        _measure([[1.0]], _paced(seconds_per_call=1.0), seconds_max=0.5, stall_seconds_max=0.3)
