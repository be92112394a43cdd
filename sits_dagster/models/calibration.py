"""A profile corrected by a few batches on the real device: memory by two, time by four."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError
from sits_dagster.models.arena import ArenaPolicy
from sits_dagster.models.linear import Linear
from sits_dagster.models.profile import Calibration, ModelProfile
from sits_dagster.models.timing import PROBE_ROWS, TimeProbe, fit_time_model

__all__ = ["MEMORY_ROWS", "Probe", "Prober", "calibrate"]

# One row tells nothing: the arena's first region and the kernels are others than those of a batch.
MEMORY_ROWS = (8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One measured batch.

    Args:
        rows: Its rows.
        bytes_held: What a fresh arena held in the end, without weights.
        seconds: The shortest of several calls; `None` where time was not asked for.
    """

    rows: int
    bytes_held: int
    seconds: float | None


class Prober(Protocol):
    """Runs made-up batches of a model on a device, each on an arena of its own."""

    @property
    def device(self) -> str:
        """The device's name."""
        ...

    @property
    def policy(self) -> ArenaPolicy:
        """How the device's arena grows."""
        ...

    def probe(self, rows: Sequence[int]) -> Sequence[Probe]:
        """Return what each batch took.

        Raises:
            DeviceOutOfMemoryError: A batch did not fit.
            ModelError: The model refuses a batch.
        """
        ...


def calibrate(profile: ModelProfile, prober: Prober, *, with_time: bool = True) -> ModelProfile:
    """Return the profile with what probes on the device add: held memory, and how long a batch takes.

    Two batches correct the memory. Where they do not fit, halves of them are tried. Four batches fit the
    time model. A file with a fixed batch is measured at that.

    Args:
        profile: A profile whose memory plan is known.
        prober: The device.
        with_time: Whether the time model is fitted too.

    Raises:
        ConfigError: Not even batches of one and two rows fit.
    """
    if profile.batch_rows_fixed is not None:
        counts: tuple[int, ...] = (profile.batch_rows_fixed,)
    else:
        counts = tuple(sorted({*MEMORY_ROWS, *(PROBE_ROWS if with_time else ())}))
    probes = _fitting(prober, counts)
    policy = prober.policy
    memory = [probe for probe in probes if probe.rows in MEMORY_ROWS] or list(probes)
    corrections = [(probe.rows, _beyond(profile, probe, policy)) for probe in memory[-2:]]
    timed = [
        TimeProbe(rows=probe.rows, seconds=probe.seconds) for probe in probes if probe.seconds is not None
    ]
    return replace(
        profile,
        calibration=Calibration(
            probes={probe.rows: probe.bytes_held for probe in memory},
            correction=_line(corrections),
            device=prober.device,
        ),
        time_model=fit_time_model(profile.kernels, timed) if timed else profile.time_model,
    )


def _fitting(prober: Prober, counts: tuple[int, ...]) -> Sequence[Probe]:
    while counts:
        try:
            return prober.probe(counts)
        except DeviceOutOfMemoryError:
            counts = tuple(sorted({rows // 2 for rows in counts if rows > 1}))
    msg = f"Not even a batch of one row fits on {prober.device}."
    raise ConfigError(msg, hint="use a device with more memory, or a smaller model.")


def _beyond(profile: ModelProfile, probe: Probe, policy: ArenaPolicy) -> int:
    use = profile.memory_plan.use(probe.rows, policy)
    return 0 if use is None else probe.bytes_held - use.bytes_held


def _line(points: Sequence[tuple[int, int]]) -> Linear:
    if len(points) == 1:
        return Linear(float(points[0][1]), 0.0)
    (first, low), (second, high) = points
    return Linear.through((first, second), (float(low), float(high)))
