"""What a run shows in Dagster: metadata, live observations, log lines, and tries after passing faults."""

import base64
import fcntl
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster import ParquetSink
from sits_dagster.errors import TransientError
from sits_dagster.models.model import model_digest
from tests.assets.workspace import DAY, Workspace, fails_from, save_times, scores

SVG = "![batches](data:image/svg+xml;base64,"


def _slow(seconds: float) -> Callable[[pa.RecordBatch], Mapping[str, Any]]:
    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        time.sleep(seconds)
        return {"x": batch.column("x").to_numpy()}

    return encode


@pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])
def test_metadata_of_a_materialisation(workspace: Workspace, fan_out: bool) -> None:
    """A materialisation tells rows, batches, speed, memory, paths and digests of its own partition."""
    workspace.write_table({"id": range(10), "x": pa.array([*range(9), None], pa.float32())})
    outcome = workspace.run(workspace.asset(fan_out=fan_out))
    found = outcome.metadata()
    picture = found.pop("sits/batches_over_time")
    assert picture.startswith(SVG)
    memory = {name: found.pop(name) for name in ("sits/host_memory_bytes_peak", "sits/memory_bytes_peak")}
    assert all(16 << 20 < value < 16 << 30 for value in memory.values())
    assert 0 < found.pop("sits/device_busy_fraction") <= 1
    assert found.pop("sits/rows_per_second") > 0
    generation = found.pop("sits/generation")
    assert (workspace.out() / "_sits" / "generations" / generation / "outcome.json").exists()
    assert found == {
        "dagster/row_count": 9,
        "sits/rows_read": 10,
        "sits/rows_quarantined": 1,
        "sits/rows_recomputed": 0,
        "sits/resumed_from_row": "0",
        "sits/batches": 3,
        "sits/batching": "invariant",
        "sits/segments": 1,
        "sits/padding_share": 0.0,
        "sits/out_of_memory": 0,
        "sits/model_digest": model_digest(workspace.model),
        "sits/output_path": str(workspace.out()),
        "sits/quarantine_path": str(workspace.out() / "_quarantine"),
    }


def test_picture_is_shown_inline_by_dagster(workspace: Workspace) -> None:
    """However many batches a run has, its picture stays short enough to be shown in place, and is an SVG."""
    workspace.write(1200)
    picture = workspace.run(batch_rows=1).metadata()["sits/batches_over_time"]
    assert len(picture) < 1000
    svg = ET.fromstring(base64.b64decode(picture.removeprefix(SVG).removesuffix(")")))  # noqa: S314 - ours
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert {child.tag for child in svg} == {"{http://www.w3.org/2000/svg}polyline"}


def test_resume_is_seen_in_the_metadata(workspace: Workspace) -> None:
    """A run that goes on from a commit says from which row; its own batches count only what it did."""
    workspace.write(40)
    workspace.run(
        workspace.asset(encode=fails_from(workspace, 20), code_version="1"), segment_seconds=0, retries_max=0
    )
    outcome = workspace.run(workspace.asset(encode=_slow(0), code_version="1"), segment_seconds=0)
    found = outcome.metadata()
    resumed = int(found["sits/resumed_from_row"])
    assert 0 < resumed <= 20
    assert found["sits/batches"] == (40 - resumed) / 4
    assert found["sits/segments"] == (40 - resumed) / 4
    assert found["dagster/row_count"] == found["sits/rows_read"] == 40


def test_progress_is_observed_while_the_run_goes_on(workspace: Workspace) -> None:
    """Observations during a run show rows done, rows in all, speed and the time left; numbers only grow."""
    workspace.write(48)
    outcome = workspace.run(
        workspace.asset(encode=_slow(0.05)), progress_seconds=0.05, segment_seconds=0.1, encode_workers=1
    )
    observed = outcome.observations
    assert len(observed) >= 3
    assert all(item["sits/rows_total"] == 48 for item in observed)
    done = [item["sits/rows_done"] for item in observed]
    committed = [item["sits/rows_committed"] for item in observed]
    assert done == sorted(done)
    assert committed == sorted(committed)
    assert all(c <= d <= 48 for c, d in zip(committed, done, strict=True))
    assert committed[-1] > 0
    assert all(item["sits/rows_per_second"] > 0 for item in observed[2:])
    assert all(item["sits/seconds_left"] >= 0 for item in observed[2:])
    assert f"{DAY}: {done[-1]} of 48 rows" in outcome.log


def test_transient_error_is_tried_again_in_the_same_run(workspace: Workspace) -> None:
    """After a passing fault Dagster tries the step again, as often as the resource says, and it succeeds."""
    workspace.write(12)
    asset = workspace.asset(encode=_passing_fault(workspace.root / "tries", 2), code_version="1")
    outcome = workspace.run(asset, retries_max=2)
    assert outcome.result.success, outcome.error
    kinds = [event.event_type_value for event in outcome.result.all_events]
    assert kinds.count("STEP_UP_FOR_RETRY") == 2
    assert outcome.checks["complete"]
    assert workspace.output() == scores(range(12))


def test_transient_error_fails_once_the_tries_are_used_up(workspace: Workspace) -> None:
    """A fault that does not pass fails the run after the configured tries, with its own text."""
    workspace.write(12)
    asset = workspace.asset(encode=_passing_fault(workspace.root / "tries", 2), code_version="1")
    outcome = workspace.run(asset, retries_max=1)
    assert not outcome.result.success
    assert "the database is away" in outcome.error
    assert (workspace.root / "tries").read_text() == "xx"


def _passing_fault(tries: Path, count: int) -> Callable[[pa.RecordBatch], Mapping[str, Any]]:
    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        done = tries.read_text() if tries.exists() else ""
        if len(done) < count and batch.column("id")[0].as_py() == 0:
            tries.write_text(done + "x")
            message = "the database is away"
            raise TransientError(message, retry_after_seconds=0.01)
        return {"x": batch.column("x").to_numpy()}

    return encode


def test_device_that_stays_busy_is_a_passing_fault(workspace: Workspace) -> None:
    """When another process holds the only device, the run waits, then fails and names the holder."""
    workspace.write(4)
    with _held(workspace.root / "leases", workspace):
        pool = {"lease_seconds_max": 0.3}
        started = time.monotonic()
        outcome = workspace.run(pool=pool, retries_max=0)
        assert time.monotonic() - started >= 0.3
    assert not outcome.result.success
    assert "No device became free within 0.3 seconds" in outcome.error
    assert "the other process" in outcome.error
    assert "Waiting up to 0.3 seconds for a device" in outcome.log
    assert workspace.parts() == []
    assert workspace.run(pool=pool).result.success


@contextmanager
def _held(folder: Path, workspace: Workspace) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    is_held, may_end = context.Event(), context.Event()
    resource = workspace.resources()["gpu_pool"]
    holder = context.Process(target=_hold, args=(resource.cpu_memory_bytes, str(folder), is_held, may_end))
    holder.start()
    try:
        assert is_held.wait(60)
        yield
    finally:
        may_end.set()
        holder.join(60)


def _hold(cpu_memory_bytes: int, folder: str, is_held: Any, may_end: Any) -> None:
    from sits_dagster import GpuPoolResource

    pool = GpuPoolResource(provider="cpu", cpu_memory_bytes=cpu_memory_bytes, lease_folder=folder)
    with pool.lease(owner="the other process", should_stop=lambda: False, on_wait=print):
        is_held.set()
        may_end.wait(60)


def test_fixed_batch_of_the_model_wins(workspace: Workspace) -> None:
    """A model whose batch is fixed to one row runs with batches of one row, and the log says so."""
    save_times(workspace.model, rows=1)
    workspace.write(7)
    outcome = workspace.run(batch_rows=4)
    assert outcome.metadata()["sits/batches"] == 7
    assert "Model 'model' takes batches of 1 only; batch_rows=4 is not used." in outcome.log
    assert workspace.output() == scores(range(7))


def test_device_is_named_in_the_log(workspace: Workspace) -> None:
    """The log names the device that a run computes on."""
    workspace.write(4)
    assert "is leased." in workspace.run().log


def test_lease_is_given_back_after_a_failure(workspace: Workspace) -> None:
    """A run that fails frees its device at once."""
    workspace.write(4)

    def decode(outputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        return {"y": outputs["y"][:-1]}

    outcome = workspace.run(workspace.asset(decode=decode, sink=ParquetSink("out/{partition_key}")))
    assert "decode returned 3 rows for a batch of 4" in outcome.error
    for lock in (workspace.root / "leases").glob("*.lock"):
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
