"""Whether a partition's own first rows may share a batch: they are run together and alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np

from sits_dagster.errors import DeviceOutOfMemoryError, ModelError, TransientError
from sits_dagster.inference.batches import Batch
from sits_dagster.inference.engine import Arrays, Engine
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import Bucket
from sits_dagster.inference.trials import first_batches, watched
from sits_dagster.models.batching import PROBE_ROWS, Batching, BatchingReport, probe_batching

__all__ = ["probe_partition"]

TRIES_MAX = 4
NOTHING = BatchingReport(evidence=("the partition has no two unlike rows of equal shape to try",))
STOPPED = BatchingReport(evidence=("the run was stopped before rows were tried",))


def probe_partition(
    work: PartitionWork,
    engine: Engine,
    policy: PipelinePolicy,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchingReport:
    """Return what the first rows of equal shape show; unprobed where no two of them differ.

    The least and the largest of a chunk are taken: what scales over a whole batch shows in these. Where
    the partition tells nothing about the verdict it may still tell the outputs' axes.

    Args:
        work: The partition, with its encode function.
        engine: A device with the model, whose outputs are the model's own.
        policy: The data plane's limits; encoding and calling end with its `stall_seconds_max`.
        should_stop: Asked all the time; after `True` the engine is interrupted, for good.

    Raises:
        StallError: It took too long.
        TransientError: The device failed, or a function asks for another try.
        ConfigError: The padding does not fit the model.
    """
    report = watched(partial(_probe, work, engine, policy), engine, policy, should_stop)
    return STOPPED if report is None else report


def _probe(work: PartitionWork, engine: Engine, policy: PipelinePolicy) -> BatchingReport:
    axes = {spec.name: 0 if spec.is_batched else None for spec in engine.signature.inputs}
    report = NOTHING
    for rows in islice(_candidates(work, engine, policy), TRIES_MAX):
        calls = _Calls(engine)
        try:
            report = probe_batching(calls, rows, axes)
        except (DeviceOutOfMemoryError, ModelError) as error:
            # These rows may be at fault, which says nothing of the others.
            report = BatchingReport(evidence=(f"the first rows could not be tried: {error}",))
            continue
        return _judge(report, calls, rows)
    return report


@dataclass(slots=True)
class _Calls:
    """An engine's calls, with the outputs of each and the failure that tells nothing about the model."""

    engine: Engine
    outputs: list[Arrays] = field(default_factory=list[Arrays])
    failure: DeviceOutOfMemoryError | TransientError | None = None

    def __call__(self, inputs: Arrays) -> Arrays:
        try:
            found = self.engine.predict(inputs)
        except (DeviceOutOfMemoryError, TransientError) as error:
            self.failure = error
            raise
        self.outputs.append(found)
        return found


def _judge(report: BatchingReport, calls: _Calls, rows: Sequence[Arrays]) -> BatchingReport:
    """Return the report as far as it holds, with axes along which one row is one entry, or `None`."""
    if isinstance(calls.failure, TransientError):
        raise calls.failure
    alone = calls.outputs[: len(rows)]
    if len(calls.outputs) < 2 * len(rows) - 1:  # a batch failed
        report = replace(report, output_axes={name: _axis_alone(name, alone) for name in alone[0]})
    if calls.failure is not None:
        evidence = (f"a batch of {len(rows)} rows does not fit into the device's memory",)
        return replace(report, verdict=Batching.UNPROBED, evidence=evidence)
    lumps = {
        name: alone[0][name].shape[axis]
        for name, axis in report.output_axes.items()
        if axis is not None and alone[0][name].shape[axis] != 1
    }
    if lumps:
        evidence = tuple(f"output {name!r} has {count} entries for a row" for name, count in lumps.items())
        axes = {**report.output_axes, **dict.fromkeys(lumps)}
        return replace(report, verdict=Batching.NOT_BATCHABLE, evidence=evidence, output_axes=axes)
    if report.verdict is Batching.INVARIANT and all(row is rows[0] for row in rows):
        return replace(report, verdict=Batching.UNPROBED, evidence=NOTHING.evidence)
    return report


def _axis_alone(name: str, alone: Sequence[Arrays]) -> int | None:
    """Return an output's axis as rows alone suggest it: the first if it is one long, else the row is all."""
    return 0 if all(outputs[name].ndim and len(outputs[name]) == 1 for outputs in alone) else None


def _candidates(work: PartitionWork, engine: Engine, policy: PipelinePolicy) -> Iterator[Sequence[Arrays]]:
    """Yield unlike rows of one padded shape, reading on only if asked to; at the end too few, repeated."""
    count = min(PROBE_ROWS, engine.signature.batch_rows_fixed or PROBE_ROWS)
    found: dict[Bucket, dict[object, Arrays]] = {}
    size_bytes = 0
    for batch in first_batches(work, engine, policy):
        waiting = found.setdefault(batch.bucket, {})
        for row in _rows(batch):
            waiting.setdefault(_contents(row), row)
        if len(waiting) >= count:
            yield _picked(waiting, count)
        size_bytes += batch.bytes
        if size_bytes >= policy.queue_bytes:
            break
    for waiting in sorted(found.values(), key=len, reverse=True):
        while waiting:
            yield _picked(waiting, count)


def _picked(waiting: dict[object, Arrays], count: int) -> Sequence[Arrays]:
    """Take so many rows, the least and the largest among them; few rows are repeated."""
    keys = sorted(waiting, key=lambda key: _magnitude(waiting[key]))
    picked = [keys[round(index * (len(keys) - 1) / (count - 1))] for index in range(count)]
    rows = [waiting[key] for key in picked]
    for key in set(picked):
        del waiting[key]
    return rows


def _rows(batch: Batch) -> Iterator[Arrays]:
    for row in range(len(batch.rows)):
        yield {
            name: array[row : row + 1] if name in batch.batched else array
            for name, array in batch.arrays.items()
        }


def _contents(row: Arrays) -> object:
    """Return a key of what is in a row: copies would agree in any batch."""
    return tuple(tuple(a.ravel()) if a.dtype == object else a.tobytes() for a in row.values())


def _magnitude(row: Arrays) -> list[float]:
    """Return the largest value of a row in each input of numbers."""
    return [
        float(np.nanmax(np.abs(array), initial=0.0)) for array in row.values() if array.dtype.kind in "fiu"
    ]
