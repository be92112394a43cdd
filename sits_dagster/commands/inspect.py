"""`sits inspect`: what is in an output folder, and whether it is what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.parquet import rows_of
from sits_dagster.errors import DataError
from sits_dagster.inference.checkpoint import CONTROL_FOLDER
from sits_dagster.inference.inspection import Inspection, inspect_output

__all__ = ["inspect_folders", "print_report"]

FAULTS = ("incomplete", "duplicated", "orphans", "damaged")


def inspect_folders(path: Path, *, is_quick: bool) -> dict[str, Any]:
    """Return the state of `path`, or of each output folder below it.

    Args:
        path: A partition's output folder, or a folder of several.
        is_quick: Compare sizes and row counts only, not digests.

    Raises:
        DataError: There is no output folder.
    """
    folders = sorted(found.parent for found in path.rglob(CONTROL_FOLDER) if found.is_dir())
    if not folders:
        msg = f"{str(path)!r} is no output folder: it has no {CONTROL_FOLDER} folder, nor has any below it."
        raise DataError(msg, hint="give the sink's folder of one partition, or the folder above it.")
    found = [_describe(folder, is_quick=is_quick) for folder in folders]
    return {"outputs": found, "is_sound": all(item["is_sound"] for item in found)}


def print_report(report: Mapping[str, Any]) -> None:
    """Print what `inspect_folders` returned as tables."""
    console = Console()
    titles = ("output", "state", "rows", "written", "quarantined", "shards", "segments")
    table = Table(*titles, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for item in report["outputs"]:
        state = "complete" if item["is_complete"] else "unfinished"
        table.add_row(
            Path(item["path"]).name,
            state if not (item["damaged"] or item["duplicated"]) else "[red]damaged[/red]",
            *(str(item[name]) for name in ("rows", "rows_written", "rows_quarantined")),
            str(len(item["shards"])),
            str(len(item["segments"])),
        )
    console.print(table)
    for item in report["outputs"]:
        for kind in FAULTS:
            for sentence in item[kind]:
                console.print(f"{item['path']}: {kind}: {sentence}", highlight=False)


def _describe(folder: Path, *, is_quick: bool) -> dict[str, Any]:
    store = LocalStore(folder)
    found = inspect_output(
        store,
        rows_of=lambda path: rows_of(str(folder / path)),
        sha256_of=None if is_quick else store.sha256,
    )
    return {"path": str(folder), **_facts(found)}


def _facts(found: Inspection) -> dict[str, Any]:
    return {
        "is_sound": found.is_sound,
        "is_complete": found.is_complete,
        "generation": found.generation.name if found.generation else None,
        "fingerprint": asdict(found.generation.fingerprint) if found.generation else None,
        "rows": found.rows,
        "rows_written": found.rows_written,
        "rows_quarantined": found.rows_quarantined,
        "digest": found.digest,
        "shards": [asdict(shard) for shard in (found.generation.shards if found.generation else ())],
        "segments": [asdict(commit) for commit in found.commits],
        **{kind: list(getattr(found, kind)) for kind in FAULTS},
    }
