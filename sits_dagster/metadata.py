"""Values to Dagster metadata and tags; the only place where the keys are spelled."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from sits_dagster.inference.stats import DeviceCall, PartitionStats, Progress
from sits_dagster.models.arena import CARD_STRATEGY
from sits_dagster.models.batching import Batching
from sits_dagster.models.cost import KernelCost
from sits_dagster.models.figures import si
from sits_dagster.models.hardware import DeviceModel
from sits_dagster.models.profile import UNKNOWN, ModelProfile, TensorProfile
from sits_dagster.models.roofline import io_bound_ratio

__all__ = [
    "CLASS_TAG",
    "DEADLINE_TAG",
    "MODEL_PATH_KEY",
    "PRIORITY_TAG",
    "model_metadata",
    "partition_metadata",
    "picture",
    "progress_metadata",
]

CLASS_TAG = "sits/class"
DEADLINE_TAG = "sits/deadline"
PRIORITY_TAG = "dagster/priority"

MODEL_PATH_KEY = "sits/model_path"
"""Where a model lies: on the definition as declared, on a materialisation as found."""

PICTURE_POINTS_MAX = 24
PICTURE_WIDTH = 220
PICTURE_HEIGHT = 40

REFERENCE_ROWS = 32
OPERATORS_SHOWN_MAX = 20
TENSORS_SHOWN_MAX = 100
NAME_CHARACTERS_MAX = 80


def partition_metadata(
    stats: PartitionStats, *, model_digest: str, output: str, quarantine: str, host_memory_bytes_peak: int
) -> Mapping[str, dg.MetadataValue[Any]]:
    """Return what a materialisation shows in Dagster's UI; numbers become plots there.

    Args:
        stats: What the run did.
        model_digest: SHA-256 of the model.
        output: The partition's output folder.
        quarantine: The folder of the quarantined rows, or `""`.
        host_memory_bytes_peak: Most memory that the process held.
    """
    resumed = (
        "complete" if stats.is_complete and not stats.segments and stats.rows else str(stats.rows_resumed)
    )
    found: dict[str, dg.MetadataValue[Any]] = {
        "dagster/row_count": dg.MetadataValue.int(stats.rows_written),
        "sits/rows_read": dg.MetadataValue.int(stats.rows),
        "sits/rows_quarantined": dg.MetadataValue.int(stats.rows_quarantined),
        "sits/rows_recomputed": dg.MetadataValue.int(stats.rows_recomputed),
        "sits/resumed_from_row": dg.MetadataValue.text(resumed),
        "sits/batches": dg.MetadataValue.int(stats.batches),
        "sits/segments": dg.MetadataValue.int(stats.segments),
        "sits/padding_share": dg.MetadataValue.float(round(stats.padding_share, 4)),
        "sits/out_of_memory": dg.MetadataValue.int(stats.out_of_memory),
        "sits/host_memory_bytes_peak": dg.MetadataValue.int(host_memory_bytes_peak),
        "sits/model_digest": dg.MetadataValue.text(model_digest),
        "sits/generation": dg.MetadataValue.text(stats.generation),
        "sits/output_path": dg.MetadataValue.path(output),
    }
    if stats.busy_fraction is not None and stats.rows_per_second is not None:
        found["sits/device_busy_fraction"] = dg.MetadataValue.float(round(stats.busy_fraction, 4))
        found["sits/rows_per_second"] = dg.MetadataValue.float(round(stats.rows_per_second, 2))
    if stats.memory_bytes_peak:
        found["sits/memory_bytes_peak"] = dg.MetadataValue.int(stats.memory_bytes_peak)
    if stats.batching:
        found["sits/batching"] = dg.MetadataValue.text(stats.batching)
    if quarantine:
        found["sits/quarantine_path"] = dg.MetadataValue.path(quarantine)
    if stats.trace:
        found["sits/batches_over_time"] = dg.MetadataValue.md(picture(stats.trace))
    if stats.notes:
        found["sits/notes"] = dg.MetadataValue.md(_list(stats.notes))
    return found


def model_metadata(
    profile: ModelProfile, *, path: str, card: DeviceModel
) -> Mapping[str, dg.MetadataValue[Any]]:
    """Return what a model's materialisation shows; from version to version its numbers become plots.

    Args:
        profile: What the model costs.
        path: The model file.
        card: For which device the rows of a batch and the time of the memory are told.
    """
    found: dict[str, dg.MetadataValue[Any]] = {
        MODEL_PATH_KEY: dg.MetadataValue.path(path),
        "sits/model_digest": dg.MetadataValue.text(profile.digest),
        "sits/parameters": dg.MetadataValue.int(profile.parameters),
        "sits/parameter_bytes": dg.MetadataValue.int(profile.parameter_bytes),
        "sits/flops_per_row": dg.MetadataValue.int(round(profile.flops_per_row)),
        "sits/bytes_per_row": dg.MetadataValue.int(round(profile.bytes_per_row)),
        "sits/batching": dg.MetadataValue.text(profile.batching.verdict.value),
        "sits/inputs": dg.MetadataValue.table_schema(_schema(profile.inputs)),
        "sits/outputs": dg.MetadataValue.table_schema(_schema(profile.outputs)),
        "sits/reference_card": dg.MetadataValue.text(card.name),
    }
    if profile.memory_source != UNKNOWN:
        found["sits/memory_bytes_fixed"] = dg.MetadataValue.int(round(profile.memory_bytes.a))
        found["sits/memory_bytes_per_row"] = dg.MetadataValue.int(round(profile.memory_bytes.b))
        most = profile.batch_rows_max(card.memory_bytes, strategy=CARD_STRATEGY)
        found["sits/batch_rows_max"] = dg.MetadataValue.int(most)
    if profile.batch_rows_fixed is not None:
        found["sits/batch_rows_fixed"] = dg.MetadataValue.int(profile.batch_rows_fixed)
    if profile.kernels:
        rows = _reference_rows(profile)
        share = io_bound_ratio(
            profile.kernels,  # the file's: the optimised ones are a CPU's
            rows,
            flops_per_second=card.flops_per_second[profile.arithmetic_dtype(card.flops_per_second)],
            bandwidth_bytes_per_second=card.bandwidth_bytes_per_second,
            launch_seconds=card.launch_seconds,
        )
        found["sits/io_bound_ratio"] = dg.MetadataValue.float(round(share, 4))
        found["sits/operators"] = dg.MetadataValue.md(_operators(profile.kernels, rows))
    if profile.batching.evidence:
        found["sits/batching_evidence"] = dg.MetadataValue.md(_list(profile.batching.evidence))
    warnings = [
        *profile.warnings,
        *profile.rate_notes(card.flops_per_second),
        *(f"the cost of {u.count} × {name} is not known: {u.reason}" for name, u in profile.uncosted.items()),
    ]
    if warnings:
        found["sits/warnings"] = dg.MetadataValue.md(_list(warnings))
    return found


def progress_metadata(progress: Progress) -> Mapping[str, dg.MetadataValue[Any]]:
    """Return what an observation shows while a partition is being computed."""
    found: dict[str, dg.MetadataValue[Any]] = {
        "sits/rows_done": dg.MetadataValue.int(progress.rows_known),
        "sits/rows_committed": dg.MetadataValue.int(progress.rows_resumed + progress.rows_done),
        "sits/rows_total": dg.MetadataValue.int(progress.rows_total),
    }
    if progress.rows_per_second is not None:
        found["sits/rows_per_second"] = dg.MetadataValue.float(round(progress.rows_per_second, 2))
    if progress.seconds_left is not None:
        found["sits/seconds_left"] = dg.MetadataValue.float(round(max(0.0, progress.seconds_left), 1))
    if progress.memory_bytes_peak:
        found["sits/memory_bytes_peak"] = dg.MetadataValue.int(progress.memory_bytes_peak)
    return found


def picture(trace: Sequence[DeviceCall]) -> str:
    """Return a small Markdown image: rows of a batch (blue) and device memory (orange) over time.

    It stays below the 1,000 characters up to which Dagster's UI shows Markdown in place.
    """
    step = max(1, math.ceil(len(trace) / PICTURE_POINTS_MAX))
    calls = trace[::step]
    lines = _line([call.rows for call in calls], "#36c")
    memory = [call.memory_bytes for call in calls if call.memory_bytes is not None]
    if len(memory) == len(calls):
        lines += _line(memory, "#e80")
    size = f"0 0 {PICTURE_WIDTH} {PICTURE_HEIGHT}"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{PICTURE_WIDTH}">{lines}</svg>'
    return f"![batches](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _line(values: Sequence[int], colour: str) -> str:
    top = max(*values, 1) if len(values) > 1 else max(values[0], 1)
    last = max(1, len(values) - 1)
    points = " ".join(
        f"{round(index * PICTURE_WIDTH / last)},{round(PICTURE_HEIGHT * (1 - 0.9 * value / top))}"
        for index, value in enumerate(values)
    )
    return f'<polyline fill="none" stroke="{colour}" points="{points}"/>'


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(sentence.split())}" for sentence in sentences)


def _reference_rows(profile: ModelProfile) -> int:
    """Return the rows of the batch whose costs are shown."""
    if profile.batch_rows_fixed is not None:
        return profile.batch_rows_fixed
    return 1 if profile.batching.verdict is Batching.NOT_BATCHABLE else REFERENCE_ROWS


def _schema(tensors: Sequence[TensorProfile]) -> dg.TableSchema:
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                name=tensor.name[:NAME_CHARACTERS_MAX],
                type=tensor.dtype + ("" if tensor.shape is None else _shape(tensor.shape)),
                description=None if tensor.batch_axis is None else f"rows along axis {tensor.batch_axis}",
            )
            for tensor in tensors[:TENSORS_SHOWN_MAX]
        ]
    )


def _shape(shape: Sequence[int | str | None]) -> str:
    lengths = ", ".join("?" if length is None else str(length)[:NAME_CHARACTERS_MAX] for length in shape)
    return f" [{lengths}]"


def _operators(kernels: Sequence[KernelCost], rows: int) -> str:
    """Return a Markdown table of what a batch costs by operator, the dearest first."""
    totals: dict[str, tuple[int, float, float]] = {}
    for kernel in kernels:
        count, flops, moved = totals.get(kernel.operator, (0, 0.0, 0.0))
        totals[kernel.operator] = (
            count + 1,
            flops + kernel.flops(rows),
            moved + kernel.bytes_moved(rows),
        )
    _, flops_all, moved_all = _sum(totals.values())
    shown = sorted(totals.items(), key=lambda item: (-item[1][1], -item[1][2], item[0]))
    if len(shown) > OPERATORS_SHOWN_MAX:
        rest = _sum(total for _, total in shown[OPERATORS_SHOWN_MAX:])
        shown[OPERATORS_SHOWN_MAX:] = [(f"{len(shown) - OPERATORS_SHOWN_MAX} others", rest)]
    lines = [
        f"| batch of {rows} | kernels | FLOPs | share | bytes moved | share |",
        "|---|--:|--:|--:|--:|--:|",
        *(
            f"| {_cell(name)} | {count} | {si(flops)} | {_share(flops, flops_all)} "
            f"| {si(moved)} | {_share(moved, moved_all)} |"
            for name, (count, flops, moved) in shown
        ),
    ]
    return "\n".join(lines)


def _sum(totals: Iterable[tuple[int, float, float]]) -> tuple[int, float, float]:
    counts, flops, moved = zip(*totals, strict=True)
    return sum(counts), sum(flops), sum(moved)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:NAME_CHARACTERS_MAX]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
