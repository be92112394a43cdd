"""A model's profile: read in one sandbox, tried in another, put together, and kept for the next time."""

from __future__ import annotations

import importlib.metadata
import operator
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sits_dagster.adapters.onnx_engine import DISTRIBUTIONS
from sits_dagster.adapters.onnx_trace import cpu_name
from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.sandbox import SandboxLimits, run_sandboxed
from sits_dagster.errors import ConfigError, InvariantError, SitsError, TransientError
from sits_dagster.models.analysis import GraphAnalysis
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.codec import load
from sits_dagster.models.inputs import GivenShapes
from sits_dagster.models.model import files_bytes, files_digest, model_files
from sits_dagster.models.profile import ModelProfile, TensorProfile
from sits_dagster.models.run_analysis import RunAnalysis

__all__ = ["ProfileOptions", "cache_request", "profile_model", "why_untried"]

READING_SECONDS_MAX = 10.0
RUNNING_SECONDS_MAX = 30.0
# A larger model is only read: trying it would load all its weights.
RUN_BYTES_MAX = 1 << 30
RUN_MEMORY_BYTES = 4 << 30
READ_MEMORY_BYTES = 1 << 30
WEIGHT_COPIES = 4  # while a model is optimised and saved
READERS = ("sits-dagster", "onnx", "onnx-shape-inference")  # what is found in a file depends on them
NOT_TRIED = "the model was not tried"
NOT_TRIABLE = "the model could not be tried"


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

    def __post_init__(self) -> None:
        # NumPy's numbers are no JSON, which the cache and the child processes need.
        for name, plain in (("shapes", _plain_shape), ("values", _plain_number)):
            given: Mapping[str, Any] | None = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, {str(key): plain(key, value) for key, value in given.items()})


def _plain_shape(name: str, shape: Any) -> tuple[int | str, ...]:  # noqa: ANN401 - what a user gave
    try:
        return tuple(str(axis) if isinstance(axis, str) else operator.index(axis) for axis in shape)
    except TypeError as error:
        msg = f"The shape of input {name!r} is {shape!r}; it must be lengths, and names of axes."
        raise ConfigError(msg, hint='such as {"x": ("rows", 3, 48, 320)}.') from error


def _plain_number(name: str, number: Any) -> float:  # noqa: ANN401 - what a user gave
    with suppress(TypeError):
        return int(operator.index(number))
    if not isinstance(number, str | bytes):
        with suppress(TypeError, ValueError, OverflowError):
            return float(number)
    msg = f"The value of input {name!r} is {number!r}; it must be a number."
    raise ConfigError(msg, hint='such as {"sample_rate": 16000}.')


def profile_model(
    path: str | Path, options: ProfileOptions | None = None, *, cache: ProfileCache | None = None
) -> ModelProfile:
    """Return what a model costs, before it runs; the second time from the cache.

    The file is read and the model tried in child processes with limits, so that a broken or hostile one
    cannot harm this process. Where weights may lie beside the file, one is started even for a profile that is
    in the cache: it reads which files these are.

    Args:
        path: The `.onnx` file.
        options: How to profile; the defaults if left out.
        cache: Where profiles are kept; the user's cache folder if left out.

    Raises:
        ModelError: The file is missing, broken, or needs more time or memory to read than allowed.
        ConfigError: A given shape contradicts the file.
        TransientError: No process could be started, or somebody ended it.

    Example:
        >>> profile_model("recogniser.onnx").batch_rows_max(16 * 2**30)  # doctest: +SKIP
        512
    """
    model = Path(path).absolute()
    chosen = options or ProfileOptions()
    kept = cache or ProfileCache()
    work = _Work(model, chosen, kept)
    files = model_files(model, work.list_files)
    digest, size = files_digest(files), files_bytes(files)
    runtime = _installed_runtime() if chosen.is_run and size <= RUN_BYTES_MAX else None
    request = cache_request(chosen, runtime)
    found = kept.find(digest, request) if chosen.is_cached else None
    if found is not None:
        return replace(found, name=model.stem)
    profile = work.profile(digest, size, runtime)
    # What could not be tried may work with more time or memory, or when the machine has less to do.
    if chosen.is_cached and (profile.runtime is not None or runtime is None):
        kept.keep(profile, request)
    return profile


def cache_request(options: ProfileOptions, runtime: object) -> dict[str, Any]:
    """Return what a kept profile depends on beyond the model's bytes, as JSON values.

    Args:
        options: How the model is profiled.
        runtime: What names the ONNX Runtime that tries the model; `None` where it is only read.
    """
    return {
        "shapes": {name: list(shape) for name, shape in (options.shapes or {}).items()},
        "values": dict(options.values or {}),
        "runtime": runtime,
        "cpu": cpu_name(),
        "versions": list(map(_version, READERS)),
    }


def why_untried(profile: ModelProfile) -> str:
    """Return why a profile's model was not tried, as its warnings say."""
    told = (text for text in profile.warnings if text.startswith((NOT_TRIED, NOT_TRIABLE)))
    return next(told, NOT_TRIED)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_runtime() -> str | None:
    return next((version for version in map(_version, DISTRIBUTIONS) if version is not None), None)


class _Work:
    def __init__(self, model: Path, options: ProfileOptions, cache: ProfileCache) -> None:
        self._model = model
        self._options = options
        self._cache = cache

    def list_files(self, model: Path) -> Sequence[Path]:
        """Return the model's external data files, as a child process that reads the file says."""
        return [Path(name) for name in self._sandboxed("list_files", {}, self._reading(files_bytes([model])))]

    def profile(self, digest: str, size: int, runtime: str | None) -> ModelProfile:
        if runtime is None:
            analysis, run, reason = self._read(size), None, _why_not_run(self._options, size)
        else:
            analysis, run, reason = self._try(digest, size)
        profile = _composed(analysis, run, reason)
        return replace(profile, name=self._model.stem, digest=digest, file_bytes=size)

    def _reading(self, size: int) -> SandboxLimits:
        copies = WEIGHT_COPIES if size <= RUN_BYTES_MAX else 0
        return SandboxLimits(
            memory_bytes=self._options.read_memory_bytes + copies * size,
            deadline_seconds=self._options.reading_seconds_max,
        )

    def _read(self, size: int) -> GraphAnalysis:
        return load(GraphAnalysis, self._sandboxed("analyse_model", {}, self._reading(size)))

    def _try(self, digest: str, size: int) -> tuple[GraphAnalysis, RunAnalysis | None, str]:
        """Read and try the model in one process; where that crashes or hangs it is only read, in another."""
        limits = SandboxLimits(
            memory_bytes=self._options.run_memory_bytes + WEIGHT_COPIES * size,
            deadline_seconds=self._options.running_seconds_max,
        )
        with tempfile.TemporaryDirectory(prefix="sits-profile-") as folder:
            target = Path(folder) / "optimized" / "model.onnx"
            target.parent.mkdir()
            try:
                found = self._sandboxed("try_model", {"optimized": str(target)}, limits)
            except (ConfigError, InvariantError, TransientError):
                raise
            except SitsError as error:
                return self._read(size), None, f"{NOT_TRIABLE}: {error}"
            analysis = load(GraphAnalysis, found["analysis"])
            if found["run"] is None:
                return analysis, None, f"{NOT_TRIABLE}: {found['reason']}"
            run = load(RunAnalysis, found["run"])
            if self._options.is_cached:
                self._cache.keep_optimized(digest, run.runtime, target.parent)
        return analysis, run, ""

    def _sandboxed(self, function: str, more: Mapping[str, Any], limits: SandboxLimits) -> Any:  # noqa: ANN401 - JSON
        request = {
            "path": str(self._model),
            "shapes": {name: list(shape) for name, shape in (self._options.shapes or {}).items()},
            "values": dict(self._options.values or {}),
        }
        return run_sandboxed(
            f"sits_dagster.adapters.profiling:{function}",
            {**request, **more},
            limits=limits,
            subject=f"Model {str(self._model)!r}",
        )


def _why_not_run(options: ProfileOptions, size: int) -> str:
    if not options.is_run:
        return f"{NOT_TRIED}: its memory plan and batching are not known"
    if size > RUN_BYTES_MAX:
        return f"{NOT_TRIED}: its {size} bytes are more than the {RUN_BYTES_MAX} allowed for that"
    return f'{NOT_TRIED}: no ONNX Runtime is installed (pip install "sits-dagster[cpu]")'


def _composed(analysis: GraphAnalysis, run: RunAnalysis | None, reason: str) -> ModelProfile:
    batching = run.batching if run is not None else BatchingReport(input_axes=analysis.shapes.axes)
    warnings = [*analysis.warnings, *([reason] if reason else [])]
    if analysis.dynamic_quantisation:
        names = ", ".join(f"{count} × {name}" for name, count in analysis.dynamic_quantisation.items())
        warnings.append(f"dynamic quantisation scales over the whole batch: {names}")
        if batching.verdict in (Batching.INVARIANT, Batching.MASK_REQUIRED):
            evidence = "dynamic quantisation: rows of unlike range change each other's results"
            batching = replace(
                batching, verdict=Batching.NOT_BATCHABLE, evidence=(evidence, *batching.evidence)
            )
    if batching.verdict is Batching.NOT_BATCHABLE:
        warnings.append(f"rows must not share a batch: {batching.evidence[0]}")
    return ModelProfile(
        name="",
        digest="",
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
