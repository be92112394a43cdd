"""Every kind of partitions, one run a key or one run for a range."""

from typing import Any

import dagster as dg
import pytest

from sits_dagster import ParquetDataset, ParquetSink
from sits_dagster.errors import ConfigError
from tests.assets.workspace import DAY, Workspace, scores

PASSED = {"complete": True, "unique": True, "no_orphan_files": True}
FAN_OUT = pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])


@FAN_OUT
def test_daily_partition(workspace: Workspace, fan_out: bool) -> None:
    """A daily partition's rows are read from the day's folder and land, in order, in the day's output."""
    workspace.write(10)
    workspace.write(7, file="b.parquet", start=10)
    workspace.write(3, key="2026-01-02", start=500)
    outcome = workspace.run(workspace.asset(fan_out=fan_out))
    assert outcome.result.success, outcome.error
    assert workspace.output() == scores(range(17))
    assert outcome.materialised == [DAY]
    assert outcome.checks == PASSED
    assert not workspace.out("2026-01-02").exists()


@FAN_OUT
def test_static_partition(workspace: Workspace, fan_out: bool) -> None:
    """A static partition key names its folders."""
    workspace.write(5, key="eu")
    partitions_def = dg.StaticPartitionsDefinition(["eu", "us"])
    outcome = workspace.run(workspace.asset(partitions_def=partitions_def, fan_out=fan_out), key="eu")
    assert outcome.materialised == ["eu"]
    assert workspace.output("eu") == scores(range(5))


@FAN_OUT
def test_multi_partition(workspace: Workspace, fan_out: bool) -> None:
    """Each dimension of a multi-partition has a placeholder of its name."""
    days = dg.StaticPartitionsDefinition(["mon", "tue"])
    regions = dg.StaticPartitionsDefinition(["eu", "us"])
    workspace.write(6, key="eu/tue")
    asset = workspace.asset(
        partitions_def=dg.MultiPartitionsDefinition({"day": days, "region": regions}),
        source=ParquetDataset("in/{region}/{day}"),
        sink=ParquetSink("out/day={day}/region={region}", keep_columns=["id"]),
        fan_out=fan_out,
    )
    outcome = workspace.run(asset, key=dg.MultiPartitionKey({"day": "tue", "region": "eu"}))
    assert outcome.result.success, outcome.error
    assert outcome.materialised == ["tue|eu"]
    assert workspace.output("day=tue/region=eu") == scores(range(6))


def test_multi_partition_whose_path_forgets_a_dimension_is_refused(workspace: Workspace) -> None:
    """Two partitions never share an output folder: a dimension that is left out of the sink is an error."""
    days = dg.StaticPartitionsDefinition(["mon", "tue"])
    regions = dg.StaticPartitionsDefinition(["eu", "us"])
    both = dg.MultiPartitionsDefinition({"day": days, "region": regions})
    with pytest.raises(ConfigError, match=r"out/\{day\}.*region"):
        workspace.asset(partitions_def=both, sink=ParquetSink("out/{day}"))
    workspace.asset(partitions_def=both, sink=ParquetSink("out/{partition_key}"))


@FAN_OUT
def test_dynamic_partition(workspace: Workspace, fan_out: bool) -> None:
    """A partition that was added while Dagster runs is processed like any other."""
    workspace.instance.add_dynamic_partitions("uploads", ["upload 7"])
    workspace.write(4, key="upload 7")
    asset = workspace.asset(partitions_def=dg.DynamicPartitionsDefinition(name="uploads"), fan_out=fan_out)
    outcome = workspace.run(asset, key="upload 7")
    assert outcome.result.success, outcome.error
    assert workspace.output("upload 7") == scores(range(4))


@FAN_OUT
def test_asset_without_partitions(workspace: Workspace, fan_out: bool) -> None:
    """An asset without partitions processes one folder."""
    workspace.write(9, key="all")
    asset = workspace.asset(
        partitions_def=None,
        backfill_policy=None,
        source=ParquetDataset("in/all"),
        sink=ParquetSink("out/all", keep_columns=["id"]),
        fan_out=fan_out,
    )
    outcome = workspace.run(asset, key=None)
    assert outcome.result.success, outcome.error
    assert outcome.materialised == [None]
    assert outcome.metadata(None)["dagster/row_count"] == 9
    assert outcome.checks == PASSED
    assert workspace.output("all") == scores(range(9))


def test_placeholder_without_partitions_is_an_error(workspace: Workspace) -> None:
    """A path with a placeholder in an asset without partitions is refused when the asset is built."""
    with pytest.raises(ConfigError, match=r"'in/\{partition_key\}'.*the asset has no partitions"):
        workspace.asset(partitions_def=None, backfill_policy=None)


@FAN_OUT
def test_range_in_one_run(workspace: Workspace, fan_out: bool) -> None:
    """One run over a range materialises each key with its own numbers, and loads the model once."""
    sizes = {"2026-01-01": 5, "2026-01-02": 9, "2026-01-03": 13}
    for key, rows in sizes.items():
        workspace.write(rows, key=key)
    outcome = workspace.run(workspace.asset(fan_out=fan_out), end="2026-01-03")
    assert outcome.result.success, outcome.error
    assert set(outcome.materialised) == set(sizes)
    for key, rows in sizes.items():
        metadata = outcome.metadata(key)
        assert metadata["sits/rows_read"] == metadata["dagster/row_count"] == rows
        assert metadata["sits/output_path"] == str(workspace.out(key))
        assert workspace.output(key) == scores(range(rows))
    assert outcome.checks == PASSED
    if not fan_out:
        assert outcome.log.count("is leased") == 1


def test_range_keeps_what_was_done_before_a_later_key_fails(workspace: Workspace) -> None:
    """When a later key of a range fails, the earlier ones stay materialised and the later ones untouched."""
    workspace.write(5)
    workspace.write(5, key="2026-01-02").write_bytes(b"not Parquet")
    workspace.write(5, key="2026-01-03")
    outcome = workspace.run(end="2026-01-03")
    assert not outcome.result.success
    assert "in/2026-01-02/a.parquet' (11 bytes) is not a whole Parquet file" in outcome.error
    key = dg.AssetKey("scores")
    assert workspace.instance.get_materialized_partitions(key) == {DAY}
    assert workspace.output() == scores(range(5))
    assert not workspace.out("2026-01-03").exists()


@FAN_OUT
def test_empty_partition(workspace: Workspace, fan_out: bool) -> None:
    """A partition without rows succeeds with an empty output that has the right columns, and says so."""
    workspace.write(0)
    outcome = workspace.run(workspace.asset(fan_out=fan_out))
    assert outcome.result.success, outcome.error
    assert outcome.metadata()["dagster/row_count"] == 0
    assert f"{DAY} is empty: 0 rows are written." in outcome.log
    assert {field.name: str(field.type) for field in workspace.output_table().schema} == {
        "id": "int64",
        "y": "float",
    }
    assert workspace.output() == []
    assert outcome.checks == PASSED


@FAN_OUT
def test_complete_partition_computes_nothing(workspace: Workspace, fan_out: bool) -> None:
    """A partition that is up to date is not computed again: no device call, no lease, and the log says so."""
    workspace.write(10)
    workspace.run(workspace.asset(fan_out=fan_out))
    before = _files(workspace)
    outcome = workspace.run(workspace.asset(fan_out=fan_out))
    metadata = outcome.metadata()
    assert (metadata["sits/batches"], metadata["sits/segments"]) == (0, 0)
    assert metadata["sits/resumed_from_row"] == "complete"
    assert metadata["dagster/row_count"] == 10
    assert f"{DAY}: all 10 rows are done already, nothing is computed." in outcome.log
    assert "leased" not in outcome.log
    assert outcome.checks == PASSED
    assert _files(workspace) == before


def _files(workspace: Workspace) -> dict[str, Any]:
    paths = workspace.out().rglob("*")
    return {str(path): path.stat().st_mtime_ns for path in paths if path.is_file()}
