"""A folder with a tiny model, its input and its output, and a Dagster instance that remembers its runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from onnx import TensorProto, helper

from sits_dagster import (
    GpuPoolResource,
    InferenceResource,
    OnnxModel,
    ParquetDataset,
    ParquetSink,
    StorageResource,
    build_inference_asset,
)
from sits_dagster.errors import ConfigError

DAY = "2026-01-01"
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-05")
START, END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
FACTOR = 3.0

# ONNX Runtime has one CPU arena a process, with one limit: every test of a process uses the default one.
CPU_MEMORY_BYTES = GpuPoolResource().cpu_memory_bytes


def save_model(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[str | int]]],
    outputs: Mapping[str, tuple[int, Sequence[str | int]]],
    constants: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model; inputs and outputs by name, each an element type and a shape."""
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def save_times(path: Path, factor: float = FACTOR, *, rows: str | int = "rows") -> Path:
    """Write the model y = factor * x, with x and y float32 [rows]."""
    vector = (TensorProto.FLOAT, [rows])
    return save_model(
        path,
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        {"x": vector},
        {"y": vector},
        {"factor": np.array(factor, np.float32)},
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run in this process came to."""

    result: dg.ExecuteInProcessResult | dg.JobExecutionResult
    instance: dg.DagsterInstance

    @property
    def run(self) -> dg.DagsterRun:
        return self.instance.get_run_by_id(self.result.run_id)

    @property
    def materialised(self) -> list[str | None]:
        return [event.partition for event in self._of("ASSET_MATERIALIZATION")]

    def metadata(self, key: str | None = DAY) -> dict[str, Any]:
        """Return what the newest materialisation of a key shows."""
        events = [event for event in self._of("ASSET_MATERIALIZATION") if event.partition == key]
        found = events[-1].event_specific_data.materialization.metadata
        return {name: value.value for name, value in found.items()}

    @property
    def observations(self) -> list[dict[str, Any]]:
        found = [event.event_specific_data.asset_observation for event in self._of("ASSET_OBSERVATION")]
        return [{name: value.value for name, value in item.metadata.items()} for item in found]

    @property
    def checks(self) -> dict[str, bool]:
        found = [event.event_specific_data for event in self._of("ASSET_CHECK_EVALUATION")]
        return {item.check_name: item.passed for item in found}

    @property
    def log(self) -> str:
        """Everything that the asset said at INFO and above, a line each."""
        entries = self.instance.all_logs(self.result.run_id)
        return "\n".join(entry.user_message for entry in entries if not entry.is_dagster_event)

    @property
    def error(self) -> str:
        """The type and text of what failed the step, and of its causes."""
        found = [event.event_specific_data.error for event in self._of("STEP_FAILURE")]
        texts, error = [], found[0] if found else None
        while error is not None:
            texts.append(error.message)
            error = error.cause
        return "\n".join(texts)

    def _of(self, kind: str) -> list[dg.DagsterEvent]:
        return [event for event in self.result.all_events if event.event_type_value == kind]


class Workspace:
    """A root folder with `model.onnx`, `in/<key>` and `out/<key>`.

    Args:
        root: An empty folder.
        instance: Remembers the runs.
    """

    def __init__(self, root: Path, instance: dg.DagsterInstance) -> None:
        self.root = root
        self.instance = instance
        self.model = save_times(root / "model.onnx")

    def write(self, rows: int = 10, *, key: str = DAY, file: str = "a.parquet", start: int = 0) -> Path:
        """Write a file with `id` (int64) and `x` (float32), both counting from `start`."""
        ids = np.arange(start, start + rows)
        return self.write_table({"id": ids, "x": ids.astype(np.float32)}, key=key, file=file)

    def write_table(
        self, columns: Mapping[str, Any] | pa.Table, *, key: str = DAY, file: str = "a.parquet"
    ) -> Path:
        """Write a file of a partition, in row groups of four rows."""
        path = self.root / "in" / key / file
        path.parent.mkdir(parents=True, exist_ok=True)
        table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
        pq.write_table(table, path, row_group_size=4)
        return path

    def asset(self, **changes: Any) -> dg.AssetsDefinition:
        """Return the daily asset `scores`; keywords replace arguments of `build_inference_asset`."""
        options = {
            "name": "scores",
            "model": OnnxModel("model.onnx"),
            "source": ParquetDataset("in/{partition_key}"),
            "sink": ParquetSink("out/{partition_key}", keep_columns=["id"]),
            "partitions_def": DAYS,
            "backfill_policy": dg.BackfillPolicy.single_run(),
        }
        return build_inference_asset(**{**options, **changes})

    def resources(
        self, *, pool: Mapping[str, Any] | None = None, **inference: Any
    ) -> dict[str, dg.ConfigurableResource]:
        """Return the resources; keywords are fields of `InferenceResource`."""
        folder = str(self.root / "leases")
        cpu = {"provider": "cpu", "cpu_memory_bytes": CPU_MEMORY_BYTES, "threads": 1, "lease_folder": folder}
        return {
            "gpu_pool": GpuPoolResource(**{**cpu, **(pool or {})}),
            "inference": InferenceResource(**{"batch_rows": 4, "chunk_rows": 4, **inference}),
            "storage": StorageResource(root=str(self.root)),
        }

    def run(
        self,
        asset: dg.AssetsDefinition | None = None,
        *,
        key: str | None = DAY,
        end: str | None = None,
        recompute: bool = False,
        tags: Mapping[str, str] | None = None,
        pool: Mapping[str, Any] | None = None,
        **inference: Any,
    ) -> Outcome:
        """Materialise a key, a range of keys when `end` is given, or an asset without partitions."""
        asset = asset or self.asset()
        tags = dict(tags or {})
        if end is not None:
            tags |= {START: key, END: end}
        config = {"config": {"recompute": True}}
        if isinstance(asset.node_def, dg.GraphDefinition):
            config = {"ops": {f"{asset.node_def.name}_plan": config}}
        result = dg.materialize(
            [asset],
            partition_key=None if end is not None else key,
            tags=tags,
            instance=self.instance,
            resources=self.resources(pool=pool, **inference),
            run_config={"ops": {asset.node_def.name: config}} if recompute else None,
            raise_on_error=False,
        )
        return Outcome(result, self.instance)

    def out(self, key: str = DAY) -> Path:
        return self.root / "out" / key

    def output(self, key: str = DAY) -> list[dict[str, Any]]:
        """Return the output's rows as any plain reader of the folder sees them."""
        return self.output_table(key).to_pylist()

    def output_table(self, key: str = DAY) -> pa.Table:
        return ds.dataset(self.out(key), format="parquet").to_table()

    def quarantine(self, key: str = DAY) -> list[dict[str, Any]]:
        files = sorted((self.out(key) / "_quarantine").glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def parts(self, key: str = DAY) -> list[Path]:
        return sorted(self.out(key).glob("*.parquet"))


def passes(batch: pa.RecordBatch) -> Mapping[str, Any]:
    """Encode the rows as they are."""
    return {"x": batch.column("x").to_numpy()}


def fails_from(workspace: Workspace, row: int) -> Callable[[pa.RecordBatch], Mapping[str, Any]]:
    """Return an `encode` that fails the run at a row, once three segments before it are committed."""
    parts = len(workspace.parts()) + 3

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        if batch.column("id")[0].as_py() >= row:
            deadline = time.monotonic() + 30
            while len(workspace.parts()) < parts and time.monotonic() < deadline:
                time.sleep(0.01)
            message = "row without a licence"
            raise ConfigError(message)
        return passes(batch)

    return encode


def scores(ids: Sequence[int] | range, factor: float = FACTOR) -> list[dict[str, Any]]:
    """Return the output that the rows of these ids have to have."""
    return [{"id": i, "y": factor * i} for i in ids]
