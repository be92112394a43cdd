"""Two attempts at one segment at the same moment: the newer one's stays, and one always gets on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sits_dagster.errors import CommitConflictError, StorageError
from sits_dagster.inference.attempt import Attempt, open_attempt
from sits_dagster.inference.checkpoint import Commit
from sits_dagster.inference.generation import (
    Fingerprint,
    Generation,
    current_generation,
    read_generations,
    valid_commits,
)
from sits_dagster.inference.shards import Shard
from sits_dagster.inference.store import PartFile
from sits_dagster.testing import MemoryFormat, MemoryStore, SteppedStore, Trial, visible_files

ROWS = 6
NOW = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = Fingerprint(input="i", model="m", configuration="c")


def _open(store: MemoryStore | SteppedStore, owner: str = "a") -> Attempt:
    shard = Shard(index=0, row_start=0, row_end=ROWS)
    return open_attempt(store, FINGERPRINT, shards=(shard,), rows=ROWS, owner=owner, now=NOW)


def _stage(attempt: Attempt, start: int, end: int) -> Commit:
    """Write a segment's staged file and return the record to commit."""
    path = attempt.names.part(0, start, ".arrows")
    batch = pa.RecordBatch.from_pydict(
        {"row": list(range(start, end)), "by": [attempt.epoch] * (end - start)}
    )
    writer = MemoryFormat(attempt.store).open(attempt.names.staged(attempt.epoch, path), batch.schema)
    writer.write(batch)
    written = writer.close()
    part = PartFile(path=path, rows=end - start, size_bytes=written.size_bytes, sha256=written.sha256)
    return Commit(
        shard=0,
        row_start=start,
        row_end=end,
        part=part,
        quarantine=None,
        epoch=attempt.epoch,
        timestamp=NOW.isoformat(),
        digest=part.sha256,
        rows_predicted=end - start,
        batches=1,
        device_seconds=0.1,
    )


def _publish(attempt: Attempt) -> Generation:
    return attempt.publish(now=NOW, summary={})


def _check(store: MemoryStore, by: list[int]) -> None:
    assert [(row["row"], row["by"]) for row in Trial.output(store)] == list(zip(range(ROWS), by, strict=True))
    published = current_generation(read_generations(store))
    assert published is not None
    assert visible_files(store) == [file.path for commit in published.commits for file in commit.files]


@pytest.mark.parametrize("older_end", [2, 3, 6])
@pytest.mark.parametrize("moved", ["nothing moved", "moved at once", "moves afterwards"])
def test_a_commit_that_was_under_way_does_not_stop_the_newer_attempt(older_end: int, moved: str) -> None:
    """The older attempt passed its check just before it was overtaken: the newer one goes on regardless."""
    base = MemoryStore()
    older = _open(base)
    newer = _open(base, owner="b")
    record = _stage(older, 0, older_end)
    base.create(older.names.commit(0, 0), record.dump())
    if moved == "moved at once":
        assert base.move(older.names.staged(1, record.files[0].path), record.files[0].path)
    newer.commit(_stage(newer, 0, 3))
    if moved == "moves afterwards":
        assert not base.move(older.names.staged(1, record.files[0].path), record.files[0].path)
    with pytest.raises(CommitConflictError, match=r"attempt 2 \(b\)"):
        older.commit(_stage(older, older_end, ROWS))
    newer.commit(_stage(newer, 3, ROWS))
    _publish(newer)
    _check(base, [2] * ROWS)
    with pytest.raises(CommitConflictError, match=r"attempt 2 \(b\)"):
        _publish(older)
    _check(base, [2] * ROWS)


def test_a_sleeper_inside_its_commit_never_stops_everybody() -> None:
    """Whichever step an older commit sleeps at, the newer attempt that came meanwhile ends with an output."""
    for step, is_after in itertools.product(range(1, 8), (False, True)):
        base = MemoryStore()
        older = _open(base)
        record = _stage(older, 0, 3)

        def overtake(base: MemoryStore = base) -> None:
            newer = _open(base, owner="b")
            for row_range in newer.remaining(newer.generation.shards[0]):
                newer.commit(_stage(newer, row_range.row_start, row_range.row_end))
            _publish(newer)

        store = SteppedStore(base, at=step, action=overtake, is_after=is_after, counts_looks=True)
        sleeper = dataclasses.replace(older, store=store)
        try:
            sleeper.commit(record)
        except CommitConflictError as error:
            assert "attempt 2 (b)" in str(error), step  # noqa: PT017 - it may as well be in time
        if len(store.operations) < step:
            break
        assert [row["row"] for row in Trial.output(base)] == list(range(ROWS)), (step, is_after)
        published = current_generation(read_generations(base))
        assert published is not None
        assert visible_files(base) == [file.path for commit in published.commits for file in commit.files]


def test_commits_that_overlap_are_never_published_both() -> None:
    """Even if two attempts' segments share rows, the output has each row once: the newest's."""
    base = MemoryStore()
    older = _open(base)
    for start, end in ((0, 2), (2, 5)):
        older.commit(_stage(older, start, end))
    base.delete(older.names.commit(0, 2))
    newer = _open(base, owner="b")
    newer.commit(_stage(newer, 2, 3))
    newer.commit(_stage(newer, 3, ROWS))
    stray = _stage(older, 1, 4)
    base.create(older.names.commit(0, 1), stray.dump())
    base.move(older.names.staged(1, stray.files[0].path), stray.files[0].path)
    commits, left_out = valid_commits(base, newer.generation)
    assert [(c.row_start, c.row_end, c.epoch) for c in commits] == [(0, 2, 1), (2, 3, 2), (3, 6, 2)]
    assert left_out == (older.names.commit(0, 1),)
    _publish(newer)
    _check(base, [1, 1, 2, 2, 2, 2])


@pytest.mark.parametrize("damage", [lambda s, p: s.delete(p), lambda s, p: s.replace(p, b"")])
def test_a_generation_that_lost_files_is_not_published(damage: Callable[[MemoryStore, str], None]) -> None:
    """Success means that every row is there; a file that vanished meanwhile is noticed before."""
    base = MemoryStore()
    attempt = _open(base)
    attempt.commit(_stage(attempt, 0, 3))
    damage(base, visible_files(base)[0])
    attempt.commit(_stage(attempt, 3, ROWS))
    with pytest.raises(StorageError, match="lost committed files"):
        _publish(attempt)
    assert "_SUCCESS" not in base.list("")
    again = _open(base)
    assert [(r.row_start, r.row_end) for r in again.remaining(again.generation.shards[0])] == [(0, 3)]
