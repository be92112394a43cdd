"""Graphs of odd structure: order, names, nesting, functions, versions, sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from tests.models.onnx_files import FLOAT, Built, Cases, constant, field, model, node, relu, value

CASES = Cases()
LONG = 2**20
CHAIN = 100_000


def _local(found: onnx.ModelProto, *functions: onnx.FunctionProto) -> onnx.ModelProto:
    found.opset_import.append(helper.make_opsetid("local", 1))
    found.functions.extend(functions)
    return found


def _function(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["a"], ["b"], nodes, opsets)


def _branch(result: str, nodes: Sequence[onnx.NodeProto] = (), **options: Any) -> onnx.GraphProto:
    found = [*nodes] or [node("Identity", ["x"], [result])]
    return helper.make_graph(found, result, [], [value(result, FLOAT, None)], **options)


# Order and connections


@CASES.add("error")
def cycle(_folder: Path) -> Built:
    return model([node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])])


@CASES.add("error")
def node_that_feeds_itself(_folder: Path) -> Built:
    return model([node("Add", ["x", "y"], ["y"])])


@CASES.add("profile")
def nodes_that_nobody_reads(_folder: Path) -> Built:
    return model([node("Relu", ["x"], ["y"]), node("Exp", ["x"], ["a"]), node("Neg", ["a"], ["b"])])


@CASES.add("profile")
def nodes_out_of_order(_folder: Path) -> Built:
    return model([node("Relu", ["a"], ["y"]), node("Sigmoid", ["x"], ["a"])])


@CASES.add("error")
def input_that_nobody_gives(_folder: Path) -> Built:
    return model([node("Add", ["x", "nothing"], ["y"])])


@CASES.add("error")
def output_that_nobody_makes(_folder: Path) -> Built:
    return model([node("Relu", ["x"], ["a"])])


@CASES.add("either")
def graph_without_nodes(_folder: Path) -> Built:
    return model([], outputs=[value("x", FLOAT, ["N", 8])])


@CASES.add("either")
def graph_without_anything(_folder: Path) -> Built:
    return model([], inputs=[], outputs=[])


@CASES.add("either")
def graph_without_inputs(_folder: Path) -> Built:
    return model([node("Identity", ["w"], ["y"])], inputs=[], constants=[constant("w", [range(8)])])


@CASES.add("profile")
def output_that_is_an_input(_folder: Path) -> Built:
    outputs = [value("y", FLOAT, ["N", 8]), value("x", FLOAT, ["N", 8])]
    return model([node("Relu", ["x"], ["y"])], outputs=outputs)


@CASES.add("either")
def node_without_outputs(_folder: Path) -> Built:
    return model([node("Relu", ["x"], ["y"]), node("Exp", ["x"], [])])


@CASES.add("either")
def node_without_operator(_folder: Path) -> Built:
    return model([node("", ["x"], ["y"])])


@CASES.add("either")
def more_inputs_than_the_operator_takes(_folder: Path) -> Built:
    return model([node("Relu", ["x"] * 10_000, ["y"])])


# Names


@CASES.add("error")
def output_made_twice(_folder: Path) -> Built:
    return model([node("Relu", ["x"], ["y"]), node("Sigmoid", ["x"], ["y"])])


@CASES.add("either")
def node_name_twice(_folder: Path) -> Built:
    return model([node("Relu", ["x"], ["a"], name="n"), node("Sigmoid", ["a"], ["y"], name="n")])


@CASES.add("either")
def graph_input_twice(_folder: Path) -> Built:
    return relu(inputs=[value("x", FLOAT, ["N", 8])] * 2)


@CASES.add("either")
def graph_output_twice(_folder: Path) -> Built:
    return relu(outputs=[value("y", FLOAT, ["N", 8])] * 2)


@CASES.add("either")
def constant_twice(_folder: Path) -> Built:
    constants = [constant("w", range(8)), constant("w", range(16))]
    return model([node("Add", ["x", "w"], ["y"])], constants=constants)


@CASES.add("either")
def constant_with_the_name_of_an_output(_folder: Path) -> Built:
    return relu(constants=[constant("y", range(8))])


@CASES.add("profile")
def constant_that_is_an_input_too(_folder: Path) -> Built:
    inputs = [value("x", FLOAT, ["N", 8]), value("w", FLOAT, [8])]
    return model([node("Add", ["x", "w"], ["y"])], inputs=inputs, constants=[constant("w", range(8))])


def _named(name: str) -> Built:
    nodes = [node("Relu", ["x"], [name], name=name), node("Exp", [name], ["y"], name=name * 2)]
    found = model(nodes, inputs=[value("x", FLOAT, [name, 8])])
    found.graph.name = name
    return found


for _title, _text in {
    "new_lines": "a\nb\r\n\tc",
    "terminal_codes": "\x1b[2J\x1b]0;title\x07",
    "markup": "[red]a[/red]<script>|`#",
    "right_to_left": "\u202eabc\u2066\ufeff",
    "null": "a\0b",
    "one_megabyte": "n" * LONG,
    "paths": "../../etc/passwd",
    "spaces": " ",
}.items():
    CASES.put(f"names_with_{_title}", "profile", lambda _folder, text=_text: _named(text))


@CASES.add("either")
def names_that_are_no_text(_folder: Path) -> Built:
    data = model([node("Relu", ["x"], ["placeholder"]), node("Exp", ["placeholder"], ["y"])])
    return data.SerializeToString().replace(b"placeholder", b"\xff\xfeaceholder")


# Nesting


@CASES.add("profile")
def choice(_folder: Path) -> Built:
    inputs = [value("x", FLOAT, ["N", 8]), value("c", TensorProto.BOOL, [])]
    return model(
        [node("If", ["c"], ["y"], then_branch=_branch("t"), else_branch=_branch("e"))], inputs=inputs
    )


def _nest(depth: int) -> onnx.ModelProto:
    inputs = [value("x", FLOAT, ["N", 8]), value("c", TensorProto.BOOL, [])]
    inner = _branch("o0")
    for level in range(1, depth + 1):
        name = f"o{level}"
        inside = node("If", ["c"], [name], then_branch=inner, else_branch=_branch(f"e{level}"))
        inner = _branch(name, [inside])
    return model([node("If", ["c"], ["y"], then_branch=inner, else_branch=_branch("e"))], inputs=inputs)


@CASES.add("either")
def choices_in_choices(_folder: Path) -> Built:
    """As deep as protobuf still reads."""
    return _nest(28)


def nested_by_hand(depth: int) -> bytes:
    """Choices in choices as bytes: no library would write them."""
    graph = _branch("o").SerializeToString()
    other = field(5, helper.make_attribute("else_branch", _branch("e")).SerializeToString())
    for level in range(depth):
        # An attribute's name, graph and type; a node's inputs, outputs, operator and attributes.
        then = field(1, b"then_branch") + field(6, graph) + b"\xa0\x01\x05"
        name = f"o{level}".encode()
        inside = field(1, b"c") + field(2, name) + field(4, b"If") + field(5, then) + other
        graph = (
            field(1, inside)
            + field(2, b"g")
            + field(12, value(name.decode(), FLOAT, None).SerializeToString())
        )
    head = model([], inputs=[value("x", FLOAT, ["N", 8]), value("c", TensorProto.BOOL, [])], outputs=[])
    top = graph + head.graph.SerializeToString()
    head.ClearField("graph")
    return head.SerializeToString() + field(7, top)


CASES.put("choices_in_120_choices", "error", lambda _folder: nested_by_hand(120))
CASES.put("choices_in_3000_choices", "error", lambda _folder: nested_by_hand(3000))


def _loop(step: onnx.NodeProto, times: int | None) -> onnx.ModelProto:
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), step],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("v", FLOAT, None)],
        [value("go_on", TensorProto.BOOL, []), value("w", FLOAT, None)],
    )
    constants = [constant("true", True, "bool"), *([] if times is None else [constant("n", times, "int64")])]
    loop = node("Loop", ["" if times is None else "n", "true", "x"], ["y"], body=body)
    return model([loop], outputs=[value("y", FLOAT, None)], constants=constants)


CASES.put("loop", "profile", lambda _folder: _loop(node("Relu", ["v"], ["w"]), 3))
CASES.put("loop_without_end", "either", lambda _folder: _loop(node("Relu", ["v"], ["w"]), None))
CASES.put("loop_of_all_the_years", "either", lambda _folder: _loop(node("Relu", ["v"], ["w"]), 2**63 - 1))
CASES.put("loop_that_doubles", "either", lambda _folder: _loop(node("Concat", ["v", "v"], ["w"], axis=0), 60))


@CASES.add("profile")
def scan(_folder: Path) -> Built:
    body = helper.make_graph(
        [node("Add", ["s", "r"], ["t"]), node("Identity", ["t"], ["o"])],
        "body",
        [value("s", FLOAT, [8]), value("r", FLOAT, [8])],
        [value("t", FLOAT, [8]), value("o", FLOAT, [8])],
    )
    step = node("Scan", ["zero", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    return model([step], constants=[constant("zero", [0] * 8)])


@CASES.add("either")
def choice_without_branches(_folder: Path) -> Built:
    return model([node("If", ["c"], ["y"])], constants=[constant("c", True, "bool")])


@CASES.add("error")
def branch_that_reads_nothing_known(_folder: Path) -> Built:
    branch = _branch("t", [node("Relu", ["nothing"], ["t"])])
    choose = node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    return model([choose], constants=[constant("c", True, "bool")])


@CASES.add("either")
def branch_that_hides_an_outer_name(_folder: Path) -> Built:
    branch = _branch("t", [node("Exp", ["x"], ["a"]), node("Relu", ["a"], ["t"])])
    choose = node("If", ["c"], ["b"], then_branch=branch, else_branch=branch)
    nodes = [node("Neg", ["x"], ["a"]), choose, node("Add", ["a", "b"], ["y"])]
    return model(nodes, constants=[constant("c", True, "bool")])


@CASES.add("profile")
def function(_folder: Path) -> Built:
    call = model([node("F", ["x"], ["y"], domain="local")])
    return _local(call, _function("F", [node("Relu", ["a"], ["b"])]))


@CASES.add("either")
def function_that_calls_itself(_folder: Path) -> Built:
    call = model([node("F", ["x"], ["y"], domain="local")])
    return _local(call, _function("F", [node("F", ["a"], ["b"], domain="local")]))


@CASES.add("either")
def functions_that_call_each_other(_folder: Path) -> Built:
    call = model([node("F", ["x"], ["y"], domain="local")])
    return _local(
        call,
        _function("F", [node("G", ["a"], ["b"], domain="local")]),
        _function("G", [node("F", ["a"], ["b"], domain="local")]),
    )


@CASES.add("either")
def functions_that_multiply(_folder: Path) -> Built:
    """Ten levels of ten calls: ten thousand million operators in four kilobytes."""
    functions = [_function("F0", [node("Relu", ["a"], ["b"])])]
    for level in range(1, 11):
        names = ["a", *(f"t{step}" for step in range(9)), "b"]
        calls = [node(f"F{level - 1}", [a], [b], domain="local") for a, b in itertools.pairwise(names)]
        functions.append(_function(f"F{level}", calls))
    return _local(model([node("F10", ["x"], ["y"], domain="local")]), *functions)


# Versions, domains and sizes

CASES.put("opset_99", "either", lambda _folder: relu(opset=99))
CASES.put("opset_0", "either", lambda _folder: relu(opset=0))
CASES.put("opset_1", "either", lambda _folder: relu(opset=1))


@CASES.add("either")
def opset_missing(_folder: Path) -> Built:
    found = relu()
    del found.opset_import[:]
    return found


@CASES.add("either")
def opset_twice(_folder: Path) -> Built:
    found = relu()
    found.opset_import.extend([helper.make_opsetid("", 11), helper.make_opsetid("ai.onnx", 7)])
    return found


@CASES.add("either")
def ir_version_99(_folder: Path) -> Built:
    found = relu()
    found.ir_version = 99
    return found


@CASES.add("either")
def operator_that_nobody_knows(_folder: Path) -> Built:
    return model([node("Frobnicate", ["x"], ["y"])])


@CASES.add("profile")
def operator_of_a_domain_that_nobody_knows(_folder: Path) -> Built:
    found = model([node("Relu", ["x"], ["a"]), node("Frobnicate", ["a"], ["y"], domain="nobody.knows")])
    found.opset_import.append(helper.make_opsetid("nobody.knows", 1))
    return found


@CASES.add("either")
def chain_of_100_000_nodes(_folder: Path) -> Built:
    names = ["x", *(f"a{index}" for index in range(CHAIN - 1)), "y"]
    return model([node("Relu", [a], [b]) for a, b in itertools.pairwise(names)])


@CASES.add("either")
def constants_without_end(_folder: Path) -> Built:
    return relu(constants=[constant(f"w{index}", 0) for index in range(50_000)])


@CASES.add("profile")
def attribute_of_a_million_numbers(_folder: Path) -> Built:
    nodes = [
        node("Constant", [], ["c"], value_floats=[0.5] * 1_000_000),
        node("ReduceSum", ["c"], ["s"], keepdims=0),
        node("Add", ["x", "s"], ["y"]),
    ]
    return model(nodes)
