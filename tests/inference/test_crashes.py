"""Killed at any instant, any number of times: the next run ends with every row once, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sits_dagster.errors import CommitConflictError
from sits_dagster.inference.generation import current_generation, read_generations, valid_commits
from sits_dagster.inference.store import Store
from sits_dagster.testing import (
    FakeEngine,
    FaultyStore,
    MemoryStore,
    SimulatedCrash,
    SteppedStore,
    Trial,
    visible_files,
)

Make = Callable[..., Trial]
ROWS = 10
BAD = 5


def _encode(batch: pa.RecordBatch) -> Mapping[str, object]:
    numbers = batch.column("id").to_pylist()
    return {
        "x": [
            ValueError("bad") if number == BAD else np.asarray(value.as_py(), np.float32)
            for number, value in zip(numbers, batch.column("x"), strict=True)
        ]
    }


@pytest.fixture(scope="module")
def trial(ragged: Make) -> Trial:
    """Two shards of two segments, one of them with a quarantined row."""
    policy = {"segment_rows": 3, "chunk_rows": 2, "shard_seconds_min": 0.0}
    return ragged(ROWS, encode=_encode, row_group_rows=(4, 6), policy=policy)


@pytest.fixture(scope="module")
def steps(trial: Trial) -> int:
    """How many changes of the store an undisturbed run makes."""
    store = SteppedStore(MemoryStore())
    trial.run(store)
    assert len(store.operations) > 20
    return len(store.operations)


def _crash(trial: Trial, store: Store, step: int, *, is_after: bool) -> bool:
    """Run until the step; return whether it was reached."""
    faulty = FaultyStore(store, fail_at=step, error=SimulatedCrash("kill -9"), is_after=is_after)
    try:
        trial.run(faulty)
    except SimulatedCrash:
        return True
    return False


def _committed(store: Store) -> set[int]:
    found: set[int] = set()
    for generation in read_generations(store):
        commits, _ = valid_commits(store, generation)
        found |= {row for c in commits for row in range(c.row_start, c.row_end)}
    return found


def _ids(engine: FakeEngine) -> list[int]:
    return sorted(int(row[0]) for batch in engine.batches for row in batch["x"])


def _check_whole(store: Store, expected: list[dict[str, Any]], *, case: object) -> None:
    assert Trial.output(store) == [row for row in expected if row["id"] != BAD], case
    assert [row["id"] for row in Trial.quarantine(store)] == [BAD], case
    published = current_generation(read_generations(store))
    assert published is not None, case
    manifest = {file.path: file.size_bytes for commit in published.commits for file in commit.files}
    listing = store.list("")
    assert {path: listing[path] for path in visible_files(store)} == manifest, case
    assert "_SUCCESS" in listing, case
    assert not [path for path in listing if "/staging/" in path or "/carried/" in path], case


@pytest.mark.parametrize("is_after", [False, True], ids=["before the step", "after the step"])
def test_a_run_killed_at_any_step_is_resumed_to_the_same_output(
    trial: Trial, steps: int, expected: Callable[[int], list[dict[str, Any]]], *, is_after: bool
) -> None:
    """Wherever the process dies, the next run computes what was not committed, only that, and is whole."""
    for step in range(1, steps + 1):
        store, engine = MemoryStore(), trial.engine()
        assert _crash(trial, store, step, is_after=is_after), step
        committed = _committed(store)
        trial.run(store, engine=engine)
        assert _ids(engine) == [row for row in range(ROWS) if row not in committed and row != BAD], step
        _check_whole(store, expected(ROWS), case=step)
        again = trial.engine()
        trial.run(store, engine=again)
        assert again.calls == 0, step


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(crashes=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=2, max_size=4))
def test_a_run_killed_again_and_again_gets_done(
    trial: Trial, expected: Callable[[int], list[dict[str, Any]]], crashes: list[tuple[int, bool]]
) -> None:
    """Dying while resuming from a death is no other case."""
    store = MemoryStore()
    for step, is_after in crashes:
        _crash(trial, store, step, is_after=is_after)
    trial.run(store)
    _check_whole(store, expected(ROWS), case=crashes)


@pytest.mark.parametrize("calls", range(1, 5))
def test_rows_that_a_killed_process_computed_in_vain_are_counted(
    trial: Trial, expected: Callable[[int], list[dict[str, Any]]], calls: int
) -> None:
    """What a death cost is known: the rows that went through the device twice."""
    store = MemoryStore()
    engine = FakeEngine(trial.signature, trial.function, errors={calls: SimulatedCrash("kill -9")})
    with pytest.raises(SimulatedCrash):
        trial.run(store, engine=engine)
    second = trial.engine()
    stats = trial.run(store, engine=second)
    twice = set(_ids(engine)) & set(_ids(second))
    assert stats.rows_recomputed == len(twice)
    _check_whole(store, expected(ROWS), case=calls)


def test_a_killed_resume_keeps_what_was_carried(
    trial: Trial, steps: int, expected: Callable[[int], list[dict[str, Any]]]
) -> None:
    """Results that a stopped run left ready survive the death of the run that takes them up."""
    for step in range(1, steps):
        store, engine = MemoryStore(), trial.engine()
        trial.run(store, engine=engine, should_stop=lambda e=engine: e.calls >= 2)
        known = set(_ids(engine))
        _crash(trial, store, step, is_after=False)
        last = trial.engine()
        trial.run(store, engine=last)
        assert not known & set(_ids(last)), step
        _check_whole(store, expected(ROWS), case=step)


@pytest.mark.parametrize("is_after", [False, True], ids=["before the step", "after the step"])
def test_a_model_change_killed_at_any_step_ends_with_the_new_output(
    trial: Trial, ragged: Make, *, is_after: bool
) -> None:
    """While an old output is replaced, a death leaves the old one or the new one, never a mixture of both."""
    changed = _changed(trial)
    probe = MemoryStore()
    trial.run(probe)
    stepped = SteppedStore(probe)
    changed.run(stepped)
    for step in range(1, len(stepped.operations) + 1):
        store = MemoryStore()
        trial.run(store)
        assert _crash(changed, store, step, is_after=is_after), step
        changed.run(store)
        rows = Trial.output(store)
        assert [row["id"] for row in rows] == [i for i in range(ROWS) if i != BAD], step
        assert all(row["y"] >= 1000 for row in rows), step
        assert len(read_generations(store)) == 1, step


def _changed(trial: Trial) -> Trial:
    import dataclasses

    return dataclasses.replace(
        trial,
        fingerprint=dataclasses.replace(trial.fingerprint, model="another model"),
        function=lambda inputs: {"y": inputs["x"].sum(axis=1) + 1000},
    )


@pytest.mark.parametrize("is_after", [False, True], ids=["before the step", "after the step"])
@pytest.mark.parametrize("model", ["same model", "other model"])
def test_a_run_that_wakes_up_beside_another_never_harms_its_output(
    trial: Trial, model: str, *, is_after: bool
) -> None:
    """One run sleeps at any step while another does everything: it then stops, and one output is there."""
    rival = trial if model == "same model" else _changed(trial)
    conflicts = 0
    counted = SteppedStore(MemoryStore(), counts_looks=True)
    trial.run(counted)
    for step in range(1, len(counted.operations) + 1):
        base = MemoryStore()
        store = SteppedStore(
            base,
            at=step,
            is_after=is_after,
            action=lambda b=base: rival.run(b, owner="the rival"),
            counts_looks=True,
        )
        newest, message = rival, ""
        try:
            trial.run(store, owner="the sleeper")
            newest = trial
        except CommitConflictError as error:
            conflicts += 1
            message = str(error)
        assert newest is trial or "(the rival) has taken over" in message, (step, message)
        published = current_generation(read_generations(base))
        assert published is not None, step
        owner = next(t for t in (trial, rival) if t.fingerprint == published.fingerprint)
        assert owner.fingerprint in {newest.fingerprint, rival.fingerprint}, step
        manifest = sorted(file.path for commit in published.commits for file in commit.files)
        assert visible_files(base) == manifest, (step, store.operations[step - 1])
        assert [row["id"] for row in Trial.output(base)] == [i for i in range(ROWS) if i != BAD], step
        assert all((row["y"] >= 1000) == (owner is not trial) for row in Trial.output(base)), step
        engine = owner.engine()
        owner.run(base, engine=engine)
        assert engine.calls == 0, step
        settled = dict(base.list(""))
        owner.run(base)
        assert base.list("") == settled, step
    assert conflicts > len(counted.operations) // 2
