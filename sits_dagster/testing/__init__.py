"""Fakes with fault schedules, for this package's tests and for those of its users."""

from __future__ import annotations

from sits_dagster.testing.engines import FakeEngine
from sits_dagster.testing.memory_rows import MemoryRows
from sits_dagster.testing.memory_store import (
    FaultyStore,
    MemoryFormat,
    MemoryStore,
    SimulatedCrash,
    SteppedStore,
)
from sits_dagster.testing.trial import Trial, visible_files

__all__ = [
    "FakeEngine",
    "FaultyStore",
    "MemoryFormat",
    "MemoryRows",
    "MemoryStore",
    "SimulatedCrash",
    "SteppedStore",
    "Trial",
    "visible_files",
]
