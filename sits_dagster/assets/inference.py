"""The inference asset: one asset whose step plans, leases a device, runs the shards and commits."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

import dagster as dg
from dagster._core.definitions.events import CoercibleToAssetKey

from sits_dagster.adapters.leases import LeaseCancelled
from sits_dagster.adapters.onnx_engine import OnnxEngine
from sits_dagster.assets.checks import check_results, check_specs, inspect_partition
from sits_dagster.assets.fan_out import build_fan_out_asset
from sits_dagster.assets.job import InferenceJob, PartitionName, now_utc
from sits_dagster.assets.runtime import InferenceConfig, StepRuntime, partition_names, retries_transient
from sits_dagster.assets.stop import StopSignal, ends_politely
from sits_dagster.errors import ConfigError
from sits_dagster.inference.decode import DecodeFunction
from sits_dagster.inference.encode import EncodeFunction
from sits_dagster.inference.inspection import Inspection
from sits_dagster.inference.partition import partition_stats, publish_partition
from sits_dagster.inference.sink import ParquetSink
from sits_dagster.inference.source import ParquetDataset
from sits_dagster.inference.stats import Progress
from sits_dagster.metadata import MODEL_PATH_KEY
from sits_dagster.models.model import OnnxModel
from sits_dagster.resources.gpu_pool import GpuPoolResource
from sits_dagster.resources.inference import InferenceResource
from sits_dagster.resources.storage import StorageResource

__all__ = ["build_inference_asset"]

KINDS = {"onnx", "parquet"}


def build_inference_asset(  # noqa: PLR0913 - the asset's declaration, keyword-only
    name: str,
    *,
    model: OnnxModel,
    source: ParquetDataset,
    sink: ParquetSink,
    model_asset: dg.AssetsDefinition | CoercibleToAssetKey | None = None,
    encode: EncodeFunction | None = None,
    decode: DecodeFunction | None = None,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    fan_out: bool = False,
    code_version: str | None = None,
    batch_rows: int | None = None,
    pool: str | None = "gpu",
    **asset_options: Any,  # noqa: ANN401 - passed on to Dagster as they are
) -> dg.AssetsDefinition:
    """Return an asset that puts each row of a partition through a model, exactly once.

    A run that is killed, cancelled or fails is resumed by the next one from its last commit. A
    partition that is up to date (same input files, model and code) is not computed again.

    Args:
        name: The asset's name.
        model: The model.
        source: Where a partition's rows come from.
        sink: Where its results go.
        model_asset: What `build_model_asset` made of the same model, or its key: the asset then depends on
            it, and Dagster calls partitions stale that another version of the model computed.
        encode: A record batch of `source.columns` to the model's inputs; by default each input is the
            column of its name. See `EncodeFunction`.
        decode: The model's outputs to columns; by default each output becomes a column. See
            `DecodeFunction`.
        partitions_def: Any partitions definition, or `None`.
        fan_out: Map the shards over steps, for several devices or pods, instead of running them in
            one step.
        code_version: Stands for the code of `encode` and `decode`; by default their source is digested,
            so that a change of code computes a partition again.
        batch_rows: Rows of a batch, >= 1; by default what the inference resource says, or what is measured.
        pool: Dagster's concurrency pool of the computing steps.
        asset_options: Further arguments of `dagster.asset`: `deps`, `group_name`, `owners`, `tags`,
            `description`, `backfill_policy`, …

    Raises:
        ConfigError: A retry policy is given (it would swallow a cancellation), the sink's path does not
            tell partitions apart, or the model asset is that of another model.

    Example:
        >>> import dagster as dg
        >>> from sits_dagster import OnnxModel, ParquetDataset, ParquetSink, build_inference_asset
        >>> scores = build_inference_asset(
        ...     "scores",
        ...     model=OnnxModel("model.onnx"),
        ...     source=ParquetDataset("rows/{partition_key}"),
        ...     sink=ParquetSink("scores/{partition_key}", keep_columns=["id"]),
        ...     partitions_def=dg.DailyPartitionsDefinition("2026-01-01"),
        ... )
        >>> scores.key.to_user_string()
        'scores'
    """
    _check_options(name, source, sink, partitions_def, asset_options)
    job = InferenceJob(
        model=model,
        source=source,
        sink=sink,
        encode=encode,
        decode=decode,
        code_version=code_version,
        batch_rows=batch_rows,
    )
    options: dict[str, Any] = {
        "kinds": KINDS,
        "partitions_def": partitions_def,
        "code_version": code_version,
        **asset_options,
    }
    prefix = asset_options.get("key_prefix") or []
    key = dg.AssetKey([*([prefix] if isinstance(prefix, str) else prefix), name])
    if model_asset is not None:
        options["deps"] = _with_model(name, model, model_asset, asset_options.get("deps") or ())
    if fan_out:
        return build_fan_out_asset(name, job=job, key=key, pool=pool, options=options)

    def infer(
        context: dg.AssetExecutionContext,
        config: InferenceConfig,
        gpu_pool: GpuPoolResource,
        inference: InferenceResource,
        storage: StorageResource,
    ) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster reads the bare name
        runtime = StepRuntime(
            job=job,
            asset_key=key,
            context=context.op_execution_context,
            gpu_pool=gpu_pool,
            inference=inference,
            storage=storage,
        )
        with retries_transient(inference.retries_max):
            done = _run(runtime, config, partition_names(context.op_execution_context, partitions_def))
        return _result(context, key, done)

    return dg.asset(name=name, pool=pool, check_specs=check_specs(key), **options)(infer)


@dataclass(slots=True)
class _Done:
    """What a step has finished, in order."""

    metadata: dict[str | None, Mapping[str, dg.MetadataValue[Any]]] = field(
        default_factory=dict[str | None, Mapping[str, dg.MetadataValue[Any]]]
    )
    inspections: list[Inspection] = field(default_factory=list[Inspection])


def _run(runtime: StepRuntime, config: InferenceConfig, names: Sequence[PartitionName]) -> _Done:
    """Process partition after partition with one engine, which is loaded when it is first needed."""
    done = _Done()
    with ends_politely(runtime.context.instance, runtime.context.run_id) as stop, ExitStack() as held:
        engine: OnnxEngine | None = None
        for name in names:
            if stop():
                break
            try:
                engine = _run_partition(runtime, config, name, engine=engine, held=held, stop=stop, done=done)
            except LeaseCancelled:
                break
            if stop() and name.key not in done.metadata:
                break
            if len(names) > 1:
                runtime.context.log_event(
                    dg.AssetMaterialization(
                        asset_key=runtime.asset_key, partition=name.key, metadata=done.metadata[name.key]
                    )
                )
    return done


def _run_partition(
    runtime: StepRuntime,
    config: InferenceConfig,
    name: PartitionName,
    *,
    engine: OnnxEngine | None,
    held: ExitStack,
    stop: StopSignal,
    done: _Done,
) -> OnnxEngine | None:
    opened = runtime.open(name, config)
    progress, published, carried = Progress(), None, 0
    attempt = opened.plan.attempt
    if attempt is not None:
        work, shards = opened.work, attempt.generation.shards
        # Without rows the model is needed for the columns; without anything left to compute it is not.
        if not opened.work.partition.rows or any(attempt.remaining(shard) for shard in shards):
            engine = engine or held.enter_context(runtime.engine(stop))
            is_done, carried = runtime.compute(
                opened, attempt, shards=shards, engine=engine, stop=stop, progress=progress
            )
            if not is_done:
                return engine
            work = runtime.job.with_signature(opened, engine.signature)
        published = publish_partition(attempt, work, device_seconds=progress.device_seconds, now=now_utc())
    stats = partition_stats(opened.plan, published, progress, carried)
    done.metadata[name.key] = runtime.metadata(opened, stats)
    done.inspections.append(inspect_partition(opened))
    return engine


def _result(context: dg.AssetExecutionContext, key: dg.AssetKey, done: _Done) -> dg.MaterializeResult[Any]:
    checks = check_results(key, done.inspections)
    if len(done.metadata) == 1:
        return dg.MaterializeResult(metadata=next(iter(done.metadata.values())), check_results=checks)
    for partition, metadata in done.metadata.items():
        if partition is not None:
            context.add_asset_metadata(metadata, partition_key=partition)
    return dg.MaterializeResult(check_results=checks)


def _with_model(
    name: str,
    model: OnnxModel,
    model_asset: dg.AssetsDefinition | CoercibleToAssetKey,
    deps: Iterable[Any],
) -> list[Any]:
    """Return the dependencies with the model's asset among them, once."""
    if isinstance(model_asset, dg.AssetsDefinition):
        key = model_asset.key
        path = model_asset.get_asset_spec(key).metadata.get(MODEL_PATH_KEY, model.path)
        if path != model.path:
            msg = f"Asset {name!r} runs model {model.path!r}, but its model_asset is that of {path!r}."
            raise ConfigError(msg, hint="give the same OnnxModel to build_model_asset.")
    else:
        key = dg.AssetKey.from_coercible(model_asset)
    found = list(deps)
    known = {dep.asset_key for dep in dg.AssetSpec(name, deps=found).deps}
    return found if key in known else [*found, key]


def _check_options(
    name: str,
    source: ParquetDataset,
    sink: ParquetSink,
    partitions_def: dg.PartitionsDefinition[str] | None,
    asset_options: Mapping[str, Any],
) -> None:
    if "retry_policy" in asset_options:
        msg = f"Asset {name!r} must not have a retry_policy: it would swallow a cancellation."
        raise ConfigError(msg, hint="passing faults are retried by InferenceResource(retries_max=…).")
    known = _placeholders_known(partitions_def)
    names = {path: _placeholders(path, known) for path in (source.path, sink.path)}
    missing = _placeholders_missing(names[sink.path], partitions_def)
    if missing:
        msg = f"Sink path {sink.path!r} of asset {name!r} is the same for several partitions."
        raise ConfigError(msg, hint=f"put {' and '.join(missing)} into the path.")


def _placeholders_known(partitions_def: dg.PartitionsDefinition[str] | None) -> set[str]:
    if partitions_def is None:
        return set()
    if isinstance(partitions_def, dg.MultiPartitionsDefinition):
        return {"partition_key", *(dimension.name for dimension in partitions_def.partitions_defs)}
    return {"partition_key"}


def _placeholders(path: str, known: set[str]) -> set[str]:
    """Return the names in braces of a path, each of them known."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(path) if name is not None}
    except ValueError as error:
        msg = f"Path {path!r} is malformed: {error}."
        raise ConfigError(msg, hint="write a brace that is part of the path twice.") from error
    unknown = sorted(names - known)
    if unknown:
        msg = f"Path {path!r} has the placeholder {{{unknown[0]}}}, which has no value."
        available = ", ".join(f"{{{name}}}" for name in sorted(known))
        raise ConfigError(msg, hint=f"available: {available}." if known else "the asset has no partitions.")
    return names


def _placeholders_missing(names: set[str], partitions_def: dg.PartitionsDefinition[str] | None) -> list[str]:
    """Return the placeholders without which partitions would share a folder."""
    if partitions_def is None:
        return []
    wanted = ["partition_key"]
    if isinstance(partitions_def, dg.MultiPartitionsDefinition) and "partition_key" not in names:
        wanted = [dimension.name for dimension in partitions_def.partitions_defs]
    return [f"{{{name}}}" for name in wanted if name not in names]
