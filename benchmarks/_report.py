"""Samples, their medians, and how they compare with the targets."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import onnxruntime
import psutil
import pyarrow as pa

MEGABYTE = 1_000_000
# Above this, wall times tell as much about the other processes as about this one.
OTHERS_CPUS_MAX = 0.1

TARGETS: dict[str, tuple[str, float]] = {
    "speed_ratio": (">=", 0.95),
    "speed_ratio_cpu": (">=", 0.95),
    "busy_10ms": (">=", 0.986),
    "busy_10ms_strict": (">=", 0.986),
    "busy_50ms": (">=", 0.986),
    "busy_50ms_strict": (">=", 0.986),
    "startup_seconds": ("<", 2.0),
    "startup_dagster_seconds": ("<", 2.0),
    "resident_bytes_over_model": ("<", 300 * MEGABYTE),
}


class Samples:
    """Every single measurement, and what else the machine did meanwhile."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.others: dict[str, list[float]] = {}

    def add(self, figure: str, value: float) -> None:
        self.values.setdefault(figure, []).append(round(value, 5))

    def median(self, figure: str) -> float | None:
        values = self.values.get(figure)
        return statistics.median(values) if values else None

    def figures(self) -> dict[str, float | None]:
        return {name: self.median(name) for name in {**TARGETS, **self.values}}

    def is_disturbed(self, figure: str) -> bool:
        """Return whether other processes took part of the machine in half of the figure's measurements."""
        watched = self.others.get(figure.removesuffix("_strict").removesuffix("_cpu"), [])
        return bool(watched) and statistics.median(watched) > OTHERS_CPUS_MAX

    def watched(self, name: str, step: Callable[[], None]) -> None:
        """Run a step of one process and note how many CPUs other processes took, on average."""
        before, mine, started = _cpu_used(), time.process_time(), time.monotonic()
        step()
        wall = time.monotonic() - started
        used = _cpu_used() - before - (time.process_time() - mine)
        self.others.setdefault(name, []).append(round(max(0.0, used / wall), 2))


def _cpu_used() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def is_met(figure: str, value: float | None) -> bool | None:
    if figure not in TARGETS or value is None:
        return None
    relation, target = TARGETS[figure]
    return value >= target if relation == ">=" else value < target


def print_table(samples: Samples) -> None:
    figures = samples.figures()
    print(f"{'figure':30} {'median':>12} {'least':>12} {'most':>12}  target")
    for figure, value in figures.items():
        values = samples.values.get(figure, [])
        shown = [_shown(figure, v) for v in (value, min(values, default=None), max(values, default=None))]
        verdict = {True: "met", False: "MISSED", None: ""}[is_met(figure, value)]
        if figure in TARGETS and samples.is_disturbed(figure):
            verdict += ", but the machine was busy: measure again"
        target = (
            " ".join((TARGETS[figure][0], _shown(figure, TARGETS[figure][1]), verdict))
            if figure in TARGETS
            else ""
        )
        print(f"{figure:30} {shown[0]:>12} {shown[1]:>12} {shown[2]:>12}  {target}")
    print("\nCPUs taken by other processes:")
    for name, values in samples.others.items():
        print(f"  {name:28} {', '.join(map(str, values))}")
    missed = [figure for figure, value in figures.items() if is_met(figure, value) is False]
    print(f"\nMissed: {', '.join(missed)}." if missed else "\nEvery target that was measured is met.")


def _shown(figure: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / MEGABYTE:.1f} MB" if "bytes" in figure else f"{value:.4f}"


def report(samples: Samples, *, threads: int, size: dict[str, object]) -> dict[str, object]:
    figures = samples.figures()
    return {
        "figures": figures,
        "targets": {name: " ".join(map(str, target)) for name, target in TARGETS.items()},
        "missed": [name for name, value in figures.items() if is_met(name, value) is False],
        "disturbed": [name for name in TARGETS if samples.is_disturbed(name)],
        "samples": samples.values,
        "cpus_taken_by_others": samples.others,
        "machine": {
            "cpus": os.cpu_count(),
            "threads": threads,
            "load_average": os.getloadavg(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
            "pyarrow": pa.__version__,
        },
        "size": size,
    }
