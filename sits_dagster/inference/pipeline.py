"""The data plane's loop: read, encode, pack, predict, decode and write overlap; the device never waits.

    reader ─▶ encode (threads) ─▶ packer ─▶ device (the calling thread) ─▶ decode (threads) ─▶ writer

Every arrow is a queue with a byte limit. A stage that fails closes them all, and its error is raised.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from sits_dagster.errors import StallError
from sits_dagster.inference.attempt import Attempt
from sits_dagster.inference.batches import Batch, Packer
from sits_dagster.inference.carried import Carried
from sits_dagster.inference.dataset import Chunk, PartitionInput, RowReader
from sits_dagster.inference.decode import DecodedBatch, DecodeFunction, decode_batch
from sits_dagster.inference.device_loop import CommitBarrier, Predicted, account, predict_batches
from sits_dagster.inference.encode import EncodedChunk, EncodeFunction, encode_chunk
from sits_dagster.inference.engine import Engine
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.queues import ITEMS_MAX, ByteQueue, Heartbeat, QueueClosed, QueueEnded
from sits_dagster.inference.shards import RowRange, Shard
from sits_dagster.inference.sizing import BatchSizer
from sits_dagster.inference.stats import Progress
from sits_dagster.inference.store import PartFormat
from sits_dagster.inference.workers import WorkerPool
from sits_dagster.inference.writer import Arrival, Message, SegmentBegin, SegmentEnd, SegmentWriter
from sits_dagster.models.model import Padding

__all__ = ["PartitionWork", "run_shards"]

JOIN_SECONDS = 5.0
WRITE_THREAD = "sits-write"
# A stage that holds the interpreter makes the device thread wait a whole switch interval for its turn.
SWITCH_SECONDS = 0.0005

T = TypeVar("T")
_Chunk: TypeAlias = tuple[EncodedChunk, DecodedBatch | None]
_Encoded: TypeAlias = "Future[_Chunk] | tuple[Shard, RowRange]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionWork:
    """What to do with each row of a partition.

    Args:
        partition: The rows.
        reader: Reads them.
        encode: Rows to model inputs.
        decode: Model outputs to columns.
        padding: Axes that may be padded.
        columns_required: A null in one of these is an error of its row.
        columns_kept: Input columns that go to the output as they are.
        output_schema: The decoded columns' schema, or `None` to take it from the first results.
        part_format: The output's file format.
    """

    partition: PartitionInput
    reader: RowReader
    encode: EncodeFunction
    decode: DecodeFunction
    padding: tuple[Padding, ...]
    columns_required: tuple[str, ...]
    columns_kept: tuple[str, ...]
    output_schema: pa.Schema | None
    part_format: PartFormat


def run_shards(  # noqa: PLR0913 - keyword-only collaborators
    shards: Sequence[Shard],
    *,
    work: PartitionWork,
    attempt: Attempt,
    carried: Carried,
    engine: Engine,
    sizer: BatchSizer,
    policy: PipelinePolicy,
    progress: Progress,
    should_stop: Callable[[], bool],
    now: Callable[[], datetime],
) -> bool:
    """Put every row of the shards that is not committed through the device and commit it.

    Args:
        shards: Disjoint, ascending.
        work: What to do with each row.
        attempt: The right to commit.
        carried: Results that are known already.
        engine: Called in the calling thread only.
        sizer: Says how many rows a batch has.
        policy: The limits.
        progress: Counters to keep.
        should_stop: Asked between batches; after `True` what is computed is committed and kept.
        now: Wall-clock time.

    Returns:
        Whether all rows are committed; `False` after a stop.

    Raises:
        SitsError: The first error of a stage; what was committed stays.
    """
    ranges = [(shard, row_range) for shard in shards for row_range in attempt.remaining(shard)]
    if not ranges:
        return True
    writer = SegmentWriter(
        attempt=attempt,
        partition=work.partition,
        part_format=work.part_format,
        schema=work.output_schema,
        flush_bytes=policy.flush_bytes,
        rows_quarantined_max=policy.rows_quarantined_max,
        progress=progress,
        now=now,
    )
    packer = Packer(
        signature=engine.signature,
        padding=work.padding,
        sizer=sizer,
        window_rows_max=policy.window_rows,
        window_bytes_max=policy.queue_bytes,
    )
    stages = _Stages(policy, engine)
    counter = attempt.store.counter(f"{attempt.names.progress}/{attempt.epoch:08d}-{shards[0].index:05d}")
    counter.set(len(carried))
    pool = WorkerPool[_Chunk]("sits-encode", workers=policy.encode_workers)
    stages.start("read", lambda: _read(ranges, work, engine, carried, policy, pool, stages))
    stages.start("pack", lambda: _pack(packer, writer, policy, work.columns_kept, stages))
    decoders = [
        stages.start(
            "decode",
            lambda: _decode(work.decode, lambda item: account(item, sizer, progress), stages),
        )
        for _ in range(policy.decode_workers)
    ]
    stages.start("write", lambda: _write(writer, stages))
    is_done = False
    try:
        with _quick_switches(), suppress(QueueClosed):
            is_done = predict_batches(
                stages.batches,
                stages.predicted,
                engine=engine,
                sizer=sizer,
                progress=progress,
                should_stop=should_stop,
                on_rows=lambda rows: counter.set(len(carried) + rows),
            )
    except BaseException as error:
        stages.fail(error)
        raise
    finally:
        stages.encoded.close()
        pool.close()
        counter.close()
        stages.finish(decoders, writer)
    return is_done


class _Stages:
    """The queues, the threads between them, and the first error."""

    def __init__(self, policy: PipelinePolicy, engine: Engine) -> None:
        def queue(name: str, items_max: int = ITEMS_MAX) -> ByteQueue[Any]:
            return ByteQueue(
                name,
                bytes_max=policy.queue_bytes,
                wait_seconds_max=policy.stall_seconds_max,
                items_max=items_max,
                heartbeat=heartbeat,
            )

        heartbeat = Heartbeat()
        self.encoded: ByteQueue[_Encoded] = queue("encoded rows", policy.encode_workers + 2)
        self.batches: ByteQueue[Batch | CommitBarrier] = queue("batches", policy.batches_ahead)
        self.predicted: ByteQueue[Predicted] = queue("predictions")
        self.results: ByteQueue[Message] = queue("results")
        self._engine = engine
        self._wait_seconds_max = policy.stall_seconds_max
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.accounting = threading.Lock()

    def start(self, name: str, stage: Callable[[], None]) -> threading.Thread:
        """Run a stage in a thread; its error ends the pipeline, a closed queue ends it quietly."""

        def run() -> None:
            try:
                stage()
            except QueueClosed:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                self.fail(error)

        thread = threading.Thread(target=run, name=f"sits-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def fail(self, error: BaseException) -> None:
        """Keep the first error and end every stage, a device call that is running included."""
        with self._lock:
            self._error = self._error or error
        for queue in (self.encoded, self.batches, self.predicted, self.results):
            queue.close()
        self._engine.interrupt()

    def finish(self, decoders: Sequence[threading.Thread], writer: SegmentWriter) -> None:
        """Let the stages behind the device finish, end those before it, and raise the first error."""
        self.encoded.close()
        self.batches.close()
        self.predicted.end()
        for thread in decoders:
            self._join(thread, self._wait_seconds_max)
        self.results.end()
        is_written = all(
            self._join(t, self._wait_seconds_max) for t in self._threads if t.name == WRITE_THREAD
        )
        for thread in self._threads:
            # Nobody needs what they are at; one that hangs is left behind, since threads cannot be killed.
            thread.join(min(JOIN_SECONDS, self._wait_seconds_max))
        if self._error:
            if is_written:
                writer.abort()
            raise self._error

    def _join(self, thread: threading.Thread, seconds_max: float) -> bool:
        thread.join(seconds_max)
        if not thread.is_alive():
            return True
        msg = f"The stage {thread.name} did not end within {seconds_max:g} s."
        self.fail(StallError(msg, hint="look for a hanging decode or storage call."))
        return False


def _read(
    ranges: Sequence[tuple[Shard, RowRange]],
    work: PartitionWork,
    engine: Engine,
    carried: Carried,
    policy: PipelinePolicy,
    pool: WorkerPool[_Chunk],
    stages: _Stages,
) -> None:
    """Read chunks and hand each to an encoding thread; the futures keep the order."""

    def encode(chunk: Chunk) -> _Chunk:
        is_done, known = carried.of(chunk)
        return (
            encode_chunk(
                chunk, work.encode, engine.signature, columns_required=work.columns_required, is_done=is_done
            ),
            known,
        )

    chunk_rows = min(policy.chunk_rows, policy.segment_rows)
    for shard, row_range in ranges:
        stages.encoded.put((shard, row_range), 0)
        chunks = work.reader.read(
            row_range.row_start, row_range.row_end, rows_max=chunk_rows, bytes_max=policy.chunk_bytes
        )
        for chunk in chunks:
            stages.encoded.put(pool.submit(partial(encode, chunk)), chunk.rows.nbytes)
    stages.encoded.end()


def _pack(
    packer: Packer,
    writer: SegmentWriter,
    policy: PipelinePolicy,
    columns_kept: Sequence[str],
    stages: _Stages,
) -> None:
    """Form batches in reading order and decide where segments end: batches never cross that border."""

    def send(batches: Iterator[Batch]) -> None:
        for batch in batches:
            stages.batches.put(batch, batch.bytes)

    shard, row_range = None, None
    began, row_start, row_end = 0.0, 0, 0

    def begin(row: int) -> None:
        nonlocal began, row_start
        began, row_start = time.monotonic(), row
        stages.results.put(SegmentBegin(shard=shard.index if shard else 0, row_start=row), 0)

    for item in _items(stages.encoded):
        if isinstance(item, tuple):
            shard, row_range = item
            begin(row_range.row_start)
            continue
        encoded, known = _result(item, policy.stall_seconds_max)
        kept = encoded.chunk.rows.select(list(columns_kept))
        row_end = encoded.chunk.row_end
        stages.results.put(
            Arrival(row_start=encoded.chunk.row_start, kept=kept, errors=encoded.errors, carried=known),
            kept.nbytes,
        )
        send(packer.add(encoded))
        if writer.bytes_waiting > policy.pending_bytes:
            send(packer.relieve())
        is_last = row_range is not None and row_end == row_range.row_end
        is_long = (
            time.monotonic() - began >= policy.segment_seconds
            or row_end - row_start > policy.segment_rows - policy.chunk_rows
        )
        if is_last or is_long:
            send(packer.flush())
            committed = threading.Event()
            stages.results.put(SegmentEnd(row_end=row_end, committed=committed), 0)
            stages.batches.put(CommitBarrier(committed, policy.stall_seconds_max), 0)
            if not is_last:
                begin(row_end)
    stages.batches.end()


def _decode(decode: DecodeFunction, account_for: Callable[[Predicted], None], stages: _Stages) -> None:
    for predicted in _items(stages.predicted):
        with stages.accounting:
            account_for(predicted)
        if predicted.errors:
            failed = DecodedBatch(rows=predicted.rows[:0], columns=None, errors=predicted.errors)
            stages.results.put(failed, 0)
        if len(predicted.rows):
            for result in decode_batch(predicted.rows, predicted.outputs, decode):
                stages.results.put(result, result.bytes)


def _write(writer: SegmentWriter, stages: _Stages) -> None:
    for message in _items(stages.results):
        writer.take(message)
    writer.finish()


def _items(queue: ByteQueue[T]) -> Iterator[T]:
    while True:
        try:
            item = queue.get()
        except QueueEnded:
            return
        if item is not None:
            yield item


def _result(future: Future[_Chunk], seconds_max: float) -> _Chunk:
    try:
        return future.result(seconds_max)
    except CancelledError as error:
        raise QueueClosed(str(error)) from error
    except TimeoutError as error:
        msg = f"encode took longer than {seconds_max:g} s for one chunk."
        raise StallError(msg, hint="make chunk_rows smaller or raise stall_seconds_max.") from error


@contextmanager
def _quick_switches() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
