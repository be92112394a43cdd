"""GPU offline batch inference of ONNX models over partitioned datasets, in Dagster.

Names are loaded when they are first used, so that `import sits_dagster` stays cheap for every
process of a Dagster deployment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dagster_shared.libraries import DagsterLibraryRegistry

if TYPE_CHECKING:
    from sits_dagster.adapters.prober import calibrate_model
    from sits_dagster.adapters.profiler import ProfileOptions, profile_model
    from sits_dagster.assets.component import BatchInferenceComponent
    from sits_dagster.assets.inference import build_inference_asset
    from sits_dagster.assets.model import build_model_asset
    from sits_dagster.assets.schedule import build_nightly_schedule
    from sits_dagster.inference.sink import ParquetSink
    from sits_dagster.inference.source import ParquetDataset
    from sits_dagster.models.model import OnnxModel, Padding
    from sits_dagster.models.profile import ModelProfile
    from sits_dagster.resources.gpu_pool import GpuPoolResource
    from sits_dagster.resources.inference import InferenceResource
    from sits_dagster.resources.storage import StorageResource

__version__ = "0.1.0"

__all__ = [
    "BatchInferenceComponent",
    "GpuPoolResource",
    "InferenceResource",
    "ModelProfile",
    "OnnxModel",
    "Padding",
    "ParquetDataset",
    "ParquetSink",
    "ProfileOptions",
    "StorageResource",
    "build_inference_asset",
    "build_model_asset",
    "build_nightly_schedule",
    "calibrate_model",
    "profile_model",
]

_MODULES = {
    "BatchInferenceComponent": "sits_dagster.assets.component",
    "GpuPoolResource": "sits_dagster.resources.gpu_pool",
    "InferenceResource": "sits_dagster.resources.inference",
    "ModelProfile": "sits_dagster.models.profile",
    "OnnxModel": "sits_dagster.models.model",
    "Padding": "sits_dagster.models.model",
    "ParquetDataset": "sits_dagster.inference.source",
    "ParquetSink": "sits_dagster.inference.sink",
    "ProfileOptions": "sits_dagster.adapters.profiler",
    "StorageResource": "sits_dagster.resources.storage",
    "build_inference_asset": "sits_dagster.assets.inference",
    "build_model_asset": "sits_dagster.assets.model",
    "build_nightly_schedule": "sits_dagster.assets.schedule",
    "calibrate_model": "sits_dagster.adapters.prober",
    "profile_model": "sits_dagster.adapters.profiler",
}

DagsterLibraryRegistry.register("sits-dagster", __version__, is_dagster_package=False)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        msg = f"module 'sits_dagster' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
