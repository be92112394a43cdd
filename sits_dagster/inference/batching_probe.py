"""Whether a partition's own first rows may share a batch: they are run together and alone."""

from __future__ import annotations

from sits_dagster.errors import DeviceOutOfMemoryError, ModelError
from sits_dagster.inference.batches import Batch, Packer
from sits_dagster.inference.encode import encode_chunk
from sits_dagster.inference.engine import Engine
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import FixedBatchSizer
from sits_dagster.models.batching import PROBE_ROWS, BatchingReport, probe_batching

__all__ = ["probe_partition"]

ROWS_READ_MAX = 64


def probe_partition(work: PartitionWork, engine: Engine, policy: PipelinePolicy) -> BatchingReport:
    """Return what the first rows of equal shape show; unprobed where there are not two such rows.

    Args:
        work: The partition, with its encode function.
        engine: A device with the model; it has made up to eight rows' calls afterwards.
        policy: The data plane's limits.
    """
    batch = _first_batch(work, engine, policy)
    if batch is None:
        return BatchingReport(evidence=("the partition has no two rows of equal shape to try",))
    axes = {spec.name: 0 if spec.is_batched else None for spec in engine.signature.inputs}
    rows = [
        {name: array if axes[name] is None else array[row : row + 1] for name, array in batch.arrays.items()}
        for row in range(len(batch.rows))
    ]
    try:
        return probe_batching(engine.predict, rows, axes)
    except (DeviceOutOfMemoryError, ModelError) as error:
        return BatchingReport(evidence=(f"the first rows could not be tried: {error}",))


def _first_batch(work: PartitionWork, engine: Engine, policy: PipelinePolicy) -> Batch | None:
    """Return the first batch of two or three rows of one padded shape."""
    rows = min(work.partition.rows, ROWS_READ_MAX)
    packer = Packer(
        signature=engine.signature,
        padding=work.padding,
        sizer=FixedBatchSizer(PROBE_ROWS),
        window_rows_max=ROWS_READ_MAX,
        window_bytes_max=policy.queue_bytes,
    )
    best: Batch | None = None
    for chunk in work.reader.read(0, rows, rows_max=policy.chunk_rows, bytes_max=policy.queue_bytes):
        encoded = encode_chunk(chunk, work.encode, engine.signature, columns_required=work.columns_required)
        for batch in packer.add(encoded):
            return batch
    for batch in packer.flush():
        if len(batch.rows) > 1 and (best is None or len(batch.rows) > len(best.rows)):
            best = batch
    return best
