"""Rows share a batch only where their results do not depend on it; each run tries it with its own rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper

from sits_dagster import OnnxModel, Padding
from tests.assets.workspace import DAY, Workspace, save_model, save_times, scores

FAN_OUT = pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])
NEXT_DAY = "2026-01-02"
WIDTH = 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a cache that is empty at first."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SITS_CACHE_DIR", str(folder))
    return folder


def _save_quantised(path: Path, rows: str | int = "rows") -> None:
    """Write a model that rounds by the largest value of the whole batch."""
    matrix = (TensorProto.FLOAT, [rows, WIDTH])
    save_model(
        path,
        [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        {"x": matrix},
        {"y": matrix},
    )


def _cells(rows: int) -> np.ndarray:
    random = np.random.default_rng(6)
    return (random.normal(size=(rows, WIDTH)) * np.arange(1, rows + 1)[:, None]).astype(np.float32)


def _write(workspace: Workspace, rows: int, *, key: str = DAY) -> np.ndarray:
    cells = _cells(rows)
    workspace.write_table(
        {"id": range(rows), "x": pa.array(cells.tolist(), pa.list_(pa.float32(), WIDTH))}, key=key
    )
    return cells


def _results(workspace: Workspace, key: str = DAY) -> list[Any]:
    return [row["y"] for row in workspace.output(key)]


def _model(is_batchable: bool | None = None) -> OnnxModel:
    return OnnxModel("model.onnx", is_batchable=is_batchable)


@FAN_OUT
def test_rows_that_mix_get_batches_of_one(workspace: Workspace, fan_out: bool) -> None:
    """Each row's result is the one it has alone; the log says what was seen and how to overrule it."""
    _save_quantised(workspace.model)
    _write(workspace, 10)
    outcome = workspace.run(workspace.asset(fan_out=fan_out), batch_rows=8)
    assert outcome.result.success, outcome.error
    found = outcome.metadata()
    assert (found["sits/batches"], found["sits/batching"]) == (10, "not-batchable")
    assert "Model 'model' gets batches of one row: row " in outcome.log
    assert "differs by" in outcome.log
    assert "OnnxModel(is_batchable=True) overrules that." in outcome.log
    eight = _results(workspace)
    workspace.run(workspace.asset(fan_out=fan_out), batch_rows=1, recompute=True)
    assert _results(workspace) == eight, "G7: whatever the batch, a row has one result"


def test_rows_that_keep_to_themselves_share_batches(workspace: Workspace) -> None:
    """Where nothing mixes, batches are as large as asked for, and no warning is given."""
    workspace.write(10)
    outcome = workspace.run(batch_rows=5)
    found = outcome.metadata()
    assert (found["sits/batches"], found["sits/batching"]) == (2, "invariant")
    assert "batches of one row" not in outcome.log


@FAN_OUT
def test_the_declaration_is_the_last_word(workspace: Workspace, fan_out: bool) -> None:
    """`is_batchable` overrules what was seen, both ways, and a declared limit is nothing to warn of."""
    _save_quantised(workspace.model)
    _write(workspace, 8)
    together = workspace.run(workspace.asset(model=_model(is_batchable=True), fan_out=fan_out), batch_rows=4)
    found = together.metadata()
    assert (found["sits/batches"], found["sits/batching"]) == (2, "invariant, as declared")
    save_times(workspace.model)
    workspace.write(8)
    alone = workspace.run(workspace.asset(model=_model(is_batchable=False), fan_out=fan_out), batch_rows=4)
    found = alone.metadata()
    assert (found["sits/batches"], found["sits/batching"]) == (8, "not-batchable, as declared")
    assert "batches of one row" not in together.log + alone.log
    assert workspace.output() == scores(range(8))


def test_a_verdict_is_remembered(workspace: Workspace, calls: list[int]) -> None:
    """The second run of a model, and the second partition, make no calls but their own."""
    workspace.write(8)
    workspace.write(4, key=NEXT_DAY)
    workspace.run(key=DAY, end=NEXT_DAY)
    assert calls == [1, 1, 1, 2, 3, 4, 4, 4]
    calls.clear()
    workspace.run(recompute=True)
    assert calls == [4, 4]


def test_a_verdict_is_of_one_model(workspace: Workspace, calls: list[int]) -> None:
    """Another model at the same place is tried anew."""
    _write(workspace, 4)
    matrix = (TensorProto.FLOAT, ["rows", WIDTH])
    save_model(workspace.model, [helper.make_node("Neg", ["x"], ["y"])], {"x": matrix}, {"y": matrix})
    assert workspace.run().metadata()["sits/batching"] == "invariant"
    _save_quantised(workspace.model)
    assert workspace.run().metadata()["sits/batching"] == "not-batchable"
    assert calls == [1, 1, 1, 2, 3, 4, 1, 1, 1, 2, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"verdict": "maybe"}', "[" * 100_000])
def test_a_damaged_verdict_is_made_again(workspace: Workspace, cache: Path, content: str) -> None:
    """A cache that cannot be read costs a few calls, nothing else."""
    _save_quantised(workspace.model)
    _write(workspace, 6)
    workspace.run()
    [kept] = (cache / "batching").glob("*.json")
    kept.write_text(content)
    outcome = workspace.run(recompute=True)
    assert outcome.result.success, outcome.error
    assert outcome.metadata()["sits/batching"] == "not-batchable"
    assert "verdict" in kept.read_text()


def test_nothing_is_kept_of_a_partition_that_tells_nothing(workspace: Workspace, cache: Path) -> None:
    """A partition of one row says nothing, and does not keep the next one from being tried."""
    _save_quantised(workspace.model)
    _write(workspace, 1)
    outcome = workspace.run()
    assert outcome.metadata()["sits/batching"] == "unprobed"
    assert not (cache / "batching").exists()
    _write(workspace, 6, key=NEXT_DAY)
    assert workspace.run(key=NEXT_DAY).metadata(NEXT_DAY)["sits/batching"] == "not-batchable"


def test_a_partition_that_is_complete_says_nothing(workspace: Workspace) -> None:
    """Where nothing is computed there is no verdict to show."""
    workspace.write(4)
    workspace.run()
    assert "sits/batching" not in workspace.run().metadata()


def test_an_empty_partition_is_written_without_a_call(workspace: Workspace, calls: list[int]) -> None:
    """No rows, no trial."""
    workspace.write(0)
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert calls == []


def test_rows_of_a_fixed_batch_that_mix_are_computed_alone(workspace: Workspace) -> None:
    """A model fixed to four rows gets each row with copies of itself, where others would change it."""
    _save_quantised(workspace.model)
    _write(workspace, 7)
    workspace.run(batch_rows=1)
    free = _results(workspace)
    _save_quantised(workspace.model, rows=4)
    outcome = workspace.run(batch_rows=4)
    found = outcome.metadata()
    assert (found["sits/batches"], found["sits/batching"]) == (7, "not-batchable")
    assert _results(workspace) == free


def test_first_rows_that_the_model_refuses_do_not_hide_that_rows_mix(workspace: Workspace) -> None:
    """Rows that fail are quarantined as ever, and the others still get batches of one."""
    matrix = (TensorProto.FLOAT, ["rows", WIDTH])
    save_model(
        workspace.model,
        [
            helper.make_node("Gather", ["table", "i"], ["offset"]),
            helper.make_node("Add", ["x", "offset"], ["sum"]),
            helper.make_node("DynamicQuantizeLinear", ["sum"], ["q", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        {"x": matrix, "i": (TensorProto.INT64, ["rows"])},
        {"y": matrix},
        {"table": np.zeros((2, WIDTH), np.float32)},
    )
    cells = _cells(12)
    index = [5, *[1] * 10, 9]  # the least and the largest rows are bad
    workspace.write_table(
        {"id": range(12), "x": pa.array(cells.tolist(), pa.list_(pa.float32(), WIDTH)), "i": index}
    )
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert outcome.metadata()["sits/batching"] == "not-batchable"
    assert [row["id"] for row in workspace.quarantine()] == [0, 11]
    assert len(workspace.output()) == 10


def _save_recurrent(path: Path) -> None:
    """Write a model with a state [2, rows, 4]: its outputs have their rows along axis 1, and no names."""
    save_model(
        path,
        [
            helper.make_node("Add", ["state", "x"], ["next"]),
            helper.make_node("Unsqueeze", ["x", "axes"], ["line"]),
            helper.make_node("Concat", ["next", "line"], ["y"], axis=0),
        ],
        {"x": (TensorProto.FLOAT, ["rows", WIDTH]), "state": (TensorProto.FLOAT, [2, "rows", WIDTH])},
        {"y": (TensorProto.FLOAT, [3, "r", WIDTH]), "next": (TensorProto.FLOAT, [2, "r", WIDTH])},
        {"axes": np.array([0])},
    )


def _write_recurrent(workspace: Workspace, rows: int, *, key: str = DAY) -> list[Mapping[str, Any]]:
    """Write rows and return the output that they have to have."""
    x, state = _cells(rows), np.random.default_rng(8).normal(size=(rows, 2, WIDTH)).astype(np.float32)
    columns = {
        "id": pa.array(range(rows)),
        "x": pa.array(x.tolist(), pa.list_(pa.float32(), WIDTH)),
        "state": pa.FixedShapeTensorArray.from_numpy_ndarray(state),
    }
    workspace.write_table(pa.table(columns), key=key)
    after = state + x[:, None]
    y = np.concatenate([after, x[:, None]], axis=1)
    return [{"id": i, "y": y[i].tolist(), "next": after[i].tolist()} for i in range(rows)]


@FAN_OUT
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_along_another_axis_arrive_as_rows(workspace: Workspace, rows: int, fan_out: bool) -> None:
    """A recurrent model's state is a column [2, 4], and so is what comes out, for one row or several."""
    _save_recurrent(workspace.model)
    expected = _write_recurrent(workspace, rows)
    outcome = workspace.run(workspace.asset(fan_out=fan_out))
    assert outcome.result.success, outcome.error
    assert workspace.output() == expected
    assert outcome.metadata()["sits/batches"] == -(-rows // 4)
    kinds = {field.name: str(field.type) for field in workspace.output_table().schema}
    assert kinds["y"].startswith("fixed_size_list<")
    assert kinds["y"].endswith("[3]")


@pytest.mark.parametrize("is_batchable", [True, False])
def test_a_declaration_leaves_the_axes_to_the_trial(workspace: Workspace, is_batchable: bool) -> None:
    """Where the rows lie is found by running them, whatever is declared about sharing."""
    _save_recurrent(workspace.model)
    expected = _write_recurrent(workspace, 5)
    workspace.run(workspace.asset(model=_model(is_batchable=is_batchable)))
    assert workspace.output() == expected


def test_partitions_of_one_run_agree_without_a_cache(workspace: Workspace, cache: Path) -> None:
    """A cache that cannot be written to changes nothing: the engine's axes are found for each partition."""
    cache.write_text("not a folder")
    _save_recurrent(workspace.model)
    expected = {key: _write_recurrent(workspace, 5, key=key) for key in (DAY, NEXT_DAY)}
    outcome = workspace.run(key=DAY, end=NEXT_DAY)
    assert outcome.result.success, outcome.error
    assert {key: workspace.output(key) for key in expected} == expected


def test_several_entries_of_a_row_stay_together(workspace: Workspace) -> None:
    """A model that lays a row's results one behind the other gives each row its own, in batches of one."""
    save_model(
        workspace.model,
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        {"x": (TensorProto.FLOAT, ["rows", WIDTH])},
        {"y": (TensorProto.FLOAT, ["parts", 2])},
        {"shape": np.array([-1, 2])},
    )
    cells = _write(workspace, 6)
    outcome = workspace.run()
    assert outcome.result.success, outcome.error
    assert _results(workspace) == cells.reshape(6, 2, 2).tolist()
    assert "output 'y' has 2 entries for a row" in outcome.log


def test_a_hard_coded_batch_of_one_is_found(workspace: Workspace) -> None:
    """A file with a free batch whose Reshape allows one row only runs with one row at a time."""
    matrix = (TensorProto.FLOAT, ["rows", WIDTH])
    save_model(
        workspace.model,
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        {"x": matrix},
        {"y": matrix},
        {"shape": np.array([1, WIDTH])},
    )
    cells = _write(workspace, 6)
    outcome = workspace.run()
    assert outcome.metadata()["sits/batches"] == 6
    assert _results(workspace) == cells.tolist()
    assert "a batch of 2 rows fails" in outcome.log


def test_padded_rows_are_tried_as_they_run(workspace: Workspace) -> None:
    """Ragged rows that share a padded shape are tried in that shape."""
    save_model(
        workspace.model,
        [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["h"]),
            helper.make_node("ReduceSum", ["h", "axes"], ["y"], keepdims=0),
        ],
        {"x": (TensorProto.FLOAT, ["rows", "length"])},
        {"y": (TensorProto.FLOAT, ["rows"])},
        {"axes": np.array([1])},
    )
    rows = [[float(n)] * n for n in range(1, 7)]
    workspace.write_table({"id": range(6), "x": pa.array(rows, pa.list_(pa.float32()))})
    asset = workspace.asset(model=OnnxModel("model.onnx", padding=(Padding(input="x", multiple=8),)))
    outcome = workspace.run(asset)
    assert outcome.metadata()["sits/batching"] == "not-batchable"
    assert [round(row["y"], 3) for row in workspace.output()] == [n * n for n in range(1, 7)]


@FAN_OUT
def test_each_row_gets_a_constant_output_whole(workspace: Workspace, fan_out: bool) -> None:
    """A list of labels beside the scores is no row's in particular: every row has it."""
    matrix = (TensorProto.FLOAT, ["rows", WIDTH])
    save_model(
        workspace.model,
        [
            helper.make_node("Identity", ["x"], ["y"]),
            helper.make_node("Constant", [], ["labels"], value_floats=[7.0] * WIDTH),
        ],
        {"x": matrix},
        {"y": matrix, "labels": (TensorProto.FLOAT, [WIDTH])},
    )
    cells = _write(workspace, 10)
    outcome = workspace.run(workspace.asset(fan_out=fan_out), batch_rows=4)
    assert outcome.result.success, outcome.error
    found = workspace.output(DAY)
    assert [row["y"] for row in found] == cells.tolist()
    assert [row["labels"] for row in found] == [[7.0] * WIDTH] * 10
