"""What a sandboxed child may do to us, one function a mischief; its parents are the tests of the sandbox."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sits_dagster import errors


def echo(request: dict[str, Any]) -> Any:
    return request


def describe_self(_request: dict[str, Any]) -> Any:
    import json

    folder = tempfile.mkdtemp()
    return {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "folder": str(Path.cwd()),
        "temporary": folder,
        "path": sys.path,
        "json": json.__file__,
        "modules": sorted(sys.modules),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "descriptors": len(list(Path("/dev/fd").iterdir())),
    }


def raise_known(request: dict[str, Any]) -> Any:
    kind = getattr(errors, request["kind"])
    raise kind(request["message"], **request["facts"])


class _NotInTheTableError(errors.DataError):
    pass


def raise_derived(_request: dict[str, Any]) -> Any:
    msg = "row 3"
    raise _NotInTheTableError(msg)


def raise_fault(_request: dict[str, Any]) -> Any:
    msg = "a fault\x1b[31m"
    raise KeyError(msg)


def raise_namesake(_request: dict[str, Any]) -> Any:
    class ModelError(Exception):
        pass

    raise ModelError


def leave_politely(_request: dict[str, Any]) -> Any:
    sys.exit(3)


def leave_at_once(_request: dict[str, Any]) -> Any:
    os._exit(3)


def recurse(request: dict[str, Any]) -> Any:
    return recurse(request)


def allocate(request: dict[str, Any]) -> Any:
    return len(bytearray(request["bytes"]))


def say_bad_alloc(_request: dict[str, Any]) -> Any:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def raise_bad_alloc(_request: dict[str, Any]) -> Any:
    msg = "Exception during initialization: std::bad_alloc"
    raise RuntimeError(msg)


def signal_self(request: dict[str, Any]) -> Any:
    os.kill(os.getpid(), request["signal"])
    time.sleep(60)


def abort(_request: dict[str, Any]) -> Any:
    os.abort()


def read_nowhere(_request: dict[str, Any]) -> Any:
    ctypes.string_at(0)


def loop_with_children(request: dict[str, Any]) -> Any:
    """Start a process in every way that matters, note who they are, and never end."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    note = Path(request["note"])
    unfinished = note.with_suffix(".unfinished")
    unfinished.write_text(f"{os.getpid()} {started.pid} {forked}")
    unfinished.rename(note)
    while True:
        pass


def answer_with_children(_request: dict[str, Any]) -> Any:
    """Return while something that was forked holds every pipe open."""
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    return forked


def print_much(request: dict[str, Any]) -> Any:
    line = b"\x1b[2J" + b"x" * 1019 + b"\n"
    for _ in range(request["kibibytes"]):
        os.write(1, line)
    print("the last line")
    return "done"


def answer_much(request: dict[str, Any]) -> Any:
    return "x" * request["bytes"]


def answer_no_json(_request: dict[str, Any]) -> Any:
    return {1, 2}


def answer_rubbish(request: dict[str, Any]) -> Any:
    os.write(int(sys.argv[2]), request["text"].encode())
    os._exit(0)


def close_everything(_request: dict[str, Any]) -> Any:
    os.closerange(0, 100)
    time.sleep(60)


def ignore_signals(_request: dict[str, Any]) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass
