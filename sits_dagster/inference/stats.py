"""What a run did: counters while it goes on, one frozen value when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["DeviceCall", "PartitionStats", "Progress"]

TRACE_POINTS_MAX = 512
SUMMED = (
    "rows_total",
    "rows_resumed",
    "rows_carried",
    "rows_kept",
    "rows_done",
    "rows_written",
    "rows_quarantined",
    "rows_predicted",
    "segments",
    "batches",
    "out_of_memory",
    "device_seconds",
    "cells",
    "cells_padded",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCall:
    """One call of the device, thinned out for the picture.

    Args:
        at_seconds: When it ended, from the first call's start.
        rows: Its rows.
        memory_bytes: What the device held after it, or `None`.
    """

    at_seconds: float
    rows: int
    memory_bytes: int | None


@dataclass(slots=True)
class Progress:
    """Counters of a partition's run; written by the pipeline, read by whoever reports.

    Args:
        rows_total: Input rows of the partition.
        rows_resumed: Input rows that were committed before.
        rows_carried: Rows whose results a stopped run had left ready.
        rows_kept: Rows whose results this run leaves ready, as it was stopped.
        batching: Whether rows may share a batch; `""` while unknown.
    """

    rows_total: int = 0
    rows_resumed: int = 0
    rows_carried: int = 0
    rows_kept: int = 0
    rows_done: int = 0
    rows_written: int = 0
    rows_quarantined: int = 0
    rows_predicted: int = 0
    segments: int = 0
    batches: int = 0
    out_of_memory: int = 0
    device_seconds: float = 0.0
    first_call_at: float | None = None
    last_call_ended_at: float = 0.0
    cells: int = 0
    cells_padded: int = 0
    memory_bytes_peak: int = 0
    batching: str = ""
    trace: list[DeviceCall] = field(default_factory=list[DeviceCall])
    _stride: int = 1

    def add_call(self, *, started: float, ended: float, rows: int, memory_bytes: int | None) -> None:
        """Take in one device call; times in seconds of one clock."""
        # Several threads may account for calls, not always in the calls' order.
        self.first_call_at = started if self.first_call_at is None else min(self.first_call_at, started)
        self.last_call_ended_at = max(self.last_call_ended_at, ended)
        self.device_seconds += ended - started
        self.rows_predicted += rows
        self.memory_bytes_peak = max(self.memory_bytes_peak, memory_bytes or 0)
        if self.batches % self._stride == 0:
            self.trace.append(
                DeviceCall(at_seconds=ended - self.first_call_at, rows=rows, memory_bytes=memory_bytes)
            )
            if len(self.trace) > TRACE_POINTS_MAX:
                self.trace = self.trace[::2]
                self._stride *= 2
        self.batches += 1

    @staticmethod
    def total(parts: Sequence[Progress]) -> Progress:
        """Return the sum of several steps' counters; times add up, as if one step had followed the other."""
        found = Progress()
        for name in SUMMED:
            setattr(found, name, sum(getattr(part, name) for part in parts))
        found.batching = ", ".join(sorted({part.batching for part in parts if part.batching}))
        found.memory_bytes_peak = max((part.memory_bytes_peak for part in parts), default=0)
        if found.batches:
            found.first_call_at = 0.0
            found.last_call_ended_at = sum(part.wall_seconds for part in parts)
            longest = max(parts, key=lambda part: part.batches)
            found.trace = longest.trace
        return found

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first device call's start to the last one's end."""
        return self.last_call_ended_at - self.first_call_at if self.first_call_at is not None else 0.0

    @property
    def busy_fraction(self) -> float | None:
        """Share of that time inside a device call, 0 to 1; `None` before the first call."""
        return self.device_seconds / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def rows_per_second(self) -> float | None:
        """Rows through the device a second; `None` before the first call."""
        return self.rows_predicted / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def rows_known(self) -> int:
        """Rows that have a result by now, whoever computed it."""
        known = self.rows_resumed + max(self.rows_carried + self.rows_predicted, self.rows_done)
        return min(known, self.rows_total)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the partition is done at the present speed; `None` while unknown."""
        speed = self.rows_per_second
        return (self.rows_total - self.rows_known) / speed if speed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStats:
    """What one run did for one partition.

    Args:
        rows: Input rows of the partition.
        rows_written: Output rows of the partition, earlier runs' included.
        rows_quarantined: Rows without output, earlier runs' included.
        rows_resumed: Input rows that earlier runs had committed.
        rows_carried: Rows whose results a stopped run had left ready.
        rows_recomputed: Rows that earlier runs had put through the device and lost.
        batches: Device calls of this run.
        segments: Commits of this run.
        device_seconds: Time inside the device calls.
        busy_fraction: Share of the time from first to last call inside calls; `None` without calls.
        rows_per_second: Rows through the device a second; `None` without calls.
        padding_share: Padded cells that hold no data, 0 to 1.
        memory_bytes_peak: Most that the device held; 0 where unknown.
        out_of_memory: Calls that the device had no memory for.
        is_complete: Whether the partition's output is published.
        generation: Name of the generation.
        quarantine: Folder of the quarantined rows, or `""`.
        trace: Some device calls over time.
        notes: Sentences about what was found.
        batching: Whether rows may share a batch; `""` where nothing was computed.
    """

    rows: int
    rows_written: int
    rows_quarantined: int
    rows_resumed: int
    rows_carried: int
    rows_recomputed: int
    batches: int
    segments: int
    device_seconds: float
    busy_fraction: float | None
    rows_per_second: float | None
    padding_share: float
    memory_bytes_peak: int
    out_of_memory: int
    is_complete: bool
    generation: str
    quarantine: str
    trace: tuple[DeviceCall, ...] = ()
    notes: tuple[str, ...] = ()
    batching: str = ""
