"""One partition from its files to its published output: plan, run, publish, and what it came to."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from sits_dagster.errors import InvariantError, QuarantineLimitError
from sits_dagster.inference.attempt import Attempt, open_attempt, settle
from sits_dagster.inference.carried import Carried, load_carried
from sits_dagster.inference.checkpoint import QUARANTINE_FOLDER, Commit, chained_digest
from sits_dagster.inference.engine import Engine
from sits_dagster.inference.generation import (
    Fingerprint,
    Generation,
    complete_generation,
    current_generation,
    digest_after,
    read_generations,
)
from sits_dagster.inference.pipeline import PartitionWork, run_shards
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.shards import Shard, plan_shards
from sits_dagster.inference.sizing import BatchSizer
from sits_dagster.inference.stats import PartitionStats, Progress
from sits_dagster.inference.store import PartFile, Store

__all__ = ["PartitionPlan", "partition_stats", "publish_partition", "run_attempt", "start_partition"]

SECONDS_PER_ROW_UNKNOWN = 0.01
COUNTER = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """What a run has to do for a partition.

    Args:
        attempt: The right to commit, or `None` when the output is complete.
        complete: The output, when there is nothing to do.
        rows_recomputed: Rows that earlier attempts had computed and lost.
        rows_carried: Rows whose results a stopped attempt left ready.
        notes: Sentences about what was found.
    """

    attempt: Attempt | None
    complete: Generation | None
    rows_recomputed: int = 0
    rows_carried: int = 0
    notes: tuple[str, ...] = ()

    @property
    def generation(self) -> Generation:
        """What is being made, or was."""
        found = self.attempt.generation if self.attempt else self.complete
        if found is None:
            msg = "A plan has an attempt or a complete generation."
            raise InvariantError(msg)
        return found


def start_partition(
    store: Store,
    work: PartitionWork,
    *,
    fingerprint: Fingerprint,
    policy: PipelinePolicy,
    owner: str,
    now: datetime,
    token: str = "",
) -> PartitionPlan:
    """Return the finished output where it is up to date, or a new attempt that resumes what there is.

    Args:
        store: The partition's output folder.
        work: What to do with each row.
        fingerprint: What the output is made from.
        policy: The limits.
        owner: Who this is, for the message of an attempt that loses against it.
        now: Wall-clock time, with a time zone.
        token: Asks for everything to be computed again, once for each token.
    """
    complete = complete_generation(store, fingerprint, token=token)
    if complete:
        settle(store, complete, owner=owner, now=now)
        return PartitionPlan(attempt=None, complete=complete, notes=work.partition.notes)
    shards = plan_shards(
        work.partition.row_group_rows,
        seconds_per_row=_seconds_per_row(store),
        seconds_min=policy.shard_seconds_min,
        shards_max=policy.shards_max,
    )
    attempt = open_attempt(
        store, fingerprint, shards=shards, rows=work.partition.rows, owner=owner, now=now, token=token
    )
    carried = len(load_carried(attempt, work.part_format, attempt.generation.shards))
    return PartitionPlan(
        attempt=attempt,
        complete=None,
        rows_carried=carried,
        rows_recomputed=_rows_lost(attempt, carried),
        notes=(*work.partition.notes, *attempt.notes),
    )


def run_attempt(  # noqa: PLR0913 - keyword-only collaborators
    attempt: Attempt,
    work: PartitionWork,
    *,
    shards: Sequence[Shard],
    engine: Engine,
    sizer: BatchSizer,
    policy: PipelinePolicy,
    progress: Progress,
    should_stop: Callable[[], bool],
    now: Callable[[], datetime],
) -> tuple[bool, Carried]:
    """Compute and commit what is missing of some shards; return whether all is done, and what was carried."""
    carried = load_carried(attempt, work.part_format, shards)
    progress.rows_carried = len(carried)
    progress.rows_total = sum(shard.row_end - shard.row_start for shard in shards)
    indices = {shard.index for shard in shards}
    progress.rows_resumed = sum(commit.range.rows for commit in attempt.commits if commit.shard in indices)
    is_done = run_shards(
        shards,
        work=work,
        attempt=attempt,
        carried=carried,
        engine=engine,
        sizer=sizer,
        policy=policy,
        progress=progress,
        should_stop=should_stop,
        now=now,
    )
    return is_done, carried


def publish_partition(
    attempt: Attempt,
    work: PartitionWork,
    *,
    device_seconds: float,
    now: datetime,
    rows_quarantined_max: int | None = None,
) -> Generation:
    """Make the attempt's generation the partition's output; an input without rows still gets its columns.

    Raises:
        QuarantineLimitError: The steps that shared the partition set more rows apart than allowed.
    """
    failed = sum(commit.rows_quarantined for commit in attempt.commits)
    if rows_quarantined_max is not None and failed > rows_quarantined_max:
        msg = f"{failed} rows failed, above rows_quarantined_max={rows_quarantined_max}."
        raise QuarantineLimitError(msg, hint=f"see {QUARANTINE_FOLDER}; mend the input, or raise the limit.")
    if work.partition.rows == 0 and work.output_schema is not None and not attempt.commits:
        _commit_empty_part(attempt, work, now)
    return attempt.publish(now=now, summary={"device_seconds": device_seconds})


def partition_stats(
    plan: PartitionPlan, published: Generation | None, progress: Progress, carried: int
) -> PartitionStats:
    """Return what a run did for a partition, earlier runs' commits included."""
    generation = published or plan.generation
    earlier = plan.attempt.commits if plan.attempt else generation.commits
    commits = published.commits if published else earlier
    written = sum(c.rows_written for c in commits) + (0 if published else progress.rows_written)
    quarantined = sum(c.rows_quarantined for c in commits) + (0 if published else progress.rows_quarantined)
    cells_padded = progress.cells_padded
    return PartitionStats(
        rows=generation.rows,
        rows_written=written,
        rows_quarantined=quarantined,
        rows_resumed=sum(c.range.rows for c in earlier),
        rows_carried=carried,
        rows_recomputed=plan.rows_recomputed,
        batches=progress.batches,
        segments=progress.segments,
        device_seconds=progress.device_seconds,
        busy_fraction=progress.busy_fraction,
        rows_per_second=progress.rows_per_second,
        padding_share=1 - progress.cells / cells_padded if cells_padded else 0.0,
        memory_bytes_peak=progress.memory_bytes_peak,
        out_of_memory=progress.out_of_memory,
        is_complete=published is not None or plan.complete is not None,
        generation=generation.name,
        quarantine=QUARANTINE_FOLDER if quarantined else "",
        trace=tuple(progress.trace),
        notes=plan.notes,
        batching=progress.batching,
    )


def _commit_empty_part(attempt: Attempt, work: PartitionWork, now: datetime) -> None:
    # A folder without files knows no columns.
    known = work.partition.schema
    kept = [known.field(name) for name in work.columns_kept if name in known.names]
    schema = pa.schema([*kept, *(work.output_schema or ())])
    path = attempt.names.part(0, 0, work.part_format.suffix)
    written = work.part_format.open(attempt.staged(path), schema).close()
    part = PartFile(path=path, rows=0, size_bytes=written.size_bytes, sha256=written.sha256)
    digest = chained_digest(digest_after((), attempt.generation, 0, 0), (part,))
    attempt.commit(
        Commit(
            shard=0,
            row_start=0,
            row_end=0,
            part=part,
            quarantine=None,
            epoch=attempt.epoch,
            timestamp=now.isoformat(),
            digest=digest,
            writer=attempt.writer,
            rows_predicted=0,
            batches=0,
            device_seconds=0.0,
        )
    )


def _seconds_per_row(store: Store) -> float:
    current = current_generation(read_generations(store))
    seconds = sum(commit.device_seconds for commit in current.commits) if current else 0.0
    rows = sum(commit.range.rows for commit in current.commits) if current else 0
    return seconds / rows if rows and seconds else SECONDS_PER_ROW_UNKNOWN


def _rows_lost(attempt: Attempt, rows_carried: int) -> int:
    """Return how many rows went through a device in earlier attempts without being committed or carried."""
    computed, epochs = 0, set[int]()
    for path in attempt.store.list(attempt.names.progress):
        data = attempt.store.read(path)
        computed += COUNTER.unpack(data)[0] if len(data) == COUNTER.size else 0
        epochs.add(int(path.rsplit("/", 1)[1].split("-")[0]))
        attempt.store.delete(path)
    committed = sum(commit.rows_predicted for commit in attempt.commits if commit.epoch in epochs)
    return max(0, computed - committed - rows_carried)
