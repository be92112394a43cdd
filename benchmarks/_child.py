"""One fresh process of the benchmark: `_child.py ROLE ARGUMENTS-AS-JSON`; the last line is its answer, JSON.

Nothing is imported here that a role does not need: imports are part of what is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from sits_dagster.inference.engine import Arrays


def answer(**facts: object) -> NoReturn:
    """Print the answer and leave at once: shutting down is not part of what is measured."""
    print(json.dumps(facts), flush=True)
    os._exit(0)


def product_start(arguments: dict[str, Any]) -> None:
    """Import, scan, plan and load; answer when the first device call begins."""
    import _demo

    home, model = Path(arguments["home"]), Path(arguments["model"])
    run = _demo.plan_run(Path(arguments["lines"]), model, home / f"out-{os.getpid()}")
    engine = _demo.cpu_engine(model, arguments["threads"])

    class FirstCall(_demo.RecordingEngine):
        def predict(self, inputs: Arrays) -> Arrays:
            answer(seconds=time.monotonic() - arguments["started"], cpu_seconds=time.process_time())

    run.go(FirstCall(engine))


def dagster_start(arguments: dict[str, Any]) -> None:
    """Run the demo's job in Dagster, in this process; answer when the first device call begins."""
    os.environ["SITS_DEMO_HOME"] = arguments["home"]
    import dagster as dg

    from sits_dagster.adapters.onnx_engine import OnnxEngine
    from sits_dagster.definitions import defs

    def first_call(engine: OnnxEngine, inputs: Arrays) -> Arrays:
        answer(seconds=time.monotonic() - arguments["started"], cpu_seconds=time.process_time())

    OnnxEngine.predict = first_call
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("demo").execute_in_process(
            partition_key=arguments["partition"],
            instance=instance,
            asset_selection=[dg.AssetKey("ocr_texts")],
        )


def naive_start(arguments: dict[str, Any]) -> None:
    """The hand-written script: read a file, encode a batch, load; answer when the first call begins."""
    import numpy as np
    import onnxruntime
    import pyarrow.parquet as pq

    from sits_dagster.demo import ocr

    lines = Path(arguments["lines"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments["threads"]
    session = onnxruntime.InferenceSession(arguments["model"], options, providers=["CPUExecutionProvider"])
    table = pq.read_table(min(lines.glob("*.parquet")))
    rows = [row for row in ocr.encode(table.to_batches()[0])["x"] if not isinstance(row, Exception)][:8]
    batch = np.zeros((len(rows), 3, 48, max(row.shape[-1] for row in rows)), np.float32)
    for target, row in zip(batch, rows, strict=True):
        target[..., : row.shape[-1]] = row
    seconds, cpu_seconds = time.monotonic() - arguments["started"], time.process_time()
    session.run(None, {"x": batch})
    answer(seconds=seconds, cpu_seconds=cpu_seconds)


def product_memory(arguments: dict[str, Any]) -> None:
    """Run the product for some seconds; answer with the largest batch that it made."""
    import _demo

    home, model = Path(arguments["home"]), Path(arguments["model"])
    run = _demo.plan_run(Path(arguments["lines"]), model, home / f"out-{os.getpid()}")
    engine = _demo.cpu_engine(model, arguments["threads"])
    largest = [0, 0, 0, 0]

    class Watching(_demo.RecordingEngine):
        def predict(self, inputs: Arrays) -> Arrays:
            nonlocal largest
            shape = list(inputs["x"].shape)
            largest = max(largest, shape, key=lambda s: (s[0] * s[3], s[0]))
            return engine.predict(inputs)

    ends = time.monotonic() + arguments["seconds"]
    progress = run.go(Watching(engine), should_stop=lambda: time.monotonic() >= ends)
    answer(largest=largest, rows=progress.rows_predicted)


def model_memory(arguments: dict[str, Any]) -> None:
    """Load the model into an arena of its own and run the largest batch a few times."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments["threads"]
    options.enable_mem_pattern = False
    # An arena that takes just what is asked for: the least that the model itself needs for the batch.
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    config = onnxruntime.OrtArenaCfg({"max_mem": 2 << 30, "arena_extend_strategy": 1})
    onnxruntime.create_and_register_allocator(info, config)
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = onnxruntime.InferenceSession(arguments["model"], options, providers=["CPUExecutionProvider"])
    batch = np.zeros(arguments["largest"], np.float32)
    for _ in range(3):
        session.run(None, {"x": batch})
    answer()


ROLES = {
    role.__name__: role for role in (product_start, dagster_start, naive_start, product_memory, model_memory)
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
