"""GPU offline batch inference of ONNX models over partitioned datasets, in Dagster.

Names are loaded when they are first used, so that `import sits_dagster` stays cheap for every
process of a Dagster deployment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dagster_shared.libraries import DagsterLibraryRegistry

if TYPE_CHECKING:
    from sits_dagster.models.model import OnnxModel as OnnxModel
    from sits_dagster.models.model import Padding as Padding

__version__ = "0.1.0"

_MODULES = {
    "OnnxModel": "sits_dagster.models.model",
    "Padding": "sits_dagster.models.model",
}

__all__ = ["OnnxModel", "Padding"]

DagsterLibraryRegistry.register("sits-dagster", __version__, is_dagster_package=False)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        msg = f"module 'sits_dagster' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
