"""A model's profile, laid against a device: the object that `sits profile --json` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sits_dagster.models.arena import ArenaPolicy
from sits_dagster.models.batching import Batching
from sits_dagster.models.cost import KernelCost
from sits_dagster.models.hardware import DeviceModel
from sits_dagster.models.linear import Linear
from sits_dagster.models.profile import WATERMARK, AxisGrowth, ModelProfile, TensorProfile
from sits_dagster.models.roofline import (
    arithmetic_intensity,
    io_bound_ratio,
    roofline_bound,
    roofline_seconds,
)

__all__ = ["Machine", "model_report"]

NOTHING = Linear(0, 0)
BATCH_ROWS = (1, 8, 32, 64)
DIGITS = 6
UNKNOWN = "unknown"
UNCOSTED_SHARE_MAX = 0.05  # of the calls: with more of unknown shape a plan of buffers says nothing
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
        }
        object.__setattr__(self, "rates", rates)

    def at(self, rows: int) -> dict[str, Any]:
        """Return what the roofline says of a batch; nothing where nothing is known."""
        launch = self.device.launch_seconds
        seconds = roofline_seconds(self.kernels, rows, **self.rates, launch_seconds=launch)
        is_known = bool(self.kernels) and seconds > 0
        bound = roofline_bound(self.kernels, rows, **self.rates, launch_seconds=launch)
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
                "seconds_predicted": roofline_seconds(
                    kernels, rows, **self.rates, launch_seconds=self.device.launch_seconds
                ),
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
    source = _memory_source(profile)
    profile = profile if source == profile.memory_source else replace(profile, memory_source=source)
    most = 0 if source == UNKNOWN else profile.batch_rows_max(machine.memory_bytes)
    most = most if rows_limit is None else min(most, rows_limit)
    standard = _rows(profile, rows_limit)
    batches = {*standard, chosen, *([most] if most else [])}
    return {
        "name": profile.name,
        "digest": profile.digest,
        "inputs": [_tensor(value) for value in profile.inputs],
        "outputs": [_tensor(value) for value in profile.outputs],
        "lengths": {**{growth.axis: growth.length for growth in profile.growth}, **profile.lengths},
        "parameters": profile.parameters,
        "parameter_bytes": profile.parameter_bytes,
        "parameter_bytes_by_type": dict(profile.parameter_bytes_by_type),
        "kernels": len(costs.kernels),
        "kernels_source": "optimized" if kernels else "graph",
        "flops_per_row": _number(_per_row(flops, fixed)),
        "bytes_per_row": _number(_per_row(moved, fixed)),
        "flops": _line(flops),
        "bytes_moved": _line(moved),
        "memory_bytes": None if source == UNKNOWN else _line(profile.memory_bytes),
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
        "warnings": [*_notes(profile, chosen, rows, is_optimized=is_optimized), *profile.warnings],
        "runtime": None if profile.runtime is None else asdict(profile.runtime),
        "calibration": _calibration(profile, most or chosen),
        "triton": None,
    }


def _calibration(profile: ModelProfile, rows_max: int) -> dict[str, Any] | None:
    """Return what was measured on a real device, and what the fitted time model says of a few batches."""
    found, times = profile.calibration, profile.time_model
    if found is None:
        return None
    fixed = profile.batch_rows_fixed
    return {
        "device": found.device,
        "memory_held_bytes": {str(rows): held for rows, held in found.probes.items()},
        "memory_correction_bytes": _line(found.correction),
        "seconds": {}
        if times is None
        else {str(rows): times.seconds(rows) for rows in ((fixed,) if fixed else BATCH_ROWS)},
        "batch_rows_flat": None if times is None or fixed else times.batch_rows_flat(rows_max=rows_max),
    }


def _device(machine: Machine, costs: _Costs) -> dict[str, Any]:
    return {
        "device": machine.device.name,
        "device_is_reference": machine.is_reference,
        "device_source": machine.device.source,
        "flops_rate_dtype": costs.dtype,
        "flops_rate_per_second": costs.rates["flops_per_second"],
        "bandwidth_bytes_per_second": costs.rates["bandwidth_bytes_per_second"],
        "launch_seconds": machine.device.launch_seconds,
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


def _memory_source(profile: ModelProfile) -> str:
    """Return where the memory figure is from; it is none if the plan is empty or lacks too many tensors."""
    share = sum(found.share for found in profile.uncosted.values())
    is_partial = profile.memory_source == "graph" and share > UNCOSTED_SHARE_MAX
    is_empty = bool(profile.kernels) and not profile.memory_plan.events
    return UNKNOWN if is_partial or is_empty else profile.memory_source


def _rows(profile: ModelProfile, rows_limit: int | None) -> tuple[int, ...]:
    """Return the batches that are of interest: those that are allowed."""
    if profile.batch_rows_fixed is not None:
        return (profile.batch_rows_fixed,)
    if profile.batching.verdict is Batching.NOT_BATCHABLE:
        return (1,)
    return tuple(rows for rows in BATCH_ROWS if rows_limit is None or rows <= rows_limit)


def _per_row(quantity: Linear, fixed: int | None) -> float:
    return quantity.b if fixed is None else quantity(fixed) / fixed


def _held(profile: ModelProfile, rows: int, memory_bytes: int) -> dict[str, Any]:
    """Return what the arena holds: near its limit it takes less at a time; beyond it, what it would take."""
    if profile.memory_source == UNKNOWN:
        return {"memory_held_bytes": None, "is_within_limit": None}
    room = int(memory_bytes * WATERMARK) - profile.parameter_bytes
    held = profile.held(rows, ArenaPolicy(bytes_limit=room)) if room > 0 else None
    is_within = held is not None
    return {"memory_held_bytes": held if is_within else profile.held(rows), "is_within_limit": is_within}


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
        "memory_ratio_at_double": _ratio_at_double(growth.memory_bytes, growth.length),
        "flops_ratio_at_double": _ratio_at_double(growth.flops, growth.length),
    }


def _ratio_at_double(coefficients: tuple[float, float, float], length: int) -> float | None:
    now, then = (
        sum(value * at**power for power, value in enumerate(coefficients)) for at in (length, 2 * length)
    )
    return _finite(then / now) if now > 0 else None


def _line(line: Linear) -> dict[str, float]:
    return {"a": _number(line.a), "b": _number(line.b)}


def _number(value: float) -> float:
    """Return a whole number as one: lines through measured points are off by rounding."""
    near = round(value, DIGITS)
    return int(near) if float(near).is_integer() else near


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
