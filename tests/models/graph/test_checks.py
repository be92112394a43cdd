"""What no file may hold is refused by name, before any library works on it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from sits_dagster.errors import ModelError
from sits_dagster.models.graph import checks
from sits_dagster.models.graph.files import external_data_files
from sits_dagster.models.graph.shapes import GraphFile
from sits_dagster.models.words import cut, listed, one_line, shown
from tests.models.onnx_files import FLOAT, constant, external, model, node, relu, value


def _open(folder: Path, proto: onnx.ModelProto | bytes) -> GraphFile:
    path = folder / "model.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return GraphFile(path)


def _with_function(*calls: str) -> onnx.ModelProto:
    names = ["x", *(f"t{at}" for at in range(len(calls) - 1)), "y"]
    proto = model([node(call, [names[at]], [names[at + 1]], domain="local") for at, call in enumerate(calls)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    proto.opset_import.append(opsets[1])
    for name, inner in (("F", ["Relu", "Exp"]), ("G", ["F", "F", "F"])):
        steps = ["a", *(f"s{at}" for at in range(len(inner) - 1)), "b"]
        nodes = [
            node(call, [steps[at]], [steps[at + 1]], domain="local" if call == "F" else "")
            for at, call in enumerate(inner)
        ]
        proto.functions.append(helper.make_function("local", name, ["a"], ["b"], nodes, opsets))
    return proto


def test_functions_count_as_what_they_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for the nodes of all calls: 2 of F, and 3 times 2 of G."""
    proto = _with_function("F", "G")
    monkeypatch.setattr(checks, "NODES_MAX", 8)
    assert len(_open(tmp_path, proto).graph.nodes) == 8
    monkeypatch.setattr(checks, "NODES_MAX", 7)
    with pytest.raises(ModelError, match="more than 7 nodes in its functions"):
        _open(tmp_path, proto)


def test_nodes_of_branches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = helper.make_graph([node("Identity", ["x"], ["t"])], "b", [], [value("t", FLOAT, None)])
    choose = node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([choose], constants=[constant("c", True, "bool")])
    monkeypatch.setattr(checks, "NODES_MAX", 3)
    _open(tmp_path, proto)
    monkeypatch.setattr(checks, "NODES_MAX", 2)
    with pytest.raises(ModelError, match="more than 2 nodes"):
        _open(tmp_path, proto)


@pytest.mark.parametrize(
    "damage",
    [
        lambda graph: graph.node.append(node("placeholder", ["x"], ["z"])),
        lambda graph: graph.node.append(node("Relu", ["x"], ["placeholder"])),
        lambda graph: graph.node.append(node("Constant", [], ["placeholder"], value_int=1)),
        lambda graph: graph.node[0].attribute.append(helper.make_attribute("placeholder", 1)),
        lambda graph: graph.initializer.append(constant("placeholder", 1)),
        lambda graph: graph.input.append(value("placeholder", FLOAT, [1])),
        lambda graph: graph.value_info.append(value("z", FLOAT, ["placeholder"])),
    ],
)
def test_names_that_are_no_text_are_refused_wherever_they_are(damage: object, tmp_path: Path) -> None:
    """protobuf gives them as bytes, which no other part expects."""
    proto = relu()
    assert callable(damage)
    damage(proto.graph)
    data = proto.SerializeToString().replace(b"placeholder", b"\xff\xfeaceholder")
    with pytest.raises(ModelError, match="names that are no text"):
        _open(tmp_path, data)


def test_a_location_that_is_no_text_is_refused(tmp_path: Path) -> None:
    proto = model([node("Add", ["x", "w"], ["y"])], constants=[external("w", [8], location="placeholder")])
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString().replace(b"placeholder", b"\xff\xfeaceholder"))
    with pytest.raises(ModelError, match="does not tell in which file"):
        external_data_files(path)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (node("LayerNormalization", ["x", "w"], ["y"], axis=2**31), "with the axis 2147483648"),
        (node("Einsum", ["x"], ["y"], equation="\u202e"), r"with the equation '\\u202e'"),
        (node("Split", ["x"], ["y", "z"], num_outputs=1), "with 2 outputs for 1"),
        (node("RegexFullMatch", [""], ["y"], pattern="a"), "without any of its inputs"),
        (node("LabelEncoder", [""], ["y"], domain="ai.onnx.ml"), "without any of its inputs"),
    ],
)
def test_what_crashes_or_hangs_libraries_is_refused(step: onnx.NodeProto, words: str, tmp_path: Path) -> None:
    """Found by damaging models at random: onnx 1.23 and ONNX Runtime 1.32 do not survive them."""
    with pytest.raises(ModelError, match=words):
        _open(tmp_path, model([step], constants=[constant("w", [1.0] * 8)]))


def test_sizes_that_overflow_are_refused(tmp_path: Path) -> None:
    """Each length is possible, but not all of them together."""
    for dims in ([2**40, 2**40], [1] * 65):
        weight = TensorProto(name="w", data_type=FLOAT, dims=dims)
        with pytest.raises(ModelError, match="declares the weight 'w' with lengths"):
            _open(tmp_path, model([node("Add", ["x", "w"], ["y"])], constants=[weight]))
        with pytest.raises(ModelError, match="declares the tensor 'x' with lengths"):
            _open(tmp_path, relu(inputs=[value("x", FLOAT, dims)]))


def test_a_constant_without_an_output_is_no_fault(tmp_path: Path) -> None:
    """It is of no use, however large: no error comes of it."""
    useless = node("Constant", [], [], value=constant("", [0.0] * 5000))
    file = _open(tmp_path, model([useless, node("Relu", ["x"], ["y"])]))
    assert file.types({"x": (2, 8)}).types["x"].lengths == (2, 8)


def test_names_are_cut_in_messages() -> None:
    """However long a name is, a message can be read; nothing in it steers a terminal."""
    assert cut("n" * 80) == "n" * 80
    assert len(cut("n" * 10**6)) == 80
    assert shown("\x1b[31m\u202e") == r"'\x1b[31m\u202e'"
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed(map(str, range(9))) == "'0', '1', '2', '3', '4', '5', '6', '7', …"
    assert one_line(ValueError("a\n  b")) == "a b"
    assert len(one_line(ValueError("n" * 10**6))) == 500
