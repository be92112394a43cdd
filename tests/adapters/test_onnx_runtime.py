"""Which runtime is installed, and what its errors mean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sits_dagster.adapters.onnx_engine import is_device_fault, is_out_of_memory

ROOT = Path(__file__).resolve().parents[2]


def _import(tmp_path: Path, files: dict[str, str]) -> str:
    """Return what `load_runtime` says in a process with some files first on its path."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = (
        "from sits_dagster.adapters.onnx_engine import load_runtime\n"
        "from sits_dagster.errors import ConfigError\n"
        "try:\n    print(load_runtime().__name__)\nexcept ConfigError as error:\n    print(error)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "onnxruntime"),
        (
            {
                f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
                for name in ("onnxruntime", "onnxruntime_gpu")
            },
            "Both onnxruntime and onnxruntime-gpu are installed",
        ),
        ({"onnxruntime.py": "raise ImportError('libcuda.so.1 is missing')"}, "libcuda.so.1 is missing"),
        ({"onnxruntime/__init__.py": ""}, "has no InferenceSession"),
    ],
    ids=["one", "two", "broken", "half"],
)
def test_an_installation_that_cannot_work_says_how_to_mend_it(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    """Two runtimes, none or half of one: the message has the pip command."""
    output = _import(tmp_path, files)
    assert words in output
    assert ("pip " in output) == bool(files)


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("Available memory of 100 is smaller than requested bytes of 200"),
    RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1"),
    RuntimeError("CUDA failure 2: out of memory ; GPU=0"),
    RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDNN failure 4: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Exception during initialization: std::bad_alloc"),
    RuntimeError("bad allocation"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_the_known_words_for_no_memory(error: BaseException) -> None:
    """Every text that a runtime is known to give makes the batch shrink instead of failing the run."""
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["CUDA failure 700: an illegal memory access", "invalid shape", "memory"])
def test_other_errors_are_not_about_memory(text: str) -> None:
    """A broken device or model is not retried in ever smaller batches."""
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("CUDA failure 700: an illegal memory access was encountered", True),
        ("CUDNN_STATUS_EXECUTION_FAILED", True),
        ("cudaErrorECCUncorrectable", True),
        ("CUDA failure 2: out of memory", False),
        ("Non-zero status code returned while running Reshape node", False),
    ],
)
def test_a_broken_device_is_told_from_a_bad_row(text: str, *, is_fault: bool) -> None:
    """What no row is to blame for is tried again, and never sets good rows apart."""
    assert is_device_fault(RuntimeError(text)) is is_fault
