"""Typed usage of the public names: never run, only checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import assert_type

import dagster as dg
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sits_dagster import (
    BatchInferenceComponent,
    GpuPoolResource,
    InferenceResource,
    OnnxModel,
    Padding,
    ParquetDataset,
    ParquetSink,
    StorageResource,
    build_inference_asset,
    build_nightly_schedule,
)
from sits_dagster.adapters.object_store import LocalStore
from sits_dagster.adapters.onnx_engine import OnnxEngine
from sits_dagster.adapters.parquet import ParquetFormat, ParquetReader
from sits_dagster.demo import ocr
from sits_dagster.devices.device import Device
from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError, SitsError, TransientError
from sits_dagster.inference.dataset import PartitionInput, RowReader
from sits_dagster.inference.decode import DecodeFunction
from sits_dagster.inference.encode import EncodeFunction
from sits_dagster.inference.engine import Arrays, Engine, MemorySample, ModelSignature
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import BatchSizer, FixedBatchSizer
from sits_dagster.inference.stats import PartitionStats
from sits_dagster.inference.store import PartFormat, Store
from sits_dagster.testing import (
    FakeEngine,
    FaultyStore,
    MemoryFormat,
    MemoryRows,
    MemoryStore,
    SteppedStore,
    Trial,
)
from sits_dagster.testing.paced import PacedEngine


def encode_arrays(batch: pa.RecordBatch) -> Mapping[str, NDArray[np.float32]]:
    return {"x": np.zeros((batch.num_rows, 2), np.float32)}


def encode_rows(batch: pa.RecordBatch) -> dict[str, list[NDArray[np.float32] | Exception]]:
    return {"x": [ValueError("no")] * batch.num_rows}


def decode_columns(outputs: Arrays) -> dict[str, pa.Array]:
    return {"y": pa.array(outputs["y"])}


def decode_batch(outputs: Arrays) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"y": outputs["y"]})


def assets(days: dg.DailyPartitionsDefinition) -> None:
    model = OnnxModel(
        "model.onnx", padding=(Padding(input="x", multiple=8), Padding(input="z", edges=(1, 2)))
    )
    source = ParquetDataset("in/{partition_key}", columns=["image"])
    sink = ParquetSink("out/{partition_key}", keep_columns=["id"], output_schema=pa.schema([]))
    plain = build_inference_asset("plain", model=model, source=source, sink=sink)
    assert_type(plain, dg.AssetsDefinition)
    full = build_inference_asset(
        "full",
        model=model,
        source=source,
        sink=sink,
        encode=encode_arrays,
        decode=decode_columns,
        partitions_def=days,
        fan_out=True,
        code_version="1",
        pool=None,
        group_name="nightly",
    )
    schedule = build_nightly_schedule([plain, full], at="02:00", deadline="06:00", timezone="UTC")
    assert_type(schedule, dg.ScheduleDefinition)
    assert_type(model.name, str)
    assert_type(model.padding, tuple[Padding, ...])
    kept: Sequence[str] = sink.keep_columns
    del kept


def functions() -> None:
    encoders: list[EncodeFunction] = [encode_arrays, encode_rows, ocr.encode]
    decoders: list[DecodeFunction] = [decode_columns, decode_batch, ocr.decode]
    del encoders, decoders


def resources() -> None:
    pool = GpuPoolResource(provider="cpu", cpu_memory_bytes=1 << 30, slots_per_device=2)
    assert_type(pool.devices(), tuple[Device, ...])
    with pool.lease(owner="me", should_stop=lambda: False, on_wait=print) as device:
        assert_type(device, Device)
    assert_type(InferenceResource(batch_rows=4).policy(), PipelinePolicy)
    assert_type(StorageResource(root="/data").resolve("in"), str)
    component: dg.Component = BatchInferenceComponent(
        asset_name="a", model_path="m.onnx", source_path="in", sink_path="out"
    )
    del component


def adapters(device: Device, partition: PartitionInput) -> None:
    engine: Engine = OnnxEngine(Path("model.onnx"), device, threads=2)
    assert_type(engine.signature, ModelSignature)
    assert_type(engine.memory(), MemorySample)
    assert_type(engine.predict({"x": np.zeros((1, 2), np.float32)}), Arrays)
    store: Store = LocalStore("/data/out")
    part_format: PartFormat = ParquetFormat(Path("/data/out"), compression="snappy")
    reader: RowReader = ParquetReader(partition)
    sizer: BatchSizer = FixedBatchSizer(8)
    del store, part_format, reader, sizer


def fakes(signature: ModelSignature, rows: MemoryRows, memory: MemoryStore) -> None:
    engines: list[Engine] = [
        FakeEngine(signature, lambda inputs: inputs),
        PacedEngine(signature, lambda inputs: inputs, seconds_per_call=0.1, seconds_per_row=0.01),
    ]
    stores: list[Store] = [memory]
    part_format: PartFormat = MemoryFormat(memory)
    reader: RowReader = rows
    trial = Trial(source=rows, signature=signature, function=lambda inputs: inputs)
    assert_type(trial.run(memory, engine=engines[0]), PartitionStats)
    del stores, part_format, reader


def faulty(store: FaultyStore, stepped: SteppedStore) -> None:
    stores: list[Store] = [store, stepped]
    del stores


def errors() -> None:
    found: list[SitsError] = [
        ConfigError("what", hint="do this"),
        TransientError("what", retry_after_seconds=1.0),
        DeviceOutOfMemoryError("what", batch_rows=8),
    ]
    assert_type(found[0].hint, str)
