"""What one operator call costs: arithmetic and memory traffic, from its shapes."""

from __future__ import annotations

from dataclasses import dataclass

from sits_dagster.models.linear import Linear

__all__ = ["KernelCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """What one kernel of a model costs for a batch.

    Args:
        operator: The operator's name.
        flops: Floating point (or integer) operations; a multiply-add counts as two.
        bytes_moved: Bytes read and written, if every operand comes from memory once.
    """

    operator: str
    flops: Linear
    bytes_moved: Linear
