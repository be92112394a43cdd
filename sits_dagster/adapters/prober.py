"""Batches of a model on a device, each in a session of its own, in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.sandbox import SandboxLimits, run_sandboxed
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.calibration import Probe
from sits_dagster.models.codec import dump, load
from sits_dagster.models.profile import ModelProfile

__all__ = ["OnnxProber"]

SECONDS_PER_BATCH = 0.3
DEADLINE_SECONDS = 120.0
MEMORY_BYTES = 16 << 30


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
