"""The demo's data and model, and one product run over them, as the benchmarks need it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.onnx_engine import OnnxEngine
from sits_dagster.adapters.parquet import ParquetFormat, ParquetReader, scan_partition
from sits_dagster.demo import ocr
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.inference.engine import Arrays, Engine, MemorySample, ModelSignature
from sits_dagster.inference.generation import Fingerprint
from sits_dagster.inference.partition import PartitionPlan, run_attempt, start_partition
from sits_dagster.inference.pipeline import PartitionWork
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import FixedBatchSizer
from sits_dagster.inference.stats import Progress
from sits_dagster.models.model import Padding, model_digest

BATCH_ROWS = 8
COLUMNS = ["line_id", "image"]
PADDING = (Padding(input="x", multiple=160),)
# Each repetition of a partition brings its broken rows again.
POLICY = PipelinePolicy(batch_rows=BATCH_ROWS, rows_quarantined_max=1_000_000)
CPU_MEMORY_BYTES = 2 << 30


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def repeated_lines(home: Path, rows_min: int) -> Path:
    """Return a folder with the files of all partitions, linked as often as `rows_min` rows need."""
    partitions = sorted(path for path in (home / "lines").iterdir() if not path.name.startswith("."))
    rows = sum(scan_partition(str(partition), COLUMNS).rows for partition in partitions)
    repetitions = max(1, -(-rows_min // rows))
    folder = home / f"lines-{repetitions}-times"
    if not folder.exists():
        scratch = folder.with_suffix(".new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        for number, partition in itertools.product(range(repetitions), partitions):
            for part in sorted(partition.glob("*.parquet")):
                os.link(part, scratch / f"{number:05d}-{partition.name}-{part.name}")
        scratch.rename(folder)
    return folder


def cpu_engine(model: Path, threads: int) -> OnnxEngine:
    device = Device(
        uuid="CPU-0",
        kind=DeviceKind.CPU,
        ordinal=0,
        name="CPU",
        memory_bytes_total=CPU_MEMORY_BYTES,
        memory_bytes_limit=CPU_MEMORY_BYTES,
    )
    return OnnxEngine(model, device, threads=threads)


class RecordingEngine:
    """Another engine that keeps the inputs of each call."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[Arrays] = []
        self.signature: ModelSignature = engine.signature
        self._engine = engine

    def predict(self, inputs: Arrays) -> Arrays:
        self.calls.append(inputs)
        return self._engine.predict(inputs)

    def memory(self) -> MemorySample:
        return self._engine.memory()

    def interrupt(self) -> None:
        self._engine.interrupt()


@dataclasses.dataclass(frozen=True)
class Run:
    """A product run that is planned: everything but the engine."""

    work: PartitionWork
    plan: PartitionPlan

    def go(self, engine: Engine, *, should_stop: Callable[[], bool] = lambda: False) -> Progress:
        progress = Progress()
        attempt = self.plan.attempt
        assert attempt is not None
        run_attempt(
            attempt,
            self.work,
            shards=attempt.generation.shards,
            engine=engine,
            sizer=FixedBatchSizer(BATCH_ROWS),
            policy=POLICY,
            progress=progress,
            should_stop=should_stop,
            now=now,
        )
        return progress


def plan_run(lines: Path, model: Path, out: Path) -> Run:
    """Scan the input, digest the model and register an attempt, as the asset does."""
    partition = scan_partition(str(lines), COLUMNS)
    work = PartitionWork(
        partition=partition,
        reader=ParquetReader(partition),
        encode=ocr.encode,
        decode=ocr.decode,
        padding=PADDING,
        columns_required=(),
        columns_kept=("line_id",),
        output_schema=None,
        part_format=ParquetFormat(out),
    )
    fingerprint = Fingerprint(input=partition.digest(), model=model_digest(model), configuration="benchmark")
    plan = start_partition(
        LocalStore(out), work, fingerprint=fingerprint, policy=POLICY, owner="benchmark", now=now()
    )
    return Run(work=work, plan=plan)
