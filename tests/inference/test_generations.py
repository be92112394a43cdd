"""What an output was made from, what is left of it when something is damaged, and whose files are whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sits_dagster.errors import CommitConflictError
from sits_dagster.inference.checkpoint import dump_json, load_commit, load_json
from sits_dagster.inference.generation import current_generation, read_generations
from sits_dagster.testing import FakeEngine, MemoryStore, SteppedStore, Trial, visible_files

Make = Callable[..., Trial]
Expected = Callable[[int], list[dict[str, Any]]]
ROWS = 20
SEGMENT = 8


def _ids(engine: FakeEngine) -> list[int]:
    return sorted(int(row[0]) for batch in engine.batches for row in batch["x"])


def _unfinished(trial: Trial) -> MemoryStore:
    """Return a store with two committed segments and an unfinished third."""
    store, engine = MemoryStore(), trial.engine()
    trial.run(store, engine=engine, should_stop=lambda: len(_ids(engine)) >= 2 * SEGMENT)
    for path in store.list(""):
        if "/carried/" in path:
            store.delete(path)
    assert len(_commits(store)) == 2
    return store


def _commits(store: MemoryStore) -> list[str]:
    return sorted(path for path in store.list("") if "/commits/" in path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": "b"}, "The input changed"),
        ({"model": "b"}, "The model changed"),
        ({"configuration": "b"}, "The configuration changed"),
        ({"input": "b", "model": "b"}, "The input and model changed"),
    ],
    ids=["input", "model", "configuration", "two"],
)
def test_a_change_begins_a_new_output_and_says_what_changed(
    ragged: Make, expected: Expected, changes: dict[str, str], words: str
) -> None:
    """Results of different models never mix, and the log says why everything is computed again."""
    before, store = ragged(ROWS), MemoryStore()
    before.run(store)
    old = visible_files(store)
    after = dataclasses.replace(before, fingerprint=dataclasses.replace(before.fingerprint, **changes))
    engine = after.engine()
    stats = after.run(store, engine=engine)
    assert _ids(engine) == list(range(ROWS))
    assert any(words in note for note in stats.notes)
    assert not set(old) & set(visible_files(store))
    assert Trial.output(store) == expected(ROWS)
    assert len(read_generations(store)) == 1


def test_going_back_to_the_old_model_is_a_change_as_well(ragged: Make, expected: Expected) -> None:
    """A, B, A: each output replaces the one before, and nothing of either is left over."""
    first, store = ragged(ROWS), MemoryStore()
    second = dataclasses.replace(first, fingerprint=dataclasses.replace(first.fingerprint, model="b"))
    for trial in (first, second, first, second):
        engine = trial.engine()
        trial.run(store, engine=engine)
        assert len(_ids(engine)) == ROWS
        assert Trial.output(store) == expected(ROWS)
        assert [g.fingerprint for g in read_generations(store)] == [trial.fingerprint]


def test_an_unfinished_output_is_not_resumed_by_another_model(ragged: Make, expected: Expected) -> None:
    """Half an output of the old model is thrown away, not completed by the new one."""
    first = ragged(ROWS)
    store = _unfinished(first)
    second = dataclasses.replace(
        first,
        fingerprint=dataclasses.replace(first.fingerprint, model="b"),
        function=lambda inputs: {"y": inputs["x"].sum(axis=1) + 1000},
    )
    second.run(store)
    assert [row["y"] - 1000 for row in Trial.output(store)] == [row["y"] for row in expected(ROWS)]


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _alter(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [_truncate, _alter, lambda _: b""], ids=["truncated", "altered", "empty"])
@pytest.mark.parametrize("segment", [0, 1])
def test_a_damaged_checkpoint_costs_its_segment(
    ragged: Make, expected: Expected, damage: Callable[[bytes], bytes], segment: int
) -> None:
    """A record that is not whole is not believed; every other segment is kept."""
    trial = ragged(ROWS)
    store = _unfinished(trial)
    path = _commits(store)[segment]
    store.replace(path, damage(store.read(path)))
    engine = trial.engine()
    stats = trial.run(store, engine=engine)
    lost = range(segment * SEGMENT, (segment + 1) * SEGMENT)
    assert _ids(engine) == sorted({*lost, *range(2 * SEGMENT, ROWS)})
    assert any(path in note and "damaged" in note for note in stats.notes)
    assert Trial.output(store) == expected(ROWS)


def test_every_altered_byte_of_a_checkpoint_is_noticed(ragged: Make) -> None:
    """No single flipped bit makes a record say something else."""
    store = _unfinished(ragged(ROWS))
    data = store.read(_commits(store)[0])
    whole = load_commit(data)
    assert whole is not None
    for index in range(len(data)):
        for bit in (0x01, 0x80):
            altered = load_commit(data[:index] + bytes([data[index] ^ bit]) + data[index + 1 :])
            assert altered is None or altered == whole, (index, bit)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"null", b"\xff", b'{"checksum": 1}'])
def test_what_is_no_record_is_none(data: bytes) -> None:
    """Foreign bytes at a record's place are damage, not a crash."""
    assert load_commit(data) is None
    assert load_json(data) is None


def test_a_record_carries_what_was_put_in() -> None:
    """Checksummed JSON is read back as it was."""
    body = {"b": [1, None, "ü"], "a": {"c": 1.5}}
    assert load_json(dump_json(body)) == body


@pytest.mark.parametrize("damage", ["missing", "short"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_finished_output_that_lost_a_file_is_mended(
    ragged: Make, expected: Expected, damage: str, part: int
) -> None:
    """Running a partition again brings back a file that someone deleted or truncated, and only that."""
    trial, store = ragged(ROWS), MemoryStore()
    trial.run(store)
    path = visible_files(store)[part]
    data = store.read(path)
    if damage == "missing":
        store.delete(path)
    else:
        store.replace(path, data[:-1])
    engine = trial.engine()
    trial.run(store, engine=engine)
    assert _ids(engine) == list(range(part * SEGMENT, min(ROWS, (part + 1) * SEGMENT)))
    assert Trial.output(store) == expected(ROWS)
    last = trial.engine()
    trial.run(store, engine=last)
    assert last.calls == 0


def test_mending_keeps_the_plan_whatever_the_device_has_learned(ragged: Make, expected: Expected) -> None:
    """Also where a new plan would have other shards, only the lost segment is computed."""
    policy = {"segment_rows": 5, "shard_seconds_min": 0.05}
    trial, store = ragged(ROWS, policy=policy, row_group_rows=(5, 5, 5, 5)), MemoryStore()
    trial.run(store)
    assert len(read_generations(store)[0].shards) > 1
    store.delete(visible_files(store)[-1])
    engine = trial.engine()
    trial.run(store, engine=engine)
    assert len(_ids(engine)) <= 5
    assert Trial.output(store) == expected(ROWS)


def test_a_damaged_manifest_is_written_again(ragged: Make, expected: Expected) -> None:
    """The record that says an output is complete can be lost without losing the output."""
    trial, store = ragged(ROWS), MemoryStore()
    trial.run(store)
    (path,) = [path for path in store.list("") if path.endswith("outcome.json")]
    store.replace(path, b"{")
    engine = trial.engine()
    stats = trial.run(store, engine=engine)
    assert (engine.calls, stats.is_complete) == (0, True)
    assert Trial.output(store) == expected(ROWS)
    assert current_generation(read_generations(store)) is not None


def test_computing_everything_again_is_done_once_for_each_request(ragged: Make, expected: Expected) -> None:
    """A requested recomputation that is interrupted goes on; retried after it succeeded, it does nothing."""
    trial, store = ragged(ROWS), MemoryStore()
    trial.run(store)
    first = trial.engine()
    stats = trial.run(store, engine=first, request="monday", should_stop=lambda: first.calls >= 3)
    assert not stats.is_complete
    assert any("computed again, as was asked" in note for note in stats.notes)
    second, third, fourth = trial.engine(), trial.engine(), trial.engine()
    assert trial.run(store, engine=second, request="monday").is_complete
    assert sorted(_ids(first) + _ids(second)) == list(range(ROWS))
    trial.run(store, engine=third, request="monday")
    assert third.calls == 0
    trial.run(store, engine=fourth, request="tuesday")
    assert _ids(fourth) == list(range(ROWS))
    assert Trial.output(store) == expected(ROWS)
    last = trial.engine()
    trial.run(store, engine=last)
    assert last.calls == 0, "without a request the newest output is good"


def test_a_request_that_is_given_up_leaves_the_output_as_it_was(ragged: Make, expected: Expected) -> None:
    """After an interrupted recomputation the old output is complete, and the half-made one is removed."""
    trial, store = ragged(ROWS), MemoryStore()
    trial.run(store)
    before = visible_files(store)
    engine = trial.engine()
    trial.run(store, engine=engine, request="monday", should_stop=lambda: engine.calls >= 4)
    assert visible_files(store) != before
    trial.run(store)
    assert visible_files(store) == before
    assert Trial.output(store) == expected(ROWS)
    assert len(read_generations(store)) == 1
    assert "_SUCCESS" in store.list("")


def test_the_users_own_files_survive_everything(ragged: Make) -> None:
    """Only files that this package wrote are ever removed, however alike the names are."""
    mine = {
        "part-0000.parquet": b"1",
        "part-0000.arrows": b"2",
        "notes.txt": b"3",
        "_quarantine/mine.arrows": b"4",
        "part-00000-000000000000-deadbeef-0001.arrows.bak": b"5",
        "sub/part-00000-000000000000-deadbeef-0001.arrows": b"6",
        ".hidden": b"7",
        "_metadata": b"8",
    }
    store, trial = MemoryStore(mine), ragged(ROWS)
    trial.run(store)
    engine = trial.engine()
    trial.run(store, engine=engine, request="again", should_stop=lambda: engine.calls >= 3)
    changed = dataclasses.replace(trial, fingerprint=dataclasses.replace(trial.fingerprint, model="b"))
    changed.run(store)
    assert {path: store.read(path) for path in mine} == mine


def test_leftovers_of_a_dead_run_are_removed_when_the_output_is_found_complete(
    ragged: Make, expected: Expected
) -> None:
    """What a killed rival left beside a finished output goes away with the next run, in one go."""
    trial, store = ragged(ROWS), MemoryStore()
    trial.run(store)
    clean = {path for path in store.list("") if "/epochs/" not in path}
    generation = read_generations(store)[0]
    leftovers = [
        generation.names.staged(1, "part-x"),
        f"{generation.names.carried}/00000001-000000000000.arrows",
        generation.names.commit(7, 999),
        "part-00000-000000000000-deadbeef-0001.arrows",
        "_sits/generations/abc/generation.json",
        "_sits/epochs/00000000.json",
    ]
    for path in leftovers:
        store.replace(path, b"left")
    trial.run(store)
    assert {path for path in store.list("") if "/epochs/" not in path} == clean
    settled = dict(store.list(""))
    trial.run(store)
    assert store.list("") == settled
    assert Trial.output(store) == expected(ROWS)


def test_an_attempt_that_lost_does_not_commit(ragged: Make, expected: Expected) -> None:
    """The loser names the winner, and everything that it did not commit is the winner's."""
    trial, base = ragged(ROWS), MemoryStore()
    probe = SteppedStore(MemoryStore())
    trial.run(probe)
    step = next(i for i, name in enumerate(probe.operations, 1) if "/commits/" in name)
    store = SteppedStore(base, at=step + 2, action=lambda: trial.run(base, owner="run 17 of tuesday"))
    with pytest.raises(CommitConflictError, match="run 17 of tuesday"):
        trial.run(store, owner="the loser")
    assert Trial.output(base) == expected(ROWS)


def test_the_digest_chain_names_the_outputs_contents(ragged: Make) -> None:
    """Two runs over the same rows agree in the digest of everything; another result changes it."""

    def digests(trial: Trial) -> list[str]:
        store = MemoryStore()
        trial.run(store)
        published = current_generation(read_generations(store))
        assert published is not None
        return [commit.digest for commit in published.commits]

    first = digests(ragged(ROWS))
    other = digests(ragged(ROWS, function=lambda inputs: {"y": inputs["x"].sum(axis=1) + 1}))
    assert first == digests(ragged(ROWS, policy={"batch_rows": 1}))
    assert len(set(first)) == len(first) == 3
    assert not set(first) & set(other)
