"""Killed at any moment and run again, the output is that of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
KILLS_MIN = 40
ATTEMPTS_MAX = 200
ROUNDS_MAX = 12
SEGMENT_ROWS = 256


class Runner:
    """The forking child process, and how to kill what it forked."""

    def __init__(self, home: Path) -> None:
        environment = {
            **os.environ,
            "SITS_TEST_HOME": str(home),
            "DAGSTER_HOME": str(home / "dagster"),
            "PYTHONPATH": str(ROOT),
        }
        with (home / "runner.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.dagster.kill_runner"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=ROOT,
                text=True,
            )

    def run(self, day: str, *, kill_after_seconds: float | None) -> int:
        """Run the job once; the exit code, negative for a signal."""
        self.process.stdin.write(f"{day}\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if kill_after_seconds is not None:
            time.sleep(kill_after_seconds)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill")
    (folder / "dagster").mkdir()
    (folder / "dagster" / "dagster.yaml").write_text(
        "telemetry: {enabled: false}\n"
        "compute_logs: {module: dagster._core.storage.noop_compute_log_manager,"
        " class: NoOpComputeLogManager}\n"
    )
    script = "from tests.dagster.deployment import make_home; make_home()"
    environment = {**os.environ, "SITS_TEST_HOME": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, check=True)
    return folder


def read_scores(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(part) for part in sorted(folder.glob("*.parquet")))


def decoded_ids(home: Path) -> np.ndarray:
    log = home / "decoded.log"
    return np.frombuffer(log.read_bytes(), "<i8") if log.exists() else np.empty(0, "<i8")


def test_a_run_killed_forty_times_has_the_output_of_an_undisturbed_one(home: Path) -> None:
    """Every row once, in order, with equal bits; no kill costs more than one segment."""
    runner = Runner(home)
    chance = random.Random(20260101)
    days = ("2026-01-01", "2026-01-02", "2026-01-03")
    undisturbed = {}
    for day in days:
        began = time.monotonic()
        assert runner.run(day, kill_after_seconds=None) == 0
        seconds_undisturbed = time.monotonic() - began
        undisturbed[day] = read_scores(home / "scores" / day)
        (home / "scores" / day).rename(home / f"undisturbed-{day}")
    kills, lost_by_kill = 0, []
    for _ in range(ROUNDS_MAX):
        for day in days:
            (home / "decoded.log").unlink(missing_ok=True)
            before = 0
            for _ in range(ATTEMPTS_MAX):
                code = runner.run(day, kill_after_seconds=chance.uniform(0.1, 0.7 * seconds_undisturbed))
                repeated = len(ids := decoded_ids(home)) - len(np.unique(ids))
                if code == 0:
                    lost_by_kill.append(repeated - before)
                    break
                assert code == -signal.SIGKILL, (home / "runner.log").read_text()[-4000:]
                kills += 1
                lost_by_kill.append(repeated - before)
                before = repeated
            else:
                pytest.fail(f"{day} was not finished in {ATTEMPTS_MAX} attempts")
            assert read_scores(home / "scores" / day).equals(undisturbed[day])
            (home / "scores" / day).rename(home / f"killed-{day}-{kills}")
        if kills >= KILLS_MIN:
            break
    runner.close()
    print(f"{kills} kills lost {sum(lost_by_kill)} rows, at most {max(lost_by_kill)} at once")
    assert kills >= KILLS_MIN
    assert sum(lost_by_kill) <= kills * SEGMENT_ROWS
    assert max(lost_by_kill) <= SEGMENT_ROWS, Counter(lost_by_kill)
