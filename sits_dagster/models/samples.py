"""Made-up rows to try a model with: unlike each other, harmless as far as types and names tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.graph.structure import TensorType
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.words import cut, shown

__all__ = ["attempts", "is_mask", "sample_batch", "sample_rows"]

# Numbers below these are tried in turn: ids of words, then what any table, flag or type id takes.
INTEGER_LIMITS = (100, 2, 1)
ELEMENTS_MAX = 1 << 28  # a made-up batch never takes more than this


def is_mask(name: str) -> bool:
    """Return whether an input says by its name which cells are data."""
    return "mask" in name.lower()


def sample_rows(
    types: Mapping[str, TensorType],
    shapes: InputShapes,
    *,
    count: int,
    integer_limit: int,
    values: Mapping[str, float] | None = None,
) -> list[dict[str, NDArray[np.generic]]]:
    """Return so many unlike rows, each as a batch of one; of a file's fixed batch, so many unlike batches.

    Args:
        types: The inputs.
        shapes: Their shapes.
        count: How many rows.
        integer_limit: Whole numbers are below it.
        values: Numbers that inputs are filled with instead, by name.

    Raises:
        ModelError: An input has a type that cannot be made up, or too many elements, or none.
        ConfigError: A given number does not fit its input's type.
    """
    lengths = shapes.shapes(1)
    shared = {
        name: _filled(name, types[name], shape, np.random.default_rng(0), integer_limit, values or {})
        for name, shape in lengths.items()
        if shapes.axes[name] is None and shapes.rows_fixed is None
    }
    rows: list[dict[str, NDArray[np.generic]]] = []
    for row in range(count):
        random = np.random.default_rng(row + 1)
        rows.append(
            {
                name: shared[name]
                if name in shared
                else _filled(name, types[name], shape, random, integer_limit, values or {}, scale=row + 1)
                for name, shape in lengths.items()
            }
        )
    return rows


def sample_batch(
    types: Mapping[str, TensorType],
    shapes: InputShapes,
    rows: int,
    *,
    integer_limit: int,
    values: Mapping[str, float] | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Return one made-up batch of `rows`; see `sample_rows`."""
    random = np.random.default_rng(0)
    return {
        name: _filled(name, types[name], shape, random, integer_limit, values or {})
        for name, shape in shapes.shapes(rows).items()
    }


def _filled(
    name: str,
    kind: TensorType,
    shape: tuple[int, ...],
    random: np.random.Generator,
    integer_limit: int,
    values: Mapping[str, float],
    *,
    scale: float = 1.0,
) -> NDArray[np.generic]:
    elements = 1
    for length in shape:
        elements *= length
    if elements > ELEMENTS_MAX:
        msg = f"Input {shown(name)} of shape {shape} has {elements} elements, too many to try."
        raise ModelError(msg, hint="give a smaller shape with --shape.")
    if elements < 1:  # recurrent kernels abort the process
        msg = f"Input {shown(name)} of shape {shape} is empty: a model is not tried with nothing."
        raise ModelError(msg, hint="export the model with free axes, or with lengths above 0.")
    if kind.dtype == "string":
        return np.full(shape, f"row {scale:.0f}", object)
    try:
        dtype = np.dtype(kind.dtype)
    except TypeError as error:
        msg = f"Input {shown(name)} is of type {kind.dtype}, which NumPy cannot hold."
        raise ModelError(msg, hint="export the model with inputs of plain number types.") from error
    if name in values:
        try:
            return np.full(shape, values[name], dtype)
        except (OverflowError, ValueError) as error:
            msg = f"Input {shown(name)} of type {kind.dtype} cannot be filled with {values[name]}."
            raise ConfigError(msg, hint=f"give another number for {cut(name)}.") from error
    if dtype.kind == "b" or is_mask(name):
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        return random.integers(0, integer_limit, shape).astype(dtype) if shape else np.ones(shape, dtype)
    return (random.standard_normal(shape) * 0.2 * scale).astype(dtype)


def attempts(image_sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield every pair of an image size and a limit of whole numbers, the likeliest first."""
    for limit in INTEGER_LIMITS:
        for size in image_sizes:
            yield size, limit
