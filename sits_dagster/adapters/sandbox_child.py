"""The program that `sits_dagster.adapters.sandbox` starts: one call under limits, then gone.

It is run by its path, and imports from the standard library alone until the parent's import path is set.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

ERRORS_MODULE = "sits_dagster.errors"
ERROR_FACTS = ("message", "hint", "batch_rows", "retry_after_seconds")
TEXT_CHARACTERS_MAX = 4000
EXIT_WITHOUT_ORDER = 2
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer one order and end; the arguments are the function, the reply's descriptor and the parent."""
    target, descriptor, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the parent is gone
        os._exit(EXIT_WITHOUT_ORDER)
    order = json.loads(line)
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - the standard library wants it by position
    _end_with_parent(parent)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, order["memory_bytes"])
    _limit(resource.RLIMIT_CPU, order["cpu_seconds"])
    sys.path[:] = order["path"]
    gc.disable()  # it ends before anything is worth being looked for: a tenth of the time for large graphs
    reply = _answer(target, order["request"])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the function may have closed them
            stream.flush()
    while reply:
        reply = reply[os.write(descriptor, reply) :]
    # What libraries do while they are unloaded could still hang or crash.
    os._exit(0)


def _answer(target: str, request: Any) -> memoryview:  # noqa: ANN401 - JSON
    try:
        module, _, function = target.partition(":")
        result = getattr(importlib.import_module(module), function)(request)
        return memoryview(json.dumps({"result": result}).encode())
    except MemoryError:
        return memoryview(b'{"memory": true}')
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent decides
        return memoryview(json.dumps(_describe(error)).encode())


def _describe(error: BaseException) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == ERRORS_MODULE]
    if not names:
        sys.__excepthook__(type(error), error, error.__traceback__)
        return {"fault": type(error).__name__, "text": str(error)[:TEXT_CHARACTERS_MAX]}
    return {"error": names[0], **{name: getattr(error, name) for name in ERROR_FACTS if hasattr(error, name)}}


def _limit(kind: int, amount: int) -> None:
    """Lower a limit of this process; a lower one that is set already stays."""
    _, hard = resource.getrlimit(kind)
    lowered = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    with suppress(ValueError, OSError):  # macOS does not know all of them
        resource.setrlimit(kind, (lowered, lowered))


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process and what it starts when the parent ends, even by SIGKILL."""
    # The parent keeps its end of our standard input open: that it closes is a signal to the whole group, and
    # takes no thread, which a library that holds the interpreter's lock would keep from running.
    with suppress(OSError):
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
        if sys.platform == "linux":
            fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | fcntl.FASYNC)
    # A process that the parent forked meanwhile may hold that end open too: this is certain, for us alone.
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            _load_c_library().prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_WITHOUT_ORDER)


def _load_c_library() -> Any:  # noqa: ANN401 - foreign functions have no types
    return importlib.import_module("ctypes").CDLL(None)


if __name__ == "__main__":
    main()
