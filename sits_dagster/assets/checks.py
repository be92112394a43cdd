"""Asset checks of an inference output: complete, unique, no orphan files."""

from collections.abc import Sequence

import dagster as dg

from sits_dagster.adapters.parquet import rows_of
from sits_dagster.assets.job import OpenPartition
from sits_dagster.inference.inspection import Inspection, inspect_output

__all__ = ["check_results", "check_specs", "inspect_partition"]

CHECKS = {
    "complete": "Every input row has one output row or one quarantined row.",
    "unique": "No row is in the output twice.",
    "no_orphan_files": "The output folder holds no data files that are not part of the output.",
}
SENTENCES_SHOWN_MAX = 20


def check_specs(asset_key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Return the specifications of the three checks."""
    return [
        dg.AssetCheckSpec(name, asset=asset_key, description=description)
        for name, description in CHECKS.items()
    ]


def inspect_partition(opened: OpenPartition) -> Inspection:
    """Return what is in a partition's output folder; sizes and row counts are compared, not bytes."""
    return inspect_output(opened.store, rows_of=lambda path: rows_of(f"{opened.output}/{path}"))


def check_results(asset_key: dg.AssetKey, inspections: Sequence[Inspection]) -> list[dg.AssetCheckResult]:
    """Return one result a check over the partitions of a run."""
    faults = {
        "complete": [s for i in inspections for s in (*i.incomplete, *i.damaged)],
        "unique": [s for i in inspections for s in i.duplicated],
        "no_orphan_files": [s for i in inspections for s in i.orphans],
    }
    return [
        dg.AssetCheckResult(
            asset_key=asset_key,
            check_name=name,
            passed=not faults[name],
            description="; ".join(faults[name][:SENTENCES_SHOWN_MAX]) or CHECKS[name],
            metadata={
                "rows": sum(i.rows for i in inspections),
                "rows_written": sum(i.rows_written for i in inspections),
                "rows_quarantined": sum(i.rows_quarantined for i in inspections),
                "faults": len(faults[name]),
            },
        )
        for name in CHECKS
    ]
