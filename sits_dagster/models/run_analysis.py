"""What running a model once in a while tells: its real memory plan, and whether rows may share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sits_dagster.models.analysis import kernel_costs
from sits_dagster.models.arena import INITIAL_BYTES
from sits_dagster.models.batching import BatchingReport
from sits_dagster.models.buffers import plan_buffers
from sits_dagster.models.cost import KernelCost, graph_costs
from sits_dagster.models.graph.structure import Graph, Node, TensorType
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import MemoryPlan, memory_plan
from sits_dagster.models.profile import RuntimeKey
from sits_dagster.models.trace import CallTrace

__all__ = ["RunAnalysis", "plan_of_traces", "traced_kernels", "traced_types"]

# A recurrent kernel takes its memory in several pieces, of which an arena can place each elsewhere. With
# three equal ones the replay held what ONNX Runtime's arena held at every batch from 1 to 16.
WORKSPACE_PIECES = {"DynamicQuantizeLSTM": 3, "GRU": 3, "LSTM": 3, "RNN": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnalysis:
    """What running the model told; see `ModelProfile` for the fields of the same name.

    Args:
        shapes: The input shapes that everything holds for.
        integer_limit: Made-up whole numbers were below it.
        seconds: How long the calls took, by their rows.
    """

    shapes: InputShapes
    memory_plan: MemoryPlan
    memory_bytes_resident: int
    kernels_optimized: tuple[KernelCost, ...]
    batching: BatchingReport
    runtime: RuntimeKey
    integer_limit: int
    seconds: Mapping[int, float]


def plan_of_traces(graph: Graph, traces: Mapping[int, CallTrace]) -> tuple[MemoryPlan, int]:
    """Return the allocations of a call of an optimised graph, and the bytes that loading left in the arena.

    Args:
        graph: The optimised graph.
        traces: One or two calls by their rows, each on an arena of its own.
    """
    rows = tuple(traces)
    first, last = traces[rows[0]], traces[rows[-1]]
    nodes = {node.name: node for node in _nodes(graph)}
    order = {traced.name: index for index, traced in reversed(list(enumerate(first.nodes)))}
    sizes = {
        name: _line(rows, (kind.bytes, other.bytes)) for name, kind, other in _outputs(nodes, first, last)
    }
    at_last = {traced.name: traced.workspace_bytes for traced in last.nodes}
    workspaces = {
        traced.name: _line(rows, (traced.workspace_bytes, at_last.get(traced.name, 0)))
        for traced in first.nodes
        if traced.workspace_bytes or at_last.get(traced.name)
    }
    pieces = {
        name: WORKSPACE_PIECES[nodes[name].operator]
        for name in workspaces
        if name in nodes and nodes[name].operator in WORKSPACE_PIECES
    }
    # The order of the file is not always the one in which the runtime runs, and plans.
    ordered = replace(
        graph, nodes=tuple(sorted(graph.nodes, key=lambda node: order.get(node.name, len(order))))
    )
    buffers = plan_buffers(ordered, branches=_branches(graph, order))
    resident = _resident(first)
    return memory_plan(buffers, sizes, workspaces, pieces=pieces, resident=resident), resident


def traced_types(
    graph: Graph, trace: CallTrace, inputs: Mapping[str, TensorType]
) -> Mapping[str, TensorType]:
    """Return the types that a traced call shows, by tensor."""
    nodes = {node.name: node for node in _nodes(graph)}
    found = {name: kind for name, kind, _ in _outputs(nodes, trace, trace)}
    return {**graph.constants, **inputs, **found}


def traced_kernels(
    graph: Graph, traces: Mapping[int, CallTrace], shapes: InputShapes
) -> tuple[KernelCost, ...]:
    """Return the costs of an optimised graph's calls from one or two traced calls of it."""
    costs = [
        graph_costs(graph, traced_types(graph, trace, _bound(graph, shapes, rows)))
        for rows, trace in traces.items()
    ]
    return kernel_costs(costs, tuple(traces))


def _bound(graph: Graph, shapes: InputShapes, rows: int) -> Mapping[str, TensorType]:
    lengths = shapes.shapes(rows)
    return {
        name: TensorType(kind.dtype, lengths.get(name, kind.shape)) for name, kind in graph.inputs.items()
    }


def _outputs(
    nodes: Mapping[str, Node], first: CallTrace, last: CallTrace
) -> Iterator[tuple[str, TensorType, TensorType]]:
    others = {traced.name: traced for traced in last.nodes}
    for traced in first.nodes:
        node, other = nodes.get(traced.name), others.get(traced.name)
        if node is None or other is None:
            continue
        names = [name for name in node.outputs if name]
        yield from zip(names, traced.outputs, other.outputs, strict=False)


def _line(rows: Sequence[int], values: tuple[int, int]) -> Linear:
    if len(rows) == 1:
        return Linear(float(values[0]), 0.0)
    return Linear.through((rows[0], rows[-1]), (float(values[0]), float(values[1])))


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.bodies.values():
            yield from _nodes(body)


def _branches(graph: Graph, ran: Mapping[str, int]) -> Mapping[str, str]:
    """Return which body each If ran, by the nodes that were seen."""
    found: dict[str, str] = {}
    for node in _nodes(graph):
        for attribute, body in node.bodies.items():
            if any(inner.name in ran for inner in body.nodes):
                found[node.name] = attribute
    return found


def _resident(trace: CallTrace) -> int:
    """Return what loading left in the arena's first region; the rest of what is held are weights.

    The region is the first power of two, from the arena's first step on, that holds the free bytes seen.
    """
    free = trace.bytes_held_before - trace.bytes_used_before
    if free <= 0:
        return 0
    region = INITIAL_BYTES
    while region < free:
        region *= 2
    return max(1, region - free)
