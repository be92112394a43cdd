"""What `sits profile` takes on the command line, from text to values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import click

__all__ = ["MEMORY_FORMAT", "SHAPE_FORMAT", "VALUE_FORMAT", "as_callback", "memory", "shapes", "values"]

SHAPE_FORMAT = "NAME=N,3,48,320: a length for each axis, a letter for the axis of the rows"
VALUE_FORMAT = "NAME=NUMBER, such as sr=16000"
MEMORY_FORMAT = "16GiB, 24GB, 500MB or plain bytes"

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")},
}
LENGTH = re.compile(r"0*[1-9][0-9]{0,9}", re.ASCII)
LETTERS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
MEMORY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def shapes(texts: Sequence[str]) -> Mapping[str, tuple[int | str, ...]]:
    """Return the shapes by input: a number is a length, a name the axis of the rows.

    Raises:
        click.BadParameter: A text is no shape, or two are of one input.
    """
    found: dict[str, tuple[int | str, ...]] = {}
    for text in texts:
        name, _, lengths = text.rpartition("=")
        axes = [_axis(axis.strip()) for axis in lengths.split(",")]
        if not name or None in axes or sum(isinstance(axis, str) for axis in axes) > 1:
            msg = f"{text!r} is no shape: it must be {SHAPE_FORMAT}."
            raise click.BadParameter(msg)
        if name in found:
            msg = f"the shape of {name!r} is given twice."
            raise click.BadParameter(msg)
        found[name] = tuple(axis for axis in axes if axis is not None)
    return found


def values(texts: Sequence[str]) -> Mapping[str, float]:
    """Return the numbers by input.

    Raises:
        click.BadParameter: A text is no finite number of an input, or two are of one input.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or name in found or not math.isfinite(value):
            msg = f"{text!r} must be {VALUE_FORMAT}, once for each input."
            raise click.BadParameter(msg)
        found[name] = value
    return found


def memory(text: str | None) -> int | None:
    """Return the bytes; `None` where nothing is said.

    Raises:
        click.BadParameter: The text is no amount of memory.
    """
    if text is None:
        return None
    match = MEMORY.fullmatch(text.strip())
    factor = UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or (size := int(Fraction(match[1]) * factor)) < 1:
        msg = f"{text!r} is no amount of memory: it must be {MEMORY_FORMAT}."
        raise click.BadParameter(msg)
    return size


def as_callback(parse: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], object]:
    """Return the parser as click calls it, so that its errors name the option."""
    return lambda _context, _parameter, text: parse(text)


def _axis(text: str) -> int | str | None:
    if LENGTH.fullmatch(text):
        return int(text)
    return text if LETTERS.fullmatch(text) else None
