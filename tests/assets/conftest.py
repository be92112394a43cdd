"""A workspace for each test, and a look at the device's calls."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sits_dagster.adapters.onnx_engine import OnnxEngine
from sits_dagster.inference.engine import Arrays
from tests.assets.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Workspace(tmp_path, instance)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of every device call from now on."""
    found: list[int] = []
    predict = OnnxEngine.predict

    def counted(engine: OnnxEngine, inputs: Arrays) -> Arrays:
        found.append(len(inputs["x"]))
        return predict(engine, inputs)

    monkeypatch.setattr(OnnxEngine, "predict", counted)
    return found
