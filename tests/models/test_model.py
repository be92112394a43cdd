"""Padding lengths, and the digest that names a model's contents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.graph.files import external_data_files
from sits_dagster.models.model import OnnxModel, Padding, files_bytes, files_digest, model_digest, model_files

edges = st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True).map(lambda e: tuple(sorted(e)))


@given(length=st.integers(0, 500), multiple=st.integers(1, 60))
def test_a_multiple_holds_the_row_with_less_than_one_step_to_spare(length: int, multiple: int) -> None:
    """Padding never cuts a row and never wastes a whole step."""
    padded = Padding(input="x", multiple=multiple).length(length)
    assert padded >= max(length, multiple)
    assert padded % multiple == 0
    assert padded - length < multiple or length == 0


@given(length=st.integers(0, 500), edges=edges)
def test_edges_hold_the_row_in_the_first_bucket_that_fits(length: int, edges: tuple[int, ...]) -> None:
    """A row goes to the smallest edge that holds it; beyond the last one, to a multiple of that."""
    padded = Padding(input="x", edges=edges).length(length)
    assert padded >= length
    if length <= edges[-1]:
        assert padded == min(edge for edge in edges if edge >= length)
    else:
        assert padded % edges[-1] == 0
        assert padded - length < edges[-1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multiple": 2, "edges": (2,)},
        {"multiple": -1},
        {"edges": (3, 2)},
        {"edges": (2, 2)},
        {"edges": (0, 2)},
    ],
)
def test_padding_says_what_is_wrong_with_it(options: dict[str, object]) -> None:
    """A mistake in the padding is found where it is written."""
    with pytest.raises(ConfigError, match="'pixels'"):
        Padding(input="pixels", **options)


def test_a_model_needs_a_path() -> None:
    """An empty path is no model."""
    with pytest.raises(ConfigError, match="path"):
        OnnxModel("")


def _save(path: Path, *, external: str | None = None, value: float = 1.0) -> Path:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.full((400,), value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 400])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 400])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    options = {"save_as_external_data": True, "location": external} if external else {}
    onnx.save(model, str(path), **options)
    return path


def test_the_digest_follows_the_weights(tmp_path: Path) -> None:
    """Other weights are another model; a copy of the file is the same one."""
    (tmp_path / "copy").mkdir()
    first, copy = _save(tmp_path / "m.onnx"), _save(tmp_path / "copy" / "m.onnx")
    assert model_digest(first) == model_digest(copy)
    _save(copy, value=2.0)
    assert model_digest(first) != model_digest(copy)


def test_the_digest_covers_weights_beside_the_file(tmp_path: Path) -> None:
    """Weights that are stored in a second file count, although the .onnx file stays the same."""
    path = _save(tmp_path / "m.onnx", external="w.bin")
    assert external_data_files(path) == ((tmp_path / "w.bin").resolve(),)
    before, graph = model_digest(path), path.read_bytes()
    (tmp_path / "w.bin").unlink()
    _save(path, external="w.bin", value=2.0)
    assert path.read_bytes() == graph
    assert model_digest(path) != before


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """A model that was copied without its data file says which one."""
    path = _save(tmp_path / "m.onnx", external="w.bin")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"'w\.bin', which is missing"):
        model_digest(path)


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    """A model file cannot make a run read any file of the machine."""
    folder = tmp_path / "inside"
    folder.mkdir()
    path = _save(folder / "m.onnx", external="w.bin")
    (tmp_path / "x.").write_bytes((folder / "w.bin").read_bytes())
    path.write_bytes(path.read_bytes().replace(b"w.bin", b"../x."))
    with pytest.raises(ModelError, match="outside of its folder"):
        external_data_files(path)


@pytest.mark.parametrize("part", ["../x.bin", "folder", "none.bin", "link"])
def test_what_somebody_found_is_looked_at_again(tmp_path: Path, part: str) -> None:
    """Files are hashed here: one elsewhere, or that is no plain one, is refused whoever named it."""
    folder = tmp_path / "inside"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "x.bin").write_bytes(b"x")
    (folder / "link").symlink_to(tmp_path / "x.bin")
    path = _save(folder / "m.onnx", external="w.bin")
    assert model_files(path, lambda found: [found.with_name("w.bin")]) == (path, folder / "w.bin")
    with pytest.raises(ModelError, match="no plain file in its folder"):
        model_files(path, lambda _: [folder / part])


def test_files_are_hashed_and_counted_together(tmp_path: Path) -> None:
    """As the digest of the model is; one that is gone meanwhile is named."""
    path = _save(tmp_path / "m.onnx", external="w.bin")
    files = model_files(path)
    assert files_digest(files) == model_digest(path)
    assert files_bytes(files) == path.stat().st_size + 1600
    (tmp_path / "w.bin").unlink()
    for read in (files_digest, files_bytes):
        with pytest.raises(ModelError, match=r"w\.bin.*cannot be read"):
            read(files)


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_no_model_has_no_digest(tmp_path: Path, content: bytes | None) -> None:
    """A wrong path ends with its name and the remedy."""
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx.*Hint: (check the path|export)"):
        model_digest(path)


def test_a_file_that_only_looks_like_a_model_is_named(tmp_path: Path) -> None:
    """Bytes that are no graph are a model error, not an error of protobuf."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"location: not a model")
    with pytest.raises(ModelError, match="is not an ONNX model"):
        model_digest(path)
