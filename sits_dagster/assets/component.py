"""Batch inference as a Dagster component: an asset declared in YAML."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from sits_dagster.assets.inference import build_inference_asset
from sits_dagster.inference.sink import ParquetSink
from sits_dagster.inference.source import ParquetDataset
from sits_dagster.models.model import OnnxModel
from sits_dagster.resources.gpu_pool import GpuPoolResource
from sits_dagster.resources.inference import InferenceResource
from sits_dagster.resources.storage import StorageResource

__all__ = ["BatchInferenceComponent"]


class BatchInferenceComponent(dg.Component, dg.Model, dg.Resolvable):
    """An ONNX model over a partitioned Parquet dataset, exactly once and resumable.

    Each model input is the column of its name, each output becomes a column; for other inputs or
    outputs use `build_inference_asset` in Python.
    """

    asset_name: str = Field(description="Name of the asset.")
    model_path: str = Field(description="Path of the .onnx file.")
    source_path: str = Field(description="Folder or pattern of the input, with {partition_key} in it.")
    sink_path: str = Field(description="Folder of the output, with {partition_key} in it.")
    keep_columns: Sequence[str] = Field(default=(), description="Input columns that go to the output.")
    daily_from: str | None = Field(
        default=None, description="First day (YYYY-MM-DD) of daily partitions; without it there are none."
    )
    batch_rows: int = Field(default=8, ge=1, description="Rows of a batch.")
    root: str = Field(default=".", description="Folder that relative paths start from.")

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what `dg list components` shows."""
        return dg.ComponentTypeSpec(
            description="Runs an ONNX model over a partitioned Parquet dataset, exactly once and resumable.",
            tags=["inference", "onnx"],
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset with the resources that it needs."""
        asset = build_inference_asset(
            self.asset_name,
            model=OnnxModel(self.model_path),
            source=ParquetDataset(self.source_path),
            sink=ParquetSink(self.sink_path, keep_columns=list(self.keep_columns)),
            partitions_def=dg.DailyPartitionsDefinition(self.daily_from) if self.daily_from else None,
        )
        return dg.Definitions(
            assets=[asset],
            resources={
                "gpu_pool": GpuPoolResource(),
                "inference": InferenceResource(batch_rows=self.batch_rows),
                "storage": StorageResource(root=self.root),
            },
        )
