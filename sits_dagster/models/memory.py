"""What a batch needs: the buffers of one call, replayed through the arena for any number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sits_dagster.models.arena import Arena, ArenaFullError, ArenaPolicy
from sits_dagster.models.buffers import BufferPlan
from sits_dagster.models.linear import Linear

__all__ = ["ArenaUse", "MemoryPlan", "largest_batch", "memory_plan"]

LINE_ROWS = (1, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUse:
    """What one call needs on a fresh arena.

    Args:
        bytes_held: What the arena has taken from the device when the call ends.
        bytes_peak: The most that lived in it at one moment.
    """

    bytes_held: int
    bytes_peak: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The allocations and releases of one call, for any number of rows.

    Args:
        sizes: Bytes of each buffer and workspace.
        events: What happens in order: `i + 1` allocates buffer `i`, `-(i + 1)` releases it.
    """

    sizes: tuple[Linear, ...]
    events: tuple[int, ...]

    def use(self, rows: int, policy: ArenaPolicy) -> ArenaUse | None:
        """Return what a call of `rows` needs on a fresh arena, `None` where it does not fit.

        Args:
            rows: Rows of the batch, >= 1.
            policy: How the arena grows, and its limit.
        """
        arena = Arena(policy)
        sizes = [round(size(rows)) for size in self.sizes]
        try:
            for event in self.events:
                if event > 0:
                    arena.allocate(event, sizes[event - 1])
                else:
                    arena.release(-event)
        except ArenaFullError:
            return None
        return ArenaUse(bytes_held=arena.bytes_held, bytes_peak=arena.bytes_used_peak)

    def peak(self) -> Linear:
        """Return the peak of what lives at one moment, as a line that is not below it up to 64 rows.

        The true peak is the largest of many lines, so it lies below a line through two of its points.
        """
        first, second = (self._peak(rows) for rows in LINE_ROWS)
        return Linear.through(LINE_ROWS, (first, second))

    def _peak(self, rows: int) -> float:
        now = peak = 0.0
        for event in self.events:
            size = max(0.0, self.sizes[abs(event) - 1](rows))
            now += size if event > 0 else -size
            peak = max(peak, now)
        return peak


def memory_plan(
    plan: BufferPlan,
    sizes: Mapping[str, Linear],
    workspaces: Mapping[str, tuple[Linear, ...]],
    *,
    resident: int = 0,
) -> MemoryPlan:
    """Return the plan with sizes put in.

    Args:
        plan: When which tensor gets memory.
        sizes: Bytes of each tensor; one that is not named takes none.
        workspaces: Bytes of what a node takes while it runs, in order, by the node's name.
        resident: Bytes in the arena before the call.
    """
    lines: list[Linear] = []
    events: list[int] = []
    numbers: dict[str, int] = {}
    if resident:
        lines.append(Linear(float(resident), 0.0))
        events.append(1)
    for step in plan.steps:
        for name in step.allocated:
            if name in sizes:
                lines.append(sizes[name])
                numbers[name] = len(lines)
                events.append(len(lines))
        pieces = workspaces.get(step.node, ())
        first = len(lines) + 1
        lines.extend(pieces)
        events.extend(range(first, first + len(pieces)))
        events.extend(range(-first, -first - len(pieces), -1))
        events.extend(-numbers[name] for name in step.released if name in numbers)
    return MemoryPlan(tuple(lines), tuple(events))


def largest_batch(plan: MemoryPlan, policy: ArenaPolicy, *, rows_max: int) -> int:
    """Return the most rows that fit on a fresh arena; 0 where not even one does.

    Args:
        plan: The call.
        policy: The arena, with its limit.
        rows_max: Never more than this.
    """
    fits, fails = 0, rows_max + 1
    rows = 1
    while fits < rows < fails:
        if plan.use(rows, policy) is None:
            fails = rows
        else:
            fits = rows
        rows = min(2 * rows, rows_max) if fails > rows_max else (fits + fails) // 2
    return fits
