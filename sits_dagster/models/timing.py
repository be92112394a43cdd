"""How long a batch of any size takes: a roofline with a cache, fitted to a few measured batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sits_dagster.models.cost import KernelCost
from sits_dagster.models.roofline import LAUNCH_GAP_NANOSECONDS_MIN, effective_bandwidth, require

__all__ = [
    "PROBE_ROWS",
    "KernelGroup",
    "TimeModel",
    "TimeProbe",
    "bandwidth_contention",
    "fit_time_model",
]

PROBE_ROWS: Final = (1, 2, 4, 8, 16, 32)
"""The batches worth measuring: every octave up to where caches have overflowed on the models that were tried.

Of sets of three and four the ones with a single row predicted best; each octave that is left out costs a
few percent in the worst case.
"""

GROUPS_MAX: Final = 256  # kernels of like cost are one group: a fit takes the same time for any graph
KEY_WEIGHTS: Final = 4096.0 ** np.arange(4)  # four logarithms in one number, which is quick to sort
RATE_MAX: Final = 1e18  # per second; stands for "takes no time"
RIDGE_FLOPS_PER_BYTE: Final = 8.0  # of a CPU core; a guess that three probes outweigh, on a GPU too
# What a fit pays, as relative error, per e-fold of a departure from the plain roofline.
PENALTY_CACHE: Final = 0.005
PENALTY_RIDGE: Final = 0.001
PROBES_FOR_CACHE_MIN: Final = 3
RIDGES: Final = np.exp2(np.arange(-6.0, 7.0))
SLOWDOWNS: Final = np.array([1.0, 1.5, 2.0, 3.0, 5.0, 8.0])
CACHES: Final = np.exp2(np.arange(17.0, 28.0))
REFINEMENT_FACTOR_MIN: Final = 1.02
ROWS_EXACT_MAX: Final = 4096
ROWS_AT_ONCE: Final = 512  # bounds the memory of a prediction

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGroup:
    """Kernels of like cost, described by their mean.

    Args:
        kernels: How many there are, >= 1.
        flops: Operations of one of them that do not depend on the rows, >= 0.
        flops_per_row: Operations that each row adds, >= 0.
        bytes_moved: Bytes that do not depend on the rows, >= 0: the weights, mostly.
        bytes_moved_per_row: Bytes that each row adds, >= 0.
    """

    kernels: int
    flops: float
    flops_per_row: float
    bytes_moved: float
    bytes_moved_per_row: float


class _Costs(NamedTuple):
    """One row a kernel or group: how many, and `a + b·rows` of the operations and of the bytes."""

    kernels: Floats
    flops: Floats
    bytes_moved: Floats

    def at(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return operations and bytes, shape (groups, rows)."""
        flops, moved = (ab[:, :1] + ab[:, 1:] * rows for ab in self[1:])
        return flops, moved


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeProbe:
    """One measured batch.

    Args:
        rows: Its rows, >= 1.
        seconds: How long it took, > 0; the minimum of several runs says more than their mean.
    """

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Predicts the time of a batch of any size: never negative, never falling with the rows.

    A roofline whose bandwidth depends on the kernel: with M bytes moved, a byte takes 1/B_cache +
    (1/B_memory − 1/B_cache)·M²/(M² + C²) seconds, so that small kernels run at the cache's bandwidth and
    large ones at the memory's. Where both are equal it is the plain roofline of `roofline_seconds`.

    Args:
        kernels: The model's kernels, those of like cost together.
        launch_seconds: The gap before each kernel, >= 0.
        flops_per_second: Arithmetic that the model reaches, > 0; `1e18` if no probe showed a limit.
        bandwidth_bytes_per_second: B_memory, > 0; likewise.
        bandwidth_bytes_per_second_cached: B_cache, >= B_memory.
        cache_bytes: C, the bytes at which half of the difference is felt; 0 if both are equal.
        rows_measured: The batches it was fitted to, ascending. Far above the last one it is a guess.
        error_relative: Root mean square of predicted ÷ measured − 1 over those batches.
    """

    kernels: tuple[KernelGroup, ...]
    launch_seconds: float
    flops_per_second: float
    bandwidth_bytes_per_second: float
    bandwidth_bytes_per_second_cached: float
    cache_bytes: float
    rows_measured: tuple[int, ...]
    error_relative: float

    def seconds(self, rows: float) -> float:
        """Return how long a batch of `rows` takes; a batch without rows still launches its kernels.

        Raises:
            ConfigError: `rows` is negative.
        """
        require("rows", rows, holds=rows >= 0, expected=">= 0")
        return float(self._seconds(np.array([rows], dtype=np.float64))[0])

    def batch_rows_flat(self, share: float = 0.95, *, rows_max: int) -> int:
        """Return the smallest batch that reaches `share` of the best throughput of 1 to `rows_max` rows.

        Throughput need not rise with the batch: where caches overflow the best batch is a small one.
        Exact up to 4,096 rows, to the next hundredth of the batch above.

        Args:
            share: Of the rows per second of the best batch, in (0, 1].
            rows_max: The largest batch that may be used, >= 1.

        Raises:
            ConfigError: An argument is out of its range.
        """
        require("share", share, holds=0 < share <= 1, expected="in (0, 1]")
        require("rows_max", rows_max, holds=rows_max >= 1, expected=">= 1")
        rows = np.arange(1, min(rows_max, ROWS_EXACT_MAX) + 1, dtype=np.float64)
        if rows_max > ROWS_EXACT_MAX:
            steps = math.ceil(100 * math.log(rows_max / ROWS_EXACT_MAX)) + 1
            rows = np.concatenate([rows, np.geomspace(ROWS_EXACT_MAX, rows_max, steps).round()])
        rates = rows / np.concatenate(
            [self._seconds(part) for part in np.array_split(rows, len(rows) // 512 + 1)]
        )
        return int(rows[np.argmax(rates >= share * rates.max() * (1 - 1e-12))])

    def _seconds(self, rows: Floats) -> Floats:
        costs = _Costs(
            np.array([group.kernels for group in self.kernels], dtype=np.float64),
            np.array([(group.flops, group.flops_per_row) for group in self.kernels]),
            np.array([(group.bytes_moved, group.bytes_moved_per_row) for group in self.kernels]),
        )
        flops, moved = costs.at(rows)
        compute = flops / self.flops_per_second
        slow = 1 / self.bandwidth_bytes_per_second - 1 / self.bandwidth_bytes_per_second_cached
        memory = moved * (
            1 / self.bandwidth_bytes_per_second_cached + slow * _missed(moved, self.cache_bytes)
        )
        return costs.kernels @ (np.maximum(compute, memory) + self.launch_seconds)


class _Shape(NamedTuple):
    """The non-linear parameters of candidates: arrays of one length, or single numbers."""

    ridge: Floats  # flops per byte: arithmetic rate ÷ cache bandwidth
    slowdown: Floats  # cache bandwidth ÷ memory bandwidth, >= 1
    cache_bytes: Floats


def fit_time_model(
    kernels: Sequence[KernelCost],
    probes: Sequence[TimeProbe],
    *,
    ridge_flops_per_byte: float = RIDGE_FLOPS_PER_BYTE,
) -> TimeModel:
    """Return the model whose predictions are relatively nearest to measured batches.

    The launch gap and one rate follow from non-negative least squares of the relative errors; the ratio
    of arithmetic to bandwidth and the cache are searched on a grid that is then refined. Among
    fits of like error the one nearest to a plain roofline is taken. With one probe the time is the
    roofline's, scaled; with two there is a launch gap too; the cache needs three.

    Args:
        kernels: The model's kernels. If there are none, or none that costs more with more rows, time is
            taken to be a constant and a part for each row.
        probes: Measured batches, >= 1; `PROBE_ROWS` are good ones.
        ridge_flops_per_byte: The ratio to assume where the probes do not tell, > 0; for a known device
            `DeviceModel.ridge_flops_per_byte`.

    Raises:
        ConfigError: There is no probe, or a probe or an argument is out of its range.
    """
    require("the number of probes", len(probes), holds=len(probes) > 0, expected=">= 1")
    require("ridge_flops_per_byte", ridge_flops_per_byte, holds=ridge_flops_per_byte > 0, expected="> 0")
    for probe in probes:
        require("probe.rows", probe.rows, holds=probe.rows >= 1, expected=">= 1")
        require("probe.seconds", probe.seconds, holds=0 < probe.seconds < math.inf, expected="> 0")
    groups = _groups(kernels)
    rows = np.array([probe.rows for probe in probes], dtype=np.float64)
    seconds = np.array([probe.seconds for probe in probes])
    flops, moved = groups.at(rows)
    count = len(set(rows.tolist()))
    best, launch, unit, error = _search(
        _Measured(groups.kernels, flops, moved, seconds), ridge_flops_per_byte, probes=count
    )
    cached = 1 / max(unit, 1 / RATE_MAX)
    return TimeModel(
        kernels=tuple(
            KernelGroup(
                kernels=int(n), flops=f[0], flops_per_row=f[1], bytes_moved=m[0], bytes_moved_per_row=m[1]
            )
            for n, f, m in zip(*(part.tolist() for part in groups), strict=True)
        ),
        launch_seconds=launch,
        flops_per_second=min(RATE_MAX, float(best.ridge[0]) * cached),
        bandwidth_bytes_per_second=cached / float(best.slowdown[0]),
        bandwidth_bytes_per_second_cached=cached,
        cache_bytes=float(best.cache_bytes[0]),
        rows_measured=tuple(sorted({probe.rows for probe in probes})),
        error_relative=error,
    )


def bandwidth_contention(
    model: TimeModel,
    *,
    peak_bytes_per_second: float,
    gap_sensitivity_per_nanosecond: float,
    gap_nanoseconds: float = LAUNCH_GAP_NANOSECONDS_MIN,
) -> float | None:
    """Return the contention α at which `effective_bandwidth` is the bandwidth that was fitted.

    `None` where no α in [0, 1) gives it: the formula, with these constants, does not describe the device.

    Args:
        model: A fitted model; its `bandwidth_bytes_per_second` is B_eff.
        peak_bytes_per_second: B_peak, > 0.
        gap_sensitivity_per_nanosecond: β, >= 0.
        gap_nanoseconds: T_gap, >= 0; the article's shortest if left out.

    Raises:
        ConfigError: An argument is out of its range.
    """
    alone = effective_bandwidth(
        peak_bytes_per_second,
        gap_sensitivity_per_nanosecond=gap_sensitivity_per_nanosecond,
        gap_nanoseconds=gap_nanoseconds,
    )
    contention = 1 - model.bandwidth_bytes_per_second / alone
    return contention if 0 <= contention < 1 else None


class _Measured(NamedTuple):
    """What a fit sees: kernels of each group, operations and bytes (groups, probes), seconds (probes)."""

    kernels: Floats
    flops: Floats
    bytes_moved: Floats
    seconds: Floats


def _search(measured: _Measured, ridge: float, *, probes: int) -> tuple[_Shape, float, float, float]:
    """Return the best shape, and its launch gap, seconds per cached byte and relative error."""
    ridges = ridge * RIDGES if probes > 1 else np.array([ridge])
    largest = float(measured.bytes_moved.max())
    shapes = [_grid(ridges, np.array([1.0]), np.array([0.0]))]
    if probes >= PROBES_FOR_CACHE_MIN and largest > 0:
        shapes.append(_grid(ridges, SLOWDOWNS[1:], np.minimum(CACHES, 4 * largest)))
    shape = _Shape(*(np.concatenate(parts) for parts in zip(*shapes, strict=True)))
    best, solution = _best(shape, measured, ridge, launches=probes > 1)
    step = 2.0
    while probes > 1 and step > REFINEMENT_FACTOR_MIN:
        step = math.sqrt(step)
        around = np.array([1 / step, 1.0, step])
        flat = best.slowdown[0] == 1
        shape = _grid(
            best.ridge[0] * around,
            best.slowdown[:1] if flat else np.maximum(1.0, best.slowdown[0] * around),
            best.cache_bytes[:1] if flat else best.cache_bytes[0] * around,
        )
        best, solution = _best(shape, measured, ridge, launches=True)
    return best, *solution


def _grid(ridges: Floats, slowdowns: Floats, caches: Floats) -> _Shape:
    return _Shape(*(part.ravel() for part in np.meshgrid(ridges, slowdowns, caches, indexing="ij")))


def _best(
    shape: _Shape, measured: _Measured, ridge: float, *, launches: bool
) -> tuple[_Shape, tuple[float, float, float]]:
    units = np.array([_units(_Shape(*one), measured) for one in zip(*shape, strict=True)])
    launch, unit, error = _least_squares(measured, units, launches=launches)
    cost = PENALTY_CACHE * np.log(shape.slowdown) + PENALTY_RIDGE * np.abs(np.log(shape.ridge / ridge))
    i = int(np.argmin(error + cost))
    best = _Shape(*(part[i : i + 1] for part in shape))
    return best, (float(launch[i]), float(unit[i]), float(error[i]))


def _units(shape: _Shape, measured: _Measured) -> Floats:
    """Return each probe's time if a cached byte took one second."""
    moved = measured.bytes_moved
    memory = moved * (1 + (shape.slowdown - 1) * _missed(moved, float(shape.cache_bytes)))
    return measured.kernels @ np.maximum(measured.flops / shape.ridge, memory)


def _least_squares(measured: _Measured, units: Floats, *, launches: bool) -> tuple[Floats, Floats, Floats]:
    """Return the launch gap and unit, both >= 0, of least relative error, and its root mean square."""
    x = np.broadcast_to(measured.kernels.sum() / measured.seconds, units.shape)
    y = units / measured.seconds
    xx, xy, yy, x1, y1 = ((a).sum(axis=1) for a in (x * x, x * y, y * y, x, y))
    determinant = np.maximum(xx * yy - xy * xy, 1e-12 * xx * yy)
    launch = np.clip((x1 * yy - y1 * xy) / determinant, 0, x1 / xx) * launches
    unit = np.maximum(0, y1 - launch * xy) / yy
    error = np.sqrt(np.mean((launch[:, None] * x + unit[:, None] * y - 1) ** 2, axis=1))
    return launch, unit, error


def _missed(moved: Floats, cache_bytes: float) -> Floats:
    """Return the share of the bytes that miss the cache: half where as many bytes are moved as it holds."""
    return moved**2 / np.maximum(moved**2 + cache_bytes**2, np.finfo(np.float64).tiny)


def _groups(kernels: Sequence[KernelCost]) -> _Costs:
    """Return groups of kernels whose costs differ by little; their totals are exact."""
    costs = np.array([(k.flops.a, k.flops.b, k.bytes_moved.a, k.bytes_moved.b) for k in kernels])
    costs = np.maximum(0.0, costs.reshape(-1, 4))  # a line through costs that are none may start below 0
    if not costs[:, 1::2].any():
        return _Costs(np.ones(1), np.array([[0.0, 1.0]]), np.zeros((1, 2)))
    bins_per_octave = 8.0
    while True:
        keys = np.round(np.log2(1 + costs) * bins_per_octave)
        _, group, count = np.unique(keys @ KEY_WEIGHTS, return_inverse=True, return_counts=True)
        if len(count) <= GROUPS_MAX:
            break
        bins_per_octave /= 2
    means = np.zeros((len(count), 4))
    np.add.at(means, group, costs)
    means /= count[:, None]
    return _Costs(count.astype(np.float64), means[:, :2], means[:, 2:])
