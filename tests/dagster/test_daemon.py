"""A deployment as users have it: webserver, daemon and code server on SQLite, driven through GraphQL."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
ROWS = 4000
BATCH_ROWS = 8
SEGMENT_ROWS = 256
START_SECONDS_MAX = 180
RUN_SECONDS_MAX = 240
LOCATION = "deployment.py"

CONFIG = """\
telemetry: {enabled: false}
concurrency: {runs: {max_concurrent_runs: 2}, pools: {granularity: op, op_granularity_run_buffer: 2}}
compute_logs:
  module: dagster._core.storage.noop_compute_log_manager
  class: NoOpComputeLogManager
"""

BACKFILL = """
mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
  }
}"""
BACKFILL_STATUS = """
query($id: String!) {
  partitionBackfillOrError(backfillId: $id) { __typename ... on PartitionBackfill { status } }
}
"""
LAUNCH = """
mutation($params: ExecutionParams!) {
  launchPipelineExecution(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}"""
REEXECUTE = """
mutation($params: ReexecutionParams!) {
  launchPipelineReexecution(reexecutionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}"""
TERMINATE = """
mutation($id: String!) { terminateRun(runId: $id) { __typename ... on TerminateRunFailure { message } } }
"""
STATUS = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
EVENTS = """
query($id: ID!) {
  logsForRun(runId: $id) { ... on EventConnection { events { ... on MessageEvent { message } } } }
}"""
MATERIALIZATIONS = """
query($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) { ... on AssetNode {
    assetMaterializations { partition runId metadataEntries {
      label ... on IntMetadataEntry { intValue } ... on FloatMetadataEntry { floatValue }
      ... on TextMetadataEntry { text } ... on PathMetadataEntry { path }
      ... on MarkdownMetadataEntry { mdStr } } }
    assetObservations { partition metadataEntries { label } }
    assetChecksOrError { ... on AssetChecks { checks {
      name executionForLatestMaterialization { status } } } } } }
}"""


class Deployment:
    """`dagster dev` in its own process group, and its GraphQL."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = _free_port()
        self._log = (home / "dev.log").open("ab")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dagster",
                "dev",
                "-h",
                "127.0.0.1",
                "-p",
                str(self.port),
                "-f",
                str(Path(__file__).with_name(LOCATION)),
            ],
            env={
                **os.environ,
                "SITS_TEST_HOME": str(home),
                "DAGSTER_HOME": str(home / "dagster"),
                "PYTHONPATH": str(ROOT),
            },
            cwd=home,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End everything that was started, politely first."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
        for child in children:
            if child.is_running():
                child.kill()
        self._log.close()

    def assert_alive(self) -> None:
        assert self._process.poll() is None, Path(self._log.name).read_text()[-4000:]

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        """Return the data of a GraphQL answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql",
            json.dumps({"query": text, "variables": variables}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - loopback
            answer = json.load(response)
        assert "errors" not in answer, answer
        return answer["data"]

    def launch(self, day: str) -> str:
        """Queue a run of the asset's job; its run id."""
        tags = [{"key": "dagster/partition", "value": day}]
        params = {
            "selector": {
                "repositoryLocationName": LOCATION,
                "repositoryName": "__repository__",
                "pipelineName": "__ASSET_JOB",
                "assetSelection": [{"path": ["scores"]}],
            },
            "mode": "default",
            "executionMetadata": {"tags": tags},
        }
        result = self.query(LAUNCH, params=params)["launchPipelineExecution"]
        return result["run"]["runId"]

    def reexecute(self, run_id: str) -> str:
        """Queue the run again with its lineage; the new run id."""
        params = {"parentRunId": run_id, "strategy": "ALL_STEPS"}
        return self.query(REEXECUTE, params=params)["launchPipelineReexecution"]["run"]["runId"]

    def status(self, run_id: str) -> str:
        return self.query(STATUS, id=run_id)["runOrError"]["status"]

    def wait_for(self, run_id: str, *statuses: str) -> str:
        return _wait(lambda: (s := self.status(run_id)) in statuses and s, RUN_SECONDS_MAX, self._log.name)

    def asset(self) -> dict[str, Any]:
        return self.query(MATERIALIZATIONS, key={"path": ["scores"]})["assetNodeOrError"]

    def metadata(self, run_id: str) -> dict[str, Any]:
        """Return the values of the run's materialisation, by label."""
        [found] = [m for m in self.asset()["assetMaterializations"] if m["runId"] == run_id]
        values = ("intValue", "floatValue", "text", "path", "mdStr")
        return {
            entry["label"]: next((entry[name] for name in values if entry.get(name) is not None), None)
            for entry in found["metadataEntries"]
        }

    def commits(self, day: str) -> list[Path]:
        return list((self.home / "scores" / day).glob("_sits/generations/*/commits/*"))

    def decoded(self) -> np.ndarray:
        log = self.home / "decoded.log"
        return np.frombuffer(log.read_bytes(), "<i8") if log.exists() else np.empty(0, "<i8")

    def scores(self, day: str) -> pa.Table:
        parts = sorted((self.home / "scores" / day).glob("*.parquet"))
        return pa.concat_tables(pq.read_table(part) for part in parts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(condition: Callable[[], Any], seconds_max: float, log: str) -> Any:
    until = time.monotonic() + seconds_max
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.5)
    pytest.fail(f"Nothing happened in {seconds_max} s. {Path(log).read_text()[-4000:]}")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    home = tmp_path_factory.mktemp("daemon")
    (home / "dagster").mkdir()
    (home / "dagster" / "dagster.yaml").write_text(CONFIG)
    script = "from tests.dagster.deployment import make_home; make_home()"
    environment = {
        **os.environ,
        "SITS_TEST_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "SITS_TEST_ROWS": str(ROWS),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, check=True)
    found = Deployment(home)
    try:
        _wait(lambda: _is_up(found), START_SECONDS_MAX, str(home / "dev.log"))
        yield found
    finally:
        found.stop()


def _is_up(deployment: Deployment) -> bool:
    try:
        answer = deployment.query(
            "query { repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"
        )
    except (urllib.error.URLError, OSError):
        deployment.assert_alive()
        return False
    return bool(answer["repositoriesOrError"].get("nodes"))


def assert_whole(deployment: Deployment, day: str) -> None:
    """Assert that every good row is in the output once, in order."""
    first_id = DAYS.index(day) * 1_000_000
    ids = [i for i in range(first_id, first_id + ROWS) if i % 500 != 7]
    assert deployment.scores(day).column("id").to_pylist() == ids


def test_a_cancelled_run_loses_at_most_a_batch(deployment: Deployment) -> None:
    """Terminate in the UI: the batch at hand is committed; the next run goes on from there."""
    day = DAYS[0]
    run_id = deployment.launch(day)
    _wait(lambda: deployment.commits(day), RUN_SECONDS_MAX, str(deployment.home / "dev.log"))
    assert deployment.query(TERMINATE, id=run_id)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    assert deployment.wait_for(run_id, "CANCELED", "SUCCESS") == "CANCELED"
    assert len(deployment.decoded()) < ROWS
    again = deployment.reexecute(run_id)
    assert deployment.wait_for(again, "SUCCESS", "FAILURE", "CANCELED") == "SUCCESS"
    ids = deployment.decoded()
    assert len(ids) - len(np.unique(ids)) <= BATCH_ROWS
    assert_whole(deployment, day)
    values = deployment.metadata(again)
    assert values["sits/rows_recomputed"] <= BATCH_ROWS
    assert int(values["sits/resumed_from_row"]) > 0


def test_a_killed_run_is_reexecuted_and_resumes(deployment: Deployment) -> None:
    """Kill the run's processes: Dagster reports a failure, its re-execution loses at most a segment."""
    day = DAYS[1]
    before = len(deployment.decoded())
    run_id = deployment.launch(day)
    _wait(lambda: deployment.commits(day), RUN_SECONDS_MAX, str(deployment.home / "dev.log"))
    run_worker = psutil.Process(
        _wait(lambda: _pid_of(deployment, run_id), 30, str(deployment.home / "dev.log"))
    )
    for process in [*run_worker.children(recursive=True), run_worker]:
        process.kill()
    assert deployment.wait_for(run_id, "FAILURE", "SUCCESS") == "FAILURE"
    again = deployment.reexecute(run_id)
    assert deployment.wait_for(again, "SUCCESS", "FAILURE", "CANCELED") == "SUCCESS"
    ids = deployment.decoded()[before:]
    assert len(ids) - len(np.unique(ids)) <= SEGMENT_ROWS
    assert_whole(deployment, day)
    assert int(deployment.metadata(again)["sits/resumed_from_row"]) >= SEGMENT_ROWS - BATCH_ROWS


def _pid_of(deployment: Deployment, run_id: str) -> int | None:
    """Return the process that Dagster's own event of the run's start names."""
    events = deployment.query(EVENTS, id=run_id)["logsForRun"]["events"]
    for event in events:
        message = event.get("message") or ""
        if "run worker process" in message or "(pid: " in message:
            digits = message.rsplit("pid: ", 1)[-1].split(")")[0]
            if digits.isdigit():
                return int(digits)
    return None


def test_a_backfill_of_all_partitions_succeeds_and_shows_its_metadata(deployment: Deployment) -> None:
    """A backfill from the UI's mutation: three partitions, metadata, observations and passed checks."""
    params = {"assetSelection": [{"path": ["scores"]}], "partitionNames": list(DAYS), "tags": []}
    result = deployment.query(BACKFILL, params=params)["launchPartitionBackfill"]
    assert result["__typename"] == "LaunchBackfillSuccess", result
    backfill = result["backfillId"]

    def is_over() -> str | None:
        status = deployment.query(BACKFILL_STATUS, id=backfill)["partitionBackfillOrError"]["status"]
        return status if status.startswith(("COMPLETED", "FAILED")) else None

    assert _wait(is_over, RUN_SECONDS_MAX, str(deployment.home / "dev.log")) == "COMPLETED_SUCCESS"
    for day in DAYS:
        assert_whole(deployment, day)
    asset = deployment.asset()
    newest = {m["partition"]: m for m in reversed(asset["assetMaterializations"])}
    assert set(newest) == set(DAYS)
    values = deployment.metadata(newest[DAYS[2]]["runId"])
    quarantined = sum(i % 500 == 7 for i in range(ROWS))
    assert values["dagster/row_count"] == ROWS - quarantined
    assert values["sits/rows_quarantined"] == quarantined
    assert 0 < values["sits/device_busy_fraction"] <= 1
    assert values["sits/rows_per_second"] > 0
    assert values["sits/batches"] >= ROWS // BATCH_ROWS
    assert 0 <= values["sits/padding_share"] < 1
    assert Path(values["sits/quarantine_path"]).is_dir()
    assert len(values["sits/batches_over_time"]) < 1000
    assert any(o["partition"] == DAYS[2] for o in asset["assetObservations"])
    statuses = {
        check["name"]: check["executionForLatestMaterialization"]["status"]
        for check in asset["assetChecksOrError"]["checks"]
    }
    assert statuses == {"complete": "SUCCEEDED", "unique": "SUCCEEDED", "no_orphan_files": "SUCCEEDED"}
