"""What one real call of a model showed."""

from __future__ import annotations

from dataclasses import dataclass

from sits_dagster.models.graph.structure import TensorType

__all__ = ["CallTrace", "TracedNode"]


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One call of an operator as it ran.

    Args:
        name: The node's name.
        operator: Its operator.
        outputs: The types of its outputs, those that exist.
        workspace_bytes: What it took beyond its outputs while it ran.
    """

    name: str
    operator: str
    outputs: tuple[TensorType, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One call of a model on a fresh arena.

    Args:
        nodes: What ran, in order; the nodes of a taken branch stand before its If.
        bytes_held_before: What the arena held when the call began: weights and what loading left.
        bytes_used_before: What lived in it at that moment.
        bytes_held: What it held in the end. All three are `None` where the runtime does not tell: older ones.
        seconds: How long the call took, as the runtime says.
    """

    nodes: tuple[TracedNode, ...]
    bytes_held_before: int | None
    bytes_used_before: int | None
    bytes_held: int | None
    seconds: float
