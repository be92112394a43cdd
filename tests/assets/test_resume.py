"""What a later run does with what an earlier one left: goes on, leaves alone, or begins anew and says why."""

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from sits_dagster import ParquetSink
from tests.assets.workspace import DAY, Outcome, Workspace, fails_from, passes, save_times, scores

FAN_OUT = pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])


@FAN_OUT
def test_failed_run_is_resumed_by_the_next(workspace: Workspace, fan_out: bool) -> None:
    """A run that fails half-way keeps its commits; the next one computes only the rest."""
    workspace.write(40)
    common = {"code_version": "1", "fan_out": fan_out}
    failed = workspace.run(workspace.asset(encode=fails_from(workspace, 20), **common), segment_seconds=0)
    assert not failed.result.success
    assert "ConfigError: row without a licence" in failed.error
    assert failed.materialised == []
    assert not (workspace.out() / "_SUCCESS").exists()
    committed = len(workspace.output())
    assert 0 < committed <= 20
    outcome = workspace.run(workspace.asset(encode=passes, **common), segment_seconds=0)
    found = outcome.metadata()
    assert f"{DAY}: 40 rows, {committed} of them are committed." in outcome.log
    assert found["sits/resumed_from_row"] == str(committed)
    assert found["sits/batches"] == (40 - committed) / 4
    assert workspace.output() == scores(range(40))
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": True}


def test_full_disk_keeps_what_was_committed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full the run fails with that word; after room was made the next run finishes."""
    workspace.write(40)
    writes = 0
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal writes
        writes += "staging" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if writes > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        failed = workspace.run(segment_seconds=0)
    assert "the disk is full" in failed.error
    committed = len(workspace.output())
    assert 0 < committed <= 12
    outcome = workspace.run(segment_seconds=0)
    assert outcome.metadata()["sits/resumed_from_row"] == str(committed)
    assert workspace.output() == scores(range(40))


@FAN_OUT
def test_recompute_computes_everything_again_once(workspace: Workspace, fan_out: bool) -> None:
    """`recompute: true` in the launchpad computes a complete partition again; readers see its rows once."""
    workspace.write(10)
    asset = workspace.asset(fan_out=fan_out)
    first = workspace.run(asset).metadata()
    outcome = workspace.run(asset, recompute=True)
    assert outcome.result.success, outcome.error
    found = outcome.metadata()
    assert found["sits/batches"] == 3
    assert found["sits/generation"] != first["sits/generation"]
    assert "Everything is computed again, as was asked for." in outcome.log
    assert workspace.output() == scores(range(10))
    assert workspace.run(asset).metadata()["sits/batches"] == 0


@FAN_OUT
def test_reexecution_does_not_recompute_again(workspace: Workspace, fan_out: bool) -> None:
    """A re-execution of a run that asked for everything again finds that it was done, or goes on with it."""
    workspace.write(40)
    common = {"code_version": "1", "fan_out": fan_out}
    good = workspace.asset(encode=passes, **common)
    workspace.run(good)
    failed = workspace.run(
        workspace.asset(encode=fails_from(workspace, 20), **common), recompute=True, segment_seconds=0
    )
    assert not failed.result.success
    again = _reexecute(workspace, good, failed)
    assert 0 < again.metadata()["sits/batches"] < 10
    assert int(again.metadata()["sits/resumed_from_row"]) > 0
    once_more = _reexecute(workspace, good, failed)
    assert once_more.metadata()["sits/batches"] == 0
    assert workspace.run(good, recompute=True).metadata()["sits/batches"] == 10
    assert workspace.output() == scores(range(40))


def _reexecute(workspace: Workspace, asset: dg.AssetsDefinition, outcome: Outcome) -> Outcome:
    """Run again as Dagster's "re-execute" does: a new run of the same root, with the same configuration."""
    root = outcome.run.root_run_id or outcome.run.run_id
    definitions = dg.Definitions(
        assets=[asset], resources=workspace.resources(), executor=dg.in_process_executor
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    run = workspace.instance.create_run_for_job(
        job,
        run_config=outcome.run.run_config,
        tags=outcome.run.tags,
        root_run_id=root,
        parent_run_id=outcome.run.run_id,
    )
    return Outcome(execute_run(InMemoryJob(job), run, workspace.instance), workspace.instance)


def _model(workspace: Workspace) -> dict[str, Any]:
    save_times(workspace.model, 5.0)
    return {}


def _model_with_the_same_size(workspace: Workspace) -> dict[str, Any]:
    size = workspace.model.stat().st_size
    save_times(workspace.model, 5.0)
    assert workspace.model.stat().st_size == size
    return {}


def _input(workspace: Workspace) -> dict[str, Any]:
    workspace.write_table({"id": np.arange(10), "x": np.arange(10, dtype=np.float32) * 5 / 3})
    return {}


def _more_input(workspace: Workspace) -> dict[str, Any]:
    workspace.write(2, file="b.parquet", start=10)
    return {}


def _code(workspace: Workspace) -> dict[str, Any]:
    return {"encode": times_five_thirds}


def _code_version(workspace: Workspace) -> dict[str, Any]:
    return {"code_version": "2"}


def _sink(workspace: Workspace) -> dict[str, Any]:
    return {"sink": ParquetSink("out/{partition_key}")}


def times_five_thirds(batch: pa.RecordBatch) -> Mapping[str, Any]:
    return {"x": batch.column("x").to_numpy() * np.float32(5 / 3)}


FIVE = [{"id": i, "y": pytest.approx(5.0 * i)} for i in range(10)]


@pytest.mark.parametrize(
    ("change", "word", "output"),
    [
        (_model, "model", FIVE),
        (_model_with_the_same_size, "model", FIVE),
        (_input, "input", FIVE),
        (_more_input, "input", scores(range(12))),
        (_code, "configuration", FIVE),
        (_code_version, "configuration", scores(range(10))),
        (_sink, "configuration", [{"y": 3.0 * i} for i in range(10)]),
    ],
)
def test_change_begins_a_new_generation(
    workspace: Workspace,
    change: Callable[[Workspace], dict[str, Any]],
    word: str,
    output: list[dict[str, Any]],
) -> None:
    """When the input, the model or the code changed, all is computed anew; the log says which it was."""
    workspace.write(10)
    first = workspace.run()
    outcome = workspace.run(workspace.asset(**change(workspace)))
    assert outcome.result.success, outcome.error
    generation = first.metadata()["sits/generation"]
    sentence = (
        f"The {word} changed since generation {generation}: it is not resumed, a new generation begins."
    )
    assert f"{DAY}: {sentence}" in outcome.log
    assert sentence in outcome.metadata()["sits/notes"]
    assert outcome.metadata()["sits/resumed_from_row"] == "0"
    assert workspace.output() == output


def test_two_changes_are_both_named(workspace: Workspace) -> None:
    """When the input and the model changed, the log names both."""
    workspace.write(10)
    workspace.run()
    _more_input(workspace)
    _model(workspace)
    assert "The input and model changed since" in workspace.run().log


def test_change_in_mid_work_drops_the_unfinished_output(workspace: Workspace) -> None:
    """What an unfinished run had committed with the old model never mixes with the new one's rows."""
    workspace.write(40)
    common = {"code_version": "1"}
    workspace.run(workspace.asset(encode=fails_from(workspace, 20), **common), segment_seconds=0)
    assert workspace.output()
    save_times(workspace.model, 5.0)
    outcome = workspace.run(workspace.asset(encode=passes, **common), segment_seconds=0)
    assert "The model changed since" in outcome.log
    assert workspace.output() == scores(range(40), factor=5.0)


@pytest.mark.parametrize("damage", ["truncated", "altered", "emptied"])
def test_damaged_checkpoint_costs_its_segment_only(workspace: Workspace, damage: str) -> None:
    """A checkpoint that was truncated or altered is recognised; just its segment is computed again."""
    workspace.write(40)
    common = {"code_version": "1"}
    workspace.run(workspace.asset(encode=fails_from(workspace, 20), **common), segment_seconds=0)
    committed = len(workspace.output())
    record = sorted(_commits(workspace))[1]
    data = record.read_bytes()
    record.write_bytes(
        {"truncated": data[:-9], "altered": data[:60] + b"\xff\xff" + data[62:], "emptied": b""}[damage]
    )
    outcome = workspace.run(workspace.asset(encode=passes, **common), segment_seconds=0)
    assert outcome.result.success, outcome.error
    assert f"{record.name} is damaged or its files are gone: that segment is computed again." in outcome.log
    assert outcome.metadata()["sits/resumed_from_row"] == str(committed - 4)
    assert workspace.output() == scores(range(40))
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": True}


def _commits(workspace: Workspace) -> list[Path]:
    return list(workspace.out().glob("_sits/generations/*/commits/*"))


def test_touched_success_file_is_repaired(workspace: Workspace) -> None:
    """A `_SUCCESS` that somebody removed is back after the next run, which computes nothing."""
    workspace.write(10)
    workspace.run()
    (workspace.out() / "_SUCCESS").unlink()
    outcome = workspace.run()
    assert outcome.metadata()["sits/batches"] == 0
    assert (workspace.out() / "_SUCCESS").exists()


def test_removed_output_folder_is_computed_again(workspace: Workspace) -> None:
    """Whoever deletes an output folder gets it back by running the partition again."""
    workspace.write(10)
    workspace.run()
    shutil.rmtree(workspace.out())
    outcome = workspace.run()
    assert outcome.metadata()["sits/batches"] == 3
    assert workspace.output() == scores(range(10))
