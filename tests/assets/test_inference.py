"""What `build_inference_asset` takes, passes on and refuses; and what its functions may return."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper

from sits_dagster import ParquetDataset, ParquetSink
from sits_dagster.errors import ConfigError
from tests.assets.workspace import DAY, DAYS, Workspace, save_model, scores

FAN_OUT = pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])


@FAN_OUT
def test_options_reach_dagster(workspace: Workspace, fan_out: bool) -> None:
    """Group, owners, tags, key prefix, description, dependencies and metadata show in Dagster as given."""
    asset = workspace.asset(
        fan_out=fan_out,
        group_name="nightly",
        owners=["team:ml"],
        tags={"tier": "gold"},
        key_prefix=["lake", "scores"],
        description="Scores of the day.",
        deps=["raw_rows"],
        metadata={"dagster/table_name": "scores"},
        code_version="7",
    )
    [key] = asset.keys
    assert key == dg.AssetKey(["lake", "scores", "scores"])
    spec = asset.get_asset_spec(key)
    assert spec.group_name == "nightly"
    assert spec.owners == ["team:ml"]
    assert spec.tags["tier"] == "gold"
    assert spec.kinds == {"onnx", "parquet"}
    assert spec.description == "Scores of the day."
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("raw_rows")]
    assert spec.metadata["dagster/table_name"] == "scores"
    assert spec.code_version == "7"
    assert asset.partitions_def == DAYS
    assert asset.backfill_policy == dg.BackfillPolicy.single_run()
    assert {check.name for check in asset.check_specs} == {"complete", "unique", "no_orphan_files"}


@FAN_OUT
def test_prefixed_asset_runs(workspace: Workspace, fan_out: bool) -> None:
    """Materialisation, observations and checks all belong to the prefixed key."""
    workspace.write(5)
    outcome = workspace.run(workspace.asset(key_prefix="lake", fan_out=fan_out), progress_seconds=0.01)
    assert outcome.result.success, outcome.error
    keys = {
        event.asset_key for event in outcome.result.all_events if event.event_type_value.startswith("ASSET_M")
    }
    assert dg.AssetKey(["lake", "scores"]) in keys
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": True}


@FAN_OUT
def test_asset_runs_after_what_it_depends_on(workspace: Workspace, fan_out: bool) -> None:
    """An asset named in `deps` runs first, in the same run: here it writes the input."""

    @dg.asset(partitions_def=DAYS, key_prefix="raw")
    def lines() -> None:
        workspace.write(5)

    asset = workspace.asset(fan_out=fan_out, deps=[lines], backfill_policy=None)
    result = dg.materialize(
        [asset, lines], partition_key=DAY, resources=workspace.resources(), instance=workspace.instance
    )
    assert result.success
    assert workspace.output() == scores(range(5))


@FAN_OUT
def test_downstream_asset_runs_after_it(workspace: Workspace, fan_out: bool) -> None:
    """An asset that depends on the output runs after it, in the same run."""
    workspace.write(5)
    upstream = workspace.asset(fan_out=fan_out, backfill_policy=None)

    @dg.asset(deps=[upstream], partitions_def=DAYS)
    def rows() -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"rows": len(workspace.output())})

    result = dg.materialize(
        [upstream, rows], partition_key=DAY, resources=workspace.resources(), instance=workspace.instance
    )
    [event] = result.asset_materializations_for_node("rows")
    assert event.metadata["rows"].value == 5


def test_pool_is_that_of_the_computing_steps(workspace: Workspace) -> None:
    """The steps that hold a device are in the pool `gpu`, or the one given; plan and commit are in none."""
    assert workspace.asset().op.pool == "gpu"
    assert workspace.asset(pool="a100").op.pool == "a100"
    assert workspace.asset(pool=None).op.pool is None
    graph = workspace.asset(fan_out=True, pool="a100").node_def
    pools = {node.name: node.definition.pool for node in graph.nodes}
    assert pools == {"scores_plan": None, "scores_infer": "a100", "scores_commit": None}


@FAN_OUT
def test_op_tags_are_those_of_the_computing_steps(workspace: Workspace, fan_out: bool) -> None:
    """Tags for the step, such as a Kubernetes GPU limit, are on the steps that hold a device."""
    tags = {"dagster-k8s/config": {"container_config": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}}
    asset = workspace.asset(fan_out=fan_out, op_tags=tags)
    op = asset.node_def.node_named("scores_infer").definition if fan_out else asset.op
    assert "nvidia.com/gpu" in str(op.tags["dagster-k8s/config"])


def test_retry_policy_is_refused(workspace: Workspace) -> None:
    """A retry policy would start a cancelled run again, so it is refused with the option to use instead."""
    with pytest.raises(ConfigError, match=r"must not have a retry_policy.*retries_max"):
        workspace.asset(retry_policy=dg.RetryPolicy(max_retries=1))


def test_sink_that_does_not_tell_partitions_apart_is_refused(workspace: Workspace) -> None:
    """A sink path that is the same for several partitions is refused when the asset is built."""
    with pytest.raises(ConfigError, match=r"the same for several partitions.*\{partition_key\}"):
        workspace.asset(sink=ParquetSink("out"))


@pytest.mark.parametrize("path", ["in/{day}", "in/{partition}", "in/{partition_key[0]}"])
def test_unknown_placeholder_is_refused(workspace: Workspace, path: str) -> None:
    """A misspelt placeholder of either path is refused when the asset is built, with those that there are."""
    for changes in ({"source": ParquetDataset(path)}, {"sink": ParquetSink(path)}):
        with pytest.raises(ConfigError, match=r"has no value. Hint: available: \{partition_key\}"):
            workspace.asset(**changes)


def test_text_in_place_of_columns_is_refused() -> None:
    """One name without its list is refused with what to write instead."""
    with pytest.raises(ConfigError, match=r"keep_columns=\['id'\]"):
        ParquetSink("out/{partition_key}", keep_columns="id")
    with pytest.raises(ConfigError, match=r"columns=\['x'\]"):
        ParquetDataset("in/{partition_key}", columns="x")


def test_malformed_sink_is_refused(workspace: Workspace) -> None:
    """A brace that is not closed is refused with the path when the asset is built."""
    with pytest.raises(ConfigError, match=r"'out/\{partition_key' is malformed"):
        workspace.asset(sink=ParquetSink("out/{partition_key"))


def test_source_may_be_the_same_for_every_partition(workspace: Workspace) -> None:
    """A source without a placeholder is fine: each partition then has all its rows."""
    workspace.write(5, key="all")
    workspace.run(workspace.asset(source=ParquetDataset("in/all")))
    assert workspace.output() == scores(range(5))


def test_source_may_be_a_pattern_or_a_file(workspace: Workspace) -> None:
    """A source is a folder, a glob pattern or one file."""
    workspace.write(5)
    workspace.write(5, file="b.parquet", start=5)
    for source, rows in (("in/{partition_key}/b*.parquet", range(5, 10)), ("in/*/a.parquet", range(5))):
        workspace.run(workspace.asset(source=ParquetDataset(source)))
        assert workspace.output() == scores(rows)
    workspace.run(workspace.asset(source=ParquetDataset(f"in/{DAY}/b.parquet")))
    assert workspace.output() == scores(range(5, 10))


def test_encode_and_decode(workspace: Workspace) -> None:
    """`encode` gets the named columns, `decode` the outputs; rows they refuse are quarantined, each alone."""
    workspace.write_table({"id": range(12), "text": [str(i) if i != 7 else "seven" for i in range(12)]})

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        return {"x": np.array([float(text) for text in batch.column("text").to_pylist()], np.float32)}

    def decode(outputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        if (outputs["y"] == 9).any():
            message = "nine is not allowed"
            raise ValueError(message)
        return {"text": [f"{y:g}!" for y in outputs["y"]]}

    asset = workspace.asset(
        encode=encode, decode=decode, source=ParquetDataset("in/{partition_key}", columns=["text"])
    )
    outcome = workspace.run(asset)
    assert outcome.result.success, outcome.error
    good = [i for i in range(12) if i not in (3, 7)]
    assert workspace.output() == [{"id": i, "text": f"{3 * i}!"} for i in good]
    assert [
        (row["id"], row["file_row"], row["stage"], row["error"], row["message"])
        for row in workspace.quarantine()
    ] == [
        (3, 3, "decode", "ValueError", "nine is not allowed"),
        (7, 7, "encode", "ValueError", "could not convert string to float: 'seven'"),
    ]
    assert outcome.checks["complete"]


def test_outputs_of_every_kind(workspace: Workspace) -> None:
    """By default half floats, strings, booleans and tensors become columns that readers understand."""
    save_model(
        workspace.model,
        [
            helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["x"], ["text"], to=TensorProto.STRING),
            helper.make_node("Greater", ["x", "one"], ["large"]),
            helper.make_node("Unsqueeze", ["x", "axes"], ["column"]),
            helper.make_node("MatMul", ["column", "weights"], ["vector"]),
            helper.make_node("Unsqueeze", ["vector", "axes"], ["tensor"]),
            helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT64),
        ],
        {"x": (TensorProto.FLOAT, ["rows"])},
        {
            "half": (TensorProto.FLOAT16, ["rows"]),
            "text": (TensorProto.STRING, ["rows"]),
            "large": (TensorProto.BOOL, ["rows"]),
            "vector": (TensorProto.FLOAT, ["rows", 2]),
            "tensor": (TensorProto.FLOAT, ["rows", 1, 2]),
            "whole": (TensorProto.INT64, ["rows"]),
        },
        {
            "one": np.array(1, np.float32),
            "axes": np.array([1]),
            "weights": np.array([[1.0, 10.0]], np.float32),
        },
    )
    workspace.write(3)
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    table = workspace.output_table()
    assert {field.name: str(field.type).split("[")[0].split("<")[0] for field in table.schema} == {
        "id": "int64",
        "half": "halffloat",
        "text": "string",
        "large": "bool",
        "vector": "fixed_size_list",
        "tensor": "fixed_size_list",
        "whole": "int64",
    }
    assert table.to_pylist()[2] == {
        "id": 2,
        "half": 2.0,
        "text": "2",
        "large": True,
        "vector": [2.0, 20.0],
        "tensor": [[2.0, 20.0]],
        "whole": 2,
    }


def test_inputs_from_list_and_tensor_columns(workspace: Workspace) -> None:
    """Lists of one length, fixed-size lists and tensors are model inputs without an `encode` function."""
    save_model(
        workspace.model,
        [
            helper.make_node("Add", ["a", "b"], ["ab"]),
            helper.make_node("Squeeze", ["c", "axes"], ["flat"]),
            helper.make_node("Add", ["ab", "flat"], ["y"]),
        ],
        {
            "a": (TensorProto.FLOAT, ["rows", 2]),
            "b": (TensorProto.FLOAT, ["rows", 2]),
            "c": (TensorProto.FLOAT, ["rows", 1, 2]),
        },
        {"y": (TensorProto.FLOAT, ["rows", 2])},
        {"axes": np.array([1])},
    )
    cells = np.arange(12, dtype=np.float32).reshape(6, 2)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(cells.reshape(6, 1, 2))
    workspace.write_table(
        {
            "id": range(6),
            "a": pa.array(cells.tolist(), pa.list_(pa.float32())),
            "b": pa.array(cells.tolist(), pa.list_(pa.float32(), 2)),
            "c": tensor,
        }
    )
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert [row["y"] for row in workspace.output()] == (cells * 3).tolist()


def test_kept_and_decoded_column_of_one_name_is_an_error(workspace: Workspace) -> None:
    """A column that is kept and decoded under one name fails the run with the name, before any output."""
    workspace.write(5)
    asset = workspace.asset(decode=lambda outputs: {"id": outputs["y"]}, code_version="1")
    outcome = workspace.run(asset)
    assert "ConfigError: Columns ['id'] are both kept from the input and decoded." in outcome.error
    assert workspace.parts() == []
