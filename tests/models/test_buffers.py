"""Which tensors share memory follows ONNX Runtime's planner, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from sits_dagster.models.buffers import BufferPlan, joint_type, plan_buffers
from sits_dagster.models.graph.structure import Dimension, Graph, Node, TensorType


def _type(*shape: Dimension, dtype: str = "float32") -> TensorType:
    return TensorType(dtype, shape)


ROW = _type("N", 8)


def _node(operator: str, inputs: str, outputs: str, **options: Any) -> Node:
    return Node(
        operator=operator,
        name=options.pop("name", outputs),
        inputs=tuple(inputs.split(",")) if inputs else (),
        outputs=tuple(outputs.split(",")),
        **options,
    )


def _graph(*nodes: Node, outputs: str = "y", types: dict[str, TensorType] | None = None) -> Graph:
    """Nodes from `x` to `y`, of which all tensors have the shape of a row unless told otherwise."""
    names = {name for node in nodes for name in node.outputs}
    return Graph(
        nodes=nodes,
        inputs={"x": ROW},
        outputs={name: (types or {}).get(name, ROW) for name in outputs.split(",")},
        constants={"w": _type(8)},
        types={**dict.fromkeys(names, ROW), **(types or {})},
    )


def _allocated(plan: BufferPlan) -> list[str]:
    return [name for step in plan.steps for name in step.allocated]


def _released_after(plan: BufferPlan, buffer: str) -> str:
    return next(step.node for step in plan.steps if buffer in step.released)


@pytest.mark.parametrize("operator", ["Relu", "Sigmoid", "Softmax", "Clip", "Trilu"])
def test_activations_write_over_what_nobody_else_needs(operator: str) -> None:
    """Memory of the input becomes that of the output, and is released after the output's last use."""
    plan = plan_buffers(_graph(_node("Neg", "x", "a"), _node(operator, "a", "b"), _node("Neg", "b", "y")))
    assert _allocated(plan) == ["a", "y"]
    assert _released_after(plan, "a") == "y"
    assert plan.kept == ("y",)


@pytest.mark.parametrize("operator", ["Add", "Mul", "Exp", "Gelu", "Erf", "LayerNormalization"])
def test_others_do_not(operator: str) -> None:
    """Most operators that could work in place have no such kernel."""
    plan = plan_buffers(_graph(_node("Neg", "x", "a"), _node(operator, "a,w", "b"), _node("Neg", "b", "y")))
    assert _allocated(plan) == ["a", "b", "y"]


def test_nothing_writes_over_what_is_read_later() -> None:
    """A second reader keeps the input as it is."""
    plan = plan_buffers(
        _graph(
            _node("Neg", "x", "a"), _node("Relu", "a", "b"), _node("Exp", "a", "c"), _node("Sum", "b,c", "y")
        )
    )
    assert _allocated(plan) == ["a", "b", "c", "y"]
    assert _released_after(plan, "a") == "c"


@pytest.mark.parametrize(("first", "kind"), [("x", ROW), ("w", _type(8))])
def test_nothing_writes_over_what_the_caller_or_the_model_owns(first: str, kind: TensorType) -> None:
    """Inputs and weights stay, although they are read once."""
    types = {"b": kind, "w": _type(8)}
    plan = plan_buffers(_graph(_node("Relu", first, "b"), _node("Neg", "b", "y"), types=types))
    assert _allocated(plan) == ["b", "y"]


def test_outputs_have_memory_of_their_own() -> None:
    """What a caller gets is never in memory that was something else before."""
    plan = plan_buffers(_graph(_node("Neg", "x", "a"), _node("Relu", "a", "y")))
    assert _allocated(plan) == ["a", "y"]
    plan = plan_buffers(
        _graph(_node("Neg", "x", "y"), _node("Relu", "y", "b"), _node("Neg", "b", "z"), outputs="y,z")
    )
    assert _allocated(plan) == ["y", "b", "z"]
    assert plan.kept == ("y", "z")
    assert not any("y" in step.released for step in plan.steps)


@pytest.mark.parametrize("operator", ["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"])
def test_other_views_of_a_tensor_are_the_same_memory(operator: str) -> None:
    """A view needs no equal shape, and keeps its tensor alive even beside other readers."""
    plan = plan_buffers(
        _graph(
            _node("Neg", "x", "a"),
            _node(operator, "a,w", "v"),
            _node("Exp", "a", "b"),
            _node("Exp", "v", "y"),
            types={"v": TensorType("float32", None)},
        )
    )
    assert _allocated(plan) == ["a", "b", "y"]
    assert _released_after(plan, "a") == "y"


def test_a_view_under_a_foreign_domain_is_none() -> None:
    """Somebody else's Reshape may do what it likes."""
    plan = plan_buffers(
        _graph(_node("Neg", "x", "a"), _node("Reshape", "a", "v", domain="mine"), _node("Exp", "v", "y"))
    )
    assert _allocated(plan) == ["a", "v", "y"]


def _chain(**types: TensorType) -> list[str]:
    """Three steps, of which the last could take the memory of the first."""
    plan = plan_buffers(
        _graph(
            _node("Neg", "x", "a"),
            _node("Exp", "a", "b"),
            _node("Neg", "b", "c"),
            _node("Exp", "c", "y"),
            types={"b": _type("N", 3), **types},
        )
    )
    return _allocated(plan)


def test_free_memory_of_an_equal_shape_is_taken_again() -> None:
    """The third tensor lives where the first was."""
    assert _chain() == ["a", "b", "y"]


@pytest.mark.parametrize(
    "other",
    [
        _type("N", 9),
        _type("M", 8),
        _type("N", 2, 4),
        _type(None, 8),
        TensorType("float32", None),
        _type("N", 8, dtype="float64"),
        _type("N", 8, dtype="string"),
    ],
)
def test_memory_is_taken_again_only_if_shapes_are_known_to_be_equal(other: TensorType) -> None:
    """Another name, an unknown length, a wider element or texts make it a tensor of its own."""
    assert _chain(c=other) == ["a", "b", "c", "y"]


@pytest.mark.parametrize(
    "kind", [_type(None, 8), TensorType("float32", None), _type("N", dtype="string"), _type()]
)
def test_two_unknown_lengths_are_not_equal(kind: TensorType) -> None:
    """Neither are texts, which are no plain memory, nor single numbers, which the runtime leaves out."""
    assert _chain(a=kind, c=kind) == ["a", "b", "c", "y"]


def test_elements_of_equal_width_share() -> None:
    """What counts is the size of an element, not its type."""
    assert _chain(c=_type("N", 8, dtype="int32")) == ["a", "b", "y"]


def test_an_output_that_nobody_reads_goes_at_once() -> None:
    """It has memory of its own while its node runs, not that of a tensor that is gone."""
    plan = plan_buffers(
        _graph(
            _node("Neg", "x", "a"), _node("Exp", "a", "b"), _node("Split", "b", "c,d"), _node("Neg", "d", "y")
        )
    )
    assert _allocated(plan) == ["a", "b", "c", "y"], "d is where a was"
    assert _released_after(plan, "c") == "c,d"


def test_a_fused_convolution_adds_into_its_fourth_input() -> None:
    """The sum that ONNX Runtime puts into a convolution takes the memory of what is added."""
    nodes = (
        _node("Neg", "x", "a"),
        _node("Conv", "x,w,,a", "b", domain="com.microsoft.nchwc"),
        _node("Neg", "b", "y"),
    )
    assert _allocated(plan_buffers(_graph(*nodes))) == ["a", "y"]
    plain = (nodes[0], _node("Conv", "x,w,,a", "b"), nodes[2])
    assert _allocated(plan_buffers(_graph(*plain))) == ["a", "b", "y"]


def _branching(z: TensorType, **branches: str) -> BufferPlan:
    bodies = {
        "then_branch": Graph(
            nodes=(_node("Neg", "a", "t0"), _node("Relu", "t0", "t1"), _node("Exp", "t1", "t2")),
            inputs={},
            outputs={"t2": z},
            constants={},
        ),
        "else_branch": Graph(nodes=(_node("Exp", "a", "e"),), inputs={}, outputs={"e": z}, constants={}),
    }
    types = {"z": z, "t0": ROW, "t1": ROW, "cond": _type(dtype="bool")}
    graph = _graph(
        _node("Neg", "x", "a"),
        _node("ReduceMax", "x", "cond"),
        _node("If", "cond", "z", bodies=bodies, captured=("a",), name="if"),
        _node("Exp", "z", "y"),
        types=types,
    )
    return plan_buffers(graph, branches=branches)


def test_the_body_with_most_nodes_stands_for_an_if() -> None:
    """Its tensors come and go between those around it; what it reads from outside stays until it ends."""
    plan = _branching(ROW)
    assert [step.node for step in plan.steps] == ["a", "cond", "if", "t0", "t1", "t2", "", "y"]
    assert _allocated(plan) == ["a", "cond", "t0", "z", "y"]
    assert _released_after(plan, "a") == ""
    assert _released_after(plan, "t0") == "t2"


def test_the_body_that_ran_stands_for_an_if() -> None:
    """Where it is known which one was taken, that one counts."""
    plan = _branching(ROW, **{"if": "else_branch"})
    assert [step.node for step in plan.steps] == ["a", "cond", "if", "e", "", "y"]
    assert _allocated(plan) == ["a", "cond", "z", "y"]


@pytest.mark.parametrize(("z", "where"), [(ROW, "t2"), (_type(4, 8), "if")])
def test_an_if_allocates_its_output_where_its_size_is_known(z: TensorType, where: str) -> None:
    """Known lengths before the body runs, free ones when the body makes it."""
    plan = _branching(z)
    assert [step.node for step in plan.steps if "z" in step.allocated] == [where]


def test_what_an_if_passes_through_is_allocated_when_it_ends() -> None:
    """A body that gives back what it captured makes nothing itself, yet the output is there."""
    body = Graph(nodes=(), inputs={}, outputs={"a": ROW}, constants={})
    graph = _graph(
        _node("Neg", "x", "a"),
        _node("If", "x", "z", bodies={"then_branch": body}, captured=("a",), name="if"),
        _node("Exp", "z", "y"),
    )
    assert _allocated(plan_buffers(graph)) == ["a", "z", "y"]


def test_memory_that_is_taken_again_is_released_once() -> None:
    """After the last tensor that lived in it; nothing is released twice or left behind."""
    nodes = [_node("Exp", "x" if i == 0 else f"t{i - 1}", f"t{i}") for i in range(9)]
    plan = plan_buffers(_graph(*nodes, _node("Exp", "t8", "y")))
    released = [name for step in plan.steps for name in step.released]
    assert sorted(released) == sorted(set(released)) == ["t0", "t1"]
    assert set(_allocated(plan)) == {*released, *plan.kept}


@pytest.mark.parametrize(
    ("one", "other", "joint"),
    [
        ((2, 8), (3, 8), ("2/3", 8)),
        ((2, 8), (2, 8), (2, 8)),
        ((2, 8), (2, 8, 1), None),
        ((2, "S"), (3, 8), None),
        (None, (3, 8), None),
    ],
)
def test_shapes_of_two_batches_are_one_pattern(
    one: tuple[Dimension, ...] | None, other: tuple[Dimension, ...], joint: tuple[Dimension, ...] | None
) -> None:
    """Two tensors have the same pattern only if they are alike in both batches."""
    assert joint_type(TensorType("float32", one), TensorType("float32", other)) == TensorType(
        "float32", joint
    )
