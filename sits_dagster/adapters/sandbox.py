"""Work on untrusted files in a child process, where it may crash, hang or ask for all memory.

What is limited is the damage of broken and hostile models. It is no wall against foreign machine code: the
child has the rights and the environment of its parent.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sits_dagster import errors
from sits_dagster.adapters.onnx_engine import is_out_of_memory
from sits_dagster.adapters.sandbox_process import Ending, Reason, converse, printable
from sits_dagster.errors import (
    ConfigError,
    DeviceOutOfMemoryError,
    InvariantError,
    ModelError,
    SitsError,
    TransientError,
)

__all__ = ["TARGETS", "SandboxLimits", "run_sandboxed"]

# The functions that may be run, as "package.module:function". Each takes the request and returns JSON values.
TARGETS: frozenset[str] = frozenset(
    f"sits_dagster.adapters.profiling:{name}"
    for name in ("analyse_model", "list_files", "probe_model", "try_model")
)

MEMORY_BYTES = 4 * 2**30
DEADLINE_SECONDS = 60.0
RESULT_BYTES_MAX = 64 * 2**20
LAST_WORDS_CHARACTERS = 400
RETRY_AFTER_SECONDS = 30.0

HOME = Path(__file__).resolve().parents[2]
ERROR_CLASSES: Mapping[str, type[SitsError]] = {name: getattr(errors, name) for name in errors.__all__}
# What the loader, the kernel, Python and OpenBLAS say; the runtime's own words are known to its engine.
OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b|[Cc]annot allocate memory|failed to map segment|Memory allocation still failed"
)
# What a process does to itself; every other signal comes from outside.
SIGNALS_OF_CRASHES = {
    getattr(signal, name)
    for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
    if hasattr(signal, name)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a child may use before it is ended.

    Args:
        memory_bytes: Private writable memory, > 0: the heap and the threads' stacks (8 MiB each, and NumPy
            starts a thread a core), touched or not. Mapped files, libraries and addresses that are only
            reserved do not count: ONNX Runtime with eight threads reserves 800 MB for 180 MB of data, and
            CUDA far more. Python with onnx and onnxruntime on two cores needs about 120 MiB. Linux only;
            elsewhere just the deadline holds.
        deadline_seconds: From the start of the process to its whole answer, > 0.
        result_bytes_max: The answer as JSON text, > 0.

    Raises:
        ConfigError: A limit is not above 0.
    """

    memory_bytes: int = MEMORY_BYTES
    deadline_seconds: float = DEADLINE_SECONDS
    result_bytes_max: int = RESULT_BYTES_MAX

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "deadline_seconds", "result_bytes_max"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                msg = f"{name} is {value}."
                raise ConfigError(msg, hint="a sandbox needs a finite limit above 0.")


def run_sandboxed(
    target: str,
    request: Mapping[str, Any],
    *,
    limits: SandboxLimits | None = None,
    subject: str = "The model",
    say: Callable[[str], None] | None = None,
) -> Any:  # noqa: ANN401 - JSON
    """Return what a function answers in a process of its own, of which nothing is left afterwards.

    It may be called from any thread. The child runs in an empty temporary folder, imports from where this
    process does except from its current folder, and is killed with all that it started when the answer is
    there, the deadline is over, the caller is interrupted or this process ends. (A process that leaves the
    child's process group on purpose escapes that.)

    Args:
        target: One of `TARGETS`.
        request: What the function gets: JSON values; paths must be absolute.
        limits: What the child may use; the defaults of `SandboxLimits` if left out.
        subject: What the messages are about, such as `"Model '/models/a.onnx'"`.
        say: Called at most once, at the end, with the last 16 KiB of what was printed.

    Raises:
        SitsError: The function raised it: the same class, message, hint and facts.
        ModelError: The deadline passed, memory ran out, the process crashed, the answer was too large or the
            model was nested too deeply.
        TransientError: No process could be started, or somebody ended it.
        InvariantError: The function is not one of `TARGETS`, raised what it should have translated, or ended
            without a readable answer.
    """
    if target not in TARGETS:
        msg = f"{target!r} may not be run in a sandbox."
        raise InvariantError(msg, hint="add the function to sits_dagster.adapters.sandbox.TARGETS.")
    return run_child(target, request, limits=limits or SandboxLimits(), subject=subject, say=say)


def run_child(
    target: str,
    request: Mapping[str, Any],
    *,
    limits: SandboxLimits,
    subject: str = "The model",
    say: Callable[[str], None] | None = None,
) -> Any:  # noqa: ANN401 - JSON
    """Return what any importable function answers: `run_sandboxed` without the list of functions."""
    cores = os.cpu_count() or 1
    order = {
        "path": _import_path(),
        "memory_bytes": int(limits.memory_bytes),
        # Never reached before the deadline: it ends what outlives its parent where the kernel does not help.
        "cpu_seconds": math.ceil(limits.deadline_seconds * cores) + 1,
        "request": dict(request),
    }
    ending = converse(
        target,
        json.dumps(order).encode() + b"\n",
        deadline_seconds=limits.deadline_seconds,
        reply_bytes_max=limits.result_bytes_max,
    )
    if say is not None and ending.output:
        say(ending.output)
    return _judge(ending, limits, subject=subject, target=target)


def _import_path() -> list[str]:
    """Return where the child may import from: never a relative place, nor the current folder as such."""
    here = Path()
    entries = [
        entry
        for entry in sys.path
        if Path(entry).is_absolute() and (not _is_same(Path(entry), here) or _is_same(Path(entry), HOME))
    ]
    return entries if any(_is_same(Path(entry), HOME) for entry in entries) else [*entries, str(HOME)]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _judge(ending: Ending, limits: SandboxLimits, *, subject: str, target: str) -> Any:  # noqa: ANN401 - JSON
    """Return the result, or raise what its absence means."""
    if ending.reason is Reason.LATE:
        raise _late(subject, target, limits)
    if ending.reason is Reason.TOO_LARGE:
        msg = f"{subject} gave more than the {limits.result_bytes_max} bytes allowed as a result of {target}."
        raise ModelError(msg, hint="use a smaller model.")
    reply = _parse(ending.reply)
    match reply:
        case {"result": result}:
            return result
        case {"error": str(name), "message": str(message), "hint": str(hint)} if name in ERROR_CLASSES:
            raise _rebuild(ERROR_CLASSES[name], printable(message), printable(hint), reply)
        case {"memory": True}:
            raise _out_of_memory(subject, target, limits)
        case {"fault": str(kind), "text": str(text)}:
            raise _fault(kind, printable(text), subject=subject, target=target, limits=limits)
        case _:
            raise _silence(ending, limits, subject=subject, target=target)


def _parse(reply: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return None


def _rebuild(kind: type[SitsError], message: str, hint: str, facts: Mapping[str, Any]) -> SitsError:
    rows, seconds = facts.get("batch_rows"), facts.get("retry_after_seconds")
    if issubclass(kind, DeviceOutOfMemoryError):
        return kind(message, batch_rows=rows if isinstance(rows, int) else 0, hint=hint)
    if issubclass(kind, TransientError):
        is_told = isinstance(seconds, int | float)
        return kind(message, retry_after_seconds=seconds if is_told else RETRY_AFTER_SECONDS, hint=hint)
    return kind(message, hint=hint)


def _fault(kind: str, text: str, *, subject: str, target: str, limits: SandboxLimits) -> SitsError:
    if is_out_of_memory(RuntimeError(text)) or OUT_OF_MEMORY.search(text):
        return _out_of_memory(subject, target, limits)
    if kind == RecursionError.__name__:
        msg = f"{subject} is nested too deeply for {target}."
        return ModelError(msg, hint="export the model with flatter subgraphs.")
    msg = f"{subject}: {target} failed with {kind}: {text}"
    return InvariantError(msg, hint="this is a fault of sits-dagster: report it with the model.")


def _silence(ending: Ending, limits: SandboxLimits, *, subject: str, target: str) -> SitsError:
    """Say why there is no readable reply."""
    code = ending.exit_code
    words = ending.output[-LAST_WORDS_CHARACTERS:]
    # Nothing but the kernel's lack of memory kills a child without being asked.
    if code == -signal.SIGKILL or OUT_OF_MEMORY.search(words) or is_out_of_memory(RuntimeError(words)):
        return _out_of_memory(subject, target, limits)
    if code is None or code == -signal.SIGXCPU:  # not even SIGKILL ended it
        return _late(subject, target, limits)
    if code >= 0:
        msg = f"{subject}: {target} ended with exit code {code} without a readable answer. It said: {words!r}"
        return InvariantError(msg, hint="this is a fault of sits-dagster: report it with the model.")
    name = _signal_name(-code)
    if -code not in SIGNALS_OF_CRASHES:
        msg = f"{subject}: the process of {target} was ended from outside by {name}."
        return TransientError(msg, retry_after_seconds=RETRY_AFTER_SECONDS)
    msg = f"{subject} makes the process of {target} crash ({name}). It said: {words!r}"
    return ModelError(
        msg, hint="export the model again, allow more memory, or try another version of onnxruntime."
    )


def _late(subject: str, target: str, limits: SandboxLimits) -> ModelError:
    msg = f"{subject} did not finish in {limits.deadline_seconds:g} seconds of {target}; it was ended."
    return ModelError(msg, hint="the model may loop for ever, or needs a longer deadline.")


def _out_of_memory(subject: str, target: str, limits: SandboxLimits) -> ModelError:
    allowed = f"the {limits.memory_bytes} bytes that {target} may use"
    msg = f"{subject} needs more memory than {allowed}, or than the machine has left."
    return ModelError(msg, hint="allow more memory, or look for constants and loops that grow without need.")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
