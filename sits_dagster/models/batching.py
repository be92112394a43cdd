"""Whether rows may share a batch, found by running them together and alone.

Names do not tell: a time axis may look like a batch, dynamic quantisation scales over the whole batch, and
files that were rewritten from a fixed batch may mix rows without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sits_dagster.errors import DeviceOutOfMemoryError
from sits_dagster.models.words import one_line, shown

__all__ = [
    "PROBE_ROWS",
    "Batching",
    "BatchingReport",
    "Run",
    "probe_batching",
    "probe_fixed_batch",
    "probe_padding",
]

Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
Run: TypeAlias = Callable[[Arrays], Arrays]

PROBE_ROWS = 3
# Kernels of unlike batch sizes round differently: 1e-6 of the largest value was seen in 32 bits. The least
# difference that a real mixing of rows made was 2e-3.
TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2}
TOLERANCE_ABSOLUTE = 1e-6


class Batching(StrEnum):
    """Whether a row's result depends on its batch-mates."""

    INVARIANT = "invariant"
    """Rows of equal shape may share a batch."""
    MASK_REQUIRED = "mask-required"
    """They may, and rows of unlike length too, if a mask says what is padding."""
    NOT_BATCHABLE = "not-batchable"
    """A batch of one row is the only right one."""
    UNPROBED = "unprobed"
    """The model could not be run, so nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingReport:
    """Whether rows may share a batch, and what shows it.

    Args:
        verdict: The finding.
        evidence: What was seen, one sentence each.
        input_axes: The axis of the rows of each input; `None` where all rows share the input.
        output_axes: The axis of the rows of each output; `None` where it has none.
        outputs_shared: Outputs that are the same whatever the rows are, such as a list of labels.
        paddable_axes: Free axes along which padding leaves a row's result alone, masked if there is a mask.
    """

    verdict: Batching = Batching.UNPROBED
    evidence: tuple[str, ...] = ()
    input_axes: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    output_axes: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    outputs_shared: tuple[str, ...] = ()
    paddable_axes: tuple[str, ...] = ()


def probe_batching(run: Run, rows: Sequence[Arrays], input_axes: Mapping[str, int | None]) -> BatchingReport:
    """Return whether batches of two and three rows give what the rows give alone.

    Args:
        run: One call of the model; raises whatever the engine raises.
        rows: Three unlike rows, each as a batch of one.
        input_axes: Along which axis the rows of each input are joined; `None` for inputs that all rows share.
    """
    singles = [run(row) for row in rows]
    batches: dict[int, Arrays] = {}
    for count in range(2, len(rows) + 1):
        try:
            batches[count] = run(_join(rows[:count], input_axes))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises says that it takes no such batch
            return _failed(count, error, input_axes, singles[0])
    shared = tuple(name for name in singles[0] if _is_constant(name, singles, batches))
    output_axes = {name: _row_axis(name, singles[0], batches) for name in singles[0] if name not in shared}
    evidence = [
        found
        for name, axis in output_axes.items()
        if (found := _difference(name, axis, singles, batches)) is not None
    ]
    if evidence:
        verdict = Batching.NOT_BATCHABLE
    elif all(_is_same(rows[0], row) for row in rows[1:]):
        verdict = Batching.UNPROBED
        evidence = ["no two unlike rows of equal shape were tried: nothing tells whether they mix"]
    else:
        verdict = Batching.INVARIANT
        evidence = [f"batches of 2 and {len(rows)} rows give what each row gives alone"]
        evidence += [
            f"the rows of output {shown(name)} lie along axis {axis}"
            for name, axis in output_axes.items()
            if axis
        ]
    return BatchingReport(
        verdict=verdict,
        evidence=tuple(evidence),
        input_axes=input_axes,
        output_axes=output_axes,
        outputs_shared=shared,
    )


def _failed(
    count: int, error: Exception, input_axes: Mapping[str, int | None], single: Arrays
) -> BatchingReport:
    verdict, evidence = Batching.NOT_BATCHABLE, f"a batch of {count} rows fails: {one_line(error)}"
    if isinstance(error, DeviceOutOfMemoryError):  # which tells of the device, not of the model
        verdict, evidence = Batching.UNPROBED, f"a batch of {count} rows does not fit into memory"
    return BatchingReport(
        verdict=verdict,
        evidence=(evidence,),
        input_axes=input_axes,
        output_axes=dict.fromkeys(single, 0),
    )


def _is_same(first: Arrays, second: Arrays) -> bool:
    """Return whether two rows hold the same bytes, or texts."""
    return all(
        array.shape == second[name].shape
        and (
            array.tolist() == second[name].tolist()
            if array.dtype == object
            else array.tobytes() == second[name].tobytes()
        )
        for name, array in first.items()
    )


def probe_fixed_batch(run: Run, batches: Sequence[Arrays], rows: int) -> BatchingReport:
    """Return whether rows of a fixed batch keep their results when their batch-mates change.

    The first row is kept while all others change, then the last one, then those in between: what a row takes
    over from those before it shows in the last, what it takes from those behind it in the first.

    Args:
        run: One call of the model.
        batches: Two or more unlike batches of the fixed size.
        rows: The fixed size: the length of the first axis of every input that has rows.
    """
    first = run(batches[0])
    verdict, evidence = Batching.NOT_BATCHABLE, ("the file fixes batches of one row",)
    if rows > 1:
        is_first, is_last = np.arange(rows) == 0, np.arange(rows) == rows - 1
        is_between = ~(is_first | is_last)
        kept = [is_first, is_last, *([is_between] if is_between.any() else [])]
        mixed = [_mixed(batches[0], batches[1], keeps) for keeps in kept]
        evidence = tuple(_mixing(run, first, list(zip(kept, mixed, strict=True))))
        if not evidence:
            verdict = Batching.INVARIANT
            evidence = (f"a row of the fixed batch of {rows} does not depend on the others",)
            if any(_is_same(batches[0], batch) for batch in mixed[:2]):
                verdict = Batching.UNPROBED
                evidence = ("the batches that were tried are the same: nothing tells whether rows mix",)
    return BatchingReport(
        verdict=verdict,
        evidence=evidence,
        input_axes={name: _leading(array, rows) for name, array in batches[0].items()},
        output_axes={name: _leading(array, rows) for name, array in first.items()},
    )


def _leading(array: NDArray[np.generic], rows: int) -> int | None:
    return 0 if array.ndim and len(array) == rows else None


def _mixed(batch: Arrays, other: Arrays, keeps: NDArray[np.bool_]) -> Arrays:
    """Return a batch with the rows that are not kept from the other one."""
    mixed = dict(batch)
    for name, array in batch.items():
        if _leading(array, len(keeps)) is not None:
            mixed[name] = array.copy()
            mixed[name][~keeps] = other[name][~keeps]
    return mixed


def _mixing(run: Run, alone: Arrays, batches: Sequence[tuple[NDArray[np.bool_], Arrays]]) -> Iterator[str]:
    """Yield the outputs in which a row that was kept has another result among other batch-mates."""
    found = [(keeps, run(batch)) for keeps, batch in batches]
    for name, array in alone.items():
        if any(
            _leading(array, len(keeps)) is None
            or outputs[name].shape != array.shape
            or not _is_close(array[keeps], outputs[name][keeps])
            for keeps, outputs in found
        ):
            yield f"a row's result in output {shown(name)} depends on its batch-mates"


def _is_close(first: NDArray[np.generic], second: NDArray[np.generic]) -> bool:
    largest, allowed = _deviation(first, second)
    return largest <= allowed


def probe_padding(
    run: Run, row: Arrays, axes: Mapping[str, int], masks: Sequence[str], length: int
) -> tuple[bool, bool]:
    """Return whether padding leaves a row's result alone, without and with the mask.

    Args:
        run: One call of the model.
        row: One row as a batch of one.
        axes: The axis to pad of each input that has it.
        masks: Those of the inputs that say what is padding: 1 is data, 0 is not.
        length: How many cells to add.
    """
    plain = run(row)
    unmasked = run(_padded(row, axes, length, ones=masks))
    is_indifferent = _holds_start(plain, unmasked)
    if is_indifferent or not masks:
        return is_indifferent, is_indifferent
    return False, _holds_start(plain, run(_padded(row, axes, length, ones=())))


def _join(rows: Sequence[Arrays], axes: Mapping[str, int | None]) -> Arrays:
    return {
        name: array if (axis := axes.get(name)) is None else np.concatenate([r[name] for r in rows], axis)
        for name, array in rows[0].items()
    }


def _padded(row: Arrays, axes: Mapping[str, int], length: int, *, ones: Sequence[str]) -> Arrays:
    padded = dict(row)
    for name, axis in axes.items():
        shape = list(row[name].shape)
        shape[axis] = length
        fill = np.full(shape, 1 if name in ones else 0, row[name].dtype)
        padded[name] = np.concatenate([row[name], fill], axis)
    return padded


def _row_axis(name: str, single: Arrays, batches: Mapping[int, Arrays]) -> int | None:
    shape = single[name].shape
    for axis, length in enumerate(shape):
        if length and all(
            outputs[name].ndim == len(shape)
            and outputs[name].shape == (*shape[:axis], length * count, *shape[axis + 1 :])
            for count, outputs in batches.items()
        ):
            return axis
    return None


def _difference(
    name: str, axis: int | None, singles: Sequence[Arrays], batches: Mapping[int, Arrays]
) -> str | None:
    if axis is None:
        if _is_constant(name, singles, batches):
            return None
        return (
            f"no axis of output {shown(name)} holds the rows: its shape is {singles[0][name].shape} for one "
            f"row, {next(iter(batches.values()))[name].shape} for two"
        )
    for count, outputs in batches.items():
        for row, part in enumerate(np.split(outputs[name], count, axis)):
            alone = singles[row][name]
            if alone.shape != part.shape:
                return f"output {shown(name)} of a row has shape {alone.shape} alone, {part.shape} in a batch"
            largest, allowed = _deviation(alone, part)
            if largest > allowed:
                return (
                    f"row {row} of a batch of {count} differs by {largest:.3g} from the row alone "
                    f"in output {shown(name)}"
                )
    return None


def _is_constant(name: str, singles: Sequence[Arrays], batches: Mapping[int, Arrays]) -> bool:
    """Return whether an output is the same whatever the rows are, such as a list of labels."""
    first = singles[0][name]
    return all(np.array_equal(first, outputs[name]) for outputs in (*singles, *batches.values()))


def _deviation(first: NDArray[np.generic], second: NDArray[np.generic]) -> tuple[float, float]:
    if first.size == 0:
        return 0.0, 0.0
    if not np.issubdtype(first.dtype, np.floating):
        return float(np.count_nonzero(first != second)), 0.0
    one, other = first.astype(np.float64), second.astype(np.float64)
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        distance = np.where(is_same, 0.0, np.abs(one - other))
    distance = np.where(np.isnan(distance), np.inf, distance)
    scale = float(np.max(np.abs(one[np.isfinite(one)]), initial=0.0))
    tolerance = TOLERANCE.get(first.dtype.name, TOLERANCE["float32"])
    return float(distance.max()), tolerance * scale + TOLERANCE_ABSOLUTE


def _holds_start(plain: Arrays, padded: Arrays) -> bool:
    """Return whether what padding added lies behind what was there before, in every output."""
    for name, array in plain.items():
        other = padded[name]
        if other.ndim != array.ndim or any(
            longer < length for longer, length in zip(other.shape, array.shape, strict=True)
        ):
            return False
        largest, allowed = _deviation(array, other[tuple(slice(length) for length in array.shape)])
        if largest > allowed:
            return False
    return True
