"""Types of all tensors for given inputs, without ever touching a large weight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sits_dagster.errors import ModelError
from sits_dagster.models.analysis import analyse
from sits_dagster.models.graph.shapes import GraphFile
from sits_dagster.models.graph.structure import TensorType
from tests.models.onnx_files import FLOAT, constant, external, model, node, relu, value

ROOT = Path(__file__).resolve().parents[3]
ROWS, COLUMNS = 23_000, 24_000  # of a weight of 2.2 GB
READING_BYTES_MAX = 400 << 20
READING_SECONDS_MAX = 2.0
CHILD = r"""
import re, sys, time
from pathlib import Path
from sits_dagster.models import analysis
from sits_dagster.models.graph import shapes
import onnx.shape_inference
begun = time.process_time()
found = analysis.analyse(shapes.GraphFile(Path(sys.argv[1])))
seconds = time.process_time() - begun
# Not ru_maxrss: that starts with what the parent held.
peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(found.parameter_bytes, peak, seconds, found.outputs[0].shape)
"""


def _save(folder: Path, proto: onnx.ModelProto, **options: Any) -> Path:
    path = folder / "m.onnx"
    onnx.save(proto, str(path), **options)
    return path


def _types(folder: Path, proto: onnx.ModelProto, **shapes: tuple[int, ...]) -> dict[str, TensorType]:
    bound = GraphFile(_save(folder, proto)).types(shapes)
    assert bound.unknown == ()
    return dict(bound.types)


def test_types_follow_the_inputs(tmp_path: Path) -> None:
    """Each binding is a new one: nothing of the last remains."""
    proto = model(
        [node("MatMul", ["x", "w"], ["h"]), node("Shape", ["h"], ["s"]), node("ReduceSum", ["h"], ["y"])],
        constants=[constant("w", np.zeros((8, 600)))],
    )
    file = GraphFile(_save(tmp_path, proto))
    for rows in (2, 3, 2):
        types = file.types({"x": (rows, 8)}).types
        assert types["h"] == TensorType("float32", (rows, 600))
        assert types["s"] == TensorType("int64", (2,))
        assert types["w"] == TensorType("float32", (8, 600))


def test_shapes_that_are_computed_are_known(tmp_path: Path) -> None:
    """A Reshape by pieces of a Shape, as exporters write it."""
    proto = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"], axis=0),
            node("Unsqueeze", ["n", "zeros"], ["n1"]),
            node("Concat", ["n1", "rest"], ["target"], axis=0),
            node("Reshape", ["x", "target"], ["y"]),
        ],
        outputs=[value("y", FLOAT, None)],
        constants=[
            constant("zero", 0, "int64"),
            constant("zeros", [0], "int64"),
            constant("rest", [4, 2], "int64"),
        ],
    )
    assert _types(tmp_path, proto, x=(5, 8))["y"] == TensorType("float32", (5, 4, 2))


def test_wrong_shapes_in_the_file_do_not_count(tmp_path: Path) -> None:
    """What the file says of tensors in between, and of outputs, is inferred anew."""
    proto = model([node("Neg", ["x"], ["t"]), node("Neg", ["t"], ["y"])], outputs=[value("y", FLOAT, [77])])
    proto.graph.value_info.append(value("t", FLOAT, [55, 55]))
    types = _types(tmp_path, proto, x=(2, 8))
    assert types["t"].shape == types["y"].shape == (2, 8)


def test_types_of_bodies_are_there(tmp_path: Path) -> None:
    """Tensors of an If's branches have types too, also of those that a branch captures."""
    branches = {
        name: helper.make_graph(
            [node("Concat", ["x", "x"], [f"{name}_c"], axis=1), node("Neg", [f"{name}_c"], [f"{name}_y"])],
            name,
            [],
            [value(f"{name}_y", FLOAT, None)],
        )
        for name in ("then_branch", "else_branch")
    }
    inputs = [value("x", FLOAT, ["N", 8]), value("flag", TensorProto.BOOL, [])]
    proto = model([node("If", ["flag"], ["y"], **branches)], inputs, [value("y", FLOAT, None)])
    types = _types(tmp_path, proto, x=(3, 8), flag=())
    assert types["then_branch_c"].shape == types["else_branch_y"].shape == types["y"].shape == (3, 16)


def test_functions_are_put_in_line(tmp_path: Path) -> None:
    """A function of the file's own is read as what it does."""
    function = helper.make_function(
        "mine",
        "Twice",
        ["a"],
        ["b"],
        [node("Add", ["a", "a"], ["t"]), node("Relu", ["t"], ["b"])],
        [helper.make_opsetid("", 21)],
    )
    proto = model([node("Twice", ["x"], ["h"], domain="mine"), node("Twice", ["h"], ["y"], domain="mine")])
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    proto.functions.append(function)
    file = GraphFile(_save(tmp_path, proto))
    assert [found.operator for found in file.graph.nodes] == ["Add", "Relu", "Add", "Relu"]
    assert file.types({"x": (2, 8)}).unknown == ()


def test_a_function_that_calls_itself_is_refused(tmp_path: Path) -> None:
    """It would never end."""
    body = [node("Twice", ["a"], ["b"], domain="mine")]
    function = helper.make_function(
        "mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]
    )
    proto = model([node("Twice", ["x"], ["y"], domain="mine")], functions=[function])
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    with pytest.raises(ModelError, match="functions"):
        GraphFile(_save(tmp_path, proto))


def test_what_no_library_tells_is_named(tmp_path: Path) -> None:
    """A foreign operator, and all that follows from it."""
    proto = model([node("Odd", ["x"], ["t"], domain="mine"), node("Neg", ["t"], ["y"])])
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    bound = GraphFile(_save(tmp_path, proto)).types({"x": (2, 8)})
    assert bound.unknown == ("t", "y")
    assert bound.used[0] == "onnx"


def test_large_constants_in_nodes_are_typed_like_weights(tmp_path: Path) -> None:
    """They are taken out before inference, small ones steer shapes as before."""
    proto = model(
        [
            node("Constant", [], ["big"], value=constant("big", np.zeros((8, 5000)))),
            node("Constant", [], ["target"], value=constant("target", [-1, 100], "int64")),
            node("MatMul", ["x", "big"], ["h"]),
            node("Reshape", ["h", "target"], ["y"]),
        ]
    )
    types = _types(tmp_path, proto, x=(2, 8))
    assert types["y"].shape == (100, 100)
    assert types["big"] == TensorType("float32", (8, 5000))


@pytest.mark.parametrize("shape", [(1 << 62, 8), (1 << 41,)])
def test_lengths_that_no_memory_holds_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Arithmetic with them would be nonsense, or never end."""
    with pytest.raises(ModelError, match="declares"):
        GraphFile(_save(tmp_path, model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, shape)])))


@pytest.mark.parametrize("data", [b"", b"\x00" * 100, b"no model", b"\x08\x0a\x3a\xff"])
def test_what_is_no_model_is_named(tmp_path: Path, data: bytes) -> None:
    """Whatever protobuf makes of it."""
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.onnx"):
        GraphFile(path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a file system with sparse files")
def test_a_weight_of_two_gigabytes_is_never_read(tmp_path: Path) -> None:
    """A process that analyses it stays small and quick; the weight is more than protobuf can hold."""
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", FLOAT, ["N", ROWS])],
        [value("y", FLOAT, ["N", COLUMNS])],
        [external("w", [ROWS, COLUMNS], location="w.bin", offset=0, length=ROWS * COLUMNS * 4)],
    )
    path = _save(tmp_path, proto)
    (tmp_path / "w.bin").touch()
    os.truncate(tmp_path / "w.bin", ROWS * COLUMNS * 4)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    parameter_bytes, peak, seconds, _ = child.stdout.split(maxsplit=3)
    assert int(parameter_bytes) == ROWS * COLUMNS * 4 > 2**31
    assert int(peak) < READING_BYTES_MAX
    assert float(seconds) < READING_SECONDS_MAX


def test_nodes_that_a_file_holds_unsorted_are_inferred_too(tmp_path: Path) -> None:
    """ONNX Runtime runs such files; the last node first is the worst case."""
    chain = [node("Neg", ["x" if at == 0 else f"t{at - 1}"], [f"t{at}"]) for at in range(5)]
    late = node("Constant", [], ["c"], value=constant("c", [2, 4], "int64"))
    proto = model(
        [node("Reshape", ["t4", "c"], ["y"]), *reversed(chain), late], outputs=[value("y", FLOAT, None)]
    )
    types = _types(tmp_path, proto, x=(1, 8))
    assert types["t3"].shape == (1, 8)
    assert types["y"].shape == (2, 4)


def test_the_analysis_counts_weights_once(tmp_path: Path) -> None:
    """Constants of any origin that calls read, folded ones as what they become, by element type."""
    proto = model(
        [
            node("ConstantOfShape", ["shape"], ["zeros"]),
            node("Transpose", ["w"], ["wt"]),
            node("MatMul", ["x", "wt"], ["h"]),
            node("Add", ["h", "zeros"], ["t"]),
            node("MatMul", ["t", "wt2"], ["y"]),
            node("Identity", ["wt"], ["wt2"]),
        ],
        constants=[
            constant("shape", [8], "int64"),
            constant("w", np.ones((8, 8))),
            constant("unused", np.ones(99)),
        ],
    )
    found = analyse(GraphFile(_save(tmp_path, proto)))
    assert found.parameters == 64 + 8
    assert found.parameter_bytes == 4 * (64 + 8)
    assert found.parameter_bytes_by_type == {"float32": 4 * 72}
    assert found.unknown == 0
    assert found.memory_source == "graph"


def test_the_analysis_grows_with_free_axes(tmp_path: Path) -> None:
    """All pairs of a sequence cost its square: memory and operations a row, at any length."""
    proto = model(
        [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["y"])],
        [value("x", FLOAT, ["N", "S", 16])],
        [value("y", FLOAT, ["N", "S", "S"])],
    )
    (growth,) = analyse(GraphFile(_save(tmp_path, proto))).growth
    assert (growth.axis, growth.length) == ("S", 128)
    for length in (128, 200, 1000):
        flops = sum(c * length**power for power, c in enumerate(growth.flops))
        assert flops == pytest.approx(2 * 16 * length**2)
        memory = sum(c * length**power for power, c in enumerate(growth.memory_bytes))
        assert memory == pytest.approx(4 * (16 * length + length**2))
    assert growth.memory_ratio(128) == pytest.approx(1)


def test_the_analysis_takes_the_image_size_that_works(tmp_path: Path) -> None:
    """A classifier of 48 x 320 pictures, whose size only its last weight tells."""
    proto = model(
        [node("Flatten", ["x"], ["r"]), node("MatMul", ["r", "w"], ["y"])],
        [value("x", FLOAT, ["N", 3, "H", "W"])],
        [value("y", FLOAT, ["N", 4])],
        [constant("w", np.zeros((3 * 48 * 320, 4)))],
    )
    assert analyse(GraphFile(_save(tmp_path, proto))).shapes.lengths == {"x": (1, 3, 48, 320)}


def test_the_analysis_warns_of_what_it_assumed(tmp_path: Path) -> None:
    """Fixed batches, rows along another axis, free axes."""
    fixed = analyse(
        GraphFile(_save(tmp_path, model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [4, "S"])])))
    )
    assert any("batches of 4 rows only" in words for words in fixed.warnings)
    assert any("axis 'S' is free: 128 is assumed" in words for words in fixed.warnings)
    moved = analyse(GraphFile(_save(tmp_path, relu())), {"x": ("N", 8)})
    assert moved.warnings == ()
