"""A model's profile, laid against a device: the object that `sits profile --json` prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sits_dagster.models.arena import CARD_STRATEGY, ArenaPolicy
from sits_dagster.models.batching import Batching
from sits_dagster.models.cost import KernelCost
from sits_dagster.models.hardware import DeviceModel
from sits_dagster.models.linear import Linear
from sits_dagster.models.profile import UNKNOWN, WATERMARK, AxisGrowth, ModelProfile, TensorProfile
from sits_dagster.models.roofline import (
    BANDWIDTH_PRESETS,
    BandwidthPreset,
    arithmetic_intensity,
    io_bound_ratio,
    roofline_bound,
    roofline_seconds,
)
from sits_dagster.models.timing import TimeModel, bandwidth_contention

__all__ = ["Machine", "model_report"]

NOTHING = Linear(0, 0)
BATCH_ROWS = (1, 8, 32, 64)
DIGITS = 6
ROWS_BEYOND_MEASURED = 4  # times the largest measured batch: beyond it the time model is a guess
CPU_ONLY = ".nchwc."


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a model is held against.

    Args:
        device: The card.
        is_reference: Whether nobody asked for this card.
        memory_bytes: What is there for one session, > 0.
    """

    device: DeviceModel
    is_reference: bool
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    kernels: Sequence[KernelCost]
    device: DeviceModel
    dtype: str
    rates: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        rates = {
            "flops_per_second": self.device.flops_per_second[self.dtype],
            "bandwidth_bytes_per_second": self.device.bandwidth_bytes_per_second,
            "launch_seconds": self.device.launch_seconds,
        }
        object.__setattr__(self, "rates", rates)

    def at(self, rows: int) -> dict[str, Any]:
        """Return what the roofline says of a batch; nothing where nothing is known."""
        seconds = roofline_seconds(self.kernels, rows, **self.rates)
        is_known = bool(self.kernels) and seconds > 0
        bound = roofline_bound(self.kernels, rows, **self.rates)
        return {
            "flops_batch": _number(sum(kernel.flops(rows) for kernel in self.kernels)),
            "bytes_moved_batch": _number(sum(kernel.bytes_moved(rows) for kernel in self.kernels)),
            "arithmetic_intensity": _finite(arithmetic_intensity(self.kernels, rows)) if is_known else None,
            "roofline_bound": bound.value if is_known else None,
            "io_bound_ratio": _finite(io_bound_ratio(self.kernels, rows, **self.rates)) if is_known else None,
            "seconds_predicted": _finite(seconds) if is_known else None,
            "rows_per_second_predicted": _finite(rows / seconds) if is_known else None,
        }

    def operators(self, rows: int) -> list[dict[str, Any]]:
        """Return the kernels by operator, those that take longest first."""
        groups: dict[str, list[KernelCost]] = {}
        for kernel in self.kernels:
            groups.setdefault(kernel.operator, []).append(kernel)
        found = [
            {
                "operator": operator,
                "calls": len(kernels),
                "flops": _number(sum(kernel.flops(rows) for kernel in kernels)),
                "bytes_moved": _number(sum(kernel.bytes_moved(rows) for kernel in kernels)),
                "seconds_predicted": roofline_seconds(kernels, rows, **self.rates),
            }
            for operator, kernels in groups.items()
        ]
        return sorted(found, key=lambda group: (-group["seconds_predicted"], group["operator"]))


def model_report(
    profile: ModelProfile,
    machine: Machine,
    *,
    rows: int | None = None,
    rows_limit: int | None = None,
    is_optimized: bool = False,
) -> dict[str, Any]:
    """Return what a model costs on a device, as JSON carries it: finite numbers, always the same keys.

    Args:
        profile: The model.
        machine: The device and its memory.
        rows: The batch that is looked at; 1 if left out. A fixed batch and the limit override it.
        rows_limit: Most rows that a server allows, >= 1.
        is_optimized: Whether to count the kernels of ONNX Runtime's graph instead of the file's.
    """
    fixed = profile.batch_rows_fixed
    chosen = fixed or min(rows or 1, rows_limit or rows or 1)
    kernels = profile.kernels_optimized if is_optimized else ()
    costs = _Costs(
        kernels=_launched(kernels or profile.kernels),
        device=machine.device,
        dtype=profile.arithmetic_dtype(machine.device.flops_per_second),
    )
    flops = sum((kernel.flops for kernel in costs.kernels), NOTHING)
    moved = sum((kernel.bytes_moved for kernel in costs.kernels), NOTHING)
    source = profile.memory_source
    most = profile.batch_rows_max(machine.memory_bytes, strategy=CARD_STRATEGY)
    most = most if rows_limit is None else min(most, rows_limit)
    standard = _rows(profile, rows_limit)
    batches = {*standard, chosen, *([most] if most else [])}
    return {
        **_model(profile),
        "kernels": len(costs.kernels),
        "kernels_source": "optimized" if kernels else "graph",
        "flops_per_row": _number(profile.per_row(flops)),
        "bytes_per_row": _number(profile.per_row(moved)),
        "flops": _line(flops),
        "bytes_moved": _line(moved),
        "memory_bytes": None if source == UNKNOWN else _line(profile.memory_bytes),
        "memory_bytes_resident": profile.memory_bytes_resident,
        "memory_source": source,
        "memory_held_bytes": {
            str(count): _held(profile, count, machine.memory_bytes)["memory_held_bytes"] for count in standard
        },
        "growth": [_growth(growth) for growth in profile.growth],
        "rows": chosen,
        **costs.at(chosen),
        **_device(machine, costs),
        "memory_limit_bytes": machine.memory_bytes,
        "watermark": WATERMARK,
        "batch_rows_max": None if source == UNKNOWN else most,
        "batch_rows_fixed": fixed,
        "batches": [
            {"rows": count, **_held(profile, count, machine.memory_bytes), **costs.at(count)}
            for count in sorted(batches)
        ],
        "batching": profile.batching.verdict.value,
        "batching_evidence": list(profile.batching.evidence),
        "paddable_axes": list(profile.batching.paddable_axes),
        "operators": costs.operators(chosen),
        "uncosted": {operator: asdict(found) for operator, found in profile.uncosted.items()},
        "warnings": [
            *_notes(profile, chosen, rows, is_optimized=is_optimized),
            *profile.rate_notes(machine.device.flops_per_second),
            *profile.warnings,
        ],
        "runtime": None if profile.runtime is None else asdict(profile.runtime),
        "calibration": _calibration(profile, machine, most or chosen),
        "triton": None,
    }


def _calibration(profile: ModelProfile, machine: Machine, rows_max: int) -> dict[str, Any] | None:
    """Return what was measured on a real device, and what the fitted time model says of a few batches."""
    found, times = profile.calibration, profile.time_model
    if found is None:
        return None
    fixed = profile.batch_rows_fixed
    looked_at = None
    if times is not None and fixed is None:
        looked_at = min(rows_max, ROWS_BEYOND_MEASURED * max(times.rows_measured))
    return {
        "device": found.device,
        "arena_strategy": found.strategy.value,
        "memory_held_bytes": {str(rows): held for rows, held in found.probes.items()},
        "memory_correction_bytes": _line(found.correction),
        "seconds": {}
        if times is None
        else {str(rows): times.seconds(rows) for rows in ((fixed,) if fixed else BATCH_ROWS)},
        "batch_rows_flat": None
        if times is None or looked_at is None
        else times.batch_rows_flat(rows_max=looked_at),
        "batch_rows_looked_at": looked_at,
        "bandwidth_contention": None if times is None else _contention(times, machine, found.device),
    }


def _contention(times: TimeModel, machine: Machine, measured: str) -> float | None:
    """Return the contention that the measured bandwidth implies; `None` if another device was measured."""
    card = machine.device
    model = next(word for word in card.name.split("-") if any(map(str.isdigit, word)))
    if machine.is_reference or model not in re.split(r"[^a-z0-9]+", measured.lower()):
        return None
    article = next(iter(BANDWIDTH_PRESETS.values()))
    own = BandwidthPreset(
        bandwidth_bytes_per_second=card.bandwidth_bytes_per_second,
        gap_sensitivity_per_nanosecond=article.gap_sensitivity_per_nanosecond,
    )
    preset = BANDWIDTH_PRESETS.get(card.name, own)
    return bandwidth_contention(
        times,
        peak_bytes_per_second=preset.bandwidth_bytes_per_second,
        gap_sensitivity_per_nanosecond=preset.gap_sensitivity_per_nanosecond,
    )


def _model(profile: ModelProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "digest": profile.digest,
        "file_bytes": profile.file_bytes,
        "inputs": [_tensor(value) for value in profile.inputs],
        "outputs": [_tensor(value) for value in profile.outputs],
        "lengths": {**{growth.axis: growth.length for growth in profile.growth}, **profile.lengths},
        "parameters": profile.parameters,
        "parameter_bytes": profile.parameter_bytes,
        "parameter_bytes_by_type": dict(profile.parameter_bytes_by_type),
    }


def _device(machine: Machine, costs: _Costs) -> dict[str, Any]:
    return {
        "device": machine.device.name,
        "device_is_reference": machine.is_reference,
        "device_source": machine.device.source,
        "flops_rate_dtype": costs.dtype,
        "flops_rate_per_second": costs.rates["flops_per_second"],
        "bandwidth_bytes_per_second": costs.rates["bandwidth_bytes_per_second"],
        "launch_seconds": costs.rates["launch_seconds"],
    }


def _notes(profile: ModelProfile, chosen: int, rows: int | None, *, is_optimized: bool) -> Iterator[str]:
    if is_optimized and not profile.kernels_optimized:
        why = "the model was not tried" if profile.runtime is None else "its trial told no costs"
        yield f"the figures are of the file's graph, not of the optimised one: {why}"
    elif is_optimized and any(CPU_ONLY in kernel.operator for kernel in profile.kernels_optimized):
        yield "the optimised graph is that of a CPU: a GPU has no NCHWc and Reorder kernels"
    names = {name for value in profile.inputs if isinstance(name := _rows_name(value), str)}
    if len(names) > 1:
        yield f"one row is taken as one of each of these: {', '.join(sorted(names))}; give them with --shape"
    if rows is not None and rows != chosen:
        why = "the file's batch" if profile.batch_rows_fixed else "the server's max_batch_size"
        yield f"the figures are for a batch of {chosen}, not {rows}: that is {why}"
    elif profile.batching.verdict is Batching.NOT_BATCHABLE and chosen > (profile.batch_rows_fixed or 1):
        yield f"the figures are for a batch of {chosen}, but rows must not share a batch"


def _launched(kernels: Sequence[KernelCost]) -> tuple[KernelCost, ...]:
    """Leave out the calls that neither compute nor move anything: names and views start no kernel."""
    return tuple(kernel for kernel in kernels if kernel.flops != NOTHING or kernel.bytes_moved != NOTHING)


def _rows(profile: ModelProfile, rows_limit: int | None) -> tuple[int, ...]:
    """Return the batches that are of interest: those that are allowed."""
    if profile.batch_rows_fixed is not None:
        return (profile.batch_rows_fixed,)
    if profile.batching.verdict is Batching.NOT_BATCHABLE:
        return (1,)
    return tuple(rows for rows in BATCH_ROWS if rows_limit is None or rows <= rows_limit)


def _held(profile: ModelProfile, rows: int, memory_bytes: int) -> dict[str, Any]:
    """Return what the arena holds: near its limit it takes less at a time; beyond it, what it would take."""
    if profile.memory_source == UNKNOWN:
        return {"memory_held_bytes": None, "is_within_limit": None}
    room = int(memory_bytes * WATERMARK) - profile.parameter_bytes
    held = None
    if room > 0:
        held = profile.held(rows, ArenaPolicy(strategy=CARD_STRATEGY, bytes_limit=room))
    is_within = held is not None
    unlimited = ArenaPolicy(strategy=CARD_STRATEGY)
    return {
        "memory_held_bytes": held if is_within else profile.held(rows, unlimited),
        "is_within_limit": is_within,
    }


def _tensor(value: TensorProfile) -> dict[str, Any]:
    shape = None if value.shape is None else list(value.shape)
    return {"name": value.name, "dtype": value.dtype, "shape": shape, "batch_axis": value.batch_axis}


def _rows_name(value: TensorProfile) -> int | str | None:
    return None if value.batch_axis is None or not value.shape else value.shape[value.batch_axis]


def _growth(growth: AxisGrowth) -> dict[str, Any]:
    return {
        "axis": growth.axis,
        "length": growth.length,
        "memory_bytes": [_number(value) for value in growth.memory_bytes],
        "flops": [_number(value) for value in growth.flops],
        "memory_ratio_at_double": _finite(growth.memory_ratio(2 * growth.length)),
        "flops_ratio_at_double": _finite(growth.flops_ratio(2 * growth.length)),
    }


def _line(line: Linear) -> dict[str, float]:
    return {"a": _number(line.a), "b": _number(line.b)}


def _number(value: float) -> float:
    """Return a whole number as one: lines through measured points are off by rounding."""
    near = round(value, DIGITS)
    return int(near) if float(near).is_integer() else near


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
