"""One operator call with the shapes of what it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sits_dagster.models.graph.structure import RANK_MAX, Node, TensorType
from sits_dagster.models.words import shown

__all__ = ["RANK_MAX", "Call", "UncostedError"]


class UncostedError(Exception):
    """A call's cost cannot be told; the message names the operator or the tensor."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call, with the shapes of what it reads and writes.

    Args:
        node: The call.
        types: Types by name, of constants too.
    """

    node: Node
    types: Mapping[str, TensorType]

    def has(self, index: int) -> bool:
        """Return whether an optional input is given."""
        return index < len(self.node.inputs) and self.node.inputs[index] != ""

    def gives(self, index: int) -> bool:
        """Return whether somebody wants an optional output."""
        return index < len(self.node.outputs) and self.node.outputs[index] != ""

    def type(self, name: str) -> TensorType:
        """Return the type of a tensor of which every length is known.

        Raises:
            UncostedError: One is not, or makes no sense.
        """
        found = self.types.get(name)
        shape = None if found is None or not found.is_known else found.lengths
        if found is None or shape is None:
            msg = f"the shape of {shown(name)} is not known"
            raise UncostedError(msg)
        if len(shape) > RANK_MAX or min(shape, default=0) < 0:
            msg = f"the shape of {shown(name)} makes no sense"
            raise UncostedError(msg)
        return found

    def input(self, index: int, rank: int = 0) -> tuple[int, ...]:
        """Return the lengths of an input with at least `rank` axes."""
        if not self.has(index):
            msg = f"{self.node.operator} lacks its input {index}"
            raise UncostedError(msg)
        return self._shape(self.node.inputs[index], rank)

    def output(self, index: int = 0, rank: int = 0) -> tuple[int, ...]:
        """Return the lengths of an output with at least `rank` axes."""
        if not self.gives(index):
            msg = f"{self.node.operator} lacks its output {index}"
            raise UncostedError(msg)
        return self._shape(self.node.outputs[index], rank)

    def length(self, shape: tuple[int, ...], axis: int) -> int:
        """Return the length of an axis that an attribute names."""
        if not -len(shape) <= axis < len(shape):
            msg = f"{self.node.operator} names the axis {axis} of a tensor with {len(shape)}"
            raise UncostedError(msg)
        return shape[axis]

    def product(self, attribute: str) -> int:
        """Return the product of an attribute's whole numbers; 1 where it is left out."""
        numbers = self.node.integers(attribute)
        if len(numbers) > RANK_MAX or any(number < 0 for number in numbers):
            msg = f"the attribute {attribute!r} of {self.node.operator} makes no sense"
            raise UncostedError(msg)
        return math.prod(numbers)

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        lengths = self.type(name).lengths
        if len(lengths) < rank:
            msg = f"{shown(name)} has {len(lengths)} axes, {self.node.operator} needs {rank}"
            raise UncostedError(msg)
        return lengths
