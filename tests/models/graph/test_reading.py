"""Messages of a file become plain values: in an order that runs, with types, and with what bodies read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from sits_dagster.errors import ModelError
from sits_dagster.models.graph.checks import check_lengths
from sits_dagster.models.graph.files import input_names, load_proto, make_traceable
from sits_dagster.models.graph.reading import element_name, graph_of, value_type
from sits_dagster.models.graph.structure import ELEMENT_BITS, Graph, TensorType
from tests.models.onnx_files import FLOAT, constant, model, node, relu, tensor, value

PATH = Path("m.onnx")


def _read(proto: onnx.ModelProto) -> Graph:
    return graph_of(proto.graph, 0, PATH)


@given(order=st.permutations(range(6)))
def test_nodes_come_in_an_order_that_runs(order: list[int]) -> None:
    """Files may hold them in any; each comes after those that it reads from."""
    chain = [node("Neg", ["x" if at == 0 else f"t{at - 1}"], [f"t{at}"]) for at in range(5)]
    nodes = [*chain, node("Add", ["t4", "t1"], ["y"])]
    graph = _read(model([nodes[at] for at in order]))
    seen = {"x"}
    for found in graph.nodes:
        assert seen.issuperset(found.reads)
        seen.update(found.outputs)
    assert len(graph.nodes) == 6


def test_a_sorted_file_keeps_its_order() -> None:
    """Nothing is moved that need not be."""
    names = [
        found.outputs[0] for found in _read(model([node("Neg", ["x"], [f"t{at}"]) for at in range(9)])).nodes
    ]
    assert names == [f"t{at}" for at in range(9)]


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Relu", ["y"], ["y"], name="loop")],
        [node("Add", ["x", "b"], ["a"], name="loop"), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["y"])],
    ],
)
def test_nodes_that_wait_for_each_other_are_named(nodes: list[onnx.NodeProto]) -> None:
    """A cycle is an error of the model."""
    with pytest.raises(ModelError, match=r"cycle of nodes: .*loop"):
        _read(model(nodes))


def _branch(nodes: list[onnx.NodeProto], output: str, *constants: onnx.TensorProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", [], [value(output, FLOAT, None)], constants)


def test_what_a_body_reads_from_outside_is_captured() -> None:
    """At any depth; its own constants and tensors, and optional inputs that are left out, are not."""
    inner = _branch([node("Add", ["a", "w"], ["i"])], "i")
    deep = _branch([node("If", ["flag"], ["d"], then_branch=inner, else_branch=inner)], "d")
    plain = _branch([node("Clip", ["b", "", "own"], ["p"])], "p", constant("own", 1.0))
    proto = model(
        [
            node("If", ["flag"], ["y"], then_branch=deep, else_branch=plain),
            node("Neg", ["x"], ["a"]),
            node("Neg", ["x"], ["b"]),
        ],
        [value("x", FLOAT, ["N", 8]), value("flag", TensorProto.BOOL, [])],
        constants=[constant("w", 1.0)],
    )
    graph = _read(proto)
    assert [found.operator for found in graph.nodes] == ["Neg", "Neg", "If"], "it waits for what it captures"
    branching = graph.nodes[-1]
    assert branching.captured == ("a", "b", "flag", "w")
    assert branching.reads == ("flag", "a", "b", "flag", "w")
    assert set(branching.bodies) == {"then_branch", "else_branch"}
    assert branching.bodies["else_branch"].constants == {"own": TensorType("float32", ())}


def test_a_body_may_give_back_what_it_captured() -> None:
    """An output that the body does not make comes from outside."""
    branch = _branch([], "a")
    proto = model(
        [node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch), node("Neg", ["x"], ["a"])],
        [value("x", FLOAT, ["N", 8]), value("flag", TensorProto.BOOL, [])],
    )
    assert _read(proto).nodes[-1].captured == ("a",)


@pytest.mark.parametrize(("levels", "is_read"), [(64, True), (65, False)])
def test_graphs_are_nested_so_deep_and_no_deeper(*, levels: int, is_read: bool) -> None:
    """Recursion ends long before Python's own limit."""
    proto = model([])
    graph = proto.graph
    for _ in range(levels):
        found = graph.node.add(op_type="If", output=["y"])
        graph = found.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    graph.node.add(op_type="Neg", input=["x"], output=["y"])
    if is_read:
        assert _read(proto).nodes[0].captured == ("x",)
    else:
        with pytest.raises(ModelError, match=r"nests graphs deeper than 64"):
            _read(proto)


def test_constants_are_no_nodes() -> None:
    """Weights and Constant nodes are constants with types; an input with a default value is no input."""
    nodes = [
        node("Constant", [], ["c0"], value=constant("any", np.zeros((2, 3)))),
        node("Constant", [], ["c1"], value_float=1.0),
        node("Constant", [], ["c2"], value_ints=[1, 2, 3]),
        node("Constant", [], ["c3"], value_string="text"),
        node("Constant", [], ["c4"], value_strings=["a", "b"]),
        node("Constant", [], ["c5"], value_int=7),
        node("Constant", [], ["c6"], value_floats=[1.0]),
        node("Constant", [], ["c7"]),
        node("Relu", ["x"], ["y"]),
    ]
    inputs = [value("x", FLOAT, ["N", 8]), value("w", FLOAT, [8])]
    graph = _read(model(nodes, inputs, constants=[constant("w", range(8))]))
    assert [found.operator for found in graph.nodes] == ["Relu"]
    assert graph.inputs == {"x": TensorType("float32", ("N", 8))}
    assert graph.constants == {
        "w": TensorType("float32", (8,)),
        "c0": TensorType("float32", (2, 3)),
        "c1": TensorType("float32", ()),
        "c2": TensorType("int64", (3,)),
        "c3": TensorType("string", ()),
        "c4": TensorType("string", (2,)),
        "c5": TensorType("int64", ()),
        "c6": TensorType("float32", (1,)),
        "c7": TensorType("unknown", None),
    }


def test_a_sparse_weight_counts_in_full() -> None:
    """It is dense once loaded."""
    proto = relu()
    proto.graph.sparse_initializer.append(
        helper.make_sparse_tensor(constant("s", [1.0]), constant("at", [4], "int64"), [30, 40])
    )
    assert _read(proto).constants == {"s": TensorType("float32", (30, 40))}


def test_attributes_are_numbers_and_texts() -> None:
    """Tensors and graphs are left out; a foreign Constant is a node like others."""
    proto = model(
        [
            node(
                "Odd",
                ["x"],
                ["y"],
                domain="mine",
                i=3,
                f=0.5,
                s="t",
                ints=[1, 2],
                floats=[0.5],
                strings=["a"],
            ),
            node("Constant", ["x"], ["z"], domain="mine"),
            node("Neg", ["x"], ["v"], domain="ai.onnx"),
        ]
    )
    odd, foreign, own = _read(proto).nodes
    assert odd.attributes == {"i": 3, "f": 0.5, "s": "t", "ints": (1, 2), "floats": (0.5,), "strings": ("a",)}
    assert (odd.integer("i", 9), odd.integer("s", 9), odd.integers("ints"), odd.integers("i")) == (
        3,
        9,
        (1, 2),
        (),
    )
    assert (foreign.operator, foreign.domain, own.domain) == ("Constant", "mine", "")


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (["N", 8], ("N", 8)),
        ([None, 8], (None, 8)),
        (["?", "-1"], (None, None)),
        ([-5, 0], (None, 0)),
        ([], ()),
        (None, None),
    ],
)
def test_lengths_are_numbers_names_or_nothing(dims: Any, shape: Any) -> None:
    """What exporters write for "no idea" is no name, and a negative length no number."""
    assert value_type(value("x", FLOAT, dims)) == TensorType("float32", shape)


def test_what_is_no_tensor_is_called_by_its_kind() -> None:
    """Sequences, maps, optionals and nothing at all."""
    assert value_type(helper.make_tensor_sequence_value_info("x", FLOAT, None)).dtype == "sequence_type"
    assert value_type(onnx.ValueInfoProto(name="x")) == TensorType("unknown", None)


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, "float32"), (11, "float64"), (7, "int64"), (16, "bfloat16"), (22, "int4"), (999, "unknown")],
)
def test_types_have_numpys_names(number: int, name: str) -> None:
    """Where NumPy has one; ONNX's own otherwise."""
    assert element_name(number) == name


def test_every_type_of_this_onnx_has_a_width() -> None:
    """A new type would be counted with a wrong size: it must be added."""
    names = {element_name(number) for number in TensorProto.DataType.values()} - {"undefined"}
    assert names - set(ELEMENT_BITS) == set()


@pytest.mark.parametrize("length", [1 << 62, (1 << 40) + 1])
def test_lengths_that_no_memory_holds_are_refused(length: int) -> None:
    """Of inputs, outputs and weights, negative ones of weights too; 2^40 alone is still a number."""
    huge = [
        model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["N", length])]),
        model([node("Relu", ["x"], ["y"])], None, [value("y", FLOAT, [length])]),
        relu(constants=[tensor("w", [2, length])]),
        relu(constants=[tensor("w", [-1])]),
    ]
    for proto in huge:
        with pytest.raises(ModelError, match=r"declares the (tensor|weight) '[xyw]'"):
            check_lengths(proto.graph, PATH)
    check_lengths(model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [1 << 40])]).graph, PATH)


def _save(path: Path, proto: onnx.ModelProto) -> Path:
    onnx.save(proto, str(path))
    return path


def test_a_caller_gives_only_inputs_without_a_default(tmp_path: Path) -> None:
    """In the file's order."""
    inputs = [value(name, FLOAT, [8]) for name in "xwz"]
    path = _save(
        tmp_path / "m.onnx",
        model([node("Sum", ["x", "w", "z"], ["y"])], inputs, None, [constant("w", range(8))]),
    )
    assert input_names(path) == ("x", "z")


def test_an_optimised_graph_is_made_readable(tmp_path: Path) -> None:
    """Folded inputs go, nodes without a name of their own get one in every body, and it still runs."""
    branch = _branch([node("Neg", ["x"], ["t"], name="n")], "t")
    other = _branch([node("Exp", ["x"], ["e"], name="n")], "e")
    proto = model(
        [
            node("Relu", ["x"], ["r"]),
            node("If", ["flag"], ["y"], then_branch=branch, else_branch=other),
            node("Relu", ["r"], ["z"], name="kept"),
        ],
        [value("x", FLOAT, ["N", 8]), value("flag", TensorProto.BOOL, []), value("gone", FLOAT, [8])],
        [value("y", FLOAT, None), value("z", FLOAT, None)],
    )
    path = _save(tmp_path / "m.onnx", proto)
    make_traceable(path, ["x", "flag"])
    graph = graph_of(load_proto(path).graph, 0, path)
    assert list(graph.inputs) == ["x", "flag"]
    bodies = [body for found in graph.nodes for body in found.bodies.values()]
    names = [found.name for part in (graph, *bodies) for found in part.nodes]
    assert len(set(names)) == len(names) == 5
    assert "" not in names
    assert "kept" in names
    before = path.stat().st_mtime_ns
    make_traceable(path, ["x", "flag"])
    assert path.stat().st_mtime_ns == before, "nothing is left to change"

    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(["y"], {"x": np.ones((1, 8), np.float32), "flag": np.array(True)})
    np.testing.assert_allclose(outputs[0], -1)
