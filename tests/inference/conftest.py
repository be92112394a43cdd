"""A partition of ragged rows, small enough to run hundreds of times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster.inference.engine import Arrays, ModelSignature, TensorSpec
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.models.model import Padding
from sits_dagster.testing import MemoryRows, Trial

LENGTHS = (3, 1, 7, 2, 5)


def _sum(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"].sum(axis=1)}


def _make(count: int, **changes: Any) -> Trial:
    """Return a trial of `count` rows: row i has 1 to 7 cells, of which the first is i; y is their sum."""
    column = [[float(i)] + [0.5] * (LENGTHS[i % 5] - 1) for i in range(count)]
    rows = pa.RecordBatch.from_pydict({"id": np.arange(count), "x": pa.array(column, pa.list_(pa.float32()))})
    policy = {"batch_rows": 3, "chunk_rows": 4, "segment_rows": 8, "segment_seconds": 3600.0}
    groups = changes.pop("row_group_rows", None)
    policy.update(changes.pop("policy", {}))
    options = {
        "source": MemoryRows(rows, groups),
        "signature": ModelSignature(
            inputs=(TensorSpec(name="x", dtype="float32", shape=(None, None)),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=(None,)),),
        ),
        "function": _sum,
        "padding": (Padding(input="x", multiple=4),),
        "columns_required": ("x",),
        "columns_kept": ("id",),
        "policy": PipelinePolicy(**policy),
    }
    return Trial(**{**options, **changes})


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Trial]:
    """Return the maker of trials of ragged rows; keywords replace a trial's fields or the policy's."""
    return _make


@pytest.fixture(scope="session")
def expected() -> Callable[[int], list[dict[str, Any]]]:
    """Return what the output of `ragged(count)` has to be."""
    return lambda count: [{"id": i, "y": i + 0.5 * (LENGTHS[i % 5] - 1)} for i in range(count)]


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("sits-")}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Every stage of every run has ended when the run has."""
    yield
    deadline = time.monotonic() + 5
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() == set()
