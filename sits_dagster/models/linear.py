"""A quantity that grows with the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Linear"]


@dataclass(frozen=True, slots=True)
class Linear:
    """`a + b·rows`: what a batch costs whatever its rows, and what each row adds.

    Args:
        a: The part that does not depend on the rows.
        b: The part of one row.

    Example:
        >>> Linear(100.0, 2.0)(16)
        132.0
    """

    a: float
    b: float

    def __call__(self, rows: float) -> float:
        """Return the quantity for a batch of `rows`."""
        return self.a + self.b * rows

    def __add__(self, other: Linear) -> Linear:
        """Return the sum of two quantities of the same batch."""
        return Linear(self.a + other.a, self.b + other.b)

    @classmethod
    def through(cls, rows: tuple[int, int], values: tuple[float, float]) -> Linear:
        """Return the line through the values of two unlike numbers of rows."""
        b = (values[1] - values[0]) / (rows[1] - rows[0])
        return cls(values[0] - b * rows[0], b)

    @classmethod
    def of(cls, rows: Sequence[int], values: Sequence[float]) -> Linear:
        """Return the line through the first and the last value; of one number of rows, its value alone.

        Example:
            >>> Linear.of((4,), (80.0,))
            Linear(a=80.0, b=0.0)
        """
        if len(rows) == 1:
            return cls(float(values[0]), 0.0)
        return cls.through((rows[0], rows[-1]), (float(values[0]), float(values[-1])))
