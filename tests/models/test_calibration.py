"""A calibration is measured where batches fit, and holds for the device that was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError
from sits_dagster.models.arena import ArenaPolicy, ExtendStrategy
from sits_dagster.models.batching import Batching, BatchingReport
from sits_dagster.models.calibration import Probe, calibrate
from sits_dagster.models.cost import KernelCost
from sits_dagster.models.inputs import InputShapes
from sits_dagster.models.linear import Linear
from sits_dagster.models.memory import MemoryPlan
from sits_dagster.models.profile import ModelProfile

MIB = 1 << 20
EXACT = ArenaPolicy(strategy=ExtendStrategy.SAME_AS_REQUESTED)


@dataclass
class _Device:
    """A device on which a batch holds what a function says, and that takes batches up to a limit."""

    held: Callable[[int], int]
    rows_max: int = 1000
    policy: ArenaPolicy = EXACT
    device: str = "made up"
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def probe(self, rows: Sequence[int]) -> Sequence[Probe]:
        self.asked.append(tuple(rows))
        if max(rows) > self.rows_max:
            msg = "too much"
            raise DeviceOutOfMemoryError(msg, batch_rows=max(rows))
        return [Probe(rows=n, bytes_held=self.held(n), seconds=0.25 + n / 64) for n in rows]


def _kernels(count: int) -> tuple[KernelCost, ...]:
    return (KernelCost(operator="Neg", flops=Linear(0, 1e6), bytes_moved=Linear(0, 1e6)),) * count


def _profile(**changes: Any) -> ModelProfile:
    """One buffer of a MiB a row."""
    known: dict[str, Any] = {
        "name": "m",
        "digest": "0" * 64,
        "inputs": (),
        "outputs": (),
        "lengths": {},
        "input_shapes": InputShapes(
            axes={"x": 0}, lengths={"x": (1, 8)}, assumed={}, rows_fixed=None, free={}
        ),
        "parameters": 0,
        "parameter_bytes": 0,
        "parameter_bytes_by_type": {},
        "kernels": _kernels(8),
        "memory_plan": MemoryPlan((Linear(0, MIB),), (1,)),
        "memory_source": "optimized",
        "batching": BatchingReport(verdict=Batching.INVARIANT),
    }
    return ModelProfile(**{**known, **changes})


def _held(rows: int) -> int:
    """Three MiB and a quarter of a MiB a row beyond the replay."""
    return 3 * MIB + rows * MIB + rows * MIB // 4


def test_two_batches_correct_the_memory_and_four_the_time() -> None:
    """What is beyond the replay is a line through batches of 8 and 16 rows; it holds as the arena grew."""
    device = _Device(_held)
    found = calibrate(_profile(), device)
    assert device.asked == [(1, 2, 4, 8, 16, 32)]
    assert found.calibration is not None
    assert found.calibration.correction == Linear(3 * MIB, MIB / 4)
    assert found.calibration.probes == {8: _held(8), 16: _held(16)}
    assert (found.calibration.device, found.calibration.strategy) == ("made up", EXACT.strategy)
    assert found.held(100, EXACT) == _held(100)
    assert found.held(100) == _profile().held(100), "another arena was not measured"
    assert found.time_model is not None
    assert found.time_model.rows_measured == (1, 2, 4, 8, 16, 32)


def test_without_time_only_memory_is_measured() -> None:
    """Two batches are enough for it."""
    device = _Device(_held)
    calibrate(_profile(), device, with_time=False)
    assert device.asked == [(8, 16)]


@pytest.mark.parametrize(("rows_max", "rows"), [(9, (4, 8)), (4, (2, 4)), (3, (1, 2)), (2, (1, 2))])
def test_halves_correct_by_a_line_too(rows_max: int, rows: tuple[int, int]) -> None:
    """The largest two that fit tell how the correction grows; a constant would be short for larger ones."""
    found = calibrate(_profile(), _Device(_held, rows_max=rows_max))
    assert found.calibration is not None
    assert tuple(found.calibration.probes) == rows
    assert found.calibration.correction == Linear(3 * MIB, MIB / 4)


def test_one_row_corrects_by_a_constant() -> None:
    """Nothing tells how it grows."""
    found = calibrate(_profile(), _Device(_held, rows_max=1))
    assert found.calibration is not None
    assert found.calibration.correction == Linear(3 * MIB + MIB // 4, 0)


def test_rows_that_must_be_alone_are_measured_alone() -> None:
    """Such a model may refuse a batch, and none is ever run."""
    device = _Device(_held)
    found = calibrate(_profile(batching=BatchingReport(verdict=Batching.NOT_BATCHABLE)), device)
    assert device.asked == [(1,)]
    assert found.held(1, EXACT) == _held(1)


def test_a_fixed_batch_is_measured_as_it_is() -> None:
    """Half of it is no batch of that file: where it does not fit, nothing does."""
    device = _Device(_held)
    calibrate(_profile(batch_rows_fixed=4), device)
    assert device.asked == [(4,)]
    small = _Device(_held, rows_max=3)
    with pytest.raises(ConfigError, match="a batch of 4 rows fits on made up"):
        calibrate(_profile(batch_rows_fixed=4), small)
    assert small.asked == [(4,)]


def test_a_device_that_is_too_small_is_named() -> None:
    """Halving ends with one row."""
    device = _Device(_held, rows_max=0)
    with pytest.raises(ConfigError, match="a batch of one row fits on made up"):
        calibrate(_profile(), device)
    assert device.asked[-1] == (1,)


@pytest.mark.parametrize(("optimized", "kernels"), [((), 8), (_kernels(3), 3)], ids=["file", "optimised"])
def test_times_are_those_of_the_graph_that_ran(optimized: tuple[KernelCost, ...], kernels: int) -> None:
    """Fused calls are launched once: the launch gap is shared by as many as there are."""
    found = calibrate(_profile(kernels_optimized=optimized), _Device(_held))
    assert found.time_model is not None
    assert sum(group.kernels for group in found.time_model.kernels) == kernels
