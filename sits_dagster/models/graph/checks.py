"""What no file may hold: refused before any library works on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sits_dagster.errors import ModelError
from sits_dagster.models.graph.structure import RANK_MAX, Graph, Node, TensorType
from sits_dagster.models.words import listed, shown

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

__all__ = ["check_count", "check_lengths", "check_names", "check_text", "check_texts"]

NODES_MAX = 500_000  # ten times the largest models, and what is told of them still fits into a result
LENGTH_MAX = 1 << 40  # a longer declared axis is a mistake or an attack

EQUATION = re.compile(r"[A-Za-z,.> -]*")  # of Einsum

FunctionKey: TypeAlias = tuple[str, str, str]


def check_count(proto: ModelProto, path: Path) -> None:
    """Refuse graphs with more nodes than can be worked on, functions put in line.

    Raises:
        ModelError: There are more than `NODES_MAX`, or a function calls itself.
    """
    calls = {
        (function.domain, function.name, function.overload): Counter(map(_called, _nodes(function.node)))
        for function in proto.functions
    }
    waits = {key: [called for called in found if called in calls] for key, found in calls.items()}
    try:
        order = tuple(TopologicalSorter(waits).static_order())
    except CycleError as error:
        names = listed(name for _, name, _ in error.args[1])
        msg = f"Model {str(path)!r} has functions that call themselves: {names}."
        raise ModelError(msg, hint="export the model without recursive functions.") from error
    sizes: dict[FunctionKey, int] = {}
    for key in order:
        sizes[key] = _count(calls[key], sizes)
    count = _count(Counter(map(_called, _nodes(proto.graph.node))), sizes)
    if count > NODES_MAX:
        msg = f"Model {str(path)!r} has more than {NODES_MAX} nodes{' in its functions' * bool(sizes)}."
        raise ModelError(msg, hint="export the model with loops or larger operators.")


def _count(calls: Counter[FunctionKey], sizes: dict[FunctionKey, int]) -> int:
    return min(NODES_MAX + 1, sum(number * sizes.get(called, 1) for called, number in calls.items()))


def _called(node: NodeProto) -> FunctionKey:
    return node.domain, node.op_type, node.overload


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g.node)
            for graph in attribute.graphs:
                yield from _nodes(graph.node)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def check_texts(proto: GraphProto, path: Path) -> None:
    """Refuse names that are no UTF-8, of all but nodes: protobuf gives them as bytes.

    Raises:
        ModelError: There is one.
    """
    for graph in _graphs(proto):
        check_text(_texts(graph), path)


def check_text(names: Iterable[str], path: Path) -> None:
    """Refuse names that are no UTF-8.

    Raises:
        ModelError: One of them is bytes.
    """
    try:
        "".join(names)
    except TypeError as error:
        msg = f"Model {str(path)!r} has names that are no text."
        raise ModelError(msg, hint="the file is damaged: export or copy the model again.") from error


def _texts(graph: GraphProto) -> list[str]:
    found = [tensor.name for tensor in graph.initializer]
    found += [sparse.values.name for sparse in graph.sparse_initializer]
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            found.append(value.name)
            found += [dimension.dim_param for dimension in value.type.tensor_type.shape.dim]
    return found


def check_lengths(proto: GraphProto, path: Path) -> None:
    """Refuse lengths that no memory can hold.

    Raises:
        ModelError: A constant, input or output declares such lengths.
    """
    for graph in _graphs(proto):
        for tensor in graph.initializer:
            _check_shape(f"weight {shown(tensor.name)}", tuple(tensor.dims), path)
        for sparse in graph.sparse_initializer:
            _check_shape(f"weight {shown(sparse.values.name)}", tuple(sparse.dims), path)
        for value in (*graph.input, *graph.output):
            _check_shape(f"tensor {shown(value.name)}", _declared(value), path)
        for node in graph.node:
            if node.op_type != "Constant":
                continue
            for attribute in node.attribute:
                dims = attribute.t.dims or attribute.sparse_tensor.dims
                _check_shape(f"constant {listed(node.output[:1])}", tuple(dims), path)


def _declared(value: ValueInfoProto) -> tuple[int, ...]:
    """Return the lengths that are numbers; a negative one is what exporters write when they know nothing."""
    dims = value.type.tensor_type.shape.dim
    return tuple(max(1, dim.dim_value) if dim.HasField("dim_value") and dim.dim_value else 1 for dim in dims)


def _check_shape(what: str, lengths: tuple[int, ...], path: Path) -> None:
    is_sane = TensorType("", lengths).is_sane and max(lengths, default=0) <= LENGTH_MAX
    if not is_sane:
        more = f", … ({len(lengths)} axes of at most {RANK_MAX})" if len(lengths) > RANK_MAX else ""
        msg = f"Model {str(path)!r} declares the {what} with lengths {list(lengths[:8])}{more}."
        raise ModelError(msg, hint="the file is damaged or hostile: export the model again.")


def check_names(graph: Graph, path: Path) -> None:
    """Refuse graphs whose tensors come from nowhere or from two nodes, and impossible attributes.

    Raises:
        ModelError: A node reads, or the graph gives, what nobody makes; or two nodes make the same; or an
            axis or equation is none.
    """
    _check_nodes(graph, path)
    made = Counter(name for node in graph.nodes for name in node.outputs if name)
    twice = [name for name, count in made.items() if count > 1]
    if twice:
        msg = f"Model {str(path)!r} has tensors that two nodes make: {listed(twice)}."
        raise ModelError(msg, hint="export the model again; each name must be made once.")
    known = {*made, *graph.inputs, *graph.constants}
    lost = [name for node in graph.nodes for name in node.reads if name not in known]
    lost += [name for name in graph.outputs if name not in known]
    if lost:
        msg = f"Model {str(path)!r} needs tensors that nobody makes: {listed(dict.fromkeys(lost))}."
        raise ModelError(msg, hint="export the model again; it lacks nodes, weights or inputs.")


def _check_nodes(graph: Graph, path: Path) -> None:
    """Refuse what makes onnx 1.23 crash or run for ever while it infers shapes."""
    for node in graph.all_nodes():
        reason = _fault_of(node)
        if reason:
            msg = f"Model {str(path)!r} has the operator {shown(node.operator)} {reason}."
            raise ModelError(msg, hint="the file is damaged: export or copy the model again.")


def _fault_of(node: Node) -> str:
    if node.inputs and not node.reads and not node.bodies:
        return "without any of its inputs"
    axis, equation = node.integer("axis", 0), str(node.attributes.get("equation", ""))
    if not node.domain and abs(axis) > RANK_MAX:
        return f"with the axis {axis}"
    if node.operator == "Split" and node.integer("num_outputs", len(node.outputs)) != len(node.outputs):
        return f"with {len(node.outputs)} outputs for {node.integer('num_outputs', 0)}"
    return "" if node.domain or EQUATION.fullmatch(equation) else f"with the equation {shown(equation)}"
