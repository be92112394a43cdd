"""A profile corrected by a few batches on the real device: its memory by two of them, its time by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError
from sits_dagster.models.arena import ArenaPolicy
from sits_dagster.models.batching import Batching
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
        bytes_held: What a fresh arena held in the end, without weights; `None` where the runtime does not
            tell.
        seconds: The shortest of several calls; `None` where time was not asked for.
    """

    rows: int
    bytes_held: int | None
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

    Batches of 8 and 16 rows correct the memory; those of 1, 2, 4, … 32 rows fit the time model. Where they
    do not fit, halves of all of them are tried, and the largest two that do correct the memory. A file with
    a fixed batch is measured at that; a model whose rows must not share a batch, at one row.

    Args:
        profile: A profile whose memory plan is known.
        prober: The device.
        with_time: Whether the time model is fitted too.

    Raises:
        ConfigError: Not even a batch of one row, or the fixed one, fits.
    """
    probes = _fitting(prober, _counts(profile, with_time=with_time), is_fixed=_is_fixed(profile))
    policy = prober.policy
    wanted = [probe for probe in probes if probe.rows in MEMORY_ROWS]
    chosen = wanted if len(wanted) == len(MEMORY_ROWS) else list(probes[-len(MEMORY_ROWS) :])
    memory = [(probe.rows, probe.bytes_held) for probe in chosen if probe.bytes_held is not None]
    timed = [
        TimeProbe(rows=probe.rows, seconds=probe.seconds) for probe in probes if probe.seconds is not None
    ]
    # What was timed is the graph that ONNX Runtime made of the file: fused calls are launched once.
    kernels = profile.kernels_optimized or profile.kernels
    return replace(
        profile,
        calibration=Calibration(
            probes=dict(memory),
            correction=_correction(profile, memory, policy),
            device=prober.device,
            strategy=policy.strategy,
        ),
        time_model=fit_time_model(kernels, timed) if timed else profile.time_model,
    )


def _is_fixed(profile: ModelProfile) -> bool:
    return profile.batch_rows_fixed is not None or profile.batching.verdict is Batching.NOT_BATCHABLE


def _counts(profile: ModelProfile, *, with_time: bool) -> tuple[int, ...]:
    if _is_fixed(profile):
        return (profile.batch_rows_fixed or 1,)
    return tuple(sorted({*MEMORY_ROWS, *(PROBE_ROWS if with_time else ())}))


def _fitting(prober: Prober, counts: tuple[int, ...], *, is_fixed: bool) -> Sequence[Probe]:
    least = counts[0] if is_fixed else 1
    while counts:
        try:
            return prober.probe(counts)
        except DeviceOutOfMemoryError:
            counts = () if is_fixed else tuple(sorted({rows // 2 for rows in counts if rows > 1}))
    rows = "one row" if least == 1 else f"{least} rows"
    msg = f"Not even a batch of {rows} fits on {prober.device}."
    raise ConfigError(msg, hint="use a device with more memory, or a smaller model.")


def _correction(profile: ModelProfile, probes: Sequence[tuple[int, int]], policy: ArenaPolicy) -> Linear:
    """Return what the arena held beyond the replay: a line through two probes, a constant of one."""
    if not probes:
        return Linear(0.0, 0.0)
    beyond = [_beyond(profile, rows, held, policy) for rows, held in probes]
    return Linear.of([rows for rows, _ in probes], beyond)


def _beyond(profile: ModelProfile, rows: int, held: int, policy: ArenaPolicy) -> int:
    use = profile.memory_plan.use(rows, policy)
    return 0 if use is None else held - use.bytes_held
