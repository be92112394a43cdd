"""A function's digest says whether its results may have changed."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from sits_dagster.inference.code_digest import code_digest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
import functools
from dataclasses import dataclass

SIZE = 4
NAMES = ("a", "b")

def resize(value):
    return value * 2

def other(value):
    return value

def encode(batch):
    return resize(batch)

def encode_each(batch):
    return [resize(value) for value in batch]

def encode_inside(batch):
    def inner(value):
        return resize(value)
    return inner(batch)

def encode_sized(batch):
    return batch[:SIZE], NAMES

def make(value):
    def closure(batch):
        return batch, value
    return closure

@functools.wraps(encode)
def wrapped(batch):
    return encode(batch)

class Tokenizer:
    def __call__(self, batch):
        return resize(batch)

    def encode(self, batch):
        return resize(batch)

def recurse(n):
    return recurse(n - 1)
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ModuleType]:
    """Return a loader of the source, with some text replaced, as a module of a package of its own."""

    def load(old: str = "", new: str = "") -> ModuleType:
        assert old in SOURCE
        path = tmp_path / f"user_package_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(SOURCE.replace(old, new) if old else SOURCE)
        module = ModuleType("user_package")
        module.__file__ = str(path)
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)  # noqa: S102 - its own source
        return module

    return load


FUNCTIONS = {
    "function": lambda m: m.encode,
    "comprehension": lambda m: m.encode_each,
    "inner function": lambda m: m.encode_inside,
    "partial": lambda m: functools.partial(m.encode),
    "wrapped": lambda m: m.wrapped,
    "callable object": lambda m: m.Tokenizer(),
    "method": lambda m: m.Tokenizer().encode,
    "closure": lambda m: m.make(m.encode),
    "partial of a function": lambda m: functools.partial(m.other, m.encode),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_code_has_the_same_digest(load: Callable[..., ModuleType], name: str) -> None:
    """A run goes on where the last one stopped when nothing changed, a comment elsewhere included."""
    assert code_digest(FUNCTIONS[name](load())) == code_digest(FUNCTIONS[name](load()))
    elsewhere = load("return value\n", "return value + 1\n")
    assert (code_digest(FUNCTIONS[name](load())) == code_digest(FUNCTIONS[name](elsewhere))) == (
        name != "partial of a function"
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_callee_of_the_same_package_counts(load: Callable[..., ModuleType], name: str) -> None:
    """Mending a helper begins a new output, wherever in the function it is called."""
    before = code_digest(FUNCTIONS[name](load()))
    assert code_digest(FUNCTIONS[name](load("value * 2", "value * 3"))) != before


def test_source_and_constants_count(load: Callable[..., ModuleType]) -> None:
    """A changed line or a changed constant of the module is another function."""
    before = code_digest(load().encode_sized)
    assert code_digest(load("batch[:SIZE]", "batch[1:SIZE]").encode_sized) != before
    assert code_digest(load("SIZE = 4", "SIZE = 5").encode_sized) != before
    assert code_digest(load('("a", "b")', '("a", "c")').encode_sized) != before
    assert code_digest(load("SIZE = 4", "SIZE = 5").encode) == code_digest(load().encode)


VALUES = [1, 2, 1.0, "1", b"1", (1, 2), [1, 2], {"a": 1}, {"a": 2}, {"a", "b"}, None, True]


def test_values_of_closures_and_partials_count(load: Callable[..., ModuleType]) -> None:
    """A parameter that was bound is part of the function."""
    module = load()
    closures = [code_digest(module.make(value)) for value in VALUES]
    partials = [code_digest(functools.partial(module.encode, value)) for value in VALUES]
    keywords = [code_digest(functools.partial(module.encode, batch=value)) for value in VALUES]
    for digests in (closures, partials, keywords):
        assert len(set(digests)) == len(VALUES)
    assert code_digest(module.make({"a", "b", "c"})) == code_digest(module.make({"c", "b", "a"}))


def test_objects_count_without_their_address(load: Callable[..., ModuleType]) -> None:
    """A bound tokenizer is the same in every process, or nothing would ever be resumed."""
    module = load()
    kept = [module.Tokenizer(), module.Tokenizer()]
    assert code_digest(functools.partial(module.other, kept[0])) == code_digest(
        functools.partial(module.other, kept[1])
    )
    assert code_digest(module.make((kept[0],))) == code_digest(module.make((kept[1],)))
    assert code_digest(module.make(functools)) == code_digest(module.make(functools))


def test_what_has_no_source_counts_by_its_bytecode() -> None:
    """Functions made while Python runs are told apart as well."""
    made = [eval(text) for text in ("lambda x: x + 1", "lambda x: x + 2", "lambda x: x + 1")]  # noqa: S307
    assert code_digest(made[0]) == code_digest(made[2]) != code_digest(made[1])
    assert code_digest(len) == code_digest(len)


def test_recursion_ends(load: Callable[..., ModuleType]) -> None:
    """A function that calls itself has a digest."""
    assert code_digest(load().recurse) == code_digest(load().recurse)


def test_the_digest_is_the_same_in_another_process() -> None:
    """Hash randomisation and memory addresses do not enter into it."""
    code = (
        "import functools, pathlib\n"
        "from sits_dagster.inference.code_digest import code_digest\n"
        "from sits_dagster.inference.dataset import partition_path\n"
        "values = ({'a', 'b', 'c'}, object(), pathlib, {'x': frozenset('abc')})\n"
        "print(code_digest(functools.partial(partition_path, values[0], values[1], values[2])))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_state_of_an_object_counts() -> None:
    """Two encoders with other settings do different things, as objects and by their methods."""

    class Encoder:
        def __init__(self, size: int) -> None:
            self.size = size

        def __call__(self) -> int:
            return self.size

        def encode(self) -> int:
            return self.size

    assert code_digest(Encoder(1)) != code_digest(Encoder(2))
    assert code_digest(Encoder(1).encode) != code_digest(Encoder(2).encode)
    assert code_digest(Encoder(1).encode) == code_digest(Encoder(1).encode)
