"""What limits a batch on a device: the memory's effective bandwidth, arithmetic, or gaps between kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from sits_dagster.errors import ConfigError
from sits_dagster.models.cost import KernelCost

__all__ = [
    "BANDWIDTH_PRESETS",
    "LAUNCH_GAP_NANOSECONDS_MIN",
    "QUEUE_DEPTH_MAX",
    "BandwidthPreset",
    "Bound",
    "arithmetic_intensity",
    "constraint_violations",
    "effective_bandwidth",
    "io_bound_ratio",
    "roofline_bound",
    "roofline_seconds",
]

LAUNCH_GAP_NANOSECONDS_MIN: Final = 12.0
"""The shortest gap between two kernels that the article allows (its section 2.2), in nanoseconds."""

QUEUE_DEPTH_MAX: Final = 32
"""The most requests that may wait at the device's memory, by the same section."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthPreset:
    """Two constants of `effective_bandwidth` for one device.

    Args:
        bandwidth_bytes_per_second: B_peak.
        gap_sensitivity_per_nanosecond: β.
    """

    bandwidth_bytes_per_second: float
    gap_sensitivity_per_nanosecond: float


BANDWIDTH_PRESETS: Final[Mapping[str, BandwidthPreset]] = {
    "a100-40gb": BandwidthPreset(bandwidth_bytes_per_second=2039e9, gap_sensitivity_per_nanosecond=0.87)
}
"""The article's constants (section 2.2), as printed.

2039 GB/s is what the manufacturer states for the A100 with 80 GB; its card with 40 GB has 1555 GB/s,
see `hardware.DEVICES`. With β = 0.87/ns the shortest gap allowed, 12 ns, leaves 8.7 % of the peak, while
the article's own table of gaps and throughputs would want a β near 0.01/ns: measure before relying on it.
"""


def effective_bandwidth(
    peak_bytes_per_second: float,
    *,
    contention: float = 0.0,
    gap_sensitivity_per_nanosecond: float = 0.0,
    gap_nanoseconds: float = 0.0,
) -> float:
    """Return the bandwidth left by contention and by gaps between kernels, in bytes per second.

    B_eff = B_peak·(1 − α) / (1 + β·T_gap), the article's section 2.2.

    Args:
        peak_bytes_per_second: B_peak, > 0.
        contention: α, the share of the time that others hold the memory controller, in [0, 1).
        gap_sensitivity_per_nanosecond: β, >= 0.
        gap_nanoseconds: T_gap, the idle time between two kernels, >= 0.

    Raises:
        ConfigError: An argument is out of its range.
    """
    require("peak_bytes_per_second", peak_bytes_per_second, holds=peak_bytes_per_second > 0, expected="> 0")
    require("contention", contention, holds=0 <= contention < 1, expected="in [0, 1)")
    beta = gap_sensitivity_per_nanosecond
    require("gap_sensitivity_per_nanosecond", beta, holds=beta >= 0, expected=">= 0")
    require("gap_nanoseconds", gap_nanoseconds, holds=gap_nanoseconds >= 0, expected=">= 0")
    return peak_bytes_per_second * (1 - contention) / (1 + beta * gap_nanoseconds)


def constraint_violations(gap_nanoseconds: float, queue_depth: int) -> tuple[str, ...]:
    """Return a sentence for each of the article's two constraints that does not hold, or nothing.

    Args:
        gap_nanoseconds: Idle time between two kernels.
        queue_depth: Requests that wait at the device's memory.
    """
    found: list[str] = []
    if gap_nanoseconds < LAUNCH_GAP_NANOSECONDS_MIN:
        found.append(
            f"Kernels follow each other after {gap_nanoseconds:g} ns, less than "
            f"{LAUNCH_GAP_NANOSECONDS_MIN:g} ns: the scheduler reloads its resources."
        )
    if queue_depth > QUEUE_DEPTH_MAX:
        found.append(
            f"{queue_depth} requests wait at the memory, more than {QUEUE_DEPTH_MAX}: banks conflict."
        )
    return tuple(found)


class Bound(StrEnum):
    """What most of a batch's time goes to."""

    MEMORY = "memory"
    COMPUTE = "compute"
    LAUNCH = "launch"


def roofline_seconds(
    kernels: Sequence[KernelCost],
    rows: float,
    *,
    flops_per_second: float,
    bandwidth_bytes_per_second: float,
    launch_seconds: float = 0.0,
) -> float:
    """Return how long a batch takes if each kernel waits for arithmetic or for memory, whichever is slower.

    Sum over the kernels of max(flops / peak, bytes / B_eff) + launch gap (Williams, Waterman and
    Patterson, "Roofline", 2009, for the max).

    Args:
        kernels: The model's kernels; they run one after the other.
        rows: Rows of the batch, >= 0.
        flops_per_second: Peak arithmetic, > 0.
        bandwidth_bytes_per_second: Bandwidth, peak or from `effective_bandwidth`, > 0.
        launch_seconds: The gap before each kernel, >= 0.

    Raises:
        ConfigError: An argument is out of its range.
    """
    compute, memory = _seconds(kernels, rows, flops_per_second, bandwidth_bytes_per_second)
    require("launch_seconds", launch_seconds, holds=launch_seconds >= 0, expected=">= 0")
    return float(np.maximum(compute, memory).sum()) + launch_seconds * len(kernels)


def io_bound_ratio(
    kernels: Sequence[KernelCost],
    rows: float,
    *,
    flops_per_second: float,
    bandwidth_bytes_per_second: float,
    launch_seconds: float = 0.0,
) -> float:
    """Return in which share of a batch's time the memory is busy, 0 to 1; 0 for a model without kernels.

    Time to move all bytes ÷ `roofline_seconds`, the gaps before the kernels included. Arguments and errors
    as of that.
    """
    _, memory = _seconds(kernels, rows, flops_per_second, bandwidth_bytes_per_second)
    total = roofline_seconds(
        kernels,
        rows,
        flops_per_second=flops_per_second,
        bandwidth_bytes_per_second=bandwidth_bytes_per_second,
        launch_seconds=launch_seconds,
    )
    return min(1.0, float(memory.sum()) / total) if total else 0.0


def arithmetic_intensity(kernels: Sequence[KernelCost], rows: float) -> float:
    """Return the operations per byte moved of a whole batch; infinite if nothing is moved.

    Args:
        kernels: The model's kernels.
        rows: Rows of the batch, >= 0.

    Raises:
        ConfigError: `rows` is negative.
    """
    flops, moved = _seconds(kernels, rows, 1.0, 1.0)
    return float(flops.sum() / moved.sum()) if moved.sum() else math.inf


def roofline_bound(
    kernels: Sequence[KernelCost],
    rows: float,
    *,
    flops_per_second: float,
    bandwidth_bytes_per_second: float,
    launch_seconds: float = 0.0,
) -> Bound:
    """Return what most of the time of `roofline_seconds` goes to.

    The time of a kernel counts for what limits it, memory or arithmetic; the gaps count for themselves.
    Arguments and errors as of `roofline_seconds`.
    """
    compute, memory = _seconds(kernels, rows, flops_per_second, bandwidth_bytes_per_second)
    require("launch_seconds", launch_seconds, holds=launch_seconds >= 0, expected=">= 0")
    waits = memory >= compute
    seconds = {
        Bound.MEMORY: float(memory[waits].sum()),
        Bound.COMPUTE: float(compute[~waits].sum()),
        Bound.LAUNCH: launch_seconds * len(kernels),
    }
    return max(seconds, key=seconds.__getitem__)


def _seconds(
    kernels: Sequence[KernelCost], rows: float, flops_per_second: float, bandwidth_bytes_per_second: float
) -> tuple[Floats, Floats]:
    require("rows", rows, holds=rows >= 0, expected=">= 0")
    require("flops_per_second", flops_per_second, holds=flops_per_second > 0, expected="> 0")
    require(
        "bandwidth_bytes_per_second",
        bandwidth_bytes_per_second,
        holds=bandwidth_bytes_per_second > 0,
        expected="> 0",
    )
    compute = np.array([kernel.flops(rows) for kernel in kernels], dtype=np.float64) / flops_per_second
    memory = np.array([kernel.bytes_moved(rows) for kernel in kernels], dtype=np.float64)
    return compute, memory / bandwidth_bytes_per_second


def require(what: str, value: float, *, holds: bool, expected: str) -> None:
    """Raise a `ConfigError` that names an argument out of its range, unless the condition holds."""
    if not holds:
        msg = f"{what} must be {expected}, got {value!r}."
        raise ConfigError(msg)
