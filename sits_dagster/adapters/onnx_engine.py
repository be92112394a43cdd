"""ONNX Runtime as an engine: the only importer of it, and the only place that reads its errors.

On the CPU the session takes its memory from one bounded arena, so that running out of memory is real.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sits_dagster.devices.device import Device, DeviceKind
from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError, ModelError, SitsError, TransientError
from sits_dagster.inference.engine import Array, Arrays, MemorySample, ModelSignature, TensorSpec
from sits_dagster.models.inputs import row_axes
from sits_dagster.models.model import model_files

__all__ = [
    "DISTRIBUTIONS",
    "OnnxEngine",
    "cuda_provider",
    "is_device_fault",
    "is_out_of_memory",
    "load_runtime",
]

DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
INSTALL_HINT = 'install exactly one runtime: pip install "sits-dagster[cpu]" or "sits-dagster[gpu]".'
NEXT_POWER_OF_TWO = 0
LOG_ERRORS_ONLY = 3
# The texts of every allocation failure that ONNX Runtime, CUDA, cuBLAS and cuDNN are known to give.
OUT_OF_MEMORY = re.compile(
    r"smaller than requested bytes of|Failed to allocate memory for requested buffer|"
    r"CUDA failure 2: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
    r"std::bad_alloc|bad allocation"
)
# A device that answers so computes nothing more in this process, whatever the rows.
DEVICE_FAULT = re.compile(
    r"CUDA failure \d+|cudaError\w+|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)|"
    r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)|device-side assert|uncorrectable ECC"
)
FAULT_RETRY_SECONDS = 30.0
MEMORY_SAMPLE_SECONDS = 0.1
ELEMENT_TYPES = {
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    "tensor(string)": "string",
    **{f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_arena_lock = threading.Lock()
_arena: dict[str, int] = {}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of the runtime says that memory ran out; its type does not tell."""
    return isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def is_device_fault(error: BaseException) -> bool:
    """Return whether an error of the runtime says that the device itself failed, whatever the rows."""
    return not is_out_of_memory(error) and DEVICE_FAULT.search(str(error)) is not None


def load_runtime() -> ModuleType:
    """Return the `onnxruntime` module.

    Raises:
        ConfigError: No runtime is installed, two are (each breaks the other), or it is broken.
    """
    installed = [name for name in DISTRIBUTIONS if _is_installed(name)]
    if len(installed) > 1:
        msg = "Both onnxruntime and onnxruntime-gpu are installed; they overwrite each other's files."
        raise ConfigError(msg, hint=f"pip uninstall -y {' '.join(installed)}, then {INSTALL_HINT}")
    try:
        import onnxruntime
    except ImportError as error:
        msg = f"ONNX Runtime cannot be imported: {error}."
        raise ConfigError(msg, hint=INSTALL_HINT) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        msg = "The installed onnxruntime is only half there: it has no InferenceSession."
        raise ConfigError(msg, hint=f"pip uninstall -y {' '.join(DISTRIBUTIONS)}, then {INSTALL_HINT}")
    return onnxruntime


class OnnxEngine:
    """A model loaded on one device.

    `digest` may be set to what names the loaded model's contents. Rows lie along axis 0 of all arrays that go
    in and come out, whatever the model's own axes are.

    Args:
        model: Path of the `.onnx` file.
        device: Where it runs, with the memory that it may hold.
        threads: CPU threads of one call, >= 1.
        optimized: The same model as ONNX Runtime's optimised graph, which plans its memory alike in every
            process and loads faster.

    Raises:
        ModelError: The file is not a model that the runtime can load.
        DeviceOutOfMemoryError: The weights do not fit.
        ConfigError: The runtime is missing or cannot use the device.
    """

    def __init__(
        self, model: str | Path, device: Device, *, threads: int = 1, optimized: Path | None = None
    ) -> None:
        self._model = str(model)
        self._optimized = optimized
        self._device = device
        self._runtime = load_runtime()
        _check_weights(Path(model), device)
        self._session: Any = self._open(threads)
        self._input_axes, self._inputs_shared = self._read_input_axes()
        self._output_axes: Mapping[str, int | None] = {}
        self._outputs_shared: frozenset[str] = frozenset()
        self.signature = self._read_signature()
        self._should_shrink = False
        self._is_interrupted = False
        self._bytes_used: int | None = None
        self._sampled_at = -MEMORY_SAMPLE_SECONDS
        self.digest = ""
        self._running: Any = None
        self._names = [spec.name for spec in self.signature.outputs]
        self._batched = frozenset(spec.name for spec in self.signature.inputs if spec.is_batched)

    def predict(self, inputs: Arrays) -> Arrays:
        """Return the outputs of one batch; a model of fixed batch size gets its batch filled up."""
        rows = next((len(inputs[name]) for name in self._batched), 1)
        if rows == 0:
            # Some recurrent operators abort the process on a batch without rows.
            msg = "A batch needs at least one row."
            raise ModelError(msg)
        fixed = self.signature.batch_rows_fixed
        feeds = {n: _fill_up(a, fixed) if fixed and n in self._batched else a for n, a in inputs.items()}
        for name, axis in self._input_axes.items():
            feeds[name] = np.moveaxis(feeds[name], 0, axis)
        options = self._run_options()
        self._running = options
        # Read after `_running` is set: an interruption of this moment finds one of the two.
        options.terminate = self._is_interrupted
        try:
            outputs = self._session.run(self._names, feeds, options)
        except Exception as error:  # the runtime's errors have no common base
            raise self._translate(error, rows) from error
        finally:
            self._running = None
        self._should_shrink = False
        found = zip(self._names, map(_as_array, outputs, self._names), strict=True)
        led = {name: self._rows_first(name, array, fixed or rows) for name, array in found}
        return {name: array[:rows] if fixed and array.ndim else array for name, array in led.items()}

    def _rows_first(self, name: str, array: Array, rows: int) -> Array:
        if name in self._outputs_shared:
            return np.broadcast_to(array, (rows, *array.shape))
        axis = self._output_axes.get(name, 0)
        return array[np.newaxis] if axis is None else np.moveaxis(array, axis, 0) if axis else array

    def place_rows(self, output_axes: Mapping[str, int | None], *, shared: Collection[str] = ()) -> None:
        """Take the rows of each output from its axis from now on; those not named have them along axis 0.

        Args:
            output_axes: The axis by output; `None` makes the whole output one row.
            shared: Outputs that are the same for all rows: each row gets them whole.
        """
        self._output_axes = dict(output_axes)
        self._outputs_shared = frozenset(shared)
        self.signature = self._read_signature()

    @property
    def device_name(self) -> str:
        """The device's model name."""
        return self._device.name

    def memory(self) -> MemorySample:
        """Return the limit and, on the CPU, the process's memory: the runtime does not tell its arena's."""
        if (
            self._device.kind is DeviceKind.CPU
            and time.monotonic() - self._sampled_at > MEMORY_SAMPLE_SECONDS
        ):
            self._sampled_at, self._bytes_used = time.monotonic(), _resident_bytes()
        return MemorySample(bytes_used=self._bytes_used, bytes_limit=self._device.memory_bytes_limit)

    def interrupt(self) -> None:
        """End a call that is running, and every later one; the model may be in an endless loop."""
        self._is_interrupted = True
        running = self._running
        if running is not None:
            running.terminate = True

    def close(self) -> None:
        """Give the model's memory back; the engine cannot be used afterwards."""
        self._session = None

    def _open(self, threads: int) -> Any:  # noqa: ANN401 - the runtime has no usable types
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = LOG_ERRORS_ONLY
        # With a pattern the second run of a shape needs more memory than the first, without being faster.
        options.enable_mem_pattern = False
        if self._device.kind is DeviceKind.CPU:
            providers: Sequence[Any] = ["CPUExecutionProvider"]
            _register_arena(self._runtime, self._device)
            options.add_session_config_entry("session.use_env_allocators", "1")
        else:
            providers = [cuda_provider(self._device)]
            self._runtime.preload_dlls()
        try:
            session = self._load_optimized(options, providers) or self._runtime.InferenceSession(
                self._model, options, providers=providers
            )
        except Exception as error:  # the runtime's errors have no common base
            raise self._translate(error, 0) from error
        wanted = "CUDAExecutionProvider" if self._device.kind is DeviceKind.CUDA else "CPUExecutionProvider"
        if wanted not in session.get_providers():
            msg = f"ONNX Runtime does not use {self._device.name}: it fell back to {session.get_providers()}."
            raise ConfigError(
                msg, hint='install "sits-dagster[gpu]" and a driver that fits its CUDA version.'
            )
        return session

    def _load_optimized(self, options: Any, providers: Sequence[Any]) -> Any:  # noqa: ANN401 - no types
        """Return a session of the optimised graph, or `None` where there is none that can be loaded."""
        if self._optimized is None:
            return None
        level = options.graph_optimization_level
        options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return self._runtime.InferenceSession(str(self._optimized), options, providers=providers)
        except Exception as error:  # a damaged cache is no error: the model itself is there
            if is_out_of_memory(error):
                raise
            return None
        finally:
            options.graph_optimization_level = level

    def _read_signature(self) -> ModelSignature:
        inputs = tuple(
            _spec(
                value,
                self._model,
                self._input_axes.get(value.name, 0),
                is_shared=value.name in self._inputs_shared,
            )
            for value in self._session.get_inputs()
        )
        outputs = tuple(
            _spec(
                value,
                self._model,
                -1 if value.name in self._outputs_shared else self._output_axes.get(value.name, 0),
            )
            for value in self._session.get_outputs()
        )
        return ModelSignature(inputs=inputs, outputs=outputs)

    def _read_input_axes(self) -> tuple[Mapping[str, int], frozenset[str]]:
        """Return the inputs whose rows do not lie along axis 0, with their axis, and those without rows."""
        axes = row_axes({value.name: value.shape for value in self._session.get_inputs()})
        moved = {name: axis for name, axis in axes.items() if axis}
        is_free = any(axis is not None for axis in axes.values())
        return moved, frozenset(name for name, axis in axes.items() if is_free and axis is None)

    def _run_options(self) -> Any:  # noqa: ANN401 - the runtime has no usable types
        options = self._runtime.RunOptions()
        if not self._should_shrink:
            return options
        # After running out of memory the arena keeps its fragments unless a run gives them back.
        where = "cpu:0" if self._device.kind is DeviceKind.CPU else f"gpu:{self._device.ordinal}"
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", where)
        return options

    def _translate(self, error: BaseException, rows: int) -> SitsError:
        limit = self._device.memory_bytes_limit
        if is_out_of_memory(error):
            self._should_shrink = True
            msg = f"{rows} rows do not fit into {limit} bytes of {self._device.name}: {error}"
            return DeviceOutOfMemoryError(
                msg, batch_rows=rows, hint="use smaller batches or a larger device."
            )
        if is_device_fault(error):
            msg = f"{self._device.name} ({self._device.uuid}) failed: {error}"
            hint = "look at the device's health; the step is tried again."
            return TransientError(msg, retry_after_seconds=FAULT_RETRY_SECONDS, hint=hint)
        msg = (
            f"Model {self._model!r} failed on a batch of {rows} rows: {error}"
            if rows
            else (f"Model {self._model!r} cannot be loaded: {error}")
        )
        return ModelError(msg, hint="check the file with onnx.checker, and the arrays' shapes.")


def _resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):  # only Linux tells
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _register_arena(runtime: ModuleType, device: Device) -> None:
    """Make the process's one arena, once; ONNX Runtime cannot change its limit afterwards."""
    with _arena_lock:
        limit = _arena.get("bytes")
        if limit is not None and limit != device.memory_bytes_limit:
            msg = (
                f"This process already limits ONNX Runtime's CPU memory to {limit} bytes; "
                f"{device.memory_bytes_limit} bytes are wanted."
            )
            raise ConfigError(msg, hint="use one CPU memory limit in a process.")
        if limit is None:
            info = runtime.OrtMemoryInfo(
                "Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
            )
            # Growing by exactly what is asked leaves, with batches of many shapes, regions that fit none of
            # the next ones: on ragged text lines it held twice as much, and every new region cost time.
            config = runtime.OrtArenaCfg(
                {"max_mem": device.memory_bytes_limit, "arena_extend_strategy": NEXT_POWER_OF_TWO}
            )
            runtime.create_and_register_allocator(info, config)
            _arena["bytes"] = device.memory_bytes_limit


def cuda_provider(device: Device) -> tuple[str, Mapping[str, str]]:
    """Return the CUDA provider's name and the options that bound its memory."""
    return "CUDAExecutionProvider", {
        "device_id": str(device.ordinal),
        "gpu_mem_limit": str(device.memory_bytes_limit),
        "arena_extend_strategy": "kSameAsRequested",
        # The default search tries every algorithm for each new shape, with large workspaces.
        "cudnn_conv_algo_search": "HEURISTIC",
    }


def _check_weights(model: Path, device: Device) -> None:
    size = sum(file.stat().st_size for file in model_files(model))
    limit = device.memory_bytes_limit
    if size >= limit:
        # The arena does not check weights against its limit, and beyond it no longer limits anything.
        msg = (
            f"The weights of {str(model)!r} ({size} bytes) exceed the {limit} bytes allowed on {device.name}."
        )
        raise DeviceOutOfMemoryError(
            msg, batch_rows=0, hint="raise the device's memory limit or use a smaller model."
        )


def _spec(
    value: Any,  # noqa: ANN401 - the runtime has no usable types
    model: str,
    axis: int | None,
    *,
    is_shared: bool = False,
) -> TensorSpec:
    """Return the type with the rows' axis first: it is added where `axis` is negative or `None`."""
    kind = ELEMENT_TYPES.get(value.type)
    if kind is None:
        msg = f"Model {model!r} has a tensor {value.name!r} of type {value.type}, which rows cannot carry."
        raise ModelError(msg, hint="export the model with number or string tensors as inputs and outputs.")
    shape = [length if isinstance(length, int) and length >= 0 else None for length in value.shape or ()]
    if axis is None:
        shape.insert(0, 1)
    elif axis < 0:
        shape.insert(0, None)
    elif 0 < axis < len(shape):
        shape.insert(0, shape.pop(axis))
    return TensorSpec(name=value.name, dtype=kind, shape=tuple(shape), is_shared=is_shared and bool(shape))


def _fill_up(array: Array, rows: int) -> Array:
    missing = rows - len(array)
    if missing <= 0:
        return array
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def _as_array(value: Any, name: str) -> Array:  # noqa: ANN401 - the runtime may give lists
    if isinstance(value, np.ndarray):
        return value
    msg = f"Model output {name!r} is a {type(value).__name__}, not a tensor; its rows cannot be told apart."
    raise ModelError(msg, hint="export the model without ZipMap or sequence outputs.")
