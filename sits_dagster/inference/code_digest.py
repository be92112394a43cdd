"""What a function does, as a digest: its source and that of the functions it calls in its own package."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import TypeAlias, cast

__all__ = ["code_digest"]

DEPTH_MAX = 8
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
Update: TypeAlias = Callable[[bytes], None]
CONSTANTS = (bool, int, float, str, bytes, tuple, type(None))


def code_digest(function: Callable[..., object]) -> str:
    """Return a SHA-256 that changes when the function's source, values or same-package callees change.

    Values are those of its closure, of its object (for a method or a callable object), of
    `functools.partial` and of the plain constants of its module; they count by their `repr`, without
    memory addresses. What has no source counts by its bytecode. Other packages' code does not count.
    """
    digest = hashlib.sha256()
    _add(function, digest.update, seen=set(), depth=0)
    return digest.hexdigest()


def _add(function: object, update: Update, *, seen: set[int], depth: int) -> None:
    if id(function) in seen or depth > DEPTH_MAX:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        for value in (*function.args, *sorted(function.keywords.items())):
            _add_value(value, update, seen=seen, depth=depth)
        _add(function.func, update, seen=seen, depth=depth)
        return
    function = inspect.unwrap(function) if callable(function) else function
    _add_state(getattr(function, "__self__", function), update, seen=seen, depth=depth)
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        _add_function(function, update, seen=seen, depth=depth)
        return
    update(f"{type(function).__module__}.{type(function).__qualname__}".encode())
    call = vars(type(function)).get("__call__")
    if isinstance(call, FunctionType):
        _add(call, update, seen=seen, depth=depth + 1)


def _add_state(owner: object, update: Update, *, seen: set[int], depth: int) -> None:
    if isinstance(owner, (FunctionType, ModuleType, type)):
        return
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        update(name.encode())
        _add_value(value, update, seen=seen, depth=depth + 1)


def _add_function(function: FunctionType, update: Update, *, seen: set[int], depth: int) -> None:
    update(_source(function))
    package = function.__module__.split(".")[0]
    for name in sorted(_names(function.__code__)):
        used = function.__globals__.get(name)
        if isinstance(used, FunctionType) and used.__module__.split(".")[0] == package:
            _add(used, update, seen=seen, depth=depth + 1)
        elif isinstance(used, ModuleType) and used.__name__.split(".")[0] == package:
            for called in _called(used, function.__code__):
                _add(called, update, seen=seen, depth=depth + 1)
        elif isinstance(used, CONSTANTS):
            update(f"{name}={used!r}".encode())
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell may still be empty
            _add_value(cell.cell_contents, update, seen=seen, depth=depth)


def _called(module: ModuleType, code: CodeType) -> list[FunctionType]:
    """Return the module's functions that the code may use, by name: `module.function(...)`."""
    found = (vars(module).get(name) for name in sorted(_names(code)))
    return [value for value in found if isinstance(value, FunctionType)]


def _add_value(value: object, update: Update, *, seen: set[int], depth: int) -> None:
    if isinstance(value, (FunctionType, functools.partial)):
        _add(value, update, seen=seen, depth=depth + 1)
    elif isinstance(value, ModuleType):
        update(value.__name__.encode())  # its repr has a path
    elif isinstance(value, (set, frozenset)):
        update(repr(sorted(map(repr, cast("set[object]", value)))).encode())  # their order is random
    else:
        update(ADDRESS.sub("", repr(value)).encode())


def _names(code: CodeType) -> set[str]:
    """Return the global names that the code and the functions and comprehensions inside of it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _source(function: FunctionType) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):
        code = function.__code__
        return code.co_code + ADDRESS.sub("", repr(code.co_consts)).encode()
