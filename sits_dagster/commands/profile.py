"""`sits profile`: what a model costs and how large its batches may be, before it runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sits_dagster.adapters.prober import calibrate_model
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.adapters.triton import CONFIG_NAME, ONNX_NAME, read_triton_repository
from sits_dagster.commands.profile_report import Machine, model_report
from sits_dagster.errors import ConfigError, InvariantError, SitsError, TransientError
from sits_dagster.models.hardware import device_model
from sits_dagster.models.inputs import GivenShapes
from sits_dagster.models.profile import ModelProfile
from sits_dagster.models.triton import (
    InstanceKind,
    TritonModel,
    TritonRepository,
    TritonVersion,
    repository_warnings,
)

__all__ = ["ProfileRequest", "profile_path"]

REFERENCE_DEVICE = "a100-80gb"
FILES_NAMED_MAX = 3
ROWS_AXIS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What was asked on the command line.

    Args:
        path: An `.onnx` file, or a Triton model repository.
        options: How models are profiled.
        memory_bytes: Memory for one model, weights included; the device's if `None`.
        device: The card's name; `REFERENCE_DEVICE` if `None`.
        rows: The batch that is looked at; 1 or the fixed one if `None`.
        is_optimized: Whether to count the kernels of ONNX Runtime's graph.
        is_calibrated: Whether to measure a few batches on this machine's own device too.
    """

    path: Path
    options: ProfileOptions
    memory_bytes: int | None = None
    device: str | None = None
    rows: int | None = None
    is_optimized: bool = False
    is_calibrated: bool = False


def profile_path(request: ProfileRequest, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what the model costs; of a folder, each model that a Triton server would load from it.

    Args:
        request: What was asked.
        say: Takes a line on what is being done.

    Returns:
        The object that `--json` prints. Of a folder: `models`, `ensembles`, `skipped`, `failed`, `warnings`.

    Raises:
        ModelError: A file is missing or broken.
        ConfigError: An option does not fit the model, or the folder is no repository.
        TransientError: The device that measures stayed in use.
    """
    device = device_model(request.device or REFERENCE_DEVICE)
    memory_bytes = request.memory_bytes or device.memory_bytes
    machine = Machine(device=device, is_reference=request.device is None, memory_bytes=memory_bytes)
    if request.path.is_dir():
        return _Repository(request, machine, say).report()
    say(f"Profiling {request.path.name}")
    profile = _profile(request.path, request.options, request, say)
    _check_names("--value", request.options.values or {}, {value.name for value in profile.inputs})
    return _report(request.path, profile, request, machine)


def _profile(
    path: Path, options: ProfileOptions, request: ProfileRequest, say: Callable[[str], None]
) -> ModelProfile:
    if not request.is_calibrated:
        return profile_model(path, options)
    from sits_dagster.resources.gpu_pool import GpuPoolResource

    owner = f"sits profile {path.name} (process {os.getpid()})"
    with GpuPoolResource().lease(owner=owner, should_stop=lambda: False, on_wait=say) as device:
        return calibrate_model(path, device, options)


def _report(
    path: Path,
    profile: ModelProfile,
    request: ProfileRequest,
    machine: Machine,
    *,
    rows_limit: int | None = None,
) -> dict[str, Any]:
    report = model_report(
        profile, machine, rows=request.rows, rows_limit=rows_limit, is_optimized=request.is_optimized
    )
    return {**report, "path": str(path)}


def _check_names(option: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        msg = f"{option} names {', '.join(map(repr, unknown))}, which is no input."
        raise ConfigError(msg, hint=f"the inputs are {', '.join(map(repr, sorted(known)))}.")


class _Repository:
    def __init__(self, request: ProfileRequest, machine: Machine, say: Callable[[str], None]) -> None:
        self._request = request
        self._machine = machine
        self._say = say

    def report(self) -> dict[str, Any]:
        repository = read_triton_repository(self._request.path)
        if not repository.models:
            raise _no_repository(self._request.path)
        models: list[dict[str, Any]] = []
        failed: list[dict[str, Any]] = []
        for model in repository.models:
            for version in model.versions if model.is_onnx else ():
                if version.path is None:
                    continue  # a warning of the repository says so
                self._say(f"Profiling {model.name}, version {version.number}")
                try:
                    models.append(self._version(model, version, version.path))
                except (InvariantError, TransientError):
                    raise  # a fault of this package; a passing one of the machine, not of the model
                except SitsError as error:
                    failed.append({"name": model.name, "version": version.number, "error": str(error)})
        if models:
            known = {value["name"] for model in models for value in model["inputs"]}
            for option, given in (
                ("--shape", self._request.options.shapes),
                ("--value", self._request.options.values),
            ):
                if not failed:
                    _check_names(option, given or {}, known)
        return {
            "path": str(repository.path),
            "models": models,
            "ensembles": [_ensemble(model) for model in repository.models if model.is_ensemble],
            "skipped": [
                {"name": model.name, "backend": model.backend}
                for model in repository.models
                if not (model.is_onnx or model.is_ensemble)
            ],
            "failed": failed,
            "warnings": list(_warnings(repository, failed)),
        }

    def _version(self, model: TritonModel, version: TritonVersion, path: Path) -> dict[str, Any]:
        options = replace(self._request.options, shapes=self._shapes(model, path))
        profile = _profile(path, options, self._request, self._say)
        sessions = _sessions_max(model)
        machine = replace(self._machine, memory_bytes=max(1, self._machine.memory_bytes // sessions))
        rows_limit = model.max_batch_size if model.max_batch_size > 0 else None
        report = _report(path, profile, self._request, machine, rows_limit=rows_limit)
        if sessions > 1:
            note = f"{sessions} instances share a GPU: each is given 1/{sessions} of the memory here"
            report["warnings"].insert(0, note)
        report["triton"] = {
            "version": version.number,
            "max_batch_size": model.max_batch_size,
            "instances": [
                {**asdict(group), "kind": group.kind.value, "gpus": list(group.gpus)}
                for group in model.instance_groups
            ],
            "dynamic_batching": asdict(model.dynamic_batching) if model.dynamic_batching else None,
            "sequence_batching": model.sequence_batching,
        }
        return {**report, "name": model.name}

    def _shapes(self, model: TritonModel, path: Path) -> GivenShapes:
        """Return the shapes of the configuration where they are whole, and those that the user knows."""
        given = dict(self._request.options.shapes or {})
        names = {tensor.name for tensor in model.inputs}
        if given and not names:
            known = profile_model(path, replace(self._request.options, shapes=None, is_run=False))
            names = {value.name for value in known.inputs}
        configured: dict[str, tuple[int | str, ...]] = {}
        for tensor in model.inputs:
            shape = model.graph_shape(tensor)
            axes = (
                (ROWS_AXIS if shape[:1] == (None,) else None, *shape[1:]) if shape[:1] == (None,) else shape
            )
            if axes and None not in axes:
                configured[tensor.name] = tuple(axis for axis in axes if axis is not None)
        return {**configured, **{name: shape for name, shape in given.items() if name in names}}


def _no_repository(folder: Path) -> ConfigError:
    files = sorted(file.name for file in folder.glob("*.onnx"))
    named = ", ".join(map(repr, files[:FILES_NAMED_MAX])) + (", …" if len(files) > FILES_NAMED_MAX else "")
    msg = (
        f"{str(folder)!r} is no Triton model repository: no folder in it has a {CONFIG_NAME} or a "
        f"numbered version with a model, such as MODEL/1/{ONNX_NAME}."
    )
    hint = f"give one of its files: {named}." if files else "give an .onnx file, or the repository's folder."
    return ConfigError(msg, hint=hint)


def _sessions_max(model: TritonModel) -> int:
    """Return how many sessions of a model share one GPU at most."""
    sessions: Counter[int] = Counter()
    everywhere = 0
    for group in model.instance_groups:
        if group.kind in (InstanceKind.GPU, InstanceKind.AUTO):
            sessions.update(dict.fromkeys(group.gpus, group.count))
            everywhere += 0 if group.gpus else group.count
    return max(1, everywhere + max(sessions.values(), default=0))


def _ensemble(model: TritonModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "max_batch_size": model.max_batch_size,
        "steps": [
            {
                "model": step.model,
                "version": step.version,
                "inputs": dict(step.inputs),
                "outputs": dict(step.outputs),
            }
            for step in model.steps
        ],
    }


def _warnings(repository: TritonRepository, failed: list[dict[str, Any]]) -> Iterator[str]:
    yield from repository_warnings(repository)
    yield from repository.notes
    for model in repository.models:
        if not (model.is_onnx or model.is_ensemble):
            backend = model.backend or "unknown"
            yield f"Model {model.name!r} is left out: its backend is {backend!r}, not ONNX Runtime."
    for item in failed:
        yield f"Model {item['name']!r}, version {item['version']}, could not be profiled: {item['error']}"
