"""Generations of a partition's output, as storage tells of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sits_dagster.errors import StorageError
from sits_dagster.inference.checkpoint import Commit, Names, chained_digest, load_commit, load_json
from sits_dagster.inference.shards import Shard
from sits_dagster.inference.store import PartFile, Store

__all__ = [
    "PUBLISHED",
    "RETIRED",
    "Fingerprint",
    "Generation",
    "complete_generation",
    "current_generation",
    "digest_after",
    "is_whole",
    "read_generation",
    "read_generations",
    "read_json",
    "valid_commits",
]

PUBLISHED = "published"
RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What an output depends on: a change of any digest begins a new generation."""

    input: str
    model: str
    configuration: str

    @property
    def digest(self) -> str:
        """One digest of the three."""
        return hashlib.sha256(f"{self.input}|{self.model}|{self.configuration}".encode()).hexdigest()[:16]

    def changes(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the names of what differs."""
        mine, others = asdict(self), asdict(other)
        return tuple(name for name in mine if mine[name] != others[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What storage tells of a generation.

    Args:
        name: Fingerprint digest and instance number.
        fingerprint: What it was made from.
        rows: Input rows.
        shards: Its plan, fixed when it began.
        token: Names the request to compute everything again that began it; `""` for none.
        outcome: `"published"`, `"retired"` or `""` while it is unfinished.
        epoch: The attempt that ended it; 0 while it is unfinished.
        commits: The manifest of a published one, else empty.
    """

    name: str
    fingerprint: Fingerprint
    rows: int
    shards: tuple[Shard, ...]
    token: str = ""
    outcome: str = ""
    epoch: int = 0
    commits: tuple[Commit, ...] = ()

    @property
    def names(self) -> Names:
        """Where its objects are."""
        return Names(self.name)

    @property
    def instance(self) -> int:
        """Its number among the generations of the same fingerprint."""
        return int(self.name.rsplit("-", 1)[1])


def complete_generation(store: Store, fingerprint: Fingerprint, *, token: str = "") -> Generation | None:
    """Return the current output when it was made from exactly this and all its files are there."""
    current = current_generation(read_generations(store))
    if current is None or current.fingerprint != fingerprint or (token and current.token != token):
        return None
    sizes = store.list("")
    is_whole = all(sizes.get(file.path) == file.size_bytes for c in current.commits for file in c.files)
    return current if is_whole else None


def current_generation(generations: Iterable[Generation]) -> Generation | None:
    """Return the published generation of the newest attempt, which is what readers see."""
    return max((g for g in generations if g.outcome == PUBLISHED), key=lambda g: g.epoch, default=None)


def read_generations(store: Store) -> tuple[Generation, ...]:
    """Return every generation that storage knows, in name order; unreadable plans are left out."""
    prefix = Names("").folder
    names = {path.removeprefix(prefix).split("/")[0] for path in store.list(prefix.rstrip("/"))}
    found = (read_generation(store, Names(name)) for name in sorted(names))
    return tuple(generation for generation in found if generation)


def read_generation(store: Store, names: Names) -> Generation | None:
    """Return one generation, or `None` when its plan is missing or damaged."""
    plan = read_json(store, names.plan)
    if plan is None:
        return None
    outcome = read_json(store, names.outcome) or {}
    return Generation(
        name=names.generation,
        fingerprint=Fingerprint(**plan["fingerprint"]),
        rows=plan["rows"],
        shards=tuple(Shard(**shard) for shard in plan["shards"]),
        token=plan["token"],
        outcome=outcome.get("outcome", ""),
        epoch=outcome.get("epoch", 0),
        commits=tuple(_commit_of(entry) for entry in outcome.get("commits", ())),
    )


def _commit_of(entry: dict[str, Any]) -> Commit:
    files: dict[str, Any] = {n: PartFile(**entry[n]) if entry[n] else None for n in ("part", "quarantine")}
    return Commit(**{**entry, **files})


def read_json(store: Store, path: str) -> dict[str, Any] | None:
    """Return a control object's contents, or `None` when it is missing or damaged."""
    try:
        return load_json(store.read(path))
    except StorageError:
        return None


def valid_commits(
    store: Store, generation: Generation, *, finishes: bool = True
) -> tuple[tuple[Commit, ...], tuple[str, ...]]:
    """Return the commits whose files are there, and the damaged records' paths.

    Moves that were interrupted are finished, unless `finishes` is false: then nothing is changed.
    """
    sizes = store.list("")
    valid: list[Commit] = []
    damaged: list[str] = []
    for path in sorted(p for p in sizes if p.startswith(f"{generation.names.commits}/")):
        commit = load_commit(store.read(path))
        is_named_right = commit is not None and path == generation.names.commit(
            commit.shard, commit.row_start
        )
        if commit and is_named_right and is_whole(store, generation, commit, sizes, finishes=finishes):
            valid.append(commit)
        else:
            damaged.append(path)
    newest, older = _without_overlaps(valid)
    return newest, (*damaged, *(generation.names.commit(c.shard, c.row_start) for c in older))


def _without_overlaps(commits: Iterable[Commit]) -> tuple[tuple[Commit, ...], tuple[Commit, ...]]:
    """Return commits that share no row, in row order, and what was left out; the newest attempts' stay."""
    kept: list[Commit] = []
    left_out: list[Commit] = []
    for commit in sorted(commits, key=lambda c: (c.shard, c.row_start)):
        last = kept[-1] if kept else None
        if last is None or last.shard != commit.shard or last.row_end <= commit.row_start:
            kept.append(commit)
        elif last.epoch < commit.epoch:
            left_out.append(last)
            kept[-1] = commit
        else:
            left_out.append(commit)
    return tuple(kept), tuple(left_out)


def is_whole(
    store: Store, generation: Generation, commit: Commit, sizes: Mapping[str, int], *, finishes: bool = True
) -> bool:
    """Return whether a commit's files are there; a move that was interrupted is finished, where asked to."""
    for file in commit.files:
        staged = generation.names.staged(commit.epoch, file.path, commit.writer)
        if sizes.get(staged) == file.size_bytes and (not finishes or store.move(staged, file.path)):
            continue
        if sizes.get(file.path) != file.size_bytes:
            return False
    return True


def digest_after(commits: Iterable[Commit], generation: Generation, shard: int, row_start: int) -> str:
    """Return the digest of a shard's outputs before `row_start`."""
    before = [c for c in commits if c.shard == shard and c.row_end <= row_start]
    if before:
        return max(before, key=lambda c: c.row_end).digest
    return chained_digest(generation.fingerprint.digest, ())
