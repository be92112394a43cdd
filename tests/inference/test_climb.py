"""The climb to the batch size that is worth it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sits_dagster.errors import ConfigError, DeviceOutOfMemoryError
from sits_dagster.inference.climb import Climb, ClimbEnd, climb

FULL = "the device is full"


def test_a_rising_curve_is_climbed_to_its_plateau_and_no_further() -> None:
    """A fifth of a full batch's time is fixed: larger batches gain less and less."""
    found = climb(lambda rows: 0.002 + 0.001 * rows, rows_max=4096)
    plateau = 1 / 0.001
    assert found.end is ClimbEnd.FLAT
    best = max(trial.rows_per_second for trial in found.trials)
    assert found.rows / (0.002 + 0.001 * found.rows) >= 0.95 * best
    assert best >= 0.93 * plateau
    assert found.trials[-1].rows < 4096, "nothing is measured behind the plateau"


def test_a_falling_curve_keeps_the_smallest_batch() -> None:
    """Nets that leave the cache are fastest alone."""
    found = climb(lambda rows: 0.01 * rows**1.3, rows_max=1024)
    assert found.rows == 1
    assert len(found.trials) == 3


def test_a_dip_does_not_end_the_climb() -> None:
    """One size without a gain may lie before a better one."""
    speeds = {1: 100.0, 2: 99.0, 4: 150.0, 8: 152.0, 16: 151.0}
    found = climb(lambda rows: rows / speeds[rows], rows_max=64)
    assert found.rows == 4


def test_memory_ends_it_with_what_fits() -> None:
    """A size that does not fit is not used, and not tried twice."""
    asked: list[int] = []

    def measure(rows: int) -> float:
        asked.append(rows)
        if rows > 8:
            raise DeviceOutOfMemoryError(FULL, batch_rows=rows)
        return 1.0

    found = climb(measure, rows_max=1024)
    assert (found.rows, found.end) == (8, ClimbEnd.OUT_OF_MEMORY)
    assert asked == [1, 2, 4, 8, 16]


def test_a_row_that_does_not_fit_alone_is_the_callers_matter() -> None:
    """There is no batch to choose."""

    def measure(rows: int) -> float:
        raise DeviceOutOfMemoryError(FULL, batch_rows=rows)

    with pytest.raises(DeviceOutOfMemoryError):
        climb(measure, rows_max=4)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_the_limit_itself_is_measured(limit: int, sizes: list[int]) -> None:
    """It may be the best batch, and lie between two powers of two."""
    found = climb(lambda _: 1.0, rows_max=limit)
    assert [trial.rows for trial in found.trials] == sizes
    assert (found.rows, found.end) == (limit, ClimbEnd.LIMIT)


def test_measuring_ends_in_time() -> None:
    """A size that would take too long is not tried; what was measured decides."""
    found = climb(lambda rows: 1.0 + 0.01 * rows, rows_max=1024, seconds_max=10.0)
    assert found.end is ClimbEnd.TIME
    assert sum(trial.seconds for trial in found.trials) <= 10.0
    assert found.rows == found.trials[-1].rows


def test_a_limit_without_rows_is_refused() -> None:
    """It is a mistake of the caller."""
    with pytest.raises(ConfigError, match="rows_max"):
        climb(lambda _: 1.0, rows_max=0)


@given(fixed=st.floats(0, 1), per_row=st.floats(1e-6, 1), limit=st.integers(1, 2000))
def test_what_is_chosen_is_nearly_the_best_of_what_was_measured(
    fixed: float, per_row: float, limit: int
) -> None:
    """And no smaller measured batch is."""
    found: Climb = climb(lambda rows: fixed + per_row * rows, rows_max=limit)
    best = max(trial.rows_per_second for trial in found.trials)
    good = [trial.rows for trial in found.trials if trial.rows_per_second >= 0.95 * best]
    assert found.rows == min(good) <= limit
