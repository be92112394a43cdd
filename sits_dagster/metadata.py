"""Values to Dagster metadata and tags; the only place where the keys are spelled."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from sits_dagster.inference.stats import DeviceCall, PartitionStats, Progress

__all__ = ["CLASS_TAG", "DEADLINE_TAG", "PRIORITY_TAG", "partition_metadata", "picture", "progress_metadata"]

CLASS_TAG = "sits/class"
DEADLINE_TAG = "sits/deadline"
PRIORITY_TAG = "dagster/priority"

PICTURE_POINTS_MAX = 24
PICTURE_WIDTH = 220
PICTURE_HEIGHT = 40


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
    if quarantine:
        found["sits/quarantine_path"] = dg.MetadataValue.path(quarantine)
    if stats.trace:
        found["sits/batches_over_time"] = dg.MetadataValue.md(picture(stats.trace))
    if stats.notes:
        found["sits/notes"] = dg.MetadataValue.md("\n".join(f"- {note}" for note in stats.notes))
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
