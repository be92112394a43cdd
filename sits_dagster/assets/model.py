"""A model as an asset: its profile is what a materialisation shows, its digest is the data version."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg

from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.metadata import MODEL_PATH_KEY, model_metadata
from sits_dagster.models.hardware import DeviceModel, device_model
from sits_dagster.models.model import OnnxModel
from sits_dagster.resources.storage import StorageResource

__all__ = ["build_model_asset"]

CARD = "a100-80gb"
KINDS = {"onnx"}


def build_model_asset(
    model: OnnxModel,
    *,
    name: str | None = None,
    prepare: Callable[[Path], object] | None = None,
    options: ProfileOptions | None = None,
    card: str | DeviceModel = CARD,
    **asset_options: Any,  # noqa: ANN401 - passed on to Dagster as they are
) -> dg.AssetsDefinition:
    """Return an asset that stands for a model file, without partitions.

    To materialise it is to profile the file, on the CPU of the step and within limits: what a row costs,
    how many rows fit, whether rows may share a batch. The model's digest is the asset's data version, so
    Dagster calls what was computed from the model stale when, and only when, the file's bytes have changed.
    Give it to `build_inference_asset` as `model_asset`.

    Args:
        model: The model; its path starts from the storage resource's root.
        name: The asset's name; the file's name without its suffix if left out.
        prepare: Puts the file at the path that it is given, if it is not there: a download, an export.
        options: How the model is profiled; `ProfileOptions(shapes=…)` tells what the file leaves open.
        card: For which device the rows of a batch and the time of the memory are told: a name in
            `sits_dagster.models.hardware.DEVICES`, or figures of your own.
        asset_options: Further arguments of `dagster.asset`: `group_name`, `key_prefix`, `deps`, `owners`,
            `tags`, `description`, …

    Raises:
        ConfigError: There is no such card.

    Example:
        >>> from sits_dagster import OnnxModel, build_model_asset
        >>> build_model_asset(OnnxModel("models/recogniser.v5.onnx")).key.to_user_string()
        'recogniser_v5'
    """
    known = device_model(card) if isinstance(card, str) else card
    declared: dict[str, Any] = {"kinds": KINDS, **asset_options}
    declared["metadata"] = {MODEL_PATH_KEY: model.path, **(asset_options.get("metadata") or {})}
    if "key" not in asset_options:
        declared["name"] = name or re.sub(r"\W", "_", model.name, flags=re.ASCII)

    def profile(context: dg.AssetExecutionContext, storage: StorageResource) -> dg.MaterializeResult:  # type: ignore[type-arg]  # Dagster reads the bare name
        path = Path(storage.resolve(model.path))
        if prepare is not None:
            prepare(path)
        found = profile_model(path, options)
        for warning in found.warnings:
            context.log.warning(f"Model {model.name!r}: {warning.rstrip('.')}.")
        return dg.MaterializeResult(
            metadata=model_metadata(found, path=str(path), card=known),
            data_version=dg.DataVersion(found.digest),
        )

    return dg.asset(**declared)(profile)
