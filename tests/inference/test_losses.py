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


def test_two_processes_of_one_attempt_stage_their_files_apart(ragged: Make) -> None:
    """A step that is run again while its zombie still writes never shares a file with it."""
    from dataclasses import replace

    from sits_dagster.inference.attempt import open_attempt
    from sits_dagster.inference.shards import Shard
    from sits_dagster.testing.trial import FINGERPRINT, NOW

    shards = (Shard(index=0, row_start=0, row_end=8),)
    attempt = open_attempt(MemoryStore(), FINGERPRINT, shards=shards, rows=8, owner="a", now=NOW)
    zombie, second = replace(attempt, writer="zombie"), replace(attempt, writer="second")
    assert zombie.staged("part") != second.staged("part")


def test_a_slow_device_is_not_taken_for_a_stall(ragged: Make, expected: Expected) -> None:
    """Waiting counts from the last thing that moved anywhere in the pipeline, not from one hand-over."""
    import time

    store, trial = (
        MemoryStore(),
        ragged(96, policy={"stall_seconds_max": 0.6, "chunk_rows": 8, "segment_rows": 96}),
    )

    class Slow(FakeEngine):
        def predict(self, inputs: Arrays) -> Arrays:
            time.sleep(0.1)
            return super().predict(inputs)

    trial.run(store, engine=Slow(trial.signature, trial.function))
    assert Trial.output(store) == expected(96)


def test_rows_that_wait_for_a_batch_are_bounded_in_bytes() -> None:
    """Rows of ever new shapes do not gather in memory until the window of rows is full."""
    import numpy as np

    from sits_dagster.inference.batches import Packer
    from sits_dagster.inference.dataset import Chunk
    from sits_dagster.inference.encode import EncodedChunk
    from sits_dagster.inference.engine import ModelSignature, TensorSpec
    from sits_dagster.inference.sizing import FixedBatchSizer

    signature = ModelSignature(
        inputs=(TensorSpec(name="x", dtype="float32", shape=(None, None)),), outputs=()
    )
    packer = Packer(
        signature=signature,
        padding=(),
        sizer=FixedBatchSizer(8),
        window_rows_max=10_000,
        window_bytes_max=100_000,
    )
    sent = 0
    for row in range(200):
        chunk = Chunk(row_start=row, rows=pa.record_batch({"id": [row]}))
        x = [np.zeros(1000 + row, np.float32)]
        batches = packer.add(EncodedChunk(chunk=chunk, rows=np.array([row]), columns={"x": x}))
        sent += sum(len(batch.rows) for batch in batches)
        assert packer.bytes_waiting <= 100_000
    assert sent + packer.rows_waiting == 200
