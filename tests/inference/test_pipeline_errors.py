"""A stage that fails or hangs ends the run with one error that names the cause, and no thread stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from sits_dagster.errors import ConfigError, DataError, StallError, StorageError
from sits_dagster.inference.engine import Arrays
from sits_dagster.testing import FakeEngine, FaultyStore, MemoryRows, MemoryStore, Trial

Make = Callable[..., Trial]
Expected = Callable[[int], list[dict[str, Any]]]


class _BrokenRows(MemoryRows):
    def read(self, row_start: int, row_end: int, **limits: int) -> Iterator[Any]:
        for chunk in super().read(row_start, row_end, **limits):
            if chunk.row_end > 12:
                msg = "the file ended early"
                raise DataError(msg)
            yield chunk


def _break(error: Exception) -> Callable[[object], Any]:
    def function(_: object) -> Any:
        raise error

    return function


def _broken(ragged: Make, stage: str) -> tuple[Trial, Any, Any]:
    """Return a trial that fails in a stage, its store and its engine."""
    trial, store = ragged(40), MemoryStore()
    engine: Any = trial.engine()
    if stage == "read":
        trial.source = _BrokenRows(trial.source.rows)
    elif stage == "encode":
        trial.encode = _break(ConfigError("the tokenizer is missing"))
    elif stage == "decode":
        trial.decode = _break(ConfigError("the labels are missing"))
    elif stage == "predict":
        engine = FakeEngine(trial.signature, trial.function, errors={4: RuntimeError("the device is gone")})
    else:
        store = FaultyStore(store, fail_at=9, error=StorageError("the disk is full"))
    return trial, store, engine


@pytest.mark.parametrize(
    ("stage", "error", "message"),
    [
        ("read", DataError, "ended early"),
        ("encode", ConfigError, "tokenizer"),
        ("decode", ConfigError, "labels"),
        ("predict", RuntimeError, "device is gone"),
        ("write", StorageError, "disk is full"),
    ],
)
def test_an_error_of_any_stage_ends_the_run_with_that_error(
    ragged: Make, expected: Expected, stage: str, error: type[Exception], message: str
) -> None:
    """The user sees the cause, not its consequences; what was committed stays and the next run goes on."""
    trial, store, engine = _broken(ragged, stage)
    began = time.monotonic()
    with pytest.raises(error, match=message):
        trial.run(store, engine=engine)
    assert time.monotonic() - began < 4, "no stage waits for one that has ended"
    healthy = ragged(40)
    healthy.run(store)
    assert Trial.output(store) == expected(40)


def _hang(seconds: float, result: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def function(value: Any) -> Any:
        time.sleep(seconds)
        return result(value)

    return function


class _HangingRows(MemoryRows):
    def read(self, row_start: int, row_end: int, **limits: int) -> Iterator[Any]:
        time.sleep(1.5)
        yield from super().read(row_start, row_end, **limits)


@pytest.mark.parametrize("stage", ["read", "encode", "decode"])
def test_a_stage_that_hangs_ends_the_run_with_a_sentence(ragged: Make, stage: str) -> None:
    """Nothing waits for ever: after stall_seconds_max the run says which stage to look at."""
    trial = ragged(10, policy={"stall_seconds_max": 0.3})
    if stage == "read":
        trial.source = _HangingRows(trial.source.rows)
    elif stage == "encode":
        trial.encode = _hang(1.5, lambda batch: {"x": batch.column("x").to_numpy(zero_copy_only=False)})
    else:
        trial.decode = _hang(1.5, lambda outputs: {"y": outputs["y"]})
    began = time.monotonic()
    with pytest.raises(StallError):
        trial.run(MemoryStore())
    assert time.monotonic() - began < 1.4, "the hanging stage is left behind"


def test_columns_of_one_name_are_refused(ragged: Make) -> None:
    """A decoded column never silently replaces a kept one."""
    trial = ragged(4, decode=lambda outputs: {"id": outputs["y"]})
    with pytest.raises(ConfigError, match=r"\['id'\] are both kept"):
        trial.run(MemoryStore())


def test_results_that_change_their_type_are_refused(ragged: Make) -> None:
    """All part files have one schema; a decode function that breaks it is named."""

    def decode(outputs: Arrays) -> Mapping[str, object]:
        return {"y": ["a"] * len(outputs["y"]) if (outputs["y"] > 10).any() else outputs["y"].tolist()}

    with pytest.raises(ConfigError, match="decode returned columns"):
        ragged(30, decode=decode).run(MemoryStore())


def test_results_that_start_as_nulls_ask_for_a_schema(ragged: Make) -> None:
    """A type that cannot be known is not guessed; declaring it is enough."""
    trial = ragged(4, decode=lambda outputs: {"y": [None] * len(outputs["y"])})
    with pytest.raises(ConfigError, match="declare output_schema"):
        trial.run(MemoryStore())
    trial.output_schema = pa.schema([("y", pa.float32())])
    store = MemoryStore()
    trial.run(store)
    assert [row["y"] for row in Trial.output(store)] == [None] * 4
