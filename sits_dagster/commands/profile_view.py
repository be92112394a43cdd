"""How `sits profile` shows its report: tables of plain text, whatever a file calls its tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sits_dagster.models.figures import si
from sits_dagster.models.profile import BATCH_ROWS_MAX

__all__ = ["print_report", "working"]

OPERATORS_SHOWN = 8
NAME_CHARS_MAX = 60
NAME_CHARS_MIN = 16
LABEL_CHARS_MAX = 20
WIDTH_UNLIMITED = 10_000
DIGEST_CHARS = 12
MILLISECOND = 1e-3
KILO = 1000
GIBIBYTE = 1 << 30
UNPACKED_RATIO_MIN = 1.2
VERDICTS = {
    "invariant": "rows of equal shape may share a batch",
    "mask-required": "rows may share a batch, rows of unlike length too if the mask covers the padding",
    "not-batchable": "rows must not share a batch",
    "unprobed": "not known: the model was not tried",
}
SOURCES = {
    "graph": "read from the file's graph: 20-30 % off is usual, on either side",
    "optimized": "ONNX Runtime's own plan of buffers, replayed with its CPU kernels; on a GPU the CUDA "
    "context and the workspaces of convolutions come on top",
    "unknown": "not known: too few shapes are",
}


@contextmanager
def working() -> Generator[Callable[[str], None]]:
    """Show one line on what is being done while the block runs, if a person looks at stderr."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield lambda _text: None
        return
    with console.status("Profiling") as status:
        yield lambda text: status.update(_clean(text))


def print_report(report: Mapping[str, Any]) -> None:
    """Print what `profile_path` returned as tables; control characters and markup of a file stay text."""
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if "models" not in report:
        _print_model(console, report)
        return
    for model in report["models"]:
        _print_model(console, model)
        console.print()
    for ensemble in report["ensembles"]:
        steps = " > ".join(_clean(step["model"]) for step in ensemble["steps"])
        console.print(f"{_clean(ensemble['name'])}: an ensemble of {steps or 'nothing'}", style="bold")
    _print_warnings(console, report["warnings"])


def _print_model(console: Console, report: Mapping[str, Any]) -> None:
    title = f"{_clean(report['name'])}  {report['digest'][:DIGEST_CHARS]}  {_bytes(report['file_bytes'])}"
    console.print(title, style="bold")
    console.print(_tensors(report))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, text in (*_model_facts(report), *_device_facts(report)):
        facts.add_row(label, text)
    console.print(facts)
    if report["seconds_predicted"] is not None or report["memory_source"] != "unknown":
        _print_columns(console, _batches(report))
    if report["operators"]:
        _print_columns(console, _operators(report))
    # What the verdict on batching says already is not said again.
    evidence = report["batching_evidence"]
    _print_warnings(
        console, [text for text in report["warnings"] if not any(text.endswith(known) for known in evidence)]
    )


def _print_warnings(console: Console, warnings: list[str]) -> None:
    for sentence in warnings:
        console.print(f"warning: {_clean(sentence, limit=None)}", style="yellow", soft_wrap=True)


def _tensors(report: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for title in ("name", "type", "shape"):
        table.add_column(title, overflow="fold")  # a length that is cut would read as another one
    for kind in ("inputs", "outputs"):
        for value in report[kind]:
            shape = _shape(value, report["lengths"])
            table.add_row(kind.removesuffix("s"), _clean(value["name"]), value["dtype"], shape)
    return table


def _shape(value: Mapping[str, Any], lengths: Mapping[str, int]) -> str:
    if value["shape"] is None or (not value["shape"] and value["batch_axis"] is not None):
        return "not in the file"
    if not value["shape"]:
        return "one number"
    axes: list[str] = []
    for axis, length in enumerate(value["shape"]):
        text = "?" if length is None else _clean(str(length))
        key = f"{value['name']}[{axis}]" if length is None else length
        if axis == value["batch_axis"]:
            text = "rows" if length is None else f"{text} (rows)"
        elif key in lengths:
            text = f"{text} = {lengths[key]}"
        axes.append(text)
    return f"[{', '.join(axes)}]"


def _model_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    by_type = sorted(report["parameter_bytes_by_type"].items(), key=lambda item: -item[1])
    types = ", ".join(f"{dtype} {_bytes(size)}" for dtype, size in by_type)
    unpacked = 0 < UNPACKED_RATIO_MIN * report["file_bytes"] < report["parameter_bytes"]
    grown = ", unpacked from the smaller file" if unpacked else ""
    size = _bytes(report["parameter_bytes"])
    yield "parameters", f"{report['parameters']:,} in {size} ({types or 'none'}){grown}"
    rows = report["rows"]
    graph = "ONNX Runtime's optimised" if report["kernels_source"] == "optimized" else "the file's"
    per_row, batch = si(report["flops_per_row"], "FLOP"), si(report["flops_batch"], "FLOP")
    arithmetic = f"{per_row} a row, {batch} a batch of {rows} (a multiply-add counts as two)"
    yield "arithmetic", f"{arithmetic} in {report['kernels']:,} kernels of {graph} graph"
    per_row, batch = _bytes(report["bytes_per_row"]), _bytes(report["bytes_moved_batch"])
    yield "memory traffic", f"{per_row} a row, {batch} a batch of {rows}, weights included"
    source = SOURCES[report["memory_source"]]
    if report["memory_bytes"] is None:
        yield "activations", source
    else:
        yield "activations", f"{_peak(report)} at their peak"
        yield "", source
    for growth in report["growth"]:
        yield f"if {_clean(growth['axis'], limit=LABEL_CHARS_MAX)} grows", _growth(growth)
    yield "batching", f"{report['batching']}: {VERDICTS[report['batching']]}"
    for sentence in report["batching_evidence"]:
        yield "", f"- {_clean(sentence, limit=None)}"
    if report["calibration"] is not None:
        yield from _calibration(report["calibration"])
    if report["triton"] is not None:
        yield "triton", _triton(report["triton"])


def _calibration(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    held = ", ".join(f"{rows} rows hold {_bytes(size)}" for rows, size in found["memory_held_bytes"].items())
    yield "measured", f"on {_clean(found['device'])}: {held}"
    if found["seconds"]:
        times = ", ".join(f"{_seconds(seconds)} for {rows}" for rows, seconds in found["seconds"].items())
        yield "", f"a batch takes {times}, as its time model says"
    if found["batch_rows_flat"] is not None:
        looked_at = f"up to {found['batch_rows_looked_at']:,} rows, "
        yield "", f"{looked_at}larger batches than {found['batch_rows_flat']:,} gain less than 5 %"
    if found["bandwidth_contention"] is not None:
        share = f"{found['bandwidth_contention']:.0%}"
        yield "", f"the bandwidth that it reached is what a contention of {share} leaves, by the article"


def _peak(report: Mapping[str, Any]) -> str:
    fixed, line = report["batch_rows_fixed"], report["memory_bytes"]
    if fixed is not None:
        return f"{_bytes(line['a'] + fixed * line['b'])} for the fixed batch of {fixed}"
    return f"{_bytes(line['a'])} + {_bytes(line['b'])} × rows"


def _growth(growth: Mapping[str, Any]) -> str:
    ratios = [
        f"{what} × {growth[key]:.2f}"
        for what, key in (("memory", "memory_ratio_at_double"), ("arithmetic", "flops_ratio_at_double"))
        if growth[key] is not None
    ]
    length = growth["length"]
    # What contributes less than a thousandth at the double length is rounding.
    terms = [value * (2 * length) ** power for power, value in enumerate(growth["memory_bytes"])]
    least = max(map(abs, terms)) / KILO
    letters = ("", "·length", "·length²")
    formula = " + ".join(
        f"{value:,.6g}{letters[power]}"
        for power, value in enumerate(growth["memory_bytes"])
        if abs(terms[power]) > least
    )
    bytes_a_row = f"; bytes a row in the file's graph: {formula}" if formula else ""
    return f"from {length} to {2 * length}: {', '.join(ratios) or 'nothing is known'}{bytes_a_row}"


def _triton(triton: Mapping[str, Any]) -> str:
    groups = ", ".join(f"{group['count']} × {group['kind']}" for group in triton["instances"])
    batching = triton["dynamic_batching"]
    waits = (
        "no dynamic batching"
        if batching is None
        else f"dynamic batching, waits {batching['max_queue_delay_microseconds']} µs at most"
    )
    return (
        f"version {triton['version']}, max_batch_size {triton['max_batch_size']}, "
        f"instances: {groups or 'the default, 1 a GPU'}, {waits}"
    )


def _device_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reference = " (a reference, as no --device is given)" if report["device_is_reference"] else ""
    rate = f"{si(report['flops_rate_per_second'], 'FLOP/s')} in {report['flops_rate_dtype']}"
    bandwidth = f"{_bytes(report['bandwidth_bytes_per_second'])}/s"
    gap = f"{_seconds(report['launch_seconds'])} a kernel"
    yield "device", f"{report['device']}{reference}: {rate}, {bandwidth}, {gap}"
    yield "", "times below are a roofline of its data sheet: the least that is possible, no measurement"
    if report["uncosted"]:
        share = sum(found["share"] for found in report["uncosted"].values())
        yield "", f"at least: {share:.0%} of the calls are of unknown cost and count as nothing"
    yield "largest batch", _largest(report)


def _largest(report: Mapping[str, Any]) -> str:
    most, limit = report["batch_rows_max"], report["memory_limit_bytes"]
    size = _bytes(limit) + (f" ({limit // GIBIBYTE} GiB)" if limit % GIBIBYTE == 0 else "")
    room = f"{report['watermark']:.0%} of {size}"
    if most is None:
        return "not known, as the memory is not"
    if most == 0:
        return f"none: not even {report['batch_rows_fixed'] or 1} rows and the weights fit into {room}"
    if report["batch_rows_fixed"]:
        return f"{most:,}: the file fixes it; it fits into {room}"
    why = " (no more is looked for)" if most == BATCH_ROWS_MAX else ""
    if report["batching"] == "not-batchable":
        why = " (rows must not share a batch)"
    elif report["triton"] is not None and most == report["triton"]["max_batch_size"]:
        why = " (Triton's max_batch_size)"
    return f"{most:,} row{'' if most == 1 else 's'}{why} within {room}, weights included"


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of figures.

    Args:
        title: Its title.
        cells: Its cells.
        rank: On a narrow terminal the columns of the highest rank go first; 0 always stays.
        is_text: Whether it holds names, which may go on in the next line.
    """

    title: str
    cells: list[str]
    rank: int = 0
    is_text: bool = False


def _print_columns(console: Console, columns: list[_Column]) -> None:
    """Print a table; columns are left out before a figure is cut, which would read as another one."""
    shown = list(columns)
    unlimited = console.options.update(max_width=WIDTH_UNLIMITED)
    while console.measure(_table(shown), options=unlimited).minimum > console.width:
        least = max(shown, key=lambda column: column.rank)
        if least.rank == 0:
            break
        shown.remove(least)
    console.print(_table(shown))
    if hidden := ", ".join(column.title for column in columns if column not in shown):
        console.print(f"a wider terminal shows more: {hidden}", style="dim")


def _table(columns: list[_Column]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        if column.is_text:
            table.add_column(column.title, overflow="fold", min_width=NAME_CHARS_MIN)
        else:
            width = max(map(len, (column.title, *column.cells)))
            table.add_column(column.title, justify="right", no_wrap=True, min_width=width)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _batches(report: Mapping[str, Any]) -> list[_Column]:
    batches = report["batches"]

    def column(key: str, form: Callable[[Any], str]) -> list[str]:
        return [_or_dash(batch[key], form) for batch in batches]

    loaded = column("memory_held_bytes", lambda size: _bytes(size + report["parameter_bytes"]))
    loaded = [
        text + (" (too much)" if batch["is_within_limit"] is False else "")
        for text, batch in zip(loaded, batches, strict=True)
    ]
    return [
        _Column("rows", column("rows", "{:,}".format)),
        _Column("arena holds", column("memory_held_bytes", _bytes), rank=4),
        _Column("with weights", loaded),
        _Column("FLOP/byte", column("arithmetic_intensity", "{:,.1f}".format), rank=5),
        _Column("bound by", column("roofline_bound", str), rank=2),
        _Column("memory busy", column("io_bound_ratio", "{:.0%}".format), rank=3),
        _Column("time", column("seconds_predicted", _seconds)),
        _Column("rows/s", column("rows_per_second_predicted", "{:,.0f}".format), rank=1),
    ]


def _operators(report: Mapping[str, Any]) -> list[_Column]:
    """Show the operators that take most of the time, and those that move most of the bytes."""
    keys = ("seconds_predicted", "bytes_moved")
    totals = {key: sum(group[key] for group in report["operators"]) or 1 for key in keys}
    names = {
        group["operator"]
        for key in keys
        for group in sorted(report["operators"], key=lambda group: -group[key])[:OPERATORS_SHOWN]
    }
    shown = [group for group in report["operators"] if group["operator"] in names]

    def column(key: str, form: Callable[[Any], str]) -> list[str]:
        return [form(group[key]) for group in shown]

    def shares(key: str) -> list[str]:
        return column(key, lambda value: f"{value / totals[key]:.0%}")

    title = f"operators (batch of {report['rows']:,})"
    return [
        _Column(title, column("operator", _clean), is_text=True),
        _Column("calls", column("calls", "{:,}".format), rank=1),
        _Column("FLOP", column("flops", si), rank=2),
        _Column("bytes", column("bytes_moved", _bytes), rank=3),
        _Column("time", column("seconds_predicted", _seconds)),
        _Column("of the time", shares("seconds_predicted")),
        _Column("of the bytes", shares("bytes_moved"), rank=4),
    ]


def _or_dash(value: Any, form: Callable[[Any], str]) -> str:  # noqa: ANN401 - a number of the report
    return "-" if value is None else form(value)


def _clean(text: str, *, limit: int | None = NAME_CHARS_MAX) -> str:
    """Return a text of a stranger on one line, what is not printable as escapes."""
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in " ".join(text.split())
    )
    return line if limit is None or len(line) <= limit else f"{line[: limit - 1]}…"


def _bytes(size: float) -> str:
    return si(size, "B")


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= MILLISECOND else f"{seconds * 1e6:.3g} µs"
