"""An inference job inside a Dagster step: partitions by name, the leased engine, results as metadata."""

import os
import platform
import resource
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg

from sits_dagster.adapters.onnx_engine import OnnxEngine
from sits_dagster.adapters.onnx_trace import runtime_key
from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.assets.job import InferenceJob, OpenPartition, PartitionName, current_digest, now_utc
from sits_dagster.assets.reporting import reports_progress
from sits_dagster.assets.stop import StopSignal
from sits_dagster.devices.device import DeviceKind
from sits_dagster.errors import TransientError
from sits_dagster.inference.adaptive import AdaptiveBatchSizer
from sits_dagster.inference.attempt import Attempt
from sits_dagster.inference.batching_probe import probe_partition
from sits_dagster.inference.checkpoint import QUARANTINE_FOLDER
from sits_dagster.inference.partition import run_attempt
from sits_dagster.inference.shards import Shard
from sits_dagster.inference.sizing import BatchOptimum, BatchSizer, FixedBatchSizer
from sits_dagster.inference.stats import PartitionStats, Progress
from sits_dagster.inference.trials import measure_batches
from sits_dagster.metadata import partition_metadata
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.resources.gpu_pool import GpuPoolResource
from sits_dagster.resources.inference import InferenceResource
from sits_dagster.resources.storage import StorageResource

__all__ = ["InferenceConfig", "StepRuntime", "partition_names", "retries_transient"]

KIBIBYTE = 1024


class InferenceConfig(dg.Config):
    """What a run may be asked for in Dagster's launchpad."""

    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRuntime:
    """A job with what Dagster gave its step."""

    job: InferenceJob
    asset_key: dg.AssetKey
    context: dg.OpExecutionContext
    gpu_pool: GpuPoolResource
    inference: InferenceResource
    storage: StorageResource

    @property
    def owner(self) -> str:
        """Who this is, for messages to rivals."""
        return f"run {self.context.run_id} on {platform.node()}, process {os.getpid()}"

    def open(self, name: PartitionName, config: InferenceConfig) -> OpenPartition:
        """Look at a partition and say in the log what was found."""
        run = self.context.run
        opened = self.job.open(
            name,
            resolve=self.storage.resolve,
            policy=self.inference.policy(),
            owner=self.owner,
            token=(run.root_run_id or run.run_id) if config.recompute else "",
        )
        self._say(opened)
        return opened

    @property
    def batch_rows(self) -> int | None:
        """Rows of a batch: the asset's own number, or the deployment's; `None` where none is given."""
        return self.job.batch_rows or self.inference.batch_rows

    @contextmanager
    def engine(self, stop: StopSignal) -> Generator[OnnxEngine]:
        """Lease a device and load the model on it; both are given back at the end."""
        with self.gpu_pool.lease(owner=self.owner, should_stop=stop, on_wait=self.context.log.info) as device:
            self.context.log.info(f"Device {device.uuid} ({device.name}) is leased.")
            path = self.storage.resolve(self.job.model.path)
            digest = current_digest(path)
            is_cpu = device.kind is DeviceKind.CPU
            # A profile left it: it loads faster, and plans its memory as the profile says.
            optimized = ProfileCache().optimized(digest, runtime_key()) if is_cpu else None
            engine = OnnxEngine(path, device, threads=self.gpu_pool.threads, optimized=optimized)
            engine.digest = digest
            fixed = engine.signature.batch_rows_fixed
            if fixed is not None and self.batch_rows not in {None, fixed}:
                self.context.log.warning(
                    f"Model {self.job.model.name!r} takes batches of {fixed} only; "
                    f"batch_rows={self.batch_rows} is not used."
                )
            try:
                yield engine
            finally:
                engine.close()

    def compute(
        self,
        opened: OpenPartition,
        attempt: Attempt,
        *,
        shards: Sequence[Shard],
        engine: OnnxEngine,
        stop: StopSignal,
        progress: Progress,
    ) -> tuple[bool, int]:
        """Compute and commit shards; return whether they are done, and the rows that were carried over."""
        if engine.digest != opened.fingerprint.model:
            msg = f"Model {self.job.model.name!r} was replaced while the run was going on."
            raise TransientError(
                msg, retry_after_seconds=1.0, hint="the step is tried again with the new one."
            )
        sizer = self._sizer(opened, engine, stop, progress)
        with reports_progress(
            self.context,
            progress,
            asset_key=self.asset_key,
            partition=opened.name.key,
            seconds=self.inference.progress_seconds,
        ):
            is_done, carried = run_attempt(
                attempt,
                self.job.with_signature(opened, engine.signature),
                shards=shards,
                engine=engine,
                sizer=sizer,
                policy=self.inference.policy(),
                progress=progress,
                should_stop=stop,
                now=now_utc,
            )
        if not is_done:
            self.context.log.info(
                f"Stopped, since {stop.reason}: {progress.rows_done} rows were committed in this run, "
                f"and {progress.rows_kept} more are kept for the next one."
            )
        return is_done, len(carried)

    def _sizer(
        self, opened: OpenPartition, engine: OnnxEngine, stop: StopSignal, progress: Progress
    ) -> BatchSizer:
        """Return what sizes the batches: one row where rows must not share any, else as given or measured."""
        fixed = engine.signature.batch_rows_fixed
        if fixed == 1:
            return FixedBatchSizer(1)
        batching = self._batching(opened, engine, stop)
        if not self._may_share(batching, progress):
            return FixedBatchSizer(1)
        given = fixed or self.batch_rows
        if given is not None:
            return FixedBatchSizer(given)
        return self._measured_sizer(opened, engine, stop)

    def _may_share(self, batching: BatchingReport, progress: Progress) -> bool:
        """Return whether rows may share a batch, as declared or as tried."""
        declared = self.job.model.is_batchable
        if declared is not None:
            verdict = Batching.INVARIANT if declared else Batching.NOT_BATCHABLE
            progress.batching = f"{verdict.value}, as declared"
            return declared
        progress.batching = batching.verdict.value
        if batching.verdict is not Batching.NOT_BATCHABLE:
            return True
        if self.batch_rows != 1:
            self.context.log.warning(
                f"Model {self.job.model.name!r} gets batches of one row: {batching.evidence[0]}. "
                "OnnxModel(is_batchable=True) overrules that."
            )
        return False

    def _measured_sizer(self, opened: OpenPartition, engine: OnnxEngine, stop: StopSignal) -> BatchSizer:
        """Return a sizer that starts from what was measured, in this run or an earlier one."""
        policy, cache = self.inference.policy(), ProfileCache()
        parts = (runtime_key(), engine.device_name, self.gpu_pool.threads, opened.fingerprint.configuration)
        key = repr((*parts, self.inference.batch_rows_max))
        optimum = cache.find_optimum(engine.digest, key)
        if optimum is None:
            found = measure_batches(
                self.job.with_signature(opened, engine.signature),
                engine,
                policy,
                rows_max=self.inference.batch_rows_max,
                seconds_max=self.inference.measuring_seconds_max,
                should_stop=stop,
            )
            if found is None:
                return FixedBatchSizer(policy.batch_rows)
            bucket, climbed = found
            optimum = BatchOptimum(bucket=bucket, rows=climbed.rows)
            cache.keep_optimum(engine.digest, key, optimum)
            speeds = ", ".join(f"{t.rows}: {t.rows_per_second:,.0f}" for t in climbed.trials)
            self.context.log.info(
                f"Batches of {climbed.rows} rows of shape {bucket}: rows a second by batch {speeds}; "
                f"{climbed.end.value}."
            )
        return AdaptiveBatchSizer(optimum, rows_max=self.inference.batch_rows_max)

    def _batching(self, opened: OpenPartition, engine: OnnxEngine, stop: StopSignal) -> BatchingReport:
        """Return whether rows may share a batch, tried once for a model, device and configuration."""
        cache = ProfileCache()
        parts = (runtime_key(), engine.device_name, opened.fingerprint.configuration)
        report = cache.find_batching(engine.digest, repr(parts))
        if report is None:
            engine.place_rows({})  # an earlier partition may have placed them
            work = self.job.with_signature(opened, engine.signature)
            report = probe_partition(work, engine, self.inference.policy(), should_stop=stop)
            if report.verdict is not Batching.UNPROBED:
                cache.keep_batching(engine.digest, repr(parts), report)
        engine.place_rows(report.output_axes, shared=report.outputs_shared)
        return report

    def metadata(self, opened: OpenPartition, stats: PartitionStats) -> Mapping[str, dg.MetadataValue[Any]]:
        """Return what the partition's materialisation shows."""
        return partition_metadata(
            stats,
            model_digest=opened.fingerprint.model,
            output=opened.output,
            quarantine=f"{opened.output}/{QUARANTINE_FOLDER}" if stats.quarantine else "",
            host_memory_bytes_peak=_host_memory_bytes_peak(),
        )

    def _say(self, opened: OpenPartition) -> None:
        what = opened.name.key or "The dataset"
        for note in opened.plan.notes:
            self.context.log.warning(f"{what}: {note}")
        attempt = opened.plan.attempt
        rows = opened.plan.generation.rows
        if rows == 0:
            self.context.log.warning(f"{what} is empty: 0 rows are written.")
        if attempt is None:
            self.context.log.info(f"{what}: all {rows} rows are done already, nothing is computed.")
            return
        resumed = sum(commit.range.rows for commit in attempt.commits)
        text = f"{what}: {rows} rows, {resumed} of them are committed."
        if opened.plan.rows_carried:
            text += f" {opened.plan.rows_carried} more were computed by a stopped run and are used."
        if opened.plan.rows_recomputed:
            text += f" {opened.plan.rows_recomputed} that an earlier run lost are computed again."
        self.context.log.info(text)


def partition_names(
    context: dg.OpExecutionContext, partitions_def: dg.PartitionsDefinition[str] | None
) -> list[PartitionName]:
    """Return the partitions of a run, in order; one without a key for an asset without partitions."""
    if partitions_def is None:
        return [PartitionName(key=None, dimensions={})]
    return [_partition_name(key, partitions_def) for key in context.partition_keys]


def _partition_name(key: str, partitions_def: dg.PartitionsDefinition[str]) -> PartitionName:
    if isinstance(partitions_def, dg.MultiPartitionsDefinition):
        multi = partitions_def.get_partition_key_from_str(key)
        return PartitionName(key=str(multi), dimensions=dict(multi.keys_by_dimension))
    return PartitionName(key=key, dimensions={})


@contextmanager
def retries_transient(retries_max: int) -> Generator[None]:
    """Turn a passing fault into Dagster's request to try the step again in the same run.

    Raises:
        RetryRequested: A passing fault happened; Dagster counts the tries.
    """
    try:
        yield
    except TransientError as error:
        raise dg.RetryRequested(max_retries=retries_max, seconds_to_wait=error.retry_after_seconds) from error


def _host_memory_bytes_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE
