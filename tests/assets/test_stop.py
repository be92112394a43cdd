"""A run that is interrupted finishes its batch, commits, and loses nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from sits_dagster.assets.stop import StopSignal, ends_politely
from tests.assets.workspace import CPU_MEMORY_BYTES, Workspace, scores

ROOT = Path(__file__).resolve().parents[2]
ROWS = 400
CHILD = """
import os, sys
from pathlib import Path
import dagster as dg
from tests.assets.test_stop import slow_asset
from tests.assets.workspace import Workspace

root, fan_out = Path(sys.argv[1]), sys.argv[2] == "True"
with dg.DagsterInstance.ephemeral() as instance:
    workspace = Workspace(root, instance)
    try:
        workspace.run(slow_asset(workspace, fan_out), **{limits!r})
    finally:
        print("run:", [run.status.value for run in instance.get_runs()], flush=True)
"""
LIMITS = {"segment_seconds": 60, "batch_rows": 4, "chunk_rows": 8, "encode_workers": 1}


def slow_asset(workspace: Workspace, fan_out: bool) -> dg.AssetsDefinition:
    """Return an asset that needs some seconds and writes down each row that went through the device."""

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        time.sleep(0.04)
        return {"x": batch.column("x").to_numpy()}

    def decode(outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        with (workspace.root / "device.txt").open("a") as file:
            file.write("".join(f"{y:g}\n" for y in outputs["y"]))
        return {"y": outputs["y"]}

    return workspace.asset(encode=encode, decode=decode, code_version="1", fan_out=fan_out)


def _start(root: Path, fan_out: bool) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD).replace("{limits!r}", repr(LIMITS))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(fan_out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _seen(root: Path) -> list[float]:
    path = root / "device.txt"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("fan_out", [False, True], ids=["one step", "fan-out"])
def test_interrupted_run_loses_no_row(workspace: Workspace, sign: signal.Signals, fan_out: bool) -> None:
    """After SIGINT or SIGTERM what was begun is committed, the run ends, and the next does the rest."""
    workspace.write(ROWS)
    with _start(workspace.root, fan_out) as child:
        deadline = time.monotonic() + 60
        while len(_seen(workspace.root)) < 40:
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(sign)
        output, errors = child.communicate(timeout=60)
    assert "run: ['FAILURE']" in output, output + errors
    assert "Stopped, since the process was interrupted" in errors
    done = len(_seen(workspace.root))
    assert 40 <= done < ROWS
    assert not (workspace.out() / "_SUCCESS").exists()

    outcome = workspace.run(slow_asset(workspace, fan_out), **LIMITS)
    assert outcome.result.success, outcome.error
    found = outcome.metadata()
    assert found["sits/rows_recomputed"] == 0
    assert int(found["sits/resumed_from_row"]) > 0
    assert sorted(_seen(workspace.root)) == [row["y"] for row in scores(range(ROWS))]
    assert workspace.output() == scores(range(ROWS))
    assert outcome.checks == {"complete": True, "unique": True, "no_orphan_files": True}


def test_interrupt_while_waiting_for_a_device(workspace: Workspace) -> None:
    """A run that waits for a device ends at once when it is interrupted, and has written nothing."""
    workspace.write(8)
    pool = workspace.resources()["gpu_pool"]
    assert pool.cpu_memory_bytes == CPU_MEMORY_BYTES
    lease = pool.lease(owner="a long run", should_stop=lambda: False, on_wait=print)
    with lease, _start(workspace.root, fan_out=False) as child:
        assert any("Waiting up to" in line for line in iter(child.stderr.readline, ""))
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=60)
    assert "run: ['FAILURE']" in output
    assert workspace.parts() == []
    assert workspace.run(slow_asset(workspace, fan_out=False)).result.success


def test_run_that_dagster_calls_ended_stops(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the interrupt was lost, the run's status alone stops the work; the log says so."""
    monkeypatch.setattr("sits_dagster.assets.stop.POLL_SECONDS", 0.05)
    workspace.write(40)

    def encode(batch: pa.RecordBatch) -> Mapping[str, Any]:
        time.sleep(0.1)
        for run in workspace.instance.get_runs():
            if run.status is dg.DagsterRunStatus.STARTED and batch.column("id")[0].as_py() >= 8:
                workspace.instance.report_run_canceling(run)
        return {"x": batch.column("x").to_numpy()}

    asset = workspace.asset(encode=encode, code_version="1")
    outcome = workspace.run(asset, chunk_rows=4, encode_workers=1)
    assert outcome.run.status is dg.DagsterRunStatus.CANCELED
    assert "Stopped, since the run is CANCELING" in outcome.log
    done = len(workspace.output())
    assert done < 40
    monkeypatch.undo()
    outcome = workspace.run(workspace.asset(code_version="1"), chunk_rows=4)
    assert outcome.metadata()["sits/rows_recomputed"] == 0
    assert workspace.output() == scores(range(40))


def test_signal_is_held_back_inside_and_raised_at_the_end() -> None:
    """Inside the block an interrupt only sets the flag; at its end it is raised, so nothing is cut short."""
    finished = []
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(BaseException) as caught, ends_politely(instance, "no such run") as stop:  # noqa: PT011, PT012
            assert not stop()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            assert stop()
            finished.append(stop.reason)
        assert type(caught.value).__name__ == "DagsterExecutionInterruptedError"
    assert finished == ["the process was interrupted"]


def test_database_that_is_away_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """When Dagster's database cannot be asked for the run's status, the work goes on."""

    class Away:
        asked = 0

        def get_run_by_id(self, run_id: str) -> None:
            self.asked += 1
            message = "connection refused"
            raise ConnectionError(message)

    monkeypatch.setattr("sits_dagster.assets.stop.POLL_SECONDS", 0.01)
    away = Away()
    stop = StopSignal(away, "run")  # type: ignore[arg-type]
    stop.start()
    while away.asked < 3:
        time.sleep(0.01)
    assert not stop()
    stop.finish()
