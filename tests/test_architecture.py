"""The rules of the house, held by a test: who may import whom, and how long a file or a function may grow."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter import cli as importlinter

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sits_dagster"
FILES = sorted(PACKAGE.rglob("*.py"))

FILE_LINES_MAX = 400
BODY_LINES_MAX = 60
NAMES_SAYING_NOTHING = {"base", "common", "core", "helper", "helpers", "manager", "misc", "util", "utils"}
# Dagster reads annotations while Python runs: postponed ones break `@dg.asset` with a resource parameter.
FOLDERS_OF_LIVE_ANNOTATIONS = ("assets",)
# Durations, sizes and moments under names that do not say their unit.
ARGUMENTS_WITHOUT_UNIT = {"delay", "duration", "interval", "mem", "memory", "memory_limit", "timeout", "ttl"}
PURE_PLANES = ("models", "devices", "inference", "capacity")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(path: Path) -> Iterator[Function]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[ast.get_docstring(function) is not None :]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def _where(path: Path, function: Function) -> str:
    return f"{_ids(path)}:{function.lineno} {function.name}"


def test_import_contracts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # import-linter adds to it
    assert importlinter.lint_imports(no_cache=True, no_logo=True) == importlinter.EXIT_STATUS_SUCCESS


def test_tests_are_no_packages() -> None:
    found = [_ids(path) for path in (ROOT / "tests").rglob("__init__.py")]
    assert found == [], "tests/dagster as a package would stand in for dagster"


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_file_has_one_subject(path: Path) -> None:
    assert path.stem not in NAMES_SAYING_NOTHING, "Hint: name the module by its subject."
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES_MAX, f"{lines} lines. Hint: which second subject could move out?"


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_function_fits_a_screen(path: Path) -> None:
    lengths = {_where(path, function): _body_lines(function) for function in _functions(path)}
    assert {where: lines for where, lines in lengths.items() if lines > BODY_LINES_MAX} == {}


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_annotations_are_live_where_dagster_reads_them(path: Path) -> None:
    postponed = "from __future__ import annotations" in path.read_text(encoding="utf-8").splitlines()
    live = path.relative_to(PACKAGE).parts[0] in FOLDERS_OF_LIVE_ANNOTATIONS
    assert not (live and postponed), "@dg.asset fails on postponed annotations of its resources"


@pytest.mark.parametrize("plane", PURE_PLANES)
def test_pure_planes_spell_units(plane: str) -> None:
    found = [
        f"{_where(path, function)}({argument.arg})"
        for path in sorted((PACKAGE / plane).rglob("*.py"))
        for function in _functions(path)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.arg in ARGUMENTS_WITHOUT_UNIT
    ]
    assert found == [], "Hint: timeout_seconds, memory_bytes_max, …"
