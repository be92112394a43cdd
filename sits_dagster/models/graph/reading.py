"""From a file's messages to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sits_dagster.errors import ModelError
from sits_dagster.models.graph.checks import check_text
from sits_dagster.models.graph.structure import Attribute, Dimension, Graph, Node, TensorType
from sits_dagster.models.words import cut

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["constant_types", "element_name", "graph_of", "tensor_type", "value_type"]

BODY_DEPTH_MAX = 64
TYPES_KEPT = 4096


def graph_of(proto: GraphProto, depth: int, path: Path) -> Graph:
    """Return a graph and those inside of it as values, nodes in an order in which they can run.

    Raises:
        ModelError: Nodes wait for each other, or graphs are nested too deeply.
    """
    if depth > BODY_DEPTH_MAX:
        msg = f"Model {str(path)!r} nests graphs deeper than {BODY_DEPTH_MAX} levels."
        raise ModelError(msg, hint="export the model without recursion.")
    constants = {tensor.name: tensor_type(tensor) for tensor in proto.initializer}
    for sparse in proto.sparse_initializer:
        constants[sparse.values.name] = TensorType(
            element_name(sparse.values.data_type), tuple(int(length) for length in sparse.dims)
        )
    nodes: list[Node] = []
    for node in proto.node:
        if node.op_type == "Constant" and not node.domain:
            check_text(node.output, path)
            constants.update(constant_types(node))
        else:
            nodes.append(_node(node, depth, path))
    return Graph(
        nodes=tuple(_in_order(nodes, constants, path)),
        inputs={value.name: value_type(value) for value in proto.input if value.name not in constants},
        outputs={value.name: value_type(value) for value in proto.output},
        constants=constants,
        types={value.name: value_type(value) for value in proto.value_info},
    )


def _node(proto: NodeProto, depth: int, path: Path) -> Node:
    bodies = {
        attribute.name: graph_of(attribute.g, depth + 1, path)
        for attribute in proto.attribute
        if attribute.HasField("g")
    }
    attributes = {
        attribute.name: value for attribute in proto.attribute if (value := _attribute(attribute)) is not None
    }
    captured = {name for body in bodies.values() for name in _free_names(body)}
    inputs, outputs = tuple(proto.input), tuple(proto.output)
    check_text((proto.name, proto.op_type, proto.domain, *inputs, *outputs, *attributes, *bodies), path)
    return Node(
        name=proto.name,
        operator=proto.op_type,
        domain="" if proto.domain == "ai.onnx" else proto.domain,
        inputs=inputs,
        outputs=outputs,
        attributes=attributes,
        bodies=bodies,
        captured=tuple(sorted(captured)),
    )


def _free_names(body: Graph) -> Iterator[str]:
    own = {*body.inputs, *body.constants, *(name for node in body.nodes for name in node.outputs)}
    for node in body.nodes:
        yield from (name for name in node.reads if name not in own)
    yield from (name for name in body.outputs if name not in own)


def _attribute(proto: AttributeProto) -> Attribute | None:
    import onnx

    kind = onnx.AttributeProto
    values: dict[int, Attribute] = {
        kind.INT: proto.i,
        kind.FLOAT: proto.f,
        kind.STRING: proto.s.decode("utf-8", "replace"),
        kind.INTS: tuple(proto.ints),
        kind.FLOATS: tuple(proto.floats),
        kind.STRINGS: tuple(text.decode("utf-8", "replace") for text in proto.strings),
    }
    return values.get(proto.type)


def constant_types(proto: NodeProto) -> dict[str, TensorType]:
    """Return the type of what a Constant node makes, by its output's name."""
    if not proto.output:
        return {}
    name = proto.output[0]
    for attribute in proto.attribute:
        if attribute.name == "value":
            return {name: tensor_type(attribute.t)}
        if attribute.name == "sparse_value":
            sparse = attribute.sparse_tensor
            return {name: TensorType(element_name(sparse.values.data_type), tuple(map(int, sparse.dims)))}
        shape = {
            "value_int": (),
            "value_float": (),
            "value_string": (),
            "value_ints": (len(attribute.ints),),
            "value_floats": (len(attribute.floats),),
            "value_strings": (len(attribute.strings),),
        }.get(attribute.name)
        if shape is not None:
            kind = attribute.name.removeprefix("value_").removesuffix("s")
            return {name: TensorType({"int": "int64", "float": "float32"}.get(kind, kind), shape)}
    return {name: TensorType("unknown", None)}


def _in_order(nodes: list[Node], constants: Mapping[str, TensorType], path: Path) -> list[Node]:
    """Return the nodes so that each comes after those it reads from; files may hold them unsorted."""
    made_by = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    waits = [
        {made_by[name] for name in node.reads if name in made_by and name not in constants} for node in nodes
    ]
    if all(max(needs, default=-1) < index for index, needs in enumerate(waits)):
        return nodes
    try:
        return [nodes[index] for index in TopologicalSorter(dict(enumerate(waits))).static_order()]
    except CycleError as error:
        names = [nodes[index].name or nodes[index].operator for index in error.args[1]]
        msg = f"Model {str(path)!r} has a cycle of nodes: {' ← '.join(map(cut, names[:8]))}."
        raise ModelError(msg, hint="export the model again; nodes must not wait for each other.") from error


@lru_cache(maxsize=64)
def element_name(data_type: int) -> str:
    """Return the name of an ONNX element type, as `ELEMENT_BITS` spells it; `"unknown"` otherwise."""
    import onnx

    try:
        name = onnx.TensorProto.DataType.Name(data_type).lower()
    except ValueError:
        return "unknown"
    return {"float": "float32", "double": "float64"}.get(name, name)


def tensor_type(tensor: TensorProto) -> TensorType:
    """Return the type of a weight."""
    return _type(element_name(tensor.data_type), tuple(tensor.dims))


def value_type(value: ValueInfoProto) -> TensorType:
    """Return the declared type of a tensor; other kinds than tensors get their kind's name.

    A shape that no tensor can have counts as unknown.
    """
    if not value.type.HasField("tensor_type"):
        return TensorType(value.type.WhichOneof("value") or "unknown", None)
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(element_name(tensor.elem_type), None)
    found = _type(element_name(tensor.elem_type), tuple(_dimension(dim) for dim in tensor.shape.dim))
    return found if found.is_sane else TensorType(found.dtype, None)


@lru_cache(maxsize=TYPES_KEPT)
def _type(dtype: str, shape: tuple[Dimension, ...]) -> TensorType:
    """Return a type: one value for the many tensors of a graph that are alike, which knows its size."""
    return TensorType(dtype, shape)


def _dimension(dimension: Any) -> Dimension:  # noqa: ANN401 - a protobuf message
    if dimension.HasField("dim_value"):
        return int(dimension.dim_value) if dimension.dim_value >= 0 else None
    name = str(dimension.dim_param)
    # "?" and "-1" are what exporters write when they know nothing: two of them need not be equal.
    return name if name and name not in {"?", "-1"} else None
