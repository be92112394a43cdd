"""What a file alone tells: costs, parameters and memory, without running the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from sits_dagster.errors import InvariantError
from sits_dagster.models.buffers import ALIASES, joint_type, plan_buffers
from sits_dagster.models.cost import GraphCost, KernelCost, Uncosted, graph_costs
from sits_dagster.models.graph.shapes import BoundTypes, GraphFile
from sits_dagster.models.graph.structure import Graph, TensorType
from sits_dagster.models.inputs import IMAGE_SIZES, GivenShapes, InputShapes, input_shapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import MemoryPlan, memory_plan
from sits_dagster.models.profile import AxisGrowth, TensorProfile
from sits_dagster.models.words import cut, listed, shown

__all__ = ["GraphAnalysis", "Trace", "analyse", "analyse_graph", "kernel_costs", "row_counts"]

Trace: TypeAlias = Callable[[Graph, InputShapes, int], Mapping[str, TensorType]]
"""Tells the types of all tensors of a graph for a batch of so many rows, by running it."""

# Two and three: a batch of one hides what depends on the rows, since lengths of one broadcast.
ROWS = (2, 3)
GROWTH_FACTORS = (1, 2, 4)
NODES_FOR_GROWTH_MAX = 20_000
UNCOSTED_SHARE_MAX = 0.05  # of the calls: with more of unknown shape a plan of buffers says nothing
NAMES_IN_WARNING_MAX = 5
QUANTISED_AT_RUN_TIME = ("DynamicQuantize",)
NOT_WEIGHTS = frozenset({"int64", "bool", "string", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """What a file alone tells; see `ModelProfile` for the fields of the same name.

    Args:
        shapes: The input shapes that everything holds for.
        unknown: How many tensors have a shape that nothing could tell.
        dynamic_quantisation: Operators that scale over the whole batch, each with its number of calls.
    """

    inputs: tuple[TensorProfile, ...]
    outputs: tuple[TensorProfile, ...]
    shapes: InputShapes
    parameters: int
    parameter_bytes: int
    parameter_bytes_by_type: Mapping[str, int]
    kernels: tuple[KernelCost, ...]
    memory_plan: MemoryPlan
    memory_source: str
    unknown: int = 0
    growth: tuple[AxisGrowth, ...] = ()
    uncosted: Mapping[str, Uncosted] = field(default_factory=dict[str, Uncosted])
    dynamic_quantisation: Mapping[str, int] = field(default_factory=dict[str, int])
    warnings: tuple[str, ...] = ()


def analyse(
    file: GraphFile,
    given: GivenShapes | None = None,
    *,
    shapes: InputShapes | None = None,
    trace: Trace | None = None,
) -> GraphAnalysis:
    """Return what the file tells; of images without a size, the first common size that works is assumed.

    Args:
        file: The model.
        given: Input shapes that the user knows.
        shapes: Or all of them, as an earlier analysis had them.
        trace: Tells the types of a batch of so many rows by running the model, where no library can.

    Raises:
        ConfigError: A given shape contradicts the file.
    """
    chosen, bound = _bind(file, given, shapes)
    if trace is not None and bound[0].unknown:
        bound = [
            _completed(types, trace(file.graph, chosen, rows))
            for types, rows in zip(bound, row_counts(chosen), strict=True)
        ]
    return analyse_graph(file, chosen, bound)


def _bind(
    file: GraphFile, given: GivenShapes | None, shapes: InputShapes | None
) -> tuple[InputShapes, list[BoundTypes]]:
    candidates = (
        [shapes]
        if shapes is not None
        else [input_shapes(file.graph, given, image_size=size) for size in IMAGE_SIZES]
    )
    best: tuple[InputShapes, list[BoundTypes]] | None = None
    for candidate in candidates:
        if best is not None and candidate.lengths == best[0].lengths:
            continue  # no image in it
        bound = [file.types(candidate.shapes(rows)) for rows in row_counts(candidate)]
        if best is None or len(bound[0].unknown) < len(best[1][0].unknown):
            best = candidate, bound
        if not best[1][0].unknown or not candidate.assumed:
            break
    if best is None:
        msg = "no input shape is left to try"
        raise InvariantError(msg)
    return best


def _completed(bound: BoundTypes, traced: Mapping[str, TensorType]) -> BoundTypes:
    types = {**bound.types, **{name: kind for name, kind in traced.items() if name in bound.unknown}}
    unknown = tuple(name for name in bound.unknown if name not in traced)
    return BoundTypes(types=types, unknown=unknown, used=(*bound.used, "a run"), is_traced=True)


def row_counts(shapes: InputShapes) -> tuple[int, ...]:
    """Return the batches at which costs are told: two, or the one that the file fixes."""
    return ROWS if shapes.rows_fixed is None else (shapes.rows_fixed,)


def analyse_graph(file: GraphFile, shapes: InputShapes, bound: Sequence[BoundTypes]) -> GraphAnalysis:
    """Return what the graph tells when its tensors have these types, for two batches or the fixed one."""
    rows = row_counts(shapes)
    costs = _costs(file.graph, bound)
    plan = _plan(file.graph, bound, rows)
    parameters = _parameters(file.graph, bound[0].types)
    by_type: dict[str, int] = {}
    for kind in parameters.values():
        by_type[kind.dtype] = by_type.get(kind.dtype, 0) + kind.bytes
    return GraphAnalysis(
        inputs=tuple(_tensor(name, kind, shapes.axes[name]) for name, kind in file.graph.inputs.items()),
        outputs=tuple(_tensor(name, kind, None) for name, kind in file.graph.outputs.items()),
        shapes=shapes,
        parameters=sum(kind.elements for kind in parameters.values() if kind.dtype not in NOT_WEIGHTS),
        parameter_bytes=sum(by_type.values()),
        parameter_bytes_by_type=by_type,
        kernels=kernel_costs(costs, rows),
        memory_plan=plan,
        unknown=len(bound[0].unknown),
        memory_source=_memory_source(file.graph, plan, costs[0]),
        growth=tuple(_growth(file, shapes, bound, _row_costs(costs, plan, rows))),
        uncosted=costs[0].uncosted,
        dynamic_quantisation=_dynamic_quantisation(file.graph),
        warnings=tuple(_warnings(file.graph, shapes, bound[0], costs[0])),
    )


def _costs(graph: Graph, bound: Sequence[BoundTypes]) -> list[GraphCost]:
    """Return what the same calls cost with these types, one after the other."""
    taken: dict[int, int] = {}
    return [graph_costs(graph, types.types, taken) for types in bound]


def kernel_costs(costs: Sequence[GraphCost], rows: Sequence[int]) -> tuple[KernelCost, ...]:
    """Return the cost of each call as a line, from its costs for one or two numbers of rows."""
    first, last = costs[0], costs[-1]
    return tuple(
        KernelCost(
            operator=node.operator,
            flops=Linear.of(rows, (node.cost.flops, other.cost.flops)),
            bytes_moved=Linear.of(rows, (node.cost.bytes_moved, other.cost.bytes_moved)),
        )
        for node, other in zip(first.nodes, last.nodes, strict=True)
        if node.cost.is_known and other.cost.is_known
    )


def _plan(graph: Graph, bound: Sequence[BoundTypes], rows: Sequence[int]) -> MemoryPlan:
    first, last = bound[0].types, bound[-1].types
    folded = graph.folded()
    sizes: dict[str, Linear] = {}
    joint: dict[str, TensorType] = {}
    kept: dict[tuple[TensorType, TensorType], tuple[Linear, TensorType]] = {}
    for name, kind in first.items():
        pair = kind, last.get(name, TensorType(kind.dtype, None))
        if pair not in kept:
            kept[pair] = Linear.of(rows, (kind.bytes, pair[1].bytes)), joint_type(*pair)
        size, joint[name] = kept[pair]
        if kind.is_known and pair[1].is_known:
            sizes[name] = size
    pruned = replace(
        graph,
        nodes=tuple(node for node in graph.nodes if not all(n in folded for n in node.outputs if n)),
        constants={**graph.constants, **{name: TensorType("unknown", None) for name in folded}},
        inputs={name: joint.get(name, kind) for name, kind in graph.inputs.items()},
        outputs={name: joint.get(name, kind) for name, kind in graph.outputs.items()},
        types=joint,
    )
    return memory_plan(plan_buffers(pruned), sizes, {})


def _parameters(graph: Graph, types: Mapping[str, TensorType]) -> Mapping[str, TensorType]:
    """Return the constants that calls read at run time: weights, and what is folded from them."""
    folded = graph.folded()
    found: dict[str, TensorType] = {}
    origins: dict[str, str] = {}
    for node in graph.nodes:
        if all(name in folded for name in node.outputs if name):
            if node.operator in ALIASES and node.inputs:  # one weight under two names is held once
                origins[node.outputs[0]] = origins.get(node.inputs[0], node.inputs[0])
            continue
        for name in node.reads:
            if name in folded and name in types and types[name].is_known:
                found[origins.get(name, name)] = types[name]
    for node in graph.all_nodes():
        for body in node.bodies.values():
            found.update(body.constants)
    return found


def _tensor(name: str, kind: TensorType, axis: int | None) -> TensorProfile:
    return TensorProfile(name=name, dtype=kind.dtype, shape=kind.shape, batch_axis=axis)


def _memory_source(graph: Graph, plan: MemoryPlan, cost: GraphCost) -> str:
    """Return where the memory figure is from: it is none if the plan is empty or misses too many calls."""
    is_empty = bool(graph.nodes) and not plan.events
    return "unknown" if is_empty or _uncosted_share(cost) > UNCOSTED_SHARE_MAX else "graph"


def _uncosted_share(cost: GraphCost) -> float:
    return sum(found.share for found in cost.uncosted.values())


def _growth(
    file: GraphFile, shapes: InputShapes, bound: Sequence[BoundTypes], base: tuple[float, float]
) -> Iterator[AxisGrowth]:
    """Yield how a row grows with each free axis, from its cost at once, twice and four times the length.

    An axis is left out where inference alone does not tell all shapes at all three lengths: what a run told
    holds for its own length, and what is unknown would count as nothing.
    """
    if len(file.graph.nodes) > NODES_FOR_GROWTH_MAX or not _is_inferred(bound):
        return
    rows = row_counts(shapes)
    for axis in shapes.free:
        lengths = tuple(shapes.length(axis) * factor for factor in GROWTH_FACTORS)
        found = [base]
        for length in lengths[1:]:
            stretched = shapes.stretched(axis, length)
            longer = [file.types(stretched.shapes(count)) for count in rows]
            if not _is_inferred(longer):
                break
            grown = _costs(file.graph, longer)
            found.append(_row_costs(grown, _plan(file.graph, longer, rows), rows))
        if len(found) < len(lengths):
            continue
        yield AxisGrowth(
            axis=axis,
            length=lengths[0],
            memory_bytes=_through(lengths, [memory for memory, _ in found]),
            flops=_through(lengths, [flops for _, flops in found]),
        )


def _is_inferred(bound: Sequence[BoundTypes]) -> bool:
    return not any(types.unknown or types.is_traced for types in bound)


def _row_costs(costs: Sequence[GraphCost], plan: MemoryPlan, rows: Sequence[int]) -> tuple[float, float]:
    """Return the bytes and operations of a row; of a fixed batch, those of the batch."""
    peak, work = plan.peak(), Linear.of(rows, (costs[0].flops, costs[-1].flops))
    return peak.b or peak.a, work.b or work.a


def _through(at: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the parabola through three points, by divided differences."""
    (x0, x1, x2), (y0, y1, y2) = at, values
    slope = (y1 - y0) / (x1 - x0)
    bend = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    return (y0 - slope * x0 + bend * x0 * x1, slope - bend * (x0 + x1), bend)


def _dynamic_quantisation(graph: Graph) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for node in graph.all_nodes():
        if node.operator.startswith(QUANTISED_AT_RUN_TIME):
            name = cut(node.operator)
            found[name] = found.get(name, 0) + 1
    return found


def _warnings(graph: Graph, shapes: InputShapes, bound: BoundTypes, cost: GraphCost) -> Iterator[str]:
    if shapes.rows_fixed is not None:
        yield from _warnings_of_fixed(shapes, shapes.rows_fixed)
    for name, axis in shapes.axes.items():
        if axis:
            yield f"the rows of input {shown(name)} lie along axis {axis}, not 0"
    for axis, length in shapes.assumed.items():
        yield f"axis {shown(axis)} is free: {length} is assumed; give the real one with --shape"
    if bound.unknown:
        yield (
            f"the shapes of {len(bound.unknown)} tensors are not known to {' and '.join(bound.used)}: "
            f"{listed(bound.unknown)}"
        )
    if cost.uncosted:
        yield _uncosted(cost)
    yield from cost.warnings
    for name, kind in graph.inputs.items():
        if kind.shape is None:
            yield f"input {shown(name)} is a {kind.dtype}, whose size is not known"


def _warnings_of_fixed(shapes: InputShapes, rows: int) -> Iterator[str]:
    if rows == 1:
        yield "the file allows batches of one row only"
    else:
        yield f"the file allows batches of {rows} rows only; others are filled up"
    leading = {name: lengths[0] for name, lengths in shapes.lengths.items() if lengths}
    if len(set(leading.values())) > 1:
        some = [f"{length} of {shown(name)}" for name, length in leading.items()][:NAMES_IN_WARNING_MAX]
        more = ", …" if len(leading) > NAMES_IN_WARNING_MAX else ""
        yield f"the first axes of the inputs disagree ({', '.join(some)}{more}): {rows} is taken as the rows"


def _uncosted(cost: GraphCost) -> str:
    """Return how many calls are not costed: a share of the calls, which tells little about the cost."""
    calls = sum(found.count for found in cost.uncosted.values())
    moved = sum(node.cost.bytes_moved for node in cost.nodes if not node.cost.is_known)
    least = f", at least {moved / cost.bytes_moved:.0%} of the bytes moved" if moved else ""
    names = ", ".join(sorted(cost.uncosted)[:NAMES_IN_WARNING_MAX])
    more = ", …" if len(cost.uncosted) > NAMES_IN_WARNING_MAX else ""
    reason = next(iter(cost.uncosted.values())).reason
    return (
        f"{calls} calls ({_uncosted_share(cost):.0%} of the calls{least}, an unknown share of the cost) "
        f"are not costed ({names}{more}); the first: {reason}"
    )
