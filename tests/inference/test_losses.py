"""What a killed run loses, and how it is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from sits_dagster.errors import ConfigError, ModelError, StallError
from sits_dagster.inference.checkpoint import load_commit
from sits_dagster.inference.engine import Arrays
from sits_dagster.inference.sink import ParquetSink
from sits_dagster.testing import FakeEngine, FaultyStore, MemoryStore, SimulatedCrash, Trial

Make = Callable[..., Trial]
Expected = Callable[[int], list[dict[str, Any]]]


def _commits(store: MemoryStore) -> list[Any]:
    return [load_commit(store.read(path)) for path in store.list("_sits/generations") if "/commits/" in path]


@pytest.mark.parametrize("crash_at", range(6, 40, 3))
def test_a_dead_run_loses_at_most_one_segment(ragged: Make, expected: Expected, crash_at: int) -> None:
    """However far reading and packing are ahead, the device waits for the commit before the next segment."""
    store, trial, engine = MemoryStore(), ragged(64), None
    engine = trial.engine()
    with pytest.raises(SimulatedCrash):
        trial.run(FaultyStore(store, fail_at=crash_at, error=SimulatedCrash()), engine=engine)
    computed = sum(len(batch["x"]) for batch in engine.batches)
    committed = sum(commit.range.rows for commit in _commits(store) if commit)
    assert computed - committed <= trial.policy.segment_rows
    stats = trial.run(store)
    assert stats.rows_recomputed <= trial.policy.segment_rows
    assert Trial.output(store) == expected(64)


@pytest.mark.parametrize(("segment_rows", "chunk_rows"), [(8, 3), (8, 8), (5, 64), (1, 1), (7, 2)])
def test_a_segment_has_at_most_its_rows(ragged: Make, segment_rows: int, chunk_rows: int) -> None:
    """`segment_rows` is a limit, not a hint."""
    store = MemoryStore()
    ragged(40, policy={"segment_rows": segment_rows, "chunk_rows": chunk_rows}).run(store)
    assert max(commit.range.rows for commit in _commits(store)) <= segment_rows


def test_rows_that_fail_in_decode_are_not_counted_as_lost(ragged: Make) -> None:
    """They went through the device and are committed as quarantined: nothing is computed in vain."""

    def decode(outputs: Arrays) -> dict[str, pa.Array]:
        if 3.0 in outputs["y"]:
            message = "three is bad"
            raise ValueError(message)
        return {"y": pa.array(outputs["y"])}

    trial, store = ragged(24, decode=decode), MemoryStore()
    stops = iter([False] * 6)
    trial.run(store, should_stop=lambda: next(stops, True))
    assert trial.run(store).rows_recomputed == 0


def test_a_commit_that_hangs_ends_the_run_with_a_sentence(ragged: Make) -> None:
    """The device does not wait for ever for a storage that never answers."""
    import threading

    release = threading.Event()

    class Hanging(MemoryStore):
        def create(self, path: str, data: bytes) -> bool:
            if "/commits/" in path:
                release.wait(5)
            return super().create(path, data)

    with pytest.raises(StallError, match=r"not committed|No stage came"):
        ragged(24, policy={"stall_seconds_max": 0.5}).run(Hanging())
    release.set()


def test_a_failing_stage_interrupts_the_device(ragged: Make) -> None:
    """A call that would never return is ended when another stage fails."""
    import threading

    class Endless(FakeEngine):
        def __init__(self, trial: Trial) -> None:
            super().__init__(trial.signature, trial.function)
            self.interrupted = threading.Event()

        def predict(self, inputs: Arrays) -> Arrays:
            assert self.interrupted.wait(20)
            message = "interrupted"
            raise ModelError(message)

        def interrupt(self) -> None:
            self.interrupted.set()

    trial = ragged(24, policy={"stall_seconds_max": 0.5})
    with pytest.raises(StallError):
        trial.run(MemoryStore(), engine=Endless(trial))


def test_columns_of_the_quarantine_cannot_be_kept() -> None:
    """A kept column named like one of the quarantine's is refused when it is declared."""
    with pytest.raises(ConfigError, match=r"\['error'\]"):
        ParquetSink("out", keep_columns=["id", "error"])
