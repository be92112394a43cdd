"""The hostile models are what their names say, and random damage can be done again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import ModelProto

from tests.models import fuzz, hostile
from tests.models.hostile import CASES, hostile_models
from tests.models.hostile_graphs import CHAIN, choices_in_choices
from tests.models.onnx_files import Built, constant, field, model, node, relu, varint

# What onnx itself must read: all but those that are no models at all.
READABLE = [name for name, (expectation, _) in CASES.items() if expectation == "profile"]
# Without the library of a foreign operator ONNX Runtime does not load it; the other takes seconds to run.
NOT_RUN = {"operator_of_a_domain_that_nobody_knows", "external_data_of_two_gigabytes"}
# Twice the same bytes would need the same folder: these name it.
NAMING_THEIR_FOLDER = {"external_data_absolute"}
SEEDS = range(300)


def _write(folder: Path, name: str) -> Path:
    ((_, path, _),) = hostile_models(folder, [name])
    return path


def _convolution() -> bytes:
    _, builder = CASES["convolution"]
    return _data(builder(Path()))


def _data(built: Built) -> bytes:
    assert isinstance(built, ModelProto)
    return built.SerializeToString()


SAMPLES = {
    "convolution": _convolution(),
    "choices": _data(choices_in_choices(Path())),
    "no nodes": model([]).SerializeToString(),
    "text": b"no model at all",
    "nothing": b"",
}


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_written_the_same_way_twice(name: str, tmp_path: Path) -> None:
    """A failure can be looked at again, and no case takes much room on the disk."""
    paths = [_write(tmp_path / turn, name) for turn in ("one", "two")]
    regular = [path for path in paths if path.is_file()]
    if all(path.stat().st_size < 2**30 for path in regular):
        digests = {hashlib.sha256(path.read_bytes()).digest() for path in regular}
        assert len(digests) <= 1 or name in NAMING_THEIR_FOLDER
    assert sum(file.lstat().st_blocks for file in tmp_path.rglob("*")) * 512 < 64 * 2**20


def test_there_is_enough_of_every_kind() -> None:
    """None is lost when the files of cases are put together under their names."""
    parts = (hostile.hostile_files, hostile.hostile_graphs, hostile.hostile_values)
    assert len(CASES) == sum(len(part.CASES) for part in parts) >= 60
    assert {expectation for expectation, _ in CASES.values()} == {"profile", "error", "either"}


def test_cases_are_written_one_by_one(tmp_path: Path) -> None:
    """Whoever reads one and removes it never holds them all."""
    models = hostile_models(tmp_path)
    next(models)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", READABLE)
def test_what_must_give_a_profile_runs(name: str, tmp_path: Path) -> None:
    """ONNX Runtime takes two rows of every model that a profile is demanded of."""
    path = _write(tmp_path, name)
    onnx.load(str(path), load_external_data=False)
    if name in NOT_RUN:
        return
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(bool)": "?", "tensor(string)": object}
    feeds = {
        value.name: np.ones([n if isinstance(n, int) else 2 for n in value.shape], kinds[value.type])
        for value in session.get_inputs()
    }
    assert all(output.size > 0 for output in session.run(None, feeds))


def _depth(graph: onnx.GraphProto) -> int:
    first = graph.node[0]
    branches = [found for found in first.attribute if found.name == "then_branch"]
    assert all(branch.type == onnx.AttributeProto.GRAPH for branch in branches)
    return 1 + _depth(branches[0].g) if branches else 0


def test_nesting_is_what_its_name_says(tmp_path: Path) -> None:
    """The bytes made by hand are a model: only the depth of the deeper ones is refused."""
    assert _depth(onnx.load(str(_write(tmp_path, "choices_in_choices"))).graph) == 29
    by_hand = onnx.load_from_string(hostile.hostile_graphs.nested_by_hand(20))
    assert _depth(by_hand.graph) == 20
    assert [value.name for value in by_hand.graph.output] == [by_hand.graph.node[0].output[0]]
    with pytest.raises(DecodeError):
        onnx.load_from_string(_write(tmp_path, "choices_in_120_choices").read_bytes())


def test_sizes_are_what_their_names_say(tmp_path: Path) -> None:
    assert len(onnx.load(str(_write(tmp_path, "chain_of_100_000_nodes"))).graph.node) == CHAIN
    large = _write(tmp_path, "external_data_of_two_gigabytes")
    assert large.with_name("w.bin").stat().st_size > 2**31


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**63])
def test_numbers_are_written_as_protobuf_does(number: int) -> None:
    assert onnx.TensorProto(dims=[number % 2**63]).SerializeToString() == b"\x08" + varint(number % 2**63)


def test_fields_are_written_as_protobuf_does() -> None:
    assert onnx.TensorProto(name="n" * 200).SerializeToString() == field(8, b"n" * 200)


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_same_seed_does_the_same_damage(sample: str) -> None:
    """Always some damage, never another one, and many different ones."""
    data = SAMPLES[sample]
    found = [fuzz.mutate(data, seed) for seed in SEEDS]
    assert found == [fuzz.mutate(data, seed) for seed in SEEDS]
    assert data not in found
    assert len(set(found)) > len(SEEDS) * 0.5


def test_most_damages_leave_a_readable_model() -> None:
    """Most seeds get past the first look at the file, and some do not."""
    readable = 0
    for seed in SEEDS:
        try:
            onnx.load_from_string(fuzz.mutate(SAMPLES["convolution"], seed))
        except DecodeError:
            continue
        readable += 1
    assert 0.7 < readable / len(SEEDS) < 1


@pytest.mark.parametrize("damage", fuzz.STRUCTURE_DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_of_the_structure_does_something(damage: fuzz.Structured) -> None:
    """None is dead, and none fails on an empty model."""
    whole = _busy()
    damaged = set()
    for seed in range(40):
        found = ModelProto.FromString(whole)
        damage(found, fuzz.Random(seed))
        damaged.add(found.SerializeToString(deterministic=True))
    assert len(damaged - {whole}) > 0
    damage(ModelProto(), fuzz.Random(0))


@pytest.mark.parametrize("damage", fuzz.BYTE_DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_of_bytes_does_something(damage: fuzz.Damage) -> None:
    data = relu().SerializeToString()
    assert len({damage(data, fuzz.Random(seed)) for seed in range(40)} - {data}) > 10
    damage(b"", fuzz.Random(0))


def test_damage_does_not_grow_without_limit() -> None:
    """Whatever is repeated stays far below what a test can hold."""
    data = _busy(weight_bytes=2**20)
    assert max(len(fuzz.mutate(data, seed)) for seed in range(100)) < 32 * len(data)


def _busy(weight_bytes: int = 32) -> bytes:
    """A model that has one of everything that can be damaged."""
    nodes = [
        node("Pad", ["x", "pads"], ["a"], mode="constant"),
        node("Concat", ["a", "w"], ["b"], axis=0),
        node("ReduceMax", ["b"], ["c"], keepdims=0),
        node("Transpose", ["x"], ["d"], perm=[0, 1]),
        node("LeakyRelu", ["d"], ["e"], alpha=0.5),
        node("Add", ["e", "c"], ["y"]),
    ]
    constants = [constant("pads", [0, 0, 0, 0], "int64"), constant("w", np.ones((weight_bytes // 32, 8)))]
    return model(nodes, constants=constants).SerializeToString(deterministic=True)
