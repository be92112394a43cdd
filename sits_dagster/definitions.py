"""The reference deployment: the demo's text lines are read every night by an OCR model.

Everything lies in `SITS_DEMO_HOME` (`.sits` by default); `sits demo` makes it.
"""

import os
from pathlib import Path

import dagster as dg

from sits_dagster.adapters.profiler import ProfileOptions
from sits_dagster.assets.inference import build_inference_asset
from sits_dagster.assets.model import build_model_asset
from sits_dagster.assets.schedule import build_nightly_schedule
from sits_dagster.demo import OCR_TEXTS
from sits_dagster.demo.data import DEFAULT_PARTITIONS, generate
from sits_dagster.demo.model import MODEL_NAME, prepare_model
from sits_dagster.demo.ocr import decode, encode
from sits_dagster.inference.sink import ParquetSink
from sits_dagster.inference.source import ParquetDataset
from sits_dagster.models.model import OnnxModel, Padding
from sits_dagster.resources.gpu_pool import GpuPoolResource
from sits_dagster.resources.inference import InferenceResource
from sits_dagster.resources.storage import StorageResource

__all__ = ["DEMO_HOME", "defs"]

DEMO_HOME = Path(os.environ.get("SITS_DEMO_HOME", ".sits")).absolute()

DAYS = dg.DailyPartitionsDefinition(DEFAULT_PARTITIONS[0], end_date="2026-01-04")


@dg.asset(partitions_def=DAYS, group_name="demo", kinds={"parquet"})
def text_lines(context: dg.AssetExecutionContext) -> None:
    """Images of text lines, a few of them broken on purpose; kept when they are there."""
    generate(DEMO_HOME, partitions=[context.partition_key])


RECOGNISER = OnnxModel(MODEL_NAME, padding=(Padding(input="x", multiple=160),))

text_recogniser = build_model_asset(
    RECOGNISER,
    name="text_recogniser",
    prepare=lambda path: prepare_model(path.parent),
    options=ProfileOptions(shapes={"x": ("rows", 3, 48, 320)}),
    group_name="demo",
    description="PP-OCRv5's recognition model, reduced to one class and one probability a time step.",
)

ocr_texts = build_inference_asset(
    OCR_TEXTS,
    model=RECOGNISER,
    model_asset=text_recogniser,
    source=ParquetDataset("lines/{partition_key}"),
    sink=ParquetSink("texts/{partition_key}", keep_columns=["line_id"]),
    encode=encode,
    decode=decode,
    partitions_def=DAYS,
    deps=[text_lines],
    group_name="demo",
    description="The text of each line image, read by PP-OCRv5.",
)

defs = dg.Definitions(
    assets=[text_lines, text_recogniser, ocr_texts],
    jobs=[
        dg.define_asset_job(
            "demo", [text_lines, text_recogniser, ocr_texts], executor_def=dg.in_process_executor
        )
    ],
    schedules=[build_nightly_schedule([ocr_texts], at="02:00", deadline="06:00")],
    resources={
        "gpu_pool": GpuPoolResource(),
        "inference": InferenceResource(segment_seconds=5.0, progress_seconds=5.0),
        "storage": StorageResource(root=str(DEMO_HOME)),
    },
)
