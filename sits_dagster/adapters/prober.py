"""Batches of a model on a device, each in a session of its own, in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.adapters.sandbox import SandboxLimits, run_sandboxed
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.calibration import Probe, calibrate
from sits_dagster.models.codec import dump, load
from sits_dagster.models.profile import ModelProfile

__all__ = ["OnnxProber", "calibrate_model"]

SECONDS_PER_BATCH = 0.3
DEADLINE_SECONDS = 120.0
MEMORY_BYTES = 16 << 30


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
        ConfigError: No ONNX Runtime is installed, or not even one row fits on the device.
    """
    chosen, kept = options or ProfileOptions(), cache or ProfileCache()
    profile = profile_model(path, chosen, cache=kept)
    request = {
        "device": device.name,
        "shapes": {name: list(shape) for name, shape in (chosen.shapes or {}).items()},
        "values": dict(chosen.values or {}),
        "runtime": None if profile.runtime is None else dump(profile.runtime),
    }
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
            msg = f"The model of profile {profile.name!r} was not tried, so it cannot be measured."
            raise ConfigError(msg, hint="profile it with an ONNX Runtime installed.")
        self._profile = profile
        self._device = device
        kept = cache or ProfileCache()
        self._path = kept.optimized(profile.digest, profile.runtime) or Path(model).absolute()
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
        return ArenaPolicy(
            strategy=ExtendStrategy.NEXT_POWER_OF_TWO if is_cpu else ExtendStrategy.SAME_AS_REQUESTED
        )

    def probe(self, rows: Sequence[int]) -> Sequence[Probe]:
        """Return what each batch took.

        Raises:
            DeviceOutOfMemoryError: A batch did not fit.
            ModelError: The model refuses a batch, or it took too long.
        """
        found = run_sandboxed(
            "sits_dagster.adapters.profiling:probe_model",
            {
                "path": str(self._path),
                "device": dump(self._device),
                "input_shapes": dump(self._profile.input_shapes),
                "integer_limit": self._profile.integer_limit,
                "values": dict(self._values or {}),
                "rows": list(rows),
                "seconds_max": self._seconds,
            },
            limits=SandboxLimits(memory_bytes=MEMORY_BYTES, deadline_seconds=DEADLINE_SECONDS),
            subject=f"Model {self._profile.name!r}",
        )
        return [load(Probe, item) for item in found]
