"""What a function does, as a digest: its source and that of the functions it calls in its own package."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from types import FunctionType

__all__ = ["code_digest"]

DEPTH_MAX = 8


def code_digest(function: Callable[..., object]) -> str:
    """Return a SHA-256 that changes when the function's source, closure or same-package callees change.

    Values of a closure or of `functools.partial` count by their `repr`; what has no source counts by
    its bytecode. Other packages' code does not count.
    """
    digest = hashlib.sha256()
    _add(function, digest.update, seen=set(), depth=0)
    return digest.hexdigest()


def _add(function: object, update: Callable[[bytes], None], *, seen: set[int], depth: int) -> None:
    if id(function) in seen or depth > DEPTH_MAX:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        update(repr((function.args, sorted(function.keywords.items()))).encode())
        _add(function.func, update, seen=seen, depth=depth)
        return
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        call = vars(type(function)).get("__call__")
        update(f"{type(function).__module__}.{type(function).__qualname__}".encode())
        if isinstance(call, FunctionType):
            _add(call, update, seen=seen, depth=depth + 1)
        return
    update(_source(function))
    package = function.__module__.split(".")[0]
    for name in sorted(function.__code__.co_names):
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__.split(".")[0] == package:
            _add(called, update, seen=seen, depth=depth + 1)
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        if isinstance(value, FunctionType):
            _add(value, update, seen=seen, depth=depth + 1)
        elif isinstance(value, (bool, int, float, str, bytes, tuple, type(None))):
            update(repr(value).encode())


def _source(function: FunctionType) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):
        code = function.__code__
        return code.co_code + repr(code.co_consts).encode()
