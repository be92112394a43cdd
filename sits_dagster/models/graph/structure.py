"""A computation graph as plain values: what the cost and memory models read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, cast

__all__ = ["ELEMENT_BITS", "RANK_MAX", "Attribute", "Dimension", "Graph", "Node", "TensorType"]

Dimension: TypeAlias = int | str | None
"""A length, the name of a free axis, or `None` where nothing is known."""

Attribute: TypeAlias = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]

RANK_MAX = 64  # as in NumPy; also bounds the digits of a product of hostile lengths
ELEMENTS_MAX = 1 << 62  # the runtime counts in signed numbers of 64 bits

# Bits of one element. A string is a pointer, a length and room for a short text in the runtime.
ELEMENT_BITS: Mapping[str, int] = {
    "bool": 8,
    "string": 256,
    "bfloat16": 16,
    "complex64": 64,
    "complex128": 128,
    **{f"float{bits}": bits for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
    **{f"float8{kind}": 8 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0")},
    "float6e2m3": 6,
    "float6e3m2": 6,
    "float4e2m1": 4,
}


@dataclass(frozen=True)
class TensorType:
    """The element type and the shape of one tensor.

    Args:
        dtype: NumPy name of the element type, or one of the small types of ONNX (`"bfloat16"`, `"int4"`, …).
        shape: One length or name an axis; `None` where even the rank is unknown.
    """

    dtype: str
    shape: tuple[Dimension, ...] | None

    @cached_property
    def is_known(self) -> bool:
        """Whether every length is a number."""
        return self.shape is not None and all(isinstance(length, int) for length in self.shape)

    @cached_property
    def is_sane(self) -> bool:
        """Whether a tensor can have this shape: not too many axes or elements, no length below zero."""
        if not self.shape:
            return True
        elements = 1
        for length in self.shape[: RANK_MAX + 1]:
            if isinstance(length, int):
                elements = min(elements, ELEMENTS_MAX + 1) * length
                if length < 0:
                    return False
        return len(self.shape) <= RANK_MAX and elements <= ELEMENTS_MAX

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of all axes; empty where one of them is unknown (see `is_known`)."""
        return cast("tuple[int, ...]", self.shape) if self.is_known else ()

    @cached_property
    def elements(self) -> int:
        """How many elements there are; 0 where a length is unknown."""
        return math.prod(cast("tuple[int, ...]", self.shape)) if self.is_known else 0

    @cached_property
    def bytes(self) -> int:
        """How many bytes they take; 0 where a length is unknown."""
        return (self.elements * ELEMENT_BITS.get(self.dtype, 8) + 7) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call.

    Args:
        name: Its name, or `""`.
        operator: The operator's name, such as `"Conv"`.
        domain: The operator's domain; `""` is ONNX's own.
        inputs: Names of its inputs in order; `""` is an optional one that is left out.
        outputs: Names of its outputs in order; `""` is one that nobody wants.
        attributes: Its numbers and texts; tensors and graphs are left out.
        bodies: The graphs that it runs (If, Loop, Scan), with their attributes' names.
        captured: Names from outside that its bodies read.
    """

    operator: str
    name: str = ""
    domain: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])
    bodies: Mapping[str, Graph] = field(default_factory=dict[str, "Graph"])
    captured: tuple[str, ...] = ()

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute, or the default where it is left out."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, or nothing where it is left out."""
        value = self.attributes.get(name, ())
        return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of everything it reads, without those left out."""
        if not self.captured and "" not in self.inputs:
            return self.inputs
        return tuple(name for name in (*self.inputs, *self.captured) if name)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Operator calls in an order in which they can run.

    Args:
        nodes: The calls.
        inputs: What a caller gives, by name in graph order.
        outputs: What a caller gets, by name in graph order.
        constants: Weights and other constants, by name.
        types: Types of tensors in between that the file tells.
    """

    nodes: tuple[Node, ...]
    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    constants: Mapping[str, TensorType]
    types: Mapping[str, TensorType] = field(default_factory=dict[str, TensorType])

    def all_nodes(self) -> Iterator[Node]:
        """Yield every call in order; those of a call's bodies, however deep, come right behind it."""
        for node in self.nodes:
            yield node
            for body in node.bodies.values():
                yield from body.all_nodes()

    def folded(self) -> frozenset[str]:
        """Return the names that are known before any row is: constants, and what follows from them alone."""
        return self._folded

    @cached_property
    def _folded(self) -> frozenset[str]:
        names = set(self.constants)
        for node in self.nodes:
            is_random = node.operator.startswith("Random") or node.operator in {"Bernoulli", "Multinomial"}
            if not is_random and names.issuperset(node.reads):
                names.update(name for name in node.outputs if name)
        return frozenset(names)
