"""Whatever a child does, its parent gets an answer or one error, in time, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sits_dagster import errors
from sits_dagster.adapters import sandbox, sandbox_process
from sits_dagster.adapters.sandbox import SandboxLimits, run_child, run_sandboxed
from sits_dagster.errors import (
    ConfigError,
    DataError,
    DeviceOutOfMemoryError,
    InvariantError,
    ModelError,
    SitsError,
    TransientError,
)

ROOT = Path(__file__).resolve().parents[2]
TARGETS = Path(__file__).parent
SMALL = SandboxLimits(memory_bytes=512 * 2**20, deadline_seconds=30)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel limits memory on Linux only")


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail every test after which a process, a descriptor or a temporary file is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.syspath_prepend(TARGETS)
    gc.collect()
    children = psutil.Process().children(recursive=True)
    descriptors = len(list(Path("/dev/fd").iterdir()))
    yield
    assert psutil.Process().children(recursive=True) == children
    assert list(folder.iterdir()) == []
    gc.collect()
    assert len(list(Path("/dev/fd").iterdir())) == descriptors


def _run(function: str, limits: SandboxLimits = SMALL, **request: Any) -> Any:
    return run_child(f"sandbox_targets:{function}", request, limits=limits, subject="Model 'a.onnx'")


def _wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    """Numbers, texts, nothing and odd file names survive, also where they fill many pipes."""
    request: dict[str, Any] = {
        "a": [1, 2.5, None, True],
        "é\n": {"b": "\udcff"},
        "large": "x" * 3_000_000,
        "big": 2**80,
    }
    assert _run("echo", **request) == request


def test_a_function_needs_to_be_listed() -> None:
    """Nobody makes a child run what was not meant for it."""
    with pytest.raises(InvariantError, match="may not be run in a sandbox"):
        run_sandboxed("os:system", {})


def test_a_listed_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listed is run, with the default limits."""
    monkeypatch.setattr(sandbox, "TARGETS", frozenset({"sandbox_targets:echo"}))
    assert run_sandboxed("sandbox_targets:echo", {"a": 1}) == {"a": 1}


def test_every_listed_function_is_ours() -> None:
    """The list names functions of this package only."""
    assert all(target.startswith("sits_dagster.") and ":" in target for target in sandbox.TARGETS)


def test_the_child_is_a_group_of_its_own_in_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes is gone, it holds no foreign descriptor, and the settings of threads are its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = _run("describe_self")
    assert found["pid"] == found["group"] != os.getpgrp()
    assert Path(found["temporary"]).parent == Path(found["folder"])
    assert not Path(found["folder"]).exists()
    assert found["threads"] == "3"
    assert found["descriptors"] <= 5  # the three standard ones, the reply and the listing itself
    assert not {"numpy", "onnx", "dagster"} & set(found["modules"]), "a child imports what it needs"


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_of_ours_arrives_as_it_was_raised(name: str) -> None:
    """Class, message, hint and facts are those of the child."""
    facts: dict[str, Any] = {"hint": "mend it."}
    if name == "DeviceOutOfMemoryError":
        facts["batch_rows"] = 7
    if name == "TransientError":
        facts["retry_after_seconds"] = 2.5
    with pytest.raises(SitsError) as caught:
        _run("raise_known", kind=name, message="It is 'broken'.", facts=facts)
    assert type(caught.value) is getattr(errors, name)
    assert vars(caught.value) == {"message": "It is 'broken'.", **facts}
    assert str(caught.value) == "It is 'broken'. Hint: mend it."


def test_a_derived_error_arrives_as_the_nearest_one_we_know() -> None:
    with pytest.raises(DataError, match="row 3") as caught:
        _run("raise_derived")
    assert type(caught.value) is DataError


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raise_fault", "failed with KeyError: 'a fault\\\\x1b\\[31m'"),
        ("raise_namesake", "failed with ModelError"),
        ("leave_politely", "failed with SystemExit: 3"),
        ("leave_at_once", "exit code 3"),
        ("answer_no_json", "failed with TypeError"),
        ("not_there", "failed with AttributeError"),
    ],
)
def test_what_should_have_been_translated_is_our_fault(function: str, words: str) -> None:
    """An error without a class of ours, or none and no answer, names the function to look at."""
    with pytest.raises(InvariantError, match=words) as caught:
        _run(function)
    assert f"sandbox_targets:{function}" in str(caught.value)
    assert "Model 'a.onnx'" in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"error": "SystemExit", "message": "", "hint": ""}',
        '{"error": "ModelError"}',
        '{"error": [], "message": 1, "hint": {}}',
        "[" * 100_000,
        "9" * 10_000,
    ],
    ids=["nothing", "half", "list", "foreign", "bare", "types", "nest", "digits"],
)
def test_an_answer_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvariantError, match="without a readable answer"):
        _run("answer_rubbish", text=text)


@pytest.mark.parametrize("kind", [DeviceOutOfMemoryError, TransientError])
def test_an_error_without_its_facts_is_still_that_error(kind: type[SitsError]) -> None:
    answer = {
        "error": kind.__name__,
        "message": "m",
        "hint": "",
        "batch_rows": [],
        "retry_after_seconds": "x",
    }
    with pytest.raises(kind, match="m"):
        _run("answer_rubbish", text=json.dumps(answer))


@linux_only
@pytest.mark.parametrize("function", ["allocate", "say_bad_alloc", "raise_bad_alloc"])
def test_memory_beyond_the_limit_is_the_model_s_fault(function: str) -> None:
    """Python's, C++'s and the runtime's ways to run out of memory give one error that names the limit."""
    with pytest.raises(ModelError, match=r"memory.*536870912 bytes") as caught:
        _run(function, bytes=2 * 2**30)
    assert "Model 'a.onnx'" in str(caught.value)


def test_memory_within_the_limit_is_given() -> None:
    assert _run("allocate", bytes=256 * 2**20) == 256 * 2**20


def test_a_child_that_the_kernel_kills_ran_out_of_memory() -> None:
    with pytest.raises(ModelError, match="memory"):
        _run("signal_self", signal=signal.SIGKILL)


@pytest.mark.parametrize(("function", "name"), [("abort", "SIGABRT"), ("read_nowhere", "SIGSEGV")])
def test_a_crash_names_its_signal(function: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"Model 'a.onnx' makes the process .* crash \\({name}\\)"):
        _run(function)


def test_a_signal_from_outside_does_not_blame_the_model() -> None:
    with pytest.raises(TransientError, match="ended from outside by SIGTERM"):
        _run("signal_self", signal=signal.SIGTERM)


def test_endless_recursion_is_the_model_s_fault() -> None:
    with pytest.raises(ModelError, match="nested too deeply"):
        _run("recurse")


def test_the_deadline_ends_the_child_and_all_that_it_started(tmp_path: Path) -> None:
    """A loop that holds the interpreter, a program and a fork are gone when the error is raised."""
    note = tmp_path / "note"
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"Model 'a.onnx' did not finish in 1.5 seconds"):
        _run("loop_with_children", SandboxLimits(deadline_seconds=1.5), note=str(note))
    assert 1.4 < time.monotonic() - start < 6
    pids = [int(word) for word in note.read_text().split()]
    assert len(pids) == 3
    assert _wait_for(lambda: not any(map(_is_running, pids)))


@pytest.mark.parametrize("function", ["ignore_signals", "close_everything"])
def test_nothing_outlives_the_deadline(function: str) -> None:
    with pytest.raises(ModelError, match="did not finish in 1 seconds"):
        _run(function, SandboxLimits(deadline_seconds=1))


def test_what_an_answer_leaves_running_is_ended_without_a_wait() -> None:
    """A fork that holds the pipes open neither delays the answer nor survives it."""
    start = time.monotonic()
    forked = _run("answer_with_children")
    assert time.monotonic() - start < 5
    assert _wait_for(lambda: not _is_running(forked))


def test_output_is_kept_to_its_end_and_harmless() -> None:
    """Of 100 MiB only the tail is kept, and no letter of it steers a terminal."""
    said: list[str] = []
    assert run_child("sandbox_targets:print_much", {"kibibytes": 100 * 1024}, limits=SMALL, say=said.append)
    assert len(said) == 1
    assert said[0].endswith("the last line")
    assert len(said[0]) < 2 * sandbox_process.OUTPUT_BYTES_MAX
    assert "\x1b" not in said[0]


def test_silence_says_nothing() -> None:
    said: list[str] = []
    assert run_child("sandbox_targets:echo", {}, limits=SMALL, say=said.append) == {}
    assert said == []


def test_a_result_beyond_its_limit_is_refused() -> None:
    limits = SandboxLimits(deadline_seconds=30, result_bytes_max=2**20)
    with pytest.raises(ModelError, match="more than the 1048576 bytes"):
        _run("answer_much", limits, bytes=100 * 2**20)
    assert len(_run("answer_much", limits, bytes=2**20 - 100)) == 2**20 - 100


@pytest.mark.parametrize("field", ["memory_bytes", "deadline_seconds", "result_bytes_max"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_sandbox_without_limits_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        SandboxLimits(**{field: value})


def test_threads_may_share_it() -> None:
    """Four at a time, each gets its own answer."""
    answers: dict[int, Any] = {}

    def work(number: int) -> None:
        answers[number] = _run("echo", number=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: {"number": number} for number in range(4)}


def test_a_process_that_cannot_be_started_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/not/there/python")
    with pytest.raises(TransientError, match="No process could be started"):
        _run("echo")


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of models may hold files that are called like libraries."""
    for name in ("json", "onnx", "signal", "sandbox_targets", "sits_dagster"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = _run("describe_self")
    assert Path(found["json"]).parent.parent == Path(os.__file__).parent
    assert str(tmp_path) not in found["path"]
    assert "" not in found["path"]


def test_the_package_is_found_where_only_the_path_variable_names_it(tmp_path: Path) -> None:
    """A bare interpreter with PYTHONPATH, in another folder, can run it too."""
    code = (
        "from sits_dagster.adapters.sandbox import SandboxLimits, run_child\n"
        "print(run_child('sandbox_targets:echo', {'a': 1}, limits=SandboxLimits()))"
    )
    path = os.pathsep.join(
        [str(TARGETS), *(entry for entry in sys.path if "site-packages" in entry), str(ROOT)]
    )
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    output = subprocess.check_output([sys.executable, "-S", "-c", code], env=environment, cwd=tmp_path)
    assert output == b"{'a': 1}\n"


PARENT = """
import sys
from sits_dagster.adapters.sandbox import SandboxLimits, run_child
run_child(
    "sandbox_targets:loop_with_children", {"note": sys.argv[1]}, limits=SandboxLimits(deadline_seconds=60)
)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=linux_only),
    ],
)
def test_a_parent_that_ends_takes_all_with_it(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a request to end and a kill leave neither the child nor what it started."""
    note, folder = tmp_path / "note", tmp_path / "folder"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(TARGETS), "TMPDIR": str(folder)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(note)],
        env=environment,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert _wait_for(note.exists)
        pids = [int(word) for word in note.read_text().split()]
        parent.send_signal(number)
        _, words = parent.communicate(timeout=20)
        assert _wait_for(lambda: not any(map(_is_running, pids)))
        if number == signal.SIGINT:
            assert b"KeyboardInterrupt" in words
            assert list(folder.iterdir()) == []
    finally:
        parent.kill()
        parent.wait()
