"""An ONNX file: opening it, and the files that it refers to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sits_dagster.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, ValueInfoProto

__all__ = ["external_data_files", "input_names", "keep_inputs", "load_proto"]


def external_data_files(model: Path) -> tuple[Path, ...]:
    """Return the files that hold the model's external tensors, sorted by name.

    Raises:
        ModelError: The file is not an ONNX model, or refers to a file that is missing or outside of
            the model's folder.
    """
    proto = load_proto(model)
    names = {
        entry.value
        for tensor in _tensors(proto.graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(_resolve(model, name) for name in sorted(names))


def input_names(model: Path) -> tuple[str, ...]:
    """Return the names of the inputs that a caller must give, in graph order.

    Raises:
        ModelError: The file is missing or not an ONNX model.
    """
    graph = load_proto(model).graph
    given = {tensor.name for tensor in graph.initializer}
    return tuple(value.name for value in graph.input if value.name not in given)


def load_proto(model: Path) -> ModelProto:
    """Return the file's message; external tensors are not read.

    Raises:
        ModelError: The file is missing or not an ONNX model.
    """
    import onnx

    try:
        return onnx.load(str(model), load_external_data=False)
    except Exception as error:  # protobuf raises its own, undocumented types
        msg = f"{str(model)!r} is not an ONNX model: {error}"
        raise ModelError(msg, hint="export or copy the model again.") from error


def keep_inputs(model: Path, names: Collection[str]) -> None:
    """Take every other input out of the file.

    ONNX Runtime's optimised graphs still ask for inputs whose default values it has folded away.
    """
    import onnx

    proto = load_proto(model)
    kept = [value for value in proto.graph.input if value.name in names]
    if len(kept) == len(proto.graph.input):
        return
    copies: list[ValueInfoProto] = []
    for value in kept:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copies.append(copy)
    del proto.graph.input[:]
    proto.graph.input.extend(copies)
    model.write_bytes(proto.SerializeToString())


def _resolve(model: Path, name: str) -> Path:
    folder = model.resolve().parent
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        msg = f"Model {str(model)!r} refers to external data outside of its folder: {name!r}."
        raise ModelError(msg, hint="keep the data file beside the model.")
    if not path.is_file():
        msg = f"Model {str(model)!r} refers to external data {name!r}, which is missing."
        raise ModelError(msg, hint="copy the data file beside the model.")
    return path


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("g"):
        yield from _tensors(attribute.g)
    for graph in attribute.graphs:
        yield from _tensors(graph)
