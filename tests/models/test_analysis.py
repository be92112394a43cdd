"""What a file alone tells: where it says so, and where it says that nothing is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from sits_dagster.models.analysis import analyse
from sits_dagster.models.graph.shapes import BoundTypes, GraphFile
from sits_dagster.models.graph.structure import TensorType
from sits_dagster.models.inputs import InputShapes
from tests.models.onnx_files import FLOAT, model, node, value


def _save(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_growth_is_left_out_where_a_length_is_not_inferred(tmp_path: Path) -> None:
    """What a run told holds for its lengths: shapes of other lengths that count as nothing say nothing."""
    nodes = [
        node("NonZero", ["x"], ["places"]),
        node("Transpose", ["places"], ["t"]),
        node("Relu", ["x"], ["y"]),
    ]
    proto = model(nodes, [value("x", FLOAT, ["N", "S"])], [value("y", FLOAT, ["N", "S"])])
    file = GraphFile(_save(tmp_path, proto))

    def trace(_: Any, shapes: InputShapes, rows: int) -> dict[str, TensorType]:
        found = rows * shapes.length("S")
        return {"places": TensorType("int64", (2, found)), "t": TensorType("int64", (found, 2))}

    traced = analyse(file, trace=trace)
    assert (traced.unknown, traced.growth) == (0, ())
    assert analyse(file).growth == ()


def test_growth_is_left_out_where_a_longer_one_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of the profile may be known while twice of it is not."""
    proto = model(
        [node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["N", "S"])], [value("y", FLOAT, ["N", "S"])]
    )
    file = GraphFile(_save(tmp_path, proto))
    assert len(analyse(file).growth) == 1
    types = file.types

    def lost(shapes: Mapping[str, tuple[int, ...]]) -> BoundTypes:
        found = types(shapes)
        return found if shapes["x"][1] < 400 else replace(found, unknown=("y",))

    monkeypatch.setattr(file, "types", lost)
    assert analyse(file).growth == ()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": [1, 8]}, ["the file allows batches of one row only"]),
        ({"x": [4, 8]}, ["the file allows batches of 4 rows only; others are filled up"]),
        (
            {"x": [16, 8], "state": [2, 16, 8]},
            [
                "the file allows batches of 16 rows only; others are filled up",
                "the first axes of the inputs disagree (16 of 'x', 2 of 'state'): 16 is taken as the rows",
            ],
        ),
    ],
)
def test_a_fixed_batch_is_warned_of(tmp_path: Path, shapes: dict[str, list[int]], words: list[str]) -> None:
    """In right words for one row; where the first axes disagree, with what was taken."""
    inputs = [value(name, FLOAT, lengths) for name, lengths in shapes.items()]
    proto = model([node("Relu", ["x"], ["y"])], inputs, [value("y", FLOAT, None)])
    assert list(analyse(GraphFile(_save(tmp_path, proto))).warnings) == words


def _partly_strange(folder: Path, known: int) -> GraphFile:
    nodes = [node("Strange", ["x"], ["y"], domain="mine")]
    nodes += [node("Relu", ["x" if at == 0 else f"t{at - 1}"], [f"t{at}"]) for at in range(known)]
    outputs = [value("y", FLOAT, ["N", 8]), value(f"t{known - 1}", FLOAT, ["N", 8])]
    proto = model(nodes, outputs=outputs)
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    return GraphFile(_save(folder, proto))


@pytest.mark.parametrize(("known", "source"), [(10, "unknown"), (19, "graph"), (30, "graph")])
def test_memory_is_not_known_where_too_many_calls_are_not(tmp_path: Path, known: int, source: str) -> None:
    """More than one in twenty that nobody can cost: the plan lacks what these hold."""
    assert analyse(_partly_strange(tmp_path, known)).memory_source == source


def test_memory_is_not_known_of_an_empty_plan(tmp_path: Path) -> None:
    """A graph whose calls hold nothing that is known."""
    proto = model([node("Strange", ["x"], ["y"], domain="mine")], outputs=[value("y", FLOAT, None)])
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    assert analyse(GraphFile(_save(tmp_path, proto))).memory_source == "unknown"


def test_what_is_not_costed_is_a_share_of_calls_not_of_cost(tmp_path: Path) -> None:
    """The warning says which share is which, and bounds the cost by the bytes moved where these are known."""
    expected = (
        "1 calls (3% of the calls, an unknown share of the cost) are not costed (mine.Strange); the first: "
    )
    assert any(words.startswith(expected) for words in analyse(_partly_strange(tmp_path, 30)).warnings)
    nodes = [node("Relu", ["x"], ["y"]), node("Multinomial", ["x"], ["z"], sample_size=1)]
    proto = model(nodes, outputs=[value("y", FLOAT, ["N", 8]), value("z", TensorProto.INT32, ["N", 1])])
    (found,) = analyse(GraphFile(_save(tmp_path, proto))).warnings
    assert "(50% of the calls, at least 36% of the bytes moved, an unknown share of the cost)" in found
