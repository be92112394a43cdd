"""Input, models and folders that are not as they should be: what passes, what fails, and in which words."""

from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper

from sits_dagster import ParquetSink
from tests.assets.workspace import DAY, Outcome, Workspace, save_model, scores

FLOATS = pa.array(range(4), pa.float32())


def _nothing_is_visible(workspace: Workspace) -> bool:
    return not [path for path in workspace.out().glob("*") if path.name != "_sits"]


def _refused(workspace: Workspace, outcome: Outcome, *words: str) -> None:
    """Assert that a run failed in these words, and that no reader sees any output of it."""
    assert not outcome.result.success
    for word in words:
        assert word in outcome.error
    assert outcome.materialised == []
    assert _nothing_is_visible(workspace)


def test_missing_input_folder(workspace: Workspace) -> None:
    """A partition whose folder is not there fails with the folder's path: it is not taken for empty."""
    outcome = workspace.run()
    _refused(workspace, outcome, "DataError", f"Input folder '{workspace.root}/in/{DAY}' does not exist.")


def test_folder_without_files_is_an_empty_partition(workspace: Workspace) -> None:
    """A folder without data files is an empty partition: the run succeeds, says so and writes the columns."""
    (workspace.root / "in" / DAY).mkdir(parents=True)
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert "has no data files: the partition is empty" in outcome.log
    assert workspace.output_table().schema.names == ["y"]
    assert workspace.output() == []
    assert (workspace.out() / "_SUCCESS").exists()


def test_file_without_rows_among_others(workspace: Workspace) -> None:
    """A file without rows changes nothing."""
    workspace.write(4, file="a.parquet")
    workspace.write(0, file="b.parquet")
    workspace.write(4, file="c.parquet", start=4)
    assert workspace.run().result.success
    assert workspace.output() == scores(range(8))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"id,x\n1,2\n", b"PAR1" + b"\0" * 60 + b"PAR1"])
def test_file_that_is_no_parquet(workspace: Workspace, data: bytes) -> None:
    """One file that is no Parquet file fails the partition by name; no rows of the good ones are shown."""
    workspace.write(4, file="a.parquet")
    workspace.write(4, file="b.parquet").write_bytes(data)
    outcome = workspace.run()
    _refused(workspace, outcome, f"b.parquet' ({len(data)} bytes) is not a whole Parquet file")


def test_truncated_file(workspace: Workspace) -> None:
    """A file of which the end is missing, as after a broken upload, fails the partition by name."""
    path = workspace.write(100)
    path.write_bytes(path.read_bytes()[:-100])
    _refused(workspace, workspace.run(), "a.parquet'", "is not a whole Parquet file")


def test_file_damaged_in_the_middle(workspace: Workspace) -> None:
    """A file with a good footer and damaged pages fails the run by name when it is read."""
    path = workspace.write(1)
    pq.write_table(pa.table({"id": range(5000), "x": np.arange(5000, dtype=np.float32)}), path)
    data = bytearray(path.read_bytes())
    data[10:400] = b"\xff" * 390
    path.write_bytes(data)
    outcome = workspace.run()
    assert "a.parquet' cannot be read" in outcome.error
    assert not (workspace.out() / "_SUCCESS").exists()


def test_missing_column(workspace: Workspace) -> None:
    """A column that one file lacks fails the run with the column, the file, and the columns it has."""
    workspace.write(4, file="a.parquet")
    workspace.write_table({"id": range(4), "z": FLOATS}, file="b.parquet")
    outcome = workspace.run()
    _refused(workspace, outcome, "Column 'x' is missing in", "b.parquet'; it has ['id', 'z']")


def test_missing_kept_column(workspace: Workspace) -> None:
    """A column to keep that the input lacks is named before anything is computed."""
    workspace.write(4)
    asset = workspace.asset(sink=ParquetSink("out/{partition_key}", keep_columns=["id", "line"]))
    _refused(workspace, workspace.run(asset), "Column 'line' is missing in")


def test_missing_kept_column_with_encode(workspace: Workspace) -> None:
    """The same, when an `encode` function reads all columns."""
    workspace.write(4)
    asset = workspace.asset(
        encode=lambda batch: {"x": batch.column("x").to_numpy()},
        sink=ParquetSink("out/{partition_key}", keep_columns=["id", "line"]),
    )
    _refused(workspace, workspace.run(asset), "DataError: Column 'line', which is to be kept, is missing in")


def test_column_of_two_types(workspace: Workspace) -> None:
    """A column that is a number in one file and text in another fails the run with both files and types."""
    workspace.write(4, file="a.parquet")
    workspace.write_table({"id": range(4), "x": ["a", "b", "c", "d"]}, file="b.parquet")
    outcome = workspace.run()
    _refused(workspace, outcome, "Column 'x' is float in", "a.parquet' but string in", "b.parquet'")


def test_column_of_the_wrong_type(workspace: Workspace) -> None:
    """A column that the model cannot take fails the run with the input, both types, and the remedy."""
    workspace.write_table({"id": range(4), "x": ["a", "b", "c", "d"]})
    _refused(workspace, workspace.run(), "Model input 'x' is float32, but encode returned object", "encode")


def test_harmless_differences_between_files(workspace: Workspace) -> None:
    """Nullability, dictionaries, string widths and the order of columns may differ between files."""
    save_model(
        workspace.model,
        [helper.make_node("Identity", ["x"], ["y"])],
        {"x": (TensorProto.STRING, ["rows"])},
        {"y": (TensorProto.STRING, ["rows"])},
    )
    words = pa.array(["a", "b"])
    tables = {
        "a": pa.table({"id": [0, 1], "x": words}),
        "b": pa.table({"x": words.dictionary_encode(), "id": [2, 3]}),
        "c": pa.table({"id": [4, 5], "x": words.cast(pa.large_string()), "extra": [1, 2]}),
        "d": pa.table(
            [pa.array([6, 7]), words], pa.schema([("id", pa.int64(), False), ("x", pa.string(), False)])
        ),
    }
    for name, table in tables.items():
        workspace.write_table(table, file=f"{name}.parquet")
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert workspace.output() == [{"id": i, "y": "ab"[i % 2]} for i in range(8)]
    assert "sits/notes" not in outcome.metadata()


@pytest.mark.parametrize("first", ["int32", "int64"])
def test_narrow_beside_wide_integers(workspace: Workspace, first: str) -> None:
    """int32 in one file and int64 in another are read as int64 without loss, with a warning."""
    save_model(
        workspace.model,
        [helper.make_node("Add", ["x", "x"], ["y"])],
        {"x": (TensorProto.INT64, ["rows"])},
        {"y": (TensorProto.INT64, ["rows"])},
    )
    large = 2**40
    narrow = {"id": [0, 1], "x": pa.array([1, 2], pa.int32())}
    wide = {"id": [2, 3], "x": pa.array([large, -large], pa.int64())}
    for name, table in zip("ab", (narrow, wide) if first == "int32" else (wide, narrow), strict=True):
        workspace.write_table(table, file=f"{name}.parquet")
    outcome = workspace.run()
    assert {row["id"]: row["y"] for row in workspace.output()} == {0: 2, 1: 4, 2: 2 * large, 3: -2 * large}
    assert "Column 'x' has several widths over the files; it is read as int64." in outcome.log


def test_null_is_quarantined(workspace: Workspace) -> None:
    """A null in an input column costs its row only; the quarantine names file, row and column."""
    workspace.write(6)
    workspace.write_table(
        {"id": range(6, 10), "x": pa.array([6, None, 8, 9], pa.float32())}, file="b.parquet"
    )
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert workspace.output() == scores([0, 1, 2, 3, 4, 5, 6, 8, 9])
    assert workspace.quarantine() == [
        {
            "id": 7,
            "file": str(workspace.root / "in" / DAY / "b.parquet"),
            "file_row": 1,
            "stage": "encode",
            "error": "NullValue",
            "message": "null in column 'x'",
        }
    ]


def test_only_nulls(workspace: Workspace) -> None:
    """A partition of which every row fails succeeds within the limit, with an empty output."""
    workspace.write_table({"id": range(4), "x": pa.array([None] * 4, pa.float32())})
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert outcome.metadata()["dagster/row_count"] == 0
    assert outcome.metadata()["sits/rows_quarantined"] == len(workspace.quarantine()) == 4
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": True}


def test_hidden_files_and_folders_are_ignored(workspace: Workspace) -> None:
    """What other tools leave beside the data is no data: `_SUCCESS`, checksums, hidden and `_` folders."""
    workspace.write(4)
    folder = workspace.root / "in" / DAY
    for name in ("_SUCCESS", "_metadata", ".a.parquet.crc", "_tmp/b.parquet", ".staging/c.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no data")
    assert workspace.run().result.success
    assert workspace.output() == scores(range(4))


def test_files_below_folders_are_read(workspace: Workspace) -> None:
    """Files in folders below the partition's are its rows too, in the order of their paths."""
    workspace.write(4, file="hour=00/a.parquet")
    workspace.write(4, file="hour=01/a.parquet", start=4)
    assert workspace.run().result.success
    assert workspace.output() == scores(range(8))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"this is no model at all", "is not an ONNX model"),
    ],
)
def test_broken_model(workspace: Workspace, data: bytes | None, word: str) -> None:
    """A model that is missing, empty or broken fails the run with its path."""
    workspace.write(4)
    if data is None:
        workspace.model.unlink()
    else:
        workspace.model.write_bytes(data)
    _refused(workspace, workspace.run(), "ModelError", str(workspace.model), word)


@pytest.mark.parametrize("has_encode", [False, True])
def test_truncated_model(workspace: Workspace, has_encode: bool) -> None:
    """A model file that was copied half fails the run with its path, whoever reads it first."""
    workspace.write(4)
    data = workspace.model.read_bytes()
    workspace.model.write_bytes(data[: len(data) // 2])
    encode = (lambda batch: {"x": batch.column("x").to_numpy()}) if has_encode else None
    _refused(workspace, workspace.run(workspace.asset(encode=encode)), "ModelError", str(workspace.model))


def test_inputs_with_batch_axes_of_different_names(workspace: Workspace) -> None:
    """Two inputs whose batch axes are called differently, as exporters do, run like any other."""
    save_model(
        workspace.model,
        [helper.make_node("Add", ["x", "z"], ["y"])],
        {"x": (TensorProto.FLOAT, ["batch"]), "z": (TensorProto.FLOAT, ["n"])},
        {"y": (TensorProto.FLOAT, ["anything"])},
    )
    workspace.write_table({"id": range(4), "x": FLOATS, "z": FLOATS})
    assert workspace.run().result.success
    assert workspace.output() == [{"id": i, "y": 2.0 * i} for i in range(4)]


def test_model_that_drops_rows_is_refused(workspace: Workspace) -> None:
    """A row for which a model returns another number of rows fails, alone and with a clear error."""
    save_model(
        workspace.model,
        [
            helper.make_node("Greater", ["x", "zero"], ["is_kept"]),
            helper.make_node("Compress", ["x", "is_kept"], ["y"], axis=0),
        ],
        {"x": (TensorProto.FLOAT, ["rows"])},
        {"y": (TensorProto.FLOAT, ["kept"])},
        {"zero": np.array(0, np.float32)},
    )
    x = np.array([1, 2, 3, 4, 5, 6, -7, 8], np.float32)
    workspace.write_table({"id": range(8), "x": x})
    outcome = workspace.run(rows_quarantined_max=0)
    assert "Model output 'y' has 0 rows for a batch of 1" in outcome.error
    assert not (workspace.out() / "_SUCCESS").exists()
    workspace.run(rows_quarantined_max=1)
    assert [row["id"] for row in workspace.output()] == [0, 1, 2, 3, 4, 5, 7]


def test_too_many_failing_rows(workspace: Workspace) -> None:
    """More failed rows than `rows_quarantined_max` fail the run; the first errors are in the message."""
    workspace.write_table({"id": range(8), "x": pa.array([0, None, 2, None, None, 5, 6, 7], pa.float32())})
    outcome = workspace.run(rows_quarantined_max=2)
    assert not outcome.result.success
    assert "QuarantineLimitError: " in outcome.error
    assert "3 rows failed, above rows_quarantined_max=2" in outcome.error
    path = workspace.root / "in" / DAY / "a.parquet"
    assert f"First: {path} row 1: encode NullValue: null in column 'x'" in outcome.error
    assert workspace.run(rows_quarantined_max=3).result.success


def test_output_whose_parent_is_a_file(workspace: Workspace) -> None:
    """A sink below a file, which no folder can be, fails the run with the path."""
    workspace.write(4)
    (workspace.root / "out").write_text("a file")
    outcome = workspace.run()
    assert not outcome.result.success
    assert "ConfigError" in outcome.error
    assert f"{workspace.root}/out" in outcome.error


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder in which nobody may write")
def test_output_that_may_not_be_written(workspace: Workspace) -> None:
    """A sink without permission to write fails the run with the path and the remedy."""
    workspace.write(4)
    asset = workspace.asset(sink=ParquetSink("/sys/kernel/out/{partition_key}"))
    outcome = workspace.run(asset)
    assert "ConfigError: Cannot create '/sys/kernel/out" in outcome.error
    assert "give the run a folder that it may write" in outcome.error


@pytest.mark.parametrize("sink", ["in/{partition_key}", "in/{partition_key}/out"])
def test_output_inside_the_input(workspace: Workspace, sink: str) -> None:
    """An output inside the input, which the next run would read, is refused; the input stays as it is."""
    path = workspace.write(4)
    outcome = workspace.run(workspace.asset(sink=ParquetSink(sink)))
    assert "lies inside of the input" in outcome.error
    assert [found for found in (workspace.root / "in").rglob("*") if found.is_file()] == [path]


@pytest.mark.parametrize(
    ("key", "folder"),
    [
        ("../../escape", "%2E.%2F..%2Fescape"),
        ("..", "%2E."),
        ("a/b", "a%2Fb"),
        ("a b", "a b"),
        ("/etc", "%2Fetc"),
        ("_SUCCESS", "%5FSUCCESS"),
        ("50%", "50%25"),
        ("Ελλάδα", "%CE%95%CE%BB%CE%BB%CE%AC%CE%B4%CE%B1"),
        ("{partition_key}", "%7Bpartition_key%7D"),
        ("*", "%2A"),
    ],
)
def test_partition_key_never_leaves_its_folder(workspace: Workspace, key: str, folder: str) -> None:
    """Whatever a partition key holds, it is one folder below the sink's."""
    workspace.instance.add_dynamic_partitions("uploads", [key])
    workspace.write(4, key=folder)
    before = set(workspace.root.parent.iterdir())
    asset = workspace.asset(partitions_def=dg.DynamicPartitionsDefinition(name="uploads"))
    outcome = workspace.run(asset, key=key)
    assert outcome.result.success, outcome.error
    assert [path.name for path in (workspace.root / "out").iterdir()] == [folder]
    assert workspace.output(folder) == scores(range(4))
    assert set(workspace.root.parent.iterdir()) == before


def test_encode_without_an_input(workspace: Workspace) -> None:
    """An `encode` that forgets a model input fails the run with the input's name, not row by row."""
    workspace.write(4)
    outcome = workspace.run(workspace.asset(encode=lambda batch: {"xx": batch.column("x").to_numpy()}))
    _refused(workspace, outcome, "ConfigError", "no array for the model input 'x'; it returned ['xx']")
