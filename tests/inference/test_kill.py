"""Real processes, a real disk, real kill -9: the simulated crashes tell the truth."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.inference.generation import current_generation, read_generations
from sits_dagster.testing import visible_files

ROOT = Path(__file__).resolve().parents[2]
ROWS = 300
RUN = f"""
import os, sys, time
import numpy as np, pyarrow as pa
from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.parquet import ParquetFormat
from sits_dagster.errors import CommitConflictError
from sits_dagster.inference.engine import ModelSignature, TensorSpec
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.testing import MemoryRows, Trial

folder, log = sys.argv[1:]
descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def compute(inputs):
    time.sleep(0.002)
    os.write(descriptor, "".join(f"{{int(n)}}\\n" for n in inputs["x"]).encode())
    return {{"y": inputs["x"] * 2}}

x, y = (TensorSpec(name=name, dtype="float64", shape=(None,)) for name in "xy")
trial = Trial(
    source=MemoryRows(pa.RecordBatch.from_pydict({{"x": np.arange({ROWS}, dtype=np.float64)}}), (100, 200)),
    signature=ModelSignature(inputs=(x,), outputs=(y,)),
    function=compute,
    columns_kept=("x",),
    policy=PipelinePolicy(batch_rows=2, chunk_rows=5, segment_rows=15, shard_seconds_min=0.0),
)
print("ready", flush=True)
sys.stdin.readline()
try:
    done = trial.run(LocalStore(folder), part_format=ParquetFormat(folder), owner=str(os.getpid()))
except CommitConflictError as error:
    sys.exit(3)
"""


def _start(folder: Path, log: Path) -> subprocess.Popen[str]:
    """Start a process that waits for its turn."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(log)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=60)
    return process.returncode


def _check(folder: Path) -> None:
    store = LocalStore(folder)
    table = pq.read_table(folder)
    assert table.column("x").to_pylist() == list(range(ROWS))
    assert table.column("y").to_pylist() == [2 * n for n in range(ROWS)]
    published = current_generation(read_generations(store))
    assert published is not None
    manifest = sorted(file.path for commit in published.commits for file in commit.files)
    assert visible_files(store) == manifest
    assert (folder / "_SUCCESS").exists()
    assert not [path for path in store.list("") if "/staging/" in path or "/carried/" in path]


def test_a_process_that_is_killed_again_and_again_loses_only_its_open_segments(tmp_path: Path) -> None:
    """Killed at random moments, the last run ends with every row once, and little was computed twice."""
    rng = random.Random(7)
    folder, log = tmp_path / "out", tmp_path / "log"
    kills = 4
    for _ in range(kills):
        process = _start(folder, log)
        _go(process)
        time.sleep(rng.uniform(0.02, 0.12))
        process.send_signal(signal.SIGKILL)
        assert _end(process) == -signal.SIGKILL
    process = _start(folder, log)
    _go(process)
    assert _end(process) == 0
    _check(folder)
    counts = Counter(map(int, log.read_text().split()))
    assert sorted(counts) == list(range(ROWS))
    assert sum(counts.values()) <= ROWS + kills * 3 * 15, "each kill loses little"


def test_two_processes_at_one_partition_make_one_output(tmp_path: Path) -> None:
    """A second run that is started beside a first one takes over; the first one stops by itself."""
    folder, log = tmp_path / "out", tmp_path / "log"
    first, second = _start(folder, log), _start(folder, log)
    _go(first)
    time.sleep(0.1)
    _go(second)
    assert [_end(first), _end(second)] == [3, 0]
    _check(folder)
