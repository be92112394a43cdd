"""Small ONNX models in few words, and the raw bytes of those that no library would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 21
IR_VERSION = 10
FLOAT = TensorProto.FLOAT

Expectation = Literal["profile", "error", "either"]
Built = onnx.ModelProto | bytes | Path
Builder = Callable[[Path], Built]

node = helper.make_node
value = helper.make_tensor_value_info


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[onnx.ValueInfoProto] | None = None,
    constants: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = OPSET,
    **options: Any,
) -> onnx.ModelProto:
    """Rows of eight numbers in and out, `x` to `y`, unless told otherwise."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [value("x", FLOAT, ["N", 8])] if inputs is None else inputs,
        [value("y", FLOAT, ["N", 8])] if outputs is None else outputs,
        constants,
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, **options)


def relu(**changes: Any) -> onnx.ModelProto:
    """One operator, nothing odd."""
    return model([node("Relu", ["x"], ["y"])], **changes)


def constant(name: str, values: Any, dtype: str = "float32") -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype=dtype), name)


def tensor(name: str, dims: Sequence[int], kind: int = FLOAT, **fields: Any) -> onnx.TensorProto:
    """A tensor that says of itself what it likes."""
    return TensorProto(name=name, data_type=kind, dims=dims, **fields)


def external(name: str, dims: Sequence[int], **entries: str | int) -> onnx.TensorProto:
    """A tensor whose values are in another file."""
    found = tensor(name, dims, data_location=TensorProto.EXTERNAL)
    for key, text in entries.items():
        found.external_data.add(key=key, value=str(text))
    return found


def varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, payload: bytes) -> bytes:
    """A protobuf field of some length, as it is on the wire."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


class Cases(dict[str, tuple[Expectation, Builder]]):
    """Builders by name, with what must come of their files."""

    def add(self, expectation: Expectation) -> Callable[[Builder], Builder]:
        """Take the decorated function as the builder of a case with its name."""

        def keep(builder: Builder) -> Builder:
            self[builder.__name__] = (expectation, builder)
            return builder

        return keep

    def put(self, name: str, expectation: Expectation, builder: Builder) -> None:
        self[name] = (expectation, builder)
