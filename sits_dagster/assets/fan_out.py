"""The inference asset as a graph: plan, infer mapped over shards, commit; for several devices or pods.

Guarantees are those of the one-step form: shards commit on their own, and the attempt's number that
the first step registers fences off older ones.
"""

import inspect
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from sits_dagster.adapters.leases import LeaseCancelled
from sits_dagster.assets.checks import check_results, check_specs, inspect_partition
from sits_dagster.assets.job import InferenceJob, OpenPartition, PartitionName, now_utc
from sits_dagster.assets.runtime import InferenceConfig, StepRuntime, partition_names, retries_transient
from sits_dagster.assets.stop import ends_politely
from sits_dagster.errors import DataError
from sits_dagster.inference.inspection import Inspection
from sits_dagster.inference.partition import PartitionPlan, partition_stats, publish_partition
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.stats import Progress
from sits_dagster.resources.gpu_pool import GpuPoolResource
from sits_dagster.resources.inference import InferenceResource
from sits_dagster.resources.storage import StorageResource

__all__ = ["build_fan_out_asset"]

Task = dict[str, Any]
"""What one step tells the next, in plain values: partition, generation, epoch, shard or notes."""


def build_fan_out_asset(
    name: str, *, job: InferenceJob, key: dg.AssetKey, pool: str | None, options: Mapping[str, Any]
) -> dg.AssetsDefinition:
    """Return the graph-backed asset of a job.

    Args:
        name: The asset's name.
        job: What to do with a partition.
        key: The asset's key.
        pool: Dagster's concurrency pool of the computing steps.
        options: Arguments of `dagster.graph_asset`; besides, `deps`, and `op_tags` for the computing steps.
    """
    options = dict(options)
    steps = _Steps(job, key, options["partitions_def"])
    ins = _dependencies(key, options.pop("deps", None))
    plan_op = steps.plan_op(f"{name}_plan", list(ins))
    infer_op = steps.infer_op(f"{name}_infer", pool, options.pop("op_tags", None))
    commit_op = steps.commit_op(f"{name}_commit")

    def infer(**after: Any) -> Any:  # noqa: ANN401 - Dagster composes it
        partitions, shards = plan_op(**after)
        results = commit_op(partitions, shards.map(infer_op).collect())
        return {
            "result": results[0],
            **{spec.get_python_identifier(): results[i + 1] for i, spec in enumerate(check_specs(key))},
        }

    # Dagster reads the names of a graph's inputs from the signature.
    parameters = [inspect.Parameter(after, inspect.Parameter.KEYWORD_ONLY) for after in ins]
    vars(infer)["__signature__"] = inspect.Signature(parameters)
    return dg.graph_asset(name=name, ins=ins, check_specs=check_specs(key), **options)(infer)


def _dependencies(key: dg.AssetKey, deps: Any) -> dict[str, dg.AssetIn]:  # noqa: ANN401 - what Dagster takes
    """Return inputs that carry nothing, since a graph has no `deps` of its own."""
    return {
        f"after_{index}": dg.AssetIn(
            key=dep.asset_key, partition_mapping=dep.partition_mapping, dagster_type=dg.Nothing
        )
        for index, dep in enumerate(dg.AssetSpec(key, deps=deps).deps)
    }


class _Steps:
    """Makes the three ops of a job.

    Args:
        job: What to do with a partition.
        key: The asset's key.
        partitions_def: The asset's partitions.
    """

    def __init__(
        self, job: InferenceJob, key: dg.AssetKey, partitions_def: dg.PartitionsDefinition[str] | None
    ) -> None:
        self._job = job
        self._key = key
        self._partitions_def = partitions_def

    def plan_op(self, name: str, after: Sequence[str]) -> dg.OpDefinition:
        """Return the op that registers an attempt for each partition and gives its open shards."""
        out = {"partitions": dg.Out(), "shards": dg.DynamicOut()}

        @dg.op(name=name, ins={name: dg.In(dg.Nothing) for name in after}, out=out)
        def plan(
            context: dg.OpExecutionContext,
            config: InferenceConfig,
            gpu_pool: GpuPoolResource,
            inference: InferenceResource,
            storage: StorageResource,
        ) -> Generator[Any]:
            runtime = self._runtime(context, gpu_pool, inference, storage)
            tasks: list[Task] = []
            for partition in partition_names(context, self._partitions_def):
                opened = runtime.open(partition, config)
                attempt = opened.plan.attempt
                tasks.append(
                    {
                        "key": partition.key,
                        "dimensions": dict(partition.dimensions),
                        "generation": opened.plan.generation.name,
                        "epoch": attempt.epoch if attempt else None,
                        "rows_recomputed": opened.plan.rows_recomputed,
                        "notes": opened.plan.notes,
                    }
                )
                for shard in attempt.generation.shards if attempt else ():
                    if attempt and attempt.remaining(shard):
                        mapping_key = f"partition{len(tasks) - 1}_shard{shard.index}"
                        yield dg.DynamicOutput(
                            {**tasks[-1], "shard": shard.index}, mapping_key=mapping_key, output_name="shards"
                        )
            yield dg.Output(tasks, "partitions")

        return plan

    def infer_op(self, name: str, pool: str | None, tags: Mapping[str, Any] | None) -> dg.OpDefinition:
        """Return the op that leases a device and computes one shard."""

        @dg.op(name=name, pool=pool, tags=tags)
        def infer(
            context: dg.OpExecutionContext,
            task: dict[str, Any],
            gpu_pool: GpuPoolResource,
            inference: InferenceResource,
            storage: StorageResource,
        ) -> dict[str, Any]:
            runtime = self._runtime(context, gpu_pool, inference, storage)
            with retries_transient(inference.retries_max):
                return _infer_shard(runtime, task)

        return infer

    def commit_op(self, name: str) -> dg.OpDefinition:
        """Return the op that publishes the partitions once all shards are done."""
        outs = {"result": dg.Out(dg.Nothing)}
        outs |= {spec.get_python_identifier(): dg.Out(is_required=False) for spec in check_specs(self._key)}

        @dg.op(name=name, out=outs)
        def commit(
            context: dg.AssetExecutionContext,
            tasks: list[dict[str, Any]],
            results: list[dict[str, Any]],
            gpu_pool: GpuPoolResource,
            inference: InferenceResource,
            storage: StorageResource,
        ) -> Generator[Any]:
            runtime = self._runtime(context.op_execution_context, gpu_pool, inference, storage)
            inspections: list[Inspection] = []
            for task in tasks:
                with retries_transient(inference.retries_max):
                    metadata, inspection = _publish(runtime, task, results)
                inspections.append(inspection)
                if len(tasks) == 1:
                    context.add_asset_metadata(metadata, asset_key=self._key)
                else:
                    context.add_asset_metadata(metadata, asset_key=self._key, partition_key=task["key"])
                    context.log_event(
                        dg.AssetMaterialization(self._key, partition=task["key"], metadata=metadata)
                    )
            yield dg.Output(None, "result")
            yield from check_results(self._key, inspections)

        return commit

    def _runtime(
        self,
        context: dg.OpExecutionContext,
        gpu_pool: GpuPoolResource,
        inference: InferenceResource,
        storage: StorageResource,
    ) -> StepRuntime:
        return StepRuntime(
            job=self._job,
            asset_key=self._key,
            context=context,
            gpu_pool=gpu_pool,
            inference=inference,
            storage=storage,
        )


def _infer_shard(runtime: StepRuntime, task: Task) -> Task:
    opened = runtime.job.join(
        PartitionName(key=task["key"], dimensions=task["dimensions"]),
        resolve=runtime.storage.resolve,
        generation=task["generation"],
        epoch=task["epoch"],
    )
    attempt, progress, carried = opened.plan.attempt, Progress(), 0
    if attempt is None or not attempt.remaining(attempt.generation.shards[task["shard"]]):
        return {"key": task["key"], "progress": progress, "carried": carried}
    with ends_politely(runtime.context.instance, runtime.context.run_id) as stop:
        try:
            with runtime.engine(stop) as engine:
                shard = attempt.generation.shards[task["shard"]]
                _, carried = runtime.compute(
                    opened, attempt, shards=[shard], engine=engine, stop=stop, progress=progress
                )
        except LeaseCancelled:
            pass
    return {"key": task["key"], "progress": progress, "carried": carried}


def _publish(
    runtime: StepRuntime, task: Task, results: Sequence[Task]
) -> tuple[Mapping[str, dg.MetadataValue[Any]], Inspection]:
    name = PartitionName(key=task["key"], dimensions=task["dimensions"])
    mine = [result for result in results if result["key"] == task["key"]]
    progress = Progress.total([result["progress"] for result in mine])
    published = None
    if task["epoch"] is None:
        opened = runtime.open(name, InferenceConfig())
        if opened.plan.attempt:
            msg = f"{name.key or 'The dataset'} was complete, but changed while the run was going on."
            raise DataError(msg, hint="run it again.")
    else:
        opened = runtime.job.join(
            name, resolve=runtime.storage.resolve, generation=task["generation"], epoch=task["epoch"]
        )
        if opened.plan.attempt:
            published = publish_partition(
                opened.plan.attempt,
                _work(runtime, opened),
                device_seconds=progress.device_seconds,
                now=now_utc(),
                rows_quarantined_max=runtime.inference.rows_quarantined_max,
            )
    plan = _as_planned(opened.plan, task, sum(p["progress"].rows_done for p in mine))
    stats = partition_stats(plan, published, progress, sum(result["carried"] for result in mine))
    return runtime.metadata(opened, stats), inspect_partition(opened)


def _work(runtime: StepRuntime, opened: OpenPartition) -> PartitionWork:
    """Return the work; without rows no step has asked the model yet which columns the output has."""
    if opened.work.partition.rows:
        return opened.work
    work = opened.work
    with ends_politely(runtime.context.instance, runtime.context.run_id) as stop:
        try:
            with runtime.engine(stop) as engine:
                work = runtime.job.with_signature(opened, engine.signature)
        except LeaseCancelled:
            pass
    return work


def _as_planned(plan: PartitionPlan, task: Task, rows_done: int) -> PartitionPlan:
    """Return the plan as the first step saw it: without the commits of this run's shards."""
    attempt = plan.attempt
    if attempt is not None and rows_done:
        earlier = tuple(commit for commit in attempt.commits if commit.epoch != task["epoch"])
        attempt = replace(attempt, commits=earlier)
    return replace(plan, attempt=attempt, rows_recomputed=task["rows_recomputed"], notes=tuple(task["notes"]))
