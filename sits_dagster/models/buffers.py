"""Which tensors share memory: ONNX Runtime's own rules for reuse, replayed on its optimised graph.

Textbook liveness is 20–30 % off, mostly under: most operators that could work in place do not, and a
buffer is reused only where two shapes are *known* to be equal (allocation_planner.cc).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sits_dagster.models.graph.structure import ELEMENT_BITS, Graph, Node, TensorType

__all__ = ["ALIASES", "BufferPlan", "BufferStep", "joint_type", "plan_buffers"]

# Kernels whose output is their first input under another shape.
ALIASES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Optional"})
# CPU kernels that may write over their first input when nobody else needs it.
IN_PLACE = frozenset(
    {
        "Cast", "Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "ParametricSoftplus", "Relu",
        "ScaledTanh", "Scatter", "ScatterElements", "Selu", "Shrink", "Sigmoid", "Softmax", "Softplus",
        "Softsign", "Tanh", "ThresholdedRelu", "Trilu",
    }
)  # fmt: skip
FUSED_SUM_INPUT = 3  # a fused convolution may add into its fourth input


@dataclass(frozen=True, slots=True)
class BufferStep:
    """What happens to memory around one node.

    Args:
        node: The node's name.
        operator: Its operator.
        allocated: Tensors that get memory of their own before it runs.
        released: Tensors whose memory is free once it has run.
    """

    node: str
    operator: str
    allocated: tuple[str, ...]
    released: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """The order in which buffers come and go in one call.

    Args:
        steps: One a node, in the order of execution.
        kept: Buffers that are still there when the call ends: its outputs.
    """

    steps: tuple[BufferStep, ...]
    kept: tuple[str, ...]


def joint_type(kind: TensorType, other: TensorType) -> TensorType:
    """Return a tensor's type from those in two batches: shapes are equal only if they are so in both."""
    if not kind.is_known or not other.is_known or len(kind.lengths) != len(other.lengths):
        return TensorType(kind.dtype, None)
    return TensorType(
        kind.dtype,
        tuple(a if a == b else f"{a}/{b}" for a, b in zip(kind.lengths, other.lengths, strict=True)),
    )


def plan_buffers(graph: Graph, *, branches: Mapping[str, str] | None = None) -> BufferPlan:
    """Return which tensors get memory of their own, when, and until when.

    Args:
        graph: ONNX Runtime's optimised graph, nodes in the order in which they run.
        branches: By node name, the body that an If takes; the one with most nodes otherwise.
    """
    return _Planner(graph, branches or {}).plan()


class _Planner:
    def __init__(self, graph: Graph, branches: Mapping[str, str]) -> None:
        self._graph = graph
        self._branches = branches
        self._types = {**graph.inputs, **graph.outputs, **graph.types}
        self._uses = _uses(graph)
        self._buffer = {name: name for name in self._uses}
        self._free: list[str] = []
        self._own: set[str] = set()

    def plan(self) -> BufferPlan:
        steps: list[BufferStep] = []
        for node in self._graph.nodes:
            allocated = [
                name
                for position, name in enumerate(node.outputs)
                if name and not self._reuse(node, position, name)
            ]
            self._own.update(allocated)
            released = self._consume((*node.reads, *(name for name in node.outputs if name)))
            body = self._body(node)
            if body is None:
                steps.append(BufferStep(node.name, node.operator, tuple(allocated), tuple(released)))
            else:
                steps.extend(self._nested(node, body, allocated, released))
        return BufferPlan(_at_their_end(steps), tuple(sorted(self._own & set(self._graph.outputs))))

    def _nested(
        self, node: Node, body: Graph, allocated: list[str], released: list[str]
    ) -> Iterator[BufferStep]:
        """Yield the steps of a node that runs a body."""
        later = {inner: outer for inner, outer in self._late(node, body) if outer in allocated}
        early = tuple(name for name in allocated if name not in later.values())
        yield BufferStep(node.name, node.operator, early, ())
        made: set[str] = set()
        for step in _inner(body, self._branches, self._types):
            own = tuple(name for name in step.allocated if name not in body.outputs)
            mine = tuple(later[name] for name in step.allocated if name in later)
            made.update(mine)
            yield BufferStep(step.node, step.operator, (*own, *mine), step.released)
        rest = tuple(name for name in later.values() if name not in made)
        yield BufferStep("", node.operator, rest, tuple(released))

    def _late(self, node: Node, body: Graph) -> Iterator[tuple[str, str]]:
        """Yield inner and outer names of what an If allocates no earlier than its body makes it."""
        if node.operator == "If":
            for inner, outer in zip(body.outputs, node.outputs, strict=False):
                kind = self._types.get(outer)
                if outer and not (kind is not None and kind.is_known):
                    yield inner, outer

    def _body(self, node: Node) -> Graph | None:
        chosen = node.bodies.get(self._branches.get(node.name, ""))
        return chosen or max(node.bodies.values(), key=lambda body: len(body.nodes), default=None)

    def _reuse(self, node: Node, position: int, output: str) -> bool:
        """Give the output the memory of another tensor, where the runtime would."""
        if output in self._graph.outputs:
            return False
        found = self._input_to_reuse(node, output) if position == 0 else None
        if found is None and self._uses[output] > 1:
            found = self._free_to_reuse(output)
        if found is None:
            return False
        origin = self._buffer[found]
        self._buffer[output] = origin
        self._uses[origin] += self._uses[output]
        return True

    def _input_to_reuse(self, node: Node, output: str) -> str | None:
        inputs = node.inputs
        if node.operator in ALIASES and node.domain == "" and inputs and inputs[0]:
            return inputs[0]
        is_fused = node.operator in {"Conv", "FusedConv"} and node.domain
        at = FUSED_SUM_INPUT if is_fused else 0
        if (node.operator in IN_PLACE or is_fused) and at < len(inputs) and inputs[at]:
            name = inputs[at]
            if self._uses[self._buffer[name]] == 1 and self._is_same_size(name, output):
                return name
        return None

    def _free_to_reuse(self, output: str) -> str | None:
        kind = self._types.get(output)
        if kind is None or not kind.shape:
            return None
        for at, name in enumerate(self._free):
            if self._is_same_size(name, output):
                return self._free.pop(at)
        return None

    def _is_same_size(self, name: str, other: str) -> bool:
        first, second = self._types.get(name), self._types.get(other)
        if first is None or second is None or first.shape is None or "string" in {first.dtype, second.dtype}:
            return False
        return (
            ELEMENT_BITS.get(first.dtype) == ELEMENT_BITS.get(second.dtype)
            and first.shape == second.shape
            and None not in first.shape
        )

    def _consume(self, names: Iterable[str]) -> list[str]:
        released: list[str] = []
        for name in names:
            origin = self._buffer[name]
            self._uses[origin] -= 1
            if self._uses[origin] == 0 and origin in self._own and origin not in self._graph.outputs:
                self._free.insert(0, origin)
                released.append(origin)
        return released


def _uses(graph: Graph) -> Counter[str]:
    uses: Counter[str] = Counter()
    for node in graph.nodes:
        uses.update(node.reads)
        uses.update(name for name in node.outputs if name)  # held while the node itself runs
    uses.update(list(graph.outputs))  # the caller's
    uses.update([*graph.constants, *graph.inputs])
    return uses


def _inner(
    body: Graph, branches: Mapping[str, str], types: Mapping[str, TensorType]
) -> tuple[BufferStep, ...]:
    own = Graph(
        nodes=body.nodes,
        inputs={**body.inputs, **_outer_names(body)},
        outputs=body.outputs,
        constants=body.constants,
        types={**body.types, **types},
    )
    return plan_buffers(own, branches=branches).steps


def _outer_names(body: Graph) -> dict[str, TensorType]:
    own = {*body.inputs, *body.constants, *(name for node in body.nodes for name in node.outputs)}
    return {
        name: TensorType("unknown", None) for node in body.nodes for name in node.reads if name not in own
    }


def _at_their_end(steps: list[BufferStep]) -> tuple[BufferStep, ...]:
    """Move every release to the last step that touches the buffer: it may have been reused in between."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        for name in step.released:
            last[name] = index
    released: dict[int, list[str]] = {}
    for name, index in last.items():
        released.setdefault(index, []).append(name)
    return tuple(
        BufferStep(step.node, step.operator, step.allocated, tuple(released.get(index, ())))
        for index, step in enumerate(steps)
    )
