"""An attempt at a generation: resumed, committed to and published, each exactly once.

Everything that must happen once is the creation of an object that may exist once: an epoch (an
attempt's number), a plan (the shards), a commit (a segment) and an outcome (published or retired).
Files become visible only after their commit, so a rival's files never are.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from sits_dagster.errors import CommitConflictError, InvariantError, StorageError
from sits_dagster.inference.checkpoint import (
    SUCCESS_FILE,
    Commit,
    Names,
    dump_json,
    load_commit,
)
from sits_dagster.inference.generation import (
    PUBLISHED,
    RETIRED,
    Fingerprint,
    Generation,
    current_generation,
    is_whole,
    read_generation,
    read_generations,
    read_json,
    valid_commits,
)
from sits_dagster.inference.shards import RowRange, Shard, remaining_ranges
from sits_dagster.inference.store import Store

__all__ = ["Attempt", "join_attempt", "open_attempt", "settle"]

OPEN_TRIES_MAX = 10
EPOCH_TRIES_MAX = 100
INSTANCES_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The right of one run to commit to a generation, until a newer attempt registers.

    Args:
        store: The partition's folder.
        generation: What is being made.
        epoch: This attempt's number; higher is newer.
        commits: Valid commits at the time of opening.
        notes: Sentences about what was found, for the log.
        writer: Tells this process from others of the attempt: two may work on one shard for a while.
    """

    store: Store
    generation: Generation
    epoch: int
    commits: tuple[Commit, ...]
    notes: tuple[str, ...] = ()
    writer: str = ""

    @property
    def names(self) -> Names:
        """Where the generation's objects are."""
        return self.generation.names

    def staged(self, path: str) -> str:
        """Return where this process stages a file."""
        return self.names.staged(self.epoch, path, self.writer)

    def remaining(self, shard: Shard) -> tuple[RowRange, ...]:
        """Return the rows of a shard that were not committed when the attempt was opened."""
        return remaining_ranges(shard, (c.range for c in self.commits if c.shard == shard.index))

    def commit(self, commit: Commit) -> Commit:
        """Make a segment's staged files part of the output, once.

        Raises:
            CommitConflictError: A newer attempt is at work, or another one committed the segment.
        """
        self.check_not_fenced()
        with self._rivals_named():
            self._commit(commit)
        return commit

    def _commit(self, commit: Commit) -> None:
        path = self.names.commit(commit.shard, commit.row_start)
        if not self.store.create(path, commit.dump()) and not self._replace_older(path, commit):
            winner = load_commit(self.store.read(path))
            raise CommitConflictError(self._lost_to(winner.epoch if winner else None, commit))
        for file in commit.files:
            # A newer attempt may have finished the move, or have taken the staged file for a leftover.
            is_moved = self.store.move(self.staged(file.path), file.path)
            if not is_moved and self.store.list("").get(file.path) != file.size_bytes:
                raise CommitConflictError(self._lost_to(_epoch_newest(self.store), commit))

    def _replace_older(self, path: str, commit: Commit) -> bool:
        """Take the place of a record that is damaged, or that an older attempt made since this was opened.

        The older attempt is fenced and stops; the rows are computed here anyway, maybe with another border.
        """
        older = load_commit(self.store.read(path))
        if older and older.epoch >= self.epoch:
            return False
        self.check_not_fenced()
        self.store.delete(path)
        if not self.store.create(path, commit.dump()):
            return False
        if older:
            for file in older.files:
                # It may be about to move them over this attempt's files.
                self.store.delete(self.names.staged(older.epoch, file.path, older.writer))
        return True

    def check_not_fenced(self) -> None:
        """Return while this is the newest attempt.

        Raises:
            CommitConflictError: A newer attempt has registered.
        """
        newest = _epoch_newest(self.store)
        if newest > self.epoch:
            raise CommitConflictError(self._lost_to(newest, None))

    def publish(self, *, now: datetime, summary: Mapping[str, Any]) -> Generation:
        """Make the generation the partition's output and remove what is not part of it.

        Raises:
            CommitConflictError: Another attempt ended the generation, or a newer one is at work.
            StorageError: Segments are missing; running again computes them.
        """
        self.check_not_fenced()
        with self._rivals_named():
            return self._publish(now, summary)

    def _publish(self, now: datetime, summary: Mapping[str, Any]) -> Generation:
        commits, _ = valid_commits(self.store, self.generation)
        if any(
            remaining_ranges(s, (c.range for c in commits if c.shard == s.index))
            for s in self.generation.shards
        ):
            msg = f"Generation {self.generation.name} lost committed files before it was published."
            raise StorageError(msg, hint="run the partition again: what is missing is computed again.")
        manifest = {
            "outcome": PUBLISHED,
            "epoch": self.epoch,
            "timestamp": now.isoformat(),
            "rows": self.generation.rows,
            "rows_written": sum(c.rows_written for c in commits),
            "rows_quarantined": sum(c.rows_quarantined for c in commits),
            "commits": [asdict(c) for c in commits],
            "summary": dict(summary),
        }
        published = replace(self.generation, outcome=PUBLISHED, epoch=self.epoch, commits=commits)
        if not self.store.create(self.names.outcome, dump_json(manifest)):
            self.check_not_fenced()
            ended = read_generation(self.store, self.names)
            if ended and not ended.outcome:  # the object is there, but damaged
                self.store.replace(self.names.outcome, dump_json(manifest))
                ended = published
            if ended is None or ended.outcome != PUBLISHED or ended.epoch > self.epoch:
                raise CommitConflictError(self._lost_to(ended.epoch if ended else None, None))
            # An older attempt did it while this one was opened: the same rows, from the same commits.
            published = ended
        tidy(self.store, published, epoch=self.epoch)
        return published

    @contextmanager
    def _rivals_named(self) -> Generator[None]:
        """Say who took over where a newer attempt removed what this one was about to use."""
        try:
            yield
        except StorageError:
            self.check_not_fenced()
            raise

    def _lost_to(self, epoch: int | None, commit: Commit | None) -> str:
        owner = _owner(self.store, epoch) if epoch else "an unknown attempt"
        what = (
            f"segment {commit.shard}/{commit.row_start}" if commit else f"generation {self.generation.name}"
        )
        return (
            f"Attempt {self.epoch} stops: attempt {epoch} ({owner}) has taken over {what}. "
            "What was committed stays."
        )


def open_attempt(
    store: Store,
    fingerprint: Fingerprint,
    *,
    shards: Sequence[Shard],
    rows: int,
    owner: str,
    now: datetime,
    token: str = "",
) -> Attempt:
    """Register a new attempt, resuming an unfinished generation of the same fingerprint if there is one.

    Args:
        store: The partition's folder.
        fingerprint: What the output is made from.
        shards: The plan of a generation that begins now; one that is resumed keeps its own.
        rows: Input rows.
        owner: Who this is, for the message of an attempt that loses against it.
        now: Wall-clock time, with a time zone.
        token: Asks for everything to be computed again, once for each token.
    """
    for _ in range(OPEN_TRIES_MAX):
        generation, notes = _choose(store, fingerprint, shards=shards, rows=rows, token=token)
        store.delete(SUCCESS_FILE)
        epoch = _register(store, generation, owner, now)
        found = read_generation(store, generation.names)
        if found and found.outcome != RETIRED:
            break
        # A rival published something else before this attempt was registered.
    else:
        msg = f"Other attempts ended generation {fingerprint.digest} again and again while it was opened."
        raise CommitConflictError(msg)
    commits, damaged = valid_commits(store, generation)
    # They are replaced by the commits to come, or removed when those are published. Nothing that a newer
    # attempt may have committed meanwhile is touched here: this one may be a sleeper that wakes up.
    notes = (
        *notes,
        *(
            f"Checkpoint {path} is damaged or its files are gone: that segment is computed again."
            for path in damaged
        ),
    )
    _remove_staged(store, generation, epoch)
    return Attempt(store=store, generation=generation, epoch=epoch, commits=commits, notes=notes)


def join_attempt(store: Store, generation: str, epoch: int) -> Attempt:
    """Return an attempt that was registered before, with the commits that are there now.

    Raises:
        CommitConflictError: Its generation is gone: a newer attempt has replaced it.
    """
    found = read_generation(store, Names(generation))
    if found is None:
        msg = f"Generation {generation} of attempt {epoch} is gone: a newer attempt has replaced it."
        raise CommitConflictError(msg)
    commits, _ = valid_commits(store, found)
    return Attempt(store=store, generation=found, epoch=epoch, commits=commits)


def _choose(
    store: Store, fingerprint: Fingerprint, *, shards: Sequence[Shard], rows: int, token: str
) -> tuple[Generation, tuple[str, ...]]:
    """Return the generation to work on, resumed or begun, and what there is to say about it."""
    generations = read_generations(store)
    notes = _explain(generations, fingerprint, token=token)
    same = [g for g in generations if g.fingerprint == fingerprint and (not token or g.token == token)]
    unfinished = [g for g in same if not g.outcome]
    if unfinished:
        return max(unfinished, key=lambda g: g.instance), notes
    published = current_generation(same)
    if published:
        # The plan of a published output is kept, so that its whole segments fit into the new one.
        shards = published.shards
    generation = _begin(store, generations, fingerprint, shards=shards, rows=rows, token=token)
    _adopt(store, generation, published)
    return generation, notes


def settle(store: Store, complete: Generation, *, owner: str, now: datetime) -> None:
    """Remove what interrupted runs left beside a complete output; their late commits fail from now on."""
    kept = {file.path for commit in complete.commits for file in commit.files}
    kept |= {complete.names.plan, complete.names.outcome, Names.epoch(_epoch_newest(store)), SUCCESS_FILE}
    kept |= {complete.names.commit(c.shard, c.row_start) for c in complete.commits}
    listing = store.list("")
    if SUCCESS_FILE not in listing or any(Names.is_ours(path) and path not in kept for path in listing):
        tidy(store, complete, epoch=_register(store, complete, owner, now))


def tidy(store: Store, published: Generation, *, epoch: int) -> None:
    """Retire the generations that a published one replaces and remove every file that is not part of it.

    Args:
        store: The partition's folder.
        published: The current output.
        epoch: The attempt that tidies; a newer one that is at work is left alone.
    """
    listing = store.list("")
    others = [g for g in read_generations(store) if g.name != published.name]
    if _epoch_newest(store) > epoch or any(g.outcome == PUBLISHED and g.epoch > epoch for g in others):
        return
    kept = {file.path for commit in published.commits for file in commit.files}
    for other in others:
        retired = dump_json({"outcome": RETIRED, "epoch": epoch})
        if not other.outcome and not store.create(other.names.outcome, retired):
            ended = read_generation(store, other.names)
            if ended and ended.epoch > epoch:
                return
    kept |= {published.names.plan, published.names.outcome, Names.epoch(epoch)}
    kept |= {published.names.commit(c.shard, c.row_start) for c in published.commits}
    for path in listing:
        if Names.is_ours(path) and path not in kept:
            store.delete(path)
    summary = {
        "generation": published.name,
        "rows_written": sum(c.rows_written for c in published.commits),
        "rows_quarantined": sum(c.rows_quarantined for c in published.commits),
        "files": sum(len(c.files) for c in published.commits),
    }
    store.replace(SUCCESS_FILE, dump_json(summary))


def _begin(
    store: Store,
    generations: Sequence[Generation],
    fingerprint: Fingerprint,
    *,
    shards: Sequence[Shard],
    rows: int,
    token: str,
) -> Generation:
    taken = {g.name for g in generations}
    plan = {
        "fingerprint": asdict(fingerprint),
        "rows": rows,
        "shards": [asdict(shard) for shard in shards],
        "token": token,
    }
    for instance in range(1, INSTANCES_MAX):
        name = f"{fingerprint.digest}-{instance:04d}"
        if name in taken:
            continue
        begun = Generation(name=name, fingerprint=fingerprint, rows=rows, shards=tuple(shards), token=token)
        # A rival may have begun it at this moment; it is shared then, unless its plan is damaged.
        store.create(begun.names.plan, dump_json(plan))
        shared = read_generation(store, begun.names)
        if shared and not shared.outcome:
            return shared
    msg = f"No free generation name for {fingerprint.digest}."
    raise InvariantError(msg)


def _register(store: Store, generation: Generation, owner: str, now: datetime) -> int:
    for _ in range(EPOCH_TRIES_MAX):
        epoch = _epoch_newest(store) + 1
        record = {"generation": generation.name, "owner": owner, "timestamp": now.isoformat()}
        if store.create(Names.epoch(epoch), dump_json(record)):
            return epoch
    msg = f"{EPOCH_TRIES_MAX} other attempts registered at the same moment."
    raise CommitConflictError(msg)


def _epoch_newest(store: Store) -> int:
    numbers = (path.rsplit("/", 1)[1].split(".")[0] for path in store.list(Names.epochs()))
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _owner(store: Store, epoch: int) -> str:
    record = read_json(store, Names.epoch(epoch))
    return record["owner"] if record else "unknown"


def _adopt(store: Store, generation: Generation, published: Generation | None) -> None:
    """Take over what is whole of a published output of the same fingerprint that lost some files."""
    if published is None or published.shards != generation.shards:
        return
    sizes = store.list("")
    for commit in published.commits:
        if is_whole(store, generation, commit, sizes):
            store.create(generation.names.commit(commit.shard, commit.row_start), commit.dump())


def _remove_staged(store: Store, generation: Generation, epoch: int) -> None:
    """Remove what older attempts staged and never committed."""
    prefix = generation.names.folder
    for path in store.list(f"{prefix}/staging"):
        if int(path.removeprefix(f"{prefix}/staging/").split("-")[0]) < epoch:
            store.delete(path)


def _explain(generations: Sequence[Generation], fingerprint: Fingerprint, *, token: str) -> tuple[str, ...]:
    if token and not any(g.token == token for g in generations):
        return ("Everything is computed again, as was asked for.",)
    if not generations or any(g.fingerprint == fingerprint for g in generations):
        return ()
    newest = current_generation(generations) or generations[-1]
    changed = " and ".join(fingerprint.changes(newest.fingerprint))
    return (
        f"The {changed} changed since generation {newest.name}: it is not resumed, a new generation begins.",
    )
