"""The shapes of a model's inputs: which axis holds the rows, how long the others are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sits_dagster.errors import ConfigError, ModelError
from sits_dagster.models.graph.structure import RANK_MAX, Graph, TensorType
from sits_dagster.models.words import cut, listed, shown

__all__ = ["GivenShapes", "InputShapes", "input_shapes", "row_axes"]

GivenShapes = Mapping[str, tuple[int | str, ...]]
"""Shapes that a user gives, by input name: a number is a length, a name the axis of the rows."""

Place: TypeAlias = tuple[str, int]  # an input and one of its axes

IMAGE_RANK = 4
SEQUENCE_LENGTH = 128
LENGTH_MAX = 1 << 40
# What is tried for free axes of images: classifiers, text lines, detectors.
IMAGE_SIZES = ((224, 224), (48, 320), (320, 320), (640, 640))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShapes:
    """The shapes of all inputs, but for the number of rows.

    Args:
        axes: The axis of the rows, by input; `None` where all rows share the input or the batch is fixed.
        lengths: One length an axis, by input; that of the rows' axis counts for nothing.
        assumed: What was not given and not in the file, by `input[axis]`.
        rows_fixed: The only number of rows that the file allows, or `None`.
        free: The names of the free axes other than the rows', each with the (input, axis) pairs that have it.
    """

    axes: Mapping[str, int | None]
    lengths: Mapping[str, tuple[int, ...]]
    assumed: Mapping[str, int]
    rows_fixed: int | None
    free: Mapping[str, tuple[Place, ...]]

    def shapes(self, rows: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every input for a batch of `rows`."""
        return {
            name: lengths
            if (axis := self.axes[name]) is None
            else (*lengths[:axis], rows, *lengths[axis + 1 :])
            for name, lengths in self.lengths.items()
        }

    def stretched(self, free: str, length: int) -> InputShapes:
        """Return the shapes with another length of one free axis."""
        lengths = {name: list(shape) for name, shape in self.lengths.items()}
        for name, axis in self.free[free]:
            lengths[name][axis] = length
        return InputShapes(
            axes=self.axes,
            lengths={name: tuple(shape) for name, shape in lengths.items()},
            assumed=self.assumed,
            rows_fixed=self.rows_fixed,
            free=self.free,
        )

    def length(self, free: str) -> int:
        """Return the length of a free axis."""
        name, axis = self.free[free][0]
        return self.lengths[name][axis]


def input_shapes(
    graph: Graph, given: GivenShapes | None = None, *, image_size: tuple[int, int] = IMAGE_SIZES[0]
) -> InputShapes:
    """Return the shapes of the graph's inputs.

    Args:
        graph: The model.
        given: What the user knows; the rest is the file's, or assumed.
        image_size: Assumed height and width of images.

    Raises:
        ConfigError: A given shape contradicts the file, makes no sense or names no input.
        ModelError: The file allows no batch with rows.
    """
    given = given or {}
    for name in given:
        if name not in graph.inputs:
            msg = f"The model has no input {shown(name)}; it has {listed(graph.inputs)}."
            raise ConfigError(msg, hint="name one of them in the shape.")
    declared = {name: _declared(name, kind, given.get(name)) for name, kind in graph.inputs.items()}
    axes = _row_axes(graph, declared, given)
    free = _free_axes(graph, axes)
    lengths: dict[str, tuple[int, ...]] = {}
    assumed: dict[str, int] = {}
    told, chosen = _lengths_of_names(declared, free, image_size)
    for name, shape in declared.items():
        found: list[int] = []
        for axis, length in enumerate(shape):
            place = name, axis
            if isinstance(length, int):
                found.append(length)
            elif axes[name] == axis:
                found.append(1)
            elif place in told:
                found.append(told[place])
            else:
                found.append(chosen.get(place) or _assumed(shape, axis, image_size))
                assumed[length or f"{name}[{axis}]"] = found[-1]
        lengths[name] = tuple(found)
    fixed = [shape[0] for shape in lengths.values() if shape]
    is_fixed = all(axis is None for axis in axes.values()) and bool(fixed)
    if is_fixed and min(fixed) < 1:
        msg = "The file fixes the batch at 0 rows."
        raise ModelError(msg, hint="export the model with a free batch axis.")
    return InputShapes(
        axes=axes,
        lengths=lengths,
        assumed=assumed,
        rows_fixed=_rows_fixed(list(lengths.values())) if is_fixed else None,
        free=free,
    )


def _free_axes(graph: Graph, axes: Mapping[str, int | None]) -> Mapping[str, tuple[Place, ...]]:
    """Return the places of each axis that the file leaves free, but for the rows', by its name."""
    free: dict[str, list[Place]] = {}
    for name, kind in graph.inputs.items():
        for axis, length in enumerate(kind.shape or ()):
            if axes[name] != axis and not isinstance(length, int):
                free.setdefault(length or f"{name}[{axis}]", []).append((name, axis))
    return {key: tuple(places) for key, places in free.items()}


def _lengths_of_names(
    declared: Mapping[str, tuple[int | str | None, ...]],
    free: Mapping[str, tuple[Place, ...]],
    image_size: tuple[int, int],
) -> tuple[Mapping[Place, int], Mapping[Place, int]]:
    """Return one length for each name of a free axis: those that a given shape tells, and those assumed."""
    told: dict[Place, int] = {}
    chosen: dict[Place, int] = {}
    for places in free.values():
        given = [length for name, axis in places if isinstance(length := declared[name][axis], int)]
        if given:
            told.update(dict.fromkeys(places, given[0]))
            continue
        # Of an image more is known than of a mask without channels.
        name, axis = next((place for place in places if len(declared[place[0]]) == IMAGE_RANK), places[0])
        chosen.update(dict.fromkeys(places, _assumed(declared[name], axis, image_size)))
    return told, chosen


def _rows_fixed(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the first axes' length; where they disagree, one that all inputs have, or the first input's."""
    leading = [shape[0] for shape in shapes if shape]
    return next((rows for rows in leading if all(rows in shape for shape in shapes if shape)), leading[0])


def _declared(
    name: str, kind: TensorType, given: tuple[int | str, ...] | None
) -> tuple[int | str | None, ...]:
    if given is None:
        if kind.shape is None:
            msg = f"The file does not tell how many axes input {shown(name)} ({kind.dtype}) has."
            raise ConfigError(msg, hint=f"give its shape, such as --shape {cut(name)}=N,128.")
        return kind.shape
    if len(given) > RANK_MAX or any(
        isinstance(length, int) and not 0 < length <= LENGTH_MAX for length in given
    ):
        msg = f"The shape given for input {shown(name)} makes no sense: {given[:RANK_MAX]}."
        raise ConfigError(msg, hint=f"give lengths from 1 to {LENGTH_MAX}, and a name for the rows.")
    if kind.shape is not None and len(kind.shape) != len(given):
        axes = len(kind.shape)
        msg = f"The shape given for input {shown(name)} has {len(given)} axes; the file's has {axes}."
        raise ConfigError(msg, hint=f"the file says {kind.shape}.")
    for axis, (length, own) in enumerate(zip(given, kind.shape or given, strict=True)):
        fixed = f"Axis {axis} of input {shown(name)} is fixed at {own} in the file"
        if isinstance(length, int) and isinstance(own, int) and length != own:
            msg = f"{fixed}, not {length}."
            raise ConfigError(msg, hint=f"the file says {kind.shape}.")
        if isinstance(length, str) and isinstance(own, int) and kind.shape is not None:
            msg = f"{fixed}, so it cannot hold the rows."
            raise ConfigError(msg, hint=f"give {own} there, or export the model with a free batch axis.")
    return given


def row_axes(shapes: Mapping[str, Sequence[int | str | None]]) -> dict[str, int | None]:
    """Guess along which axis of each input the rows lie; running the model shows whether that is right.

    They lie along the first axis where that is free. An input whose first axis is fixed has them along a
    free axis of the same name, or one without a name. Where no first axis is free the batch is fixed.

    Args:
        shapes: Lengths, or names of free axes, by input.
    """
    plain = {name: [_length(length) for length in shape] for name, shape in shapes.items()}
    leading = {name for name, shape in plain.items() if shape and not isinstance(shape[0], int)}
    names = {plain[name][0] for name in leading} - {None}
    axes: dict[str, int | None] = {}
    for name, shape in plain.items():
        same = [axis for axis, length in enumerate(shape) if length in names]
        unnamed = [axis for axis, length in enumerate(shape) if length is None]
        candidates = [0] if name in leading else same or unnamed if leading else []
        axes[name] = candidates[0] if candidates else None
    return axes


def _length(length: int | str | None) -> int | str | None:
    """Return a length or a name; `None` for what exporters write when they know nothing."""
    if isinstance(length, str):
        return None if length in {"", "?", "-1"} else length
    return length if length is None or length >= 0 else None


def _row_axes(
    graph: Graph, declared: Mapping[str, tuple[int | str | None, ...]], given: GivenShapes
) -> Mapping[str, int | None]:
    axes: dict[str, int | None] = {}
    for name, shape in given.items():
        named = [axis for axis, length in enumerate(shape) if isinstance(length, str)]
        own = graph.inputs[name].shape
        is_leading = bool(shape) and (own is None or not isinstance(own[0], int))
        axes[name] = named[0] if named else 0 if is_leading else None
    # A given name is the rows' own word: the file's name of that axis tells where others have it.
    guessed = row_axes({name: graph.inputs[name].shape or declared[name] for name in declared})
    return {name: axes.get(name, guessed[name]) for name in declared}


def _assumed(shape: tuple[int | str | None, ...], axis: int, image_size: tuple[int, int]) -> int:
    if len(shape) != IMAGE_RANK:
        return SEQUENCE_LENGTH
    channels_last = isinstance(shape[-1], int) and shape[-1] in {1, 3, 4}
    spatial = axis - 1 if channels_last else axis - 2
    return image_size[min(max(spatial, 0), 1)] if spatial >= 0 else 3
