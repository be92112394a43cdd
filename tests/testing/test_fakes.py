"""The fakes behave like what they stand in for, and fail where they are told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.errors import DeviceOutOfMemoryError, StorageError
from sits_dagster.inference.engine import Engine, ModelSignature, TensorSpec
from sits_dagster.inference.store import PartFormat, Store
from sits_dagster.testing import (
    FakeEngine,
    FaultyStore,
    MemoryFormat,
    MemoryRows,
    MemoryStore,
    SimulatedCrash,
    SteppedStore,
)

BATCH = pa.RecordBatch.from_pydict({"x": [1, 2, 3]})


def _stores(tmp_path: Path) -> dict[str, Store]:
    return {"memory": MemoryStore(), "local": LocalStore(tmp_path), "stepped": SteppedStore(MemoryStore())}


@pytest.mark.parametrize("kind", ["memory", "local", "stepped"])
def test_every_store_keeps_the_same_promises(tmp_path: Path, kind: str) -> None:
    """What holds in memory holds on a disk: the crash tests tell the truth about both."""
    store = _stores(tmp_path)[kind]
    assert store.list("") == {}
    assert store.create("a/b", b"one") is True
    assert store.create("a/b", b"two") is False
    assert store.read("a/b") == b"one"
    store.replace("a/b", b"three")
    store.replace("ab", b"beside")
    assert store.list("") == {"a/b": 5, "ab": 6}
    assert store.list("a") == {"a/b": 5}
    assert store.list("missing") == {}
    assert store.move("a/b", "c/d") is True
    assert store.move("a/b", "c/d") is False
    assert store.move("c/d", "ab") is True
    assert store.list("") == {"ab": 5}
    store.delete("ab")
    store.delete("ab")
    assert store.list("") == {}
    with pytest.raises(StorageError, match="ab"):
        store.read("ab")
    counter = store.counter("_x/counter")
    counter.set(7)
    counter.set(-1)
    assert store.read("_x/counter") == b"\xff" * 8
    store.delete("_x/counter")
    counter.set(5)
    assert store.list("") == {}
    counter.close()


def test_one_of_many_threads_creates_an_object() -> None:
    """A race in memory has one winner, as on a disk."""
    store, winners = MemoryStore(), []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        if store.create("x", b"%d" % number):
            winners.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert store.read("x") == b"%d" % winners[0]


@pytest.mark.parametrize("is_after", [False, True])
def test_a_fault_happens_once_before_or_after_the_effect(*, is_after: bool) -> None:
    """A full disk fails one operation; the store can be used again."""
    base = MemoryStore()
    store = FaultyStore(base, fail_at=2, error=StorageError("full"), is_after=is_after)
    store.create("a", b"")
    with pytest.raises(StorageError, match="full"):
        store.create("b", b"")
    assert ("b" in base.list("")) == is_after
    assert store.create("c", b"")
    assert store.operations == ["create a", "create b", "create c"]


LATER: list[Callable[[Store], object]] = [
    lambda s: s.list(""),
    lambda s: s.read("a"),
    lambda s: s.create("c", b""),
    lambda s: s.replace("a", b""),
    lambda s: s.move("a", "b"),
    lambda s: s.delete("a"),
    lambda s: s.counter("n"),
]


@pytest.mark.parametrize("operation", LATER)
def test_a_crashed_process_does_nothing_more(operation: Callable[[Store], object]) -> None:
    """After kill -9 no operation has an effect or an answer."""
    base = MemoryStore({"a": b"1"})
    store = FaultyStore(base, fail_at=1, error=SimulatedCrash())
    for call in (lambda s: s.delete("a"), operation):
        with pytest.raises(SimulatedCrash):
            call(store)
    assert base.list("") == {"a": 1}


def test_an_action_comes_once_at_its_step() -> None:
    """A test can stand between any two operations, looks included if it wants."""
    base, seen = MemoryStore(), []
    store = SteppedStore(base, at=3, action=lambda: seen.append(dict(base.list(""))), counts_looks=True)
    store.replace("a", b"1")
    store.list("")
    store.replace("b", b"2")
    store.replace("c", b"3")
    assert seen == [{"a": 1}]
    assert store.operations == ["replace a", "list ", "replace b", "replace c"]


def test_a_part_file_is_visible_when_it_is_finished() -> None:
    """A file holds its rows once it is closed; deleted meanwhile, it stays deleted; aborted, it is gone."""
    store = MemoryStore()
    files = MemoryFormat(store)
    writer = files.open("p", BATCH.schema)
    writer.write(BATCH)
    with pytest.raises(StorageError):
        files.read("p")
    part = writer.close()
    assert files.read("p").to_pylist() == BATCH.to_pylist()
    assert (part.path, part.rows, part.size_bytes) == ("p", 3, len(store.read("p")))
    lost = files.open("q", BATCH.schema)
    store.delete("q")
    lost.close()
    files.open("r", BATCH.schema).abort()
    assert list(store.list("")) == ["p"]


def _engine(**options: object) -> FakeEngine:
    x = TensorSpec(name="x", dtype="float32", shape=(None,))
    return FakeEngine(
        ModelSignature(inputs=(x,), outputs=(x,)), lambda inputs: {"x": inputs["x"] + 1}, **options
    )


def test_an_engine_computes_and_remembers() -> None:
    """A test sees every batch that went through the device."""
    engine = _engine()
    assert engine.predict({"x": np.array([1, 2], np.float32)})["x"].tolist() == [2, 3]
    engine.predict({"x": np.array([5], np.float32)})
    assert engine.rows_of("x") == [1, 2, 5]
    assert engine.calls == len(engine.batches) == 2
    assert engine.memory().bytes_used == 4


@pytest.mark.parametrize("options", [{"rows_max": 2}, {"bytes_max": 8}])
def test_an_engine_has_a_memory(options: dict[str, int]) -> None:
    """A batch beyond the limit fails as a device does; a smaller one then fits."""
    engine = _engine(**options)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        engine.predict({"x": np.zeros(3, np.float32)})
    assert caught.value.batch_rows == 3
    assert len(engine.predict({"x": np.zeros(2, np.float32)})["x"]) == 2
    assert len(engine.batches) == 1


def test_an_engine_fails_on_schedule() -> None:
    """An error comes at its call, and nothing is computed there."""
    engine = _engine(errors={2: RuntimeError("gone")})
    engine.predict({"x": np.zeros(1, np.float32)})
    with pytest.raises(RuntimeError, match="gone"):
        engine.predict({"x": np.zeros(1, np.float32)})
    engine.predict({"x": np.zeros(1, np.float32)})
    assert (engine.calls, len(engine.batches)) == (3, 2)


def test_rows_are_read_in_ranges_and_chunks() -> None:
    """A partition in memory is read like one on disk."""
    source = MemoryRows(pa.RecordBatch.from_pydict({"x": list(range(10))}), (4, 6))
    chunks = list(source.read(3, 9, rows_max=4, bytes_max=1))
    assert [(c.row_start, c.rows.column("x").to_pylist()) for c in chunks] == [
        (3, [3, 4, 5, 6]),
        (7, [7, 8]),
    ]
    assert source.partition.row_group_rows == (4, 6)
    other = MemoryRows(pa.RecordBatch.from_pydict({"x": [1]}))
    assert other.partition.digest() != source.partition.digest()


def test_fakes_fit_the_protocols() -> None:
    """A type checker accepts every fake in its place; this shows that they are constructible there."""
    engine: Engine = _engine()
    store: Store = FaultyStore(MemoryStore(), fail_at=1, error=OSError())
    files: PartFormat = MemoryFormat(store)
    assert files.suffix
    assert engine.signature.batch_rows_fixed is None
