"""Whatever a model file holds, profiling it ends in a profile or in words, in time and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sits_dagster.adapters.profiler import ProfileOptions, profile_model
from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.graph.checks import NODES_MAX
from sits_dagster.models.model import model_digest
from sits_dagster.models.profile import ModelProfile
from tests.models.hostile import CASES, hostile_models
from tests.models.onnx_files import model, node

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
READING_SECONDS_MAX, RUNNING_SECONDS_MAX = 10.0, 2.0
MESSAGE_CHARACTERS_MAX = 3000
# They take seconds, or memory by the gigabyte.
SLOW = {
    "chain_of_100_000_nodes",
    "constant_of_3_gigabytes",
    "constants_without_end",
    "external_data_of_two_gigabytes",
    "loop_of_all_the_years",
    "loop_that_doubles",
}
# The fast tests take one of so many, the slow ones the others.
FAST_EVERY = 3
QUICK = [name for name in CASES if name not in SLOW]
# Without the word for a place a digest need not read the graph.
ELSEWHERE = [name for name in CASES if name.startswith("external_data_") and "without_any" not in name]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel limits memory on Linux only")


def _options(**changes: Any) -> ProfileOptions:
    chosen = {
        "is_cached": False,
        "reading_seconds_max": READING_SECONDS_MAX,
        "running_seconds_max": RUNNING_SECONDS_MAX,
        "run_memory_bytes": GIB,
    }
    return ProfileOptions(**{**chosen, **changes})


def _check(name: str, folder: Path, **changes: Any) -> ModelProfile | None:
    """Profile one case; return what came of it, `None` if it was refused."""
    ((_, path, expectation),) = hostile_models(folder, [name])
    started = time.monotonic()
    found = _outcome(path, _options(**changes))
    assert time.monotonic() - started < READING_SECONDS_MAX + RUNNING_SECONDS_MAX
    if isinstance(found, ModelProfile):
        assert expectation != "error", found.warnings
        _check_profile(found)
        return found
    assert expectation != "profile", found
    assert len(found) < MESSAGE_CHARACTERS_MAX
    assert found.isprintable()
    return None


def _outcome(path: Path, options: ProfileOptions) -> ModelProfile | str:
    try:
        return profile_model(path, options)
    except (ConfigError, ModelError) as error:
        return str(error)


def _check_profile(profile: ModelProfile) -> None:
    """A profile is finite, survives JSON, and answers for a device."""
    text = profile.to_json()
    json.loads(text, parse_constant=_refuse)
    assert ModelProfile.from_json(text) == profile
    assert profile.batch_rows_max(16 * GIB) >= 0
    assert all(len(warning) < MESSAGE_CHARACTERS_MAX for warning in profile.warnings)


def _refuse(constant: str) -> NoReturn:
    msg = f"{constant} is no number"
    raise AssertionError(msg)


def _check_all(names: Iterable[str], folder: Path) -> None:
    for name in names:
        try:
            _check(name, folder)
        except BaseException as error:
            error.add_note(f"while {name} was profiled")
            raise


@pytest.mark.parametrize("part", range(4))
def test_a_hostile_file_is_profiled_or_refused(part: int, tmp_path: Path) -> None:
    """One of three files that take no time."""
    _check_all(QUICK[::FAST_EVERY][part::4], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in {*QUICK[::FAST_EVERY]}])
def test_every_hostile_file_is_profiled_or_refused(name: str, tmp_path: Path) -> None:
    """All the others."""
    _check(name, tmp_path)


def test_a_broken_file_is_refused_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no model can be is seen before anything is started or read."""
    monkeypatch.setattr(subprocess, "Popen", None)
    names = ("empty_file", "file_missing", "link_to_itself", "pipe_that_nobody_writes", "device_without_end")
    for name in (*names, "file_of_zeros_over_the_limit_of_protobuf"):
        assert _check(name, tmp_path) is None


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_digest_of_a_model_never_leaves_its_folder(name: str, tmp_path: Path) -> None:
    """Data elsewhere, or that no file can hold, is refused in words by all that read a model."""
    ((_, path, expectation),) = hostile_models(tmp_path, [name])
    if expectation == "error":
        with pytest.raises(ModelError, match=r"(?s)^Model .*Hint: "):
            model_digest(path)
    elif name not in SLOW:
        assert len(model_digest(path)) == 64


def test_a_loop_without_end_is_ended(tmp_path: Path) -> None:
    """It is read, trying it is given up in time, and the profile says so."""
    profile = _check("loop_without_end", tmp_path)
    assert profile is not None
    assert any("did not finish in 2 seconds" in warning for warning in profile.warnings)


def test_an_empty_batch_is_never_tried(tmp_path: Path) -> None:
    """A recurrent kernel aborts its process on a batch without anything in it."""
    profile = _check("dims_of_zero", tmp_path)
    assert profile is not None
    assert any("is empty" in warning for warning in profile.warnings)
    ((_, path, _),) = hostile_models(tmp_path / "fixed", ["dims_of_a_fixed_batch"])
    data = path.read_bytes().replace(b"\x08\x01\n\x02\x08\x08", b"\x08\x00\n\x02\x08\x08")
    assert data != path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(ModelError, match="fixes the batch at 0 rows"):
        profile_model(path, _options())


def test_functions_that_multiply_are_counted_before_they_are_put_in_line(tmp_path: Path) -> None:
    """Four kilobytes stand for ten thousand million nodes: nothing of them is made."""
    ((_, path, _),) = hostile_models(tmp_path, ["functions_that_multiply"])
    with pytest.raises(ModelError, match=f"more than {NODES_MAX} nodes in its functions"):
        profile_model(path, _options(is_run=False, read_memory_bytes=GIB // 4))


@pytest.mark.slow
def test_a_graph_with_too_many_nodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model([node("Relu", ["x"], ["y"])] * (NODES_MAX + 1)).SerializeToString())
    with pytest.raises(ModelError, match=f"more than {NODES_MAX} nodes"):
        profile_model(path, _options(is_run=False))


@pytest.mark.slow
def test_100_000_nodes_are_read_in_10_seconds(tmp_path: Path) -> None:
    """And what is told of them is exact: an operation for each of 8 numbers of a row and node."""
    ((_, path, _),) = hostile_models(tmp_path, ["chain_of_100_000_nodes"])
    started = time.monotonic()
    profile = profile_model(path, _options(is_run=False))
    assert time.monotonic() - started < READING_SECONDS_MAX
    assert profile.flops_per_row == 800_000
    _check_profile(profile)


MEASURED = """
import json, resource, sys
from sits_dagster.adapters.profiler import ProfileOptions, profile_model
profile = profile_model(sys.argv[1], ProfileOptions(is_cached=False))
used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([profile.memory_source, profile.warnings, max(used) * 1024]))
"""


@pytest.mark.slow
def test_weights_of_two_gigabytes_are_never_loaded(tmp_path: Path) -> None:
    """Neither the caller nor a child ever holds half of them."""
    ((_, path, _),) = hostile_models(tmp_path, ["external_data_of_two_gigabytes"])
    ran = subprocess.run([sys.executable, "-c", MEASURED, path], cwd=ROOT, capture_output=True, check=True)
    source, warnings, peak = json.loads(ran.stdout)
    assert path.with_name("w.bin").stat().st_size > 2 * GIB
    assert source == "graph"
    assert any("more than the 1073741824 allowed" in warning for warning in warnings)
    assert peak < GIB
