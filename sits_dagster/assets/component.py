"""Batch inference as a Dagster component: an asset declared in YAML."""

import functools
from collections.abc import Sequence
from pathlib import Path

import dagster as dg
from pydantic import BaseModel, Field

from sits_dagster.assets.inference import build_inference_asset
from sits_dagster.assets.model import build_model_asset
from sits_dagster.inference.sink import ParquetSink
from sits_dagster.inference.source import ParquetDataset
from sits_dagster.models.model import OnnxModel
from sits_dagster.resources.gpu_pool import GpuPoolResource
from sits_dagster.resources.inference import InferenceResource
from sits_dagster.resources.storage import StorageResource

__all__ = ["BatchInferenceComponent"]


class BatchInferenceScaffold(BaseModel):
    """What `dg scaffold defs` may be told; the defaults show the form."""

    asset_name: str = "scores"
    model_path: str = "model.onnx"
    source_path: str = "rows/{partition_key}"
    sink_path: str = "scores/{partition_key}"
    daily_from: str = "2026-01-01"


class BatchInferenceScaffolder(dg.Scaffolder[BatchInferenceScaffold]):
    """Writes the component's YAML."""

    @classmethod
    def get_scaffold_params(cls) -> type[BatchInferenceScaffold]:
        """Return the options of `dg scaffold defs`."""
        return BatchInferenceScaffold

    def scaffold(self, request: dg.ScaffoldRequest[BatchInferenceScaffold]) -> None:
        """Write `defs.yaml` with every attribute that must be there."""
        dg.scaffold_component(request, (request.params or BatchInferenceScaffold()).model_dump())


@dg.scaffold_with(BatchInferenceScaffolder)
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
    batch_rows: int | None = Field(
        default=None, ge=1, description="Rows of a batch; without it what the inference resource says."
    )
    model_asset: bool | str = Field(
        default=False,
        description=(
            "`true`: the model is an asset of its own, `<asset_name>_model`, which shows its profile. A key, "
            "such as `models/recogniser`: it is that asset, defined elsewhere. The asset depends on it."
        ),
    )
    root: str = Field(default=".", description="Folder that relative paths start from.")
    brings_resources: bool = Field(
        default=True,
        description=(
            "Whether default resources come with the asset. Switch it off where the project defines "
            "gpu_pool, inference and storage itself."
        ),
    )

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return what `dg list components` shows."""
        return dg.ComponentTypeSpec(
            description="Runs an ONNX model over a partitioned Parquet dataset, exactly once and resumable.",
            tags=["inference", "onnx"],
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset, the model's if asked for, and the resources unless the project has them."""
        model = OnnxModel(self._absolute(self.model_path))
        model_asset = self._model_asset(model)
        asset = build_inference_asset(
            self.asset_name,
            model=model,
            model_asset=model_asset,
            source=ParquetDataset(self._absolute(self.source_path)),
            sink=ParquetSink(self._absolute(self.sink_path), keep_columns=list(self.keep_columns)),
            partitions_def=dg.DailyPartitionsDefinition(self.daily_from) if self.daily_from else None,
            batch_rows=self.batch_rows,
        )
        return dg.Definitions(
            assets=[model_asset, asset] if isinstance(model_asset, dg.AssetsDefinition) else [asset],
            resources=default_resources() if self.brings_resources else {},
        )

    def _model_asset(self, model: OnnxModel) -> dg.AssetsDefinition | dg.AssetKey | None:
        if isinstance(self.model_asset, str):
            return dg.AssetKey.from_user_string(self.model_asset)
        return build_model_asset(model, name=f"{self.asset_name}_model") if self.model_asset else None

    def _absolute(self, path: str) -> str:
        return str((Path(self.root) / path).absolute())


@functools.cache
def default_resources() -> dict[str, dg.ConfigurableResource[None]]:
    """Return the same objects on every call: Dagster takes two of one key only when they are one object."""
    return {"gpu_pool": GpuPoolResource(), "inference": InferenceResource(), "storage": StorageResource()}
