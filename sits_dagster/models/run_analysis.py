"""What running a model once in a while tells: its real memory plan, and whether rows may share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sits_dagster.models.analysis import kernel_costs
from sits_dagster.models.arena import INITIAL_BYTES
from sits_dagster.models.batching import BatchingReport
from sits_dagster.models.buffers import joint_type, plan_buffers
from sits_dagster.models.cost import KernelCost, graph_costs
from sits_dagster.models.graph.structure import Graph, Node, TensorType
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import MemoryPlan, memory_plan
from sits_dagster.models.profile import RuntimeKey
from sits_dagster.models.trace import CallTrace

__all__ = ["RunAnalysis", "arena_bytes", "plan_of_traces", "traced_kernels", "traced_types"]

# What a recurrent kernel keeps while it runs, in numbers a hidden unit and row: for each step, and once.
RECURRENT_GATES = {"DynamicQuantizeLSTM": 4, "GRU": 3, "LSTM": 4, "RNN": 1}
RECURRENT_STATES = 4
# Operators whose output's shape depends on what is in their inputs: in all of them, or in all but the first.
SHAPED_BY_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Range", "Unique"})
SHAPED_BY_PARAMETERS = frozenset(
    {"Expand", "OneHot", "Pad", "Reshape", "Resize", "Slice", "Tile", "TopK", "Upsample"}
)
# Operators that lose the names of axes: of free heights and widths nothing is known behind them.
NAMELESS = frozenset({"AveragePool", "Conv", "ConvTranspose", "FusedConv", "LpPool", "MaxPool"})
UNKNOWN = TensorType("unknown", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnalysis:
    """What running the model told; see `ModelProfile` for the fields of the same name.

    Args:
        shapes: The input shapes that everything holds for.
        integer_limit: Made-up whole numbers were below it.
    """

    shapes: InputShapes
    memory_plan: MemoryPlan
    memory_bytes_resident: int
    kernels_optimized: tuple[KernelCost, ...]
    batching: BatchingReport
    runtime: RuntimeKey
    integer_limit: int


def plan_of_traces(
    graph: Graph, traces: Mapping[int, CallTrace], inferred: Mapping[str, TensorType]
) -> tuple[MemoryPlan, int]:
    """Return the allocations of a call of an optimised graph, and the bytes that loading left in the arena.

    Args:
        graph: The optimised graph.
        traces: One or two calls by their rows, each on an arena of its own.
        inferred: What shape inference tells of the graph's tensors while its free axes are free.
    """
    rows = tuple(traces)
    first, last = traces[rows[0]], traces[rows[-1]]
    nodes = {node.name: node for node in graph.all_nodes()}
    order = {traced.name: index for index, traced in reversed(list(enumerate(first.nodes)))}
    seen = {name: (kind, other) for name, kind, other in _outputs(nodes, first, last)}
    sizes = {name: Linear.of(rows, (kind.bytes, other.bytes)) for name, (kind, other) in seen.items()}
    at_last = {traced.name: traced.workspace_bytes for traced in last.nodes}
    workspaces: dict[str, tuple[Linear, ...]] = {
        traced.name: (Linear.of(rows, (traced.workspace_bytes, at_last.get(traced.name, 0))),)
        for traced in first.nodes
        if traced.workspace_bytes or at_last.get(traced.name)
    }
    for name, (whole, *_) in list(workspaces.items()):
        if name in nodes and nodes[name].operator in RECURRENT_GATES:
            workspaces[name] = _recurrent_pieces(nodes[name], whole, sizes, seen)
    # The order of the file is not always the one in which the runtime runs, and plans.
    ordered = replace(
        graph,
        nodes=tuple(sorted(graph.nodes, key=lambda node: order.get(node.name, len(order)))),
        types=_known_to_runtime(graph, inferred, seen),
    )
    buffers = plan_buffers(ordered, branches=_branches(graph, order))
    resident = _resident(first)
    return memory_plan(buffers, sizes, workspaces, resident=resident), resident


def arena_bytes(trace: CallTrace) -> int | None:
    """Return what the arena held after the call, without weights; `None` where that is not told."""
    if trace.bytes_held is None or trace.bytes_held_before is None:
        return None
    return trace.bytes_held - (trace.bytes_held_before - _region(trace))


def _recurrent_pieces(
    node: Node,
    whole: Linear,
    sizes: Mapping[str, Linear],
    seen: Mapping[str, tuple[TensorType, TensorType]],
) -> tuple[Linear, ...]:
    """Return what a recurrent kernel takes while it runs, in its order; all at once where nothing tells.

    Each direction takes its state in small pieces, then the gates of all steps, then the rest; one that goes
    backwards takes copies of what it reads and writes.
    """
    along = next((name for name in (*node.outputs[:1], *node.inputs[:1]) if name in seen), "")
    steps = seen[along][0].lengths[0] if along else 0
    state = _state(node, sizes, seen, steps)
    if state is None or steps == 0:
        return (whole,)
    unit, directions = state
    gates = _times(unit, RECURRENT_GATES[node.operator] * steps)
    copies: tuple[Linear, ...] = ()
    if node.operator == "RNN":  # one direction after the other
        whole, directions = _times(whole, 1 / directions), 1
    elif node.attributes.get("direction", "forward") != "forward":
        copies = (sizes.get(node.inputs[0], Linear(0, 0)), _times(unit, steps))
    rest = whole + _times(gates, -directions) + _times(sum(copies, Linear(0, 0)), -1)
    rest = _times(rest, 1 / directions)
    after = rest + _times(unit, -RECURRENT_STATES)
    before = (unit,) * RECURRENT_STATES
    if min(after(1), after.b) < 0:
        before, after = (_times(rest, 0.5),), _times(rest, 0.5)
    return (*before, gates, after) * (directions - 1) + (*before, gates, *copies, after)


def _state(
    node: Node,
    sizes: Mapping[str, Linear],
    seen: Mapping[str, tuple[TensorType, TensorType]],
    steps: int,
) -> tuple[Linear, int] | None:
    """Return the bytes of one step's state in one direction, and how many directions there are."""
    for name, axis, count in zip(node.outputs, (1, 0, 0), (steps, 1, 1), strict=False):
        if name in seen and len(seen[name][0].lengths) > axis and count:
            directions = seen[name][0].lengths[axis]
            return _times(sizes[name], 1 / directions / count), directions
    return None


def _times(line: Linear, factor: float) -> Linear:
    return Linear(line.a * factor, line.b * factor)


def _known_to_runtime(
    graph: Graph, inferred: Mapping[str, TensorType], seen: Mapping[str, tuple[TensorType, TensorType]]
) -> Mapping[str, TensorType]:
    """Return the types whose shape the runtime knows before it runs: only these can share memory by size.

    It keeps what the file declares, infers as onnx does, but makes up no names for lengths that it cannot
    tell, and knows its own operators too: of those, what follows from known inputs counts as known.
    """
    names = {
        length
        for kind in (*graph.inputs.values(), *graph.types.values())
        for length in kind.shape or ()
        if isinstance(length, str)
    }
    axes = {
        length for kind in graph.inputs.values() for length in kind.shape or () if not isinstance(length, int)
    }
    known = {
        **graph.constants,
        **{name: kind for name, kind in graph.inputs.items() if None not in (kind.shape or ())},
    }
    labels: dict[tuple[int, int], str] = {}
    own: set[str] = set()  # what only the runtime can infer
    for node in graph.all_nodes():
        opaque = SHAPED_BY_DATA if len(axes) <= 1 else SHAPED_BY_DATA | NAMELESS
        follows = node.operator not in opaque and all(name in known for name in node.inputs if name)
        if node.operator in SHAPED_BY_PARAMETERS:
            follows = follows and all(name in graph.constants for name in node.inputs[1:] if name)
        is_own = node.domain != "" or not own.isdisjoint(node.inputs)
        for name in node.outputs:
            if name not in seen:
                continue
            declared = _named(graph.types.get(name), names) or _named(inferred.get(name), names)
            if declared is not None:
                known[name] = declared
                _learn(labels, declared, seen[name])
            elif follows and is_own:
                known[name] = _labelled(seen[name], labels)
                own.add(name)
    return known


def _named(kind: TensorType | None, names: set[str]) -> TensorType | None:
    """Return the type if each of its lengths is a number, or a name that stands in the file."""
    if kind is None or kind.shape is None:
        return None
    return kind if all(isinstance(length, int) or length in names for length in kind.shape) else None


def _learn(labels: dict[tuple[int, int], str], kind: TensorType, seen: tuple[TensorType, TensorType]) -> None:
    """Note which name stands for lengths that differ between the two batches."""
    lengths = zip(kind.shape or (), seen[0].lengths, seen[1].lengths, strict=False)
    for label, first, last in lengths:
        if isinstance(label, str):
            labels.setdefault((first, last), label)


def _labelled(seen: tuple[TensorType, TensorType], labels: Mapping[tuple[int, int], str]) -> TensorType:
    """Return the type of both batches, lengths under the names that others of the same lengths have."""
    joint = joint_type(*seen)
    if joint.shape is None:
        return joint
    pairs = zip(joint.shape, seen[0].lengths, seen[1].lengths, strict=True)
    return TensorType(joint.dtype, tuple(labels.get((first, last), length) for length, first, last in pairs))


def traced_types(
    graph: Graph, trace: CallTrace, inputs: Mapping[str, TensorType]
) -> Mapping[str, TensorType]:
    """Return the types that a traced call shows, by tensor."""
    nodes = {node.name: node for node in graph.all_nodes()}
    # The runtime calls a node without a name by its operator and its place in the file.
    nodes |= {f"{node.operator}_{at}": node for at, node in enumerate(graph.nodes) if not node.name}
    found = {name: kind for name, kind, _ in _outputs(nodes, trace, trace)}
    return {**graph.constants, **inputs, **found}


def traced_kernels(
    graph: Graph, traces: Mapping[int, CallTrace], shapes: InputShapes
) -> tuple[KernelCost, ...]:
    """Return the costs of an optimised graph's calls from one or two traced calls of it."""
    taken: dict[int, int] = {}
    costs = [
        graph_costs(graph, traced_types(graph, trace, _bound(graph, shapes, rows)), taken)
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


def _branches(graph: Graph, ran: Mapping[str, int]) -> Mapping[str, str]:
    """Return which body each If ran, by the nodes that were seen."""
    found: dict[str, str] = {}
    for node in graph.all_nodes():
        for attribute, body in node.bodies.items():
            if any(inner.name in ran for inner in body.nodes):
                found[node.name] = attribute
    return found


def _resident(trace: CallTrace) -> int:
    """Return what loading left in the arena's first region; the rest of what is held are weights."""
    region = _region(trace)
    return max(1, region - _free_before(trace)) if region else 0


def _region(trace: CallTrace) -> int:
    """Return the region that loading left: the first power of two that holds the free bytes seen."""
    free = _free_before(trace)
    if free <= 0:
        return 0
    region = INITIAL_BYTES
    while region < free:
        region *= 2
    return region


def _free_before(trace: CallTrace) -> int:
    if trace.bytes_held_before is None or trace.bytes_used_before is None:
        return 0
    return trace.bytes_held_before - trace.bytes_used_before
