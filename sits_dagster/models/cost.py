"""What operator calls cost: arithmetic and memory traffic, from their shapes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace

from sits_dagster.models.call import Call, UncostedError
from sits_dagster.models.graph.structure import Graph, Node, TensorType
from sits_dagster.models.linear import Linear
from sits_dagster.models.operators import Operator, everything, find_operator
from sits_dagster.models.words import cut, listed, shown

__all__ = ["CostedNode", "GraphCost", "KernelCost", "NodeCost", "Uncosted", "graph_costs", "node_cost"]

COST_MAX = 1 << 128  # no sum of these leaves a float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """What one kernel of a model costs for a batch.

    Args:
        operator: The operator's name.
        flops: Floating point (or integer) operations; a multiply-add counts as two.
        bytes_moved: Bytes read and written, if every operand comes from memory once.
    """

    operator: str
    flops: Linear
    bytes_moved: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """What one call costs.

    Args:
        flops: Floating point (or integer) operations; a multiply-add counts as two.
        bytes_moved: Bytes of inputs read once, weights too, and of outputs written once.
        is_known: Whether both numbers are; otherwise they are what could be told, mostly 0.
        reason: Why they are not known, naming the operator or the tensor; `""` where they are.
    """

    flops: int
    bytes_moved: int
    is_known: bool = True
    reason: str = ""

    def times(self, runs: int) -> NodeCost:
        """Return the cost of so many calls."""
        return replace(self, flops=self.flops * runs, bytes_moved=self.bytes_moved * runs)

    def within_reason(self, operator: str) -> NodeCost:
        """Return the cost, or that it is not known where it is too large for a number of a profile."""
        if max(self.flops, self.bytes_moved) <= COST_MAX:
            return self
        reason = f"{operator} costs more than any machine can do"
        return NodeCost(flops=0, bytes_moved=0, is_known=False, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedNode:
    """One call and its cost.

    Args:
        operator: The operator's name, behind its domain where that is not ONNX's own.
        name: The call's name, behind those of the If, Loop or Scan around it: `"loop/add"`.
        cost: Of all its runs.
    """

    operator: str
    name: str
    cost: NodeCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncosted:
    """Calls of one operator whose cost is not known.

    Args:
        count: How many there are.
        share: Of all calls, 0 to 1.
        reason: Why the first of them is not known.
    """

    count: int
    share: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCost:
    """What one run of a graph costs.

    Args:
        nodes: Its calls in order, without folded ones; a body's calls stand for its If, Loop or Scan.
        warnings: What was assumed.
    """

    nodes: tuple[CostedNode, ...]
    warnings: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Operations of all calls; a multiply-add counts as two."""
        return sum(node.cost.flops for node in self.nodes)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all calls read and write."""
        return sum(node.cost.bytes_moved for node in self.nodes)

    @property
    def uncosted(self) -> Mapping[str, Uncosted]:
        """The calls whose cost is not known, by operator."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            if not node.cost.is_known:
                found.setdefault(node.operator, []).append(node.cost.reason)
        return {
            operator: Uncosted(count=len(reasons), share=len(reasons) / len(self.nodes), reason=reasons[0])
            for operator, reasons in found.items()
        }


def node_cost(
    node: Node, types: Mapping[str, TensorType], constants: Mapping[str, TensorType] | None = None
) -> NodeCost:
    """Return what a call costs when its tensors have these types; never fails.

    Args:
        node: The call. Of one that runs other graphs, nothing is known here: see `graph_costs`.
        types: Types by name, for a given number of rows.
        constants: Types of weights, where `types` lacks them.
    """
    call = Call(node, {**(constants or {}), **types} if constants else types)
    operator = find_operator(node.domain, node.operator)
    if operator is None or node.bodies:
        reason = f"the operator {shown(_full_name(node))} is not in the cost table"
        return NodeCost(flops=0, bytes_moved=_bytes_or_0(call), is_known=False, reason=reason)
    return _known_cost(call, operator)


def _known_cost(call: Call, operator: Operator) -> NodeCost:
    try:
        flops = operator.flops(call)
    except UncostedError as error:
        return NodeCost(flops=0, bytes_moved=_bytes_or_0(call), is_known=False, reason=str(error))
    if flops < 0:
        reason = f"{_full_name(call.node)} has a negative attribute"
        return NodeCost(flops=0, bytes_moved=_bytes_or_0(call), is_known=False, reason=reason)
    try:
        return NodeCost(flops=flops, bytes_moved=operator.bytes_moved(call))
    except UncostedError as error:
        return NodeCost(flops=flops, bytes_moved=0, is_known=False, reason=str(error))


def _bytes_or_0(call: Call) -> int:
    try:
        return everything(call)
    except UncostedError:
        return 0


def _full_name(node: Node) -> str:
    return f"{cut(node.domain)}.{cut(node.operator)}" if node.domain else cut(node.operator)


def graph_costs(
    graph: Graph, types: Mapping[str, TensorType], taken: dict[int, int] | None = None
) -> GraphCost:
    """Return what a graph's calls cost when its tensors have these types; never fails.

    What is folded before the first row costs nothing. An If costs its dearest branch, a Scan its body for
    each step, and a Loop its body for each step that its outputs tell of, otherwise once, with a warning.

    Args:
        graph: The graph.
        types: Types by name, those inside of bodies too, for a given number of rows.
        taken: Which branch each If takes, by the call's `id`; those that it lacks are added. Given to the
            costs of other numbers of rows too, it makes them those of the same calls.
    """
    return _costs(graph, {**types, **_own_types(graph, types)}, "", {} if taken is None else taken)


def _costs(
    graph: Graph, known: MutableMapping[str, TensorType], path: str, taken: dict[int, int]
) -> GraphCost:
    folded = graph.folded()
    nodes: list[CostedNode] = []
    warnings: list[str] = []
    kept: dict[tuple[object, ...], NodeCost] = {}
    for node in graph.nodes:
        if folded.issuperset(filter(None, node.outputs)):
            continue
        name = path + cut(node.name or node.operator)
        if node.bodies and not node.domain and node.operator in {"If", "Loop", "Scan"}:
            inside = _body_costs(node, known, name, taken)
            nodes += inside.nodes
            warnings += inside.warnings
        else:
            operator = _full_name(node)
            cost = _kept_cost(node, known, operator, kept)
            nodes.append(CostedNode(operator=operator, name=name, cost=cost))
    return GraphCost(nodes=tuple(nodes), warnings=tuple(warnings))


def _kept_cost(
    node: Node, known: Mapping[str, TensorType], operator: str, kept: dict[tuple[object, ...], NodeCost]
) -> NodeCost:
    """Return what a call costs; of those alike, only the first is counted: large graphs repeat themselves."""
    names = (*node.inputs, *node.outputs)
    if node.attributes or node.captured or len({*names}) < len(names):
        return node_cost(node, known).within_reason(operator)
    # Types of one graph that are equal are mostly one value, and all of them outlive this.
    key = (operator, len(node.inputs), *(id(known.get(name)) for name in names))
    cost = kept.get(key)
    if cost is None:
        cost = node_cost(node, known).within_reason(operator)
        if cost.is_known:
            kept[key] = cost
    return cost


def _own_types(graph: Graph, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Return the constants, and what the file declares where the given types do not know."""
    declared = {**graph.types, **graph.inputs, **graph.outputs}
    unknown = {name for name in declared if name not in types or not types[name].is_known}
    return {**{name: declared[name] for name in unknown}, **graph.constants}


def _body_costs(
    node: Node, types: MutableMapping[str, TensorType], name: str, taken: dict[int, int]
) -> GraphCost:
    outer = types.maps if isinstance(types, ChainMap) else [types]
    costs = [
        _costs(body, ChainMap(_own_types(body, types), *outer), f"{name}/", taken)
        for body in node.bodies.values()
    ]
    if node.operator != "If":
        runs, warnings = _runs(node, types, name)
        nodes = tuple(
            replace(inner, cost=inner.cost.times(runs).within_reason(inner.operator))
            for cost in costs
            for inner in cost.nodes
        )
        return GraphCost(
            nodes=nodes, warnings=(*warnings, *(text for cost in costs for text in cost.warnings))
        )
    if id(node) not in taken:
        taken[id(node)] = max(range(len(costs)), key=lambda at: (costs[at].flops, costs[at].bytes_moved))
    dearest = costs[taken[id(node)]]
    left_out = {operator for cost in costs if cost is not dearest for operator in cost.uncosted}
    if not left_out:
        return dearest
    warning = f"{name!r}: the branch not taken may be dearer, its {listed(sorted(left_out))} not being known"
    return replace(dearest, warnings=(*dearest.warnings, warning))


def _runs(node: Node, types: Mapping[str, TensorType], name: str) -> tuple[int, tuple[str, ...]]:
    """Return how often a Loop or Scan runs its body, and a warning where that is assumed."""
    for tensor, axis in _stacked(node):
        shape = types[tensor].shape if tensor in types else None
        length = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
        if isinstance(length, int) and length >= 0:
            return length, ()
    return 1, (f"{name!r}: {node.operator} is counted as one run: its number of runs is not known",)


def _stacked(node: Node) -> Iterator[tuple[str, int]]:
    """Yield the tensors of which each run reads or writes one slice, and the axis along which it does."""
    if node.operator == "Scan":
        number = max(0, node.integer("num_scan_inputs", 0))
        axes = node.integers("scan_input_axes")
        names = node.inputs[max(0, len(node.inputs) - number) :]
        yield from ((name, axes[index] if index < len(axes) else 0) for index, name in enumerate(names))
    else:
        carried = max(0, len(node.inputs) - 2)  # without the number of runs and the condition
        yield from ((name, 0) for name in node.outputs[carried:] if name)
