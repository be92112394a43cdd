"""The types of a graph's tensors for given input shapes, by the libraries that infer them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_dagster.errors import ModelError
from sits_dagster.models.graph.checks import check_count, check_lengths, check_names, check_texts
from sits_dagster.models.graph.files import load_proto, referred_files
from sits_dagster.models.graph.reading import constant_types, graph_of, tensor_type, value_type
from sits_dagster.models.graph.structure import Graph, TensorType
from sits_dagster.models.words import one_line

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

__all__ = ["BoundTypes", "GraphFile"]

CONSTANT_BYTES_KEPT = 4096  # larger constants never steer a shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTypes:
    """The types of all tensors for given input shapes.

    Args:
        types: By name, those of nested graphs too.
        unknown: Names of run-time tensors whose shape no library could tell.
        used: The libraries that were asked, in order.
        is_traced: Whether a run told some of the types: those hold for its lengths alone.
    """

    types: Mapping[str, TensorType]
    unknown: tuple[str, ...]
    used: tuple[str, ...]
    is_traced: bool = False


class GraphFile:
    """An ONNX file without its weights, opened for analysis.

    Args:
        path: The `.onnx` file.

    Raises:
        ModelError: The file is broken, refers to data that is missing or outside of its folder, nests graphs
            too deeply, has too many nodes or impossible lengths, or needs what nobody makes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        proto = load_proto(path)
        referred_files(proto, path)
        check_count(proto, path)
        if proto.functions:
            proto = _inlined(proto, path)
        check_texts(proto.graph, path)
        check_lengths(proto.graph, path)
        self.graph = graph_of(proto.graph, 0, path)
        check_names(self.graph, path)
        self._folded = self.graph.folded()
        self._stripped = _strip(proto, self.graph)

    def types(self, shapes: Mapping[str, tuple[int, ...]], *, keeps_declared: bool = False) -> BoundTypes:
        """Return the types of all tensors when the inputs have these shapes.

        What onnx itself leaves open is asked of `onnx_shape_inference` where that is installed.

        Args:
            shapes: Lengths by input; one that is left out keeps its free axes.
            keeps_declared: Whether to believe what the file says of tensors in between; then no shape is
                bound.
        """
        bound = _bind(self._stripped, shapes, keeps_declared=keeps_declared)
        types = dict(self.graph.constants)
        types.update(_infer_by_onnx(bound))
        used = ["onnx"]
        unknown = self._unknown(types)
        if unknown:
            found = _infer_by_onnx_shape_inference(bound)
            if found is not None:
                used.append("onnx-shape-inference")
                for name, kind in found.items():
                    if kind.is_known and not (name in types and types[name].is_known):
                        types[name] = kind
                unknown = self._unknown(types)
        return BoundTypes(types=types, unknown=unknown, used=tuple(used))

    def _unknown(self, types: Mapping[str, TensorType]) -> tuple[str, ...]:
        return tuple(
            name
            for node in self.graph.all_nodes()
            for name in node.outputs
            if name and name not in self._folded and not (name in types and types[name].is_known)
        )


def _inlined(proto: ModelProto, path: Path) -> ModelProto:
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(proto)
    except MemoryError:
        raise
    except Exception as error:  # the library raises many types
        msg = f"The functions of model {str(path)!r} cannot be put in line: {one_line(error)}"
        raise ModelError(msg, hint="export the model without recursive functions.") from error


def _strip(proto: ModelProto, sorted_graph: Graph) -> ModelProto:
    """Make large weights typed inputs, so that no library ever touches their bytes; uses up the message.

    Nodes come in the order of the sorted graph: inference goes through them once.
    """
    import onnx

    graph = proto.graph
    inputs = {value.name for value in graph.input}
    kept: list[onnx.TensorProto] = []
    for tensor in graph.initializer:
        if tensor_type(tensor).bytes <= CONSTANT_BYTES_KEPT:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            kept.append(copy)
        elif tensor.name not in inputs:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            graph.input.append(value)
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for node in graph.node:
        if node.op_type != "Constant" or node.domain or not node.output:
            continue
        for attribute in node.attribute:
            if attribute.HasField("t") and tensor_type(attribute.t).bytes > CONSTANT_BYTES_KEPT:
                graph.input.append(
                    onnx.helper.make_tensor_value_info(
                        node.output[0], attribute.t.data_type, list(attribute.t.dims)
                    )
                )
                node.op_type = ""
                attribute.Clear()
                break
    place = {name: at for at, node in enumerate(sorted_graph.nodes) for name in node.outputs}
    kept_nodes = [node for node in graph.node if node.op_type]
    places = [max((place.get(name, -1) for name in node.output), default=-1) for node in kept_nodes]
    if len(kept_nodes) < len(graph.node) or places != sorted(places):
        order = sorted(range(len(places)), key=places.__getitem__)
        kept_nodes = [kept_nodes[at] for at in order]
        copies: list[onnx.NodeProto] = []
        for node in kept_nodes:
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            copies.append(copied)
        del graph.node[:]
        graph.node.extend(copies)
    return proto


def _bind(proto: ModelProto, shapes: Mapping[str, tuple[int, ...]], *, keeps_declared: bool) -> ModelProto:
    import onnx

    bound = onnx.ModelProto()
    bound.CopyFrom(proto)
    if keeps_declared:
        return bound
    del bound.graph.value_info[:]
    for value in bound.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for value in bound.graph.input:
        if value.name in shapes:
            shape = value.type.tensor_type.shape
            shape.Clear()
            value.type.tensor_type.shape.SetInParent()
            for length in shapes[value.name]:
                shape.dim.add().dim_value = length
    return bound


def _infer_by_onnx(proto: ModelProto, *, propagates: bool = True) -> dict[str, TensorType]:
    import onnx

    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=propagates)
    except MemoryError:
        # What hostile numbers stand for may be too large, the shapes themselves need little.
        if not propagates:
            raise
        return _infer_by_onnx(proto, propagates=False)
    except Exception:  # noqa: BLE001 - an inference error leaves shapes open, which is reported by name
        return dict(_collect(proto.graph))
    return dict(_collect(inferred.graph))


def _infer_by_onnx_shape_inference(proto: ModelProto) -> dict[str, TensorType] | None:
    try:
        values: Any = importlib.import_module("onnx_ir")
        library: Any = importlib.import_module("onnx_shape_inference")
    except ImportError:
        return None
    with contextlib.suppress(Exception):  # what it cannot do stays open, and is reported by name
        inferred = library.infer_symbolic_shapes(values.from_proto(proto), warn_on_missing=False)
        return dict(_collect(values.to_proto(inferred).graph))
    return None


def _collect(graph: GraphProto) -> Iterator[tuple[str, TensorType]]:
    for values in (graph.input, graph.value_info, graph.output):
        for value in values:
            yield value.name, value_type(value)
    for tensor in graph.initializer:
        yield tensor.name, tensor_type(tensor)
    for node in graph.node:
        if not node.attribute:
            continue
        if node.op_type == "Constant" and not node.domain:
            yield from constant_types(node).items()
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _collect(attribute.g)
