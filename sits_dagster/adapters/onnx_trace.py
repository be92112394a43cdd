"""What ONNX Runtime itself tells of a model: its optimised graph, the shapes in it and the memory it takes.

Its profile carries every node's output shapes and the arena's counters; its node statistics are the only
source of the memory that a node takes while it runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sits_dagster.adapters.onnx_engine import cuda_provider, is_out_of_memory, load_runtime
from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import DeviceOutOfMemoryError, ModelError
from sits_dagster.models.graph.structure import TensorType
from sits_dagster.models.profile import RuntimeKey
from sits_dagster.models.trace import CallTrace, TracedNode
from sits_dagster.models.words import one_line

__all__ = ["TimedSession", "TracedSession", "cpu_name", "optimize", "runtime_key"]

LOG_FATAL_ONLY = 4
CALLS_MIN, CALLS_MAX = 2, 200
NODE_SUFFIX = "_kernel_time"
HELD = "mem_arena_held"
STATISTICS_COLUMNS = 5  # name, inputs, initializers, dynamic sizes, temporary allocations
ELEMENT_TYPES = {"float": "float32", "double": "float64"}
PROVIDER = "CPUExecutionProvider"
OPTIONS = "memory pattern off, 1 thread"


def runtime_key() -> RuntimeKey:
    """Return what an optimised graph of this process holds for: its layouts are those of this very CPU."""
    return RuntimeKey(
        version=str(load_runtime().__version__), provider=PROVIDER, options=f"{OPTIONS}, {cpu_name()}"
    )


def cpu_name() -> str:
    """Return what tells this CPU from others whose kernels differ; the runtime is not asked."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # only Linux tells
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "CPU part", "Features")
    parts = [line for key in wanted for line in lines if line.startswith(key)][: len(wanted)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def optimize(model: Path, target: Path) -> None:
    """Write ONNX Runtime's optimised graph of a model; loaded without optimisation it plans alike everywhere.

    Raises:
        DeviceOutOfMemoryError: It does not fit into memory.
        ModelError: The runtime does not load the model.
    """
    runtime = load_runtime()
    options = _options(runtime, is_optimizing=True)
    options.optimized_model_filepath = str(target)
    # Larger weights go to a file beside it: a message of protobuf ends at 2 GB.
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{target.name}.data"
    )
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", "1048576"
    )
    _open(runtime, model, options)


class TracedSession:
    """A model loaded on an arena of its own.

    Args:
        model: The `.onnx` file: an optimised one, or one whose own nodes are of interest.
        device: Where it runs; the CPU without a limit if left out.
        is_optimizing: Whether the runtime optimises the file while it loads it; else it runs as it is.

    Raises:
        DeviceOutOfMemoryError: It does not fit into memory.
        ModelError: The runtime does not load the model.
    """

    def __init__(self, model: Path, device: Device | None = None, *, is_optimizing: bool = False) -> None:
        runtime = load_runtime()
        folder = Path(tempfile.mkdtemp(prefix="sits-trace-"))
        self._clean_up = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._statistics = folder / "nodes.csv"
        options = _options(runtime, is_optimizing=is_optimizing)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(self._statistics))
        self._session: Any = _open(runtime, model, options, device)
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> Mapping[str, NDArray[np.generic]]:
        """Return the outputs of one call.

        Raises:
            DeviceOutOfMemoryError: The call did not fit into memory.
            ModelError: The model refuses the arrays, or gives something else than tensors.
        """
        outputs = _call(self._session, self._outputs, feeds)
        if not all(isinstance(output, np.ndarray) for output in outputs):
            msg = "The model gives sequences or maps, not tensors; its rows cannot be told apart."
            raise ModelError(msg, hint="export the model without ZipMap or sequence outputs.")
        return dict(zip(self._outputs, outputs, strict=True))

    def finish(self) -> CallTrace:
        """Close the session and return the trace of its last call, which must have succeeded.

        Workspaces are the largest of all calls.
        """
        profile = Path(self._session.end_profiling())
        self._session = None  # the statistics are written when the session ends
        events = json.loads(profile.read_text(encoding="utf-8"))
        workspaces = _workspaces(self._statistics)
        self._clean_up()
        calls = _calls(events)
        last = calls[-1]
        # Before anything ran: a call that failed has grown the arena already.
        before = next(event for event in events if _is_node(event))["args"]
        seconds = [event["dur"] for event in events if event.get("name") == "model_run"]
        return CallTrace(
            nodes=tuple(_node(event, workspaces) for event in last),
            bytes_held_before=_before(before, "mem_arena_held", "mem_arena_held_delta"),
            bytes_used_before=_before(before, "mem_bytes_in_use", "mem_in_use_delta"),
            bytes_held=max(
                (int(args[HELD]) for event in last if HELD in (args := event["args"])), default=None
            ),
            seconds=seconds[-1] / 1e6 if seconds else 0.0,
        )


class TimedSession:
    """A model loaded without the cost of watching it.

    Args:
        model: The `.onnx` file.
        device: Where it runs.
        is_optimizing: Whether the runtime optimises the file while it loads it; else it runs as it is.

    Raises:
        DeviceOutOfMemoryError: It does not fit into memory.
        ModelError: The runtime does not load the model.
    """

    def __init__(self, model: Path, device: Device, *, is_optimizing: bool = False) -> None:
        runtime = load_runtime()
        options = _options(runtime, is_optimizing=is_optimizing)
        self._session: Any = _open(runtime, model, options, device)
        # On the CPU a call runs on this thread alone, and its own time is not disturbed by other processes.
        self._clock = time.thread_time if device.kind is DeviceKind.CPU else time.perf_counter

    def seconds(self, feeds: Mapping[str, NDArray[np.generic]], seconds_max: float) -> float:
        """Return the shortest of the calls that fit into `seconds_max`, of at least two after a first one.

        On the CPU it is this thread's own time, which runs the whole call.

        Raises:
            DeviceOutOfMemoryError: A call did not fit into memory.
            ModelError: The model refuses the arrays.
        """
        _call(self._session, None, feeds)
        best, begun, calls = math.inf, time.perf_counter(), 0
        while calls < CALLS_MIN or (calls < CALLS_MAX and time.perf_counter() - begun < seconds_max):
            start = self._clock()
            _call(self._session, None, feeds)
            best = min(best, self._clock() - start)
            calls += 1
        return best


def _call(session: Any, outputs: list[str] | None, feeds: Mapping[str, NDArray[np.generic]]) -> Any:  # noqa: ANN401 - the runtime has no usable types
    try:
        return session.run(outputs, dict(feeds))
    except Exception as error:  # the runtime's errors have no common base
        if is_out_of_memory(error):
            msg = f"A call does not fit into memory: {one_line(error)}"
            raise DeviceOutOfMemoryError(msg, batch_rows=0) from error
        msg = f"The model fails: {one_line(error)}"
        raise ModelError(msg, hint="give the shapes that it takes with --shape.") from error


def _options(runtime: Any, *, is_optimizing: bool) -> Any:  # noqa: ANN401 - the runtime has no usable types
    options = runtime.SessionOptions()
    if not is_optimizing:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = LOG_FATAL_ONLY
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = False
    return options


def _open(runtime: Any, model: Path, options: Any, device: Device | None = None) -> Any:  # noqa: ANN401 - no types
    providers: list[Any] = [PROVIDER]
    if device is not None and device.kind is DeviceKind.CUDA:
        runtime.preload_dlls()
        providers = [cuda_provider(device)]
    try:
        return runtime.InferenceSession(str(model), options, providers=providers)
    except Exception as error:  # the runtime's errors have no common base
        if is_out_of_memory(error):
            msg = f"Model {str(model)!r} does not fit into memory: {one_line(error)}"
            raise DeviceOutOfMemoryError(msg, batch_rows=0) from error
        msg = f"ONNX Runtime cannot load {str(model)!r}: {one_line(error)}"
        raise ModelError(msg, hint="check the file with onnx.checker, and its operators' domains.") from error


def _calls(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the nodes' events of each call; a call's own event follows those of its nodes, failed or not."""
    calls: list[list[dict[str, Any]]] = [[]]
    for event in events:
        if event.get("name") == "model_run":
            calls.append([])
        elif _is_node(event):
            calls[-1].append(event)
    found = [call for call in calls if call]
    if not found:
        msg = "ONNX Runtime ran no node of the model."
        raise ModelError(msg, hint="its outputs are constants: it needs no inference.")
    return found


def _before(counters: dict[str, Any], name: str, change: str) -> int | None:
    """Return a counter as it was before a node ran, `None` where the runtime does not keep it."""
    return int(counters[name]) - int(counters[change]) if name in counters and change in counters else None


def _is_node(event: dict[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event["name"]).endswith(NODE_SUFFIX)


def _node(event: dict[str, Any], workspaces: Mapping[str, int]) -> TracedNode:
    name = str(event["name"]).removesuffix(NODE_SUFFIX)
    outputs = tuple(
        TensorType(ELEMENT_TYPES.get(kind, str(kind)), tuple(shape))
        for output in event["args"].get("output_type_shape", ())
        for kind, shape in output.items()
    )
    return TracedNode(name, event["args"]["op_name"], outputs, workspaces.get(name, 0))


def _workspaces(statistics: Path) -> Mapping[str, int]:
    """Return bytes by node; the runtime appends a number to each name."""
    found: dict[str, int] = {}
    if not statistics.exists():
        return found
    for line in statistics.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.rsplit(",", STATISTICS_COLUMNS - 1)
        if len(fields) == STATISTICS_COLUMNS and fields[-1].isdigit() and "_" in fields[0]:
            found[fields[0].rsplit("_", 1)[0]] = int(fields[-1])
    return found
