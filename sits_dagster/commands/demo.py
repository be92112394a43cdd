"""`sits demo`: the main job on real data, run by Dagster, with the error rate of what was read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from dagster._core.errors import DagsterExecutionInterruptedError
from rich import box
from rich.console import Console
from rich.table import Table

from sits_dagster.demo import OCR_TEXTS
from sits_dagster.demo.data import DEFAULT_PARTITIONS
from sits_dagster.demo.ocr import character_error_rate

__all__ = ["run_demo"]

INSTANCE_CONFIG = """\
telemetry: {enabled: false}
compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}
concurrency: {pools: {granularity: op, op_granularity_run_buffer: 2}}
run_monitoring: {enabled: true, cancel_timeout_seconds: 300, max_resume_run_attempts: 0}
run_retries: {enabled: true, max_retries: 3, retry_on_asset_or_op_failure: false}
"""
COLUMNS = (
    ("partition", "key"),
    ("rows", "rows"),
    ("quarantined", "rows_quarantined"),
    ("batches", "batches"),
    ("rows/s", "rows_per_second"),
    ("busy", "device_busy_fraction"),
    ("memory", "memory_bytes_peak"),
    ("resumed", "resumed"),
)


def run_demo(home: Path, *, say: Callable[[str], None], as_json: bool) -> dict[str, Any]:
    """Generate what is missing, materialise three daily partitions, and return what came of it.

    Args:
        home: Where everything lies; read by `sits_dagster.definitions` as `SITS_DEMO_HOME`.
        say: Takes a line for the user.
        as_json: Print no table.

    Returns:
        `partitions`, `rows` (read), `rows_written`, `rows_recomputed` and `character_error_rate`.
    """
    say(f"Demo in {home}")
    job = _job(say)
    with dg.DagsterInstance.from_config(str(_instance_folder(home))) as instance:
        partitions = [_materialise(job, instance, key, say) for key in DEFAULT_PARTITIONS]
    report = {
        "partitions": partitions,
        "rows": sum(p["rows"] for p in partitions),
        "rows_written": sum(p["rows_written"] for p in partitions),
        "rows_recomputed": sum(p["rows_recomputed"] for p in partitions),
        "character_error_rate": _error_rate(home),
    }
    if not as_json:
        _print(report, home)
    return report


def _instance_folder(home: Path) -> Path:
    folder = home / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "dagster.yaml"
    if not config.exists():
        config.write_text(INSTANCE_CONFIG, encoding="utf-8")
    os.environ["DAGSTER_HOME"] = str(folder)
    return folder


def _job(say: Callable[[str], None]) -> dg.JobDefinition:
    from sits_dagster.definitions import defs

    @dg.logger
    def plain(_: dg.InitLoggerContext) -> logging.Logger:
        logger = logging.Logger("sits-demo", logging.INFO)  # noqa: LOG001 - not shared with anybody
        logger.addHandler(_Lines(say))
        return logger

    return dg.Definitions.merge(defs, dg.Definitions(loggers={"plain": plain})).resolve_job_def("demo")


class _Lines(logging.Handler):
    """Passes the messages of the run on; Dagster's own events have a lower level."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        text = getattr(record, "dagster_meta", {}).get("orig_message") or record.getMessage()
        self._say(f"  {text}")


def _materialise(
    job: dg.JobDefinition, instance: dg.DagsterInstance, key: str, say: Callable[[str], None]
) -> dict[str, Any]:
    say(f"Partition {key}")
    try:
        result = job.execute_in_process(
            run_config={"loggers": {"plain": {}}}, partition_key=key, instance=instance
        )
    except DagsterExecutionInterruptedError as error:
        raise KeyboardInterrupt from error
    [event] = result.asset_materializations_for_node(OCR_TEXTS)
    values = {name: value.value for name, value in event.metadata.items()}
    return {
        "key": key,
        "rows": values["sits/rows_read"],
        "rows_written": values["dagster/row_count"],
        "rows_quarantined": values["sits/rows_quarantined"],
        "rows_recomputed": values["sits/rows_recomputed"],
        "resumed": _resumed(values),
        "batches": values["sits/batches"],
        "rows_per_second": values.get("sits/rows_per_second"),
        "device_busy_fraction": values.get("sits/device_busy_fraction"),
        "memory_bytes_peak": values.get("sits/memory_bytes_peak") or values["sits/host_memory_bytes_peak"],
    }


def _resumed(values: Mapping[str, Any]) -> int:
    text = values["sits/resumed_from_row"]
    return values["sits/rows_read"] if text == "complete" else int(text)


def _error_rate(home: Path) -> float:
    truth = pa.concat_tables(pq.read_table(home / "truth" / f"{key}.parquet") for key in DEFAULT_PARTITIONS)
    found = pa.concat_tables(
        pq.read_table(part)
        for key in DEFAULT_PARTITIONS
        for part in sorted((home / "texts" / key).glob("part-*.parquet"))
    )
    joined = truth.rename_columns(["line_id", "truth"]).join(found.select(["line_id", "text"]), "line_id")
    rate = character_error_rate(joined.column("text").to_pylist(), joined.column("truth").to_pylist())
    return round(rate, 5)


def _print(report: Mapping[str, Any], home: Path) -> None:
    console = Console()
    table = Table(*(title for title, _ in COLUMNS), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for partition in report["partitions"]:
        table.add_row(*(_cell(name, partition) for _, name in COLUMNS))
    console.print(table)
    done = all(not p["batches"] for p in report["partitions"])
    if done:
        console.print("All is done already: nothing was computed.")
    console.print(
        f"{report['rows_written']} of {report['rows']} lines were read, "
        f"character error rate {report['character_error_rate']:.2%}; "
        f"the broken ones are in {home / 'texts'}/*/_quarantine."
    )
    console.print("To see it in Dagster's UI: make ui, then open http://127.0.0.1:3000", highlight=False)


def _cell(name: str, partition: Mapping[str, Any]) -> str:
    value = partition[name]
    match name:
        case "resumed":
            return "complete" if value == partition["rows"] else f"row {value}" if value else "start"
        case "memory_bytes_peak":
            return f"{value / 2**20:.0f} MiB"
        case "device_busy_fraction":
            return "–" if value is None else f"{value:.1%}"
        case _:
            return "–" if value is None else str(value)
