"""The last stage: results in input order into part files, a commit for each segment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import pyarrow as pa

from sits_dagster.errors import ConfigError, InvariantError, QuarantineLimitError
from sits_dagster.inference.attempt import Attempt
from sits_dagster.inference.carried import save_carried
from sits_dagster.inference.checkpoint import Commit, chained_digest
from sits_dagster.inference.dataset import PartitionInput
from sits_dagster.inference.decode import DecodedBatch
from sits_dagster.inference.encode import RowError, Stage
from sits_dagster.inference.generation import digest_after
from sits_dagster.inference.segments import Flushed, OpenSegment, OutputSchema
from sits_dagster.inference.sink import QUARANTINE_COLUMNS
from sits_dagster.inference.stats import Progress
from sits_dagster.inference.store import PartFile, PartFormat, PartWriter

__all__ = ["Arrival", "Message", "SegmentBegin", "SegmentEnd", "SegmentWriter"]

ERRORS_SHOWN_MAX = 5
ROW_ERROR_FIELDS = QUARANTINE_COLUMNS[2:]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBegin:
    """Rows from here belong to a new segment."""

    shard: int
    row_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Rows that were read: what is kept of them, which failed, and results that were known before."""

    row_start: int
    kept: pa.RecordBatch
    errors: tuple[RowError, ...]
    carried: DecodedBatch | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnd:
    """The newest segment ends before this row; `committed` is set once it is."""

    row_end: int
    committed: threading.Event


Message: TypeAlias = SegmentBegin | Arrival | SegmentEnd | DecodedBatch


class SegmentWriter:
    """Takes in messages in any order of results and commits segment after segment.

    Args:
        attempt: The right to commit.
        partition: Where rows come from, for the quarantine.
        part_format: The file format.
        schema: The decoded columns' schema, or `None` to take it from the first results.
        flush_bytes: Finished rows are written once this many bytes wait.
        rows_quarantined_max: More than this many failed rows end the run.
        progress: Counters to keep.
        now: Wall-clock time.
    """

    def __init__(
        self,
        *,
        attempt: Attempt,
        partition: PartitionInput,
        part_format: PartFormat,
        schema: pa.Schema | None,
        flush_bytes: int,
        rows_quarantined_max: int,
        progress: Progress,
        now: Callable[[], datetime],
    ) -> None:
        self.commits = list(attempt.commits)
        self.bytes_waiting = 0
        self._attempt = attempt
        self._partition = partition
        self._format = part_format
        self._schema = OutputSchema(schema)
        self._flush_bytes = flush_bytes
        self._rows_quarantined_max = rows_quarantined_max
        self._progress = progress
        self._now = now
        self._open: list[OpenSegment] = []
        self._committed: list[threading.Event] = []
        self._part: PartWriter | None = None
        self._failed: list[pa.RecordBatch] = []
        self._rows_quarantined = sum(commit.rows_quarantined for commit in attempt.commits)
        self._batches_committed = 0
        self._seconds_committed = 0.0

    def take(self, message: Message) -> None:
        """Take in one message; write and commit what it completes.

        Raises:
            QuarantineLimitError: Too many rows failed.
            CommitConflictError: Another attempt has taken over.
            StorageError: The output cannot be written.
        """
        match message:
            case SegmentBegin():
                segment = OpenSegment(shard=message.shard, row_start=message.row_start, schema=self._schema)
                self._open.append(segment)
            case Arrival():
                self._open[-1].arrive(message.row_start, message.kept, message.errors)
                self._count_errors(message.errors)
                if message.carried:
                    self._open[-1].add(message.carried)
            case SegmentEnd():
                self._open[-1].row_end = message.row_end
                self._committed.append(message.committed)
            case DecodedBatch():
                self._segment_of(message).add(message)
                self._count_errors(message.errors)
        self._advance()

    def finish(self) -> None:
        """Commit the finished rows of what is still open, and keep what was computed beyond them."""
        ahead = [item for segment in self._open for item in segment.ahead()]
        if self._open:
            head = self._open[0]
            head.cut()
            if head.row_end != head.row_start:
                self._commit(head)
        self._progress.rows_kept = save_carried(self._attempt, self._format, ahead)

    def abort(self) -> None:
        """Remove the file that is being written."""
        if self._part:
            self._part.abort()
            self._part = None

    def _segment_of(self, decoded: DecodedBatch) -> OpenSegment:
        row = int(decoded.rows[0]) if len(decoded.rows) else decoded.errors[0].row
        for segment in reversed(self._open):
            if segment.row_start <= row:
                return segment
        msg = f"Row {row} has a result, but its segment is committed."
        raise InvariantError(msg)

    def _advance(self) -> None:
        while self._open and self._open[0].is_complete:
            self._commit(self._open.pop(0))
            self._committed.pop(0).set()
        if self._open and self._open[0].bytes_waiting >= self._flush_bytes:
            self._flush(self._open[0])
        self.bytes_waiting = sum(segment.bytes_waiting for segment in self._open)

    def _flush(self, segment: OpenSegment) -> None:
        flushed = segment.flush()
        if flushed is None:
            return
        if flushed.kept_failed.num_rows:
            self._failed.append(flushed.kept_failed)
        if flushed.decoded is not None:
            rows = _merge(flushed)
            if self._part is None:
                path = self._attempt.names.part(segment.shard, segment.row_start, self._format.suffix)
                self._part = self._format.open(self._attempt.staged(path), rows.schema)
            self._part.write(rows)

    def _commit(self, segment: OpenSegment) -> None:
        self._flush(segment)
        part = self._finish_part(self._part)
        self._part = None
        quarantine = self._write_quarantine(segment)
        before = digest_after(self.commits, self._attempt.generation, segment.shard, segment.row_start)
        commit = Commit(
            shard=segment.shard,
            row_start=segment.row_start,
            row_end=segment.row_done,
            part=part,
            quarantine=quarantine,
            epoch=self._attempt.epoch,
            writer=self._attempt.writer,
            timestamp=self._now().isoformat(),
            digest=chained_digest(before, (part, quarantine)),
            rows_predicted=(part.rows if part else 0) + sum(e.stage is Stage.DECODE for e in segment.errors),
            batches=self._progress.batches - self._batches_committed,
            device_seconds=round(self._progress.device_seconds - self._seconds_committed, 6),
        )
        self.commits.append(self._attempt.commit(commit))
        self._batches_committed = self._progress.batches
        self._seconds_committed = self._progress.device_seconds
        self._progress.segments += 1
        self._progress.rows_done += commit.range.rows
        self._progress.rows_written += commit.rows_written
        self._progress.rows_quarantined += commit.rows_quarantined

    def _finish_part(self, writer: PartWriter | None) -> PartFile | None:
        if writer is None:
            return None
        file = writer.close()
        visible = file.path.removeprefix(self._attempt.staged(""))
        return PartFile(path=visible, rows=file.rows, size_bytes=file.size_bytes, sha256=file.sha256)

    def _write_quarantine(self, segment: OpenSegment) -> PartFile | None:
        if not segment.errors:
            return None
        errors = sorted(segment.errors, key=lambda error: error.row)
        files, rows = self._partition.locate([error.row for error in errors])
        facts = (
            pa.array(files, pa.string()),
            pa.array(rows, pa.int64()),
            *(pa.array([getattr(error, name) for error in errors], pa.string()) for name in ROW_ERROR_FIELDS),
        )
        kept = pa.concat_batches(self._failed)
        self._failed = []
        batch = pa.RecordBatch.from_arrays([*kept.columns, *facts], [*kept.schema.names, *QUARANTINE_COLUMNS])
        path = self._attempt.names.quarantine(segment.shard, segment.row_start, self._format.suffix)
        writer = self._format.open(self._attempt.staged(path), batch.schema)
        writer.write(batch)
        return self._finish_part(writer)

    def _count_errors(self, errors: Sequence[RowError]) -> None:
        self._rows_quarantined += len(errors)
        if errors and self._rows_quarantined > self._rows_quarantined_max:
            segment_errors = [error for segment in self._open for error in segment.errors][:ERRORS_SHOWN_MAX]
            files, rows = self._partition.locate([error.row for error in segment_errors])
            shown = "; ".join(
                f"{file} row {row}: {error.stage} {error.error}: {error.message}"
                for file, row, error in zip(files, rows, segment_errors, strict=True)
            )
            limit = self._rows_quarantined_max
            msg = f"{self._rows_quarantined} rows failed, above rows_quarantined_max={limit}. First: {shown}"
            raise QuarantineLimitError(msg, hint="mend the input, or raise the limit.")


def _merge(flushed: Flushed) -> pa.RecordBatch:
    decoded = flushed.decoded
    if decoded is None:
        return flushed.kept
    both = set(flushed.kept.schema.names) & set(decoded.schema.names)
    if both:
        msg = f"Columns {sorted(both)} are both kept from the input and decoded."
        raise ConfigError(msg, hint="rename them in decode, or do not keep them.")
    arrays = [*flushed.kept.columns, *decoded.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*flushed.kept.schema, *decoded.schema]))
