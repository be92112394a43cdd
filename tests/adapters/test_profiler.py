"""A model file goes in, a profile comes out: of its graph, of trying it in a sandbox, or of the cache."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sits_dagster.adapters import profiler
from sits_dagster.adapters.profile_cache import ProfileCache
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.adapters.profiling import try_model
from sits_dagster.adapters.sandbox import run_sandboxed
from sits_dagster.errors import ConfigError, InvariantError, ModelError, SitsError, TransientError
from sits_dagster.models.analysis import GraphAnalysis
from sits_dagster.models.batching import Batching
from sits_dagster.models.codec import load
from sits_dagster.models.graph import files as graph_files
from sits_dagster.models.model import model_digest
from sits_dagster.models.profile import ModelProfile, RuntimeKey
from sits_dagster.models.run_analysis import RunAnalysis
from tests.models.onnx_files import FLOAT, constant, external, model, node, relu, value

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
# No process starts in this time: with it, a profile can only come from the cache.
NO_TIME = ProfileOptions(reading_seconds_max=0.001, running_seconds_max=0.001)
PROFILED = """
import sys
from sits_dagster.adapters.profiler import profile_model
print(profile_model(sys.argv[1]).to_json())
"""
LIMITED = """
import sys
import numpy, onnxruntime as ort
memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
arena = ort.OrtArenaCfg({"max_mem": int(sys.argv[3]), "arena_extend_strategy": 0})
ort.create_and_register_allocator(memory, arena)
options = ort.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
options.intra_op_num_threads = 1
options.enable_mem_pattern = False
options.add_session_config_entry("session.use_env_allocators", "1")
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
try:
    session.run(None, {"ids": numpy.zeros((int(sys.argv[2]), 512), numpy.int64)})
except Exception as error:
    assert "smaller than requested bytes" in str(error), error
    print("fails")
else:
    print("fits")
"""
KEY = RuntimeKey(version="1", provider="CPUExecutionProvider", options="none")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's cache alone."""
    monkeypatch.setenv("SITS_CACHE_DIR", str(tmp_path / "cache"))


def _save(path: Path, proto: onnx.ModelProto) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    onnx.save(proto, str(path))
    return path


def _bytes_classifier(scale: float = 1.0) -> onnx.ModelProto:
    """A small text classifier: bytes, an embedding, a convolution, the largest over time, a decision."""
    random = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return constant(name, random.standard_normal(shape) * 0.1 * scale)

    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("Transpose", ["e"], ["t"], perm=[0, 2, 1]),
        node("Conv", ["t", "k", "kb"], ["c"], pads=[2, 2]),
        node("Gelu", ["c"], ["g"]),
        node("GlobalMaxPool", ["g"], ["m"]),
        node("Flatten", ["m"], ["f"]),
        node("Gemm", ["f", "w", "b"], ["z"]),
        node("Softmax", ["z"], ["y"], axis=1),
    ]
    weights = [weight("table", 257, 64), weight("k", 96, 64, 5), weight("kb", 96)]
    return model(
        nodes,
        [value("ids", TensorProto.INT64, ["N", 512])],
        [value("y", FLOAT, ["N", 10])],
        [*weights, weight("w", 96, 10), weight("b", 10)],
    )


def test_a_model_is_profiled_from_end_to_end(tmp_path: Path) -> None:
    """Its tensors, costs, memory and batching are known, and nothing needs to be warned of."""
    path = _save(tmp_path / "classifier.onnx", _bytes_classifier())
    found = profile_model(path)
    assert (found.name, found.digest) == ("classifier", model_digest(path))
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.batch_axis) for tensor in found.inputs] == [
        ("ids", "int64", ("N", 512), 0)
    ]
    assert [(tensor.name, tensor.batch_axis) for tensor in found.outputs] == [("y", 0)]
    assert found.parameters == 257 * 64 + 96 * 64 * 5 + 96 + 96 * 10 + 10
    assert found.parameter_bytes == 4 * found.parameters
    convolution = next(kernel for kernel in found.kernels if kernel.operator == "Conv")
    assert convolution.flops.b == pytest.approx(2 * 512 * 96 * 64 * 5, rel=0.01)
    assert found.flops_per_row >= convolution.flops.b
    assert found.memory_source == "optimized"
    assert found.batching.verdict is Batching.INVARIANT
    assert found.runtime is not None
    assert found.warnings == ()
    assert 0 < found.batch_rows_max(GIB // 4) < found.batch_rows_max(GIB)


def _fits(model_path: Path, rows: int, limit: int) -> bool:
    """Whether ONNX Runtime runs a batch in a fresh process whose arena has this limit."""
    command = [sys.executable, "-c", LIMITED, str(model_path), str(rows), str(limit)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "fits"


def test_its_largest_batch_is_the_largest_that_runs(tmp_path: Path) -> None:
    """In an arena with the limit that the weights leave, the predicted batch runs, one more row does not."""
    found = profile_model(_save(tmp_path / "m.onnx", _bytes_classifier()))
    memory = 64 << 20
    rows = found.batch_rows_max(memory, watermark=1.0)
    assert rows > 8
    assert found.runtime is not None
    optimized = ProfileCache().optimized(found.digest, found.runtime)
    assert optimized is not None
    limit = memory - found.parameter_bytes
    assert _fits(optimized, rows, limit)
    assert not _fits(optimized, rows + 1, limit)


def test_the_second_time_no_process_is_started(tmp_path: Path) -> None:
    """A profile from the cache is equal, under the file's present name; without the cache time is up."""
    path = _save(tmp_path / "m.onnx", relu())
    first = profile_model(path)
    assert first.memory_source == "optimized"
    assert profile_model(path, NO_TIME) == first
    renamed = path.rename(tmp_path / "other.onnx")
    assert profile_model(renamed, NO_TIME).name == "other"
    with pytest.raises(ModelError, match="did not finish"):
        profile_model(renamed, replace(NO_TIME, is_cached=False))


def test_other_bytes_are_another_model(tmp_path: Path) -> None:
    """The cache follows the file's contents, not its name."""
    path = _save(tmp_path / "m.onnx", model([node("Relu", ["x"], ["y"])]))
    before = profile_model(path, ProfileOptions(is_run=False))
    _save(path, model([node("Relu", ["x"], ["t"]), node("Relu", ["t"], ["y"])]))
    after = profile_model(path, ProfileOptions(is_run=False))
    assert after.digest != before.digest
    assert (len(before.kernels), len(after.kernels)) == (1, 2)


def test_another_question_is_another_profile(tmp_path: Path) -> None:
    """Shapes that the user gives, and whether the model is tried, are part of what is kept."""
    path = _save(tmp_path / "m.onnx", model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["N", "S"])]))
    is_read = ProfileOptions(is_run=False)
    assumed = profile_model(path, is_read)
    given = profile_model(path, ProfileOptions(is_run=False, shapes={"x": ("N", 16)}))
    assert (assumed.lengths, given.lengths) == ({"S": 128}, {})
    assert assumed.memory_bytes.b == 8 * given.memory_bytes.b
    with pytest.raises(ModelError, match="did not finish"):
        profile_model(path, NO_TIME)
    assert profile_model(path, ProfileOptions(is_run=False, reading_seconds_max=1e-3)) == assumed


def test_a_model_that_is_only_read_says_so(tmp_path: Path) -> None:
    """Its memory plan is that of the file's graph, and batching stays open."""
    found = profile_model(_save(tmp_path / "m.onnx", _bytes_classifier()), ProfileOptions(is_run=False))
    assert (found.memory_source, found.batching.verdict) == ("graph", Batching.UNPROBED)
    assert (found.runtime, found.kernels_optimized) == (None, ())
    assert any("was not tried" in words for words in found.warnings)
    assert found.inputs[0].batch_axis == 0


def _endless() -> onnx.ModelProto:
    """A Loop whose condition stays true, without a number of turns."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Neg", ["a"], ["b"])],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("a", FLOAT, ["N", 8])],
        [value("on", TensorProto.BOOL, []), value("b", FLOAT, ["N", 8])],
    )
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    return model([node("Loop", ["", "yes", "x"], ["y"], body=body)], constants=[yes])


def test_a_model_without_end_is_described_in_time(tmp_path: Path) -> None:
    """It is ended at the deadline; what the file tells is there, and so is the reason for the rest."""
    expected = "did not finish in 2 seconds"
    path = _save(tmp_path / "m.onnx", _endless())
    begun = time.monotonic()
    found = profile_model(path, ProfileOptions(running_seconds_max=2))
    assert time.monotonic() - begun < 20
    assert found.runtime is None
    assert found.batching.verdict is Batching.UNPROBED
    assert any("could not be tried" in words and expected in words for words in found.warnings)


def test_what_could_not_be_tried_is_tried_again(tmp_path: Path) -> None:
    """A deadline that was too short is no property of the model: it is not kept."""
    path = _save(tmp_path / "m.onnx", relu())
    hasty = profile_model(path, ProfileOptions(running_seconds_max=1e-3))
    assert hasty.memory_source == "graph"
    assert profile_model(path).memory_source == "optimized"


def test_a_constant_that_fills_the_machine_is_counted_not_made(tmp_path: Path) -> None:
    """64 GiB in a file of a few hundred bytes: the sandbox ends the try, the weight shows in the profile."""
    elements = 1 << 34
    proto = model(
        [
            node("ConstantOfShape", ["shape"], ["c"]),
            node("ReduceMax", ["c"], ["m"], keepdims=0),
            node("Add", ["x", "m"], ["y"]),
        ],
        constants=[constant("shape", [elements], "int64")],
    )
    path = _save(tmp_path / "m.onnx", proto)
    assert path.stat().st_size < 1000
    found = profile_model(path, ProfileOptions(running_seconds_max=20, run_memory_bytes=GIB))
    assert found.memory_source == "graph"
    assert any("could not be tried" in words for words in found.warnings)


def test_an_operator_of_a_foreign_library_is_described(tmp_path: Path) -> None:
    """The runtime cannot run it here, but the rest of the file tells something."""
    proto = model([node("Odd", ["x"], ["t"], domain="mine"), node("Relu", ["x"], ["y"])])
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    found = profile_model(_save(tmp_path / "m.onnx", proto))
    assert found.runtime is None
    assert "Odd" in " ".join(found.uncosted)
    assert any("could not be tried" in words for words in found.warnings)


def test_rows_that_scale_each_other_must_be_alone(tmp_path: Path) -> None:
    """The verdict comes from running it, with a warning."""
    proto = model(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ]
    )
    found = profile_model(_save(tmp_path / "m.onnx", proto))
    assert found.batching.verdict is Batching.NOT_BATCHABLE
    assert found.batch_rows_max(GIB) == 1
    assert any("dynamic quantisation" in words for words in found.warnings)
    assert any("rows must not share a batch" in words for words in found.warnings)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Batching.INVARIANT, Batching.NOT_BATCHABLE),
        (Batching.MASK_REQUIRED, Batching.NOT_BATCHABLE),
        (Batching.UNPROBED, Batching.UNPROBED),
    ],
)
def test_quantising_over_the_batch_keeps_rows_alone(
    tmp_path: Path, verdict: Batching, expected: Batching
) -> None:
    """Made-up rows may be of one range: whatever they showed, real ones are not; and the warning is there."""
    (tmp_path / "o").mkdir()
    path = _save(tmp_path / "m.onnx", relu())
    found = try_model({"path": str(path), "optimized": str(tmp_path / "o" / "model.onnx")})
    analysis, run = load(GraphAnalysis, found["analysis"]), load(RunAnalysis, found["run"])
    profile = profiler._composed(
        replace(analysis, dynamic_quantisation={"DynamicQuantizeLinear": 1}),
        replace(run, batching=replace(run.batching, verdict=verdict)),
        "",
    )
    assert profile.batching.verdict is expected
    said = [
        text for text in profile.warnings if text.startswith("rows must not share a batch: dynamic quant")
    ]
    assert len(said) == (expected is Batching.NOT_BATCHABLE)


def test_a_fixed_batch_is_profiled_as_it_is(tmp_path: Path) -> None:
    """Four rows or none."""
    proto = model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [4, 8])], [value("y", FLOAT, [4, 8])])
    found = profile_model(_save(tmp_path / "m.onnx", proto))
    assert found.batch_rows_fixed == 4
    assert found.batch_rows_max(GIB) == 4
    assert found.batching.verdict is Batching.INVARIANT


def test_a_recurrent_model_is_never_given_no_rows(tmp_path: Path) -> None:
    """ONNX Runtime ends the process on a recurrence without rows: the try keeps away from that."""
    proto = model(
        [
            node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            node("LSTM", ["t", "w", "r"], ["", "h"], hidden_size=4),
            node("Squeeze", ["h", "zero"], ["y"]),
        ],
        [value("x", FLOAT, ["N", "S", 3])],
        [value("y", FLOAT, ["N", 4])],
        [
            constant("w", np.ones((1, 16, 3))),
            constant("r", np.ones((1, 16, 4))),
            constant("zero", [0], "int64"),
        ],
    )
    found = profile_model(_save(tmp_path / "m.onnx", proto))
    assert found.memory_source == "optimized"
    assert found.batching.verdict is Batching.INVARIANT
    assert any("padding along 'S' changes" in words for words in found.batching.evidence)


@pytest.mark.parametrize(
    "data", [b"no model at all", b"", relu().SerializeToString()[:40]], ids=["text", "empty", "cut"]
)
def test_a_broken_file_is_an_error_of_the_model(tmp_path: Path, data: bytes) -> None:
    """The message names it, and nothing is kept."""
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.onnx"):
        profile_model(path)
    assert not (tmp_path / "cache" / "profiles").exists()


def test_a_missing_file_is_an_error_of_the_model(tmp_path: Path) -> None:
    """So are data beside it."""
    with pytest.raises(ModelError, match="does not exist"):
        profile_model(tmp_path / "m.onnx")
    weight = external("w", [8], location="w.bin")
    path = _save(tmp_path / "m.onnx", model([node("Add", ["x", "w"], ["y"])], constants=[weight]))
    with pytest.raises(ModelError, match=r"w\.bin"):
        profile_model(path)


def test_a_file_that_vanishes_is_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between being found and being read."""
    path = _save(tmp_path / "m.onnx", relu())
    monkeypatch.setattr(profiler, "files_digest", lambda _: path.unlink() or "d")
    with pytest.raises(ModelError, match=r"m\.onnx.*cannot be read"):
        profile_model(path)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Shapes and values that were computed are as good as those that were written."""
    path = _save(tmp_path / "m.onnx", model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["N", "S"])]))
    odd = ProfileOptions(
        shapes={"x": (np.str_("N"), np.int64(16))}, values={"x": np.float32(0.5), "n": np.array(3)}
    )
    plain = ProfileOptions(shapes={"x": ("N", 16)}, values={"x": 0.5, "n": 3})
    assert (odd.shapes, odd.values) == (plain.shapes, plain.values)
    assert profile_model(path, odd) == profile_model(path, replace(NO_TIME, **_given(plain)))


def _given(options: ProfileOptions) -> dict[str, Any]:
    return {"shapes": options.shapes, "values": options.values}


@pytest.mark.parametrize(
    "options",
    [
        {"shapes": {"x": ("N", 1.5)}},
        {"shapes": {"x": 8}},
        {"shapes": {"x": ("N", None)}},
        {"values": {"x": "8"}},
        {"values": {"x": [1, 2]}},
        {"values": {"x": None}},
    ],
)
def test_what_is_no_number_is_the_users_error(options: dict[str, Any]) -> None:
    """It is found where it is written, and the input is named."""
    with pytest.raises(ConfigError, match="'x'"):
        ProfileOptions(**options)


def test_files_beside_the_model_are_found_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process never parses a file that somebody else made; it counts and hashes what is named."""
    weight = external("w", [8], location="w.bin")
    path = _save(tmp_path / "m.onnx", model([node("Add", ["x", "w"], ["y"])], constants=[weight]))
    (tmp_path / "w.bin").write_bytes(np.ones(8, np.float32).tobytes())
    digest = model_digest(path)
    monkeypatch.setattr(graph_files, "load_proto", None)
    found = profile_model(path)
    assert (found.digest, found.file_bytes) == (digest, path.stat().st_size + 32)


def test_a_file_that_grows_when_it_is_parsed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty nodes take a hundred times their size: the child has no room for them, and says so."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x3a\x80\x80\x80\x02" + b"\x0a\x00" * (2 << 20) + b"\x12\x08location")
    monkeypatch.setattr(graph_files, "load_proto", None)
    with pytest.raises(ModelError, match=r"profiling:list_files|Error parsing"):
        profile_model(path, ProfileOptions(is_run=False, read_memory_bytes=240 << 20))


@pytest.mark.parametrize("error", [TransientError("busy", retry_after_seconds=1), InvariantError("a fault")])
def test_what_is_no_fault_of_the_model_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: SitsError
) -> None:
    """A child that could not be started, or a fault of this package, is raised."""

    def fail(target: str, *arguments: Any, **options: Any) -> Any:
        if target.endswith("try_model"):
            raise error
        return run_sandboxed(target, *arguments, **options)

    monkeypatch.setattr(profiler, "run_sandboxed", fail)
    with pytest.raises(type(error), match=error.message):
        profile_model(_save(tmp_path / "m.onnx", relu()))


@pytest.mark.parametrize(("name", "value"), [("cpu_name", lambda: "another"), ("READERS", ("pip",))])
def test_another_machine_or_version_is_another_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """A cache in a shared folder holds for the CPU and the versions that found what is in it."""
    path = _save(tmp_path / "m.onnx", relu())
    profile_model(path)
    monkeypatch.setattr(profiler, name, value)
    with pytest.raises(ModelError, match="did not finish"):
        profile_model(path, NO_TIME)


def test_a_shape_that_contradicts_the_file_is_the_users_error(tmp_path: Path) -> None:
    """It comes out of the sandbox as what it was."""
    path = _save(tmp_path / "m.onnx", relu())
    with pytest.raises(ConfigError, match="fixed at 8"):
        profile_model(path, ProfileOptions(shapes={"x": ("N", 9)}))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """The profile is made each time."""
    (tmp_path / "file").write_text("in the way")
    cache = ProfileCache(tmp_path / "file" / "cache")
    path = _save(tmp_path / "m.onnx", relu())
    assert profile_model(path, cache=cache).memory_source == "optimized"
    assert cache.find(model_digest(path), {}) is None
    assert cache.keep_optimized("d", KEY, tmp_path) is None


def test_what_is_damaged_in_the_cache_is_made_again(tmp_path: Path) -> None:
    """Half a file, or one of another version, is as good as none."""
    path = _save(tmp_path / "m.onnx", relu())
    options = ProfileOptions(is_run=False)
    first = profile_model(path, options)
    (kept,) = (tmp_path / "cache" / "profiles").iterdir()
    whole = kept.read_text()
    for text in (whole[:100], "", "[" * 100_000, whole.replace('"schema":', '"other":1,"schema":9')):
        kept.write_text(text)
        assert profile_model(path, options) == first
        assert json.loads(kept.read_text()) == json.loads(whole)


def test_two_processes_may_profile_one_model_at_once(tmp_path: Path) -> None:
    """Both end well, what they keep is whole, and no half-written file is left."""
    path = _save(tmp_path / "m.onnx", _bytes_classifier())
    command = [sys.executable, "-c", PROFILED, str(path)]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    said = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    profiles = [ModelProfile.from_json(out) for out, _ in said]
    assert profiles[0].memory_plan.peak() == profiles[1].memory_plan.peak()
    assert profile_model(path, NO_TIME) in profiles
    assert len(list((tmp_path / "cache" / "profiles").iterdir())) == 1
    (kept,) = (tmp_path / "cache" / "optimized").iterdir()
    assert (kept / "model.onnx").is_file()
