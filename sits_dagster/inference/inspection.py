"""What is in an output folder, and whether it is what its manifest says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from sits_dagster.errors import StorageError
from sits_dagster.inference.checkpoint import SUCCESS_FILE, Commit, Names
from sits_dagster.inference.generation import Generation, current_generation, read_generations, valid_commits
from sits_dagster.inference.shards import remaining_ranges
from sits_dagster.inference.store import PartFile, Store

__all__ = ["Inspection", "inspect_output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """An output folder.

    Args:
        generation: Its current generation, or the newest unfinished one; `None` when it has neither.
        is_complete: Whether a generation is published.
        commits: The segments.
        rows: Input rows.
        rows_written: Output rows.
        rows_quarantined: Rows without output.
        digest: Digest of the outputs so far of the last segment.
        incomplete: Sentences about rows that have neither output nor error.
        duplicated: Sentences about rows that are in the output twice, or files with other rows than recorded.
        orphans: Files that belong to no commit.
        damaged: Sentences about files that are missing or altered.
    """

    generation: Generation | None
    is_complete: bool
    commits: tuple[Commit, ...]
    rows: int
    rows_written: int
    rows_quarantined: int
    digest: str
    incomplete: tuple[str, ...]
    duplicated: tuple[str, ...]
    orphans: tuple[str, ...]
    damaged: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether the output is complete and everything in the folder is as recorded."""
        return self.is_complete and not (self.incomplete or self.duplicated or self.orphans or self.damaged)


def inspect_output(
    store: Store, *, rows_of: Callable[[str], int], sha256_of: Callable[[str], str] | None = None
) -> Inspection:
    """Return what a partition's output folder holds and what is wrong with it.

    Args:
        store: The folder.
        rows_of: Returns the rows of a part file.
        sha256_of: Returns a file's digest; `None` compares sizes only.
    """
    generations = read_generations(store)
    current = current_generation(generations)
    unfinished = max((g for g in generations if not g.outcome), key=lambda g: g.name, default=None)
    generation = current or unfinished
    if generation is None:
        return _empty(_orphans(store, ()))
    commits = current.commits if current else valid_commits(store, generation, finishes=False)[0]
    commits = tuple(sorted(commits, key=lambda c: (c.shard, c.row_start)))
    sizes = store.list("")
    files = [file for commit in commits for file in commit.files]
    faults = {file: _fault(file, sizes.get(file.path), sha256_of) for file in files}
    damaged = [fault for fault in faults.values() if fault]
    sound = [file for file, fault in faults.items() if not fault]
    found = {file: _rows_or_fault(file, rows_of) for file in sound}
    return Inspection(
        generation=generation,
        is_complete=current is not None,
        commits=commits,
        rows=generation.rows,
        rows_written=sum(c.rows_written for c in commits),
        rows_quarantined=sum(c.rows_quarantined for c in commits),
        digest=commits[-1].digest if commits else "",
        incomplete=tuple(_missing(generation, commits)),
        duplicated=(*_overlaps(commits), *_other_rows(found)),
        orphans=_orphans(store, files),
        damaged=(*damaged, *(fault for fault in found.values() if isinstance(fault, str))),
    )


def _empty(orphans: tuple[str, ...]) -> Inspection:
    return Inspection(
        generation=None,
        is_complete=False,
        commits=(),
        rows=0,
        rows_written=0,
        rows_quarantined=0,
        digest="",
        incomplete=(),
        duplicated=(),
        orphans=orphans,
        damaged=(),
    )


def _fault(file: PartFile, size_bytes: int | None, sha256_of: Callable[[str], str] | None) -> str:
    if size_bytes is None:
        return f"{file.path} is missing."
    if size_bytes != file.size_bytes:
        return f"{file.path} has {size_bytes} bytes instead of {file.size_bytes}."
    if sha256_of and sha256_of(file.path) != file.sha256:
        return f"{file.path} was altered: its digest is not the recorded one."
    return ""


def _missing(generation: Generation, commits: tuple[Commit, ...]) -> list[str]:
    found: list[str] = []
    for shard in generation.shards:
        for gap in remaining_ranges(shard, (c.range for c in commits if c.shard == shard.index)):
            found.append(f"Rows {gap.row_start} to {gap.row_end} of shard {shard.index} are not committed.")  # noqa: PERF401 - reads as it is
    counted = sum(c.rows_written + c.rows_quarantined for c in commits)
    if not found and counted != generation.rows:
        found.append(f"{generation.rows} rows were read, but {counted} are written or quarantined.")
    return found


def _overlaps(commits: tuple[Commit, ...]) -> list[str]:
    ordered = sorted((c.range for c in commits), key=lambda r: (r.row_start, r.row_end))
    return [
        f"Rows {right.row_start} to {min(left.row_end, right.row_end)} are committed twice."
        for left, right in pairwise(ordered)
        if right.row_start < left.row_end
    ]


def _rows_or_fault(file: PartFile, rows_of: Callable[[str], int]) -> int | str:
    try:
        return rows_of(file.path)
    except StorageError as error:
        return error.message


def _other_rows(found: Mapping[PartFile, int | str]) -> list[str]:
    return [
        f"{file.path} has {rows} rows instead of {file.rows}."
        for file, rows in found.items()
        if isinstance(rows, int) and rows != file.rows
    ]


def _orphans(store: Store, files: list[PartFile] | tuple[PartFile, ...]) -> tuple[str, ...]:
    """Return visible data files that no commit names: a plain reader would read them too."""
    known = {file.path for file in files} | {SUCCESS_FILE}
    return tuple(
        sorted(
            path
            for path in store.list("")
            if path not in known and not path.startswith("_sits/") and (Names.is_ours(path) or _is_read(path))
        )
    )


def _is_read(path: str) -> bool:
    return path.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in path.split("/"))
