"""The whole data plane on a fake device: what becomes of some rows, without Dagster, a model or a disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from sits_dagster.inference.checkpoint import CONTROL_FOLDER, SUCCESS_FILE
from sits_dagster.inference.decode import DecodeFunction, decode_columns
from sits_dagster.inference.encode import EncodeFunction, encode_columns
from sits_dagster.inference.engine import Arrays, Engine, ModelSignature
from sits_dagster.inference.generation import Fingerprint
from sits_dagster.inference.partition import partition_stats, publish_partition, run_attempt, start_partition
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import BatchSizer, FixedBatchSizer
from sits_dagster.inference.stats import PartitionStats, Progress
from sits_dagster.inference.store import PartFormat, Store
from sits_dagster.models.model import Padding
from sits_dagster.testing.engines import FakeEngine
from sits_dagster.testing.memory_rows import MemoryRows
from sits_dagster.testing.memory_store import MemoryFormat

__all__ = ["Trial", "visible_files"]

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = Fingerprint(input="input", model="model", configuration="configuration")


@dataclass(slots=True, kw_only=True)
class Trial:
    """Rows, a model's signature and a function in the model's place; run as often as a test wants.

    Args:
        source: The partition's rows.
        signature: The inputs and outputs of the model that is stood in for.
        function: Its inputs to its outputs, row by row.
        encode: Rows to inputs; columns of the inputs' names when left out.
        decode: Outputs to columns; columns of the outputs' names when left out.
        padding: Axes that may be padded.
        columns_required: A null in one of these is an error of its row.
        columns_kept: Input columns that go to the output as they are.
        output_schema: The decoded columns' schema, or `None` to take it from the first results.
        policy: The limits.
        fingerprint: What the output is made from.

    Example:
        >>> from sits_dagster.inference.engine import TensorSpec
        >>> x, y = (TensorSpec(name=name, dtype="float64", shape=(None,)) for name in "xy")
        >>> trial = Trial(
        ...     source=MemoryRows(pa.RecordBatch.from_pydict({"x": [1.0, 2.0]})),
        ...     signature=ModelSignature(inputs=(x,), outputs=(y,)),
        ...     function=lambda inputs: {"y": inputs["x"] * 10},
        ... )
        >>> from sits_dagster.testing import MemoryStore
        >>> store = MemoryStore()
        >>> trial.run(store).rows_written, Trial.output(store)
        (2, [{'y': 10.0}, {'y': 20.0}])
    """

    source: MemoryRows
    signature: ModelSignature
    function: Callable[[Arrays], Arrays]
    encode: EncodeFunction | None = None
    decode: DecodeFunction | None = None
    padding: tuple[Padding, ...] = ()
    columns_required: tuple[str, ...] = ()
    columns_kept: tuple[str, ...] = ()
    output_schema: pa.Schema | None = None
    policy: PipelinePolicy = field(default_factory=PipelinePolicy)
    fingerprint: Fingerprint = FINGERPRINT

    def engine(self) -> FakeEngine:
        """Return a new engine that computes the function, without limits."""
        return FakeEngine(self.signature, self.function)

    def work(self, part_format: PartFormat) -> PartitionWork:
        """Return what to do with each row."""
        return PartitionWork(
            partition=self.source.partition,
            reader=self.source,
            encode=self.encode or encode_columns(self.signature),
            decode=self.decode or decode_columns(self.signature),
            padding=self.padding,
            columns_required=self.columns_required,
            columns_kept=self.columns_kept,
            output_schema=self.output_schema,
            part_format=part_format,
        )

    def run(
        self,
        store: Store,
        *,
        engine: Engine | None = None,
        part_format: PartFormat | None = None,
        sizer: BatchSizer | None = None,
        owner: str = "trial",
        request: str = "",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> PartitionStats:
        """Start or resume the partition in the store, and publish its output unless it was stopped.

        Args:
            store: The partition's output folder.
            engine: The device; one without limits when left out.
            part_format: The output's files; a `MemoryFormat` in the store when left out.
            sizer: Rows of a batch; the policy's fixed number when left out.
            owner: Who this is, for the message of an attempt that loses against it.
            request: Asks for everything to be computed again, once for each text.
            should_stop: Asked before each batch.
        """
        work = self.work(part_format or MemoryFormat(store))
        plan = start_partition(
            store,
            work,
            fingerprint=self.fingerprint,
            policy=self.policy,
            owner=owner,
            now=NOW,
            token=request,
        )
        progress = Progress()
        if plan.attempt is None:
            return partition_stats(plan, None, progress, 0)
        is_done, carried = run_attempt(
            plan.attempt,
            work,
            shards=plan.attempt.generation.shards,
            engine=engine or self.engine(),
            sizer=sizer or FixedBatchSizer(self.policy.batch_rows),
            policy=self.policy,
            progress=progress,
            should_stop=should_stop,
            now=lambda: NOW,
        )
        published = (
            publish_partition(plan.attempt, work, device_seconds=progress.device_seconds, now=NOW)
            if is_done
            else None
        )
        return partition_stats(plan, published, progress, len(carried))

    @staticmethod
    def output(store: Store, part_format: PartFormat | None = None) -> list[dict[str, Any]]:
        """Return the output's rows as a plain reader sees them: all parts, in name order."""
        return _read(store, part_format, "part-")

    @staticmethod
    def quarantine(store: Store, part_format: PartFormat | None = None) -> list[dict[str, Any]]:
        """Return the quarantined rows."""
        return _read(store, part_format, "_quarantine/")


def visible_files(store: Store) -> list[str]:
    """Return the paths of everything in the folder but the package's own records, sorted."""
    return sorted(
        path for path in store.list("") if not path.startswith(f"{CONTROL_FOLDER}/") and path != SUCCESS_FILE
    )


def _read(store: Store, part_format: PartFormat | None, prefix: str) -> list[dict[str, Any]]:
    files = part_format or MemoryFormat(store)
    paths = [path for path in visible_files(store) if path.startswith(prefix)]
    return [row for path in paths if path.endswith(files.suffix) for row in files.read(path).to_pylist()]
