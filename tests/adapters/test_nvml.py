"""GPUs as NVIDIA's library tells of them: numbering, visibility, and those that do not answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from sits_dagster.adapters.nvml import _text, resolve_visible
from tests.data import nvml_stub
from tests.data.nvml_stub import GPU_A, GPU_B, GPU_C, IS_LOST

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-cccc3333"]
READ = """
import dataclasses, os
from sits_dagster.adapters.nvml import read_devices
reading = read_devices(watermark=0.85, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
answer = {"devices": [dataclasses.asdict(d) for d in reading.devices], "notes": reading.notes}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


def read(library: Path, gpus: list[str], **variables: str) -> dict:
    return nvml_stub.ask(READ, library=library, gpus=gpus, **variables)


def test_every_gpu_is_described(library: Path) -> None:
    answer = read(library, [GPU_A, GPU_B, GPU_C])
    assert answer["notes"] == []
    assert [device["ordinal"] for device in answer["devices"]] == [0, 1, 2]
    assert answer["devices"][2] == {
        "uuid": "GPU-cccc3333-0000-0000-0000-000000000000",
        "kind": "cuda",
        "ordinal": 2,
        "name": "NVIDIA Stub 40GB",
        "memory_bytes_total": 3001,
        "memory_bytes_limit": 2550,  # rounded down
        "memory_bytes_used": 0,
    }


def test_ordinals_are_those_that_cuda_gives(library: Path) -> None:
    answer = read(library, [GPU_A, GPU_B, GPU_C], CUDA_VISIBLE_DEVICES="2,GPU-cccc,0")
    assert [(device["uuid"][:8], device["ordinal"]) for device in answer["devices"]] == [("GPU-cccc", 0)]
    assert "'GPU-cccc'" in answer["notes"][0]
    answer = read(library, [GPU_A, GPU_B, GPU_C], CUDA_VISIBLE_DEVICES="GPU-cccc,GPU-aaaa1")
    assert [device["uuid"][:9] for device in answer["devices"]] == ["GPU-cccc3", "GPU-aaaa1"]
    assert [device["ordinal"] for device in answer["devices"]] == [0, 1]


@pytest.mark.parametrize("call", ["handle", "uuid", "memory"])
@pytest.mark.parametrize("code", [IS_LOST, 999])
def test_lost_gpu_does_not_hide_the_others(library: Path, call: str, code: int) -> None:
    answer = read(library, [GPU_A, GPU_B.replace("old", f"{call}={code}"), GPU_C])
    assert [device["ordinal"] for device in answer["devices"]] == [0, 2]
    (note,) = answer["notes"]
    assert "GPU 1" in note
    assert ("lost" if code == IS_LOST else "Unknown") in note


def test_impossible_use_is_missing(library: Path) -> None:
    answer = read(library, [GPU_A.replace("|100|", "|1001|"), GPU_B])
    assert [device["memory_bytes_used"] for device in answer["devices"]] == [None, 300]


@pytest.mark.parametrize("total", ["0", "18446744073709551615"])
def test_gpu_of_impossible_memory_is_left_out(library: Path, total: str) -> None:
    answer = read(library, [GPU_A.replace("|1000|", f"|{total}|"), GPU_B])
    assert [device["ordinal"] for device in answer["devices"]] == [1]
    assert total in answer["notes"][0]


def test_gpu_in_mig_mode_is_left_out(library: Path) -> None:
    answer = read(library, [f"{GPU_A}mig", GPU_B])
    assert [device["ordinal"] for device in answer["devices"]] == [1]
    assert "MIG" in answer["notes"][0]


def test_library_is_closed_each_time(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    read(library, [GPU_A, f"{GPU_B},memory={IS_LOST}"], NVML_STUB_LOG=str(log))
    assert log.read_text(encoding="utf-8").split() == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("variables", "has_library", "reason", "hint"),
    [
        ({}, False, "Shared Library Not Found", "driver"),
        ({"NVML_STUB_INIT": "9"}, True, "Driver Not Loaded", "load"),
        ({"NVML_STUB_INIT": "999"}, True, "Unknown Error", "nvidia-smi"),
    ],
)
def test_driver_that_does_not_answer_is_told(
    library: Path, variables: dict[str, str], has_library: bool, reason: str, hint: str
) -> None:
    code = """
        from sits_dagster.adapters.nvml import is_available, read_devices
        from sits_dagster.errors import ConfigError
        try:
            read_devices(watermark=1.0, visible=None)
        except ConfigError as error:
            answer = [is_available(), error.message, error.hint]
    """
    if not has_library:
        pytest.importorskip("pynvml")
        _skip_where_there_is_a_driver()
    is_available, message, told = nvml_stub.ask(
        code, library=library if has_library else None, gpus=[GPU_A], **variables
    )
    assert not is_available
    assert reason in message
    assert hint in told


def test_driver_that_answers_is_available(library: Path) -> None:
    code = "from sits_dagster.adapters.nvml import is_available; answer = is_available()"
    assert nvml_stub.ask(code, library=library) is True


def test_package_alone_does_not_load_the_driver() -> None:
    code = "import sys, sits_dagster; sys.exit('pynvml' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=nvml_stub.ROOT, timeout=60, check=True)


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, (0, 1, 2)),
        ("0,1,2", (0, 1, 2)),
        ("2, 0", (2, 0)),
        ("1", (1,)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", (1,)),
        ("0,3,1", (0,)),
        ("0,,1", (0,)),
        ("1gpu,0", (1, 0)),  # CUDA reads the number at the start
        ("0,1,0", ()),  # named twice
        ("GPU-cccc3333", (2,)),
        ("GPU-c,GPU-aaaa1", (2, 0)),
        ("GPU-aaaa", ()),  # meant by two
        ("GPU-cccc,GPU-aaaa", (2,)),
        ("GPU-cccc,0", (2,)),  # not mixed
        ("0,GPU-cccc", (0,)),
        ("GPU-c,GPU-cccc", ()),
        ("MIG-1234", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, indexes: tuple[int, ...]) -> None:
    visibility = resolve_visible(visible, UUIDS)
    assert visibility.indexes == indexes
    ignores_some = visible is not None and len(indexes) < len(visible.split(","))
    assert bool(visibility.note) == ignores_some


def test_lost_gpu_can_be_named_by_index_only() -> None:
    uuids = ["GPU-aaaa1111", None, "GPU-cccc3333"]
    assert resolve_visible("1,2", uuids).indexes == (1, 2)
    assert resolve_visible("GPU-aaaa", uuids).indexes == (0,)
    assert resolve_visible("GPU-bbbb,GPU-aaaa", uuids).indexes == ()


def test_names_may_be_bytes() -> None:
    assert (_text("NVIDIA"), _text(b"NVIDIA \xff")) == ("NVIDIA", "NVIDIA \ufffd")


def _skip_where_there_is_a_driver() -> None:
    code = "from sits_dagster.adapters.nvml import is_available; answer = is_available()"
    if nvml_stub.ask(code, library=None):
        pytest.skip("this host has NVIDIA's driver")
