"""Model repositories as Triton lays them out, read from disk with configurations as people write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sits_dagster.adapters import triton
from sits_dagster.adapters.triton import read_triton_repository
from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.model import model_files
from sits_dagster.models.triton import (
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    InstanceKind,
    TritonModel,
    TritonTensor,
    TritonVersion,
    repository_warnings,
)

pytest.importorskip("tritonclient")

CLASSIFIER = """
# A comment, as Triton's own examples have them.
name: "classifier"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] },
  { name: "mask" data_type: TYPE_BOOL dims: [ 1 ] reshape { shape: [ ] } optional: true }
]
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


def _save_onnx(path: Path, *, external: bool = False) -> Path:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 400])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 400])],
        [numpy_helper.from_array(np.ones(400, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"save_as_external_data": True, "location": "weights.bin"} if external else {}
    onnx.save(model, str(path), **options)
    return path


def _add(root: Path, name: str, config: str | None, *versions: str, file: str = "model.onnx") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    for version in versions:
        _save_onnx(folder / version / file)
    return folder


def _read_one(root: Path, config: str | None, *versions: str, **options: str) -> TritonModel:
    _add(root, "m", config, *versions, **options)
    (model,) = read_triton_repository(root).models
    return model


def test_a_model_is_read_as_it_is_declared(tmp_path: Path) -> None:
    folder = _add(tmp_path, "classifier", CLASSIFIER, "1")
    repository = read_triton_repository(tmp_path)
    assert repository.path == tmp_path
    assert repository.notes == ()
    assert repository_warnings(repository) == ()
    assert repository.models == (
        TritonModel(
            name="classifier",
            folder="classifier",
            platform="onnxruntime_onnx",
            backend="onnxruntime",
            filename="model.onnx",
            max_batch_size=8,
            inputs=(
                TritonTensor(name="x", dtype="float32", dims=(3, None)),
                TritonTensor(name="mask", dtype="bool", dims=(1,), reshape=(), optional=True),
            ),
            outputs=(TritonTensor(name="y", dtype="object", dims=(1,)),),
            version_numbers=(1,),
            versions=(TritonVersion(number=1, path=folder / "1" / "model.onnx"),),
        ),
    )


def test_the_folder_of_one_model_is_a_repository_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _add(tmp_path, "classifier", CLASSIFIER, "1")
    (model,) = read_triton_repository(folder).models
    assert (model.name, model.folder) == ("classifier", "classifier")
    monkeypatch.chdir(folder)
    (here,) = read_triton_repository(Path()).models
    assert (here.folder, here.versions[0].path) == ("classifier", Path("1/model.onnx"))


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", [10]),
        ("version_policy { latest { num_versions: 2 } }", [3, 10]),
        ("version_policy: { specific: { versions: [ 1, 3 ] } }", [1, 3]),
        ("version_policy { specific { versions: 2 versions: 3 } }", [3]),
        ("version_policy { all { } }", [1, 3, 10]),
    ],
)
def test_the_policy_chooses_among_the_versions(tmp_path: Path, policy: str, served: list[int]) -> None:
    model = _read_one(tmp_path, f'backend: "onnxruntime" {policy}', "1", "3", "10", "draft", "02")
    assert model.version_numbers == (1, 3, 10)
    assert [(version.number, version.path) for version in model.versions] == [
        (number, tmp_path / "m" / str(number) / "model.onnx") for number in served
    ]


def test_an_ensemble_names_its_steps(tmp_path: Path) -> None:
    tensors = """
    input { name: "x" data_type: TYPE_FP32 dims: 400 }
    output { name: "y" data_type: TYPE_FP32 dims: 400 }"""
    part = f'backend: "onnxruntime" max_batch_size: 8 {tensors}'
    for name in ("first", "second"):
        _add(tmp_path, name, part, "1")
    steps = """
    ensemble_scheduling { step [
      { model_name: "first" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },
      { model_name: "second" model_version: 1
        input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
    ] }"""
    folder = _add(tmp_path, "both", f'platform: "ensemble" max_batch_size: 8 {tensors} {steps}')
    (folder / "1").mkdir()
    repository = read_triton_repository(tmp_path)
    assert repository_warnings(repository) == ()
    assert [model.name for model in repository.models] == ["both", "first", "second"]
    ensemble = repository.models[0]
    assert ensemble.is_ensemble
    assert ensemble.versions == (TritonVersion(number=1, path=None),)
    assert ensemble.steps == (
        EnsembleStep(model="first", version=None, inputs={"x": "x"}, outputs={"y": "between"}),
        EnsembleStep(model="second", version=1, inputs={"x": "between"}, outputs={"y": "y"}),
    )


def test_instances_have_the_counts_that_triton_would_fill_in(tmp_path: Path) -> None:
    config = """
    backend: "onnxruntime"
    instance_group [
      { name: "fast" kind: KIND_GPU count: 2 gpus: [ 0, 1 ] },
      { kind: KIND_CPU }, { }, { kind: KIND_MODEL count: 3 }
    ]"""
    assert _read_one(tmp_path, config, "1").instance_groups == (
        InstanceGroup(name="fast", kind=InstanceKind.GPU, count=2, gpus=(0, 1)),
        InstanceGroup(kind=InstanceKind.CPU, count=2),
        InstanceGroup(kind=InstanceKind.AUTO, count=1),
        InstanceGroup(kind=InstanceKind.MODEL, count=3),
    )


@pytest.mark.parametrize(
    ("text", "batching", "in_sequence"),
    [
        ("", None, False),
        ("dynamic_batching { }", DynamicBatching(), False),
        (
            "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }",
            DynamicBatching(preferred_batch_sizes=(4, 8), max_queue_delay_microseconds=100),
            False,
        ),
        ("sequence_batching { max_sequence_idle_microseconds: 5 }", None, True),
    ],
)
def test_batching_is_told_apart(
    tmp_path: Path, text: str, batching: DynamicBatching | None, *, in_sequence: bool
) -> None:
    model = _read_one(tmp_path, f'backend: "onnxruntime" max_batch_size: 8 {text}', "1")
    assert (model.dynamic_batching, model.sequence_batching) == (batching, in_sequence)


def test_a_model_of_another_backend_is_listed_without_a_file(tmp_path: Path) -> None:
    folder = _add(tmp_path, "tokens", 'backend: "python"')
    (folder / "1").mkdir()
    (folder / "1" / "model.py").touch()
    (model,) = read_triton_repository(tmp_path).models
    assert (model.backend, model.filename, model.is_onnx) == ("python", "model.py", False)
    assert model.versions == (TritonVersion(number=1, path=None),)


def test_a_model_without_configuration_is_known_by_its_file(tmp_path: Path) -> None:
    model = _read_one(tmp_path, None, "1", "2")
    assert (model.name, model.backend, model.platform) == ("m", "onnxruntime", "onnxruntime_onnx")
    assert model.is_completed
    assert [version.number for version in model.versions] == [2]
    (alone,) = read_triton_repository(tmp_path / "m").models
    assert alone == model


def test_folders_that_are_no_models_are_noted_or_hidden(tmp_path: Path) -> None:
    _add(tmp_path, "m", None, "1")
    (tmp_path / "README.md").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / "scripts").mkdir()
    repository = read_triton_repository(tmp_path)
    assert [model.name for model in repository.models] == ["m"]
    (note,) = repository.notes
    assert "scripts' has neither config.pbtxt nor" in note


def test_an_empty_repository_has_no_models(tmp_path: Path) -> None:
    assert read_triton_repository(tmp_path).models == ()


def test_a_file_may_have_another_name(tmp_path: Path) -> None:
    config = 'platform: "onnxruntime_onnx" default_model_filename: "v/net.onnx"'
    model = _read_one(tmp_path, config, "1", file="v/net.onnx")
    assert model.versions[0].path == tmp_path / "m" / "1" / "v" / "net.onnx"


def test_a_model_of_several_files_lies_in_a_folder(tmp_path: Path) -> None:
    folder = _add(tmp_path, "large", 'backend: "onnxruntime"')
    file = _save_onnx(folder / "1" / "model.onnx" / "model.onnx", external=True)
    (model,) = read_triton_repository(tmp_path).models
    (version,) = model.versions
    assert version.path == file
    assert [part.name for part in model_files(file)] == ["model.onnx", "weights.bin"]


def test_a_missing_file_is_a_warning_and_not_an_error(tmp_path: Path) -> None:
    (_add(tmp_path, "m", 'backend: "onnxruntime"') / "1").mkdir()
    repository = read_triton_repository(tmp_path)
    assert repository.models[0].versions == (TritonVersion(number=1, path=None),)
    assert any("no file 'model.onnx' in version 1" in text for text in repository_warnings(repository))


def test_fields_of_a_newer_triton_are_named_and_passed_over(tmp_path: Path) -> None:
    config = """
    backend: "onnxruntime"
    shiny { level: [ { dims: 1 }, { dims: 2 } ] name: "name {" }
    input [ { name: "x" glow: TYPE_FP32 dims: [ 4 ] }, { name: "z" tint < deep: 1 > } ]
    parameters { key: "k" value { string_value: "v" } }
    sparkle: [ 1, 2 ]
    max_batch_size: 4"""
    _add(tmp_path, "m", config, "1")
    repository = read_triton_repository(tmp_path)
    (note,) = repository.notes
    assert note.endswith("passed over: input.glow, input.tint, shiny, sparkle.")
    assert repository.models[0].max_batch_size == 4
    assert [tensor.name for tensor in repository.models[0].inputs] == ["x", "z"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('name: "m"\nmax_batch_size: eight\n', r"config\.pbtxt:2: .*eight"),
        (
            "input [\n{ name: 'x' data_type: TYPE_FLOAT }\n]",
            r"config\.pbtxt:2: .*TYPE_FLOAT",
        ),
        ('name: "m', r"config\.pbtxt:1: "),
        ('{"name": "m"}', r"config\.pbtxt:1: "),
        ("name: '\\377'", r"config\.pbtxt:1: "),
        ("a {" * 5000, "nested too deeply"),
        ('backend: "onnxruntime" default_model_filename: "../2/model.onnx"', "out of its version folder"),
        ('backend: "onnxruntime" default_model_filename: "/etc/passwd"', "out of its version folder"),
        ('backend: "onnxruntime" default_model_filename: "a\\000b"', "no usable default_model_filename"),
        (f'backend: "onnxruntime" default_model_filename: "{"a" * 300}"', "cannot be looked at"),
        (f'backend: "onnxruntime" default_model_filename: "{"a/" * 90_000}b"', "no usable default"),
    ],
)
def test_a_bad_configuration_says_where_and_what_to_do(tmp_path: Path, config: str, words: str) -> None:
    _add(tmp_path, "m", config, "1", "2")
    with pytest.raises(ModelError, match=rf"(?s){words}.*Hint: ") as caught:
        read_triton_repository(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"#" * (triton.CONFIG_BYTES_MAX + 1), "larger than 1048576 bytes"),
        (b'name: "m"\n# \xe9t\xe9\n', "not UTF-8: byte 0xe9 in line 2"),
    ],
    ids=["too large", "not text"],
)
def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    _add(tmp_path, "m", "").joinpath("config.pbtxt").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        read_triton_repository(tmp_path)


def test_a_configuration_of_the_greatest_size_is_read(tmp_path: Path) -> None:
    config = 'backend: "python" #'
    model = _read_one(tmp_path, config + "x" * (triton.CONFIG_BYTES_MAX - len(config)))
    assert model.backend == "python"


def test_a_configuration_must_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "m" / "config.pbtxt").mkdir(parents=True)
    with pytest.raises(ModelError, match="is not a file"):
        read_triton_repository(tmp_path)


def test_a_pipe_in_place_of_a_configuration_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "config.pbtxt")
    with pytest.raises(ModelError, match="is not a file"):
        read_triton_repository(tmp_path)


@pytest.mark.parametrize(
    "link", ["m", "m/config.pbtxt", "m/1", "m/1/model.onnx", "m/1/model.onnx/model.onnx"]
)
def test_a_link_out_of_the_repository_is_refused(tmp_path: Path, link: str) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    _add(outside, "m", 'backend: "onnxruntime"')
    _save_onnx(outside / "m" / "1" / "model.onnx" / "model.onnx")
    folder = _add(root, "m", 'backend: "onnxruntime"')
    _save_onnx(folder / "1" / "model.onnx" / "model.onnx")
    (root / link).rename(tmp_path / "aside")
    (root / link).symlink_to(outside / link)
    with pytest.raises(ModelError, match="leads out of the repository"):
        read_triton_repository(root)


def test_links_within_the_repository_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "models"
    file = _add(root, "m", None, "1") / "1" / "model.onnx"
    (root / "m" / "2").mkdir()
    (root / "m" / "2" / "model.onnx").symlink_to(file)
    (tmp_path / "link").symlink_to(root)
    (model,) = read_triton_repository(tmp_path / "link").models
    assert model.versions[0].path == tmp_path / "link" / "m" / "2" / "model.onnx"


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").symlink_to("config.pbtxt")
    with pytest.raises(ModelError, match=r"config\.pbtxt"):
        read_triton_repository(tmp_path)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_repository_must_be_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{name}' is not a folder.*Hint"):
        read_triton_repository(tmp_path / name)


def test_the_number_of_models_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MODELS_MAX", 2)
    for name in ("a", "b"):
        _add(tmp_path, name, 'backend: "python"')
    assert len(read_triton_repository(tmp_path).models) == 2
    _add(tmp_path, "c", 'backend: "python"')
    with pytest.raises(ConfigError, match="more than 2 models"):
        read_triton_repository(tmp_path)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (None, r"needs tritonclient.*pip install \"sits-dagster\[triton\]\""),
        ("raise RuntimeError('grpcio is too old')", "grpcio is too old.*Hint: .*--upgrade"),
    ],
    ids=["missing", "unfit"],
)
def test_a_client_that_cannot_be_imported_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None, words: str
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "tritonclient"]:
        monkeypatch.delitem(sys.modules, module)
    if fault is None:
        monkeypatch.setitem(sys.modules, "tritonclient", None)
    else:
        (tmp_path / "tritonclient").mkdir()
        (tmp_path / "tritonclient" / "__init__.py").write_text(fault)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        read_triton_repository(tmp_path)


def test_the_adapter_loads_without_the_client() -> None:
    code = "import sys, sits_dagster.adapters.triton; sys.exit('tritonclient' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
