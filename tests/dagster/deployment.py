"""A real deployment for the tests of this folder: an asset over ragged rows, a model that takes its time.

Everything lies in the folder `SITS_TEST_HOME`. The model hands each row's id through, and `decode`
appends the ids that it sees to `decoded.log`: the device's work, written down by nobody's statistics.
"""

import os
from pathlib import Path

import dagster as dg
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper

from sits_dagster import (
    GpuPoolResource,
    InferenceResource,
    OnnxModel,
    Padding,
    ParquetDataset,
    ParquetSink,
    StorageResource,
    build_inference_asset,
)

HOME = Path(os.environ["SITS_TEST_HOME"])
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
ROWS = int(os.environ.get("SITS_TEST_ROWS", "4000"))
BATCH_ROWS = 8
SEGMENT_ROWS = 256
WIDTH = 1024
LAYERS = int(os.environ.get("SITS_TEST_LAYERS", "4"))


def make_model(path: Path) -> None:
    """Write a deep network over the sum of a row's values; padding with zeros does not change it."""
    random = np.random.default_rng(1)
    initializers = [
        helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
        helper.make_tensor("spread", TensorProto.FLOAT, [1, WIDTH], random.normal(size=WIDTH)),
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["sum"], keepdims=1),
        helper.make_node("MatMul", ["sum", "spread"], ["h0"]),
        helper.make_node("Identity", ["id"], ["id_out"]),
    ]
    for layer in range(LAYERS):
        weights = random.normal(scale=WIDTH**-0.5, size=(WIDTH, WIDTH)).astype("f4")
        initializers.append(onnx.numpy_helper.from_array(weights, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"m{layer}"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("ReduceSum", [f"h{LAYERS}", "axis"], ["score"], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "under_test",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", "length"]),
            helper.make_tensor_value_info("id", TensorProto.INT64, ["rows"]),
        ],
        [
            helper.make_tensor_value_info("score", TensorProto.FLOAT, ["rows"]),
            helper.make_tensor_value_info("id_out", TensorProto.INT64, ["rows"]),
        ],
        initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def make_rows(folder: Path, *, rows: int, first_id: int) -> None:
    """Write ragged rows in three files of several row groups, one row in 500 without values."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(first_id)
    for part, ids in enumerate(np.array_split(np.arange(first_id, first_id + rows), 3)):
        values = [
            None if i % 500 == 7 else random.normal(size=random.integers(1, 48)).astype("f4").tolist()
            for i in ids
        ]
        table = pa.table({"id": ids, "x": pa.array(values, pa.list_(pa.float32()))})
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=300)


def make_home() -> None:
    """Write the model and the days' rows."""
    make_model(HOME / "model.onnx")
    for index, day in enumerate(DAYS):
        make_rows(HOME / "rows" / day, rows=ROWS, first_id=index * 1_000_000)


def encode(batch: pa.RecordBatch) -> dict[str, object]:
    return {
        "x": [np.asarray(row.as_py(), "f4") for row in batch.column("x")],
        "id": batch.column("id").to_numpy(),
    }


def decode(outputs: dict[str, np.ndarray]) -> dict[str, pa.Array]:
    with (HOME / "decoded.log").open("ab") as log:
        log.write(outputs["id_out"].astype("<i8").tobytes())
    return {"score": pa.array(outputs["score"])}


scores = build_inference_asset(
    "scores",
    model=OnnxModel("model.onnx", padding=(Padding(input="x", multiple=16),)),
    source=ParquetDataset("rows/{partition_key}", columns=["id", "x"]),
    sink=ParquetSink("scores/{partition_key}", keep_columns=["id"]),
    encode=encode,
    decode=decode,
    code_version="1",
    partitions_def=dg.StaticPartitionsDefinition(DAYS),
)

defs = dg.Definitions(
    assets=[scores],
    jobs=[dg.define_asset_job("scores_in_process", [scores], executor_def=dg.in_process_executor)],
    resources={
        "gpu_pool": GpuPoolResource(
            provider="cpu", threads=1, slots_per_device=2, lease_folder=str(HOME / "leases")
        ),
        "inference": InferenceResource(
            batch_rows=BATCH_ROWS, segment_rows=SEGMENT_ROWS, progress_seconds=0.5
        ),
        "storage": StorageResource(root=str(HOME)),
    },
)
