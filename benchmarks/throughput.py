"""Measures what the data plane costs: speed against the bare session, device-busy share, start, memory.

Everything is made here: the demo's data and model, in a temporary folder unless `--home` names one.
Figures are medians. `others` is what other processes took of the machine meanwhile, in CPUs: figures
of wall time mean little where it is not near 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _demo
import numpy as np
import onnxruntime
import psutil
from _report import Samples, print_table, report

from sits_dagster.demo import data
from sits_dagster.demo.model import prepare_model
from sits_dagster.inference.batches import Packer
from sits_dagster.inference.decode import decode_batch
from sits_dagster.inference.encode import encode_chunk
from sits_dagster.inference.engine import Arrays, Engine
from sits_dagster.inference.sizing import FixedBatchSizer
from sits_dagster.inference.stats import Progress
from sits_dagster.testing.paced import PacedEngine, PreparedOutputs, measure_wake_seconds

CHILD = Path(__file__).with_name("_child.py")
# Full batches of 8 rows take 10 and 50 ms; a fifth of that whatever the rows.
PACES = {"10ms": (0.002, 0.001), "50ms": (0.010, 0.005)}
STEPS_MAX = 400
CELLS_PER_STEP = 8


@dataclasses.dataclass(frozen=True)
class Size:
    """How long everything takes."""

    rows_per_partition: int
    pairs: int
    busy_runs: int
    busy_seconds: float
    starts: int
    memory_seconds: float


FULL = Size(rows_per_partition=480, pairs=5, busy_runs=3, busy_seconds=30, starts=5, memory_seconds=30)
QUICK = Size(rows_per_partition=96, pairs=1, busy_runs=1, busy_seconds=4, starts=2, memory_seconds=4)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where the data is and how much of it is wanted."""

    home: Path
    model: Path
    size: Size
    threads: int

    @property
    def partition(self) -> Path:
        return self.home / "lines" / data.DEFAULT_PARTITIONS[0]

    def lines(self, rows_min: int) -> Path:
        return _demo.repeated_lines(self.home, rows_min)

    def plan(self, lines: Path) -> _demo.Run:
        return _demo.plan_run(lines, self.model, Path(tempfile.mkdtemp(dir=self.home, prefix="out-")))

    def child(self, role: str, **arguments: object) -> tuple[dict[str, Any], int]:
        """Return a fresh process's answer and the most memory that it had resident, in bytes."""
        facts = {"home": str(self.home), "model": str(self.model), "threads": self.threads, **arguments}
        started = time.monotonic()
        command = [sys.executable, str(CHILD), role, json.dumps({"started": started, **facts})]
        bytes_peak = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            watched = psutil.Process(process.pid)
            while process.poll() is None:
                try:
                    bytes_peak = max(bytes_peak, watched.memory_info().rss)
                except psutil.NoSuchProcess:
                    break
                time.sleep(0.01)
            assert process.stdout is not None
            printed = process.stdout.read()
        if process.returncode != 0:
            raise RuntimeError(f"{role} failed: {printed}")  # noqa: EM102, TRY003 - seen by a developer
        return json.loads(printed.splitlines()[-1]), bytes_peak


# --- speed -----------------------------------------------------------------------------------------------


def measure_speed(bench: Bench, samples: Samples) -> None:
    """Product and bare session in turn, on the same batches, with the same threads."""
    engine = _demo.cpu_engine(bench.model, bench.threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = bench.threads
    session = onnxruntime.InferenceSession(bench.model, options, providers=["CPUExecutionProvider"])
    batches = _product_pass(bench, engine)[2]
    _bare_pass(session, batches)

    def pair() -> None:
        nonlocal batches
        batches = []
        gc.collect()
        wall, cpu, batches = _product_pass(bench, engine)
        bare_wall, bare_cpu = _bare_pass(session, batches)
        engine_wall, engine_cpu = _engine_pass(engine, batches)
        rows = sum(len(inputs["x"]) for inputs in batches)
        samples.add("speed_ratio", bare_wall / wall)
        samples.add("speed_ratio_cpu", bare_cpu / cpu)
        # Without the pipeline, with the engine's options: what is left of the gap is the engine's.
        samples.add("speed_ratio_engine", engine_wall / wall)
        samples.add("speed_ratio_engine_cpu", engine_cpu / cpu)
        samples.add("speed_rows_per_second", rows / wall)
        samples.add("speed_rows_per_second_bare", rows / bare_wall)

    for _ in range(bench.size.pairs):
        samples.watched("speed_ratio", pair)


def _product_pass(bench: Bench, engine: Engine) -> tuple[float, float, list[Arrays]]:
    recording = _demo.RecordingEngine(engine)
    run = bench.plan(bench.partition)
    wall, cpu = time.perf_counter(), time.process_time()
    run.go(recording)
    return time.perf_counter() - wall, time.process_time() - cpu, recording.calls


def _bare_pass(session: onnxruntime.InferenceSession, batches: list[Arrays]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for inputs in batches:
        session.run(None, inputs)
    return time.perf_counter() - wall, time.process_time() - cpu


def _engine_pass(engine: Engine, batches: list[Arrays]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for inputs in batches:
        engine.predict(inputs)
    return time.perf_counter() - wall, time.process_time() - cpu


# --- busy ------------------------------------------------------------------------------------------------


def measure_busy(bench: Bench, samples: Samples, pace: str) -> None:
    """Product and serial loop on a device that only waits, over real rows, to real files."""
    seconds_per_call, seconds_per_row = PACES[pace]
    rows_min = round(bench.size.busy_seconds / (seconds_per_call / _demo.BATCH_ROWS + seconds_per_row))
    lines = bench.lines(rows_min)
    real = _demo.cpu_engine(bench.model, bench.threads)
    outputs, wake_seconds = _prepared_outputs(bench, real), measure_wake_seconds()

    def paced() -> PacedEngine:
        return PacedEngine(
            real.signature,
            outputs,
            seconds_per_call=seconds_per_call,
            seconds_per_row=seconds_per_row,
            seconds_watched=wake_seconds,
        )

    def product() -> None:
        engine = paced()
        cpu = time.process_time()
        progress = bench.plan(lines).go(engine)
        samples.add(f"busy_{pace}", progress.busy_fraction or 0.0)
        samples.add(f"busy_{pace}_strict", engine.busy_fraction or 0.0)
        samples.add(f"busy_{pace}_wall_seconds", progress.wall_seconds)
        samples.add(f"busy_{pace}_commits", progress.segments)
        samples.add(f"busy_{pace}_cpu_ms_per_row", (time.process_time() - cpu) / engine.rows * 1000)

    def serial() -> None:
        engine = paced()
        progress = _serial_loop(bench.plan(lines), engine, bench.size.busy_seconds / 3)
        samples.add(f"busy_{pace}_serial", progress.busy_fraction or 0.0)
        samples.add(f"busy_{pace}_serial_strict", engine.busy_fraction or 0.0)

    for _ in range(bench.size.busy_runs):
        samples.watched(f"busy_{pace}", product)
        samples.watched(f"busy_{pace}_serial", serial)


def _prepared_outputs(bench: Bench, engine: Engine) -> PreparedOutputs:
    """The model's answers to the longest lines, repeated to the width of the widest image."""
    run = bench.plan(bench.partition)
    chunk = next(run.work.reader.read(0, 64, rows_max=64, bytes_max=1 << 24))
    encoded = encode_chunk(chunk, run.work.encode, engine.signature, columns_required=())
    rows = sorted(encoded.columns["x"], key=lambda row: row.shape[-1])[-_demo.BATCH_ROWS :]
    batch = np.stack([row[..., : rows[0].shape[-1]] for row in rows])
    wide = {
        name: np.tile(array, STEPS_MAX)[:, :STEPS_MAX] for name, array in engine.predict({"x": batch}).items()
    }
    return PreparedOutputs(arrays=wide, input="x", cells_per_step=CELLS_PER_STEP)


def _serial_loop(run: _demo.Run, engine: Engine, seconds: float) -> Progress:
    """Read, encode, pack, call and decode, one after the other, with the same functions."""
    work, progress = run.work, Progress()
    packer = Packer(
        signature=engine.signature,
        padding=work.padding,
        sizer=FixedBatchSizer(_demo.BATCH_ROWS),
        window_rows_max=_demo.POLICY.window_rows,
    )
    chunks = work.reader.read(
        0, work.partition.rows, rows_max=_demo.POLICY.chunk_rows, bytes_max=_demo.POLICY.chunk_bytes
    )
    for chunk in chunks:
        encoded = encode_chunk(chunk, work.encode, engine.signature, columns_required=())
        for batch in packer.add(encoded):
            started = time.perf_counter()
            outputs = engine.predict(batch.arrays)
            progress.add_call(
                started=started, ended=time.perf_counter(), rows=len(batch.rows), memory_bytes=None
            )
            decode_batch(batch.rows, outputs, work.decode)
        if progress.wall_seconds > seconds:
            break
    return progress


# --- start and memory ------------------------------------------------------------------------------------


def measure_starts(bench: Bench, samples: Samples) -> None:
    """Fresh processes in turn; the files are in the page cache."""
    lines = str(bench.partition)
    for role in ("product_start", "naive_start"):
        bench.child(role, lines=lines)
    for _ in range(bench.size.starts):
        for figure, role in (("startup", "product_start"), ("startup_naive", "naive_start")):
            facts, _ = bench.child(role, lines=lines)
            samples.add(f"{figure}_seconds", facts["seconds"])
            samples.add(f"{figure}_cpu_seconds", facts["cpu_seconds"])
    measure_dagster_starts(bench, samples)


def measure_dagster_starts(bench: Bench, samples: Samples) -> None:
    """Start to first device call of the same rows in a Dagster job, in one process."""
    for index in range(bench.size.starts + 1):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            (home / "lines").symlink_to(bench.partition.parent.absolute())
            (home / bench.model.name).symlink_to(bench.model.absolute())
            facts, _ = bench.child("dagster_start", home=folder, partition=bench.partition.name)
        if index:  # the first one warms the page cache
            samples.add("startup_dagster_seconds", facts["seconds"])


def measure_memory(bench: Bench, samples: Samples) -> None:
    """The product's peak over many rows, and the peak of a process with nothing but the model."""
    facts, product = bench.child(
        "product_memory", lines=str(bench.lines(12_000)), seconds=bench.size.memory_seconds
    )
    _, model = bench.child("model_memory", largest=facts["largest"])
    samples.add("resident_bytes_over_model", product - model)
    samples.add("resident_bytes", product)
    samples.add("resident_bytes_model", model)


def measure(bench: Bench, only: list[str]) -> Samples:
    steps: dict[str, Callable[[Bench, Samples], None]] = {
        "start": measure_starts,
        "memory": measure_memory,
        "busy_10ms": functools.partial(measure_busy, pace="10ms"),
        "busy_50ms": functools.partial(measure_busy, pace="50ms"),
        "speed": measure_speed,
    }
    samples = Samples()
    for name, step in steps.items():
        if not only or name in only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            step(bench, samples)
            for out in bench.home.glob("out-*"):
                shutil.rmtree(out, ignore_errors=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--quick", action="store_true", help="a short form of about a minute; figures are rough"
    )
    parser.add_argument(
        "--home", type=Path, help="folder for data, model and outputs (default: a temporary one)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a device call")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STEP",
        help="start, memory, busy_10ms, busy_50ms or speed",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sits-benchmark-") as temporary:
        home = (arguments.home or Path(temporary)).resolve()
        size = QUICK if arguments.quick else FULL
        home = home / f"rows-{size.rows_per_partition}"
        data.generate(home, rows_per_partition=size.rows_per_partition)
        bench = Bench(home=home, model=prepare_model(home), size=size, threads=arguments.threads)
        samples = measure(bench, arguments.only)
    print_table(samples)
    if arguments.json:
        print(json.dumps(report(samples, threads=bench.threads, size=dataclasses.asdict(size))))


if __name__ == "__main__":
    main()
