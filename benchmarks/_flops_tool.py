"""What onnx-tool, another program that counts, says of a model; for comparison only, never a dependency."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx

# As onnx-tool prints it: it counts a multiply-add as one and an addition alone as one too, so that twice its
# number is right for products, and up to twice too much for the rest.
FLOPS_PER_MAC = 2


def tool_flops(model: Path, shapes: dict[str, tuple[int, ...]], operators: frozenset[str]) -> int | None:
    """Return onnx-tool's count of these operators' products, or None where it is missing or fails.

    Args:
        model: The `.onnx` file.
        shapes: One for each input, by name.
        operators: Those that both count alike; it has weights of its own for what an exp or a division costs.
    """
    tool = _tool()
    if tool is None:
        return None
    proto = onnx.load(str(model))
    inputs = {
        value.name: np.zeros(
            shapes[value.name], onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        )
        for value in proto.graph.input
        if value.name in shapes
    }
    # It prints, warns, and raises whatever its own mistakes raise.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = tool.Model(proto, {"verbose": False}).graph
            graph.graph_reorder_nodes()
            graph.shape_infer(inputs)
            graph.profile()
        except (Exception, SystemExit):  # noqa: BLE001 - see above
            return None
        if not graph.valid_profile:
            return None
        macs = sum(node.macs[0] for node in graph.nodemap.values() if node.op_type in operators)
        return FLOPS_PER_MAC * round(macs)


def _tool() -> ModuleType | None:
    try:
        return importlib.import_module("onnx_tool")
    except ImportError:
        return None
