"""Values to Dagster metadata: which keys, which values, and what is left out when it is not known."""

from __future__ import annotations

import base64
from typing import Any
from xml.etree import ElementTree as ET

import dagster as dg
import pytest

from sits_dagster.inference.stats import DeviceCall, PartitionStats, Progress
from sits_dagster.metadata import (
    CLASS_TAG,
    DEADLINE_TAG,
    PRIORITY_TAG,
    partition_metadata,
    picture,
    progress_metadata,
)

INLINE_CHARACTERS_MAX = 1000
SVG = "{http://www.w3.org/2000/svg}"
PREFIX = "![batches](data:image/svg+xml;base64,"

FACTS: dict[str, Any] = {
    "rows": 100,
    "rows_written": 97,
    "rows_quarantined": 3,
    "rows_resumed": 40,
    "rows_carried": 2,
    "rows_recomputed": 8,
    "batches": 12,
    "segments": 4,
    "device_seconds": 1.5,
    "busy_fraction": 0.987654,
    "rows_per_second": 123.456789,
    "padding_share": 0.123456,
    "memory_bytes_peak": 5_000,
    "out_of_memory": 1,
    "is_complete": True,
    "generation": "0123456789abcdef-0001",
    "quarantine": "_quarantine",
}


def _metadata(**changes: Any) -> dict[str, Any]:
    found = partition_metadata(
        PartitionStats(**{**FACTS, **changes}),
        model_digest="d" * 64,
        output="/out",
        quarantine="/out/_quarantine",
        host_memory_bytes_peak=7_000,
    )
    return {name: value.value for name, value in found.items()}


def _call(rows: int, memory_bytes: int | None = 1 << 30, at_seconds: float = 0.0) -> DeviceCall:
    return DeviceCall(at_seconds=at_seconds, rows=rows, memory_bytes=memory_bytes)


def _lines(text: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return colour and points of each line of a picture."""
    assert text.startswith(PREFIX)
    assert text.endswith(")")
    svg = ET.fromstring(base64.b64decode(text[len(PREFIX) : -1], validate=True))  # noqa: S314 - our own
    assert svg.tag == f"{SVG}svg"
    assert {child.tag for child in svg} == {f"{SVG}polyline"}
    return [
        (
            line.attrib["stroke"],
            [(int(x), int(y)) for x, y in (point.split(",") for point in line.attrib["points"].split())],
        )
        for line in svg
    ]


def test_every_key_has_its_value() -> None:
    """A materialisation shows these keys and no others, numbers rounded to what a reader can use."""
    assert _metadata() == {
        "dagster/row_count": 97,
        "sits/rows_read": 100,
        "sits/rows_quarantined": 3,
        "sits/rows_recomputed": 8,
        "sits/resumed_from_row": "40",
        "sits/batches": 12,
        "sits/segments": 4,
        "sits/padding_share": 0.1235,
        "sits/out_of_memory": 1,
        "sits/host_memory_bytes_peak": 7_000,
        "sits/model_digest": "d" * 64,
        "sits/generation": "0123456789abcdef-0001",
        "sits/output_path": "/out",
        "sits/device_busy_fraction": 0.9877,
        "sits/rows_per_second": 123.46,
        "sits/memory_bytes_peak": 5_000,
        "sits/quarantine_path": "/out/_quarantine",
    }


def test_numbers_are_numbers() -> None:
    """Dagster plots integers and floats only, so no number is shown as text, but for the resume point."""
    found = partition_metadata(
        PartitionStats(**FACTS),
        model_digest="d",
        output="/out",
        quarantine="",
        host_memory_bytes_peak=1,
    )
    texts = {name for name, value in found.items() if isinstance(value, dg.TextMetadataValue)}
    assert texts == {"sits/resumed_from_row", "sits/model_digest", "sits/generation"}
    assert isinstance(found["sits/output_path"], dg.PathMetadataValue)


def test_what_is_unknown_is_left_out() -> None:
    """A run without device calls shows no speed, no busy share and no picture, rather than zeros."""
    found = partition_metadata(
        PartitionStats(
            **{
                **FACTS,
                "batches": 0,
                "busy_fraction": None,
                "rows_per_second": None,
                "memory_bytes_peak": 0,
            }
        ),
        model_digest="d",
        output="/out",
        quarantine="",
        host_memory_bytes_peak=1,
    )
    unknown = {
        "sits/device_busy_fraction",
        "sits/rows_per_second",
        "sits/memory_bytes_peak",
        "sits/quarantine_path",
        "sits/batches_over_time",
        "sits/notes",
    }
    assert not unknown & set(found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"segments": 0, "rows_resumed": 100}, "complete"),
        ({"segments": 0, "rows": 0, "rows_resumed": 0}, "0"),
        ({"segments": 0, "is_complete": False, "rows_resumed": 40}, "40"),
        ({"segments": 2, "rows_resumed": 0}, "0"),
    ],
)
def test_resume_point(changes: dict[str, Any], expected: str) -> None:
    """The resume point is the rows that were there, or `complete` when the run had nothing to do."""
    assert _metadata(**changes)["sits/resumed_from_row"] == expected


def test_notes_are_a_list() -> None:
    """Sentences about what was found are shown as a list."""
    assert _metadata(notes=("One.", "Two."))["sits/notes"] == "- One.\n- Two."


def test_progress() -> None:
    """An observation shows rows done and committed, rows in all, speed, time left and memory."""
    progress = Progress(rows_total=100, rows_resumed=20, rows_done=10)
    progress.add_call(started=5.0, ended=7.0, rows=16, memory_bytes=123)
    found = {name: value.value for name, value in progress_metadata(progress).items()}
    assert found == {
        "sits/rows_done": 36,
        "sits/rows_committed": 30,
        "sits/rows_total": 100,
        "sits/rows_per_second": 8.0,
        "sits/seconds_left": 8.0,
        "sits/memory_bytes_peak": 123,
    }


def test_progress_before_the_first_call() -> None:
    """Before the first device call there is no speed, no time left and no memory to show."""
    found = progress_metadata(Progress(rows_total=100))
    assert set(found) == {"sits/rows_done", "sits/rows_committed", "sits/rows_total"}


@pytest.mark.parametrize("calls", [1, 2, 3, 23, 24, 25, 48, 49, 100, 512])
def test_picture_stays_short_and_ends_where_the_run_ended(calls: int) -> None:
    """However long the trace, the picture is shown inline and spans its whole width."""
    text = picture([_call(1 + i % 7, (1 << 36) + i) for i in range(calls)])
    assert len(text) < INLINE_CHARACTERS_MAX
    lines = _lines(text)
    assert [colour for colour, _ in lines] == ["#36c", "#e80"]
    for _, points in lines:
        assert points[0][0] == 0
        assert points[-1][0] == (220 if calls > 1 else 0)
        assert all(0 <= y <= 40 for _, y in points)


def test_picture_shows_rows_and_memory() -> None:
    """The more rows or bytes, the higher the line."""
    [(_, rows), (_, memory)] = _lines(picture([_call(1, 100), _call(2, 100), _call(4, 50)]))
    assert rows[0][1] > rows[1][1] > rows[2][1]
    assert memory[0][1] == memory[1][1] < memory[2][1]


def test_picture_without_memory() -> None:
    """A device that does not tell its memory has no memory line, not one at zero."""
    [(colour, _)] = _lines(picture([_call(1, None), _call(2, None)]))
    assert colour == "#36c"


def test_picture_of_an_idle_device() -> None:
    """Batches without rows or bytes do not break the picture."""
    assert len(_lines(picture([_call(0, 0), _call(0, 0)]))) == 2


def test_tags() -> None:
    """The tags are those that Dagster and the run queue look for."""
    assert (CLASS_TAG, DEADLINE_TAG, PRIORITY_TAG) == ("sits/class", "sits/deadline", "dagster/priority")
