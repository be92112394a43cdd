"""What is predicted of memory is what ONNX Runtime takes, and what a call showed is read rightly."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sits_dagster.adapters import onnx_trace
from sits_dagster.adapters.onnx_trace import TimedSession, TracedSession, cpu_name, optimize, runtime_key
from sits_dagster.adapters.profiling import try_model
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import DeviceOutOfMemoryError, ModelError
from sits_dagster.models.arena import ArenaPolicy
from sits_dagster.models.batching import Batching
from sits_dagster.models.codec import load
from sits_dagster.models.graph.shapes import GraphFile
from sits_dagster.models.graph.structure import TensorType
from sits_dagster.models.run_analysis import RunAnalysis, arena_bytes
from sits_dagster.models.samples import sample_batch
from tests.models.onnx_files import FLOAT, constant, model, node, relu, value

BATCHES = (1, 2, 3, 5, 8, 13, 32)
STEPS, HIDDEN = 50, 96
CPU = Device(
    uuid="CPU-0",
    kind=DeviceKind.CPU,
    ordinal=0,
    name="a CPU",
    memory_bytes_total=1 << 34,
    memory_bytes_limit=1 << 34,
)
RECURRENT = {"LSTM": (4, 8), "GRU": (3, 6), "RNN": (1, 2)}  # gates of the weights, and of the biases


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    return constant(name, np.random.default_rng(len(name)).standard_normal(shape) * 0.05)


def _row(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return value(name, FLOAT, ["N", *shape])


def _perceptron() -> onnx.ModelProto:
    """Four layers; the activations write over what they read."""
    widths = (256, 1024, 768, 2048, 64)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    last = "x"
    for layer, (inner, outer) in enumerate(itertools.pairwise(widths)):
        is_last = layer == len(widths) - 2
        nodes += [
            node("MatMul", [last, f"w{layer}"], [f"m{layer}"]),
            node("Add", [f"m{layer}", f"b{layer}"], ["y" if is_last else f"a{layer}"]),
        ]
        if not is_last:
            nodes.append(node("Relu", [f"a{layer}"], [f"r{layer}"]))
        weights += [_weight(f"w{layer}", inner, outer), _weight(f"b{layer}", outer)]
        last = f"r{layer}"
    return model(nodes, [_row("x", 32, 256)], [_row("y", 32, 64)], weights)


def _convolutional() -> onnx.ModelProto:
    """A residual sum and a concatenation, in the blocked layout that the runtime makes of it."""
    nodes = [
        node("Conv", ["x", "k0"], ["c0"], pads=[1, 1, 1, 1]),
        node("Relu", ["c0"], ["r0"]),
        node("Conv", ["r0", "k1"], ["c1"], pads=[1, 1, 1, 1]),
        node("Sigmoid", ["c1"], ["s1"]),
        node("Add", ["s1", "r0"], ["a1"]),
        node("Conv", ["a1", "k2"], ["c2"]),
        node("Concat", ["c2", "a1"], ["both"], axis=1),
        node("MaxPool", ["both"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["p"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "w", "b"], ["z"]),
        node("Softmax", ["z"], ["y"], axis=1),
    ]
    weights = [_weight("k0", 16, 3, 3, 3), _weight("k1", 16, 16, 3, 3), _weight("k2", 24, 16, 1, 1)]
    weights += [_weight("w", 40, 10), _weight("b", 10)]
    return model(nodes, [_row("x", 3, 48, 48)], [_row("y", 10)], weights)


def _images_of_any_size(*, is_convolved: bool) -> onnx.ModelProto:
    """Of free heights and widths the runtime knows nothing behind a pooling: nothing is reused there."""
    first = node("Conv", ["x", "k"], ["c"], strides=[3, 3]) if is_convolved else node("Neg", ["x"], ["c"])
    nodes = [
        first,
        node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2]),
        node("Exp", ["p"], ["e"]),
        node("Concat", ["e", "e", "e", "e"], ["b"], axis=1),
        node("Neg", ["b"], ["n"]),
        node("Split", ["n"], ["s0", "s1", "s2", "s3"], num_outputs=4, axis=1),
        node("Sum", ["s0", "s1", "s2", "s3"], ["s"]),
        node("GlobalAveragePool", ["s"], ["y"]),
    ]
    channels = 6 if is_convolved else 3
    return model(nodes, [_row("x", 3, "H", "W")], [_row("y", channels, 1, 1)], [_weight("k", 6, 3, 3, 3)])


def _attention() -> onnx.ModelProto:
    """One block with a residual and a feed-forward part; the runtime fuses some of it."""
    nodes: list[onnx.NodeProto] = []
    for head in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{head}"], [f"{head}0"]),
            node("Reshape", [f"{head}0", "heads"], [f"{head}1"]),
            node("Transpose", [f"{head}1"], [f"{head}2"], perm=[0, 2, 3, 1] if head == "k" else [0, 2, 1, 3]),
        ]
    nodes += [
        node("MatMul", ["q2", "k2"], ["s0"]),
        node("Mul", ["s0", "scale"], ["s1"]),
        node("Softmax", ["s1"], ["s2"], axis=-1),
        node("MatMul", ["s2", "v2"], ["o0"]),
        node("Transpose", ["o0"], ["o1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o1", "flat"], ["o2"]),
        node("MatMul", ["o2", "wo"], ["o3"]),
        node("Add", ["o3", "x"], ["o4"]),
        node("LayerNormalization", ["o4", "g", "b"], ["o5"], axis=-1),
        node("MatMul", ["o5", "wf"], ["f0"]),
        node("Erf", ["f0"], ["f1"]),
        node("MatMul", ["f1", "wg"], ["f2"]),
        node("Add", ["f2", "o5"], ["y"]),
    ]
    weights = [_weight(f"w{name}", 128, 128) for name in "qkvo"]
    weights += [_weight("wf", 128, 512), _weight("wg", 512, 128), _weight("g", 128), _weight("b", 128)]
    weights += [constant("heads", [0, 64, 4, 32], "int64"), constant("flat", [0, 64, 128], "int64")]
    return model(nodes, [_row("x", 64, 128)], [_row("y", 64, 128)], [*weights, constant("scale", 0.17)])


def _recurrent(
    operator: str, direction: str = "forward", *, is_last_step_only: bool = False
) -> onnx.ModelProto:
    """A recurrent layer, of which all steps or the last one are read."""
    gates, biases = RECURRENT[operator]
    directions = 2 if direction == "bidirectional" else 1
    kept = ["", "h"] if is_last_step_only else ["o", "h"]
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node(operator, ["t", "w", "r", "b"], kept, hidden_size=HIDDEN, direction=direction),
    ]
    if is_last_step_only:
        nodes.append(node("ReduceMean", ["h", "zero"], ["s"], keepdims=0))
    else:
        nodes.append(node("ReduceMean", ["o", "one"], ["m"], keepdims=0))
        nodes.append(node("Transpose", ["m"], ["s"], perm=[1, 0, 2]))
    nodes.append(node("MatMul", ["s", "wo"], ["y"]))
    weights = [
        _weight("w", directions, gates * HIDDEN, 64),
        _weight("r", directions, gates * HIDDEN, HIDDEN),
        _weight("b", directions, biases * HIDDEN),
        _weight("wo", HIDDEN, 40),
        constant("zero", [0], "int64"),
        constant("one", [1], "int64"),
    ]
    shape = (40,) if is_last_step_only else (STEPS, 40)
    return model(nodes, [_row("x", STEPS, 64)], [_row("y", *shape)], weights)


def _branch(name: str, activation: str, width: int) -> onnx.GraphProto:
    return helper.make_graph(
        [
            node("MatMul", ["h", f"{name}_w"], [f"{name}_m"]),
            node(activation, [f"{name}_m"], [f"{name}_a"]),
            node("MatMul", [f"{name}_a", f"{name}_v"], [f"{name}_y"]),
        ],
        name,
        [],
        [_row(f"{name}_y", 40, 256)],
        [_weight(f"{name}_w", 256, width), _weight(f"{name}_v", width, 256)],
    )


def _branching(threshold: float) -> onnx.ModelProto:
    """An If whose branches need unlike memory."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "threshold"], ["is_above"]),
        node(
            "If",
            ["is_above"],
            ["z"],
            then_branch=_branch("then", "Relu", 768),
            else_branch=_branch("else", "Tanh", 128),
        ),
        node("Add", ["z", "h"], ["y"]),
    ]
    weights = [_weight("w", 256, 256), constant("threshold", threshold)]
    return model(nodes, [_row("x", 40, 256)], [_row("y", 40, 256)], weights)


def _embedding() -> onnx.ModelProto:
    """A lookup of word ids and a normalisation by hand."""
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("ReduceMean", ["e", "one"], ["m"], keepdims=1),
        node("Sub", ["e", "m"], ["d"]),
        node("Tanh", ["d"], ["t"]),
        node("MatMul", ["t", "w"], ["y"]),
    ]
    weights = [_weight("table", 1000, 192), _weight("w", 192, 32), constant("one", [1], "int64")]
    return model(nodes, [value("ids", TensorProto.INT64, ["N", 96])], [_row("y", 96, 32)], weights)


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "perceptron": _perceptron,
    "convolutional": _convolutional,
    "convolution of any size": lambda: _images_of_any_size(is_convolved=True),
    "pooling of any size": lambda: _images_of_any_size(is_convolved=False),
    "attention": _attention,
    "embedding": _embedding,
    "if, large branch": lambda: _branching(-1e9),
    "if, small branch": lambda: _branching(1e9),
    **{
        f"{operator}, {direction}": lambda operator=operator, direction=direction: _recurrent(
            operator, direction
        )
        for operator in RECURRENT
        for direction in ("forward", "reverse", "bidirectional")
    },
    "LSTM, last step": lambda: _recurrent("LSTM", is_last_step_only=True),
}


def _save(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "m.onnx"
    onnx.save(proto, str(path))
    return path


@dataclass(frozen=True)
class _Tried:
    run: RunAnalysis
    optimized: Path
    inputs: dict[str, TensorType]

    def feeds(self, rows: int) -> dict[str, Any]:
        return sample_batch(self.inputs, self.run.shapes, rows, integer_limit=self.run.integer_limit)


def _try(folder: Path, proto: onnx.ModelProto, **request: Any) -> _Tried:
    path, optimized = _save(folder, proto), folder / "optimized.onnx"
    run = load(RunAnalysis, try_model({"path": str(path), "optimized": str(optimized), **request})["run"])
    return _Tried(run, optimized, dict(GraphFile(path).graph.inputs))


def _runtime_peak(tried: _Tried, rows: int, folder: Path) -> int:
    """The most that lived in the runtime's own arena beyond the weights, by a session that nobody touched."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = False
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "peak")
    session = onnxruntime.InferenceSession(str(tried.optimized), options, providers=["CPUExecutionProvider"])
    session.run(None, tried.feeds(rows))
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    counters = [event["args"] for event in events if "mem_in_use_peak" in event.get("args", {})]
    before = int(counters[0]["mem_bytes_in_use"]) - int(counters[0]["mem_in_use_delta"])
    return max(int(found["mem_in_use_peak"]) for found in counters) - before


@pytest.mark.parametrize("name", MODELS)
def test_the_replay_holds_what_the_runtime_holds(tmp_path: Path, name: str) -> None:
    """A plan from batches of two and three tells what a fresh session's arena holds after any batch."""
    tried = _try(tmp_path, MODELS[name]())
    assert tried.run.batching.verdict is Batching.INVARIANT
    found: dict[int, tuple[int, int]] = {}
    for rows in BATCHES:
        session = TracedSession(tried.optimized)
        session.run(tried.feeds(rows))
        use = tried.run.memory_plan.use(rows, ArenaPolicy())
        assert use is not None
        found[rows] = use.bytes_held, arena_bytes(session.finish())
    assert {rows: pair for rows, pair in found.items() if pair[0] != pytest.approx(pair[1], rel=0.02)} == {}
    assert len({held for held, _ in found.values()}) > 1, "or all of it is the first region"


@pytest.mark.parametrize("name", MODELS)
def test_what_lives_in_the_replay_lives_in_the_runtime(tmp_path: Path, name: str) -> None:
    """The peak is told by the byte, but for the small pieces of recurrent kernels, each rounded up."""
    tried = _try(tmp_path, MODELS[name]())
    is_recurrent = name.split(",", maxsplit=1)[0] in RECURRENT
    for rows in BATCHES:
        use = tried.run.memory_plan.use(rows, ArenaPolicy())
        assert use is not None
        expected = _runtime_peak(tried, rows, tmp_path)
        assert use.bytes_peak == pytest.approx(expected, rel=0.02 if is_recurrent else 1e-3), rows


def test_no_other_call_counts_as_workspace(tmp_path: Path) -> None:
    """A try with longer rows needs more: it must not stand for the batches that are measured."""
    proto = _recurrent("LSTM", is_last_step_only=True)
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "S"
    tried = _try(tmp_path, proto, shapes={"x": ["N", 4, 64]})
    assert "padding along 'S'" in " ".join(tried.run.batching.evidence)
    assert all(size.a >= 0 and size.b >= 0 for size in tried.run.memory_plan.sizes)
    use = tried.run.memory_plan.use(32, ArenaPolicy())
    assert use is not None
    assert use.bytes_peak == pytest.approx(_runtime_peak(tried, 32, tmp_path), rel=0.02)


def test_a_recurrent_layer_may_read_the_input_itself(tmp_path: Path) -> None:
    """Rows along the second axis, as these layers take them: the steps are seen in what comes out."""
    weights = [_weight("w", 1, 4 * HIDDEN, 64), _weight("r", 1, 4 * HIDDEN, HIDDEN)]
    proto = model(
        [node("LSTM", ["x", "w", "r"], ["o"], hidden_size=HIDDEN), node("Exp", ["o"], ["y"])],
        [value("x", FLOAT, [STEPS, "N", 64])],
        [value("y", FLOAT, [STEPS, 1, "N", HIDDEN])],
        weights,
    )
    tried = _try(tmp_path, proto, shapes={"x": [STEPS, "N", 64]})
    assert tried.run.batching.verdict is Batching.INVARIANT
    assert (tried.run.batching.input_axes, tried.run.batching.output_axes) == ({"x": 1}, {"y": 2})
    for rows in BATCHES:
        session = TracedSession(tried.optimized)
        session.run(tried.feeds(rows))
        use = tried.run.memory_plan.use(rows, ArenaPolicy())
        assert use is not None
        assert use.bytes_held == arena_bytes(session.finish()), rows


def test_rows_that_the_model_refuses_leave_no_trace(tmp_path: Path) -> None:
    """Word ids are tried from large limits to small ones; only the ones that worked are measured."""
    proto = _embedding()
    del proto.graph.initializer[0]
    proto.graph.initializer.append(_weight("table", 2, 192))
    tried = _try(tmp_path, proto)
    assert tried.run.integer_limit == 2
    use = tried.run.memory_plan.use(13, ArenaPolicy())
    assert use is not None
    assert use.bytes_peak == _runtime_peak(tried, 13, tmp_path)


def test_a_trace_shows_types_order_and_time(tmp_path: Path) -> None:
    """Each node that ran, with the types of what it made; an empty optional output leaves no gap."""
    proto = _recurrent("LSTM", is_last_step_only=True)
    proto.graph.node[1].name = "recurrent_1"
    session = TracedSession(_save(tmp_path, proto))
    session.run({"x": np.zeros((2, STEPS, 64), np.float32)})
    trace = session.finish()
    assert [traced.operator for traced in trace.nodes] == ["Transpose", "LSTM", "ReduceMean", "MatMul"]
    assert trace.nodes[0].outputs == (TensorType("float32", (STEPS, 2, 64)),)
    assert trace.nodes[1].outputs == (TensorType("float32", (1, 2, HIDDEN)),)
    assert trace.nodes[1].name == "recurrent_1"
    assert trace.nodes[1].workspace_bytes >= 2 * STEPS * HIDDEN * 4 * 4, "four gates of every step"
    assert trace.nodes[3].workspace_bytes == 0
    assert 0 < trace.seconds < 10
    assert 0 < trace.bytes_used_before <= trace.bytes_held_before < trace.bytes_held


def test_names_of_nodes_do_not_matter(tmp_path: Path) -> None:
    """Without names, or with one that a body has too, the plan is that of nodes with names of their own."""
    plans = []
    for name in (lambda at, inner: f"n{at}{inner}", lambda at, inner: "", lambda at, inner: f"n{at}"):
        proto = _branching(-1e9)
        for at, outer in enumerate(proto.graph.node):
            outer.name = name(at, "")
            for attribute in outer.attribute:
                for inner, found in enumerate(attribute.g.node):
                    found.name = name(inner, attribute.name)
        plans.append(_try(tmp_path, proto).run.memory_plan)
    assert plans[0].events
    assert plans[1] == plans[0]
    assert plans[2] == plans[0]


def test_the_last_call_is_the_one_that_is_traced(tmp_path: Path) -> None:
    """Calls before it, refused ones too, do not show."""
    session = TracedSession(_save(tmp_path, _embedding()))
    session.run({"ids": np.zeros((7, 96), np.int64)})
    with pytest.raises(ModelError, match=r"The model fails: .*Hint"):
        session.run({"ids": np.full((5, 96), 5000, np.int64)})
    session.run({"ids": np.zeros((3, 96), np.int64)})
    shapes = [traced.outputs[0].shape for traced in session.finish().nodes]
    assert shapes == [(3, 96, 192), (3, 1, 192), (3, 96, 192), (3, 96, 192), (3, 96, 32)]


def test_a_call_that_fails_half_way_does_not_show(tmp_path: Path) -> None:
    """What ran before its end is not taken for a part of the next call."""
    proto = model(
        [node("Exp", ["x"], ["e"]), node("Gather", ["e", "ids"], ["g"], axis=1), node("Neg", ["g"], ["y"])],
        [_row("x", 8), value("ids", TensorProto.INT64, [2])],
        [_row("y", 2)],
    )
    session = TracedSession(_save(tmp_path, proto))
    with pytest.raises(ModelError):
        session.run({"x": np.zeros((5, 8), np.float32), "ids": np.array([1, 99])})
    session.run({"x": np.zeros((3, 8), np.float32), "ids": np.array([1, 2])})
    trace = session.finish()
    assert [traced.operator for traced in trace.nodes] == ["Exp", "Gather", "Neg"]
    assert [traced.outputs[0].shape for traced in trace.nodes] == [(3, 8), (3, 2), (3, 2)]


def test_all_turns_of_a_loop_are_traced(tmp_path: Path) -> None:
    """A name that comes again is no new call, and what was there before is what was before the first turn."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"], name="on"), node("Tanh", ["a"], ["b"], name="step")],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), _row("a", 8)],
        [value("on", TensorProto.BOOL, []), _row("b", 8)],
    )
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    nodes = [node("Loop", ["turns", "yes", "x"], ["l"], name="loop", body=body), node("Exp", ["l"], ["y"])]
    session = TracedSession(_save(tmp_path, model(nodes, constants=[constant("turns", 5, "int64"), yes])))
    session.run({"x": np.zeros((1000, 8), np.float32)})
    trace = session.finish()
    names = [traced.name for traced in trace.nodes]
    assert (names.count("step"), names.count("on"), names[-2:]) == (5, 5, ["loop", "Exp_1"])
    assert trace.bytes_used_before < 1000, "two constants and a buffer of the loop's own"


def test_a_taken_branch_is_traced_before_its_if(tmp_path: Path) -> None:
    """Which branch ran is seen by its nodes."""
    session = TracedSession(_save(tmp_path, _branching(1e9)))
    session.run({"x": np.zeros((2, 40, 256), np.float32)})
    operators = [traced.operator for traced in session.finish().nodes]
    assert operators.index("Tanh") < operators.index("If")
    assert "Relu" not in operators


def test_a_model_of_constants_needs_no_inference(tmp_path: Path) -> None:
    """Where no operator runs there is nothing to trace, and the error says so."""
    proto = model([], outputs=[_row("x", 8)])
    session = TracedSession(_save(tmp_path, proto))
    session.run({"x": np.zeros((2, 8), np.float32)})
    with pytest.raises(ModelError, match="ran no node"):
        session.finish()


@pytest.mark.parametrize(
    "feeds", [{"z": np.zeros((1, 8), np.float32)}, {"x": np.zeros((1, 9), np.float32)}, {}]
)
def test_wrong_arrays_are_an_error_of_the_model(tmp_path: Path, feeds: dict[str, Any]) -> None:
    """A wrong name, a wrong length, nothing at all."""
    with pytest.raises(ModelError, match="The model fails"):
        TracedSession(_save(tmp_path, relu())).run(feeds)


class _Failing:
    """A session that says what ONNX Runtime says."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def run(self, *_: object) -> None:
        msg = "Failed to allocate memory for requested buffer of size 1"
        raise RuntimeError(msg)


def test_timing_tells_who_must_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that does not fit may be halved, a model that refuses the arrays may not."""
    path = _save(tmp_path, relu())
    timed = TimedSession(path, CPU)
    assert 0 < timed.seconds({"x": np.zeros((2, 8), np.float32)}, 0.01) < 1
    with pytest.raises(ModelError, match="The model fails"):
        timed.seconds({"x": np.zeros((2, 9), np.float32)}, 0.01)
    monkeypatch.setattr(onnx_trace, "_open", _Failing)
    with pytest.raises(DeviceOutOfMemoryError, match="does not fit into memory"):
        TimedSession(path, CPU).seconds({}, 0.01)


def test_weights_that_do_not_fit_are_no_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph in the cache that cannot be loaded for want of memory is not thrown away."""
    import onnxruntime

    def fail(*_: object, **__: object) -> None:
        msg = "std::bad_alloc"
        raise RuntimeError(msg)

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(DeviceOutOfMemoryError, match="does not fit into memory"):
        TracedSession(_save(tmp_path, relu()))


@pytest.mark.parametrize(("is_optimizing", "operators"), [(False, ["Sigmoid", "Mul"]), (True, ["QuickGelu"])])
def test_a_file_is_run_as_it_is_or_optimised(
    tmp_path: Path, is_optimizing: bool, operators: list[str]
) -> None:
    """A card's graph is not written to a file: the runtime makes it while it loads the model."""
    proto = model([node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["y"])])
    session = TracedSession(_save(tmp_path, proto), is_optimizing=is_optimizing)
    session.run({"x": np.zeros((2, 8), np.float32)})
    assert [traced.operator for traced in session.finish().nodes] == operators


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """A sequence has no rows to tell apart."""
    sequence = helper.make_tensor_sequence_value_info("y", FLOAT, None)
    proto = model([node("SequenceConstruct", ["x"], ["y"])], outputs=[sequence])
    with pytest.raises(ModelError, match="not tensors"):
        TracedSession(_save(tmp_path, proto)).run({"x": np.zeros((1, 8), np.float32)})


@pytest.mark.parametrize("load_it", [TracedSession, lambda path: optimize(path, path.with_name("o.onnx"))])
def test_a_file_that_the_runtime_refuses_is_named(tmp_path: Path, load_it: Callable[[Path], object]) -> None:
    """The runtime's own words follow."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model at all")
    with pytest.raises(ModelError, match=r"cannot load '.*m\.onnx'"):
        load_it(path)


def test_large_weights_are_kept_beside_the_optimised_graph(tmp_path: Path) -> None:
    """The graph stays small, and loads from where it was moved together with its data."""
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [_row("x", 1024)],
        [_row("y", 512)],
        [_weight("w", 1024, 512)],
    )
    made = tmp_path / "made"
    made.mkdir()
    optimize(_save(tmp_path, proto), made / "o.onnx")
    assert (made / "o.onnx").stat().st_size < 10_000
    moved = made.rename(tmp_path / "moved")
    outputs = TracedSession(moved / "o.onnx").run({"x": np.ones((1, 1024), np.float32)})
    assert outputs["y"].shape == (1, 512)


def test_a_session_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles and statistics are gone when a trace was read, and when a session is dropped unread."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = _save(tmp_path, relu())
    session = TracedSession(path)
    session.run({"x": np.zeros((1, 8), np.float32)})
    session.finish()
    assert list((tmp_path / "temporary").iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del session
        dropped = TracedSession(path)
        del dropped
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_key_names_runtime_and_machine() -> None:
    """What an optimised graph holds for is the same each time it is asked."""
    import onnxruntime

    key = runtime_key()
    assert (key.version, key.provider) == (onnxruntime.__version__, "CPUExecutionProvider")
    assert runtime_key() == key
    assert key.options.endswith(cpu_name())
