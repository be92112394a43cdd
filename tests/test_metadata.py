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
    MODEL_PATH_KEY,
    PRIORITY_TAG,
    model_metadata,
    partition_metadata,
    picture,
    progress_metadata,
)
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.cost import KernelCost, Uncosted
from sits_dagster.models.hardware import device_model
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import MemoryPlan
from sits_dagster.models.profile import ModelProfile, TensorProfile

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
    "batching": "not-batchable",
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
        "sits/batching": "not-batchable",
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
    assert texts == {"sits/resumed_from_row", "sits/model_digest", "sits/generation", "sits/batching"}
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
                "batching": "",
            }
        ),
        model_digest="d",
        output="/out",
        quarantine="",
        host_memory_bytes_peak=1,
    )
    unknown = {
        "sits/batching",
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


def _kernel(operator: str, flops: float, moved: float) -> KernelCost:
    return KernelCost(operator=operator, flops=Linear(0.0, flops), bytes_moved=Linear(0.0, moved))


PROFILE: dict[str, Any] = {
    "name": "net",
    "digest": "d" * 64,
    "inputs": (TensorProfile(name="x", dtype="float32", shape=("rows", 3, None), batch_axis=0),),
    "outputs": (TensorProfile(name="y", dtype="int64", shape=None),),
    "lengths": {},
    "input_shapes": InputShapes(
        axes={"x": 0}, lengths={"x": (1, 3, 8)}, assumed={}, rows_fixed=None, free={"x[2]": (("x", 2),)}
    ),
    "parameters": 250_000,
    "parameter_bytes": 1_000_000,
    "parameter_bytes_by_type": {"float32": 999_000, "int64": 1_000},
    "kernels": (_kernel("Conv", 3e9, 2e6), _kernel("Conv", 1e9, 2e6), _kernel("Relu", 1e6, 4e6)),
    "memory_plan": MemoryPlan((Linear(1_000.0, 2_000_000.0),), (1, -1)),
    "memory_source": "optimized",
    "batching": BatchingReport(verdict=Batching.INVARIANT, evidence=("two rows give what each gives",)),
}


def _of_model(**changes: Any) -> dict[str, Any]:
    profile = ModelProfile(**{**PROFILE, **changes})
    found = model_metadata(profile, path="/models/net.onnx", card=device_model("t4"))
    return {name: value.value for name, value in found.items()}


def test_every_key_of_a_model() -> None:
    """A model shows these keys and no others; what is not known is left out."""
    found = _of_model()
    tables = {name: found.pop(name) for name in ("sits/inputs", "sits/outputs", "sits/operators")}
    assert 6_000 < found.pop("sits/batch_rows_max") < 16e9 / 2e6
    assert found == {
        "sits/model_path": "/models/net.onnx",
        "sits/model_digest": "d" * 64,
        "sits/parameters": 250_000,
        "sits/parameter_bytes": 1_000_000,
        "sits/flops_per_row": 4_001_000_000,
        "sits/bytes_per_row": 8_000_000,
        "sits/memory_bytes_fixed": 1_000,
        "sits/memory_bytes_per_row": 2_000_000,
        "sits/batching": "invariant",
        "sits/batching_evidence": "- two rows give what each gives",
        "sits/reference_card": "t4",
        # 32 rows. Memory: 8 MB at 320 GB/s; arithmetic: 4 GFLOP at 8.1 TFLOP/s; Relu waits for the memory.
        "sits/io_bound_ratio": round((32 * 8e6 / 320e9) / (32 * (4e9 / 8.1e12 + 4e6 / 320e9) + 3 * 5e-6), 4),
    }
    [x], [y] = tables["sits/inputs"].columns, tables["sits/outputs"].columns
    assert (x.name, x.type, x.description) == ("x", "float32 [rows, 3, ?]", "rows along axis 0")
    assert (y.name, y.type, y.description) == ("y", "int64", None)
    assert tables["sits/operators"].splitlines() == [
        "| batch of 32 | kernels | FLOPs | share | bytes moved | share |",
        "|---|--:|--:|--:|--:|--:|",
        "| Conv | 2 | 128 G | 100.0% | 128 M | 50.0% |",
        "| Relu | 1 | 32 M | 0.0% | 128 M | 50.0% |",
    ]


@pytest.mark.parametrize(
    ("dtype", "teraflops"), [("float16", 65), ("uint8", 130), ("float64", 8.1), ("int4", 8.1)]
)
def test_rate_of_the_card_is_that_of_the_weights(dtype: str, teraflops: float) -> None:
    """Arithmetic counts at the card's rate for the type of most weights, else at its plain rate."""
    found = _of_model(parameter_bytes_by_type={dtype: 9, "float32": 1}, kernels=(_kernel("Conv", 1e9, 1e6),))
    seconds = 32 * 1e9 / (teraflops * 1e12) + 5e-6
    assert found["sits/io_bound_ratio"] == round((32 * 1e6 / 320e9) / seconds, 4)
    assert ("no rate for float64" in found.get("sits/warnings", "")) == (dtype == "float64")


def test_a_model_that_waits_for_launches_is_not_bound_by_memory() -> None:
    """A thousand small kernels: the gaps between them are most of the time."""
    found = _of_model(kernels=(_kernel("Relu", 1.0, 8.0),) * 1000)
    assert found["sits/io_bound_ratio"] < 0.01


def test_rows_of_a_card_are_those_of_its_arena() -> None:
    """The engine lets CUDA's arena grow by what is asked for, not by powers of two."""
    plan = MemoryPlan((Linear(0.0, 3e6), Linear(0.0, 2e6)), (1, 2))
    found = _of_model(memory_plan=plan)["sits/batch_rows_max"]
    room = int(16e9 * 0.85) - 1_000_000
    for rows, fits in ((found, True), (found + 1, False)):
        policy = ArenaPolicy(strategy=ExtendStrategy.SAME_AS_REQUESTED, bytes_limit=room)
        assert (plan.use(rows, policy) is not None) == fits


def test_numbers_of_a_model_are_numbers() -> None:
    """Dagster plots integers and floats only; what is text is a name, a digest or a verdict."""
    found = model_metadata(ModelProfile(**PROFILE), path="/m.onnx", card=device_model("t4"))
    texts = {name for name, value in found.items() if isinstance(value, dg.TextMetadataValue)}
    assert texts == {"sits/model_digest", "sits/batching", "sits/reference_card"}
    assert isinstance(found[MODEL_PATH_KEY], dg.PathMetadataValue)


def test_model_of_unknown_memory() -> None:
    """Without a memory plan there are no bytes and no rows of a batch, rather than zeros."""
    found = _of_model(memory_source="unknown", kernels=())
    assert not [name for name in found if "memory" in name or "batch_rows" in name]
    assert not {"sits/operators", "sits/io_bound_ratio"} & set(found)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"batch_rows_fixed": 8}, 8),
        ({"batching": BatchingReport(verdict=Batching.NOT_BATCHABLE)}, 1),
        ({"batching": BatchingReport()}, 32),
    ],
)
def test_operators_are_told_for_a_batch_that_may_be(changes: dict[str, Any], rows: int) -> None:
    """Costs are those of the fixed batch, of one row where rows must not share one, else of 32 rows."""
    found = _of_model(**changes)
    assert found["sits/operators"].startswith(f"| batch of {rows} |")
    assert found.get("sits/batch_rows_fixed") == changes.get("batch_rows_fixed")


def test_warnings_of_a_model() -> None:
    """Warnings and operators of unknown cost are one list, each a line whatever its text."""
    found = _of_model(
        warnings=("axis 'n'\nis free",),
        uncosted={"My|Op": Uncosted(count=3, share=0.5, reason="no shape")},
    )
    assert found["sits/warnings"] == "- axis 'n' is free\n- the cost of 3 × My|Op is not known: no shape"


def test_many_operators_are_summed_up() -> None:
    """The table shows the dearest operators and sums up the rest, whatever they are called."""
    names = ["a|b\nc", "x" * 500, *(f"Op{i}" for i in range(30))]
    kernels = tuple(_kernel(name, 1000.0 - i, 1.0) for i, name in enumerate(names))
    lines = _of_model(kernels=kernels)["sits/operators"].splitlines()
    assert len(lines) == 2 + 20 + 1
    assert lines[2].startswith("| a\\|b c | 1 |")
    assert max(map(len, lines)) < 200
    assert lines[-1].startswith("| 12 others | 12 |")
    assert all(line.replace("\\|", "").count("|") == 7 for line in lines)


def test_dear_numbers_are_short() -> None:
    """Numbers round up into the next prefix, and those beyond every prefix are still numbers."""
    for flops, expected in ((999.4 / 32, "999"), (999.6 / 32, "1 k"), (1e25 / 32, "1e+07 E"), (0.0, "0")):
        line = _of_model(kernels=(_kernel("Op", flops, 0.0),))["sits/operators"].splitlines()[2]
        assert line.split(" | ")[2] == expected
        assert line.endswith("| 0 | – |")
