"""An ONNX file: opening it, and the files that it refers to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sits_dagster.errors import ModelError
from sits_dagster.models.words import one_line, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["external_data_files", "input_names", "load_proto", "make_traceable", "referred_files"]


def external_data_files(model: Path) -> tuple[Path, ...]:
    """Return the files that hold the model's external tensors, sorted by name.

    Raises:
        ModelError: The file is not an ONNX model, or refers to a file that is missing or outside of
            the model's folder.
    """
    return referred_files(load_proto(model), model)


def referred_files(proto: ModelProto, model: Path) -> tuple[Path, ...]:
    """Return the files that hold the external tensors of a message, sorted by name.

    Raises:
        ModelError: One of them is missing or outside of the model's folder.
    """
    names: set[str] = set()
    for tensor in _all_tensors(proto):
        if tensor.external_data or tensor.data_location == tensor.EXTERNAL:
            names.update(_locations(tensor, model))
    return tuple(_resolve(model, name) for name in sorted(names))


def _locations(tensor: TensorProto, model: Path) -> list[str]:
    found = [entry.value for entry in tensor.external_data if entry.key == "location"]
    # protobuf gives bytes where a text is no UTF-8
    if {type(name) for name in found} - {str} or not (found or not _is_external(tensor)):
        msg = f"Model {str(model)!r} does not tell in which file the data of {shown(str(tensor.name))} are."
        raise ModelError(msg, hint="the file is damaged: export or copy the model again.")
    return found


def _is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == tensor.EXTERNAL


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
        proto = onnx.load(str(model), load_external_data=False)
    except MemoryError:
        raise
    except Exception as error:  # protobuf raises its own, undocumented types
        msg = f"{str(model)!r} is not an ONNX model: {one_line(error)}"
        raise ModelError(msg, hint="export or copy the model again.") from error
    if not proto.HasField("graph"):
        msg = f"{str(model)!r} is not an ONNX model: it has no graph."
        raise ModelError(msg, hint="export or copy the model again.")
    return proto


def make_traceable(model: Path, inputs: Collection[str]) -> None:
    """Change ONNX Runtime's optimised graph so that a trace of it can be read.

    It still asks for inputs whose default values were folded away: only those named stay. And the runtime
    makes up names for nodes without one, in every body anew: each gets a name of its own.
    """
    proto = load_proto(model)
    is_changed = _keep_inputs(proto.graph, inputs)
    if _name_nodes(proto.graph) or is_changed:
        model.write_bytes(proto.SerializeToString())


def _keep_inputs(graph: GraphProto, names: Collection[str]) -> bool:
    import onnx

    kept = [value for value in graph.input if value.name in names]
    if len(kept) == len(graph.input):
        return False
    copies: list[ValueInfoProto] = []
    for value in kept:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copies.append(copy)
    del graph.input[:]
    graph.input.extend(copies)
    return True


def _name_nodes(graph: GraphProto) -> bool:
    """Give all nodes unlike names; return whether that changed one."""
    seen: set[str] = set()
    is_changed = False
    for number, node in enumerate(_nodes(graph)):
        if not node.name or node.name in seen:
            node.name = f"{node.name or node.op_type}#{number}"
            is_changed = True
        seen.add(node.name)
    return is_changed


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _resolve(model: Path, name: str) -> Path:
    try:
        folder = model.resolve().parent
        path = (folder / name).resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null, a name too long
        msg = f"Model {str(model)!r} refers to external data {shown(name)}, which no file can be."
        raise ModelError(msg, hint="export the model again, its data beside it.") from error
    if not path.is_relative_to(folder):
        msg = f"Model {str(model)!r} refers to external data outside of its folder: {shown(name)}."
        raise ModelError(msg, hint="keep the data file beside the model.")
    if not is_file:
        msg = (
            f"Model {str(model)!r} refers to external data {shown(name)}, which is missing or no plain file."
        )
        raise ModelError(msg, hint="copy the data file beside the model.")
    return path


def _all_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    yield from _tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function.node)


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
        yield from (sparse.values, sparse.indices)
    if attribute.HasField("g"):
        yield from _tensors(attribute.g)
    for graph in attribute.graphs:
        yield from _tensors(graph)
