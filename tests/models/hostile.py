"""Model files that are broken, odd or meant to do harm, each with what a reader of models must make of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from tests.models import hostile_files, hostile_graphs, hostile_values
from tests.models.onnx_files import Cases, Expectation

__all__ = ["CASES", "hostile_models"]

CASES = Cases({**hostile_files.CASES, **hostile_graphs.CASES, **hostile_values.CASES})
"""All builders by name.

"profile" is what ONNX Runtime loads and runs (or would, with the library of a foreign operator) with rows of
any number; "error" is what can be seen to be no model of rows without running anything; the rest, "either",
may be refused or described, in time and in bounded memory.
"""


def hostile_models(folder: Path, names: Iterable[str] = CASES) -> Iterator[tuple[str, Path, Expectation]]:
    """Yield name, path and expectation of every case, each written when its turn comes.

    Each has a folder of its own below the given one; its model is `model.onnx`. The largest take 3 GB of
    addresses in their file, but no room on a disk that keeps sparse files.
    """
    for name in names:
        expectation, builder = CASES[name]
        home = folder / name
        home.mkdir(parents=True)
        built = builder(home)
        path = home / "model.onnx"
        if isinstance(built, onnx.ModelProto):
            path.write_bytes(built.SerializeToString())
        elif isinstance(built, bytes):
            path.write_bytes(built)
        yield name, path, expectation
