"""Builds the stub of NVIDIA's management library, and runs Python against it.

The library is found by its name when a process starts, hence a child process for each question.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY = "libnvidia-ml.so.1"
CHILD_SECONDS_MAX = 60

GPU_A = "GPU-aaaa1111-0000-0000-0000-000000000000|NVIDIA Stub 80GB|1000|100|"
GPU_B = "GPU-aaaa2222-0000-0000-0000-000000000000|NVIDIA Stub 80GB|2000|300|old"
GPU_C = "GPU-cccc3333-0000-0000-0000-000000000000|NVIDIA Stub 40GB|3001|0|"
IS_LOST = 15


def build(folder: Path) -> Path:
    """Return the folder that holds the compiled library."""
    if shutil.which("cc") is None or not sys.platform.startswith("linux"):
        pytest.skip("the stub needs Linux and a C compiler")
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(folder / LIBRARY), str(SOURCE)], check=True, timeout=60)
    return folder


def ask(code: str, *, library: Path | None, gpus: list[str] | None = None, **variables: str) -> object:
    """Run `code` in a child process and return what it assigned to `answer`, by way of JSON."""
    program = textwrap.dedent(code) + "\nimport json, sys; json.dump(answer, sys.stdout)"
    hidden = ("CUDA_", "NVML_STUB_", "LD_LIBRARY_PATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"NVML_STUB_GPUS": "\n".join(gpus or []), "PYTHONPATH": str(ROOT), **variables}
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS_MAX,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
