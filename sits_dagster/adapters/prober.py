"""Batches of a model on a device, each in a session of its own, in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.profiler import ProfileOptions, cache_request, profile_model, why_untried
from sits_dagster.adapters.sandbox import SandboxLimits, run_sandboxed
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError
from sits_dagster.models.arena import CARD_STRATEGY, ArenaPolicy, ExtendStrategy
from sits_dagster.models.calibration import Probe, calibrate
from sits_dagster.models.codec import dump, load
from sits_dagster.models.profile import ModelProfile

__all__ = ["OnnxProber", "calibrate_model"]

SECONDS_PER_BATCH = 0.3
DEADLINE_SECONDS_MIN, DEADLINE_SECONDS_MAX = 120.0, 1800.0
MEMORY_BYTES_MIN, MEMORY_BYTES_MAX = 4 << 30, 64 << 30
WEIGHT_COPIES = 4  # of two sessions, and while the file is optimised
ARENA_COPIES = 4  # of two sessions, each of which may hold as much again when it grows
# What a slow core, memory and disk do; how often a batch is run, and a model loaded beyond once a batch.
SLOW_FLOPS_PER_SECOND = 1e9
SLOW_BYTES_PER_SECOND = 1e9
SLOW_DISK_BYTES_PER_SECOND = 1e8
CALLS = 4
LOADS = 3


def calibrate_model(
    path: str | Path,
    device: Device,
    options: ProfileOptions | None = None,
    *,
    cache: ProfileCache | None = None,
) -> ModelProfile:
    """Return the model's profile, corrected by a few batches on the device; the second time from the cache.

    Args:
        path: The `.onnx` file.
        device: Where it will run. Hold its lease meanwhile: other work there changes the times.
        options: How to profile; the defaults if left out.
        cache: Where profiles are kept; the user's cache folder if left out.

    Raises:
        ModelError: The file is broken, or a batch fails.
        ConfigError: The model could not be tried, or not even one row fits on the device.
        TransientError: No process could be started, or somebody ended it.

    Example:
        >>> device = GpuPoolResource().devices()[0]  # doctest: +SKIP
        >>> calibrate_model("recogniser.onnx", device).calibration  # doctest: +SKIP
    """
    chosen, kept = options or ProfileOptions(), cache or ProfileCache()
    profile = profile_model(path, chosen, cache=kept)
    runtime = None if profile.runtime is None else dump(profile.runtime)
    request = {**cache_request(chosen, runtime), "device": device.name}
    found = kept.find(profile.digest, request) if chosen.is_cached else None
    if found is not None:
        return replace(found, name=profile.name)
    calibrated = calibrate(profile, OnnxProber(path, profile, device, values=chosen.values, cache=kept))
    if chosen.is_cached:
        kept.keep(calibrated, request)
    return calibrated


class OnnxProber:
    """Runs batches of made-up rows, as the profile's own trial made them.

    Args:
        model: The `.onnx` file of the profile.
        profile: One whose model was tried.
        device: Where to run.
        values: Numbers that inputs are filled with, as for the profile.
        cache: Where the optimised graph is; the user's cache folder if left out.
        seconds_per_batch: How long the calls of a batch are repeated for their time; 0 measures none.

    Raises:
        ConfigError: The profile's model was not tried.
    """

    def __init__(
        self,
        model: str | Path,
        profile: ModelProfile,
        device: Device,
        *,
        values: Mapping[str, float] | None = None,
        cache: ProfileCache | None = None,
        seconds_per_batch: float = SECONDS_PER_BATCH,
    ) -> None:
        if profile.runtime is None:
            msg = f"Model {profile.name!r} cannot be measured: {why_untried(profile)}."
            raise ConfigError(msg, hint="mend that and profile the model again; it must be tried for this.")
        self._profile = profile
        self._runtime = profile.runtime
        self._device = device
        self._path = Path(model).absolute()
        self._cache = cache or ProfileCache()
        self._values = values
        self._seconds = seconds_per_batch

    @property
    def device(self) -> str:
        """The device's name."""
        return self._device.name

    @property
    def policy(self) -> ArenaPolicy:
        """How the arena of the engine grows on this device, without a limit."""
        is_cpu = self._device.kind is DeviceKind.CPU
        return ArenaPolicy(strategy=ExtendStrategy.NEXT_POWER_OF_TWO if is_cpu else CARD_STRATEGY)

    def probe(self, rows: Sequence[int]) -> Sequence[Probe]:
        """Return what each batch took.

        Raises:
            DeviceOutOfMemoryError: A batch did not fit.
            ModelError: The model refuses a batch, or it took too long.
        """
        kept = self._cache.optimized(self._profile.digest, self._runtime)
        found = run_sandboxed(
            "sits_dagster.adapters.profiling:probe_model",
            {
                "path": str(self._path),
                "optimized": None if kept is None else str(kept),
                "device": dump(self._device),
                "input_shapes": dump(self._profile.input_shapes),
                "integer_limit": self._profile.integer_limit,
                "values": dict(self._values or {}),
                "rows": list(rows),
                "seconds_max": self._seconds,
            },
            limits=_limits(self._profile, rows, self._seconds),
            subject=f"Model {self._profile.name!r}",
        )
        if found["is_damaged"]:
            self._cache.drop_optimized(self._profile.digest, self._runtime)
        return [load(Probe, item) for item in found["probes"]]


def _limits(profile: ModelProfile, rows: Sequence[int], seconds_per_batch: float) -> SandboxLimits:
    """Return what probing may use: what the weights and the batches ask for, generously, between two ends."""
    weights = max(profile.file_bytes, profile.parameter_bytes)
    held = profile.held(max(rows), ArenaPolicy()) or 0
    memory = MEMORY_BYTES_MIN + WEIGHT_COPIES * weights + ARENA_COPIES * held
    work = sum(profile.flops(count) / SLOW_FLOPS_PER_SECOND for count in rows)
    work += sum(profile.bytes_moved(count) / SLOW_BYTES_PER_SECOND for count in rows)
    loading = (len(rows) + LOADS) * weights / SLOW_DISK_BYTES_PER_SECOND
    seconds = DEADLINE_SECONDS_MIN + CALLS * work + len(rows) * seconds_per_batch + loading
    return SandboxLimits(
        memory_bytes=min(MEMORY_BYTES_MAX, memory), deadline_seconds=min(DEADLINE_SECONDS_MAX, seconds)
    )
