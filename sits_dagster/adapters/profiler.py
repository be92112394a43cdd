"""A model's profile: read in one sandbox, tried in another, put together, and kept for the next time."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.sandbox import SandboxLimits, run_sandboxed
from sits_dagster.errors import ConfigError, SitsError
from sits_dagster.models.analysis import GraphAnalysis
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.codec import load
from sits_dagster.models.inputs import GivenShapes
from sits_dagster.models.model import model_digest, model_files
from sits_dagster.models.profile import ModelProfile, TensorProfile
from sits_dagster.models.run_analysis import RunAnalysis

__all__ = ["ProfileOptions", "profile_model"]

READING_SECONDS_MAX = 10.0
RUNNING_SECONDS_MAX = 30.0
# A larger model is only read: trying it would load all its weights.
RUN_BYTES_MAX = 1 << 30
RUN_MEMORY_BYTES = 4 << 30
READ_MEMORY_BYTES = 1 << 30
WEIGHT_COPIES = 4  # while a model is optimised and saved
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How a model is profiled.

    Args:
        shapes: Input shapes that the user knows: a number is a length, a name the axis of the rows.
        values: Numbers that inputs are filled with when the model is tried, such as a sample rate.
        is_run: Whether the model is tried: its real memory plan and batching are not known otherwise.
        is_cached: Whether an earlier profile may be taken, and this one is kept.
        reading_seconds_max: For reading the file, > 0.
        running_seconds_max: For trying the model, > 0.
        read_memory_bytes: Most memory for reading the file, beyond the file itself.
        run_memory_bytes: Most memory for trying the model, beyond its weights.
    """

    shapes: GivenShapes | None = None
    values: Mapping[str, float] | None = None
    is_run: bool = True
    is_cached: bool = True
    reading_seconds_max: float = READING_SECONDS_MAX
    running_seconds_max: float = RUNNING_SECONDS_MAX
    read_memory_bytes: int = READ_MEMORY_BYTES
    run_memory_bytes: int = RUN_MEMORY_BYTES


def profile_model(
    path: str | Path, options: ProfileOptions | None = None, *, cache: ProfileCache | None = None
) -> ModelProfile:
    """Return what a model costs, before it runs; the second time from the cache.

    The file is read and the model tried in child processes with limits, so that a broken or hostile one
    cannot harm this process.

    Args:
        path: The `.onnx` file.
        options: How to profile; the defaults if left out.
        cache: Where profiles are kept; the user's cache folder if left out.

    Raises:
        ModelError: The file is missing, broken, or needs more time or memory to read than allowed.
        ConfigError: A given shape contradicts the file.

    Example:
        >>> profile_model("recogniser.onnx").batch_rows_max(16 * 2**30)  # doctest: +SKIP
        512
    """
    model = Path(path).absolute()
    chosen = options or ProfileOptions()
    digest = model_digest(model)
    weights = sum(file.stat().st_size for file in model_files(model))
    runtime = _installed_runtime() if chosen.is_run and weights <= RUN_BYTES_MAX else None
    request = {
        "shapes": {name: list(shape) for name, shape in (chosen.shapes or {}).items()},
        "values": dict(chosen.values or {}),
        "runtime": runtime,
    }
    kept = cache or ProfileCache()
    found = kept.find(digest, request) if chosen.is_cached else None
    if found is not None:
        return replace(found, name=model.stem)
    work = _Work(model, digest, request, chosen, kept)
    profile = work.profile(weights, runtime)
    # What could not be tried may work with more time or memory, or when the machine has less to do.
    if chosen.is_cached and (profile.runtime is not None or runtime is None):
        kept.keep(profile, request)
    return profile


def _installed_runtime() -> str | None:
    for name in RUNTIMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class _Work:
    def __init__(
        self,
        model: Path,
        digest: str,
        request: Mapping[str, Any],
        options: ProfileOptions,
        cache: ProfileCache,
    ) -> None:
        self._model = model
        self._digest = digest
        self._request = {"path": str(model), **request}
        self._options = options
        self._cache = cache

    def profile(self, weights: int, runtime: str | None) -> ModelProfile:
        if runtime is None:
            analysis, run, reason = self._read(weights), None, _why_not_run(self._options, weights)
        else:
            analysis, run, reason = self._try(weights)
        return _composed(self._model, self._digest, analysis, run, reason)

    def _read(self, weights: int) -> GraphAnalysis:
        copies = WEIGHT_COPIES if weights <= RUN_BYTES_MAX else 0
        limits = SandboxLimits(
            memory_bytes=self._options.read_memory_bytes + copies * weights,
            deadline_seconds=self._options.reading_seconds_max,
        )
        return load(GraphAnalysis, self._sandboxed("analyse_model", {}, limits))

    def _try(self, weights: int) -> tuple[GraphAnalysis, RunAnalysis | None, str]:
        """Read and try the model in one process; where that crashes or hangs it is only read, in another."""
        limits = SandboxLimits(
            memory_bytes=self._options.run_memory_bytes + WEIGHT_COPIES * weights,
            deadline_seconds=self._options.running_seconds_max,
        )
        with tempfile.TemporaryDirectory(prefix="sits-profile-") as folder:
            target = Path(folder) / "optimized" / "model.onnx"
            target.parent.mkdir()
            try:
                found = self._sandboxed("try_model", {"optimized": str(target)}, limits)
            except ConfigError:
                raise
            except SitsError as error:
                return self._read(weights), None, f"the model could not be tried: {error}"
            analysis = load(GraphAnalysis, found["analysis"])
            if found["run"] is None:
                return analysis, None, f"the model could not be tried: {found['reason']}"
            run = load(RunAnalysis, found["run"])
            if self._options.is_cached:
                self._cache.keep_optimized(self._digest, run.runtime, target.parent)
        return analysis, run, ""

    def _sandboxed(self, function: str, more: Mapping[str, Any], limits: SandboxLimits) -> Any:  # noqa: ANN401 - JSON
        return run_sandboxed(
            f"sits_dagster.adapters.profiling:{function}",
            {**self._request, **more},
            limits=limits,
            subject=f"Model {str(self._model)!r}",
        )


def _why_not_run(options: ProfileOptions, weights: int) -> str:
    if not options.is_run:
        return "the model was not tried: its memory plan and batching are not known"
    if weights > RUN_BYTES_MAX:
        return (
            f"the model was not tried: its {weights} bytes are more than the {RUN_BYTES_MAX} allowed for that"
        )
    return 'the model was not tried: no ONNX Runtime is installed (pip install "sits-dagster[cpu]")'


def _composed(
    model: Path, digest: str, analysis: GraphAnalysis, run: RunAnalysis | None, reason: str
) -> ModelProfile:
    batching = run.batching if run is not None else BatchingReport(input_axes=analysis.shapes.axes)
    warnings = [*analysis.warnings, *([reason] if reason else [])]
    if analysis.dynamic_quantisation:
        names = ", ".join(f"{count} × {name}" for name, count in analysis.dynamic_quantisation.items())
        warnings.append(f"dynamic quantisation scales over the whole batch: {names}")
    if batching.verdict is Batching.NOT_BATCHABLE:
        warnings.append(f"rows must not share a batch: {batching.evidence[0]}")
    elif batching.verdict is Batching.INVARIANT and analysis.dynamic_quantisation:
        evidence = "dynamic quantisation: rows of unlike range change each other's results"
        batching = replace(batching, verdict=Batching.NOT_BATCHABLE, evidence=(evidence, *batching.evidence))
    return ModelProfile(
        name=model.stem,
        digest=digest,
        inputs=tuple(_with_axis(value, batching.input_axes) for value in analysis.inputs),
        outputs=tuple(_with_axis(value, batching.output_axes) for value in analysis.outputs),
        lengths=analysis.shapes.assumed,
        input_shapes=analysis.shapes if run is None else run.shapes,
        integer_limit=0 if run is None else run.integer_limit,
        parameters=analysis.parameters,
        parameter_bytes=analysis.parameter_bytes,
        parameter_bytes_by_type=analysis.parameter_bytes_by_type,
        kernels=analysis.kernels,
        kernels_optimized=() if run is None else run.kernels_optimized,
        memory_plan=analysis.memory_plan if run is None else run.memory_plan,
        memory_source=analysis.memory_source if run is None else "optimized",
        memory_bytes_resident=0 if run is None else run.memory_bytes_resident,
        runtime=None if run is None else run.runtime,
        growth=analysis.growth,
        batch_rows_fixed=analysis.shapes.rows_fixed,
        batching=batching,
        uncosted=analysis.uncosted,
        warnings=tuple(warnings),
    )


def _with_axis(value: TensorProfile, axes: Mapping[str, int | None]) -> TensorProfile:
    return replace(value, batch_axis=axes.get(value.name, value.batch_axis))
