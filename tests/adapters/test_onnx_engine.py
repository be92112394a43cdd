"""ONNX Runtime as the device. Engines run in child processes: a process has one CPU arena, for ever."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster.adapters.onnx_engine import OnnxEngine
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import SitsError
from sits_dagster.inference.policy import PipelinePolicy
from sits_dagster.inference.sizing import FixedBatchSizer
from sits_dagster.models.model import Padding
from sits_dagster.testing import MemoryRows, MemoryStore, Trial

MEBIBYTE = 1 << 20
LIMIT = 32 * MEBIBYTE
WIDE = 1 << 16

Child = Callable[..., Any]


@pytest.fixture
def fresh() -> Iterator[Child]:
    """Return a function that calls another one in a process that has no arena yet."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(60)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Return the same, in one process for all tests, with an arena of `LIMIT` bytes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(60)


def _device(limit: int = LIMIT) -> Device:
    return Device(
        uuid="CPU-0",
        kind=DeviceKind.CPU,
        ordinal=0,
        name="the CPU",
        memory_bytes_total=limit,
        memory_bytes_limit=limit,
    )


def _save(
    path: Path,
    nodes: Sequence[tuple[str, list[str], list[str], dict[str, Any]]],
    inputs: dict[str, tuple[str, list[Any]]],
    outputs: dict[str, tuple[str, list[Any]]],
    weights: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> str:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def values(specs: dict[str, tuple[str, list[Any]]]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)
            for name, (kind, shape) in specs.items()
        ]

    graph = helper.make_graph(
        [helper.make_node(op, i, o, **attributes) for op, i, o, attributes in nodes],
        "g",
        values(inputs),
        values(outputs),
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path), **options)
    return str(path)


def _simple(folder: Path, *, kind: str = "FLOAT", batch: int | str = "n", width: int = 3) -> str:
    spec = {"x": (kind, [batch, width])}
    return _save(folder / "m.onnx", [("Add", ["x", "x"], ["y"], {})], spec, {"y": (kind, [batch, width])})


def _predict(model: str, inputs: dict[str, np.ndarray], limit: int = LIMIT) -> dict[str, np.ndarray]:
    return dict(OnnxEngine(model, _device(limit)).predict(inputs))


def _error(model: str, inputs: dict[str, np.ndarray] | None = None, limit: int = LIMIT) -> tuple[str, str]:
    """Return the type and text of the error; exceptions of two arguments do not survive pickling."""
    try:
        engine = OnnxEngine(model, _device(limit))
        if inputs is not None:
            engine.predict(inputs)
    except SitsError as error:
        return type(error).__name__, str(error)
    return "", ""


def _signature(model: str) -> Any:
    return OnnxEngine(model, _device()).signature


def test_a_model_computes_and_describes_itself(child: Child, tmp_path: Path) -> None:
    """Inputs and outputs have the graph's names, types and free axes; results are the model's."""
    model = _save(
        tmp_path / "m.onnx",
        [("MatMul", ["x", "w"], ["y"], {}), ("ReduceSum", ["x", "axis"], ["s"], {"keepdims": 0})],
        {"x": ("FLOAT", ["n", 3])},
        {"y": ("FLOAT", ["n", 2]), "s": ("FLOAT", ["n"])},
        {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "axis": np.array([1])},
    )
    signature = child(_signature, model)
    assert [(s.name, s.dtype, s.shape) for s in (*signature.inputs, *signature.outputs)] == [
        ("x", "float32", (None, 3)),
        ("y", "float32", (None, 2)),
        ("s", "float32", (None,)),
    ]
    assert signature.batch_rows_fixed is None
    x = np.array([[1, 2, 3], [0, 0, 1]], np.float32)
    outputs = child(_predict, model, {"x": x})
    assert outputs["y"].tolist() == (x @ np.arange(6).reshape(3, 2)).tolist()
    assert outputs["s"].tolist() == [6, 1]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("FLOAT16", "float16"), ("DOUBLE", "float64"), ("INT64", "int64"), ("INT32", "int32")],
)
def test_element_types_are_carried(child: Child, tmp_path: Path, kind: str, dtype: str) -> None:
    """Every number type of ONNX goes in and out as itself."""
    model = _simple(tmp_path, kind=kind)
    assert child(_signature, model).inputs[0].dtype == dtype
    y = child(_predict, model, {"x": np.ones((2, 3), dtype)})["y"]
    assert (y.dtype, y.tolist()) == (np.dtype(dtype), [[2.0] * 3] * 2)


def test_text_goes_in_and_out(child: Child, tmp_path: Path) -> None:
    """String tensors carry text, beyond ASCII as well."""
    spec = ("STRING", ["n"])
    model = _save(tmp_path / "m.onnx", [("Identity", ["x"], ["y"], {})], {"x": spec}, {"y": spec})
    assert child(_signature, model).inputs[0].dtype == "string"
    outputs = child(_predict, model, {"x": np.array(["a", "", "日本"], object)})
    assert outputs["y"].tolist() == ["a", "", "日本"]


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_fixed_batch_is_filled_up_and_cut_again(child: Child, tmp_path: Path, rows: int) -> None:
    """A model exported for four rows takes fewer, and gives exactly theirs back."""
    model = _save(
        tmp_path / "m.onnx",
        [("Add", ["x", "x"], ["y"], {}), ("ReduceMax", ["x"], ["most"], {"keepdims": 0})],
        {"x": ("FLOAT", [4, 2])},
        {"y": ("FLOAT", [4, 2]), "most": ("FLOAT", [])},
    )
    assert child(_signature, model).batch_rows_fixed == 4
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    outputs = child(_predict, model, {"x": x})
    assert outputs["y"].tolist() == (2 * x).tolist()
    assert outputs["most"] == x.max(), "an output about the whole batch is not cut"


def test_a_batch_without_rows_is_refused(child: Child, tmp_path: Path) -> None:
    """Some operators abort the whole process on an empty batch: it never gets there."""
    kind, message = child(_error, _simple(tmp_path), {"x": np.zeros((0, 3), np.float32)})
    assert kind == "ModelError"
    assert "at least one row" in message


def test_arrays_that_the_model_refuses_are_a_model_error(child: Child, tmp_path: Path) -> None:
    """A wrong shape names the model and the batch, and is not taken for a memory problem."""
    kind, message = child(_error, _simple(tmp_path), {"x": np.zeros((2, 5), np.float32)})
    assert kind == "ModelError"
    assert "failed on a batch of 2 rows" in message


@pytest.mark.parametrize("content", [None, b"", b"this is no model", b"\x08\x07" * 50])
def test_a_broken_model_is_a_model_error(child: Child, tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty or damaged file is named with what to do."""
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    kind, message = child(_error, str(path))
    assert kind == "ModelError"
    assert "m.onnx" in message
    assert "Hint" in message


def test_a_truncated_model_is_a_model_error(child: Child, tmp_path: Path) -> None:
    """An upload that was cut is named."""
    path = Path(
        _save(
            tmp_path / "m.onnx",
            [("Add", ["x", "w"], ["y"], {})],
            {"x": ("FLOAT", ["n", 100])},
            {"y": ("FLOAT", ["n", 100])},
            {"w": np.ones(100, np.float32)},
        )
    )
    path.write_bytes(path.read_bytes()[:200])
    assert child(_error, str(path))[0] == "ModelError"


def _weights(folder: Path, *, external: bool) -> str:
    options = {"save_as_external_data": True, "location": "w.bin"} if external else {}
    return _save(
        folder / "m.onnx",
        [("Add", ["x", "w"], ["y"], {})],
        {"x": ("FLOAT", ["n", WIDE])},
        {"y": ("FLOAT", ["n", WIDE])},
        {"w": np.ones((160, WIDE), np.float32)},
        **options,
    )


@pytest.mark.parametrize("external", [False, True], ids=["in the file", "beside it"])
def test_weights_above_the_limit_are_refused(child: Child, tmp_path: Path, *, external: bool) -> None:
    """A model that cannot fit ends before anything is computed, with both sizes."""
    kind, message = child(_error, _weights(tmp_path, external=external))
    assert kind == "DeviceOutOfMemoryError"
    assert str(LIMIT) in message
    assert "exceed" in message


def _grow(model: str, limit: int) -> list[tuple[str, int]]:
    """Give batches of several sizes to one engine; return what became of each."""
    engine = OnnxEngine(model, _device(limit))
    outcomes: list[tuple[str, int]] = []
    for rows in (20, 400, 20, 400, 10, 20):
        x = np.arange(rows, dtype=np.float32)[:, None].repeat(WIDE, axis=1)
        try:
            outputs = engine.predict({"x": x})
        except SitsError as error:
            outcomes.append((type(error).__name__, getattr(error, "batch_rows", -1)))
        else:
            assert (outputs["y"] == x * 4).all()
            outcomes.append(("", rows))
    return outcomes


def _doubling(folder: Path) -> str:
    nodes = [("Add", ["x", "x"], ["h"], {}), ("Add", ["h", "h"], ["y"], {})]
    return _save(folder / "m.onnx", nodes, {"x": ("FLOAT", ["n", WIDE])}, {"y": ("FLOAT", ["n", WIDE])})


def test_running_out_of_memory_is_real_and_is_survived(fresh: Child, tmp_path: Path) -> None:
    """A batch that does not fit the arena fails as on a GPU, and smaller ones go on with right results."""
    assert fresh(_grow, _doubling(tmp_path), 40 * MEBIBYTE) == [
        ("", 20),
        ("DeviceOutOfMemoryError", 400),
        ("", 20),
        ("DeviceOutOfMemoryError", 400),
        ("", 10),
        ("", 20),
    ]


def _run_large(model: str, limit: int) -> tuple[int, int, int, bool]:
    engine = OnnxEngine(model, _device(limit))
    rows = pa.RecordBatch.from_pydict({"id": np.arange(200)})

    def encode(batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"x": batch.column("id").to_numpy().astype(np.float32)[:, None].repeat(WIDE, axis=1)}

    trial = Trial(
        source=MemoryRows(rows),
        signature=engine.signature,
        function=lambda inputs: inputs,
        encode=encode,
        decode=lambda outputs: {"y": outputs["y"][:, 0]},
        columns_kept=("id",),
        policy=PipelinePolicy(batch_rows=100, chunk_rows=100),
    )
    store, sizer = MemoryStore(), FixedBatchSizer(100)
    stats = trial.run(store, engine=engine, sizer=sizer)
    is_right = Trial.output(store) == [{"id": i, "y": 4.0 * i} for i in range(200)]
    return stats.out_of_memory, stats.rows_written, min(sizer.ceilings.values()), is_right


def test_a_partition_survives_real_memory_pressure(fresh: Child, tmp_path: Path) -> None:
    """G3 with a true allocator: batches shrink, every row is computed, none is quarantined."""
    out_of_memory, written, ceiling, is_right = fresh(_run_large, _doubling(tmp_path), 40 * MEBIBYTE)
    assert out_of_memory > 0
    assert (written, is_right) == (200, True)
    assert 1 <= ceiling <= 50


def _two_limits(model: str) -> tuple[str, str]:
    first = OnnxEngine(model, _device(LIMIT))
    second = OnnxEngine(model, _device(LIMIT))
    assert first.signature == second.signature
    return _error(model, None, 2 * LIMIT)


def test_one_process_has_one_memory_limit(fresh: Child, tmp_path: Path) -> None:
    """A second limit in a process cannot be kept, and is refused instead of ignored."""
    kind, message = fresh(_two_limits, _simple(tmp_path))
    assert kind == "ConfigError"
    assert "already limits" in message


def _convolution(folder: Path) -> str:
    rng = np.random.default_rng(3)
    weights = {
        "k": rng.normal(size=(8, 4, 3)).astype(np.float32),
        "w": rng.normal(size=(8, 33)).astype(np.float32),
        "b": rng.normal(size=(33,)).astype(np.float32),
        "v": rng.normal(size=(33, 5)).astype(np.float32),
    }
    nodes = [
        ("Conv", ["x", "k"], ["c"], {"pads": [1, 1]}),
        ("Relu", ["c"], ["r"], {}),
        ("GlobalAveragePool", ["r"], ["p"], {}),
        ("Flatten", ["p"], ["f"], {}),
        ("Gemm", ["f", "w", "b"], ["h"], {}),
        ("Tanh", ["h"], ["t"], {}),
        ("MatMul", ["t", "v"], ["y"], {}),
    ]
    return _save(
        folder / "m.onnx", nodes, {"x": ("FLOAT", ["n", 4, "w"])}, {"y": ("FLOAT", ["n", 5])}, weights
    )


def _outputs(model: str, batch_rows: int, stop_after: int) -> list[Any]:
    """Run ragged rows through the model; return the output, after a stop if one is wanted."""
    engine = OnnxEngine(model, _device())
    rng = np.random.default_rng(5)
    widths = rng.integers(1, 40, 50)
    rows = [rng.normal(size=(4, width)).astype(np.float32) for width in widths]

    def encode(batch: pa.RecordBatch) -> dict[str, list[np.ndarray]]:
        return {"x": [rows[i] for i in batch.column("id").to_pylist()]}

    trial = Trial(
        source=MemoryRows(pa.RecordBatch.from_pydict({"id": np.arange(50)})),
        signature=engine.signature,
        function=lambda inputs: inputs,
        encode=encode,
        padding=(Padding(input="x", multiple=16),),
        columns_kept=("id",),
        policy=PipelinePolicy(
            batch_rows=batch_rows, chunk_rows=7, segment_rows=20, window_rows=batch_rows * 9
        ),
    )
    store, asked = MemoryStore(), [0]

    def should_stop() -> bool:
        asked[0] += 1
        return 0 < stop_after < asked[0]

    trial.run(store, engine=engine, should_stop=should_stop)
    trial.run(store, engine=engine)
    return Trial.output(store)


def test_a_result_does_not_depend_on_its_company(child: Child, tmp_path: Path) -> None:
    """G7: bit-equal results in batches of any size, with other neighbours, after a stop and a resume."""
    model = _convolution(tmp_path)
    alone = child(_outputs, model, 1, 0)
    assert [row["id"] for row in alone] == list(range(50))
    for batch_rows, stop_after in ((2, 0), (3, 0), (8, 0), (3, 5), (8, 2)):
        assert child(_outputs, model, batch_rows, stop_after) == alone, (batch_rows, stop_after)


def _endless(path: Path) -> str:
    """Save a model whose loop never ends."""
    import onnx
    from onnx import TensorProto, helper

    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["on_out"]),
            helper.make_node("Identity", ["carried"], ["carried_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried_out", TensorProto.FLOAT, None),
        ],
    )
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    graph = helper.make_graph(
        [helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)],
        "endless",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [yes],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return str(path)


def _interrupted(model: str) -> list[str]:
    import threading

    engine, found = OnnxEngine(model, _device()), []
    threading.Timer(0.5, engine.interrupt).start()
    for _ in range(2):
        try:
            engine.predict({"x": np.ones(1, "f4")})
        except SitsError as error:
            found.append(type(error).__name__)
    return found


def test_a_model_that_never_returns_can_be_interrupted(child: Child, tmp_path: Path) -> None:
    """An endless loop in a graph is ended from another thread, and is not begun again."""
    assert child(_interrupted, _endless(tmp_path / "endless.onnx")) == ["ModelError", "ModelError"]


def _recurrent(folder: Path, rows: int | str = "n") -> str:
    """Save a model with a state [2, n, 4] beside its input [n, 4]; all outputs have rows along axis 1."""
    nodes = [
        ("Add", ["state", "x"], ["next"], {}),
        ("Unsqueeze", ["x", "axes"], ["line"], {}),
        ("Concat", ["next", "line"], ["y"], {"axis": 0}),
    ]
    return _save(
        folder / "r.onnx",
        nodes,
        {"x": ("FLOAT", [rows, 4]), "state": ("FLOAT", [2, rows, 4])},
        {"y": ("FLOAT", [3, rows, 4]), "next": ("FLOAT", [2, rows, 4])},
        {"axes": np.array([0])},
    )


def _recurrent_arrays(rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return inputs, rows first, and the output `next`, rows first."""
    rng = np.random.default_rng(2)
    x, state = rng.normal(size=(rows, 4)).astype("f4"), rng.normal(size=(rows, 2, 4)).astype("f4")
    return {"x": x, "state": state}, state + x[:, None]


def _placed(model: str, inputs: dict[str, np.ndarray], axes: dict[str, int | None]) -> tuple[Any, Any]:
    engine = OnnxEngine(model, _device())
    engine.place_rows(axes)
    before = {name: array.copy() for name, array in inputs.items()}
    outputs = engine.predict(inputs)
    assert all(np.array_equal(inputs[name], array) for name, array in before.items()), (
        "inputs are not changed"
    )
    return engine.signature, outputs


@pytest.mark.parametrize("axis", ["n", "?", None], ids=["one name", "question mark", "no name"])
def test_rows_of_an_input_may_lie_along_another_axis(child: Child, tmp_path: Path, axis: Any) -> None:
    """A state [2, n, 4] takes arrays [n, 2, 4], and says so; outputs are rows first once they are placed."""
    model = _recurrent(tmp_path, axis)
    inputs, after = _recurrent_arrays(5)
    signature, outputs = child(_placed, model, inputs, {"y": 1, "next": 1})
    assert {s.name: s.shape for s in signature.inputs} == {"x": (None, 4), "state": (None, 2, 4)}
    assert {s.name: s.shape for s in signature.outputs} == {"y": (None, 3, 4), "next": (None, 2, 4)}
    assert signature.batch_rows_fixed is None
    assert np.array_equal(outputs["next"], after)
    assert np.array_equal(outputs["y"], np.concatenate([after, inputs["x"][:, None]], axis=1))


def test_an_output_is_the_models_own_until_its_rows_are_placed(child: Child, tmp_path: Path) -> None:
    """Without a word outputs come as they are; `None` makes the whole output one row."""
    model = _recurrent(tmp_path)
    inputs, after = _recurrent_arrays(3)
    signature, outputs = child(_placed, model, inputs, {"y": None})
    assert {s.name: s.shape for s in signature.outputs} == {"y": (1, 3, None, 4), "next": (2, None, 4)}
    assert np.array_equal(outputs["next"], np.moveaxis(after, 0, 1))
    assert outputs["y"].shape == (1, 3, 3, 4)


def _placed_again(model: str, inputs: dict[str, np.ndarray]) -> tuple[bool, bool]:
    engine = OnnxEngine(model, _device())
    signature, outputs = engine.signature, engine.predict(inputs)
    engine.place_rows({"y": 1, "next": None})
    engine.place_rows({})
    again = engine.predict(inputs)
    return engine.signature == signature, all(np.array_equal(outputs[n], again[n]) for n in outputs)


def test_rows_can_be_placed_anew(child: Child, tmp_path: Path) -> None:
    """The last word holds: an engine serves partition after partition."""
    assert child(_placed_again, _recurrent(tmp_path), _recurrent_arrays(3)[0]) == (True, True)


def test_texts_may_lie_along_another_axis(child: Child, tmp_path: Path) -> None:
    """Moving an axis works for strings as for numbers."""
    model = _save(
        tmp_path / "m.onnx",
        [("Identity", ["t"], ["y"], {}), ("Add", ["x", "x"], ["z"], {})],
        {"x": ("FLOAT", ["n"]), "t": ("STRING", [2, "n"])},
        {"y": ("STRING", [2, "n"]), "z": ("FLOAT", ["n"])},
    )
    texts = np.array([["a", "b"], ["c", "d"], ["e", "日本"]], object)
    _, outputs = child(_placed, model, {"x": np.ones(3, "f4"), "t": texts}, {"y": 1})
    assert outputs["y"].tolist() == texts.tolist()


def test_a_batch_fixed_in_every_input_stays_along_the_first_axis(child: Child, tmp_path: Path) -> None:
    """Nothing tells where the rows of fixed shapes lie: they are taken to come first, as ever."""
    model = _save(
        tmp_path / "m.onnx",
        [("Add", ["x", "h"], ["y"], {})],
        {"x": ("FLOAT", [4, 2]), "h": ("FLOAT", [4, 2])},
        {"y": ("FLOAT", [4, 2])},
    )
    signature = child(_signature, model)
    assert [s.shape for s in signature.inputs] == [(4, 2), (4, 2)]
    assert signature.batch_rows_fixed == 4
    x = np.arange(6, dtype="f4").reshape(3, 2)
    assert child(_predict, model, {"x": x, "h": x})["y"].tolist() == (2 * x).tolist()


def _both_ways(model: str, optimized: str, inputs: dict[str, np.ndarray]) -> tuple[Any, Any, bool]:
    engines = [OnnxEngine(model, _device(), optimized=path) for path in (None, Path(optimized))]
    first, second = (engine.predict(inputs) for engine in engines)
    loaded = engines[1]._session.get_session_options().graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert engines[0].signature == engines[1].signature
    return first, second, loaded


def _optimize(model: str, target: str) -> None:
    from sits_dagster.adapters.onnx_trace import optimize

    optimize(Path(model), Path(target))


def test_an_optimised_graph_gives_the_same(child: Child, tmp_path: Path) -> None:
    """What a profile left is loaded as it is, and gives the model's own results, bit by bit."""
    model, target = _convolution(tmp_path), str(tmp_path / "o.onnx")
    child(_optimize, model, target)
    x = np.random.default_rng(4).normal(size=(6, 4, 20)).astype("f4")
    first, second, is_loaded = child(_both_ways, model, target, {"x": x})
    assert is_loaded
    assert np.array_equal(first["y"], second["y"])


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise", "folder"])
def test_a_damaged_optimised_graph_is_passed_over(child: Child, tmp_path: Path, damage: str) -> None:
    """A cache that is broken costs time, nothing else: the model itself is loaded."""
    model, target = _convolution(tmp_path), tmp_path / "o.onnx"
    child(_optimize, model, str(target))
    whole = target.read_bytes()
    target.unlink()
    if damage == "folder":
        target.mkdir()
    elif damage != "missing":
        content = {"empty": b"", "cut": whole[: len(whole) // 2], "noise": b"\x08\x07" * 200}
        target.write_bytes(content[damage])
    x = np.ones((2, 4, 9), "f4")
    first, second, is_loaded = child(_both_ways, model, str(target), {"x": x})
    assert not is_loaded
    assert np.array_equal(first["y"], second["y"])


def _shared(model: str) -> tuple[Any, Any]:
    engine = OnnxEngine(model, _device())
    x = np.arange(12, dtype="f4").reshape(3, 4)
    return engine.signature, engine.predict({"x": x, "position": np.full((1, 4), 10, "f4")})


def test_an_input_without_an_axis_for_rows_is_shared_by_them(child: Child, tmp_path: Path) -> None:
    """A table of positions beside free rows fixes no batch: it is given as it is."""
    model = _save(
        tmp_path / "m.onnx",
        [("Add", ["x", "position"], ["y"], {})],
        {"x": ("FLOAT", ["n", 4]), "position": ("FLOAT", [1, 4])},
        {"y": ("FLOAT", ["n", 4])},
    )
    signature, outputs = child(_shared, model)
    assert [spec.is_batched for spec in signature.inputs] == [True, False]
    assert signature.batch_rows_fixed is None
    assert np.array_equal(outputs["y"], np.arange(12, dtype="f4").reshape(3, 4) + 10)
